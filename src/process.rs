// SPDX-License-Identifier: Apache-2.0
//! The process that a library lives in, and its end.
//!
//! A child after fork has a copy of the memory and none of the threads. And when a
//! process exits without a teardown, as `exit()` from any thread does, the library's
//! static objects are destroyed under whoever is in it. So from then on no call is
//! begun, and those that our own threads make are waited for. One may take 31 s,
//! for a peer that was stopped [pub]; then the process leaves at once, with its
//! status: what the library's destructors and a call do to each other is a crash.
// Registers a function with the C library, and leaves through it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The process that a library was opened by; its child does not exit as it does.
static OPENED_BY: AtomicU32 = AtomicU32::new(0);
static EXITING: AtomicBool = AtomicBool::new(false);
/// Calls that threads of ours are in.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// The process that something belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(pub(crate) u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// Whether this is that process, and it is not exiting. Else nothing of the
    /// library's is touched any more.
    pub(crate) fn is_alive(self) -> bool {
        self.0 == std::process::id() && !EXITING.load(Ordering::SeqCst)
    }
}

/// A call of the library that a thread of ours makes.
pub(crate) struct Call(());

impl Call {
    /// None while the process exits.
    pub(crate) fn begin() -> Option<Self> {
        // Before the look at `EXITING`, as the exit sets that before it looks here:
        // one of the two sees the other.
        CALLS.fetch_add(1, Ordering::SeqCst);
        let call = Self(());
        (!EXITING.load(Ordering::SeqCst)).then_some(call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// To be called when a library has been opened: what is registered later runs
/// earlier at exit, so this runs before the library's destructors.
pub(crate) fn watch_exit() {
    let process = std::process::id();
    if OPENED_BY.swap(process, Ordering::SeqCst) != process {
        // Those of a parent are none of ours.
        CALLS.store(0, Ordering::SeqCst);
    }
    #[cfg(all(target_env = "gnu", not(miri), not(loom)))]
    // SAFETY: the function stays, for the object that it is in is never unloaded; it
    // follows no argument.
    unsafe {
        exit::on_exit(exit::at_exit, std::ptr::null_mut::<c_void>());
    }
}

#[cfg(all(target_env = "gnu", not(miri), not(loom)))]
mod exit {
    use std::panic::catch_unwind;
    use std::thread;
    use std::time::{Duration, Instant};

    use tracing::warn;

    use super::{CALLS, EXITING, OPENED_BY, Ordering, c_int, c_void};

    /// How long calls are waited for. A copy that is not stuck takes less.
    const PATIENCE: Duration = Duration::from_secs(1);

    unsafe extern "C" {
        pub(super) fn on_exit(
            function: extern "C" fn(c_int, *mut c_void),
            argument: *mut c_void,
        ) -> c_int;
        fn fflush(stream: *mut c_void) -> c_int;
        fn _exit(status: c_int) -> !;
        static stdout: *mut c_void;
    }

    pub(super) extern "C" fn at_exit(status: c_int, _: *mut c_void) {
        if OPENED_BY.load(Ordering::SeqCst) != std::process::id() {
            return;
        }
        EXITING.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        while CALLS.load(Ordering::SeqCst) != 0 {
            if begun.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            let calls = CALLS.load(Ordering::SeqCst);
            // A log sink may panic, and nothing may unwind into the C library.
            let _ = catch_unwind(|| {
                warn!(
                    calls,
                    status,
                    "the process exits in the middle of a transfer that does not end, its destructors are left out"
                );
            });
            // SAFETY: the C library's variable, which nobody sets.
            let output = unsafe { stdout };
            // SAFETY: it is a stream.
            unsafe { fflush(output) };
            // SAFETY: nothing runs after it.
            unsafe { _exit(status) };
        }
    }
}
