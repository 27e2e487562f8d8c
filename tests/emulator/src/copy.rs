// SPDX-License-Identifier: Apache-2.0
//! Moving bytes, within a process and between two.
#![allow(unsafe_code)] // the copies themselves

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use crate::abi::{OPCODE_WRITE, SM_ERROR, SM_NOT_CONNECTED, SM_OK};
use crate::record::{self, Level};

/// iovecs that the kernel takes in one call (its `UIO_MAXIOV`).
const IOVECS: usize = 1024;
/// Bytes in one call: below the kernel's limit of 2 GiB, and few enough that a
/// peer's end is noticed between two of them.
const BYTES: usize = 64 << 20;

/// Copies of one worker, with the room that they need.
pub(crate) struct Copier {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
}

// SAFETY: the iovecs are filled and used within one call of `between`.
unsafe impl Send for Copier {}

/// Ranges ready to copy: checked, and translated.
pub(crate) struct Ranges<'a> {
    pub(crate) opcode: u32,
    pub(crate) local: &'a [usize],
    pub(crate) remote: &'a [usize],
    pub(crate) lengths: &'a [usize],
}

impl Copier {
    pub(crate) fn new() -> Self {
        Self {
            local: Vec::with_capacity(IOVECS),
            remote: Vec::with_capacity(IOVECS),
        }
    }

    /// Copies within this process. The remote ranges have been checked against
    /// the target's registered regions, which cannot change meanwhile.
    pub(crate) fn within(&self, ranges: &Ranges) -> (i32, u64) {
        let mut moved = 0;
        let blocks = ranges.local.iter().zip(ranges.remote).zip(ranges.lengths);
        for ((&local, &remote), &length) in blocks {
            let (from, to) = match ranges.opcode {
                OPCODE_WRITE => (local, remote),
                _ => (remote, local),
            };
            // SAFETY: the initiator vouched for the local range when it made the
            // batch, until its result; the target for the remote one when it
            // registered it, until it withdraws it; both are plain bytes, and
            // may overlap.
            unsafe { ptr::copy(from as *const u8, to as *mut u8, length) };
            moved += length as u64;
        }
        (SM_OK, moved)
    }

    /// Copies from or to the process `pid`, as long as `alive` says that it is
    /// still the one that was meant. Returns the result and the bytes moved.
    pub(crate) fn between(
        &mut self,
        pid: u32,
        ranges: &Ranges,
        alive: impl Fn() -> bool,
    ) -> (i32, u64) {
        let mut moved = 0;
        let mut block = 0;
        let mut offset = 0;
        while block < ranges.lengths.len() {
            if !alive() {
                return (SM_NOT_CONNECTED, moved);
            }
            let wanted = self.fill(ranges, block, offset);
            if wanted == 0 {
                break;
            }
            match self.transfer(pid, ranges.opcode) {
                Ok(0) => return (SM_ERROR, moved),
                Ok(copied) => {
                    moved += copied as u64;
                    offset += copied;
                    while let Some(&length) = ranges.lengths.get(block)
                        && offset >= length
                    {
                        offset -= length;
                        block += 1;
                    }
                }
                Err(error) => {
                    if error.raw_os_error() == Some(libc::ESRCH) {
                        return (SM_NOT_CONNECTED, moved);
                    }
                    record::print(
                        Level::Warn,
                        &format!("copying block {block} with process {pid}: {error}"),
                    );
                    return (SM_ERROR, moved);
                }
            }
        }
        (SM_OK, moved)
    }

    /// Describes the next call, from `offset` into `block` on; returns its bytes.
    fn fill(&mut self, ranges: &Ranges, mut block: usize, mut offset: usize) -> usize {
        self.local.clear();
        self.remote.clear();
        let mut bytes = 0;
        while block < ranges.lengths.len() && self.local.len() < IOVECS && bytes < BYTES {
            let length = (ranges.lengths[block] - offset).min(BYTES - bytes);
            if length != 0 {
                let vector = |base: usize| libc::iovec {
                    iov_base: (base + offset) as _,
                    iov_len: length,
                };
                self.local.push(vector(ranges.local[block]));
                self.remote.push(vector(ranges.remote[block]));
                bytes += length;
            }
            block += 1;
            offset = 0;
        }
        bytes
    }

    fn transfer(&self, pid: u32, opcode: u32) -> io::Result<usize> {
        let (pid, count) = (pid as libc::pid_t, self.local.len() as libc::c_ulong);
        let (local, remote) = (self.local.as_ptr(), self.remote.as_ptr());
        let copied = if opcode == OPCODE_WRITE {
            // SAFETY: `count` iovecs each, live for the call. The kernel reads
            // the local ranges, vouched for until the batch's result, and
            // answers EFAULT where there is no memory; of the other process it
            // writes ranges that it has registered.
            unsafe { libc::process_vm_writev(pid, local, count, remote, count, 0) }
        } else {
            // SAFETY: as above, the other way: the kernel writes the local
            // ranges, which the initiator gave away until the batch's result.
            unsafe { libc::process_vm_readv(pid, local, count, remote, count, 0) }
        };
        let error = match usize::try_from(copied) {
            Ok(copied) => return Ok(copied),
            Err(_) => io::Error::last_os_error(),
        };
        match error.raw_os_error() {
            Some(libc::ENOSYS) => self.through_the_file(pid, opcode),
            _ => Err(error),
        }
    }

