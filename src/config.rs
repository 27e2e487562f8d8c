//! Settings from the environment and from TENT's configuration.
//!
//! Values are matched exactly: no trimming, no case folding, no silent
//! substitute. The environment wins over the TENT keys.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tracing::warn;

use crate::endpoint::Host;
use crate::error::Error;
use crate::{abi, published};

/// `MF_TRANSFER_TIMEOUT` where it is unset or unusable \[spec\].
pub const DEFAULT_TIMEOUT_MS: u64 = 10_000;

/// The library's file name, which the dynamic linker looks up.
pub const LIBRARY: &str = "libmf_smem.so";

const PROTOCOL_VARIABLE: &str = "MF_PROTOCOL";
const PROTOCOL_KEY: &str = "transports/memfabric/protocol";
const TIMEOUT_VARIABLE: &str = "MF_TRANSFER_TIMEOUT";
const TIMEOUT_KEY: &str = "transports/memfabric/transfer_timeout_ms";
const NEED_RETRY_KEY: &str = "transports/memfabric/need_retry_code";
const ABI_VARIABLE: &str = "MF_ABI";
const ABI_KEY: &str = "transports/memfabric/abi";

/// The fabric that the library moves data over \[spec\].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// `device_sdma`.
    DeviceSdma,
    /// `device_rdma`.
    DeviceRdma,
    /// `host_rdma`, which needs no NPU.
    HostRdma,
    /// `device_urma`.
    DeviceUrma,
    /// `device_uboe`.
    DeviceUboe,
    /// `host_tcp`, which needs no NPU and which only the published library has.
    HostTcp,
}

impl Protocol {
    /// The five of the specification, in its order.
    pub const ALL: [Self; 5] = [
        Self::DeviceSdma,
        Self::DeviceRdma,
        Self::HostRdma,
        Self::DeviceUrma,
        Self::DeviceUboe,
    ];

    /// The name that `MF_PROTOCOL` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::DeviceSdma => "device_sdma",
            Self::DeviceRdma => "device_rdma",
            Self::HostRdma => "host_rdma",
            Self::DeviceUrma => "device_urma",
            Self::DeviceUboe => "device_uboe",
            Self::HostTcp => "host_tcp",
        }
    }

    /// The library's `smem_bm_data_op_type` \[pub\].
    pub fn data_op_type(self) -> u32 {
        match self {
            Self::DeviceSdma => abi::SMEMB_DATA_OP_SDMA,
            Self::DeviceRdma => abi::SMEMB_DATA_OP_DEVICE_RDMA,
            Self::HostRdma => abi::SMEMB_DATA_OP_HOST_RDMA,
            Self::DeviceUrma => abi::SMEMB_DATA_OP_DEVICE_URMA,
            Self::DeviceUboe => abi::SMEMB_DATA_OP_DEVICE_UBOE,
            Self::HostTcp => published::abi::SMEMB_DATA_OP_HOST_TCP,
        }
    }

    /// Whether an Ascend device must be current in the installing thread.
    pub fn needs_device(self) -> bool {
        !matches!(self, Self::HostRdma | Self::HostTcp)
    }

    /// The five names, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// The names that a generation of the library has.
    pub fn names_with(generation: Generation) -> String {
        match generation {
            Generation::Asynchronous => Self::names(),
            Generation::Published => format!("{}, {}", Self::names(), Self::HostTcp),
        }
    }

    fn parse(key: &'static str, value: &str, generation: Generation) -> Result<Self, Error> {
        if value == Self::HostTcp.name() {
            return match generation {
                Generation::Published => Ok(Self::HostTcp),
                Generation::Asynchronous => Err(Error::ProtocolPublishedOnly { key }),
            };
        }
        Self::ALL
            .into_iter()
            .find(|protocol| protocol.name() == value)
            .ok_or_else(|| Error::ProtocolUnknown {
                key,
                value: value.to_owned(),
                generation,
            })
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which revision of the library's interface is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Generation {
    /// With asynchronous batches and the four-argument query \[spec\].
    #[default]
    Asynchronous,
    /// The published 1.x, whose copies are synchronous \[pub\].
    Published,
}

/// TENT's `log_level`, which the library follows as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// `info`, TENT's default.
    #[default]
    Info = 1,
    /// `warning`.
    Warning = 2,
    /// `error`.
    Error = 3,
}

impl LogLevel {
    /// The number that `smem_set_log_level` takes \[pub\].
    pub fn vendor_level(self) -> i32 {
        self as i32
    }
}

