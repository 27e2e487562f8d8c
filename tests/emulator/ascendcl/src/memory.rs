// SPDX-License-Identifier: Apache-2.0
//! Device memory: what it is made of, and which addresses belong to it.
#![allow(unsafe_code)] // maps, unmaps and copies memory

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use parking_lot::Mutex;

/// By this name the emulated `libmf_smem.so` finds the accessible mapping.
const NAME: &std::ffi::CStr = c"mf-emulator-device";

/// One allocation: two mappings of one memfd.
struct Allocation {
    /// What the caller has.
    address: usize,
    /// Where the CPU can touch it.
    alias: usize,
    size: usize,
    mapped: usize,
    device: i32,
}

/// Allocations by address.
static ALLOCATIONS: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());

/// Where an address lies in device memory.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) device: i32,
    /// The same byte for the CPU.
    pub(crate) alias: usize,
    /// Bytes from there to the end of the allocation.
    pub(crate) left: usize,
}

/// The page size that attributes report and allocations are rounded to.
pub(crate) const PAGE: usize = 4096;

/// Allocates memory of a device, zeroed. `guarded`: the CPU cannot touch it.
pub(crate) fn allocate(size: usize, device: i32, guarded: bool) -> io::Result<usize> {
    let mapped = size
        .checked_next_multiple_of(PAGE)
        .filter(|mapped| *mapped != 0 && i64::try_from(*mapped).is_ok())
        .ok_or_else(|| io::Error::other("no such size"))?;
    // SAFETY: the name is a NUL-terminated constant.
    let fd = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(mapped as u64)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let alias = map(&file, mapped, access)?;
    let address = match map(
        &file,
        mapped,
        if guarded { libc::PROT_NONE } else { access },
    ) {
        Ok(address) => address,
        Err(error) => {
            unmap(alias, mapped);
            return Err(error);
        }
    };
    let allocation = Allocation {
        address,
        alias,
        size,
        mapped,
        device,
    };
    ALLOCATIONS.lock().insert(address, allocation);
    Ok(address)
}

fn map(file: &File, length: usize, protection: i32) -> io::Result<usize> {
    let fd = file.as_raw_fd();
    // SAFETY: a new mapping of a file of that length; it replaces nothing.
    let address =
        unsafe { libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, 0) };
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(address.addr())
    }
}

fn unmap(address: usize, length: usize) {
    // SAFETY: a whole mapping that `map` made; whoever freed the memory has
    // ended every use of it.
    unsafe { libc::munmap(ptr::without_provenance_mut(address), length) };
}

/// Frees what [`allocate`] gave; whether it was that.
pub(crate) fn free(address: usize) -> bool {
    let Some(allocation) = ALLOCATIONS.lock().remove(&address) else {
        return false;
    };
    unmap(allocation.address, allocation.mapped);
    unmap(allocation.alias, allocation.mapped);
    true
}

/// Where `address` is, if it is in device memory.
pub(crate) fn find(address: usize) -> Option<Place> {
    let allocations = ALLOCATIONS.lock();
    let (_, allocation) = allocations.range(..=address).next_back()?;
    let offset = address - allocation.address;
    (offset < allocation.size).then(|| Place {
        device: allocation.device,
        alias: allocation.alias + offset,
        left: allocation.size - offset,
    })
}

/// Copies bytes; the ranges may overlap.
///
/// # Safety
/// Both ranges are memory that the CPU can touch, and nobody else uses
/// meanwhile.
pub(crate) unsafe fn copy(from: usize, to: usize, count: usize) {
    let (from, to): (*const u8, *mut u8) = (
        ptr::with_exposed_provenance(from),
        ptr::with_exposed_provenance_mut(to),
    );
    // SAFETY: the caller vouched for both ranges.
    unsafe { ptr::copy(from, to, count) };
}
