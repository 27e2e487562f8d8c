// SPDX-License-Identifier: Apache-2.0
//! What can go wrong, and which TENT status each case is.

use crate::code::Code;
use crate::config::protocol::{Generation, Protocol, Role};

/// TENT's status codes, as far as this transport answers them
/// (`tent/common/status.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// Configuration, an argument or a sub-batch is unusable.
    InvalidArgument = 1,
    /// The sub-batch is too small for the call.
    TooManyRequests = 2,
    /// The library, one of its symbols or the device's fabric is not there.
    DeviceNotFound = 4,
    /// A vendor call failed, or the transport is in no state for the call.
    InternalError = 199,
}

/// Every error of the core.
///
/// A failed transfer is none of these: it is a task that polls FAILED, so that
/// TENT can fail it over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No protocol was configured.
    #[error(
        "MF_PROTOCOL must be set (environment, or transports/memfabric/protocol): one of {}",
        Protocol::names()
    )]
    ProtocolUnset,
    /// The configured protocol is none that the library has.
    #[error(
        "{key} is '{value}', must be one of {}",
        Protocol::names_with(*generation)
    )]
    ProtocolUnknown {
        /// Where the value came from.
        key: &'static str,
        /// The value.
        value: String,
        /// Of the library.
        generation: Generation,
    },
    /// A setting that the published library needs is not there.
    #[error("{variable} must be set (environment, or {key}) with MF_ABI=v1: {accepted}")]
    SettingUnset {
        /// The environment variable.
        variable: &'static str,
        /// The TENT key.
        key: &'static str,
        /// What would be accepted.
        accepted: &'static str,
    },
    /// `host_tcp` without the published library.
    #[error(
        "{key} is 'host_tcp', which only the published 1.x library has: set transports/memfabric/abi to \"v1\" (MF_ABI=v1), or use one of {}",
        Protocol::names()
    )]
    ProtocolPublishedOnly {
        /// Where the value came from.
        key: &'static str,
    },
    /// The library is not of the published generation but of the later one.
    #[error(
        "{library} exports smem_trans_batch_copy, so it is not the published 1.x library: leave transports/memfabric/abi (MF_ABI) out"
    )]
    LibraryNewer {
        /// Name or path that was opened.
        library: String,
    },
    /// No port could be had for this process's unique id.
    #[error("no UDP port of {host} to take a unique id from: {reason}")]
    NoUniqueId {
        /// The address.
        host: String,
        /// The system's words.
        reason: String,
    },
    /// A setting has a value that cannot be used.
    #[error("{key} is {value}, must be {accepted}")]
    SettingInvalid {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// What would be accepted.
        accepted: &'static str,
    },
    /// The local address is not one that peers could connect to.
    #[error("local address '{address}' ({origin}): {reason}")]
    AddressInvalid {
        /// The address.
        address: String,
        /// Where it came from.
        origin: &'static str,
        /// What is wrong, and what would be accepted.
        reason: String,
    },
    /// The library could not be opened.
    #[error(
        "{library} unavailable: {linker}; put its folder, with the libraries it needs, into LD_LIBRARY_PATH before the process starts"
    )]
    LibraryUnavailable {
        /// Name or path that was opened.
        library: String,
        /// The dynamic linker's own words.
        linker: String,
    },
    /// The library lacks symbols.
    #[error(
        "{library} is incompatible, {revision}: missing {}{advice}",
        .missing.join(", ")
    )]
    SymbolsMissing {
        /// Name or path that was opened.
        library: String,
        /// Every symbol of the configured generation that is missing.
        missing: Vec<&'static str>,
        /// What the library seems to be.
        revision: String,
        /// What to do if it is of the other generation, else empty.
        advice: &'static str,
    },
    /// `libascendcl.so` is not usable, and the protocol needs a device.
    #[error(
        "libascendcl.so unavailable: {linker}; {protocol} needs the current Ascend device, so source CANN's set_env.sh before the process starts, or use host_rdma"
    )]
    AscendUnavailable {
        /// The protocol.
        protocol: Protocol,
        /// The dynamic linker's own words.
        linker: String,
    },
    /// The calling thread has no usable current device.
    #[error(
        "aclrtGetDevice answered code {code}, device {device}: call aclrtSetDevice on the thread that installs the transport"
    )]
    NoCurrentDevice {
        /// ACL's code, 0 if the device number itself is unusable.
        code: i32,
        /// The device number as answered.
        device: i32,
    },
    /// Device memory could not be copied.
    #[error(
        "aclrtMemcpy of {length} bytes from {source_address:#x} to {destination:#x} {}",
        acl_answer(*.code)
    )]
    DeviceCopy {
        /// Where to.
        destination: usize,
        /// Where from.
        source_address: usize,
        /// Bytes.
        length: usize,
        /// ACL's code; None if neither side is device memory.
        code: Option<i32>,
    },
    /// A vendor call failed.
    #[error("{call} failed: {code}{context}")]
    Vendor {
        /// The function.
        call: &'static str,
        /// Its code.
        code: Code,
        /// Arguments that matter, empty or beginning with a blank.
        context: String,
    },
    /// `smem_trans_create` returned NULL.
    #[error("smem_trans_create returned NULL for url {url} (protocol {protocol}, device {device})")]
    CreateFailed {
        /// The url.
        url: String,
        /// The protocol.
        protocol: Protocol,
        /// The device.
        device: u32,
    },
    /// `smem_trans_create` of the published library returned NULL.
    #[error(
        "smem_trans_create returned NULL for store {store} (unique id {unique_id}, role {role}, protocol {protocol}, device {device}): the library's log says why; one process must be up that hosts the store (MF_CONFIG_STORE_HOST=true)"
    )]
    JoinFailed {
        /// The configuration store.
        store: String,
        /// What this process wanted to be known as.
        unique_id: String,
        /// Its role.
        role: Role,
        /// The protocol.
        protocol: Protocol,
        /// The device.
        device: u32,
    },
    /// The library listens on no port.
    #[error("smem_trans_get_rpc_port answered port 0 for url {url}: the library does not listen")]
    NoPort {
        /// The url.
        url: String,
    },
    /// A call needs an installed transport.
    #[error("the memfabric transport is not installed: call install first")]
    NotInstalled,
    /// A second install.
    #[error("the memfabric transport is already installed on {endpoint}: uninstall it first")]
    AlreadyInstalled {
        /// Its endpoint.
        endpoint: String,
    },
    /// A submission after quiesce began (C9).
    #[error("the memfabric transport is quiesced: it takes no more submissions")]
    Quiesced,
    /// The sub-batch was allocated by another transport, or is null.
    #[error("the sub-batch is not one of this transport: allocate it here")]
    ForeignSubBatch,
    /// A task number below zero.
    #[error("task number {task} is negative: tasks are numbered from 0")]
    NegativeTask {
        /// The number.
        task: i32,
    },
    /// A request names a peer that the call does not list.
    #[error("request {request} names peer {peer}, the call lists {peers}")]
    PeerOutOfRange {
        /// Position in the call.
        request: usize,
        /// The number given.
        peer: u32,
        /// How many the call lists.
        peers: usize,
    },
    /// A request has neither of the two opcodes.
    #[error("request {request} has opcode {opcode}, must be 0 (READ) or 1 (WRITE)")]
    OpcodeUnknown {
        /// Position in the call.
        request: usize,
        /// The number given.
        opcode: u8,
    },
    /// More requests than the sub-batch has room for.
    #[error("{asked} requests do not fit: the sub-batch has room for {allowed} of {capacity}")]
    OverCapacity {
        /// Requests in the call.
        asked: usize,
        /// Free places.
        allowed: usize,
        /// All places.
        capacity: usize,
    },
    /// A range that cannot be registered.
    #[error("memory range {address:#x} of {length} bytes: {reason}")]
    RegionInvalid {
        /// Its first byte.
        address: usize,
        /// Its bytes.
        length: usize,
        /// What is wrong, and the mend.
        reason: String,
    },
    /// A range is still used by outstanding batches.
    #[error(
        "memory range {address:#x} of {length} bytes must not be freed yet: {batches} outstanding vendor batches still use it after {waited_ms} ms"
    )]
    RegionBusy {
        /// Its first byte.
        address: usize,
        /// Its bytes.
        length: usize,
        /// Batches that use it.
        batches: usize,
        /// How long they were waited for.
        waited_ms: u128,
    },
    /// A range that is to be registered lies over one whose removal was refused
    /// and is still to be made up for (C16).
    #[error(
        "memory range {address:#x} of {length} bytes cannot be registered yet: the removal of what was registered there before, {old_address:#x} of {old_length} bytes, waits for {batches} outstanding vendor batches; register it again when they are done"
    )]
    RegionLeaving {
        /// Its first byte.
        address: usize,
        /// Its bytes.
        length: usize,
        /// First byte of the range that was there before.
        old_address: usize,
        /// Its bytes.
        old_length: usize,
        /// Batches that use that one.
        batches: usize,
    },
    /// A query was answered by neither "pending" nor a result (C5).
    #[error(
        "query of vendor batch {batch} (peer {peer}) failed: {code}; its tasks stay pending{}",
        pending_hint(*.code)
    )]
    QueryFailed {
        /// The vendor's batch id.
        batch: u64,
        /// The peer's endpoint.
        peer: String,
        /// The answer.
        code: Code,
    },
    /// Quiesce ended with work outstanding (C11).
    #[error(
        "quiesce timed out after {waited_ms} ms: {batches} vendor batches with {tasks} tasks are outstanding{}; their memory must not be freed",
        query_answer(*.last_error)
    )]
    QuiesceTimeout {
        /// Vendor batches without a result.
        batches: usize,
        /// Their tasks.
        tasks: usize,
        /// How long they were waited for.
        waited_ms: u128,
        /// The last query error, if any.
        last_error: Option<Code>,
    },
    /// A panic was caught at the boundary.
    #[error("{method} panicked: {message}; this is a bug, the transport stays usable")]
    Panicked {
        /// The method.
        method: &'static str,
        /// The panic's message.
        message: String,
    },
}

