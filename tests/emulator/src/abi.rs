// SPDX-License-Identifier: Apache-2.0
//! The vendor's C types and constants, as this library declares them for itself.

use std::ffi::{c_char, c_void};
use std::mem::{align_of, offset_of, size_of};

/// The bytes in `nic`, `url` and their terminator.
pub const URL_SIZE: usize = 64;

/// Success.
pub const SM_OK: i32 = 0;
/// Any failure without a number of its own.
pub const SM_ERROR: i32 = -1;
/// An argument that the call cannot take.
pub const SM_INVALID_PARAM: i32 = -2000;
/// No memory.
pub const SM_MALLOC_FAILED: i32 = -2001;
/// An object (a descriptor, a thread) could not be made.
pub const SM_NEW_OBJECT_FAILED: i32 = -2002;
/// Not started.
pub const SM_NOT_STARTED: i32 = -2003;
/// No answer in time.
pub const SM_TIMEOUT: i32 = -2004;
/// Already done, by this caller or another in the process.
pub const SM_REPEAT_CALL: i32 = -2005;
/// There is such an object already.
pub const SM_DUPLICATED_OBJECT: i32 = -2006;
/// There is no such object (any more).
pub const SM_OBJECT_NOT_EXISTS: i32 = -2007;
/// `smem_trans_init` has not been called.
pub const SM_NOT_INITIALIZED: i32 = -2008;
/// Still in use.
pub const SM_RESOURCE_IN_USE: i32 = -2009;
/// Reconnecting.
pub const SM_RECONNECT: i32 = -2010;
/// The library's own spelling.
pub const SM_GET_OBJIECT: i32 = -2011;
/// Some parts failed.
pub const SM_PARTIAL_FAILED: i32 = -2012;
/// Busy inside.
pub const SM_INNER_BUSY: i32 = -2013;
/// The peer is not there (any more).
pub const SM_NOT_CONNECTED: i32 = -2014;
/// The caller's buffer is too small.
pub const SMEM_BUFFER_TOO_SMALL: i32 = -2015;

/// What a query answers while its batch is outstanding. No published header has
/// the number; the predecessor of this ABI used 1.
pub const SM_NEED_RETRY: i32 = 1;

/// Codes by name, for scripts and messages.
pub const CODES: &[(i32, &str)] = &[
    (SM_OK, "SM_OK"),
    (SM_ERROR, "SM_ERROR"),
    (SM_INVALID_PARAM, "SM_INVALID_PARAM"),
    (SM_MALLOC_FAILED, "SM_MALLOC_FAILED"),
    (SM_NEW_OBJECT_FAILED, "SM_NEW_OBJECT_FAILED"),
    (SM_NOT_STARTED, "SM_NOT_STARTED"),
    (SM_TIMEOUT, "SM_TIMEOUT"),
    (SM_REPEAT_CALL, "SM_REPEAT_CALL"),
    (SM_DUPLICATED_OBJECT, "SM_DUPLICATED_OBJECT"),
    (SM_OBJECT_NOT_EXISTS, "SM_OBJECT_NOT_EXISTS"),
    (SM_NOT_INITIALIZED, "SM_NOT_INITIALIZED"),
    (SM_RESOURCE_IN_USE, "SM_RESOURCE_IN_USE"),
    (SM_RECONNECT, "SM_RECONNECT"),
    (SM_GET_OBJIECT, "SM_GET_OBJIECT"),
    (SM_PARTIAL_FAILED, "SM_PARTIAL_FAILED"),
    (SM_INNER_BUSY, "SM_INNER_BUSY"),
    (SM_NOT_CONNECTED, "SM_NOT_CONNECTED"),
    (SMEM_BUFFER_TOO_SMALL, "SMEM_BUFFER_TOO_SMALL"),
    (SM_NEED_RETRY, "SM_NEED_RETRY"),
];

/// `smem_trans_role_t`: the only role with which two ends record each other's
/// memory.
pub const ROLE_BOTH: u32 = 3;
/// `smem_trans_opcode_t`: from the remote ranges to the local ones.
pub const OPCODE_READ: u32 = 0;
/// `smem_trans_opcode_t`: from the local ranges to the remote ones.
pub const OPCODE_WRITE: u32 = 1;
/// Every bit of `smem_bm_data_op_type`.
pub const DATA_OP_TYPES: u32 = 0xff;
/// The default of `initTimeout`, in seconds.
pub const DEFAULT_INIT_TIMEOUT_S: u32 = 120;

