// SPDX-License-Identifier: Apache-2.0
//! An allocator that makes the use of freed memory visible without a tool.
#![allow(unsafe_code)] // an allocator is nothing else

use std::alloc::{GlobalAlloc, Layout, System};

/// The system's allocator, but what is freed is filled with 0xDD first: an
/// argument array that is read after its end no longer says what was submitted.
pub struct Poisoning;

// SAFETY: every call goes to the system's allocator with the caller's own
// layout; freed memory is written to before it is given back, while it is still
// the caller's.
unsafe impl GlobalAlloc for Poisoning {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the block has `layout.size()` bytes and nobody else's any more.
        unsafe { pointer.write_bytes(0xdd, layout.size()) };
        // SAFETY: as for `alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
