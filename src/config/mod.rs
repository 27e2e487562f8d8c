// SPDX-License-Identifier: Apache-2.0
//! Settings from the environment and from TENT's configuration.
//!
//! Values are matched exactly: no trimming, no case folding, no silent
//! substitute. The environment wins over the TENT keys.

mod given;
mod linked;
pub mod protocol;
pub mod table;
pub mod v1;

use std::path::PathBuf;
use std::time::Duration;

use tracing::warn;

pub use given::{Given, LogLevel, TentSettings, Value, Values};
pub use linked::Linked;
pub use protocol::{Generation, Protocol, Role};

use crate::code::Code;
use crate::endpoint::Host;
use crate::error::Error;

/// `MF_TRANSFER_TIMEOUT` where it is unset or unusable \[spec\].
pub const DEFAULT_TIMEOUT_MS: u64 = 10_000;

/// The library's file name, which the dynamic linker looks up.
pub const LIBRARY: &str = "libmf_smem.so";

/// Everything that an install needs to know, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Library to open: a name for the dynamic linker, or a path.
    pub library: PathBuf,
    /// A library of asynchronous batches to use in its place, which this program
    /// has linked in.
    pub linked: Option<Linked>,
    /// The fabric.
    pub protocol: Protocol,
    /// Deadline of quiesce, and of waits for busy memory.
    pub timeout: Duration,
    /// What a query answers for a batch that is still running; see
    /// [`Code::NEED_RETRY`].
    pub need_retry: i32,
    /// The address that the library listens on.
    pub host: Host,
    /// Verbosity of the library.
    pub log_level: LogLevel,
    /// What the published 1.x library is told; None for the one with
    /// asynchronous batches.
    pub v1: Option<v1::Settings>,
}

impl Config {
    /// Checks every setting. `environment` looks a variable up, and says None
    /// if it is unset; a value that is not UTF-8 comes as its lossy form.
    ///
    /// # Errors
    ///
    /// [`Error::ProtocolUnset`], [`Error::ProtocolUnknown`],
    /// [`Error::ProtocolPublishedOnly`], [`Error::SettingInvalid`],
    /// [`Error::SettingUnset`], [`Error::AddressInvalid`]. An unusable
    /// timeout is no error: a bad number must not cost the fast path, so it is
    /// a WARN event and the default.
    pub fn resolve(
        environment: impl Fn(&str) -> Option<String>,
        tent: &TentSettings,
    ) -> Result<Self, Error> {
        let given = |setting| Given::find(setting, &environment, tent);
        let generation = generation(&given(&table::ABI))?;
        let v1 = match generation {
            Generation::Batched => None,
            Generation::V1 => Some(v1::Settings::resolve(given)?),
        };
        Ok(Self {
            library: PathBuf::from(LIBRARY),
            linked: None,
            protocol: protocol(&given(&table::PROTOCOL), generation)?,
            v1,
            timeout: timeout(&given(&table::TRANSFER_TIMEOUT)),
            need_retry: need_retry(&given(&table::NEED_RETRY_CODE))?,
            host: Host::resolve(&tent.rpc_server_addr, &tent.local_segment_name)?,
            log_level: tent.log_level,
        })
    }

    /// The process environment, as [`Config::resolve`] takes it.
    pub fn process_environment(name: &str) -> Option<String> {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    }
}

/// The generation of the library that is configured.
///
/// # Errors
///
/// [`Error::SettingInvalid`].
pub fn generation(given: &Given) -> Result<Generation, Error> {
    match &given.value {
        Value::Absent => Ok(Generation::Batched),
        Value::Text(text) if text == "v1" => Ok(Generation::V1),
        _ => Err(given.invalid()),
    }
}

/// The protocol that is configured.
///
/// # Errors
///
/// [`Error::ProtocolUnset`], [`Error::ProtocolUnknown`],
/// [`Error::ProtocolPublishedOnly`].
pub fn protocol(given: &Given, generation: Generation) -> Result<Protocol, Error> {
    let key = given.name;
    let named = match &given.value {
        Value::Absent => return Err(Error::ProtocolUnset),
        Value::Text(name) => Protocol::named(name),
        _ => None,
    };
    match named {
        Some(Protocol::HostTcp) if generation == Generation::Batched => {
            Err(Error::ProtocolPublishedOnly { key })
        }
        Some(protocol) => Ok(protocol),
        None => Err(Error::ProtocolUnknown {
            key,
            value: match &given.value {
                Value::Text(name) => name.clone(),
                other => other.to_string(),
            },
            generation,
        }),
    }
}

fn timeout(given: &Given) -> Duration {
    if given.value == Value::Absent {
        return Duration::from_millis(DEFAULT_TIMEOUT_MS);
    }
    let usable = given.whole().filter(|ms| *ms > 0);
    Duration::from_millis(usable.unwrap_or_else(|| {
        warn!(
            setting = given.name,
            value = %given.value,
            used_ms = DEFAULT_TIMEOUT_MS,
            "timeout is not a positive whole number of milliseconds, using the default"
        );
        DEFAULT_TIMEOUT_MS
    }))
}

