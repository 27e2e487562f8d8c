// SPDX-License-Identifier: Apache-2.0
//! The emulated library, which is a part of this command.
// Calls its C functions.
#![allow(unsafe_code)]

use std::ffi::CStr;

use memfabric_transport::config::Linked;
use mf_smem::control::{mf_emu_count, mf_emu_violation};

/// Its functions, for the transport.
// SAFETY: the emulator has each function with the library's own type.
pub const LINKED: Linked = unsafe { Linked::new(mf_smem::function) };

/// What it says of itself.
pub const VERSION: &str = mf_smem::VERSION;

/// A counter of this process; 0 if it has none of that name.
pub fn count(name: &CStr) -> u64 {
    // SAFETY: reads the terminated name during the call.
    let count = unsafe { mf_emu_count(name.as_ptr()) };
    if count == u64::MAX { 0 } else { count }
}

/// The text of each contract violation of this process.
pub fn violations() -> Vec<String> {
    (0..count(c"violations")).map(violation).collect()
}

fn violation(index: u64) -> String {
    let mut text = [0_u8; 512];
    // SAFETY: writes at most that many bytes to the buffer, terminator included.
    unsafe { mf_emu_violation(index, text.as_mut_ptr().cast(), text.len()) };
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    text.to_string_lossy().into_owned()
}
