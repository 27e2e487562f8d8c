// SPDX-License-Identifier: Apache-2.0
//! Large arrays of zeros that cost no memory before they are used.
// Allocates by hand, because a vector would abort or touch every page.
#![allow(unsafe_code)]

#[cfg(not(all(loom, test)))]
use std::alloc::{Layout, alloc_zeroed};
#[cfg(not(all(loom, test)))]
use std::ptr::NonNull;

use crate::sync::atomic::{AtomicU32, AtomicU64};

/// Types for which all bits zero is a value.
///
/// # Safety
///
/// All bits zero must be a valid value.
pub(crate) unsafe trait Zero {}

// SAFETY: an atomic integer is an integer in memory.
unsafe impl Zero for AtomicU32 {}
// SAFETY: as above.
unsafe impl Zero for AtomicU64 {}
// SAFETY: an array of such.
unsafe impl<T: Zero, const N: usize> Zero for [T; N] {}

/// `count` zeros; None if there is no memory for them.
#[cfg(not(all(loom, test)))]
pub(crate) fn slice<T: Zero>(count: usize) -> Option<Box<[T]>> {
    let layout = Layout::array::<T>(count).ok()?;
    if layout.size() == 0 {
        return Some(Box::default());
    }
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc_zeroed(layout) };
    let memory = NonNull::new(memory)?.cast::<T>();
    let slice = NonNull::slice_from_raw_parts(memory, count);
    // SAFETY: allocated by the global allocator with the slice's layout, and
    // zeroed, which `Zero` vouches for; nobody else has it.
    Some(unsafe { Box::from_raw(slice.as_ptr()) })
}

/// As above: loom's atomics are more than numbers.
#[cfg(all(loom, test))]
pub(crate) fn slice<T: Zero + Default>(count: usize) -> Option<Box<[T]>> {
    Some(std::iter::repeat_with(T::default).take(count).collect())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn b09_what_cannot_be_had_is_none_and_no_abort() {
        assert!(slice::<AtomicU64>(usize::MAX).is_none());
        assert!(slice::<AtomicU64>(1 << 58).is_none());
        assert_eq!(slice::<AtomicU64>(0).map(|slice| slice.len()), Some(0));
        let some = slice::<AtomicU32>(1000).expect("four kilobytes");
        assert_eq!(some.len(), 1000);
        assert!(some.iter().all(|zero| zero.load(Ordering::Relaxed) == 0));
    }
}
