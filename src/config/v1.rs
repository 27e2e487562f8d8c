// SPDX-License-Identifier: Apache-2.0
//! Settings that only the published library has.

use std::ffi::CString;
use std::net::SocketAddr;
use std::time::Duration;

use super::given::{Given, Value};
use super::protocol::Role;
use super::table::{self, Setting};
use crate::endpoint::MAX_BYTES;
use crate::error::Error;

/// How long a peer's new region may stay unknown to this process; the longest
/// that was seen is 34 ms \[pub\].
const DEFAULT_PATIENCE: Duration = Duration::from_millis(250);
/// The longest patience that can be set: a wrong address holds up its peer's
/// transfers for as long.
const LONGEST_PATIENCE: Duration = Duration::from_secs(10);

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
    /// Checks every setting.
    ///
    /// # Errors
    ///
    /// [`Error::SettingUnset`] for the store and the role, and
    /// [`Error::SettingInvalid`].
    pub(super) fn resolve(given: impl Fn(&'static Setting) -> Given) -> Result<Self, Error> {
        let store_url = store_url(&given(&table::STORE_URL))?;
        let store_host = store_host(&given(&table::STORE_HOST))?;
        let role = role(&given(&table::ROLE))?;
        let nic = nic(&given(&table::NIC))?;
        let patience = patience(&given(&table::VISIBILITY_PATIENCE))?;
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

fn unset(given: &Given) -> Error {
    Error::SettingUnset {
        variable: given.setting.variable.unwrap_or(given.setting.path),
        key: given.setting.path,
        accepted: given.setting.accepted,
    }
}

fn store_url(given: &Given) -> Result<CString, Error> {
    if given.value == Value::Absent {
        return Err(unset(given));
    }
    let url = url(&given.value).filter(|(_, address)| address.port() > 1024);
    Ok(url.ok_or_else(|| given.invalid())?.0)
}

fn store_host(given: &Given) -> Result<bool, Error> {
    match &given.value {
        Value::Absent => Ok(false),
        Value::Text(text) | Value::Other(text) if text == "true" => Ok(true),
        Value::Text(text) | Value::Other(text) if text == "false" => Ok(false),
        _ => Err(given.invalid()),
    }
}

fn role(given: &Given) -> Result<Role, Error> {
    let mut roles = [Role::Sender, Role::Receiver].into_iter();
    let role = match &given.value {
        Value::Absent => return Err(unset(given)),
        Value::Text(text) => roles.find(|role| role.name() == text),
        _ => None,
    };
    role.ok_or_else(|| given.invalid())
}

fn nic(given: &Given) -> Result<Option<CString>, Error> {
    match &given.value {
        Value::Absent => Ok(None),
        value => Ok(Some(url(value).ok_or_else(|| given.invalid())?.0)),
    }
}

fn patience(given: &Given) -> Result<Duration, Error> {
    let patience = match &given.value {
        Value::Absent => Some(DEFAULT_PATIENCE),
        _ => given.whole().map(Duration::from_millis),
    };
    patience
        .filter(|patience| *patience <= LONGEST_PATIENCE)
        .ok_or_else(|| given.invalid())
}

/// `tcp://ip:port` that fits into the library's field.
fn url(value: &Value) -> Option<(CString, SocketAddr)> {
    let Value::Text(text) = value else {
        return None;
    };
    let address = text.strip_prefix("tcp://")?.parse().ok()?;
    let text = CString::new(text.as_str()).ok()?;
    (text.as_bytes().len() <= MAX_BYTES).then_some((text, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::given::TentSettings;
    use crate::error::Status;

    fn resolve(
        look: impl Fn(&str) -> Option<String>,
        tent: &TentSettings,
    ) -> Result<Settings, Error> {
        Settings::resolve(|setting| Given::find(setting, &look, tent))
    }

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
        resolve(look, &TentSettings::default())
    }

    #[test]
    fn the_store_and_the_role_must_be_set() {
        for variable in ["MF_CONFIG_STORE_URL", "MF_ROLE"] {
            let look = |name: &str| {
                let mut good = GOOD.iter().filter(|(known, _)| *known == name);
                let found = good.next().filter(|_| name != variable);
                found.map(|(_, value)| (*value).to_owned())
            };
            let error = resolve(look, &TentSettings::default()).expect_err(variable);
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
        let tent = TentSettings::default()
            .with(
                &table::STORE_URL,
                Value::Text("tcp://10.0.0.7:13000".to_owned()),
            )
            .with(&table::STORE_HOST, Value::Other("true".to_owned()))
            .with(&table::ROLE, Value::Text("receiver".to_owned()))
            .with(&table::VISIBILITY_PATIENCE, Value::Integer(40));
        let settings = resolve(|_| None, &tent).expect("valid");
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
