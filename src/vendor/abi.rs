// SPDX-License-Identifier: Apache-2.0
//! The C ABI of `libmf_smem.so`: types, constants and the 13 function types.
//!
//! There is no build-time dependency on MemFabric's headers, so everything is
//! declared here and proved by the layout assertions at the end of the file;
//! `tests/cpp/abi_layout_test.cpp` holds the same structs as the C compiler
//! sees them.
//!
//! Sources, as marked: **spec**, the user's specification of this transport;
//! **pub**, the headers published in the wheel `memfabric-hybrid` 1.3.0;
//! **fork**, the public pre-release of this transport.

// Vendor names stay letter for letter, so that a search finds them.
#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{c_char, c_int, c_void};

/// Refusals of a batch that may also mean that a part of it was accepted:
/// SM_TIMEOUT, SM_RECONNECT and SM_PARTIAL_FAILED. A guess from the names, on the
/// safe side: if it is wrong, arrays are kept that nobody reads.
pub const MAY_BE_PARTLY_ACCEPTED: [i32; 3] = [-2004, -2010, -2012];

/// `smem_trans_role_t`: both ends must be BOTH, for two ends with the same
/// one-sided role do not record each other's memory \[fork\].
pub const SMEM_TRANS_BOTH: u32 = 3;

/// `smem_trans_opcode_t`: remote to local \[fork\].
pub const SMEM_TRANS_READ: u32 = 0;
/// `smem_trans_opcode_t`: local to remote \[fork\].
pub const SMEM_TRANS_WRITE: u32 = 1;

/// `smem_bm_data_op_type`, bit flags \[pub\].
pub const SMEMB_DATA_OP_SDMA: u32 = 1 << 0;
/// See [`SMEMB_DATA_OP_SDMA`].
pub const SMEMB_DATA_OP_HOST_RDMA: u32 = 1 << 1;
/// TCP between hosts, which needs no NPU; of the published library alone.
pub const SMEMB_DATA_OP_HOST_TCP: u32 = 1 << 2;
/// See [`SMEMB_DATA_OP_SDMA`].
pub const SMEMB_DATA_OP_DEVICE_RDMA: u32 = 1 << 3;
/// See [`SMEMB_DATA_OP_SDMA`].
pub const SMEMB_DATA_OP_DEVICE_URMA: u32 = 1 << 6;
/// See [`SMEMB_DATA_OP_SDMA`].
pub const SMEMB_DATA_OP_DEVICE_UBOE: u32 = 1 << 7;

/// Bytes of `url` and `nic` in [`smem_trans_config_t`], terminator included.
pub const SMEM_URL_BYTES: usize = 64;

/// Functions that this revision of the library must export.
pub const FUNCTIONS: usize = 13;

/// An opaque transfer instance.
pub type smem_trans_t = *mut c_void;

/// TLS settings; all zero means no TLS \[pub\].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct smem_tls_config {
    /// Whether TLS is on.
    pub tlsEnable: bool,
    /// Certificate authority.
    pub caPath: [c_char; 256],
    /// Revocation list.
    pub crlPath: [c_char; 256],
    /// Certificate.
    pub certPath: [c_char; 256],
    /// Private key.
    pub keyPath: [c_char; 256],
    /// Pass phrase of the key.
    pub keyPassPath: [c_char; 256],
    /// OpenSSL library folder.
    pub packagePath: [c_char; 256],
    /// Decrypter of the pass phrase.
    pub decrypterLibPath: [c_char; 256],
}

impl smem_tls_config {
    /// No TLS.
    pub const ZERO: Self = Self {
        tlsEnable: false,
        caPath: [0; 256],
        crlPath: [0; 256],
        certPath: [0; 256],
        keyPath: [0; 256],
        keyPassPath: [0; 256],
        packagePath: [0; 256],
        decrypterLibPath: [0; 256],
    };
}

/// What `smem_trans_create` is told \[fork\].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct smem_trans_config_t {
    /// `smem_trans_role_t`.
    pub role: u32,
    /// Seconds that `create` may take; the library's default is 120.
    pub initTimeout: u32,
    /// The Ascend device.
    pub deviceId: u32,
    /// Unused, 0.
    pub flags: u32,
    /// `smem_bm_data_op_type`, one bit.
    pub dataOpType: u32,
    /// Network card, empty for the library's choice.
    pub nic: [c_char; SMEM_URL_BYTES],
    /// `ip:port` to listen on, port 0 for a free one, NUL-terminated.
    pub url: [c_char; SMEM_URL_BYTES],
    /// TLS settings.
    pub tlsConfig: smem_tls_config,
}

impl smem_trans_config_t {
    /// All zero, for `smem_trans_config_init` to fill in.
    pub const ZERO: Self = Self {
        role: 0,
        initTimeout: 0,
        deviceId: 0,
        flags: 0,
        dataOpType: 0,
        nic: [0; SMEM_URL_BYTES],
        url: [0; SMEM_URL_BYTES],
        tlsConfig: smem_tls_config::ZERO,
    };
}

