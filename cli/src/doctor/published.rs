// SPDX-License-Identifier: Apache-2.0
//! What the published 1.x library needs beyond the rest: its settings, its store,
//! its memory, and the files that it looks for.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use memfabric_transport::Protocol;
use memfabric_transport::config::Role;
use memfabric_transport::config::v1::Settings;
use memfabric_transport::config::{TentSettings, Value, table};

use super::hugepages::meminfo;
use super::linker::{Linker, RunPaths};
use super::machine::Machine;
use super::report::Finding;
use super::{cann, settings};

/// How long a store may take to be reached.
const DEADLINE: Duration = Duration::from_secs(1);

const SEND_RECEIVE: &str = "MF_HCOM_MAX_SEND_RECV_DATA_CNT";
/// What the library takes where that is unset or no number above zero, and the
/// memory that it takes for each; seen with 1 to 9000 of them.
const DEFAULT_COUNT: u64 = 8192;
const MIB_EACH: u64 = 1;

const HEARTBEAT: &str = "MF_CONFIG_STORE_HEARTBEAT_TIMEOUT_S";
/// Seconds after which the library forgets a peer that does not answer, where that
/// is unset; seen.
const DEFAULT_HEARTBEAT: u32 = 60;
const ADVISED_HEARTBEAT: u32 = 300;

const INSTALL_INFO: &str = "/etc/ascend_install.info";
const OLDEST_DRIVER: &str = "V100R001C23SPC006B220";

/// A setting that this library alone has.
struct Setting {
    row: &'static table::Setting,
    tell: fn(&Settings) -> String,
    mend: &'static str,
}

const SETTINGS: [Setting; 5] = [
    Setting {
        row: &table::STORE_URL,
        tell: |settings| settings.store_url.to_string_lossy().into_owned(),
        mend: "export MF_CONFIG_STORE_URL=tcp://<address of the node that hosts it>:12000",
    },
    Setting {
        row: &table::STORE_HOST,
        tell: |settings| settings.store_host.to_string(),
        mend: "export MF_CONFIG_STORE_HOST=true",
    },
    Setting {
        row: &table::ROLE,
        tell: |settings| match settings.role {
            Role::Sender => "sender, whose peers must be receivers".to_owned(),
            Role::Receiver => "receiver, whose peers must be senders".to_owned(),
        },
        mend: "export MF_ROLE=sender",
    },
    Setting {
        row: &table::NIC,
        tell: |settings| match &settings.nic {
            Some(nic) => nic.to_string_lossy().into_owned(),
            None => "the library's choice".to_owned(),
        },
        mend: "unset MF_NIC",
    },
    Setting {
        row: &table::VISIBILITY_PATIENCE,
        tell: |settings| format!("{} ms", settings.patience.as_millis()),
        mend: "export MF_VISIBILITY_PATIENCE=250",
    },
];

/// Checks the settings, and what they say about the world.
pub fn check(
    machine: &Machine<'_>,
    tent: &TentSettings,
    protocol: Option<Protocol>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut url = None;
    let mut hosts = None;
    for setting in SETTINGS {
        let row = setting.row;
        let variable = row.variable.unwrap_or(row.path);
        let resolved = settings::published(machine, tent, row);
        let resolved = match resolved {
            Ok(Some(resolved)) => resolved,
            Ok(None) => continue,
            Err(error) => {
                let finding = Finding::problem(variable, error.to_string());
                findings.push(finding.mend(setting.mend));
                continue;
            }
        };
        let given = *tent.get(row) != Value::Absent;
        let set = given || machine.variable(variable).is_some();
        let origin = match set {
            true => settings::origin(machine, variable, row.key()),
            false => "the default".to_owned(),
        };
        let text = format!("{}, {origin}", (setting.tell)(&resolved));
        findings.push(match variable {
            "MF_NIC" if set && protocol == Some(Protocol::HostTcp) => {
                Finding::warning(variable, format!("{text}: not used with host_tcp"))
                    .needs("unset")
                    .mend(setting.mend)
            }
            _ => Finding::ok(variable, text),
        });
        match variable {
            "MF_CONFIG_STORE_URL" => url = Some(resolved),
            "MF_CONFIG_STORE_HOST" => hosts = Some(resolved.store_host),
            _ => {}
        }
    }
    if let Some((settings, hosts)) = url.zip(hosts) {
        let url = settings.store_url.to_string_lossy();
        let address = url.strip_prefix("tcp://").and_then(|at| at.parse().ok());
        findings.extend(address.map(|address| store(address, hosts)));
    }
    findings.push(heartbeat(machine));
    findings.push(memory(machine));
    findings
}

/// Whether the configuration store is there. Whoever hosts it logs that somebody
/// connected and said nothing.
fn store(address: SocketAddr, hosts: bool) -> Finding {
    const CHECK: &str = "config store";
    let failure = TcpStream::connect_timeout(&address, DEADLINE).err();
    let found = match &failure {
        None => format!("{address} answers"),
        Some(failure) => format!("{address} does not answer: {failure}"),
    };
    if hosts
        && TcpListener::bind((address.ip(), 0))
            .is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
    {
        return Finding::problem(
            CHECK,
            format!("{found}; this process is to host it, and that is no address of this machine"),
        )
        .needs("an address of the machine that hosts it, and one process with MF_CONFIG_STORE_HOST=true")
        .mend("ip -brief address");
    }
    match (failure, hosts) {
        (None, false) => Finding::ok(CHECK, found),
        (None, true) => Finding::ok(CHECK, format!("{found}: somebody hosts it already"))
            .needs("one host, this process or another"),
        (Some(_), true) => Finding::warning(CHECK, found)
            .needs("an answer once this process is up, for it is to host the store"),
        (Some(_), false) => Finding::problem(CHECK, found).needs(
            "one process up that hosts it, with MF_CONFIG_STORE_HOST=true, and no firewall between",
        ),
    }
}

