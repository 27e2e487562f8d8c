// SPDX-License-Identifier: Apache-2.0
//! `memfabric doctor`, on machines made up in a temporary directory.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use memfabric::integrate::edits::{EDITS, When};
use memfabric_transport::Library;
use memfabric_transport::vendor::v1;
use serde_json::Value;

const ARCH: &str = std::env::consts::ARCH;
const MEMFABRIC: &str = "/opt/memfabric";
const ENABLED: &str = r#"{"transports":{"memfabric":{"enable":true}}}"#;
const CANN: &str = "/usr/local/Ascend/ascend-toolkit/latest";
const SITE: &str = "/usr/lib/python3.11/site-packages";
const WHEEL: &str = "/usr/lib/python3.11/site-packages/memfabric_hybrid";
/// Where nobody listens.
const STORE: &str = "127.137.0.1:1025";

/// A machine's files, and the variables that the command is run with.
struct Host {
    root: tempfile::TempDir,
    variables: BTreeMap<String, String>,
}

impl Host {
    /// Nothing but folders.
    fn bare() -> Self {
        let host = Self {
            root: tempfile::tempdir().expect("temporary directory"),
            variables: BTreeMap::new(),
        };
        for folder in ["/dev", "/etc", "/proc", "/tmp", "/usr/lib"] {
            host.folder(folder);
        }
        host
    }

    /// A laptop: Python, 2 MB pages, no NPU, no MemFabric.
    fn laptop() -> Self {
        let mut host = Self::bare();
        host.file("/usr/bin/python3.11", "");
        host.link("/usr/bin/python3", "python3.11");
        host.folder(SITE);
        host.folder("/sys/class/infiniband");
        host.meminfo(2048, 0, 0);
        host.pool(2048, 0, 0);
        host.set("PATH", "/bin:/usr/bin");
        host
    }

    /// An Atlas host with 512 MB pages on which nothing is missing.
    fn atlas() -> Self {
        let mut host = Self::bare();
        host.library(
            &format!("{MEMFABRIC}/libmf_hybm_core.so"),
            "void hybm(void) {}",
            &[],
        );
        host.memfabric(MEMFABRIC, &Library::SYMBOLS, "");
        host.cann("9.0.0");
        for device in 0..8 {
            host.file(&format!("/dev/davinci{device}"), "");
        }
        host.file("/dev/davinci_manager", "");
        host.file("/etc/tent.json", ENABLED);
        host.meminfo(524_288, 400, 400);
        host.pool(2048, 0, 0);
        host.pool(524_288, 400, 400);
        host.set("LD_LIBRARY_PATH", &format!("{MEMFABRIC}:{CANN}/lib64"));
        host.set("MF_PROTOCOL", "device_rdma");
        host.set("MC_USE_TENT", "1");
        host.set("MC_TENT_CONF", "/etc/tent.json");
        host.set("MC_STORE_USE_HUGEPAGE", "1");
        host.set("MC_STORE_HUGEPAGE_SIZE", "512MB");
        host
    }

    /// An Atlas host with the published release, and all that it looks for.
    fn published() -> Self {
        let mut host = Self::atlas();
        host.wheel();
        for name in [
            "libascend_hal.so",
            "libra.so",
            "libtsdclient.so",
            "libhccl.so",
        ] {
            host.file(&format!("{CANN}/lib64/{name}"), "");
        }
        host.file(
            "/etc/ascend_install.info",
            "Driver_Install_Path_Param=/usr/local/Ascend\n",
        );
        host.file(
            "/usr/local/Ascend/driver/version.info",
            "Version=25.0\nInnerversion=V100R001C23SPC006B220\n",
        );
        host.set("ASCEND_HOME_PATH", CANN);
        host.set("MF_ABI", "v1");
        host.set("MF_CONFIG_STORE_URL", &format!("tcp://{STORE}"));
        host.set("MF_CONFIG_STORE_HOST", "true");
        host.set("MF_ROLE", "sender");
        host.set("MF_CONFIG_STORE_HEARTBEAT_TIMEOUT_S", "300");
        host
    }

    /// The release that pip installs, first on the linker's path.
    fn wheel(&mut self) {
        self.memfabric(
            &format!("{WHEEL}/lib"),
            &v1::Library::SYMBOLS,
            "unsigned smem_get_abi_version(void) { return 0x00010003; }",
        );
        self.file(
            &format!("{WHEEL}/VERSION"),
            "mf version info:\nmf version: 1.3.0\n",
        );
        self.set("LD_LIBRARY_PATH", &format!("{WHEEL}/lib:{CANN}/lib64"));
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.path().join(path.trim_start_matches('/'))
    }

    fn set(&mut self, name: &str, value: &str) {
        self.variables.insert(name.to_owned(), value.to_owned());
    }

    fn unset(&mut self, name: &str) {
        self.variables.remove(name);
    }

    fn folder(&self, path: &str) {
        fs::create_dir_all(self.at(path)).expect(path);
    }

    fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let at = self.at(path);
        fs::create_dir_all(at.parent().expect("a folder")).expect(path);
        fs::write(at, content).expect(path);
    }

    fn link(&self, path: &str, target: &str) {
        let at = self.at(path);
        fs::create_dir_all(at.parent().expect("a folder")).expect(path);
        symlink(target, at).expect(path);
    }

    fn remove(&self, path: &str) {
        let at = self.at(path);
        if at.is_dir() {
            fs::remove_dir_all(at).expect(path);
        } else {
            fs::remove_file(at).expect(path);
        }
    }

    /// Puts a shared object there that needs nothing but what `arguments` say.
    fn library(&self, path: &str, source: &str, arguments: &[&str]) {
        let name = path.rsplit('/').next().expect("a name");
        self.file(path, compiled(name, source, arguments));
    }

    /// A `libmf_smem.so` with these symbols, linked as the real one is.
    fn memfabric(&self, folder: &str, symbols: &[&str], more: &str) {
        let source: String = symbols
            .iter()
            .map(|symbol| format!("int {symbol}(void) {{ return 0; }}\n"))
            .collect();
        let core = self.at(folder).join("libmf_hybm_core.so");
        let core = core.to_string_lossy();
        let arguments: &[&str] = if Path::new(&*core).exists() {
            &["-Wl,--no-as-needed", &core]
        } else {
            &[]
        };
        self.library(
            &format!("{folder}/libmf_smem.so"),
            &(source + more),
            arguments,
        );
    }

    fn cann(&self, version: &str) {
        self.file(
            &format!("{CANN}/{ARCH}-linux/ascend_toolkit_install.info"),
            format!("package_name=Ascend-cann-toolkit\nversion={version}\narch={ARCH}\n"),
        );
        self.library(
            &format!("{CANN}/lib64/libascendcl.so"),
            "int aclrtGetDevice(void) { return 0; }\nint aclrtPointerGetAttributes(void) { return 0; }",
            &[],
        );
    }

    fn pool(&self, kb: u64, total: u64, free: u64) {
        let name = format!("hugepages-{kb}kB");
        let global = format!("/sys/kernel/mm/hugepages/{name}");
        for (file, value) in [("nr", total), ("free", free), ("resv", 0)] {
            self.file(&format!("{global}/{file}_hugepages"), format!("{value}\n"));
        }
        for (node, share) in [(0, total - total / 4), (1, total / 4)] {
            let local = format!("/sys/devices/system/node/node{node}/hugepages/{name}");
            for file in ["nr", "free"] {
                self.file(&format!("{local}/{file}_hugepages"), format!("{share}\n"));
            }
        }
    }

    fn meminfo(&self, default_kb: u64, total: u64, free: u64) {
        self.file(
            "/proc/meminfo",
            format!(
                "MemTotal:       1056509952 kB\nMemAvailable:   524288000 kB\nHugePages_Total:    {total}\n\
                 HugePages_Free:     {free}\nHugePages_Rsvd:        0\nHugepagesize:    {default_kb} kB\n"
            ),
        );
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_memfabric"));
        command
            .arg("doctor")
            .arg("--root")
            .arg(self.root.path())
            .args(arguments)
            .env_clear()
            .envs(&self.variables);
        command
    }

    fn doctor(&self, arguments: &[&str]) -> Diagnosis {
        let output = self
            .command(arguments)
            .arg("--json")
            .output()
            .expect("the command runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let errors = String::from_utf8_lossy(&output.stderr);
        Diagnosis {
            json: serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{error}: {text}{errors}")),
            status: output.status.code().expect("an exit status"),
        }
    }
}