    /// The same through the process's file of its memory, where the system has
    /// neither call: qemu-user does not, and leaves a program's memory where the
    /// program believes that it is.
    fn through_the_file(&self, pid: libc::pid_t, opcode: u32) -> io::Result<usize> {
        let write = opcode == OPCODE_WRITE;
        let memory = File::options()
            .read(!write)
            .write(write)
            .open(format!("/proc/{pid}/mem"))
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => io::Error::from_raw_os_error(libc::ESRCH),
                _ => error,
            })?;
        let fd = memory.as_raw_fd();
        let mut moved = 0;
        for (local, remote) in self.local.iter().zip(&self.remote) {
            let (base, length) = (local.iov_base, local.iov_len);
            let at = remote.iov_base.addr() as libc::off_t;
            let copied = if write {
                // SAFETY: as in `transfer`: the local range is vouched for, and
                // is no memory only if that is EFAULT; the kernel writes a range
                // that the other process has registered.
                unsafe { libc::pwrite(fd, base, length, at) }
            } else {
                // SAFETY: as above, the other way.
                unsafe { libc::pread(fd, base, length, at) }
            };
            match usize::try_from(copied) {
                // A process that has ended has no memory.
                Ok(0) if moved == 0 => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Ok(copied) => moved += copied,
                Err(_) if moved == 0 => return Err(io::Error::last_os_error()),
                Err(_) => break,
            }
            if copied.cast_unsigned() != length {
                break;
            }
        }
        Ok(moved)
    }
}

/// Whether the kernel can copy from `address` in this process.
pub(crate) fn readable(address: u64) -> bool {
    let mut byte = 0_u8;
    let local = libc::iovec {
        iov_base: ptr::from_mut(&mut byte).cast(),
        iov_len: 1,
    };
    let remote = libc::iovec {
        iov_base: ptr::without_provenance_mut(address as usize),
        iov_len: 1,
    };
    // SAFETY: one iovec each; fills one byte of a live local, and answers EFAULT
    // where `address` is no memory.
    let copied =
        unsafe { libc::process_vm_readv(std::process::id() as _, &local, 1, &remote, 1, 0) };
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOSYS) if copied == -1 => readable_by_a_pipe(address),
        _ => copied == 1,
    }
}

/// The same where the system has no such call.
fn readable_by_a_pipe(address: u64) -> bool {
    let Ok((_reader, writer)) = io::pipe() else {
        return false;
    };
    let from = ptr::without_provenance(address as usize);
    // SAFETY: the kernel reads one byte, and answers EFAULT where `address` is no
    // memory.
    unsafe { libc::write(writer.as_raw_fd(), from, 1) == 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{OPCODE_READ, SM_OK};

    fn across(opcode: u32, local: &[usize], remote: &[usize], lengths: &[usize]) -> (i32, u64) {
        let ranges = Ranges {
            opcode,
            local,
            remote,
            lengths,
        };
        Copier::new().between(std::process::id(), &ranges, || true)
    }

    #[test]
    fn more_blocks_than_one_call_takes_arrive_whole_and_in_place() {
        let from: Vec<u8> = (0..3 * 5_000).map(|byte| (byte % 251) as u8).collect();
        let mut to = vec![0_u8; from.len()];
        let local: Vec<usize> = (0..5_000).map(|i| from.as_ptr() as usize + 3 * i).collect();
        let base = to.as_mut_ptr() as usize;
        let remote: Vec<usize> = (0..5_000).map(|i| base + 3 * i).collect();
        let lengths = vec![3; 5_000];
        assert_eq!(
            across(OPCODE_WRITE, &local, &remote, &lengths),
            (SM_OK, 15_000)
        );
        assert!(to == from, "every block is where it belongs");
    }

    #[test]
    fn a_block_larger_than_one_call_takes_arrives_whole() {
        let length = BYTES + BYTES / 2 + 13;
        let mut from = vec![7_u8; length];
        for (i, page) in from.chunks_mut(4096).enumerate() {
            page[0] = (i % 251) as u8;
        }
        let mut to = vec![0_u8; length];
        let (local, remote) = (to.as_mut_ptr() as usize, from.as_ptr() as usize);
        assert_eq!(
            across(OPCODE_READ, &[local], &[remote], &[length]),
            (SM_OK, length as u64)
        );
        assert!(to == from, "every byte is where it belongs");
    }

    #[test]
    fn empty_blocks_are_passed_over() {
        let from = [7_u8; 4];
        let mut to = [0_u8; 4];
        let (local, remote) = (from.as_ptr() as usize, to.as_mut_ptr() as usize);
        let result = across(
            OPCODE_WRITE,
            &[1, local, 1, local + 2, 1],
            &[1, remote, 1, remote + 2, 1],
            &[0, 2, 0, 2, 0],
        );
        assert_eq!((result, to), ((SM_OK, 4), from));
        assert_eq!(across(OPCODE_WRITE, &[1], &[1], &[0]), (SM_OK, 0));
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_and_not_a_crash() {
        let mut to = [0_u8; 8];
        let remote = to.as_mut_ptr() as usize;
        assert_eq!(across(OPCODE_WRITE, &[8], &[remote], &[8]), (SM_ERROR, 0));
        assert!(!readable(8));
        assert!(readable(remote as u64));
    }

    #[test]
    fn a_process_that_is_gone_is_not_connected() {
        let mut child = std::process::Command::new("true")
            .spawn()
            .expect("true runs");
        child.wait().expect("true ends");
        let from = [7_u8; 4];
        let address = from.as_ptr() as usize;
        let ranges = Ranges {
            opcode: OPCODE_WRITE,
            local: &[address],
            remote: &[address],
            lengths: &[4],
        };
        let mut copier = Copier::new();
        assert_eq!(
            copier.between(child.id(), &ranges, || true),
            (SM_NOT_CONNECTED, 0)
        );
        assert_eq!(
            copier.between(child.id(), &ranges, || false),
            (SM_NOT_CONNECTED, 0)
        );
    }
}
