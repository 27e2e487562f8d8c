// SPDX-License-Identifier: Apache-2.0
//! What the transport is told, judged by the transport itself.

use std::sync::{Arc, Mutex, PoisonError};

use memfabric_transport::config::table::{self, Setting};
use memfabric_transport::config::v1;
use memfabric_transport::config::{DEFAULT_TIMEOUT_MS, Generation, TentSettings, Value};
use memfabric_transport::{Config, Error, Protocol};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use super::cann;
use super::machine::Machine;
use super::report::Finding;

const ABI: &str = "MF_ABI";
const PROTOCOL: &str = "MF_PROTOCOL";
const TIMEOUT: &str = "MF_TRANSFER_TIMEOUT";
/// The value that asks for the published library.
const V1: &str = "v1";

/// Which revision of the library the transport would use.
pub fn generation(machine: &Machine<'_>, tent: &TentSettings) -> Result<Generation, Error> {
    let (config, _) = resolve(machine, ABI, |asked| {
        asked.set(&table::ABI, tent.get(&table::ABI).clone())
    });
    config.map(|config| match config.v1 {
        Some(_) => Generation::V1,
        None => Generation::Batched,
    })
}

/// The protocol that the transport would use with this revision.
pub fn protocol(
    machine: &Machine<'_>,
    tent: &TentSettings,
    generation: Generation,
) -> Result<Protocol, Error> {
    let (config, _) = resolve(machine, PROTOCOL, |asked| {
        asked.set(&table::PROTOCOL, tent.get(&table::PROTOCOL).clone());
        asked.set(&table::ABI, abi(generation));
    });
    config.map(|config| config.protocol)
}

/// What a query must answer for a batch that is still running, by the
/// transport's reading of the configuration.
pub fn need_retry(machine: &Machine<'_>, tent: &TentSettings) -> Result<i32, Error> {
    let (config, _) = resolve(machine, "", |asked| {
        asked.set(
            &table::NEED_RETRY_CODE,
            tent.get(&table::NEED_RETRY_CODE).clone(),
        );
    });
    config.map(|config| config.need_retry)
}

/// What the published library would be told, if of its settings only the one that
/// this one is the machine's.
pub fn published(
    machine: &Machine<'_>,
    tent: &TentSettings,
    setting: &Setting,
) -> Result<Option<v1::Settings>, Error> {
    let (config, _) = resolve(machine, setting.variable.unwrap_or_default(), |asked| {
        asked.set(&table::ABI, abi(Generation::V1));
        asked.set(setting, tent.get(setting).clone());
    });
    config.map(|config| config.v1)
}

/// Checks the settings that both revisions have.
pub fn check(machine: &Machine<'_>, tent: &TentSettings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let generation = generation(machine, tent);
    match &generation {
        Err(error) => findings.push(
            Finding::problem(ABI, error.to_string())
                .needs("v1 for the published 1.x library, or nothing")
                .mend(format!("export {ABI}={V1}")),
        ),
        Ok(Generation::V1) => {
            let origin = origin(machine, ABI, "abi");
            findings.push(Finding::ok(
                ABI,
                format!("{V1}, {origin}: the published 1.x library"),
            ));
        }
        Ok(Generation::Batched) => {}
    }
    match protocol(machine, tent, generation.unwrap_or_default()) {
        Err(error) => findings.push(
            Finding::problem(PROTOCOL, error.to_string())
                .needs(format!("one of {}", Protocol::names()))
                .mend("export MF_PROTOCOL=device_rdma"),
        ),
        Ok(protocol) => {
            let origin = origin(machine, PROTOCOL, "protocol");
            findings.push(Finding::ok(PROTOCOL, format!("{protocol}, {origin}")));
            findings.push(fit(machine, protocol));
        }
    }
    findings.push(timeout(machine, tent));
    if let Err(error) = need_retry(machine, tent) {
        findings.push(
            Finding::problem("need_retry_code", error.to_string())
                .needs("absent, or the code of a pending batch"),
        );
    }
    findings
}

/// Where a setting that is there comes from.
pub fn origin(machine: &Machine<'_>, variable: &str, key: &str) -> String {
    match machine.variable(variable) {
        Some(_) => "from the environment".to_owned(),
        None => format!("from transports/memfabric/{key}"),
    }
}

