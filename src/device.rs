//! Ascend devices: which one is current, which memory is theirs, copying it.
//!
//! `libascendcl.so` is opened at run time; nothing links CANN, and a machine
//! without it has no device memory. Signatures, codes and the layout of
//! `aclrtPtrAttributes` are those of CANN's published headers.
// Calls functions of CANN through pointers.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::OnceLock;

use libloading::os::unix::Library as Linked;
use tracing::{debug, info};

use crate::config::Protocol;
use crate::error::Error;
use crate::library;

const LIBRARY: &str = "libascendcl.so";
const ACL_SUCCESS: c_int = 0;
/// The calling thread has no current device.
const ACL_ERROR_RT_CONTEXT_NULL: c_int = 107_002;
const ACL_MEM_LOCATION_TYPE_DEVICE: u32 = 1;

type AclrtGetDevice = unsafe extern "C" fn(device: *mut i32) -> c_int;
type AclrtSetDevice = unsafe extern "C" fn(device: i32) -> c_int;
type AclrtPointerGetAttributes =
    unsafe extern "C" fn(pointer: *const c_void, attributes: *mut PtrAttributes) -> c_int;
type AclrtMemcpy = unsafe extern "C" fn(
    destination: *mut c_void,
    room: usize,
    source: *const c_void,
    count: usize,
    kind: c_int,
) -> c_int;

/// `aclrtPtrAttributes`, with its `aclrtMemLocation` spelt out.
#[repr(C)]
#[derive(Default)]
struct PtrAttributes {
    location_id: u32,
    location_type: u32,
    page_size: u32,
    reserved: [u32; 4],
}

const _: () = assert!(size_of::<PtrAttributes>() == 28);

/// The device that the library is to use with `protocol`.
///
/// A current device belongs to a thread, so it is read once, in install, on the
/// thread that installs, and never again. `host_rdma` works without an NPU:
/// there, whatever is missing means device 0.
///
/// # Errors
///
/// For the `device_*` protocols, [`Error::AscendUnavailable`] where CANN or its
/// function is not there, and [`Error::NoCurrentDevice`] where it names none.
pub fn current(protocol: Protocol) -> Result<u32, Error> {
    match (ask_current(protocol), protocol.needs_device()) {
        (Err(error), false) => {
            debug!(%protocol, reason = %error, device = 0, "no Ascend device needed");
            Ok(0)
        }
        (answer, _) => answer,
    }
}

fn ask_current(protocol: Protocol) -> Result<u32, Error> {
    let unavailable = |linker| Error::AscendUnavailable { protocol, linker };
    let cann = open().map_err(unavailable)?;
    // SAFETY: the signature is CANN's, and `cann` is never closed.
    let get_device = unsafe { library::function::<AclrtGetDevice>(&cann, "aclrtGetDevice") }
        .ok_or_else(|| unavailable(format!("{LIBRARY}: undefined symbol: aclrtGetDevice")))?;
    let mut device = -1;
    // SAFETY: one int32 is written through the pointer during the call.
    let code = unsafe { get_device(&raw mut device) };
    match u32::try_from(device) {
        Ok(device) if code == ACL_SUCCESS => Ok(device),
        _ => Err(Error::NoCurrentDevice { code, device }),
    }
}

/// Never closed: CANN keeps threads of its own.
fn open() -> Result<ManuallyDrop<Linked>, String> {
    library::open(Path::new(LIBRARY)).map(ManuallyDrop::new)
}

/// What is asked about memory, looked up once in a process: these questions come
/// with every request.
struct Memory {
    set_device: AclrtSetDevice,
    attributes: AclrtPointerGetAttributes,
    copy: AclrtMemcpy,
}

fn memory() -> Option<&'static Memory> {
    static MEMORY: OnceLock<Option<Memory>> = OnceLock::new();
    MEMORY
        .get_or_init(|| {
            let cann = match open() {
                Ok(cann) => cann,
                Err(linker) => {
                    debug!(linker, "no CANN, so no device memory");
                    return None;
                }
            };
            // SAFETY: the signature is CANN's, and `cann` is never closed.
            let set_device = unsafe { library::function(&cann, "aclrtSetDevice") };
            // SAFETY: as above.
            let attributes = unsafe { library::function(&cann, "aclrtPointerGetAttributes") };
            // SAFETY: as above.
            let copy = unsafe { library::function(&cann, "aclrtMemcpy") };
            let (Some(set_device), Some(attributes), Some(copy)) = (set_device, attributes, copy)
            else {
                info!("this CANN cannot tell device memory, all memory is taken for the host's");
                return None;
            };
            Some(Memory {
                set_device,
                attributes,
                copy,
            })
        })
        .as_ref()
}

/// The device whose memory `address` is; None for host memory, and where there
/// is no CANN to ask.
pub fn of_memory(address: usize) -> Option<u32> {
    let memory = memory()?;
    let mut attributes = PtrAttributes::default();
    // SAFETY: the address is only looked up; one struct is written during the
    // call.
    let code =
        unsafe { (memory.attributes)(std::ptr::without_provenance(address), &raw mut attributes) };
    (code == ACL_SUCCESS && attributes.location_type == ACL_MEM_LOCATION_TYPE_DEVICE)
        .then_some(attributes.location_id)
}

/// Copies `length` bytes where one side or both are device memory.
///
/// A thread without a current device gets the one that the memory is on.
///
/// # Errors
///
/// [`Error::DeviceCopy`] with ACL's code.
///
/// # Safety
///
/// `length` bytes at `source` can be read, as many at `destination` written,
/// nobody else uses either meanwhile, and they do not overlap. Device memory is
/// checked by CANN.
pub unsafe fn copy(destination: usize, source: usize, length: usize) -> Result<(), Error> {
    let (to, from) = (of_memory(destination), of_memory(source));
    let Some((memory, device)) = memory().zip(to.or(from)) else {
        return Err(Error::DeviceCopy {
            destination,
            source_address: source,
            length,
            code: None,
        });
    };
    // aclrtMemcpyKind: HOST_TO_HOST 0, HOST_TO_DEVICE 1, DEVICE_TO_HOST 2,
    // DEVICE_TO_DEVICE 3.
    let kind = 2 * c_int::from(from.is_some()) + c_int::from(to.is_some());
    let attempt = || {
        // SAFETY: the caller vouches for both sides; `kind` says which of them
        // CANN translates.
        unsafe {
            (memory.copy)(
                std::ptr::with_exposed_provenance_mut(destination),
                length,
                std::ptr::with_exposed_provenance(source),
                length,
                kind,
            )
        }
    };
    let mut code = attempt();
    if code == ACL_ERROR_RT_CONTEXT_NULL {
        // SAFETY: takes a number only; the thread has no device to lose.
        let set = unsafe { (memory.set_device)(device.cast_signed()) };
        debug!(
            device,
            code = set,
            "thread had no current device, set that of the memory"
        );
        code = attempt();
    }
    if code == ACL_SUCCESS {
        return Ok(());
    }
    Err(Error::DeviceCopy {
        destination,
        source_address: source,
        length,
        code: Some(code),
    })
}
