// SPDX-License-Identifier: Apache-2.0
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
use parking_lot::Mutex;
use tracing::{debug, info, warn};

use super::{host_ranges, library};
use crate::config::Protocol;
use crate::error::Error;
use crate::region::Region;

const LIBRARY: &str = "libascendcl.so";
const ACL_SUCCESS: c_int = 0;
/// The calling thread has no current device.
const ACL_ERROR_RT_CONTEXT_NULL: c_int = 107_002;

/// `aclrtMemLocationType`: by `aclrtMallocHost`, or registered with CANN.
const ACL_MEM_LOCATION_TYPE_HOST: u32 = 0;
const ACL_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
/// Not allocated through CANN.
const ACL_MEM_LOCATION_TYPE_UNREGISTERED: u32 = 2;
/// Unified memory: its pages are where they were touched last, the host or a
/// device, and move when the other side touches them.
const ACL_MEM_LOCATION_TYPE_MANAGED: u32 = 3;
/// Of the host, by `aclrtMallocPhysical` with a NUMA node.
const ACL_MEM_LOCATION_TYPE_HOST_NUMA: u32 = 4;

/// `aclrtMemcpyKind`.
const ACL_MEMCPY_HOST_TO_HOST: c_int = 0;
const ACL_MEMCPY_HOST_TO_DEVICE: c_int = 1;
const ACL_MEMCPY_DEVICE_TO_HOST: c_int = 2;
const ACL_MEMCPY_DEVICE_TO_DEVICE: c_int = 3;
/// CANN finds out itself where the two sides are.
const ACL_MEMCPY_DEFAULT: c_int = 4;

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

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Host,
    Device(u32),
    /// It may be on that device or not: the CPU must keep away from it, and a
    /// copy is CANN's to direct.
    Unsure(u32),
}

impl Place {
    fn device(self) -> Option<u32> {
        match self {
            Self::Host => None,
            Self::Device(device) | Self::Unsure(device) => Some(device),
        }
    }
}

/// The device whose memory `address` is; None for host memory, and where there
/// is no CANN to ask. Memory that was registered as the host's needs no question
/// to CANN.
///
/// Managed memory counts as the device's. The CPU may touch it, but that moves its
/// pages to the host, and they may be in use where they are.
pub fn of_memory(address: usize) -> Option<u32> {
    place_of(memory()?, address).device()
}

fn place_of(memory: &Memory, address: usize) -> Place {
    if host_ranges::holds(address) {
        return Place::Host;
    }
    let mut attributes = PtrAttributes::default();
    // SAFETY: the address is only looked up; one struct is written during the
    // call.
    let code =
        unsafe { (memory.attributes)(std::ptr::without_provenance(address), &raw mut attributes) };
    if code != ACL_SUCCESS {
        // Not taken for a device's: a CANN that cannot answer, because the driver
        // or a context is missing, answers so for every address of the host, and
        // up to 9.0 its documentation promises an answer for its own memory only.
        if first_time(&CODES, code) {
            warn!(
                code,
                address, "aclrtPointerGetAttributes failed, the memory is taken for the host's"
            );
        }
        return Place::Host;
    }
    let device = attributes.location_id;
    match attributes.location_type {
        ACL_MEM_LOCATION_TYPE_HOST
        | ACL_MEM_LOCATION_TYPE_UNREGISTERED
        | ACL_MEM_LOCATION_TYPE_HOST_NUMA => Place::Host,
        ACL_MEM_LOCATION_TYPE_DEVICE => Place::Device(device),
        // CANN's runtime knows on which side its pages are, but does not say it
        // here; the id is the device's (`NpuDriver::PtrGetAttributes` and
        // `PtrGetRealLocation` in its published source).
        ACL_MEM_LOCATION_TYPE_MANAGED => Place::Unsure(device),
        // Touching a device's memory ends the process; host memory that is taken
        // for a device's is only slower.
        location => {
            if first_time(&LOCATIONS, location.cast_signed()) {
                warn!(
                    location,
                    address, device, "this kind of memory is not known, it is taken for a device's"
                );
            }
            Place::Unsure(device)
        }
    }
}

/// Codes and kinds of memory that were logged: these questions come with every
/// request.
static CODES: Mutex<Vec<c_int>> = Mutex::new(Vec::new());
static LOCATIONS: Mutex<Vec<c_int>> = Mutex::new(Vec::new());
/// More than CANN has for one function.
const MOST_SEEN: usize = 64;

fn first_time(seen: &Mutex<Vec<c_int>>, number: c_int) -> bool {
    let mut seen = seen.lock();
    let new = seen.len() < MOST_SEEN && !seen.contains(&number);
    if new {
        seen.push(number);
    }
    new
}

/// Takes note of regions that `owner` has registered with the library, so that
/// [`of_memory`] knows those of the host. `owner` is any number that is one
/// transport's own.
pub(crate) fn registered(regions: &[Region], owner: usize) {
    let Some(memory) = memory() else {
        return;
    };
    for region in regions {
        // What was there before may have been the host's.
        host_ranges::remove(region.address);
        let last = region
            .address
            .saturating_add(region.length)
            .saturating_sub(1);
        let ends = [region.address, last].map(|address| place_of(memory, address));
        if ends == [Place::Host; 2] {
            host_ranges::add(*region, owner);
        }
    }
}

/// Before a region is removed: from now on, [`of_memory`] asks about it again.
pub(crate) fn removed(region: &Region) {
    host_ranges::remove(region.address);
}

/// When all that `owner` has registered is gone.
pub(crate) fn all_removed(owner: usize) {
    host_ranges::forget(owner);
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
    let refused = |code| Error::DeviceCopy {
        destination,
        source_address: source,
        length,
        code,
    };
    let memory = memory().ok_or_else(|| refused(None))?;
    let (to, from) = (place_of(memory, destination), place_of(memory, source));
    let Some(device) = to.device().or(from.device()) else {
        return Err(refused(None));
    };
    let kind = match (from, to) {
        (Place::Unsure(_), _) | (_, Place::Unsure(_)) => ACL_MEMCPY_DEFAULT,
        (Place::Host, Place::Host) => ACL_MEMCPY_HOST_TO_HOST,
        (Place::Host, Place::Device(_)) => ACL_MEMCPY_HOST_TO_DEVICE,
        (Place::Device(_), Place::Host) => ACL_MEMCPY_DEVICE_TO_HOST,
        (Place::Device(_), Place::Device(_)) => ACL_MEMCPY_DEVICE_TO_DEVICE,
    };
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
    Err(refused(Some(code)))
}