/// How long a peer that is stopped stays known.
fn heartbeat(machine: &Machine<'_>) -> Finding {
    let text = machine.variable(HEARTBEAT);
    let seconds = text.as_deref().map(|text| text.trim().parse::<u32>());
    let seconds = seconds.and_then(Result::ok).filter(|seconds| *seconds > 0);
    let found = match &text {
        None => "unset".to_owned(),
        Some(text) => format!("'{text}'"),
    };
    let forgotten = |seconds: u32| {
        format!(
            "{found}: a peer that is stopped for {seconds} s is forgotten for good, and memory of its failed transfers stays in use until it or this process ends"
        )
    };
    let advised = |finding: Finding| {
        finding
            .needs(format!(
                "{ADVISED_HEARTBEAT}, also where the store is hosted"
            ))
            .mend(format!("export {HEARTBEAT}={ADVISED_HEARTBEAT}"))
    };
    match (&text, seconds) {
        (None, _) => advised(Finding::warning(HEARTBEAT, forgotten(DEFAULT_HEARTBEAT))),
        (Some(_), None) => advised(Finding::warning(
            HEARTBEAT,
            format!("{found} is not a number of seconds above zero"),
        )),
        (Some(_), Some(seconds)) if seconds < ADVISED_HEARTBEAT => {
            advised(Finding::warning(HEARTBEAT, forgotten(seconds)))
        }
        (Some(_), Some(seconds)) => Finding::ok(
            HEARTBEAT,
            format!("a peer that is stopped for less than {seconds} s stays known"),
        )
        .needs("the same where the store is hosted"),
    }
}

/// What the library takes for itself in each process, with the pages touched.
fn memory(machine: &Machine<'_>) -> Finding {
    let text = machine.variable(SEND_RECEIVE);
    // The library reads it as C does: with blanks before it and a sign.
    let count = text.as_deref().map(|text| text.trim_start().parse::<u32>());
    let count = count.and_then(Result::ok).filter(|count| *count > 0);
    let needed_mib = count.map_or(DEFAULT_COUNT, u64::from) * MIB_EACH;
    let found = match (&text, count) {
        (None, _) => "unset".to_owned(),
        (Some(text), None) => format!("'{text}', no number above zero, so the library ignores it"),
        (Some(_), Some(count)) => count.to_string(),
    };
    let found = format!("{found}: about {needed_mib} MiB for each process");
    let available_mib = meminfo(machine, "MemAvailable").map(|kb| kb / 1024);
    let mend = format!("export {SEND_RECEIVE}=16");
    if let Some(available) = available_mib.filter(|available| *available < needed_mib) {
        return Finding::problem(SEND_RECEIVE, found)
            .needs(format!(
                "1 MiB each for all processes of the machine together, of the {available} MiB that are available"
            ))
            .mend(mend);
    }
    match (&text, count) {
        (Some(_), None) => Finding::warning(SEND_RECEIVE, found)
            .needs("a number: the library takes 1 MiB for each")
            .mend(mend),
        _ => Finding::ok(SEND_RECEIVE, found),
    }
}

/// The files of CANN and the driver that the library looks for before anything
/// works, with any protocol.
pub fn files(machine: &Machine<'_>, linker: &Linker<'_>) -> Vec<Finding> {
    vec![home(machine, linker), driver(machine)]
}

fn home(machine: &Machine<'_>, linker: &Linker<'_>) -> Finding {
    const CHECK: &str = "ASCEND_HOME_PATH";
    let problem = |found: String| {
        Finding::problem(CHECK, found)
            .needs("CANN's folder: the published library looks there with any protocol")
            .mend(cann::source(machine))
    };
    let Some(home) = machine.variable(CHECK).filter(|home| !home.is_empty()) else {
        return problem("unset".to_owned());
    };
    let there = |name: &str| {
        machine.exists(Path::new(&home).join("lib64").join(name))
            || linker.find(name, &RunPaths::default()).is_ok()
    };
    let mut missing: Vec<&str> = [
        "libascendcl.so",
        "libascend_hal.so",
        "libra.so",
        "libtsdclient.so",
    ]
    .into_iter()
    .filter(|name| !there(name))
    .collect();
    if !there("libhccl.so") && !there("libhcomm.so") {
        missing.push("libhccl.so or libhcomm.so");
    }
    if missing.is_empty() {
        return Finding::ok(CHECK, home);
    }
    problem(format!(
        "{home}: neither its lib64 nor the linker's path has {}",
        missing.join(", ")
    ))
}

fn driver(machine: &Machine<'_>) -> Finding {
    const CHECK: &str = "driver version";
    let line = |path: &Path, key: &str| {
        let text = machine.text(path)?;
        let mut values = text.lines().filter_map(|line| line.strip_prefix(key));
        values.next().map(|value| value.trim().to_owned())
    };
    let problem = |found: String| {
        Finding::problem(CHECK, found)
            .needs(format!("the NPU's driver, {OLDEST_DRIVER} or later"))
            .mend("npu-smi info")
    };
    let Some(folder) = line(Path::new(INSTALL_INFO), "Driver_Install_Path_Param=") else {
        return problem(format!("{INSTALL_INFO} does not tell the driver's folder"));
    };
    let path = Path::new(&folder).join("driver/version.info");
    match line(&path, "Innerversion=") {
        // Its parts are compared by the library alone, which says so.
        Some(version) => Finding::ok(CHECK, format!("{version} in {}", path.display()))
            .needs(format!("{OLDEST_DRIVER} or later")),
        None => problem(format!("{} has no Innerversion", path.display())),
    }
}
