// SPDX-License-Identifier: Apache-2.0
//! The functions that are called.
//!
//! Signatures, and the layout of [`MemAttribute`], are those of CANN's published
//! headers.
#![allow(unsafe_code)] // exported symbols, and the caller's pointers
#![allow(non_snake_case)] // as the vendor names them

use std::ffi::{c_char, c_int, c_void};

use ascendcl::{ACL_ERROR_INVALID_PARAM, ACL_SUCCESS};

/// `drvError_t`: a bad argument.
const DRV_ERROR_INVALID_VALUE: c_int = 3;

/// `DV_MEM_USER_MALLOC`: memory that the driver did not allocate.
const USER_MALLOC: u32 = 0x80;

/// `struct DVattribute`.
#[repr(C)]
pub struct MemAttribute {
    memory_type: u32,
    reserved_1: u32,
    reserved_2: u32,
    device: u32,
    page_size: u32,
    reserved: [u32; 8],
}

const _: () = assert!(size_of::<MemAttribute>() == 52);

/// A chip that the library knows.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    c"Ascend910B3".as_ptr()
}

/// All numbers of a device are the same here.
///
/// # Safety
/// `logical` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rtGetLogicDevIdByUserDevId(user: i32, logical: *mut i32) -> c_int {
    // SAFETY: what our caller vouched for.
    unsafe { answer(logical, user) }
}

/// As [`rtGetLogicDevIdByUserDevId`].
///
/// # Safety
/// `physical` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetPhyDevIdByLogicDevId(logical: i32, physical: *mut i32) -> c_int {
    // SAFETY: what our caller vouched for.
    unsafe { answer(physical, logical) }
}

/// The process id outside of containers.
///
/// # Safety
/// `pid` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rtDeviceGetBareTgid(pid: *mut u32) -> c_int {
    // SAFETY: what our caller vouched for.
    unsafe { answer(pid, std::process::id()) }
}

/// The ids of the device, the server and the super pod: there is one of each.
///
/// # Safety
/// `value` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rtGetDeviceInfo(
    _device: u32,
    _module: i32,
    _info: i32,
    value: *mut i64,
) -> c_int {
    // SAFETY: what our caller vouched for.
    unsafe { answer(value, 0) }
}

/// # Safety
/// `place` is NULL or can be written.
unsafe fn answer<T>(place: *mut T, value: T) -> c_int {
    if place.is_null() {
        return ACL_ERROR_INVALID_PARAM;
    }
    // SAFETY: not NULL, so the caller vouched for it.
    unsafe { place.write(value) };
    ACL_SUCCESS
}

/// All memory is the host's.
///
/// # Safety
/// `attribute` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn drvMemGetAttribute(
    _address: *const c_void,
    attribute: *mut MemAttribute,
) -> c_int {
    if attribute.is_null() {
        return DRV_ERROR_INVALID_VALUE;
    }
    let host = MemAttribute {
        memory_type: USER_MALLOC,
        reserved_1: 0,
        reserved_2: 0,
        device: 0,
        page_size: 4096,
        reserved: [0; 8],
    };
    // SAFETY: not NULL, so the caller vouched for it.
    unsafe { attribute.write(host) };
    ACL_SUCCESS
}