/// A value of TENT's JSON configuration, as far as settings look into it.
///
/// TENT's own getters turn a value of another type into the default without a
/// word, so the shim hands over what is really there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Value {
    /// The key is not there.
    #[default]
    Absent,
    /// A JSON string.
    Text(String),
    /// A JSON integer.
    Integer(i64),
    /// Anything else, as JSON text: a fraction, null, a larger integer, a list.
    Other(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("absent"),
            Self::Text(text) => write!(f, "'{text}'"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Other(json) => f.write_str(json),
        }
    }
}

/// The keys under `transports/memfabric/`, and what else TENT contributes.
#[derive(Clone, Debug, Default)]
pub struct TentSettings {
    /// `protocol`.
    pub protocol: Value,
    /// `transfer_timeout_ms`.
    pub transfer_timeout_ms: Value,
    /// `need_retry_code`.
    pub need_retry_code: Value,
    /// `abi`.
    pub abi: Value,
    /// What the published library alone is told.
    pub published: published::TentSettings,
    /// The engine's `log_level`.
    pub log_level: LogLevel,
    /// The local segment's `rpc_server_addr`.
    pub rpc_server_addr: String,
    /// The engine's name for the local segment.
    pub local_segment_name: String,
}

/// Everything that an install needs to know, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Library to open: a name for the dynamic linker, or a path.
    pub library: PathBuf,
    /// The fabric.
    pub protocol: Protocol,
    /// Deadline of quiesce, and of waits for busy memory.
    pub timeout: Duration,
    /// What a query answers for a batch that is still running; see
    /// [`abi::SM_NEED_RETRY`].
    pub need_retry: i32,
    /// The address that the library listens on.
    pub host: Host,
    /// Verbosity of the library.
    pub log_level: LogLevel,
    /// What the published 1.x library is told; None for the one with
    /// asynchronous batches.
    pub published: Option<published::Settings>,
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
        let generation = generation(environment(ABI_VARIABLE), &tent.abi)?;
        let published = match generation {
            Generation::Asynchronous => None,
            Generation::Published => {
                Some(published::Settings::resolve(&environment, &tent.published)?)
            }
        };
        Ok(Self {
            library: PathBuf::from(LIBRARY),
            protocol: protocol(environment(PROTOCOL_VARIABLE), &tent.protocol, generation)?,
            published,
            timeout: timeout(environment(TIMEOUT_VARIABLE), &tent.transfer_timeout_ms),
            need_retry: need_retry(&tent.need_retry_code)?,
            host: Host::resolve(&tent.rpc_server_addr, &tent.local_segment_name)?,
            log_level: tent.log_level,
        })
    }

    /// The process environment, as [`Config::resolve`] takes it.
    pub fn process_environment(name: &str) -> Option<String> {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    }
}

fn generation(variable: Option<String>, key: &Value) -> Result<Generation, Error> {
    let (name, value) = match (variable, key) {
        (Some(value), _) => (ABI_VARIABLE, Value::Text(value)),
        (None, Value::Absent) => return Ok(Generation::Asynchronous),
        (None, value) => (ABI_KEY, value.clone()),
    };
    match value {
        Value::Text(text) if text == "v1" => Ok(Generation::Published),
        value => Err(Error::SettingInvalid {
            key: name,
            value: value.to_string(),
            accepted: "\"v1\" for the published 1.x library, or left out for the other",
        }),
    }
}

fn protocol(
    variable: Option<String>,
    key: &Value,
    generation: Generation,
) -> Result<Protocol, Error> {
    match (variable, key) {
        (Some(value), _) => Protocol::parse(PROTOCOL_VARIABLE, &value, generation),
        (None, Value::Absent) => Err(Error::ProtocolUnset),
        (None, Value::Text(value)) => Protocol::parse(PROTOCOL_KEY, value, generation),
        (None, other) => Err(Error::ProtocolUnknown {
            key: PROTOCOL_KEY,
            value: other.to_string(),
            generation,
        }),
    }
}

fn timeout(variable: Option<String>, key: &Value) -> Duration {
    let (name, value, usable) = match (variable, key) {
        (Some(value), _) => {
            let usable = positive_whole(&value);
            (TIMEOUT_VARIABLE, format!("'{value}'"), usable)
        }
        (None, Value::Absent) => return Duration::from_millis(DEFAULT_TIMEOUT_MS),
        (None, value) => {
            let usable = match value {
                Value::Integer(number) => u64::try_from(*number).ok().filter(|ms| *ms > 0),
                _ => None,
            };
            (TIMEOUT_KEY, value.to_string(), usable)
        }
    };
    Duration::from_millis(usable.unwrap_or_else(|| {
        warn!(
            setting = name,
            value,
            used_ms = DEFAULT_TIMEOUT_MS,
            "timeout is not a positive whole number of milliseconds, using the default"
        );
        DEFAULT_TIMEOUT_MS
    }))
}

