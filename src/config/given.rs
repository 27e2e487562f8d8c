// SPDX-License-Identifier: Apache-2.0
//! What TENT's configuration and the environment have.

use std::collections::HashMap;
use std::fmt;

use super::table::Setting;
use crate::error::Error;

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
    /// The keys that are set.
    pub values: Values,
    /// The engine's `log_level`.
    pub log_level: LogLevel,
    /// The local segment's `rpc_server_addr`.
    pub rpc_server_addr: String,
    /// The engine's name for the local segment.
    pub local_segment_name: String,
}

/// Keys by their path.
#[derive(Clone, Debug, Default)]
pub struct Values(HashMap<&'static str, Value>);

impl TentSettings {
    /// Sets a key.
    pub fn set(&mut self, setting: &Setting, value: Value) {
        self.values.0.insert(setting.path, value);
    }

    /// As [`Self::set`].
    pub fn with(mut self, setting: &Setting, value: Value) -> Self {
        self.set(setting, value);
        self
    }

    /// What a key is set to.
    pub fn get(&self, setting: &Setting) -> &Value {
        self.values.0.get(setting.path).unwrap_or(&Value::Absent)
    }
}

/// A setting's value, and by which of its names it came.
#[derive(Clone, Debug)]
pub struct Given {
    /// The variable or the key; the key if it is not set.
    pub name: &'static str,
    /// The value; text if it is a variable's.
    pub value: Value,
    pub(super) setting: &'static Setting,
}

impl Given {
    /// Looks a setting up: the environment wins over the TENT keys.
    pub fn find(
        setting: &'static Setting,
        environment: impl Fn(&str) -> Option<String>,
        tent: &TentSettings,
    ) -> Self {
        let variable = setting.variable;
        let text = variable.and_then(|name| Some((name, environment(name)?)));
        let (name, value) = match text {
            Some((name, text)) => (name, Value::Text(text)),
            None => (setting.path, tent.get(setting).clone()),
        };
        Self {
            name,
            value,
            setting,
        }
    }

    /// Whether an environment variable has it.
    pub(super) fn is_variable(&self) -> bool {
        self.setting.variable == Some(self.name)
    }

    /// Its digits, or its integer if a key has it.
    pub(super) fn whole(&self) -> Option<u64> {
        match &self.value {
            Value::Text(text) if self.is_variable() => whole(text),
            Value::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// The error that names it, its value and what is accepted.
    pub(super) fn invalid(&self) -> Error {
        Error::SettingInvalid {
            key: self.name,
            value: self.value.to_string(),
            accepted: self.setting.accepted,
        }
    }
}

/// Digits only: `parse` alone would also take a plus sign.
fn whole(value: &str) -> Option<u64> {
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| digits)
}