impl Error {
    /// The TENT status of each case; nothing else anywhere picks one.
    pub fn status(&self) -> Status {
        match self {
            Self::ProtocolUnset
            | Self::ProtocolUnknown { .. }
            | Self::SettingInvalid { .. }
            | Self::SettingUnset { .. }
            | Self::ProtocolPublishedOnly { .. }
            | Self::AddressInvalid { .. }
            | Self::AlreadyInstalled { .. }
            | Self::ForeignSubBatch
            | Self::NegativeTask { .. }
            | Self::PeerOutOfRange { .. }
            | Self::OpcodeUnknown { .. }
            | Self::RegionInvalid { .. } => Status::InvalidArgument,
            Self::OverCapacity { .. } => Status::TooManyRequests,
            Self::LibraryUnavailable { .. }
            | Self::SymbolsMissing { .. }
            | Self::LibraryNewer { .. }
            | Self::AscendUnavailable { .. }
            | Self::CreateFailed { .. }
            | Self::JoinFailed { .. } => Status::DeviceNotFound,
            Self::NoCurrentDevice { .. }
            | Self::DeviceCopy { .. }
            | Self::Vendor { .. }
            | Self::NoPort { .. }
            | Self::NoUniqueId { .. }
            | Self::NotInstalled
            | Self::Quiesced
            | Self::RegionBusy { .. }
            | Self::RegionLeaving { .. }
            | Self::QueryFailed { .. }
            | Self::QuiesceTimeout { .. }
            | Self::Panicked { .. } => Status::InternalError,
        }
    }
}

fn acl_answer(code: Option<i32>) -> String {
    code.map_or_else(
        || "makes no sense: neither side is device memory".to_owned(),
        |code| format!("failed: ACL code {code}"),
    )
}

/// No error of the library is positive, so a number that is may be its "pending".
pub(crate) fn pending_hint(code: Code) -> String {
    match code.0 {
        ..=0 => String::new(),
        number => format!(
            "; if every running batch answers so, {number} is what this library calls pending: set transports/memfabric/need_retry_code to {number}"
        ),
    }
}

fn query_answer(code: Option<Code>) -> String {
    code.map_or_else(String::new, |code| {
        format!(", the last query answered {code}")
    })
}
