//! The calling thread's current Ascend device.
//!
//! A current device belongs to a thread, so it is read once, in install, on the
//! thread that installs. `libascendcl.so` is opened at run time; nothing links
//! CANN.
// Calls one function of CANN through a pointer.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::path::Path;

use tracing::debug;

use crate::config::Protocol;
use crate::error::Error;
use crate::library;

const LIBRARY: &str = "libascendcl.so";
const SYMBOL: &str = "aclrtGetDevice";

type AclrtGetDevice = unsafe extern "C" fn(device: *mut i32) -> c_int;

/// The device that the library is to use with `protocol`.
///
/// `host_rdma` works without an NPU: there, whatever is missing means device 0.
///
/// # Errors
///
/// For the `device_*` protocols, [`Error::AscendUnavailable`] where CANN or its
/// function is not there, and [`Error::NoCurrentDevice`] where it names none.
pub fn current(protocol: Protocol) -> Result<u32, Error> {
    match (ask(protocol), protocol.needs_device()) {
        (Err(error), false) => {
            debug!(%protocol, reason = %error, device = 0, "no Ascend device needed");
            Ok(0)
        }
        (answer, _) => answer,
    }
}

fn ask(protocol: Protocol) -> Result<u32, Error> {
    let unavailable = |linker| Error::AscendUnavailable { protocol, linker };
    // Never closed: CANN keeps threads of its own.
    let cann = ManuallyDrop::new(library::open(Path::new(LIBRARY)).map_err(unavailable)?);
    // SAFETY: the signature is CANN's documented one, and `cann` is never closed.
    let get_device = unsafe { library::function::<AclrtGetDevice>(&cann, SYMBOL) }
        .ok_or_else(|| unavailable(format!("{LIBRARY}: undefined symbol: {SYMBOL}")))?;
    let mut device = -1;
    // SAFETY: the function writes one int32 through the pointer and keeps
    // nothing.
    let code = unsafe { get_device(&raw mut device) };
    match u32::try_from(device) {
        Ok(device) if code == 0 => Ok(device),
        _ => Err(Error::NoCurrentDevice { code, device }),
    }
}
