// SPDX-License-Identifier: Apache-2.0
//! CANN: `libascendcl.so`, its version, the NPUs that are there.

use std::path::{Path, PathBuf};

use memfabric_transport::Protocol;

use super::linker::{Linker, Located, RunPaths};
use super::machine::Machine;
use super::report::Finding;

const LIBRARY: &str = "libascendcl.so";
/// The oldest that the transport is for.
const OLDEST: (u64, u64, u64) = (9, 0, 0);
const VISIBLE: &str = "ASCEND_RT_VISIBLE_DEVICES";
/// Where CANN is installed where nobody said otherwise, newest layout first.
const HOMES: [&str; 3] = [
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/ascend-toolkit",
];

/// Checks what `protocol` needs; where that is not known, as for an NPU. The
/// `published` library opens CANN's whatever the protocol.
pub fn check(
    machine: &Machine<'_>,
    linker: &Linker<'_>,
    protocol: Option<Protocol>,
    published: bool,
) -> Vec<Finding> {
    let device = protocol.is_none_or(Protocol::needs_device);
    let needed = published || device;
    let found = linker.find(LIBRARY, &RunPaths::default());
    let home = home(machine, found.as_ref().ok());
    let mut findings = Vec::new();
    match found {
        Ok(located) => {
            let path = located.path.display().to_string();
            let origin = located.origin.to_string();
            let lacks = ["aclrtGetDevice", "aclrtPointerGetAttributes"]
                .into_iter()
                .filter(|symbol| !located.object.exports(symbol))
                .collect::<Vec<_>>();
            let closure = linker.closure(located);
            let missing: Vec<String> = closure
                .missing
                .iter()
                .map(|missing| format!("{} {}", missing.name, missing.failure))
                .collect();
            findings.push(if !missing.is_empty() {
                level(needed, "cann", format!("{path}: {}", missing.join(", ")))
                    .needs("its dependencies on the linker's path: CANN's and the driver's")
                    .mend(source(machine))
            } else if lacks.contains(&"aclrtGetDevice") {
                level(needed, "cann", format!("{path} lacks aclrtGetDevice"))
                    .needs("CANN 9.0.0 or later")
            } else if !lacks.is_empty() {
                Finding::warning("cann", format!("{path} lacks {}", lacks.join(", ")))
                    .needs("CANN 9.0.0 or later: all memory is taken for the host's otherwise")
            } else {
                Finding::ok("cann", format!("{path}, {origin}"))
            });
        }
        Err(failure) if !needed => {
            return vec![Finding::ok(
                "cann",
                format!("{LIBRARY} {failure}; host_rdma does not need it"),
            )];
        }
        Err(failure) => {
            let elsewhere = home_candidates(machine)
                .iter()
                .map(|home| home.join("lib64").join(LIBRARY))
                .find(|path| machine.exists(path));
            let mut found = format!("{LIBRARY} {failure}");
            if let Some(path) = elsewhere {
                found += &format!("; it is in {}", path.display());
            }
            let needs = match published {
                true => {
                    "CANN on the linker's path: the published library opens it with any protocol"
                }
                false => "CANN 9.0.0 or later on the linker's path, or MF_PROTOCOL=host_rdma",
            };
            findings.push(
                Finding::problem("cann", found)
                    .needs(needs)
                    .mend(source(machine)),
            );
        }
    }
    findings.push(version(machine, home.as_deref(), device));
    findings.push(devices(machine, device));
    findings
}

fn level(needed: bool, check: &'static str, found: String) -> Finding {
    if needed {
        Finding::problem(check, found)
    } else {
        Finding::warning(check, found)
    }
}

/// The command that puts CANN on the paths.
pub fn source(machine: &Machine<'_>) -> String {
    let homes = home_candidates(machine);
    let script = homes
        .iter()
        .map(|home| home.join("set_env.sh"))
        .chain(["/usr/local/Ascend/ascend-toolkit/set_env.sh".into()])
        .find(|script| machine.exists(script));
    let script =
        script.unwrap_or_else(|| PathBuf::from("/usr/local/Ascend/ascend-toolkit/set_env.sh"));
    format!("source {}", super::quoted(&script.to_string_lossy()))
}

fn home_candidates(machine: &Machine<'_>) -> Vec<PathBuf> {
    ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"]
        .iter()
        .filter_map(|name| machine.variable(name))
        .filter(|home| !home.is_empty())
        .chain(HOMES.map(str::to_owned))
        .map(PathBuf::from)
        .collect()
}

/// The installation that the library belongs to: a folder above it that says
/// its version.
fn home(machine: &Machine<'_>, library: Option<&Located>) -> Option<PathBuf> {
    let real = library.and_then(|located| machine.real(&located.path).ok());
    let above = real
        .iter()
        .flat_map(|real| real.ancestors().skip(1).take(4))
        .map(Path::to_owned);
    above
        .chain(home_candidates(machine))
        .find(|home| version_in(machine, home).is_some())
}

