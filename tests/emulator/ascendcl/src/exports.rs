// SPDX-License-Identifier: Apache-2.0
//! CANN's functions, and the emulator's own.
#![allow(unsafe_code)] // exported symbols, and the caller's pointers
#![allow(non_snake_case)] // as CANN names them

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::memory::{self, PAGE};
use crate::{
    ACL_ERROR_INVALID_PARAM, ACL_ERROR_RT_CONTEXT_NULL, ACL_ERROR_RT_INVALID_DEVICEID,
    ACL_ERROR_RT_MEMORY_ALLOCATION, ACL_ERROR_RT_PARAM_INVALID, ACL_MEM_LOCATION_TYPE_DEVICE,
    ACL_MEM_LOCATION_TYPE_UNREGISTERED, ACL_SUCCESS, PtrAttributes, device,
};

/// What is kept for one of CANN's functions.
struct Function {
    name: &'static str,
    calls: AtomicU64,
    forced: AtomicI32,
}

impl Function {
    const fn new(name: &'static str) -> Self {
        Self {
            name,
            calls: AtomicU64::new(0),
            forced: AtomicI32::new(ACL_SUCCESS),
        }
    }

    /// Counts a call, and runs it unless it is told to fail. No panic gets out.
    fn run(&self, body: impl FnOnce() -> Result<(), i32>) -> c_int {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.forced.load(Ordering::Relaxed) {
            ACL_SUCCESS => match catch_unwind(AssertUnwindSafe(body)) {
                Ok(Ok(())) => ACL_SUCCESS,
                Ok(Err(code)) => code,
                Err(_) => ACL_ERROR_RT_PARAM_INVALID,
            },
            code => code,
        }
    }
}

static SET_DEVICE: Function = Function::new("aclrtSetDevice");
static GET_DEVICE: Function = Function::new("aclrtGetDevice");
static MALLOC: Function = Function::new("aclrtMalloc");
static FREE: Function = Function::new("aclrtFree");
static GET_ATTRIBUTES: Function = Function::new("aclrtPointerGetAttributes");
static MEMCPY: Function = Function::new("aclrtMemcpy");
static FUNCTIONS: [&Function; 6] = [
    &SET_DEVICE,
    &GET_DEVICE,
    &MALLOC,
    &FREE,
    &GET_ATTRIBUTES,
    &MEMCPY,
];

static HOST_LOCATION: AtomicU32 = AtomicU32::new(ACL_MEM_LOCATION_TYPE_UNREGISTERED);

/// Makes `device` the current one of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDevice(device: i32) -> c_int {
    SET_DEVICE.run(|| {
        if device < 0 {
            return Err(ACL_ERROR_RT_INVALID_DEVICEID);
        }
        device::set(Some(Ok(device)));
        Ok(())
    })
}

/// Gives the current device of this thread.
///
/// # Safety
/// `device` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDevice(device: *mut i32) -> c_int {
    GET_DEVICE.run(|| {
        if device.is_null() {
            return Err(ACL_ERROR_INVALID_PARAM);
        }
        let current = device::current()?;
        // SAFETY: not NULL, so the caller lets us write it.
        unsafe { device.write(current) };
        Ok(())
    })
}

/// Allocates memory of the current device, which the CPU cannot touch.
///
/// # Safety
/// `pointer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMalloc(
    pointer: *mut *mut c_void,
    size: usize,
    _policy: c_int,
) -> c_int {
    MALLOC.run(|| {
        if pointer.is_null() || size == 0 {
            return Err(ACL_ERROR_INVALID_PARAM);
        }
        let device = device::current()?;
        let address =
            memory::allocate(size, device, true).map_err(|_| ACL_ERROR_RT_MEMORY_ALLOCATION)?;
        // SAFETY: not NULL, so the caller lets us write it.
        unsafe { pointer.write(ptr::without_provenance_mut(address)) };
        Ok(())
    })
}

/// Frees device memory.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtFree(pointer: *mut c_void) -> c_int {
    FREE.run(|| match pointer.is_null() {
        true => Err(ACL_ERROR_INVALID_PARAM),
        false => memory::free(pointer.addr())
            .then_some(())
            .ok_or(ACL_ERROR_RT_PARAM_INVALID),
    })
}

/// Says where the memory at an address is.
///
/// # Safety
/// `attributes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtPointerGetAttributes(
    pointer: *const c_void,
    attributes: *mut PtrAttributes,
) -> c_int {
    GET_ATTRIBUTES.run(|| {
        if pointer.is_null() || attributes.is_null() {
            return Err(ACL_ERROR_INVALID_PARAM);
        }
        let (location_id, location_type) = match memory::find(pointer.addr()) {
            Some(place) => (place.device as u32, ACL_MEM_LOCATION_TYPE_DEVICE),
            None => (0, HOST_LOCATION.load(Ordering::Relaxed)),
        };
        let page_size = PAGE as u32;
        let answer = PtrAttributes {
            location_id,
            location_type,
            page_size,
            reserved: [0; 4],
        };
        // SAFETY: not NULL, so the caller lets us write it.
        unsafe { attributes.write(answer) };
        Ok(())
    })
}

