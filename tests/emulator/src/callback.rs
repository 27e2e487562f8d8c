// SPDX-License-Identifier: Apache-2.0
//! The peer-down callback.
#![allow(unsafe_code)] // calls a function of the caller's

use std::ffi::{CString, c_void};

use crate::abi::PeerDownCallback;
use crate::record::{self, Counter};

/// A callback and the pointer that it wants back.
#[derive(Clone, Copy)]
pub(crate) struct Callback {
    function: PeerDownCallback,
    user: *mut c_void,
}

// SAFETY: `user` is only handed back, and the vendor's contract, which `new`'s
// caller accepted, is that this happens on any thread.
unsafe impl Send for Callback {}

impl Callback {
    /// # Safety
    /// `function` can be called with `user` on any thread, also within a call
    /// of this library, until it is replaced or the handle's destroy returns.
    pub(crate) unsafe fn new(function: PeerDownCallback, user: *mut c_void) -> Self {
        Self { function, user }
    }

    pub(crate) fn call(self, peer: &str) {
        let Ok(peer) = CString::new(peer) else { return };
        record::add(Counter::peer_downs, 1);
        // SAFETY: `new`'s caller vouched for any thread and moment; the name is
        // terminated and outlives the call. No lock of this library is held.
        unsafe { (self.function)(peer.as_ptr(), self.user) };
    }
}