/// A shared object, compiled once for all the tests that ask for it.
fn compiled(name: &str, source: &str, arguments: &[&str]) -> Vec<u8> {
    static DONE: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::new(BTreeMap::new());
    // Files are in another place for each test; what is in them counts.
    let inputs = arguments.iter().map(|argument| {
        let path = argument.rsplit('=').next().unwrap_or_default();
        fs::read(path).unwrap_or_else(|_| argument.as_bytes().to_vec())
    });
    let key = format!("{name} {source} {:?}", inputs.collect::<Vec<_>>());
    if let Some(bytes) = DONE.lock().expect("no test panics here").get(&key) {
        return bytes.clone();
    }
    let folder = tempfile::tempdir().expect("temporary directory");
    let object = folder.path().join(name);
    let mut child = Command::new("cc")
        .args(["-x", "c", "-", "-shared", "-fPIC", "-O1", "-nostdlib", "-o"])
        .arg(&object)
        .arg(format!("-Wl,-soname,{name}"))
        .args(["-x", "none"])
        .args(arguments)
        .stdin(Stdio::piped())
        .spawn()
        .expect("cc runs");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(source.as_bytes()).expect("source");
    drop(input);
    assert!(child.wait().expect("cc ends").success(), "{source}");
    let bytes = fs::read(object).expect("the object");
    let mut done = DONE.lock().expect("no test panics here");
    done.insert(key, bytes.clone());
    bytes
}

struct Diagnosis {
    json: Value,
    status: i32,
}

impl Diagnosis {
    fn findings(&self) -> impl Iterator<Item = &Value> {
        self.json["findings"].as_array().expect("findings").iter()
    }

    /// `level: found; needed; mend` of each finding of a check.
    fn of(&self, check: &str) -> Vec<String> {
        self.findings()
            .filter(|finding| finding["check"] == check)
            .map(|finding| {
                let text = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
                let mend: Vec<_> = finding["mend"].as_array().into_iter().flatten().collect();
                let mend: Vec<_> = mend.iter().filter_map(|line| line.as_str()).collect();
                let (level, found, needed) = (text("level"), text("found"), text("needed"));
                format!("{level}: {found}; {needed}; {}", mend.join(" && "))
            })
            .collect()
    }

    /// The only finding of a check.
    fn only(&self, check: &str) -> String {
        let mut all = self.of(check);
        assert_eq!(all.len(), 1, "{check}: {all:#?} in {:#}", self.json);
        all.remove(0)
    }
}

/// Fails unless `text` has each of the parts.
#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn an_atlas_host_with_everything_is_all_ok() {
    let host = Host::atlas();
    let diagnosis = host.doctor(&["--store-bytes", "200GB"]);
    let not_ok: Vec<_> = diagnosis
        .findings()
        .filter(|finding| finding["level"] != "ok")
        .collect();
    assert!(not_ok.is_empty(), "{not_ok:#?}");
    assert_eq!(diagnosis.status, 0);

    let checks: Vec<_> = diagnosis
        .findings()
        .map(|finding| finding["check"].as_str().expect("a name"))
        .collect();
    assert_eq!(
        checks,
        [
            "library",
            "dependencies",
            "bindings",
            "symbols",
            "abi version",
            "cann",
            "cann version",
            "npu devices",
            "MF_PROTOCOL",
            "protocol fit",
            "MF_TRANSFER_TIMEOUT",
            "MC_USE_TENT",
            "MC_TENT_CONF",
            "enable",
            "keys",
            "policy",
            "hugepages",
            "hugepages",
            "MC_STORE_USE_HUGEPAGE",
            "MC_STORE_HUGEPAGE_SIZE",
            "store pages",
        ],
        "the order in which they can fail"
    );
    has(
        &diagnosis.of("hugepages")[1],
        &[
            "512MB: 400 reserved, 400 free",
            "node 0: 300 reserved, 300 free",
            "node 1: 100 reserved",
        ],
    );
    has(
        &diagnosis.only("store pages"),
        &["400 pages of 512MB for 214748364800 bytes"],
    );
    has(
        &diagnosis.only("cann version"),
        &["9.0.0 in ", "9.0.0 or later"],
    );
    has(
        &diagnosis.only("npu devices"),
        &["8 (davinci0 ", "aclrtSetDevice"],
    );
}

#[test]
fn a_laptop_is_told_each_thing_that_is_missing() {
    let diagnosis = Host::laptop().doctor(&[]);
    assert_eq!(diagnosis.status, 2);
    for check in [
        "library",
        "cann",
        "npu devices",
        "MF_PROTOCOL",
        "MC_USE_TENT",
        "MC_TENT_CONF",
    ] {
        let text = diagnosis.only(check);
        assert!(text.starts_with("problem: "), "{text}");
        assert!(!text.ends_with("; "), "nothing mends {text}");
    }
    has(
        &diagnosis.only("library"),
        &[
            "libmf_smem.so not found",
            "pip install \"$MEMFABRIC_WHEEL\"",
        ],
    );
    has(
        &diagnosis.only("MF_PROTOCOL"),
        &["MF_PROTOCOL must be set", "device_uboe"],
    );
    has(&diagnosis.only("MC_USE_TENT"), &["export MC_USE_TENT=1"]);
    // What was not asked for is no fault.
    has(&diagnosis.only("MC_STORE_USE_HUGEPAGE"), &["ok: unset"]);
}

#[test]
fn a_container_without_sys_is_told_what_meminfo_has() {
    let mut host = Host::atlas();
    host.remove("/sys");
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 1, "{:#}", diagnosis.json);
    has(
        &diagnosis.only("hugepages"),
        &[
            "warning: there is no /sys/kernel/mm/hugepages",
            "/proc/meminfo has 512MB: 400 reserved, 400 free",
        ],
    );
    has(&diagnosis.only("MC_STORE_HUGEPAGE_SIZE"), &["ok: 512MB"]);

    host.remove("/proc");
    has(
        &host.doctor(&[]).only("MC_STORE_HUGEPAGE_SIZE"),
        &["warning: 512MB; the machine's sizes are unknown"],
    );

    // Nobody asks for huge pages: then nobody needs to know.
    host.unset("MC_STORE_USE_HUGEPAGE");
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 0, "{:#}", diagnosis.json);
    has(
        &diagnosis.only("MC_STORE_HUGEPAGE_SIZE"),
        &["without effect"],
    );
}

#[test]
fn nothing_is_changed() {
    fn tree(folder: &Path, into: &mut BTreeMap<PathBuf, (std::time::SystemTime, Vec<u8>)>) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            let modified = entry
                .metadata()
                .expect("metadata")
                .modified()
                .expect("a time");
            if path.is_dir() {
                into.insert(path.clone(), (modified, Vec::new()));
                tree(&path, into);
            } else {
                into.insert(
                    path.clone(),
                    (modified, fs::read(&path).unwrap_or_default()),
                );
            }
        }
    }
    let host = Host::atlas();
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    tree(host.root.path(), &mut before);
    host.doctor(&["--store-bytes", "1TB"]);
    tree(host.root.path(), &mut after);
    assert_eq!(before, after);
}

#[test]
fn the_text_has_one_line_a_finding_and_a_sum() {
    let mut host = Host::atlas();
    host.unset("MC_USE_TENT");
    host.set("MF_TRANSFER_TIMEOUT", "soon");
    let output = host.command(&[]).output().expect("the command runs");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let json = host.doctor(&[]).json;
    let count = json["findings"].as_array().expect("findings").len();
    assert_eq!(text.lines().count(), count + 1, "{text}");
    has(
        &text,
        &[
            "ok       library: /opt/memfabric/libmf_smem.so, from LD_LIBRARY_PATH\n",
            "warning  MF_TRANSFER_TIMEOUT: ",
            "problem  MC_USE_TENT: unset: the classic engine runs, without memfabric; needed: set; mend: export MC_USE_TENT=1\n",
            " ok, 1 warnings, 1 problems\n",
        ],
    );
}

#[test]
fn the_json_keeps_its_shape() {
    for host in [Host::atlas(), Host::laptop()] {
        let Diagnosis { json, status } = host.doctor(&[]);
        assert_eq!(json["exit_status"], status);
        let keys = |value: &Value| -> Vec<String> {
            value
                .as_object()
                .expect("an object")
                .keys()
                .cloned()
                .collect()
        };
        assert_eq!(keys(&json), ["exit_status", "findings", "level"]);
        let levels = ["ok", "warning", "problem"];
        assert_eq!(json["level"], levels[status as usize]);
        for finding in json["findings"].as_array().expect("findings") {
            for key in keys(finding) {
                let value = &finding[key.as_str()];
                match key.as_str() {
                    "check" | "found" | "needed" => assert!(value.is_string(), "{finding}"),
                    "level" => assert!(levels.iter().any(|level| value == level), "{finding}"),
                    "mend" => {
                        let lines = value.as_array().expect("a list");
                        assert!(!lines.is_empty() && lines.iter().all(Value::is_string));
                    }
                    other => panic!("a key that nobody documented: {other}"),
                }
            }
        }
    }
}

// The library.

