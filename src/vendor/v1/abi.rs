// SPDX-License-Identifier: Apache-2.0
//! The published library's C ABI (1.3.0 on PyPI), as far as it is used here.
//!
//! Names are the library's own. What both generations share is in
//! [`crate::vendor::abi`]. All of it is \[pub\]: the headers that ship with the library.
#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{c_char, c_void};

use crate::vendor::abi::SMEM_URL_BYTES;
pub use crate::vendor::abi::{
    smem_set_log_level, smem_tls_config, smem_trans_batch_register_mem, smem_trans_deregister_mem,
    smem_trans_destroy, smem_trans_register_mem, smem_trans_set_peer_down_callback, smem_trans_t,
    smem_trans_uninit,
};

/// Functions that this generation of the library must export.
pub const FUNCTIONS: usize = 15;

/// `smem_trans_role_t`: sends.
pub const SMEM_TRANS_SENDER: u32 = 1;
/// `smem_trans_role_t`: receives.
pub const SMEM_TRANS_RECEIVER: u32 = 2;

/// Most peers that one instance can have.
pub const SMEM_TRANS_RANK_COUNT_MAX: usize = 512;

/// What `smem_trans_init` and `smem_trans_create` are told.
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
    /// `smem_bm_data_op_type`, one bit. Not touched by
    /// `smem_trans_config_init`.
    pub dataOpType: u32,
    /// Network card as `tcp://ip:port`, empty for the library's choice.
    pub nic: [c_char; SMEM_URL_BYTES],
    /// TLS settings.
    pub hcomTlsConfig: smem_tls_config,
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
        hcomTlsConfig: smem_tls_config::ZERO,
    };
}

/// Takes the library's log lines, on any of its threads: 0 debug, 1 info, 2
/// warn, 3 error, 5 trace, which is the library's notices.
pub type smem_logger_fn = unsafe extern "C" fn(level: i32, message: *const c_char);

/// Hosts a configuration store in this process, at `tcp://ip:port`.
pub type smem_create_config_store =
    unsafe extern "C" fn(store_url: *const c_char, flags: u64) -> i32;
/// Ends a store that this process hosts.
pub type smem_destroy_config_store = unsafe extern "C" fn(store_url: *const c_char);
/// Replaces the library's own log, which goes to standard output.
pub type smem_set_extern_logger = unsafe extern "C" fn(logger: Option<smem_logger_fn>) -> i32;
/// Once per process, before any create.
pub type smem_trans_init = unsafe extern "C" fn(config: *const smem_trans_config_t) -> i32;
/// Fills in defaults.
pub type smem_trans_config_init = unsafe extern "C" fn(config: *mut smem_trans_config_t) -> i32;
/// NULL on failure.
pub type smem_trans_create = unsafe extern "C" fn(
    store_url: *const c_char,
    unique_id: *const c_char,
    config: *const smem_trans_config_t,
) -> smem_trans_t;
/// Blocks until the bytes are written or the attempt has failed.
pub type smem_trans_batch_write = unsafe extern "C" fn(
    handle: smem_trans_t,
    local: *const *const c_void,
    peer: *const c_char,
    remote: *mut *mut c_void,
    sizes: *mut usize,
    count: u32,
    flags: u32,
) -> i32;
/// Blocks until the bytes are read or the attempt has failed.
pub type smem_trans_batch_read = unsafe extern "C" fn(
    handle: smem_trans_t,
    local: *mut *mut c_void,
    peer: *const c_char,
    remote: *const *const c_void,
    sizes: *mut usize,
    count: u32,
    flags: u32,
) -> i32;

const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<smem_trans_config_t>() == 1880);
    assert!(align_of::<smem_trans_config_t>() == 4);
    assert!(offset_of!(smem_trans_config_t, dataOpType) == 16);
    assert!(offset_of!(smem_trans_config_t, nic) == 20);
    assert!(offset_of!(smem_trans_config_t, hcomTlsConfig) == 84);
};
