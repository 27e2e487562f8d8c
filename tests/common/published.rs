// SPDX-License-Identifier: Apache-2.0
//! A machine of its own for a test: the published library, what it wants of an
//! NPU's software, and nothing that another test or the real machine can disturb.
//!
//! A test calls [`enter`] first. That runs the test once more, in a process with
//! private mounts, where `/etc` names a driver, and a private network, because the
//! library listens on ports that it counts up from 11000. Whatever the test starts
//! from there is inside too.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::emulator::built;

/// The environment variable with the path of the published `libmf_smem.so`.
pub const LIBRARY: &str = "MEMFABRIC_PUBLISHED_LIBRARY";

const INSIDE: &str = "MEMFABRIC_PUBLISHED_INSIDE";

/// `$0` is the folder of [`lay_out`], `$@` what to run. The machine's `/etc` is
/// only looked through, so nothing can be written there.
const ENTER: &str = "ip link set lo up &&
    mount -t overlay overlay -o \"lowerdir=$0/etc:/etc\" /etc &&
    exec \"$@\"";

/// Whether this is the inside, where the test `name` goes on. Outside, it has
/// been run inside and has passed, or it says why it cannot be.
pub fn enter(name: &str) -> bool {
    enter_with(name, &[], 1)
}

/// As [`enter`], with variables that the inside has beside the others, in so many
/// insides at once.
pub fn enter_with(name: &str, variables: &[(&str, &str)], insides: usize) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    std::thread::scope(|scope| {
        for _ in 0..insides {
            scope.spawn(|| {
                if let Err(why) = run_inside(name, variables) {
                    println!("skipped: {why}");
                }
            });
        }
    });
    false
}

fn run_inside(name: &str, variables: &[(&str, &str)]) -> Result<(), String> {
    let library = std::env::var_os(LIBRARY)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{LIBRARY} does not name the published libmf_smem.so"))?;
    let folder = tempfile::tempdir().expect("there is room for a folder");
    lay_out(&folder);
    let privileges = privileges(&folder)?;
    let program = std::env::current_exe().expect("the running program has a path");
    let output = inside(privileges, &folder, &program)
        .args(["--exact", name, "--include-ignored", "--nocapture"])
        .env(INSIDE, "1")
        .env("ASCEND_HOME_PATH", folder.path())
        .env("LD_LIBRARY_PATH", search_path(&library, &folder))
        // Or each process takes 8 GiB.
        .env("MF_HCOM_MAX_SEND_RECV_DATA_CNT", "16")
        .envs(variables.iter().copied())
        .output()
        .expect("unshare was found before");
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(passed, "{name}, inside: {}\n{text}{errors}", output.status);
    Ok(())
}

/// The files that the library looks for.
fn lay_out(folder: &TempDir) {
    let stub = built("libascend_stub.so");
    let folder = folder.path();
    for part in ["etc", "driver", "lib64"] {
        fs::create_dir(folder.join(part)).expect("the folder is ours");
    }
    for name in ascend_stub::NAMES {
        symlink(&stub, folder.join("lib64").join(name)).expect("the folder is ours");
    }
    let here = format!("Driver_Install_Path_Param={}\n", folder.display());
    for (file, text) in [
        ("etc/ascend_install.info", here.as_str()),
        (
            "driver/version.info",
            "Innerversion=V100R001C23SPC006B220\n",
        ),
    ] {
        fs::write(folder.join(file), text).expect("the folder is ours");
    }
}

/// What a process needs to be put inside, by `unshare`'s options: nothing more
/// where the user may mount, else to be root of a user namespace.
fn privileges(folder: &TempDir) -> Result<&'static [&'static str], String> {
    let mut words = Vec::new();
    for privileges in [&[][..], &["--user", "--map-root-user"]] {
        let output = inside(privileges, folder, Path::new("true"))
            .output()
            .map_err(|error| format!("unshare cannot be run: {error}"))?;
        if output.status.success() {
            return Ok(privileges);
        }
        words.push(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let words = words.join("; ");
    Err(format!("no private mounts and network here: {words}"))
}

/// `program`, inside.
fn inside(privileges: &[&str], folder: &TempDir, program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "--net"])
        .args(privileges)
        .args(["sh", "-c", ENTER])
        .args([folder.path(), program]);
    command
}

/// The published library's folder, and the stand-ins', before what there is.
fn search_path(library: &Path, folder: &TempDir) -> OsString {
    let own = library.parent().expect("a file is in a folder").to_owned();
    let found = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let others = std::env::split_paths(&found).filter(|path| !path.as_os_str().is_empty());
    let paths = [own, folder.path().join("lib64")].into_iter().chain(others);
    std::env::join_paths(paths).expect("no folder here has a colon in its name")
}
