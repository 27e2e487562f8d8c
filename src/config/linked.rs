// SPDX-License-Identifier: Apache-2.0
//! A library that the program has linked in.
// Whoever makes one vouches for the functions' types.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

/// Finds the functions of a library that is a part of this program.
#[derive(Clone, Copy)]
pub struct Linked(fn(&str) -> Option<NonNull<c_void>>);

impl Linked {
    /// # Safety
    ///
    /// What `find` finds by a name is the function that
    /// [`abi`](crate::vendor::abi) declares the type of under that name.
    pub const unsafe fn new(find: fn(&str) -> Option<NonNull<c_void>>) -> Self {
        Self(find)
    }

    pub(crate) fn find(self, name: &str) -> Option<NonNull<c_void>> {
        (self.0)(name)
    }
}

impl fmt::Debug for Linked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Linked")
    }
}