/// The `version` of an `ascend_<package>_install.info`, in a folder or in its
/// `<arch>-linux`.
fn version_in(machine: &Machine<'_>, home: &Path) -> Option<String> {
    let arch = home.join(format!("{}-linux", std::env::consts::ARCH));
    for folder in [home, &arch] {
        for name in machine.list(folder) {
            if !(name.starts_with("ascend_") && name.ends_with("_install.info")) {
                continue;
            }
            let text = machine.text(folder.join(name)).unwrap_or_default();
            let version = text.lines().find_map(|line| {
                let (key, value) = line.split_once('=')?;
                (key.trim() == "version").then(|| value.trim().to_owned())
            });
            if version.is_some() {
                return version;
            }
        }
    }
    None
}

fn version(machine: &Machine<'_>, home: Option<&Path>, needed: bool) -> Finding {
    const CHECK: &str = "cann version";
    const NEEDED: &str = "9.0.0 or later";
    let Some((home, version)) = home.and_then(|home| Some((home, version_in(machine, home)?)))
    else {
        return Finding::warning(
            CHECK,
            "unknown: no ascend_*_install.info near libascendcl.so, in ASCEND_HOME_PATH or in /usr/local/Ascend",
        )
        .needs(NEEDED)
        .mend(source(machine));
    };
    let found = format!("{version} in {}", home.display());
    match parse(&version) {
        Some((number, _)) if number < OLDEST => level(needed, CHECK, found).needs(NEEDED),
        Some((number, true)) if number == OLDEST => {
            Finding::warning(CHECK, format!("{found}, a pre-release")).needs(NEEDED)
        }
        Some(_) => Finding::ok(CHECK, found).needs(NEEDED),
        None => Finding::warning(CHECK, format!("{found}, which is no version")).needs(NEEDED),
    }
}

/// `9.0.0`, `8.5.RC1`, `9.0.0.beta1`: the numbers, and whether more follows.
fn parse(version: &str) -> Option<((u64, u64, u64), bool)> {
    let mut parts = version.split('.').map(str::parse::<u64>);
    let major = parts.next()?.ok()?;
    let minor = parts.next().and_then(Result::ok);
    let patch = minor.and_then(|_| parts.next()).and_then(Result::ok);
    let pre_release = version.contains(|c: char| c.is_ascii_alphabetic());
    Some(((major, minor.unwrap_or(0), patch.unwrap_or(0)), pre_release))
}

/// The NPUs' device nodes.
pub fn nodes(machine: &Machine<'_>) -> Vec<String> {
    machine
        .list("/dev")
        .into_iter()
        .filter(|name| {
            name.strip_prefix("davinci").is_some_and(|number| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            })
        })
        .collect()
}

fn in_container(machine: &Machine<'_>) -> bool {
    machine.exists("/.dockerenv") || machine.exists("/run/.containerenv")
}

/// NPUs are counted by their device nodes. Which of them is current belongs to
/// a thread of the process that installs the transport, so it cannot be read
/// from here; `aclrtSetDevice` makes it one of those that are visible.
fn devices(machine: &Machine<'_>, needed: bool) -> Finding {
    const CHECK: &str = "npu devices";
    let nodes = nodes(machine);
    if nodes.is_empty() {
        let finding = level(needed, CHECK, "no /dev/davinci* device".to_owned())
            .needs("an Atlas NPU with its driver, or MF_PROTOCOL=host_rdma");
        return finding.mend(if in_container(machine) {
            "docker run --device=/dev/davinci0 --device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc …"
        } else {
            "npu-smi info"
        });
    }
    if !machine.exists("/dev/davinci_manager") {
        return level(
            needed,
            CHECK,
            format!("{}, but no /dev/davinci_manager", nodes.join(" ")),
        )
        .needs("the driver's management device beside the NPUs")
        .mend("docker run --device=/dev/davinci_manager …");
    }
    let count = nodes.len();
    let found = format!("{count} ({})", nodes.join(" "));
    let current =
        "current: set by aclrtSetDevice on the thread that installs the transport".to_owned();
    let Some(list) = machine.variable(VISIBLE) else {
        return Finding::ok(CHECK, format!("{found}, all visible; {current}"));
    };
    let unknown: Vec<&str> = list
        .split(',')
        .filter(|entry| {
            let device = entry.trim().parse::<usize>();
            device.is_ok_and(|device| device >= count) || entry.trim().parse::<usize>().is_err()
        })
        .collect();
    if unknown.is_empty() {
        return Finding::ok(CHECK, format!("{found}, visible: {list}; {current}"));
    }
    level(
        needed,
        CHECK,
        format!(
            "{found}, {VISIBLE} is '{list}': no device '{}'",
            unknown.join("', '")
        ),
    )
    .needs(format!(
        "numbers from 0 to {} with commas between them",
        count - 1
    ))
    .mend(format!("export {VISIBLE}=0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_their_numbers() {
        for (text, number, pre_release) in [
            ("9.0.0", (9, 0, 0), false),
            ("10.1", (10, 1, 0), false),
            ("8.5.RC1", (8, 5, 0), true),
            ("9.0.0.beta1", (9, 0, 0), true),
            ("9.RC1", (9, 0, 0), true),
        ] {
            assert_eq!(parse(text), Some((number, pre_release)), "{text}");
        }
        assert_eq!(parse("unknown"), None);
        assert_eq!(parse(""), None);
    }
}