fn positive_whole(value: &str) -> Option<u64> {
    whole(value).filter(|number| *number > 0)
}

/// Digits only: `parse` alone would also take a plus sign.
pub(crate) fn whole(value: &str) -> Option<u64> {
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| digits)
}

fn need_retry(key: &Value) -> Result<i32, Error> {
    let number = match key {
        Value::Absent => return Ok(abi::SM_NEED_RETRY),
        Value::Integer(number) => i32::try_from(*number).ok().filter(|code| *code != 0),
        Value::Text(_) | Value::Other(_) => None,
    };
    number.ok_or_else(|| Error::SettingInvalid {
        key: NEED_RETRY_KEY,
        value: key.to_string(),
        accepted: "a whole number other than 0 within 32 bits (the code of a pending batch)",
    })
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
        TentSettings {
            published: published::TentSettings {
                store_url: Value::Text("tcp://10.0.0.5:12000".to_owned()),
                role: Value::Text("sender".to_owned()),
                ..published::TentSettings::default()
            },
            ..tent()
        }
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
    fn case_09_the_five_protocols_reach_the_library_as_their_own_bit() {
        for (name, bit) in [
            ("device_sdma", 1 << 0),
            ("device_rdma", 1 << 3),
            ("host_rdma", 1 << 1),
            ("device_urma", 1 << 6),
            ("device_uboe", 1 << 7),
        ] {
            let config = with(&[("MF_PROTOCOL", name)], &tent()).expect(name);
            assert_eq!(config.protocol.data_op_type(), bit, "{name}");
            let key = TentSettings {
                protocol: Value::Text(name.to_owned()),
                ..tent()
            };
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
            let key = TentSettings {
                protocol: value.clone(),
                ..tent()
            };
            let text = with(&[], &key).expect_err("no string").to_string();
            assert!(text.contains(PROTOCOL_KEY), "{text}");
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
            let key = TentSettings {
                abi: value,
                ..published()
            };
            let text = with(&[("MF_PROTOCOL", "host_rdma")], &key)
                .expect_err(told)
                .to_string();
            let begin = format!("{ABI_KEY} is {told}, must be \"v1\"");
            assert!(text.starts_with(&begin), "{text}");
        }
    }

    #[test]
    fn the_published_library_is_asked_for_by_variable_or_key_and_never_by_chance() {
        let variables = [("MF_PROTOCOL", "host_rdma")];
        let config = with(&variables, &published()).expect("valid");
        assert_eq!(config.published, None, "its other settings do not ask");
        let by_key = TentSettings {
            abi: Value::Text("v1".to_owned()),
            ..published()
        };
        let by_variable = [("MF_PROTOCOL", "host_rdma"), ("MF_ABI", "v1")];
        for (variables, tent) in [(&variables[..], &by_key), (&by_variable, &published())] {
            let config = with(variables, tent).expect("valid");
            let settings = config.published.expect("asked for");
            assert_eq!(settings.role, published::Role::Sender);
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
        let key = TentSettings {
            protocol: Value::Text("host_tcp".to_owned()),
            ..published()
        };
        for (variables, tent, name) in [
            (
                &[("MF_PROTOCOL", "host_tcp")][..],
                &published(),
                "MF_PROTOCOL",
            ),
            (&[][..], &key, PROTOCOL_KEY),
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
            assert_eq!(config.protocol.data_op_type(), 1 << 2);
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
        let key = TentSettings {
            protocol: Value::Text("device_sdma".to_owned()),
            transfer_timeout_ms: Value::Integer(7),
            ..tent()
        };
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
            let key = TentSettings {
                transfer_timeout_ms: value,
                ..tent()
            };
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
            let key = TentSettings {
                need_retry_code: value,
                ..tent()
            };
            let error = with(&[("MF_PROTOCOL", "host_rdma")], &key).expect_err(shown);
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains(NEED_RETRY_KEY), "{text}");
            assert!(text.contains(&format!("is {shown},")), "{text}");
        }
        for code in [-2004, 7] {
            let key = TentSettings {
                need_retry_code: Value::Integer(code.into()),
                ..tent()
            };
            let config = with(&[("MF_PROTOCOL", "host_rdma")], &key).expect("in range");
            assert_eq!(config.need_retry, code);
        }
    }
}
