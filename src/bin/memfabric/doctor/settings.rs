//! `MF_PROTOCOL` and `MF_TRANSFER_TIMEOUT`, judged by the transport itself.

use std::sync::{Arc, Mutex, PoisonError};

use memfabric_transport::config::{DEFAULT_TIMEOUT_MS, TentSettings, Value};
use memfabric_transport::{Config, Error, Protocol};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use super::cann;
use super::machine::Machine;
use super::report::Finding;

const PROTOCOL: &str = "MF_PROTOCOL";
const TIMEOUT: &str = "MF_TRANSFER_TIMEOUT";

/// The protocol that the transport would use; None if it would refuse.
pub fn protocol(machine: &Machine<'_>, tent: &TentSettings) -> Result<Protocol, Error> {
    let (config, _) = resolve(
        |name| machine.variable(name).filter(|_| name == PROTOCOL),
        tent,
        |tent| {
            tent.need_retry_code = Value::Absent;
        },
    );
    config.map(|config| config.protocol)
}

/// What a query must answer for a batch that is still running, by the
/// transport's reading of the configuration.
pub fn need_retry(tent: &TentSettings) -> Result<i32, Error> {
    let (config, _) = resolve(|_| None, tent, |tent| tent.protocol = any_protocol());
    config.map(|config| config.need_retry)
}

/// Checks the settings.
pub fn check(machine: &Machine<'_>, tent: &TentSettings) -> Vec<Finding> {
    let mut findings = Vec::new();
    match protocol(machine, tent) {
        Err(error) => findings.push(
            Finding::problem(PROTOCOL, error.to_string())
                .needs(format!("one of {}", Protocol::names()))
                .mend("export MF_PROTOCOL=device_rdma"),
        ),
        Ok(protocol) => {
            let origin = match machine.variable(PROTOCOL) {
                Some(_) => "from the environment",
                None => "from transports/memfabric/protocol",
            };
            findings.push(Finding::ok(PROTOCOL, format!("{protocol}, {origin}")));
            findings.push(fit(machine, protocol));
        }
    }
    findings.push(timeout(machine, tent));
    if let Err(error) = need_retry(tent) {
        findings.push(
            Finding::problem("need_retry_code", error.to_string())
                .needs("absent, or the code of a pending batch"),
        );
    }
    findings
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
    let variable = |name: &str| machine.variable(name).filter(|_| name == TIMEOUT);
    let (config, warnings) = resolve(variable, tent, |tent| {
        tent.protocol = any_protocol();
        tent.need_retry_code = Value::Absent;
    });
    if let [warning, ..] = warnings.as_slice() {
        return Finding::warning(TIMEOUT, warning)
            .needs("a positive whole number of milliseconds")
            .mend(format!("export {TIMEOUT}={DEFAULT_TIMEOUT_MS}"));
    }
    match config {
        Ok(config) => {
            let set =
                machine.variable(TIMEOUT).is_some() || tent.transfer_timeout_ms != Value::Absent;
            let default = if set { "" } else { ", the default" };
            Finding::ok(
                TIMEOUT,
                format!("{} ms{default}", config.timeout.as_millis()),
            )
        }
        Err(error) => Finding::problem(TIMEOUT, error.to_string()),
    }
}

fn any_protocol() -> Value {
    Value::Text(Protocol::ALL[0].name().to_owned())
}

/// Runs the transport's own rules over settings of which `adjust` makes good all
/// but the one that is asked about, and catches what it would log.
fn resolve(
    environment: impl Fn(&str) -> Option<String>,
    tent: &TentSettings,
    adjust: impl Fn(&mut TentSettings),
) -> (Result<Config, Error>, Vec<String>) {
    let mut tent = TentSettings {
        // The engine tells its address at run time.
        rpc_server_addr: "127.0.0.1".to_owned(),
        ..tent.clone()
    };
    adjust(&mut tent);
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