#[test]
fn a_library_that_only_python_has_is_found_with_its_export_line() {
    let mut host = Host::laptop();
    let folder = format!("{SITE}/memfabric_hybrid/lib");
    host.memfabric(&folder, &Library::SYMBOLS, "");
    has(
        &host.doctor(&[]).only("library"),
        &[
            "problem: libmf_smem.so not found on the linker's path",
            &format!("it is in Python's site-packages: {folder}/libmf_smem.so"),
            &format!("export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH"),
        ],
    );

    // The environment's own packages count before the system's.
    host.link("/home/u/venv/bin/python3", "/usr/bin/python3.11");
    let own = "/home/u/venv/lib/python3.11/site-packages/memfabric_hybrid/lib";
    host.memfabric(own, &Library::SYMBOLS, "");
    host.set("PATH", "/home/u/venv/bin:/usr/bin");
    has(
        &host.doctor(&[]).only("library"),
        &[&format!("export LD_LIBRARY_PATH={own}:")],
    );

    // And with the line, it is found.
    host.set("LD_LIBRARY_PATH", own);
    has(
        &host.doctor(&[]).only("library"),
        &[&format!("ok: {own}/libmf_smem.so, from LD_LIBRARY_PATH")],
    );
}

#[test]
fn the_library_is_looked_for_in_the_linkers_order() {
    let mut host = Host::laptop();
    host.set("MC_USE_TENT", "1");
    // From the last place to the first, each wins over those before it.
    host.memfabric("/usr/lib", &Library::SYMBOLS, "");
    has(
        &host.doctor(&[]).only("library"),
        &["ok: /usr/lib/libmf_smem.so, from a default folder"],
    );

    host.memfabric("/opt/cached", &Library::SYMBOLS, "");
    host.file(
        "/etc/ld.so.cache",
        cache(&[("libmf_smem.so", "/opt/cached/libmf_smem.so")]),
    );
    has(
        &host.doctor(&[]).only("library"),
        &["ok: /opt/cached/libmf_smem.so, from the linker's cache"],
    );

    // The module that opens the library.
    host.memfabric("/opt/beside", &Library::SYMBOLS, "");
    let engine = format!("{SITE}/mooncake/engine.cpython-311-{ARCH}-linux-gnu.so");
    host.library(
        &engine,
        "void engine(void) {}",
        &["-Wl,--enable-new-dtags,-rpath,/opt/beside"],
    );
    has(
        &host.doctor(&[]).only("library"),
        &[
            "ok: /opt/beside/libmf_smem.so, from the run path of",
            &engine,
        ],
    );

    host.memfabric("/opt/named", &Library::SYMBOLS, "");
    host.set("LD_LIBRARY_PATH", "/nowhere:/opt/named");
    has(
        &host.doctor(&[]).only("library"),
        &["ok: /opt/named/libmf_smem.so, from LD_LIBRARY_PATH"],
    );

    // The older kind of run path comes before the variable.
    host.library(
        &engine,
        "void engine(void) {}",
        &["-Wl,--disable-new-dtags,-rpath,/opt/beside"],
    );
    has(
        &host.doctor(&[]).only("library"),
        &["ok: /opt/beside/libmf_smem.so, from the run path of"],
    );

    has(
        &host
            .doctor(&["--library", "/opt/cached/libmf_smem.so"])
            .only("library"),
        &["ok: /opt/cached/libmf_smem.so, as given"],
    );
}

#[test]
fn an_entry_of_the_variable_that_is_not_there_is_named() {
    let mut host = Host::laptop();
    host.set("LD_LIBRARY_PATH", "/usr/lib:/opt/memfabrik/lib");
    let text = host.doctor(&[]).only("library");
    has(
        &text,
        &["LD_LIBRARY_PATH names /opt/memfabrik/lib, which is not there"],
    );
    assert!(!text.contains("names /usr/lib,"), "{text}");
}

#[test]
fn what_the_linker_cannot_load_is_told_with_the_reason() {
    let host = Host::atlas();
    let path = format!("{MEMFABRIC}/libmf_smem.so");
    for (content, reason) in [
        (&b""[..], "it is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "do not begin with an ELF header",
        ),
        (b"\x7fELF", "is no shared object"),
    ] {
        host.file(&path, content);
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 2);
        has(&diagnosis.only("library"), &["problem: ", &path, reason]);
        assert!(diagnosis.of("symbols").is_empty(), "nothing to look at");
    }
    has(
        &host.doctor(&["--library", "/opt"]).only("library"),
        &["/opt cannot be read"],
    );
    has(
        &host.doctor(&["--library", "/opt/no.so"]).only("library"),
        &["problem: ", "/opt/no.so"],
    );
}

#[test]
fn a_file_for_another_machine_is_passed_over() {
    let host = Host::atlas();
    let path = format!("{MEMFABRIC}/libmf_smem.so");
    let mut bytes = fs::read(host.at(&path)).expect("the library");
    bytes[18..20].copy_from_slice(&2_u16.to_ne_bytes());
    host.file(&path, &bytes);
    has(
        &host.doctor(&[]).only("library"),
        &[
            "not found",
            &format!("{path} is passed over, it is for SPARC, this machine is {ARCH}"),
        ],
    );
    host.library("/usr/lib/libmf_hybm_core.so", "void hybm(void) {}", &[]);
    host.memfabric("/usr/lib", &Library::SYMBOLS, "");
    has(
        &host.doctor(&[]).only("library"),
        &["ok: /usr/lib/libmf_smem.so"],
    );
}

#[test]
fn a_dependency_that_is_missing_is_named_with_who_needs_it() {
    let mut host = Host::atlas();
    host.unset("LD_LIBRARY_PATH");
    let path = format!("{MEMFABRIC}/libmf_smem.so");
    let diagnosis = host.doctor(&["--library", &path]);
    assert_eq!(diagnosis.status, 2);
    has(
        &diagnosis.only("dependencies"),
        &[
            &format!("libmf_hybm_core.so not found on the linker's path (needed by {path})"),
            &format!("export LD_LIBRARY_PATH={MEMFABRIC}:$LD_LIBRARY_PATH"),
        ],
    );
    has(&diagnosis.only("bindings"), &["warning: not looked at"]);

    host.remove(&format!("{MEMFABRIC}/libmf_hybm_core.so"));
    has(
        &host.doctor(&["--library", &path]).only("dependencies"),
        &["ldconfig -p | grep libmf_hybm_core.so"],
    );
}

#[test]
fn a_run_path_of_the_library_is_followed() {
    let host = Host::atlas();
    let core = host.at(&format!("{MEMFABRIC}/core/libmf_hybm_core.so"));
    host.library(
        &format!("{MEMFABRIC}/core/libmf_hybm_core.so"),
        "void hybm(void) {}",
        &[],
    );
    host.remove(&format!("{MEMFABRIC}/libmf_hybm_core.so"));
    let source: String = Library::SYMBOLS
        .iter()
        .map(|symbol| format!("int {symbol}(void) {{ return 0; }}\n"))
        .collect();
    let core = core.to_string_lossy();
    host.library(
        &format!("{MEMFABRIC}/libmf_smem.so"),
        &source,
        &["-Wl,--no-as-needed", &core, "-Wl,-rpath,$ORIGIN/core"],
    );
    assert_eq!(
        host.doctor(&[]).only("dependencies"),
        "ok: 1, all found; ; "
    );
}

#[test]
fn a_version_that_a_dependency_lacks_is_told_as_the_linker_words_it() {
    let host = Host::atlas();
    let core = format!("{MEMFABRIC}/libmf_hybm_core.so");
    let version = |name: &str| {
        let map = format!("/tmp/{name}.map");
        host.file(&map, format!("{name} {{ global: hybm; local: *; }};"));
        format!("-Wl,--version-script={}", host.at(&map).display())
    };
    host.library(&core, "void hybm(void) {}", &[&version("HYBM_2")]);
    host.memfabric(
        MEMFABRIC,
        &Library::SYMBOLS,
        "void hybm(void); void use(void) { hybm(); }",
    );
    assert_eq!(host.doctor(&[]).status, 0, "built against what is there");

    host.library(&core, "void hybm(void) {}", &[&version("HYBM_1")]);
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 2);
    has(
        &diagnosis.only("dependencies"),
        &[&format!(
            "{core}: version 'HYBM_2' not found (required by {MEMFABRIC}/libmf_smem.so)"
        )],
    );
}

#[test]
fn a_symbol_that_no_dependency_defines_is_a_warning() {
    let host = Host::atlas();
    host.memfabric(
        MEMFABRIC,
        &Library::SYMBOLS,
        "void absent(void); void use(void) { absent(); }\n__attribute__((weak)) void maybe(void); void try(void) { if (maybe) maybe(); }",
    );
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 1, "{:#}", diagnosis.json);
    let text = diagnosis.only("bindings");
    has(&text, &["warning: undefined: absent ("]);
    assert!(
        !text.contains("maybe"),
        "a weak symbol may be missing: {text}"
    );
}

#[test]
fn every_missing_symbol_is_named() {
    for missing in Library::SYMBOLS {
        let host = Host::atlas();
        let there: Vec<_> = Library::SYMBOLS
            .into_iter()
            .filter(|name| *name != missing)
            .collect();
        host.memfabric(MEMFABRIC, &there, "");
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 2);
        has(
            &diagnosis.only("symbols"),
            &[&format!("problem: missing {missing}: an older"), "all 13"],
        );
    }
    let host = Host::atlas();
    host.memfabric(MEMFABRIC, &[], "void other(void) {}");
    has(
        &host.doctor(&[]).only("symbols"),
        &["this is no MemFabric library"],
    );
}