/// Whether the machine has what the protocol moves data over.
fn fit(machine: &Machine<'_>, protocol: Protocol) -> Finding {
    const CHECK: &str = "protocol fit";
    if protocol.needs_device() {
        let count = cann::nodes(machine).len();
        return if count == 0 {
            Finding::problem(CHECK, format!("{protocol} needs an NPU, and there is none"))
                .needs("a protocol for what is here")
                .mend("export MF_PROTOCOL=host_rdma")
        } else {
            Finding::ok(CHECK, format!("{protocol} with {count} NPUs"))
        };
    }
    if protocol == Protocol::HostTcp {
        return Finding::warning(
            CHECK,
            format!("{protocol}: the library listens on 127.0.0.1, whatever the settings say"),
        )
        .needs("a protocol for a fabric, unless this is a trial within one machine");
    }
    const CARDS: &str = "/sys/class/infiniband";
    let cards = machine.list(CARDS);
    if !cards.is_empty() {
        return Finding::ok(CHECK, format!("{protocol} with {}", cards.join(" ")));
    }
    let found = if machine.exists("/sys/class") {
        format!("{protocol} needs an RDMA card, and {CARDS} has none")
    } else {
        "there is no /sys to look for RDMA cards in".to_owned()
    };
    Finding::warning(CHECK, found)
        .needs("an RDMA card with its driver, in a container with its devices")
        .mend("docker run --device=/dev/infiniband …")
}

fn timeout(machine: &Machine<'_>, tent: &TentSettings) -> Finding {
    let (config, warnings) = resolve(machine, TIMEOUT, |asked| {
        asked.set(
            &table::TRANSFER_TIMEOUT,
            tent.get(&table::TRANSFER_TIMEOUT).clone(),
        );
    });
    if let [warning, ..] = warnings.as_slice() {
        return Finding::warning(TIMEOUT, warning)
            .needs("a positive whole number of milliseconds")
            .mend(format!("export {TIMEOUT}={DEFAULT_TIMEOUT_MS}"));
    }
    match config {
        Ok(config) => {
            let set = machine.variable(TIMEOUT).is_some()
                || *tent.get(&table::TRANSFER_TIMEOUT) != Value::Absent;
            let default = if set { "" } else { ", the default" };
            Finding::ok(
                TIMEOUT,
                format!("{} ms{default}", config.timeout.as_millis()),
            )
        }
        Err(error) => Finding::problem(TIMEOUT, error.to_string()),
    }
}

fn abi(generation: Generation) -> Value {
    match generation {
        Generation::Batched => Value::Absent,
        Generation::V1 => Value::Text(V1.to_owned()),
    }
}

/// Runs the transport's own rules over settings that are all usable, but for the
/// one that `ask` replaces and `variable` names; and catches what it would log.
fn resolve(
    machine: &Machine<'_>,
    variable: &str,
    ask: impl FnOnce(&mut TentSettings),
) -> (Result<Config, Error>, Vec<String>) {
    let text = |text: &str| Value::Text(text.to_owned());
    let mut tent = TentSettings {
        // The engine tells its address at run time.
        rpc_server_addr: "127.0.0.1".to_owned(),
        ..TentSettings::default()
    };
    tent.set(&table::PROTOCOL, text(Protocol::ALL[0].name()));
    tent.set(&table::STORE_URL, text("tcp://127.0.0.1:12000"));
    tent.set(
        &table::ROLE,
        text(memfabric_transport::config::Role::Sender.name()),
    );
    ask(&mut tent);
    let environment = |name: &str| machine.variable(name).filter(|_| name == variable);
    let caught = Caught::default();
    let subscriber = tracing_subscriber::registry().with(caught.clone());
    let config =
        tracing::subscriber::with_default(subscriber, || Config::resolve(environment, &tent));
    let lines = caught.0.lock().unwrap_or_else(PoisonError::into_inner);
    (config, lines.clone())
}

/// Keeps events as lines.
#[derive(Clone, Default)]
struct Caught(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Caught {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = Line::default();
        event.record(&mut line);
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push(format!("{}{}", line.message, line.fields));
    }
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn add(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            name => self.fields += &format!(", {name}={value}"),
        }
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.add(field, format!("{value:?}"));
    }
}
