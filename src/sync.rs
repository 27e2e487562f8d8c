// SPDX-License-Identifier: Apache-2.0
//! The atomics, the cell and the locks of the lock-free paths: std's and
//! parking_lot's, or loom's in the tests under `--cfg loom`.

#[cfg(not(all(loom, test)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::{OnceLock, atomic};

#[cfg(all(loom, test))]
pub(crate) use self::modelled::{Condvar, Mutex, MutexGuard, OnceLock, atomic};

/// loom's types with the interface of those above.
#[cfg(all(loom, test))]
#[allow(unsafe_code)] // the cell
mod modelled {
    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    use loom::cell::UnsafeCell;

    pub(crate) mod atomic {
        pub(crate) use std::sync::atomic::Ordering;

        use super::{Deref, DerefMut};

        macro_rules! atomics {
            ($($name:ident: $value:ty;)*) => { $(
                #[derive(Debug, Default)]
                pub(crate) struct $name(loom::sync::atomic::$name);

                #[allow(dead_code)] // not each is used in each way
                impl $name {
                    pub(crate) fn new(value: $value) -> Self {
                        Self(loom::sync::atomic::$name::new(value))
                    }

                    pub(crate) fn get_mut(&mut self) -> Exclusive<$value, impl FnMut($value)> {
                        // SAFETY: the reference is unique.
                        let value = unsafe { self.0.unsync_load() };
                        let store = |value| self.0.store(value, Ordering::Relaxed);
                        Exclusive { value, store }
                    }
                }

                impl Deref for $name {
                    type Target = loom::sync::atomic::$name;

                    fn deref(&self) -> &Self::Target {
                        &self.0
                    }
                }
            )* };
        }

        atomics! {
            AtomicBool: bool;
            AtomicU32: u32;
            AtomicU64: u64;
            AtomicUsize: usize;
        }

        /// A value that is stored when this is dropped.
        pub(crate) struct Exclusive<T: Copy, S: FnMut(T)> {
            value: T,
            store: S,
        }

        impl<T: Copy, S: FnMut(T)> Deref for Exclusive<T, S> {
            type Target = T;

            fn deref(&self) -> &T {
                &self.value
            }
        }

        impl<T: Copy, S: FnMut(T)> DerefMut for Exclusive<T, S> {
            fn deref_mut(&mut self) -> &mut T {
                &mut self.value
            }
        }

        impl<T: Copy, S: FnMut(T)> Drop for Exclusive<T, S> {
            fn drop(&mut self) {
                (self.store)(self.value);
            }
        }
    }

    use atomic::{AtomicBool, Ordering};

    /// std's guarantee, for one writer at a time: who gets the value sees all
    /// that was done before it was set.
    #[derive(Debug)]
    pub(crate) struct OnceLock<T> {
        is_set: AtomicBool,
        value: UnsafeCell<Option<T>>,
    }

    // SAFETY: the value is written once, under `set`'s condition or through a
    // unique reference, and only read once `is_set` says so.
    unsafe impl<T: Send + Sync> Sync for OnceLock<T> {}

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self {
                is_set: AtomicBool::new(false),
                value: UnsafeCell::new(None),
            }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            if !self.is_set.load(Ordering::Acquire) {
                return None;
            }
            // SAFETY: nobody writes any more while the cell is borrowed; loom
            // checks it.
            self.value.with(|value| unsafe { (*value).as_ref() })
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            if self.is_set.load(Ordering::Relaxed) {
                return Err(value);
            }
            // SAFETY: nobody reads yet, and there is one writer; loom checks it.
            self.value.with_mut(|place| unsafe { *place = Some(value) });
            self.is_set.store(true, Ordering::Release);
            Ok(())
        }

        pub(crate) fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
            if self.get().is_none() {
                // Nobody else sets it meanwhile.
                let _ = self.set(init());
            }
            self.get().expect("it was set")
        }

        pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
            // SAFETY: the reference is unique.
            self.value.with_mut(|value| unsafe { (*value).as_mut() })
        }

        pub(crate) fn take(&mut self) -> Option<T> {
            *self.is_set.get_mut() = false;
            // SAFETY: the reference is unique.
            self.value.with_mut(|value| unsafe { (*value).take() })
        }
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> Self {
            Self::new()
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard {
                mutex: self,
                guard: Some(self.0.lock().expect("no panic")),
            }
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().expect("no panic")
        }
    }

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        /// Empty while a condition is waited for.
        guard: Option<loom::sync::MutexGuard<'a, T>>,
    }

    impl<T> MutexGuard<'_, T> {
        /// Does not unlock: only a wait of seconds comes here.
        pub(crate) fn unlocked(_: &mut Self, body: impl FnOnce()) {
            body();
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.guard.as_ref().expect("locked")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect("locked")
        }
    }

    #[derive(Debug)]
    pub(crate) struct Condvar;

    /// What a wait came to.
    pub(crate) struct TimedOut;

    impl TimedOut {
        pub(crate) fn timed_out(&self) -> bool {
            true
        }
    }

    /// Time is over in every wait: that is one of the orders that there are, and
    /// needs no signal.
    impl Condvar {
        pub(crate) fn new() -> Self {
            Self
        }

        pub(crate) fn notify_all(&self) {}

        pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> TimedOut {
            guard.guard = None;
            loom::thread::yield_now();
            guard.guard = Some(guard.mutex.0.lock().expect("no panic"));
            TimedOut
        }
    }
}