#[test]
fn the_published_release_is_recognised_and_told_how_to_be_used() {
    let mut host = Host::atlas();
    host.wheel();
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 2);
    has(
        &diagnosis.only("symbols"),
        &[
            "problem: missing smem_trans_get_rpc_port, smem_trans_batch_copy, smem_trans_batch_status_query",
            "the published memfabric-hybrid 1.3.0, whose transfers are synchronous",
            "all 13 of the generation with asynchronous batches, or MF_ABI=v1 for this one",
            "; export MF_ABI=v1",
        ],
    );
    has(&diagnosis.only("abi version"), &["1.3 (0x00010003)"]);
    for check in ["MF_ABI", "MF_ROLE", "config store", "driver version"] {
        assert!(diagnosis.of(check).is_empty(), "{check} without opt-in");
    }

    // Without the file that says so, its code tells.
    host.remove(&format!("{WHEEL}/VERSION"));
    has(
        &host.doctor(&[]).only("symbols"),
        &["the published memfabric-hybrid 1.3, whose"],
    );
}

/// The real one, where the caller has it at hand.
#[test]
fn the_real_wheel_is_recognised() {
    let Some(path) = std::env::var_os("MEMFABRIC_PUBLISHED_LIBRARY") else {
        eprintln!("skipped: MEMFABRIC_PUBLISHED_LIBRARY is not set");
        return;
    };
    let output = Command::new(env!("CARGO_BIN_EXE_memfabric"))
        .args(["doctor", "--library"])
        .arg(&path)
        .env_clear()
        .output()
        .expect("the command runs");
    let text = String::from_utf8_lossy(&output.stdout);
    has(
        &text,
        &[
            "this is the published memfabric-hybrid 1.3.0",
            "abi version: 1.3 (0x00010003)",
            "libmf_hybm_core.so not found",
        ],
    );
}

#[test]
fn a_better_copy_that_pip_installed_is_the_mend() {
    let mut host = Host::atlas();
    host.file("/usr/bin/python3.11", "");
    host.link("/usr/bin/python3", "python3.11");
    host.set("PATH", "/usr/bin");
    host.memfabric(MEMFABRIC, &["smem_trans_init"], "");
    let folder = format!("{SITE}/memfabric_hybrid/lib");
    host.memfabric(&folder, &Library::SYMBOLS, "");
    has(
        &host.doctor(&[]).only("symbols"),
        &[&format!("export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH")],
    );
}

#[test]
fn the_emulator_is_called_so() {
    let host = Host::atlas();
    host.memfabric(
        MEMFABRIC,
        &Library::SYMBOLS,
        "const char *mf_emu_version(void) { return 0; }",
    );
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 1, "{:#}", diagnosis.json);
    has(&diagnosis.only("library"), &["warning: ", "the emulator"]);
}

#[test]
fn no_code_of_the_library_runs() {
    let host = Host::atlas();
    host.memfabric(
        MEMFABRIC,
        &Library::SYMBOLS,
        "__attribute__((constructor)) static void trap(void) { __builtin_trap(); }\nunsigned smem_get_abi_version(void) { __builtin_trap(); }",
    );
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 0, "{:#}", diagnosis.json);
    has(
        &diagnosis.only("abi version"),
        &["cannot be told without running"],
    );
}

/// A cache as glibc's ldconfig writes it.
fn cache(entries: &[(&str, &str)]) -> Vec<u8> {
    let flags: u32 = match ARCH {
        "aarch64" => 0x0a03,
        _ => 0x0303,
    };
    let strings_at = 48 + 24 * (entries.len() + 1);
    let mut strings = Vec::new();
    let mut table = b"glibc-ld.so.cache1.1".to_vec();
    table.extend((entries.len() as u32 + 1).to_ne_bytes());
    table.resize(48, 0);
    let mut add = |flags: u32, name: &str, path: &str| {
        table.extend(flags.to_ne_bytes());
        for text in [name, path] {
            table.extend(((strings_at + strings.len()) as u32).to_ne_bytes());
            strings.extend(text.as_bytes());
            strings.push(0);
        }
        table.extend([0; 12]);
    };
    // 32-bit x86: not for this machine.
    add(0x0003, entries[0].0, "/not/ours.so");
    for (name, path) in entries {
        add(flags, name, path);
    }
    table.extend(strings);
    table
}

// The published library.

#[test]
fn a_host_with_the_published_library_lacks_nothing_but_the_store_that_it_hosts() {
    let host = Host::published();
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 1, "{:#}", diagnosis.json);
    let not_ok: Vec<_> = diagnosis
        .findings()
        .filter(|finding| finding["level"] != "ok")
        .map(|finding| finding["check"].as_str().expect("a name"))
        .collect();
    assert_eq!(not_ok, ["config store"], "{:#}", diagnosis.json);
    has(
        &diagnosis.only("symbols"),
        &["ok: all 15 of the published generation"],
    );
    has(
        &diagnosis.only("MF_ABI"),
        &["ok: v1, from the environment: the published 1.x library"],
    );
    for (check, text) in [
        (
            "MF_ROLE",
            "ok: sender, whose peers must be receivers, from the environment",
        ),
        ("MF_NIC", "ok: the library's choice, the default"),
        ("MF_VISIBILITY_PATIENCE", "ok: 250 ms, the default"),
        ("MF_CONFIG_STORE_HOST", "ok: true, from the environment"),
        (
            "driver version",
            "ok: V100R001C23SPC006B220 in /usr/local/Ascend/driver/version.info",
        ),
        ("ASCEND_HOME_PATH", &format!("ok: {CANN}")),
    ] {
        has(&diagnosis.only(check), &[text]);
    }
}

#[test]
fn each_generation_of_the_library_is_told_from_the_other() {
    // The other one, asked for as if it were the published.
    let mut host = Host::published();
    host.set("LD_LIBRARY_PATH", &format!("{MEMFABRIC}:{CANN}/lib64"));
    let other = |host: &Host| {
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 2);
        diagnosis.only("symbols")
    };
    has(
        &other(&host),
        &[
            "problem: missing smem_trans_batch_write, smem_trans_batch_read",
            "this is the generation with asynchronous batches",
            "all 15 of the published generation; unset MF_ABI",
        ],
    );
    // One that has all of both is not the published one either.
    let both: Vec<_> = Library::SYMBOLS
        .into_iter()
        .chain(v1::Library::SYMBOLS)
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect();
    host.memfabric(MEMFABRIC, &both, "");
    has(
        &other(&host),
        &["problem: has smem_trans_batch_copy: this is the generation with asynchronous batches"],
    );
    // Nor is one between the two.
    let between: Vec<_> = v1::Library::SYMBOLS
        .into_iter()
        .chain(["smem_trans_batch_copy"])
        .collect();
    host.memfabric(MEMFABRIC, &between, "");
    has(
        &other(&host),
        &["problem: has smem_trans_batch_copy: not the published memfabric-hybrid"],
    );
    host.memfabric(MEMFABRIC, &both, "");
    // The key is what is to be taken out where it is the key that asks.
    host.unset("MF_ABI");
    host.file(
        "/etc/tent.json",
        r#"{"transports":{"memfabric":{"enable":true,"abi":"v1"}}}"#,
    );
    has(
        &other(&host),
        &["jq 'del(.transports.memfabric.abi)' /etc/tent.json"],
    );
    has(
        &host.doctor(&[]).only("MF_ABI"),
        &["ok: v1, from transports/memfabric/abi"],
    );

    for missing in v1::Library::SYMBOLS {
        let there: Vec<_> = v1::Library::SYMBOLS
            .into_iter()
            .filter(|name| *name != missing)
            .collect();
        host.memfabric(MEMFABRIC, &there, "");
        has(
            &other(&host),
            &[
                &format!("problem: missing {missing}: not the published"),
                "all 15",
                "pip install --force-reinstall memfabric-hybrid==1.3.0",
            ],
        );
    }
    host.remove(&format!("{MEMFABRIC}/libmf_smem.so"));
    has(
        &host.doctor(&[]).only("library"),
        &["pip install memfabric-hybrid==1.3.0"],
    );
}

