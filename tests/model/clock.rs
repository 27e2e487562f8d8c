// SPDX-License-Identifier: Apache-2.0
//! Time that passes when a script says so.
//!
//! Waits are measured with the system's monotonic clock, so the program has its
//! own `clock_gettime`, which the standard library is linked to: the system's
//! time, and what the thread was set ahead by. A wait for minutes takes no longer
//! than its pauses then, and nothing depends on how busy the machine is.
#![allow(unsafe_code)] // takes the place of a function of the C library

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

thread_local! {
    static AHEAD_S: Cell<u64> = const { Cell::new(0) };
}

/// How far this thread is ahead.
pub fn ahead() -> Duration {
    Duration::from_secs(AHEAD_S.get())
}

/// Puts this thread where another one is, or back.
pub fn set_ahead(ahead: Duration) {
    AHEAD_S.set(ahead.as_secs());
}

/// Lets whole seconds pass for this thread.
pub fn pass(time: Duration) {
    set_ahead(ahead() + time);
}

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: c_long,
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// `RTLD_NEXT`.
const NEXT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);
const CLOCK_MONOTONIC: c_int = 1;

type ClockGettime = unsafe extern "C" fn(c_int, *mut Timespec) -> c_int;

// SAFETY: as the C library's, to which each call goes.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int {
    static SYSTEM: AtomicUsize = AtomicUsize::new(0);
    let mut system = SYSTEM.load(Ordering::Relaxed);
    if system == 0 {
        // SAFETY: a terminated name, and a handle that stands for "the next one".
        let found = unsafe { dlsym(NEXT, c"clock_gettime".as_ptr()) };
        system = found.expose_provenance();
        SYSTEM.store(system, Ordering::Relaxed);
    }
    let system = std::ptr::with_exposed_provenance::<c_void>(system);
    // SAFETY: the C library's function of this name has this type.
    let system = unsafe { std::mem::transmute::<*const c_void, ClockGettime>(system) };
    // SAFETY: the caller's conditions are the same.
    let code = unsafe { system(clock, time) };
    if code == 0 && clock == CLOCK_MONOTONIC {
        // SAFETY: was just written through.
        unsafe { (*time).seconds += AHEAD_S.get() as i64 };
    }
    code
}
