//! Settings that only the published library has.

use std::ffi::CString;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::abi;
use crate::abi::SMEM_URL_BYTES;
use crate::config::{Value, whole};
use crate::error::Error;

/// How long a peer's new region may stay unknown to this process; the longest
/// that was seen is 34 ms \[pub\].
const DEFAULT_PATIENCE: Duration = Duration::from_millis(250);
/// The longest patience that can be set: a wrong address holds up its peer's
/// transfers for as long.
const LONGEST_PATIENCE: Duration = Duration::from_secs(10);

/// A setting's two names, and what it takes.
struct Name {
    variable: &'static str,
    key: &'static str,
    accepted: &'static str,
}

const STORE_URL: Name = Name {
    variable: "MF_CONFIG_STORE_URL",
    key: "transports/memfabric/store_url",
    accepted: "tcp://ip:port with a numeric address and a port over 1024",
};
const STORE_HOST: Name = Name {
    variable: "MF_CONFIG_STORE_HOST",
    key: "transports/memfabric/store_host",
    accepted: "true in one process of a store, else false",
};
const ROLE: Name = Name {
    variable: "MF_ROLE",
    key: "transports/memfabric/role",
    accepted: "sender or receiver",
};
const NIC: Name = Name {
    variable: "MF_NIC",
    key: "transports/memfabric/nic",
    accepted: "tcp://ip:port of the network card with a numeric address",
};
const PATIENCE: Name = Name {
    variable: "MF_VISIBILITY_PATIENCE",
    key: "transports/memfabric/visibility_patience_ms",
    accepted: "a whole number of milliseconds from 0 to 10000",
};

/// On which side of a transfer's connection this process is; each side can read
/// and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `sender`, such as a prefill node.
    Sender,
    /// `receiver`, such as a decode node.
    Receiver,
}