#[test]
fn the_published_librarys_settings_are_judged_as_the_transport_judges_them() {
    for (variable, wrong, parts) in [
        (
            "MF_ABI",
            "v2",
            ["MF_ABI is 'v2', must be ", "export MF_ABI=v1"],
        ),
        (
            "MF_ABI",
            "",
            ["MF_ABI is '', must be ", "v1 for the published 1.x library"],
        ),
        (
            "MF_CONFIG_STORE_URL",
            "tcp://localhost:12000",
            [
                "MF_CONFIG_STORE_URL is 'tcp://localhost:12000', must be tcp://ip:port",
                "export MF_CONFIG_STORE_URL=tcp://",
            ],
        ),
        (
            "MF_CONFIG_STORE_HOST",
            "1",
            [
                "MF_CONFIG_STORE_HOST is '1', must be true",
                "export MF_CONFIG_STORE_HOST=true",
            ],
        ),
        (
            "MF_ROLE",
            "both",
            [
                "MF_ROLE is 'both', must be sender or receiver",
                "export MF_ROLE=",
            ],
        ),
        (
            "MF_NIC",
            "eth0",
            ["MF_NIC is 'eth0', must be tcp://ip:port", "unset MF_NIC"],
        ),
        (
            "MF_VISIBILITY_PATIENCE",
            "10001",
            [
                "MF_VISIBILITY_PATIENCE is '10001', must be a whole number",
                "export MF_VISIBILITY_PATIENCE=250",
            ],
        ),
    ] {
        let mut host = Host::published();
        host.set(variable, wrong);
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 2, "{variable}");
        let text = diagnosis.only(variable);
        has(&text, &["problem: ", parts[0], parts[1]]);
        // One wrong value is told once.
        let named = diagnosis
            .findings()
            .filter(|finding| finding["level"] == "problem")
            .filter(|finding| finding["found"].to_string().contains(parts[0]))
            .count();
        assert_eq!(named, 1, "{variable}: {:#}", diagnosis.json);
    }
    for variable in ["MF_CONFIG_STORE_URL", "MF_ROLE"] {
        let mut host = Host::published();
        host.unset(variable);
        has(
            &host.doctor(&[]).only(variable),
            &[&format!("problem: {variable} must be set"), "MF_ABI=v1"],
        );
    }
}

#[test]
fn the_keys_of_the_published_library_are_read_where_the_environment_has_none() {
    let mut host = Host::published();
    for variable in [
        "MF_ABI",
        "MF_PROTOCOL",
        "MF_CONFIG_STORE_URL",
        "MF_CONFIG_STORE_HOST",
        "MF_ROLE",
    ] {
        host.unset(variable);
    }
    host.file(
        "/etc/tent.json",
        r#"{"transports":{"memfabric":{"enable":true,"abi":"v1","protocol":"host_tcp",
            "store_url":"tcp://127.0.0.1:12000","store_host":true,"role":"receiver",
            "nic":"tcp://127.0.0.1:13000","visibility_patience_ms":40}}}"#,
    );
    let diagnosis = host.doctor(&[]);
    for (check, text) in [
        ("MF_ABI", "ok: v1, from transports/memfabric/abi"),
        (
            "MF_PROTOCOL",
            "ok: host_tcp, from transports/memfabric/protocol",
        ),
        (
            "MF_CONFIG_STORE_URL",
            "ok: tcp://127.0.0.1:12000, from transports/memfabric/store_url",
        ),
        (
            "MF_CONFIG_STORE_HOST",
            "ok: true, from transports/memfabric/store_host",
        ),
        (
            "MF_ROLE",
            "ok: receiver, whose peers must be senders, from transports/memfabric/role",
        ),
        (
            "MF_VISIBILITY_PATIENCE",
            "ok: 40 ms, from transports/memfabric/visibility_patience_ms",
        ),
        // What host_tcp is, and does not look at.
        (
            "protocol fit",
            "warning: host_tcp: the library listens on 127.0.0.1",
        ),
        (
            "MF_NIC",
            "warning: tcp://127.0.0.1:13000, from transports/memfabric/nic: not used with host_tcp",
        ),
        ("keys", "ok: "),
    ] {
        has(&diagnosis.only(check), &[text]);
    }
    host.file(
        "/etc/tent.json",
        r#"{"transports":{"memfabric":{"enable":true,"abi":1,"protocol":"host_tcp"}}}"#,
    );
    let diagnosis = host.doctor(&[]);
    has(
        &diagnosis.only("MF_ABI"),
        &["problem: transports/memfabric/abi is 1, must be "],
    );
    has(
        &diagnosis.only("MF_PROTOCOL"),
        &[
            "problem: ",
            "is 'host_tcp', which only the published",
            "MF_ABI=v1",
        ],
    );
}

#[test]
fn the_store_must_answer_unless_this_process_is_to_host_it() {
    let mut host = Host::published();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    host.set("MF_CONFIG_STORE_URL", &format!("tcp://{address}"));
    let store = |host: &Host| host.doctor(&[]).only("config store");
    assert_eq!(
        store(&host),
        format!(
            "ok: {address} answers: somebody hosts it already; one host, this process or another; "
        )
    );
    host.unset("MF_CONFIG_STORE_HOST");
    assert_eq!(store(&host), format!("ok: {address} answers; ; "));

    drop(listener);
    has(
        &store(&host),
        &[
            &format!("problem: {address} does not answer: "),
            "MF_CONFIG_STORE_HOST=true",
        ],
    );
    host.set("MF_CONFIG_STORE_HOST", "true");
    has(
        &store(&host),
        &[
            &format!("warning: {address} does not answer: "),
            "once this process is up",
        ],
    );
    // Of the range for documentation: nobody's.
    host.set("MF_CONFIG_STORE_URL", "tcp://192.0.2.1:12000");
    has(
        &store(&host),
        &[
            "problem: 192.0.2.1:12000 ",
            "no address of this machine",
            "ip -brief address",
        ],
    );
    // Which store is meant is not known then.
    host.set("MF_CONFIG_STORE_URL", "tcp://192.0.2.1");
    assert!(host.doctor(&[]).of("config store").is_empty());
}

#[test]
fn the_memory_of_the_published_library_is_held_against_what_is_available() {
    const CHECK: &str = "MF_HCOM_MAX_SEND_RECV_DATA_CNT";
    let mut host = Host::published();
    has(
        &host.doctor(&[]).only(CHECK),
        &["ok: unset: about 8192 MiB for each process"],
    );
    for (text, answer) in [
        ("16", "ok: 16: about 16 MiB"),
        (" +16", "ok: 16: about 16 MiB"),
        (
            "abc",
            "warning: 'abc', no number above zero, so the library ignores it: about 8192 MiB",
        ),
        ("0", "warning: '0', no number above zero"),
        ("", "warning: '', no number above zero"),
        ("600000", "problem: 600000: about 600000 MiB"),
    ] {
        host.set(CHECK, text);
        has(&host.doctor(&[]).only(CHECK), &[answer]);
    }
    host.file("/proc/meminfo", "MemAvailable:    8388607 kB\n");
    host.set(CHECK, "8191");
    has(&host.doctor(&[]).only(CHECK), &["ok: 8191: "]);
    host.unset(CHECK);
    has(
        &host.doctor(&[]).only(CHECK),
        &[
            "problem: unset: about 8192 MiB",
            "of the 8191 MiB that are available",
            "export MF_HCOM_MAX_SEND_RECV_DATA_CNT=16",
        ],
    );
}

#[test]
fn a_heartbeat_that_forgets_a_stopped_peer_is_a_warning_that_says_what_follows() {
    const CHECK: &str = "MF_CONFIG_STORE_HEARTBEAT_TIMEOUT_S";
    let mut host = Host::published();
    for (text, answer) in [
        ("300", "ok: a peer that is stopped for less than 300 s"),
        ("3600", "ok: a peer that is stopped for less than 3600 s"),
    ] {
        host.set(CHECK, text);
        has(&host.doctor(&[]).only(CHECK), &[answer]);
    }
    for (text, answer) in [
        ("20", "warning: '20': a peer that is stopped for 20 s"),
        ("0", "warning: '0' is not a number of seconds above zero"),
        ("1m", "warning: '1m' is not a number of seconds above zero"),
    ] {
        host.set(CHECK, text);
        let advice = "export MF_CONFIG_STORE_HEARTBEAT_TIMEOUT_S=300";
        has(&host.doctor(&[]).only(CHECK), &[answer, advice]);
    }
    host.unset(CHECK);
    has(
        &host.doctor(&[]).only(CHECK),
        &[
            "warning: unset: a peer that is stopped for 60 s is forgotten for good",
            "memory of its failed transfers stays in use",
            "also where the store is hosted",
        ],
    );
    host.unset("MF_ABI");
    let json = host.doctor(&[]).json;
    assert!(!json.to_string().contains(CHECK), "{json:#}");
}