/// The code of a pending batch.
///
/// # Errors
///
/// [`Error::SettingInvalid`].
pub fn need_retry(given: &Given) -> Result<i32, Error> {
    let number = match given.value {
        Value::Absent => return Ok(Code::NEED_RETRY.0),
        Value::Integer(number) => i32::try_from(number).ok().filter(|code| *code != 0),
        _ => None,
    };
    number.ok_or_else(|| given.invalid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    fn tent() -> TentSettings {
        TentSettings {
            rpc_server_addr: "10.0.0.5:12345".to_owned(),
            ..TentSettings::default()
        }
    }

    /// With what the published library needs beyond being asked for.
    fn published() -> TentSettings {
        let text = |text: &str| Value::Text(text.to_owned());
        tent()
            .with(&table::STORE_URL, text("tcp://10.0.0.5:12000"))
            .with(&table::ROLE, text("sender"))
    }

    fn with(variables: &[(&str, &str)], tent: &TentSettings) -> Result<Config, Error> {
        Config::resolve(
            |name| {
                variables
                    .iter()
                    .find(|(variable, _)| *variable == name)
                    .map(|(_, value)| (*value).to_owned())
            },
            tent,
        )
    }

    #[test]
    fn case_09_the_five_protocols_are_known_by_their_names() {
        for name in [
            "device_sdma",
            "device_rdma",
            "host_rdma",
            "device_urma",
            "device_uboe",
        ] {
            let config = with(&[("MF_PROTOCOL", name)], &tent()).expect(name);
            assert_eq!(config.protocol.name(), name);
            let key = tent().with(&table::PROTOCOL, Value::Text(name.to_owned()));
            assert_eq!(with(&[], &key).expect(name).protocol.name(), name);
        }
    }

    #[test]
    fn case_09_an_unset_protocol_is_refused_with_the_five_names() {
        let error = with(&[], &tent()).expect_err("nothing is set");
        assert_eq!(error.status(), Status::InvalidArgument);
        let text = error.to_string();
        assert!(text.starts_with("MF_PROTOCOL must be set"), "{text}");
        for protocol in Protocol::ALL {
            assert!(text.contains(protocol.name()), "{text}");
        }
    }

    #[test]
    fn case_09_a_protocol_is_never_substituted() {
        for value in [
            "",
            "sdma",
            "Device_RDMA",
            "device_rdma ",
            " device_rdma",
            "device_rdma,host_rdma",
        ] {
            let error = with(&[("MF_PROTOCOL", value)], &tent()).expect_err(value);
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            assert!(
                text.contains(&format!("MF_PROTOCOL is '{value}'")),
                "{text}"
            );
            assert!(text.contains(&Protocol::names()), "{text}");
        }
        for value in [Value::Integer(1), Value::Other("null".to_owned())] {
            let key = tent().with(&table::PROTOCOL, value.clone());
            let text = with(&[], &key).expect_err("no string").to_string();
            assert!(text.contains(table::PROTOCOL.path), "{text}");
            assert!(text.contains(&value.to_string()), "{text}");
        }
    }

    #[test]
    fn an_abi_is_v1_or_refused_by_name_and_value() {
        for value in ["", "v2", "V1", "v1 ", "1", "1.3"] {
            let variables = [("MF_PROTOCOL", "host_rdma"), ("MF_ABI", value)];
            let error = with(&variables, &published()).expect_err(value);
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            let begin = format!("MF_ABI is '{value}', must be \"v1\"");
            assert!(text.starts_with(&begin), "{text}");
        }
        for (value, told) in [
            (Value::Text("v2".to_owned()), "'v2'"),
            (Value::Integer(1), "1"),
            (Value::Other("true".to_owned()), "true"),
        ] {
            let key = published().with(&table::ABI, value);
            let text = with(&[("MF_PROTOCOL", "host_rdma")], &key)
                .expect_err(told)
                .to_string();
            let begin = format!("{} is {told}, must be \"v1\"", table::ABI.path);
            assert!(text.starts_with(&begin), "{text}");
        }
    }

    #[test]
    fn the_published_library_is_asked_for_by_variable_or_key_and_never_by_chance() {
        let variables = [("MF_PROTOCOL", "host_rdma")];
        let config = with(&variables, &published()).expect("valid");
        assert_eq!(config.v1, None, "its other settings do not ask");
        let by_key = published().with(&table::ABI, Value::Text("v1".to_owned()));
        let by_variable = [("MF_PROTOCOL", "host_rdma"), ("MF_ABI", "v1")];
        for (variables, tent) in [(&variables[..], &by_key), (&by_variable, &published())] {
            let config = with(variables, tent).expect("valid");
            let settings = config.v1.expect("asked for");
            assert_eq!(settings.role, Role::Sender);
        }
        // What it needs is demanded only then.
        with(&variables, &tent()).expect("nothing of it is needed");
        let text = with(&by_variable, &tent())
            .expect_err("no store")
            .to_string();
        assert!(
            text.starts_with("MF_CONFIG_STORE_URL must be set"),
            "{text}"
        );
    }

    #[test]
    fn host_tcp_is_the_published_librarys_alone() {
        let key = published().with(&table::PROTOCOL, Value::Text("host_tcp".to_owned()));
        for (variables, tent, name) in [
            (
                &[("MF_PROTOCOL", "host_tcp")][..],
                &published(),
                "MF_PROTOCOL",
            ),
            (&[][..], &key, table::PROTOCOL.path),
        ] {
            let error = with(variables, tent).expect_err("not with the other library");
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            assert!(text.starts_with(&format!("{name} is 'host_tcp'")), "{text}");
            assert!(text.contains("MF_ABI=v1"), "{text}");
            assert!(text.contains(&Protocol::names()), "{text}");

            let asked: Vec<_> = variables
                .iter()
                .copied()
                .chain([("MF_ABI", "v1")])
                .collect();
            let config = with(&asked, tent).expect("the published library has it");
            assert_eq!(config.protocol, Protocol::HostTcp);
            assert!(!config.protocol.needs_device());
        }
        // It is offered where it can be had.
        for (abi, offered) in [(None, false), (Some(("MF_ABI", "v1")), true)] {
            let asked: Vec<_> = abi.into_iter().chain([("MF_PROTOCOL", "tcp")]).collect();
            let text = with(&asked, &published())
                .expect_err("no protocol")
                .to_string();
            assert!(text.contains(&Protocol::names()), "{text}");
            assert_eq!(text.contains("host_tcp"), offered, "{text}");
        }
    }

    #[test]
    fn the_environment_wins_over_the_tent_keys() {
        let key = tent()
            .with(&table::PROTOCOL, Value::Text("device_sdma".to_owned()))
            .with(&table::TRANSFER_TIMEOUT, Value::Integer(7));
        let config = with(
            &[("MF_PROTOCOL", "host_rdma"), ("MF_TRANSFER_TIMEOUT", "9")],
            &key,
        )
        .expect("both are valid");
        assert_eq!(config.protocol, Protocol::HostRdma);
        assert_eq!(config.timeout, Duration::from_millis(9));
        let config = with(&[], &key).expect("the keys are valid");
        assert_eq!(config.protocol, Protocol::DeviceSdma);
        assert_eq!(config.timeout, Duration::from_millis(7));
    }

    #[test]
    fn case_08_a_bad_timeout_is_the_default_and_a_good_one_is_not_cut() {
        for (value, ms) in [
            ("abc", DEFAULT_TIMEOUT_MS),
            ("", DEFAULT_TIMEOUT_MS),
            (" 500", DEFAULT_TIMEOUT_MS),
            ("500ms", DEFAULT_TIMEOUT_MS),
            ("-1", DEFAULT_TIMEOUT_MS),
            ("+5", DEFAULT_TIMEOUT_MS),
            ("0", DEFAULT_TIMEOUT_MS),
            ("1e3", DEFAULT_TIMEOUT_MS),
            ("99999999999999999999", DEFAULT_TIMEOUT_MS),
            ("4294967297", 4_294_967_297),
            ("250", 250),
        ] {
            let config = with(
                &[("MF_PROTOCOL", "host_rdma"), ("MF_TRANSFER_TIMEOUT", value)],
                &tent(),
            )
            .expect("a bad timeout does not cost the transport");
            assert_eq!(config.timeout, Duration::from_millis(ms), "'{value}'");
        }
        for value in [
            Value::Integer(-1),
            Value::Integer(0),
            Value::Text("500".to_owned()),
            Value::Other("1.5".to_owned()),
        ] {
            let key = tent().with(&table::TRANSFER_TIMEOUT, value);
            let config = with(&[("MF_PROTOCOL", "host_rdma")], &key).expect("the default");
            assert_eq!(config.timeout, Duration::from_millis(DEFAULT_TIMEOUT_MS));
        }
    }

    #[test]
    fn case_08_a_bad_need_retry_code_is_refused_by_key_and_value() {
        for (value, shown) in [
            (Value::Integer(0), "0"),
            (Value::Integer(1 << 31), "2147483648"),
            (Value::Integer(-(1 << 31) - 1), "-2147483649"),
            (Value::Text("1".to_owned()), "'1'"),
            (Value::Other("1.5".to_owned()), "1.5"),
            (Value::Other("null".to_owned()), "null"),
        ] {
            let key = tent().with(&table::NEED_RETRY_CODE, value);
            let error = with(&[("MF_PROTOCOL", "host_rdma")], &key).expect_err(shown);
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains(table::NEED_RETRY_CODE.path), "{text}");
            assert!(text.contains(&format!("is {shown},")), "{text}");
        }
        for code in [-2004, 7] {
            let key = tent().with(&table::NEED_RETRY_CODE, Value::Integer(code.into()));
            let config = with(&[("MF_PROTOCOL", "host_rdma")], &key).expect("in range");
            assert_eq!(config.need_retry, code);
        }
    }
}