/// Which side of a copy must be device memory, by `aclrtMemcpyKind`: source,
/// destination. `None` is "either".
const KINDS: [(Option<bool>, Option<bool>); 8] = [
    (Some(false), Some(false)), // HOST_TO_HOST
    (Some(false), Some(true)),  // HOST_TO_DEVICE
    (Some(true), Some(false)),  // DEVICE_TO_HOST
    (Some(true), Some(true)),   // DEVICE_TO_DEVICE
    (None, None),               // DEFAULT
    (Some(false), Some(true)),  // HOST_TO_BUF_TO_DEVICE
    (Some(true), Some(true)),   // INNER_DEVICE_TO_DEVICE
    (Some(true), Some(true)),   // INTER_DEVICE_TO_DEVICE
];

/// Copies from, to and within device memory. Strict: the kind must fit the
/// pointers, and the thread must have a device.
///
/// # Safety
/// Where a pointer is not device memory, it is NULL or `count` bytes can be
/// read from `src`, and written to `dst`; nobody else uses either meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(
    dst: *mut c_void,
    dest_max: usize,
    src: *const c_void,
    count: usize,
    kind: c_int,
) -> c_int {
    MEMCPY.run(|| {
        if dst.is_null() || src.is_null() {
            return Err(ACL_ERROR_INVALID_PARAM);
        }
        let kind = usize::try_from(kind).ok().and_then(|kind| KINDS.get(kind));
        let (from_device, to_device) = *kind.ok_or(ACL_ERROR_INVALID_PARAM)?;
        device::current().map_err(|_| ACL_ERROR_RT_CONTEXT_NULL)?;
        if count == 0 || count > dest_max {
            return Err(ACL_ERROR_RT_PARAM_INVALID);
        }
        let from = side(src.expose_provenance(), count, from_device)?;
        let to = side(dst.expose_provenance(), count, to_device)?;
        // SAFETY: device memory is inside its accessible mapping; for the rest
        // the caller vouched.
        unsafe { memory::copy(from, to, count) };
        Ok(())
    })
}

/// Where the CPU can touch one side of a copy.
fn side(address: usize, count: usize, on_device: Option<bool>) -> Result<usize, i32> {
    let place = memory::find(address);
    if on_device.is_some_and(|wanted| wanted != place.is_some()) {
        return Err(ACL_ERROR_RT_PARAM_INVALID);
    }
    match place {
        None => Ok(address),
        Some(place) if count <= place.left => Ok(place.alias),
        Some(_) => Err(ACL_ERROR_RT_PARAM_INVALID),
    }
}

/// Sets this thread's device; a negative one is none, whatever the environment
/// says.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_set_device(device: i32) {
    let none = Err(ACL_ERROR_RT_CONTEXT_NULL);
    device::set(Some(if device < 0 { none } else { Ok(device) }));
}

/// Sets the code that `aclrtGetDevice` answers on this thread; 0 takes back what
/// the thread has set.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_set_device_code(code: c_int) {
    device::set((code != ACL_SUCCESS).then_some(Err(code)));
}

/// The function of that name.
///
/// # Safety
/// `name` is NULL or NUL-terminated.
unsafe fn function(name: *const c_char) -> Option<&'static Function> {
    if name.is_null() {
        return None;
    }
    // SAFETY: not NULL, so the caller vouched for a terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    FUNCTIONS
        .into_iter()
        .find(|function| name.to_bytes() == function.name.as_bytes())
}

/// Makes a function answer a code from now on, on every thread; 0 ends it.
///
/// # Safety
/// `name` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_acl_fail(name: *const c_char, code: c_int) {
    // SAFETY: what our caller vouched for.
    if let Some(function) = unsafe { function(name) } {
        function.forced.store(code, Ordering::Relaxed);
    }
}

/// How often a function was called; `UINT64_MAX` if there is none of that name.
///
/// # Safety
/// `name` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_acl_count(name: *const c_char) -> u64 {
    // SAFETY: what our caller vouched for.
    let function = unsafe { function(name) };
    function.map_or(u64::MAX, |function| function.calls.load(Ordering::Relaxed))
}

/// Sets the `aclrtMemLocationType` of memory that is not a device's.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_set_host_location(location_type: u32) {
    HOST_LOCATION.store(location_type, Ordering::Relaxed);
}

/// Allocates memory that the CPU can touch, but that counts as a device's. NULL
/// if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_alloc_device_memory(size: usize, device: i32) -> *mut c_void {
    ptr::without_provenance_mut(memory::allocate(size, device, false).unwrap_or(0))
}

/// Allocates device memory that ends the process when the CPU touches it. NULL if
/// there is none.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_alloc_guarded_memory(size: usize, device: i32) -> *mut c_void {
    ptr::without_provenance_mut(memory::allocate(size, device, true).unwrap_or(0))
}

/// Frees what the two functions above gave.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_free_device_memory(pointer: *mut c_void) {
    memory::free(pointer.addr());
}

/// Where the CPU can touch the bytes of device memory; NULL for other memory.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_device_alias(pointer: *const c_void) -> *mut c_void {
    let alias = memory::find(pointer.addr()).map_or(0, |place| place.alias);
    ptr::with_exposed_provenance_mut(alias)
}
