// SPDX-License-Identifier: Apache-2.0
//! The one place where a setting stands: its names, type, default and bounds, and
//! the sentence that the documentation has for it.

use super::protocol::Generation;

/// What TENT's keys for this transport begin with.
pub const PREFIX: &str = "transports/memfabric/";

/// The type of a key's value in TENT's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A string.
    Text,
    /// A whole number.
    Integer,
    /// `true` or `false`.
    Boolean,
}

/// One setting. In an environment variable it is always text.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    /// The environment variable, which wins over the key; None if there is none.
    pub variable: Option<&'static str>,
    /// The key in TENT's configuration, with [`PREFIX`].
    pub path: &'static str,
    /// The key's type.
    pub kind: Kind,
    /// Whether an install without it is refused.
    pub required: bool,
    /// What is used if it is not set, as the documentation shows it; empty for
    /// nothing.
    pub default: &'static str,
    /// The generation that has it; None for both.
    pub generation: Option<Generation>,
    /// What is accepted, as in "must be ...".
    pub accepted: &'static str,
    /// What it is for, as the documentation has it.
    pub meaning: &'static str,
}

impl Setting {
    /// The key without [`PREFIX`].
    pub fn key(&self) -> &'static str {
        self.path.strip_prefix(PREFIX).unwrap_or(self.path)
    }
}

/// The setting with this path.
pub fn find(path: &str) -> Option<&'static Setting> {
    ALL.into_iter().find(|setting| setting.path == path)
}

/// Every setting, in the order of the documentation.
pub const ALL: [&Setting; 9] = [
    &PROTOCOL,
    &TRANSFER_TIMEOUT,
    &NEED_RETRY_CODE,
    &ABI,
    &STORE_URL,
    &STORE_HOST,
    &ROLE,
    &NIC,
    &VISIBILITY_PATIENCE,
];

/// `MF_PROTOCOL`.
pub static PROTOCOL: Setting = Setting {
    variable: Some("MF_PROTOCOL"),
    path: "transports/memfabric/protocol",
    kind: Kind::Text,
    required: true,
    default: "",
    generation: None,
    accepted: "one of the protocols",
    meaning: "`device_sdma`, `device_rdma`, `host_rdma`, `device_urma`, `device_uboe`",
};
/// `MF_TRANSFER_TIMEOUT`.
pub static TRANSFER_TIMEOUT: Setting = Setting {
    variable: Some("MF_TRANSFER_TIMEOUT"),
    path: "transports/memfabric/transfer_timeout_ms",
    kind: Kind::Integer,
    required: false,
    default: "10000",
    generation: None,
    accepted: "a positive whole number of milliseconds",
    meaning: "milliseconds that quiesce, and the removal of memory that is in use, may wait",
};
/// `need_retry_code`.
pub static NEED_RETRY_CODE: Setting = Setting {
    variable: None,
    path: "transports/memfabric/need_retry_code",
    kind: Kind::Integer,
    required: false,
    default: "1",
    generation: Some(Generation::Batched),
    accepted: "a whole number other than 0 within 32 bits (the code of a pending batch)",
    meaning: "what the library answers for a batch that is still running",
};
/// `MF_ABI`.
pub static ABI: Setting = Setting {
    variable: Some("MF_ABI"),
    path: "transports/memfabric/abi",
    kind: Kind::Text,
    required: false,
    default: "",
    generation: None,
    accepted: "\"v1\" for the published 1.x library, or left out for the other",
    meaning: "`v1`: the [published library](#the-published-library), whose settings are there",
};
/// `MF_CONFIG_STORE_URL`.
pub static STORE_URL: Setting = Setting {
    variable: Some("MF_CONFIG_STORE_URL"),
    path: "transports/memfabric/store_url",
    kind: Kind::Text,
    required: true,
    default: "",
    generation: Some(Generation::V1),
    accepted: "tcp://ip:port with a numeric address and a port over 1024",
    meaning: "where the store is, `tcp://ip:port`: a numeric address, a port over 1024; the same for all",
};
/// `MF_CONFIG_STORE_HOST`.
pub static STORE_HOST: Setting = Setting {
    variable: Some("MF_CONFIG_STORE_HOST"),
    path: "transports/memfabric/store_host",
    kind: Kind::Boolean,
    required: false,
    default: "false",
    generation: Some(Generation::V1),
    accepted: "true in one process of a store, else false",
    meaning: "`true` in the one process that hosts the store, on the machine with that address",
};
/// `MF_ROLE`.
pub static ROLE: Setting = Setting {
    variable: Some("MF_ROLE"),
    path: "transports/memfabric/role",
    kind: Kind::Text,
    required: true,
    default: "",
    generation: Some(Generation::V1),
    accepted: "sender or receiver",
    meaning: "`sender`, such as a prefill node, or `receiver`, such as a decode node; each can read and write",
};
/// `MF_NIC`.
pub static NIC: Setting = Setting {
    variable: Some("MF_NIC"),
    path: "transports/memfabric/nic",
    kind: Kind::Text,
    required: false,
    default: "",
    generation: Some(Generation::V1),
    accepted: "tcp://ip:port of the network card with a numeric address",
    meaning: "`tcp://ip:port` of the network card, else the library's choice; not used with `host_tcp`",
};
/// `MF_VISIBILITY_PATIENCE`.
pub static VISIBILITY_PATIENCE: Setting = Setting {
    variable: Some("MF_VISIBILITY_PATIENCE"),
    path: "transports/memfabric/visibility_patience_ms",
    kind: Kind::Integer,
    required: false,
    default: "250",
    generation: Some(Generation::V1),
    accepted: "a whole number of milliseconds from 0 to 10000",
    meaning: "milliseconds, 0 to 10000, for which a transfer is tried again while its peer or the peer's memory is not known to this process",
};