#[test]
fn the_files_that_the_published_library_looks_for_are_named() {
    let mut host = Host::published();
    host.set("MF_PROTOCOL", "host_tcp");
    for name in ["libascend_hal.so", "libra.so", "libtsdclient.so"] {
        let path = format!("{CANN}/lib64/{name}");
        host.remove(&path);
        has(
            &host.doctor(&[]).only("ASCEND_HOME_PATH"),
            &["problem: ", CANN, &format!(" has {name}; "), "source "],
        );
        host.file(&path, "");
    }
    host.remove(&format!("{CANN}/lib64/libhccl.so"));
    has(
        &host.doctor(&[]).only("ASCEND_HOME_PATH"),
        &["problem: ", "has libhccl.so or libhcomm.so"],
    );
    host.library("/opt/driver/libhcomm.so", "void hcomm(void) {}", &[]);
    let paths = format!("{WHEEL}/lib:{CANN}/lib64:/opt/driver");
    host.set("LD_LIBRARY_PATH", &paths);
    has(&host.doctor(&[]).only("ASCEND_HOME_PATH"), &["ok: "]);
    host.unset("ASCEND_HOME_PATH");
    has(
        &host.doctor(&[]).only("ASCEND_HOME_PATH"),
        &["problem: unset", "with any protocol"],
    );

    host.file("/usr/local/Ascend/driver/version.info", "Version=25.0\n");
    has(
        &host.doctor(&[]).only("driver version"),
        &["problem: /usr/local/Ascend/driver/version.info has no Innerversion"],
    );
    host.remove("/etc/ascend_install.info");
    has(
        &host.doctor(&[]).only("driver version"),
        &["problem: /etc/ascend_install.info does not tell"],
    );

    // CANN's own library is opened without an NPU as well.
    host.remove(&format!("{CANN}/lib64/libascendcl.so"));
    has(
        &host.doctor(&[]).only("cann"),
        &["problem: libascendcl.so not found", "with any protocol"],
    );
}

// CANN and the protocol.

#[test]
fn an_old_cann_is_a_problem_for_a_device_protocol_only() {
    for (version, device, host_rdma) in [
        ("8.5.0", "problem: 8.5.0 in ", "warning: 8.5.0 in "),
        ("9.0.RC1", "warning: 9.0.RC1 in ", "warning: 9.0.RC1 in "),
        ("9.1.0", "ok: 9.1.0 in ", "ok: 9.1.0 in "),
        ("newest", "warning: newest in ", "warning: newest in "),
    ] {
        let mut host = Host::atlas();
        host.cann(version);
        has(
            &host.doctor(&[]).only("cann version"),
            &[device, "9.0.0 or later"],
        );
        host.set("MF_PROTOCOL", "host_rdma");
        has(&host.doctor(&[]).only("cann version"), &[host_rdma]);
    }
    let host = Host::atlas();
    host.remove(&format!("{CANN}/{ARCH}-linux"));
    has(
        &host.doctor(&[]).only("cann version"),
        &["warning: unknown"],
    );
}

#[test]
fn a_cann_beside_the_path_is_told_with_its_script() {
    let mut host = Host::atlas();
    host.file(&format!("{CANN}/set_env.sh"), "");
    host.set("LD_LIBRARY_PATH", MEMFABRIC);
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 2);
    has(
        &diagnosis.only("cann"),
        &[
            "problem: libascendcl.so not found",
            &format!("it is in {CANN}/lib64/libascendcl.so"),
            &format!("source {CANN}/set_env.sh"),
        ],
    );

    host.set("MF_PROTOCOL", "host_rdma");
    host.folder("/sys/class/infiniband/mlx5_0");
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 0, "{:#}", diagnosis.json);
    has(
        &diagnosis.only("cann"),
        &["ok: ", "host_rdma does not need it"],
    );
    has(
        &diagnosis.only("protocol fit"),
        &["ok: host_rdma with mlx5_0"],
    );
}

#[test]
fn a_cann_that_would_not_load_is_told() {
    let host = Host::atlas();
    let path = format!("{CANN}/lib64/libascendcl.so");
    host.library("/tmp/libascend_hal.so", "void hal(void) {}", &[]);
    let hal = host.at("/tmp/libascend_hal.so");
    host.library(
        &path,
        "int aclrtGetDevice(void) { return 0; }",
        &["-Wl,--no-as-needed", &hal.to_string_lossy()],
    );
    has(
        &host.doctor(&[]).only("cann"),
        &["problem: ", "libascend_hal.so not found", "set_env.sh"],
    );

    host.library(&path, "int other(void) { return 0; }", &[]);
    has(
        &host.doctor(&[]).only("cann"),
        &["problem: ", "lacks aclrtGetDevice"],
    );

    host.library(&path, "int aclrtGetDevice(void) { return 0; }", &[]);
    has(
        &host.doctor(&[]).only("cann"),
        &[
            "warning: ",
            "lacks aclrtPointerGetAttributes",
            "taken for the host's",
        ],
    );
}

#[test]
fn the_devices_that_are_visible_must_be_there() {
    let mut host = Host::atlas();
    for (list, level) in [
        ("0", "ok"),
        ("0,1,7", "ok"),
        ("8", "problem"),
        ("0,x", "problem"),
        ("", "problem"),
    ] {
        host.set("ASCEND_RT_VISIBLE_DEVICES", list);
        let text = host.doctor(&[]).only("npu devices");
        has(&text, &[&format!("{level}: 8 (davinci0 ")]);
    }
    host.unset("ASCEND_RT_VISIBLE_DEVICES");
    host.remove("/dev/davinci_manager");
    has(
        &host.doctor(&[]).only("npu devices"),
        &["problem: ", "no /dev/davinci_manager"],
    );

    for device in 0..8 {
        host.remove(&format!("/dev/davinci{device}"));
    }
    let diagnosis = host.doctor(&[]);
    has(
        &diagnosis.only("npu devices"),
        &["problem: no /dev/davinci*", "npu-smi info"],
    );
    has(
        &diagnosis.only("protocol fit"),
        &["problem: device_rdma needs an NPU", "MF_PROTOCOL=host_rdma"],
    );
    host.file("/.dockerenv", "");
    has(
        &host.doctor(&[]).only("npu devices"),
        &["docker run --device=/dev/davinci0"],
    );
}

#[test]
fn the_protocol_is_judged_as_the_transport_judges_it() {
    let mut host = Host::atlas();
    for name in ["device_sdma", "device_rdma", "device_urma", "device_uboe"] {
        host.set("MF_PROTOCOL", name);
        let diagnosis = host.doctor(&[]);
        has(
            &diagnosis.only("MF_PROTOCOL"),
            &[&format!("ok: {name}, from the environment")],
        );
        has(
            &diagnosis.only("protocol fit"),
            &[&format!("ok: {name} with 8 NPUs")],
        );
    }
    for wrong in ["", "sdma", "Device_RDMA", "device_rdma "] {
        host.set("MF_PROTOCOL", wrong);
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 2);
        has(
            &diagnosis.only("MF_PROTOCOL"),
            &["problem: MF_PROTOCOL is '", "device_urma"],
        );
    }
    host.unset("MF_PROTOCOL");
    host.file(
        "/etc/tent.json",
        r#"{"transports":{"memfabric":{"enable":true,"protocol":"device_sdma"}}}"#,
    );
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 0, "{:#}", diagnosis.json);
    has(
        &diagnosis.only("MF_PROTOCOL"),
        &["device_sdma, from transports/memfabric/protocol"],
    );

    host.set("MF_PROTOCOL", "host_rdma");
    host.folder("/sys/class/infiniband");
    has(
        &host.doctor(&[]).only("protocol fit"),
        &["warning: host_rdma needs an RDMA card"],
    );
    host.remove("/sys");
    has(
        &host.doctor(&[]).only("protocol fit"),
        &["warning: there is no /sys"],
    );
}

#[test]
fn a_timeout_that_is_not_used_is_told_with_the_one_that_is() {
    let mut host = Host::atlas();
    has(
        &host.doctor(&[]).only("MF_TRANSFER_TIMEOUT"),
        &["ok: 10000 ms, the default"],
    );
    host.set("MF_TRANSFER_TIMEOUT", "250");
    assert_eq!(
        host.doctor(&[]).only("MF_TRANSFER_TIMEOUT"),
        "ok: 250 ms; ; "
    );
    for wrong in ["abc", "0", "-1", "500ms", ""] {
        host.set("MF_TRANSFER_TIMEOUT", wrong);
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 1);
        has(
            &diagnosis.only("MF_TRANSFER_TIMEOUT"),
            &[
                "warning: ",
                &format!("value='{wrong}'"),
                "used_ms=10000",
                "export MF_TRANSFER_TIMEOUT=10000",
            ],
        );
    }
    host.unset("MF_TRANSFER_TIMEOUT");
    host.file("/etc/tent.json", r#"{"transports":{"memfabric":{"enable":true,"transfer_timeout_ms":"7","need_retry_code":0}}}"#);
    let diagnosis = host.doctor(&[]);
    has(
        &diagnosis.only("MF_TRANSFER_TIMEOUT"),
        &["transports/memfabric/transfer_timeout_ms"],
    );
    has(
        &diagnosis.only("need_retry_code"),
        &["problem: transports/memfabric/need_retry_code is 0"],
    );
}

// TENT.

#[test]
fn any_value_selects_tent_and_only_one_is_meant() {
    let mut host = Host::atlas();
    for value in ["0", "", "yes"] {
        host.set("MC_USE_TENT", value);
        let diagnosis = host.doctor(&[]);
        assert_eq!(diagnosis.status, 1);
        has(
            &diagnosis.only("MC_USE_TENT"),
            &[&format!("warning: '{value}', which selects TENT")],
        );
    }
    host.unset("MC_USE_TENT");
    host.set("MC_USE_TEV1", "1");
    has(
        &host.doctor(&[]).only("MC_USE_TENT"),
        &["ok: unset, but MC_USE_TEV1"],
    );
    assert!(host.doctor(&[]).of("MC_FORCE_TCP").is_empty());
    host.set("MC_FORCE_TCP", "0");
    has(
        &host.doctor(&[]).only("MC_FORCE_TCP"),
        &["problem: set", "unset MC_FORCE_TCP"],
    );
}

