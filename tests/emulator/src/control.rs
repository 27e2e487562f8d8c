// SPDX-License-Identifier: Apache-2.0
//! The emulator's own functions, which tests call.
#![allow(unsafe_code)] // exported symbols, and the caller's pointers

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::abi::{SM_ERROR, SM_OK};
use crate::call::{call_peer_down_from_thread, invalid};
use crate::peer::refuse;
use crate::{gate, handle, library, record, script};

/// Runs one of the emulator's own functions; no panic gets out.
fn own<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(on_panic)
}

/// The text behind a C string; `None` for NULL.
///
/// # Safety
/// `text` is NULL or NUL-terminated.
unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not NULL, so the caller vouched for a terminated string.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

/// Replaces the script, see the crate's documentation.
///
/// # Safety
/// `rules` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_script(rules: *const c_char) -> c_int {
    // SAFETY: what our caller vouched for.
    let rules = unsafe { text(rules) }.unwrap_or_default();
    own(SM_ERROR, || {
        library::script_is_settled();
        script::install(&rules).map_or_else(|why| refuse(invalid(why)), |()| SM_OK)
    })
}

/// The last error's text of this thread, until its next error; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_last_error() -> *const c_char {
    own(c"".as_ptr(), record::last_error)
}

/// A counter by name, `UINT64_MAX` for an unknown name.
///
/// # Safety
/// `name` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_count(name: *const c_char) -> u64 {
    // SAFETY: what our caller vouched for.
    let name = unsafe { text(name) }.unwrap_or_default();
    own(u64::MAX, || {
        record::count(&name).unwrap_or_else(|| {
            refuse(invalid(format!("there is no counter {name:?}")));
            u64::MAX
        })
    })
}

/// Copies a text with its NUL, as much as there is room for; returns its length.
///
/// # Safety
/// `buffer` is NULL or has room for `length` bytes.
unsafe fn put(text: Option<String>, buffer: *mut c_char, length: usize) -> usize {
    let Some(text) = text else { return 0 };
    if !buffer.is_null() && length != 0 {
        let fits = text.len().min(length - 1);
        // SAFETY: `fits` bytes are in the text, and less than `length`; the
        // caller's buffer is not our string.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, fits) };
        // SAFETY: `fits` is less than `length`.
        let end = unsafe { buffer.add(fits) };
        // SAFETY: inside the buffer, see above.
        unsafe { end.write(0) };
    }
    text.len()
}

/// The text of a violation, see the crate's documentation.
///
/// # Safety
/// `buffer` is NULL or has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_violation(index: u64, buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: what our caller vouched for.
    own(0, || unsafe {
        put(record::violation_text(index), buffer, length)
    })
}

/// A line of the call log, see the crate's documentation.
///
/// # Safety
/// `buffer` is NULL or has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_call(index: u64, buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: what our caller vouched for.
    own(0, || unsafe {
        put(record::call_line(index), buffer, length)
    })
}

/// Lets go of every blocked call and every held batch.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_release() {
    own((), || {
        for handle in handle::all() {
            handle.release();
        }
        gate::release();
    });
}

/// Forgets script, counters, violations and call log; handles live on.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_reset() {
    own((), || {
        script::clear();
        record::reset();
    });
}

/// Runs every handle's peer-down callback with this name, from a new thread;
/// returns how many have run.
///
/// # Safety
/// `peer` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_peer_down(peer: *const c_char) -> u64 {
    // SAFETY: what our caller vouched for.
    let peer = unsafe { text(peer) }.unwrap_or_default();
    own(0, || call_peer_down_from_thread(handle::all(), peer))
}

/// Says what this library is: an emulator.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_version() -> *const c_char {
    VERSION_C.as_ptr()
}

/// [`crate::VERSION`] for C.
static VERSION_C: &CStr = match CStr::from_bytes_with_nul(
    concat!("memfabric emulator ", env!("CARGO_PKG_VERSION"), "\0").as_bytes(),
) {
    Ok(version) => version,
    Err(_) => panic!("a NUL inside the version"),
};
