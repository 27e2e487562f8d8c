// SPDX-License-Identifier: Apache-2.0
//! A range of memory.

use crate::error::Error;

/// One range of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of the first byte.
    pub address: usize,
    /// Bytes.
    pub length: usize,
}

impl Region {
    /// Whether the two share a byte.
    pub fn overlaps(&self, address: usize, length: usize) -> bool {
        address < self.address.saturating_add(self.length)
            && self.address < address.saturating_add(length)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let reason = if self.address == 0 {
            "starts at null"
        } else if self.length == 0 {
            "is empty, register at least one byte"
        } else if self.address.checked_add(self.length).is_none() {
            "reaches past the end of the address space"
        } else {
            return Ok(());
        };
        Err(self.invalid(reason.to_owned()))
    }

    pub(crate) fn invalid(&self, reason: String) -> Error {
        Error::RegionInvalid {
            address: self.address,
            length: self.length,
            reason,
        }
    }
}