#[test]
fn a_configuration_that_does_not_parse_is_told_with_line_and_column() {
    let mut host = Host::atlas();
    host.file(
        "/etc/tent.json",
        "{\n  \"transports\": {\n    \"memfabric\": {,}\n  }\n}\n",
    );
    let diagnosis = host.doctor(&[]);
    assert_eq!(diagnosis.status, 2);
    has(
        &diagnosis.only("MC_TENT_CONF"),
        &[
            "problem: /etc/tent.json: ",
            "at line 3 column 19",
            "jq . /etc/tent.json",
        ],
    );
    host.set("MC_TENT_CONF", "{\"transports\":");
    has(
        &host.doctor(&[]).only("MC_TENT_CONF"),
        &["problem: inline JSON: ", "at line 1 column 14"],
    );

    host.set("MC_TENT_CONF", "/etc/tent.jsn");
    has(
        &host.doctor(&[]).only("MC_TENT_CONF"),
        &["'/etc/tent.jsn' is no file, and no JSON either"],
    );
    host.set("MC_TENT_CONF", "/etc");
    has(
        &host.doctor(&[]).only("MC_TENT_CONF"),
        &["/etc cannot be read"],
    );
    host.set("MC_TENT_CONF", "");
    has(&host.doctor(&[]).only("MC_TENT_CONF"), &["problem: unset"]);

    host.file("/etc/tent.json", format!("\u{feff}{ENABLED}"));
    host.set("MC_TENT_CONF", "/etc/tent.json");
    assert_eq!(
        host.doctor(&[]).status,
        0,
        "TENT's parser skips a byte order mark"
    );
    host.set("MC_TENT_CONF", ENABLED);
    has(&host.doctor(&[]).only("MC_TENT_CONF"), &["ok: inline JSON"]);
}

#[test]
fn a_configuration_is_told_what_keeps_memfabric_out() {
    let mut host = Host::atlas();
    for (conf, check, parts) in [
        (
            r#"{"transports":{"memfabric":{"enable":"true"}}}"#,
            "enable",
            [
                "problem: transports/memfabric/enable is \"true\", a string",
                "jq '.transports.memfabric.enable = true' /etc/tent.json",
            ],
        ),
        (
            r#"{"transports":{"memfabric":{"enable":true},"force_tcp":true}}"#,
            "force_tcp",
            [
                "problem: transports/force_tcp is true",
                "del(.transports.force_tcp)",
            ],
        ),
        (
            r#"{"transports":{"memfabric":{"enable":true},"ascend_direct":{"enable":true}}}"#,
            "ascend_direct",
            [
                "warning: transports/ascend_direct/enable is true",
                "one transport for the NPU",
            ],
        ),
        (
            r#"{"transports":{"memfabric":{"enable":true,"protocoll":"x"}}}"#,
            "keys",
            [
                "warning: unknown under transports/memfabric: protocoll",
                "need_retry_code",
            ],
        ),
        (
            r#"{"transports":{"memfabric":{"enable":true}},"policy":[{"name":"all","segment_type":"memory","transports":["memfabric"]},{"name":"npu","segment_type":"memory","local_memory":"npu","transports":["memfabric"]}]}"#,
            "policy",
            [
                "warning: entry 1 ('npu'): local_memory 'npu' matches nothing",
                "NPU memory is cuda",
            ],
        ),
    ] {
        host.file("/etc/tent.json", conf);
        has(&host.doctor(&[]).only(check), &parts);
    }
    host.set("MC_TENT_CONF", r#"{"transports":{}}"#);
    has(
        &host.doctor(&[]).only("enable"),
        &[
            "export MC_TENT_CONF=\"$(jq -c '.transports.memfabric.enable = true' <<< \"$MC_TENT_CONF\")\"",
        ],
    );
}

// Huge pages.

#[test]
fn missing_pages_are_counted_and_reserved_by_the_lines_given() {
    let mut host = Host::atlas();
    host.pool(524_288, 400, 100);
    has(
        &host.doctor(&["--store-bytes", "200GB"]).only("store pages"),
        &[
            "problem: 100 of 512MB are free, 300 are missing; 400 pages of 512MB",
            // What is in use stays: 400 there, 300 more.
            "echo 700 > /sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages",
            "echo 'vm.nr_hugepages = 700' > /etc/sysctl.d/99-hugepages.conf && sysctl -p /etc/sysctl.d/99-hugepages.conf",
        ],
    );
    // The sysctl is about the default size only.
    host.set("MC_STORE_HUGEPAGE_SIZE", "2MB");
    let text = host.doctor(&["--store-bytes", "200GB"]).only("store pages");
    has(
        &text,
        &[
            "0 of 2MB are free, 102400 are missing",
            "echo 102400 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            "/etc/tmpfiles.d/99-hugepages.conf",
        ],
    );
    assert!(!text.contains("sysctl"), "{text}");
    has(
        &host.doctor(&["--store-bytes", "1TB"]).only("store pages"),
        &["which are 1048576 MB, and only 512000 MB of memory are available"],
    );
    // Part of a page is a page.
    host.set("MC_STORE_HUGEPAGE_SIZE", "512MB");
    has(
        &host
            .doctor(&["--store-bytes", "536870913"])
            .only("store pages"),
        &["ok: ", "2 pages of 512MB"],
    );
    // Promised to somebody else.
    host.file(
        "/sys/kernel/mm/hugepages/hugepages-524288kB/resv_hugepages",
        "99",
    );
    has(
        &host.doctor(&["--store-bytes", "1GB"]).only("store pages"),
        &["1 of 512MB are free, 1 are missing"],
    );
}

#[test]
fn stores_page_size_is_held_against_the_machines() {
    let mut host = Host::atlas();
    for (size, parts) in [
        ("512MB", ["ok: 512MB", "takes an integrated Mooncake"]),
        (
            "1GB",
            [
                "problem: 1GB pages, which this machine does not have",
                "2MB or 512MB",
            ],
        ),
        (
            "2MB",
            ["problem: 2MB, of which none is reserved", "errno 12"],
        ),
    ] {
        host.set("MC_STORE_HUGEPAGE_SIZE", size);
        has(&host.doctor(&[]).only("MC_STORE_HUGEPAGE_SIZE"), &parts);
    }
    host.set("MC_STORE_HUGEPAGE_SIZE", "16GB");
    has(
        &host.doctor(&[]).of("MC_STORE_HUGEPAGE_SIZE")[0],
        &["warning: '16GB', so Store falls back to 2MB"],
    );

    host.set("MC_STORE_HUGEPAGE_SIZE", "512MB");
    host.set("MC_STORE_USE_HUGEPAGE", "0");
    has(
        &host.doctor(&[]).only("MC_STORE_USE_HUGEPAGE"),
        &["warning: '0', which turns huge pages on"],
    );
    host.unset("MC_STORE_USE_HUGEPAGE");
    has(
        &host
            .doctor(&["--store-bytes", "1GB"])
            .only("MC_STORE_USE_HUGEPAGE"),
        &["warning: unset", "export MC_STORE_USE_HUGEPAGE=1"],
    );
}

// The headers.

/// Headers as `abi.rs` declares them.
fn headers() -> BTreeMap<&'static str, String> {
    let trans = "\
        #pragma once\n#include <stdint.h>\n#include \"smem_bm_def.h\"\n\
        typedef void *smem_trans_t;\n\
        typedef enum { SMEM_TRANS_NONE, SMEM_TRANS_SENDER, SMEM_TRANS_RECEIVER, SMEM_TRANS_BOTH } smem_trans_role_t;\n\
        typedef enum { SMEM_TRANS_READ, SMEM_TRANS_WRITE } smem_trans_opcode_t;\n\
        typedef struct { smem_trans_role_t role; uint32_t initTimeout; uint32_t deviceId; uint32_t flags;\n\
          smem_bm_data_op_type dataOpType; char nic[64]; char url[64]; smem_tls_config tlsConfig; } smem_trans_config_t;\n\
        typedef struct { const char *destUrl; void **srcList; void **destList; size_t *sizeList; uint32_t batchSize;\n\
          smem_trans_opcode_t opcode; void *stream; uint32_t flags; } smem_trans_batch_params_t;\n";
    // bool without its header, as the published ones have it.
    let bm = "\
        #pragma once\n#include <stddef.h>\n\
        typedef enum { SMEMB_DATA_OP_SDMA = 1, SMEMB_DATA_OP_HOST_RDMA = 2, SMEMB_DATA_OP_DEVICE_RDMA = 8,\n\
          SMEMB_DATA_OP_DEVICE_URMA = 64, SMEMB_DATA_OP_DEVICE_UBOE = 128 } smem_bm_data_op_type;\n\
        typedef struct { bool tlsEnable; char caPath[256]; char crlPath[256]; char certPath[256]; char keyPath[256];\n\
          char keyPassPath[256]; char packagePath[256]; char decrypterLibPath[256]; } smem_tls_config;\n";
    // A reference is no C: only its macros can be looked at.
    let smem = "\
        #pragma once\n#define SM_OK (0)\n#define SM_ERROR (-1)\n#define SM_NEED_RETRY (1)\n\
        typedef int (*decrypt)(const char *text, unsigned long &length);\n";
    BTreeMap::from([
        ("include/smem/host/smem_trans_def.h", trans.to_owned()),
        ("include/smem/host/smem_bm_def.h", bm.to_owned()),
        ("include/smem/host/smem.h", smem.to_owned()),
    ])
}