impl Role {
    /// The name that `MF_ROLE` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sender => "sender",
            Self::Receiver => "receiver",
        }
    }

    /// The library's `smem_trans_role_t`.
    pub(super) fn vendor_role(self) -> u32 {
        match self {
            Self::Sender => abi::SMEM_TRANS_SENDER,
            Self::Receiver => abi::SMEM_TRANS_RECEIVER,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The keys under `transports/memfabric/`.
#[derive(Clone, Debug, Default)]
pub struct TentSettings {
    /// `store_url`.
    pub store_url: Value,
    /// `store_host`.
    pub store_host: Value,
    /// `role`.
    pub role: Value,
    /// `nic`.
    pub nic: Value,
    /// `visibility_patience_ms`.
    pub visibility_patience_ms: Value,
}

/// What the published library is told beyond the rest, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The configuration store, `tcp://ip:port`.
    pub store_url: CString,
    /// Whether this process hosts the store.
    pub store_host: bool,
    /// Its side.
    pub role: Role,
    /// Network card as `tcp://ip:port`; None for the library's choice.
    pub nic: Option<CString>,
    /// How long a transfer is tried again while the peer's region is unknown.
    pub patience: Duration,
    /// Port of this process's unique id; 0 for one that no other process of this
    /// machine has. Not a setting: a restart under one id is for tests.
    pub port: u16,
}

impl Settings {
    /// Checks every setting; the environment wins over the TENT keys.
    ///
    /// # Errors
    ///
    /// [`Error::SettingUnset`] for the store and the role, and
    /// [`Error::SettingInvalid`].
    pub(crate) fn resolve(
        environment: impl Fn(&str) -> Option<String>,
        tent: &TentSettings,
    ) -> Result<Self, Error> {
        let find = |name: &Name, key: &Value| match environment(name.variable) {
            Some(text) => Value::Text(text),
            None => key.clone(),
        };
        let from_environment = |name: &Name| environment(name.variable).is_some();
        let invalid = |name: &Name, value: &Value| Error::SettingInvalid {
            key: match from_environment(name) {
                true => name.variable,
                false => name.key,
            },
            value: value.to_string(),
            accepted: name.accepted,
        };
        let required = |name: &Name, key: &Value| match find(name, key) {
            Value::Absent => Err(Error::SettingUnset {
                variable: name.variable,
                key: name.key,
                accepted: name.accepted,
            }),
            value => Ok(value),
        };

        let value = required(&STORE_URL, &tent.store_url)?;
        let store_url = url(&value)
            .filter(|(_, address)| address.port() > 1024)
            .ok_or_else(|| invalid(&STORE_URL, &value))?
            .0;
        let value = find(&STORE_HOST, &tent.store_host);
        let store_host = match &value {
            Value::Absent => false,
            Value::Text(text) | Value::Other(text) if text == "true" => true,
            Value::Text(text) | Value::Other(text) if text == "false" => false,
            _ => return Err(invalid(&STORE_HOST, &value)),
        };
        let value = required(&ROLE, &tent.role)?;
        let role = match &value {
            Value::Text(text) => [Role::Sender, Role::Receiver]
                .into_iter()
                .find(|role| role.name() == text),
            _ => None,
        };
        let role = role.ok_or_else(|| invalid(&ROLE, &value))?;
        let nic = match find(&NIC, &tent.nic) {
            Value::Absent => None,
            value => Some(url(&value).ok_or_else(|| invalid(&NIC, &value))?.0),
        };
        let value = find(&PATIENCE, &tent.visibility_patience_ms);
        let patience = match &value {
            Value::Absent => Some(DEFAULT_PATIENCE),
            Value::Text(text) if from_environment(&PATIENCE) => {
                whole(text).map(Duration::from_millis)
            }
            Value::Integer(number) => u64::try_from(*number).ok().map(Duration::from_millis),
            Value::Text(_) | Value::Other(_) => None,
        };
        let patience = patience
            .filter(|patience| *patience <= LONGEST_PATIENCE)
            .ok_or_else(|| invalid(&PATIENCE, &value))?;
        Ok(Self {
            store_url,
            store_host,
            role,
            nic,
            patience,
            port: 0,
        })
    }
}

/// `tcp://ip:port` that fits into the library's field.
fn url(value: &Value) -> Option<(CString, SocketAddr)> {
    let Value::Text(text) = value else {
        return None;
    };
    let address = text.strip_prefix("tcp://")?.parse().ok()?;
    let text = CString::new(text.as_str()).ok()?;
    (text.as_bytes_with_nul().len() <= SMEM_URL_BYTES).then_some((text, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    const GOOD: [(&str, &str); 2] = [
        ("MF_CONFIG_STORE_URL", "tcp://10.0.0.5:12000"),
        ("MF_ROLE", "sender"),
    ];

    fn with(changed: &[(&str, &str)]) -> Result<Settings, Error> {
        let look = |name: &str| {
            let all = changed.iter().chain(&GOOD);
            let mut found = all.filter(|(variable, _)| *variable == name);
            found.next().map(|(_, value)| (*value).to_owned())
        };
        Settings::resolve(look, &TentSettings::default())
    }

    #[test]
    fn the_store_and_the_role_must_be_set() {
        for variable in ["MF_CONFIG_STORE_URL", "MF_ROLE"] {
            let look = |name: &str| {
                let mut good = GOOD.iter().filter(|(known, _)| *known == name);
                let found = good.next().filter(|_| name != variable);
                found.map(|(_, value)| (*value).to_owned())
            };
            let error = Settings::resolve(look, &TentSettings::default()).expect_err(variable);
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("{variable} must be set")),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_set_is_used_and_what_is_not_has_its_default() {
        let settings = with(&[]).expect("complete");
        assert_eq!(settings.store_url.to_str(), Ok("tcp://10.0.0.5:12000"));
        assert!(!settings.store_host);
        assert_eq!(settings.role, Role::Sender);
        assert_eq!(settings.nic, None);
        assert_eq!(settings.patience, Duration::from_millis(250));
        let settings = with(&[
            ("MF_CONFIG_STORE_HOST", "true"),
            ("MF_ROLE", "receiver"),
            ("MF_NIC", "tcp://[fe80::1]:9000"),
            ("MF_VISIBILITY_PATIENCE", "0"),
        ])
        .expect("valid");
        assert!(settings.store_host);
        assert_eq!(settings.role, Role::Receiver);
        assert_eq!(settings.nic.as_deref(), Some(c"tcp://[fe80::1]:9000"));
        assert_eq!(settings.patience, Duration::ZERO);
    }

    #[test]
    fn tent_keys_serve_where_the_environment_has_none() {
        let tent = TentSettings {
            store_url: Value::Text("tcp://10.0.0.7:13000".to_owned()),
            store_host: Value::Other("true".to_owned()),
            role: Value::Text("receiver".to_owned()),
            nic: Value::Absent,
            visibility_patience_ms: Value::Integer(40),
        };
        let settings = Settings::resolve(|_| None, &tent).expect("valid");
        assert_eq!(settings.store_url.to_str(), Ok("tcp://10.0.0.7:13000"));
        assert!(settings.store_host);
        assert_eq!(settings.role, Role::Receiver);
        assert_eq!(settings.patience, Duration::from_millis(40));
    }

    #[test]
    fn a_bad_value_is_refused_by_name_and_value() {
        for (variable, value) in [
            ("MF_CONFIG_STORE_URL", ""),
            ("MF_CONFIG_STORE_URL", "10.0.0.5:12000"),
            ("MF_CONFIG_STORE_URL", "tcp://localhost:12000"),
            ("MF_CONFIG_STORE_URL", "tcp://10.0.0.5:1024"),
            ("MF_CONFIG_STORE_URL", "tcp://10.0.0.5:70000"),
            ("MF_CONFIG_STORE_URL", "tcp://10.0.0.5"),
            ("MF_CONFIG_STORE_HOST", "1"),
            ("MF_CONFIG_STORE_HOST", "TRUE"),
            ("MF_ROLE", "both"),
            ("MF_ROLE", "Sender"),
            ("MF_NIC", "eth0"),
            ("MF_VISIBILITY_PATIENCE", "-1"),
            ("MF_VISIBILITY_PATIENCE", "+1"),
            ("MF_VISIBILITY_PATIENCE", "10001"),
            ("MF_VISIBILITY_PATIENCE", "250ms"),
        ] {
            let error = with(&[(variable, value)]).expect_err(value);
            assert_eq!(error.status(), Status::InvalidArgument);
            let text = error.to_string();
            assert!(
                text.contains(&format!("{variable} is '{value}', must be ")),
                "{text}"
            );
        }
    }
}
