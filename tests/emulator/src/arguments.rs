// SPDX-License-Identifier: Apache-2.0
//! The argument arrays of a batch copy.
#![allow(unsafe_code)] // reads what the caller's pointers point to

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::abi::BatchParams;

/// Ranges to copy, as the caller promised them: whoever made the [`Source`]
/// vouched for the local memory.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    local: Vec<usize>,
    remote: Vec<usize>,
    lengths: Vec<usize>,
}

impl Blocks {
    pub(crate) fn len(&self) -> usize {
        self.lengths.len()
    }

    pub(crate) fn local(&self) -> &[usize] {
        &self.local
    }

    pub(crate) fn remote(&self) -> &[usize] {
        &self.remote
    }

    pub(crate) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Whether a local range shares a byte with `address+length`.
    pub(crate) fn use_locally(&self, address: u64, length: u64) -> bool {
        self.local.iter().zip(&self.lengths).any(|(&local, &size)| {
            size != 0
                && (local as u64) < address.saturating_add(length)
                && address < (local as u64).saturating_add(size as u64)
        })
    }

    /// The three arrays as the call log shows them.
    pub(crate) fn describe(&self) -> String {
        let hex = |addresses: &[usize]| {
            let addresses: Vec<_> = addresses.iter().map(|it| format!("{it:#x}")).collect();
            addresses.join(",")
        };
        let lengths: Vec<_> = self.lengths.iter().map(usize::to_string).collect();
        format!(
            "srcList=[{}] destList=[{}] sizeList=[{}]",
            hex(&self.local),
            hex(&self.remote),
            lengths.join(",")
        )
    }
}

/// Where a caller keeps the arguments of one batch.
pub(crate) struct Source {
    url: *const c_char,
    local: *const usize,
    remote: *const usize,
    lengths: *const usize,
    count: usize,
}

// SAFETY: the pointers are only read, under the promise given to `new`, which
// holds for every thread.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

impl Source {
    /// `None` if a pointer is null or there are no blocks.
    ///
    /// # Safety
    /// `destUrl` is NUL-terminated and the three lists have `batchSize`
    /// elements, all readable as long as this value is used; the local ranges
    /// that they name may be copied from (WRITE) or to (READ) until the batch's
    /// result is known.
    pub(crate) unsafe fn new(params: &BatchParams) -> Option<Self> {
        let any_null = params.dest_url.is_null()
            || params.src_list.is_null()
            || params.dest_list.is_null()
            || params.size_list.is_null();
        (!any_null && params.batch_size != 0).then_some(Self {
            url: params.dest_url,
            local: params.src_list.cast_const().cast(),
            remote: params.dest_list.cast_const().cast(),
            lengths: params.size_list,
            count: params.batch_size as usize,
        })
    }

    /// Reads the three arrays, in place of what `blocks` had.
    pub(crate) fn read(&self, blocks: &mut Blocks) {
        let copy = |list: *const usize, into: &mut Vec<usize>| {
            into.clear();
            into.reserve(self.count);
            // A call to memcpy, which memory checkers watch.
            // SAFETY: `new`'s caller vouched for `count` readable elements;
            // there is room for as many; the vector is nobody else's.
            unsafe { ptr::copy_nonoverlapping(list, into.as_mut_ptr(), self.count) };
            // SAFETY: all `count` elements have just been written.
            unsafe { into.set_len(self.count) };
        };
        copy(self.local, &mut blocks.local);
        copy(self.remote, &mut blocks.remote);
        copy(self.lengths, &mut blocks.lengths);
    }

    /// Reads `destUrl`; what is not UTF-8 in it cannot be an endpoint.
    pub(crate) fn url(&self) -> String {
        // SAFETY: `new`'s caller vouched for a readable, terminated string.
        let url = unsafe { CStr::from_ptr(self.url) };
        url.to_string_lossy().into_owned()
    }
}