fn compare(headers: &BTreeMap<&str, String>, host: &Host) -> Vec<String> {
    let folder = tempfile::tempdir().expect("temporary directory");
    for (name, text) in headers {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        fs::write(path, text).expect("a header");
    }
    let output = host
        .command(&["--json", "--headers"])
        .arg(folder.path())
        // The compiler is this machine's.
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .expect("the command runs");
    let json = serde_json::from_slice(&output.stdout).expect("JSON");
    Diagnosis { json, status: 0 }.of("headers")
}

#[test]
fn headers_that_say_the_same_agree() {
    let found = compare(&headers(), &Host::atlas());
    assert_eq!(found.len(), 1, "{found:#?}");
    has(&found[0], &["ok: ", " agree", "16 codes are not named"]);
}

#[test]
fn headers_that_differ_are_told_field_by_field() {
    let host = Host::atlas();
    let changed = |from: &str, to: &str| {
        let mut changed = headers();
        let before = changed.clone();
        for text in changed.values_mut() {
            *text = text.replace(from, to);
        }
        assert_ne!(changed, before, "{from} is in no header");
        let mut found = compare(&changed, &host);
        found.remove(0);
        found
    };
    let found = changed("uint32_t deviceId;", "uint64_t deviceId;");
    has(
        &found.join("\n"),
        &[
            "problem: smem_trans_config_t.deviceId: 8 bytes; 4 bytes",
            "problem: smem_trans_config_t.flags: at offset 16; at offset 12",
            "problem: smem_trans_config_t: aligned to 8; aligned to 4",
        ],
    );
    let found = changed("char url[64]; ", "");
    has(
        &found.join("\n"),
        &[
            "problem: smem_trans_config_t: 1880 bytes; 1944 bytes",
            "problem: smem_trans_config_t.url is not in these headers",
            "problem: smem_trans_config_t.tlsConfig: at offset 84; at offset 148",
        ],
    );
    assert_eq!(found.len(), 3, "{found:#?}");
    let found = changed("smem_trans_batch_params_t", "smem_trans_quant_params_t");
    assert_eq!(found.len(), 1, "{found:#?}");
    has(
        &found[0],
        &["problem: type smem_trans_batch_params_t is not in these headers"],
    );
    let found = changed(
        "SMEMB_DATA_OP_DEVICE_UBOE = 128",
        "SMEMB_DATA_OP_DEVICE_UBOE = 256",
    );
    assert_eq!(found.len(), 1, "{found:#?}");
    has(&found[0], &["problem: SMEMB_DATA_OP_DEVICE_UBOE: 256; 128"]);
    let found = changed("#define SM_ERROR (-1)", "#define SM_ERROR (-2)");
    has(&found[0], &["warning: SM_ERROR: -2; -1"]);
    let found = changed("#define SM_NEED_RETRY (1)\n", "");
    has(
        &found[0],
        &["warning: SM_NEED_RETRY is not in these headers, 1 is assumed"],
    );
}

#[test]
fn the_published_librarys_headers_are_held_against_its_own_declarations() {
    let host = Host::published();
    let mut headers = headers();
    assert!(compare(&headers, &host).len() > 1, "the other generation's");
    for text in headers.values_mut() {
        *text = text
            .replace(
                "char url[64]; smem_tls_config tlsConfig;",
                "smem_tls_config hcomTlsConfig;",
            )
            .replace(
                "SMEMB_DATA_OP_HOST_RDMA = 2,",
                "SMEMB_DATA_OP_HOST_RDMA = 2, SMEMB_DATA_OP_HOST_TCP = 4,",
            )
            .replace("smem_trans_opcode_t", "no_opcode")
            .replace("smem_trans_batch_params_t", "no_batches")
            .replace("#define SM_NEED_RETRY (1)\n", "");
    }
    let found = compare(&headers, &host);
    assert_eq!(found.len(), 1, "{found:#?}");
    for text in headers.values_mut() {
        *text = text.replace("char nic[64];", "char nic[128];");
    }
    has(
        &compare(&headers, &host).join("\n"),
        &[
            "problem: smem_trans_config_t: 1944 bytes; 1880 bytes",
            "problem: smem_trans_config_t.hcomTlsConfig: at offset 148; at offset 84",
            "pip install --force-reinstall memfabric-hybrid==1.3.0",
        ],
    );
}

#[test]
fn the_code_of_a_pending_batch_is_held_against_the_setting() {
    let mut host = Host::atlas();
    let mut other = headers();
    for text in other.values_mut() {
        *text = text.replace("SM_NEED_RETRY (1)", "SM_NEED_RETRY (-2016)");
    }
    let found = compare(&other, &host);
    has(
        &found[1],
        &[
            "problem: SM_NEED_RETRY: -2016; 1",
            "jq '.transports.memfabric.need_retry_code = -2016' /etc/tent.json",
        ],
    );
    host.set(
        "MC_TENT_CONF",
        r#"{"transports":{"memfabric":{"enable":true,"need_retry_code":-2016}}}"#,
    );
    assert_eq!(
        compare(&other, &host).len(),
        1,
        "the setting makes up for it"
    );
}

#[test]
fn headers_that_cannot_be_compared_are_a_problem() {
    let mut host = Host::atlas();
    has(
        &compare(&BTreeMap::new(), &host)[0],
        &["problem: ", "has no smem_trans_def.h"],
    );
    host.set("CC", "/nonexistent/cc -m64");
    has(
        &compare(&headers(), &host)[0],
        &["problem: cannot run the C compiler '/nonexistent/cc'"],
    );
}

// The checkout.

#[test]
fn a_checkout_says_whether_it_is_integrated() {
    let host = Host::atlas();
    let checkout = tempfile::tempdir().expect("temporary directory");
    let top = checkout.path();
    let path = top.to_string_lossy().into_owned();
    let doctor = || {
        let diagnosis = host.doctor(&["--mooncake", &path]);
        (diagnosis.status, diagnosis.only("mooncake"))
    };
    let (status, text) = doctor();
    assert_eq!(status, 2);
    has(
        &text,
        &["is not a Mooncake checkout", "a Mooncake checkout"],
    );

    // Every place that an edit looks for, and an enumeration to count.
    let mut files: BTreeMap<&str, String> = BTreeMap::new();
    for edit in EDITS {
        if edit.when != When::Always {
            continue;
        }
        let text = files.entry(edit.file).or_default();
        if edit.file.ends_with("common/types.h") && text.is_empty() {
            text.push_str("enum TransportType : int {\n    UNSPEC = 0,\n    RDMA,\n    // Sentinel: must remain the last enumerator.\n    kNumTransportTypes,\n};\n");
        }
        if !text.contains(edit.anchor) {
            text.push_str(edit.anchor);
            text.push('\n');
        }
    }
    files.entry("CMakeLists.txt").or_default();
    for (name, text) in &files {
        let path = top.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        fs::write(path, text).expect("a file");
    }
    let (status, text) = doctor();
    assert_eq!(status, 2);
    has(
        &text,
        &[
            "problem: not integrated: ",
            &format!("memfabric integrate {path}"),
        ],
    );

    let integrated = Command::new(env!("CARGO_BIN_EXE_memfabric"))
        .args(["integrate", &path])
        .output()
        .expect("the command runs");
    assert!(integrated.status.success(), "{integrated:?}");
    let (status, text) = doctor();
    assert_eq!(status, 0, "{text}");
    has(&text, &["ok: integrated: "]);

    let loader = EDITS
        .iter()
        .find(|edit| edit.file.ends_with("transport_loader.cpp"))
        .expect("the loader is edited");
    fs::write(top.join(loader.file), &files[loader.file]).expect("a file");
    let (status, text) = doctor();
    assert_eq!(status, 2);
    has(
        &text,
        &[
            "problem: partly integrated: ",
            "--revert && memfabric integrate",
        ],
    );
}

#[test]
fn a_root_that_is_not_there_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_memfabric"))
        .args(["doctor", "--root", "/no/such/machine"])
        .output()
        .expect("the command runs");
    assert_eq!(output.status.code(), Some(2));
    has(
        &String::from_utf8_lossy(&output.stderr),
        &["--root /no/such/machine: no such directory"],
    );
}