/// One vendor batch \[fork\].
///
/// `srcList` holds **local** addresses and `destList` **remote** ones for both
/// opcodes: WRITE moves src to dest, READ moves dest to src.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct smem_trans_batch_params_t {
    /// The peer's `ip:port`, NUL-terminated.
    pub destUrl: *const c_char,
    /// Local addresses.
    pub srcList: *mut *mut c_void,
    /// Remote addresses.
    pub destList: *mut *mut c_void,
    /// Bytes of each piece.
    pub sizeList: *mut usize,
    /// Entries in each of the three lists.
    pub batchSize: u32,
    /// `smem_trans_opcode_t`.
    pub opcode: u32,
    /// NULL here.
    pub stream: *mut c_void,
    /// 0 here.
    pub flags: u32,
}

/// Called on the library's own threads, possibly inside a call that we are
/// making \[pub\].
pub type smem_peer_down_fn = unsafe extern "C" fn(peer: *const c_char, user: *mut c_void);

/// Once per process, before any create \[fork\].
pub type smem_trans_init = unsafe extern "C" fn(device_id: u32, flags: u32) -> i32;
/// After the last destroy \[fork\].
pub type smem_trans_uninit = unsafe extern "C" fn(flags: u32);
/// Fills in defaults \[pub\].
pub type smem_trans_config_init = unsafe extern "C" fn(config: *mut smem_trans_config_t) -> i32;
/// NULL on failure \[fork\].
pub type smem_trans_create =
    unsafe extern "C" fn(config: *const smem_trans_config_t, flags: u32) -> smem_trans_t;
/// Ends an instance \[pub\].
pub type smem_trans_destroy = unsafe extern "C" fn(handle: smem_trans_t, flags: u32);
/// The port chosen for `url = "ip:0"`; 0 means none \[fork\].
pub type smem_trans_get_rpc_port =
    unsafe extern "C" fn(handle: smem_trans_t, port: *mut u16) -> i32;
/// Registers one range \[pub\].
pub type smem_trans_register_mem = unsafe extern "C" fn(
    handle: smem_trans_t,
    address: *mut c_void,
    capacity: usize,
    flags: u32,
) -> i32;
/// Registers several ranges \[pub\].
pub type smem_trans_batch_register_mem = unsafe extern "C" fn(
    handle: smem_trans_t,
    addresses: *mut *mut c_void,
    capacities: *mut usize,
    count: u32,
    flags: u32,
) -> i32;
/// Withdraws a range. In \[pub\] it validates its arguments and does no more.
pub type smem_trans_deregister_mem =
    unsafe extern "C" fn(handle: smem_trans_t, address: *mut c_void) -> i32;
/// Asynchronous; 0 means accepted, and `*batch_id` names the batch \[fork\].
pub type smem_trans_batch_copy = unsafe extern "C" fn(
    handle: smem_trans_t,
    params: *mut smem_trans_batch_params_t,
    batch_id: *mut u64,
) -> i32;
/// The four-argument form, with the execution result \[spec\].
pub type smem_trans_batch_status_query =
    unsafe extern "C" fn(handle: smem_trans_t, batch_id: u64, result: *mut i32, flags: u32) -> i32;
/// One callback per handle, a new one replaces the old \[pub\].
pub type smem_trans_set_peer_down_callback = unsafe extern "C" fn(
    handle: smem_trans_t,
    callback: Option<smem_peer_down_fn>,
    user: *mut c_void,
) -> i32;
/// 0 debug, 1 info, 2 warn, 3 error \[pub\].
pub type smem_set_log_level = unsafe extern "C" fn(level: c_int) -> i32;
/// Not one of the 13: tells the revision of a library that lacks some of them.
/// Major in the high 16 bits, minor in the low \[pub\].
pub type smem_get_abi_version = unsafe extern "C" fn() -> u32;

const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(SMEM_URL_BYTES == crate::endpoint::MAX_BYTES + 1);
    assert!(size_of::<smem_tls_config>() == 1793);
    assert!(align_of::<smem_tls_config>() == 1);
    assert!(size_of::<smem_trans_config_t>() == 1944);
    assert!(align_of::<smem_trans_config_t>() == 4);
    assert!(offset_of!(smem_trans_config_t, dataOpType) == 16);
    assert!(offset_of!(smem_trans_config_t, nic) == 20);
    assert!(offset_of!(smem_trans_config_t, url) == 84);
    assert!(offset_of!(smem_trans_config_t, tlsConfig) == 148);
    assert!(size_of::<smem_trans_batch_params_t>() == 56);
    assert!(align_of::<smem_trans_batch_params_t>() == 8);
    assert!(offset_of!(smem_trans_batch_params_t, batchSize) == 32);
    assert!(offset_of!(smem_trans_batch_params_t, opcode) == 36);
    assert!(offset_of!(smem_trans_batch_params_t, stream) == 40);
    assert!(offset_of!(smem_trans_batch_params_t, flags) == 48);
};