/// `smem_trans_t`. A token of the handle table, never an address.
pub type TransHandle = *mut c_void;

/// The peer-down callback.
pub type PeerDownCallback = unsafe extern "C" fn(peer: *const c_char, user: *mut c_void);

/// `smem_tls_config`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TlsConfig {
    /// Non-zero when TLS is wanted; a byte, as nothing promises that C wrote 0 or 1.
    pub tls_enable: u8,
    /// `caPath`.
    pub ca_path: [c_char; 256],
    /// `crlPath`.
    pub crl_path: [c_char; 256],
    /// `certPath`.
    pub cert_path: [c_char; 256],
    /// `keyPath`.
    pub key_path: [c_char; 256],
    /// `keyPassPath`.
    pub key_pass_path: [c_char; 256],
    /// `packagePath`.
    pub package_path: [c_char; 256],
    /// `decrypterLibPath`.
    pub decrypter_lib_path: [c_char; 256],
}

/// `smem_trans_config_t`. Enums are plain integers here: C may store anything.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TransConfig {
    /// `role`, [`ROLE_BOTH`].
    pub role: u32,
    /// `initTimeout`, seconds.
    pub init_timeout: u32,
    /// `deviceId`.
    pub device_id: u32,
    /// `flags`, 0.
    pub flags: u32,
    /// `dataOpType`, bits of [`DATA_OP_TYPES`].
    pub data_op_type: u32,
    /// `nic`.
    pub nic: [c_char; URL_SIZE],
    /// `url`, `ip:0`.
    pub url: [c_char; URL_SIZE],
    /// The TLS part.
    pub tls: TlsConfig,
}

/// `smem_trans_batch_params_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchParams {
    /// `destUrl`, the peer's `ip:port`.
    pub dest_url: *const c_char,
    /// `srcList`, local addresses.
    pub src_list: *mut *mut c_void,
    /// `destList`, remote addresses.
    pub dest_list: *mut *mut c_void,
    /// `sizeList`, bytes.
    pub size_list: *mut usize,
    /// `batchSize`, the length of the three lists.
    pub batch_size: u32,
    /// `opcode`.
    pub opcode: u32,
    /// `stream`, NULL.
    pub stream: *mut c_void,
    /// `flags`, 0.
    pub flags: u32,
}

const _: () = {
    assert!(size_of::<TlsConfig>() == 1793 && align_of::<TlsConfig>() == 1);
    assert!(offset_of!(TlsConfig, ca_path) == 1);
    assert!(offset_of!(TlsConfig, decrypter_lib_path) == 1 + 6 * 256);
    assert!(size_of::<TransConfig>() == 1944 && align_of::<TransConfig>() == 4);
    assert!(offset_of!(TransConfig, role) == 0);
    assert!(offset_of!(TransConfig, init_timeout) == 4);
    assert!(offset_of!(TransConfig, device_id) == 8);
    assert!(offset_of!(TransConfig, flags) == 12);
    assert!(offset_of!(TransConfig, data_op_type) == 16);
    assert!(offset_of!(TransConfig, nic) == 20);
    assert!(offset_of!(TransConfig, url) == 84);
    assert!(offset_of!(TransConfig, tls) == 148);
    assert!(size_of::<BatchParams>() == 56 && align_of::<BatchParams>() == 8);
    assert!(offset_of!(BatchParams, dest_url) == 0);
    assert!(offset_of!(BatchParams, src_list) == 8);
    assert!(offset_of!(BatchParams, dest_list) == 16);
    assert!(offset_of!(BatchParams, size_list) == 24);
    assert!(offset_of!(BatchParams, batch_size) == 32);
    assert!(offset_of!(BatchParams, opcode) == 36);
    assert!(offset_of!(BatchParams, stream) == 40);
    assert!(offset_of!(BatchParams, flags) == 48);
};

/// The name of a code with its number, `SM_NOT_CONNECTED (-2014)`.
pub fn code_name(code: i32) -> String {
    match CODES.iter().find(|(value, _)| *value == code) {
        Some((_, name)) => format!("{name} ({code})"),
        None => code.to_string(),
    }
}
