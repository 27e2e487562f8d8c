// SPDX-License-Identifier: Apache-2.0
//! System calls that the standard library does not offer.
#![allow(unsafe_code)] // the calls below, and the words of a shared mapping

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

/// `CLOCK_MONOTONIC`, nanoseconds: one clock for every process of the machine.
pub(crate) fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live local that the call fills in.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The kernel's id of the calling thread.
pub(crate) fn thread_id() -> i32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::gettid() }
}

/// Lets any process of this user read and write this one's memory, where the
/// kernel (yama) would otherwise allow only parents to.
pub(crate) fn allow_peers() {
    // Fails with EINVAL where yama is not built in, and then is not needed.
    // SAFETY: PR_SET_PTRACER takes one plain number.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
}

/// A descriptor that wakes a thread out of [`poll`].
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes two plain numbers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        own(fd).map(Self)
    }

    pub(crate) fn wake(&self) {
        let one = 1_u64;
        // SAFETY: reads the eight bytes of a live local; `self` owns the
        // descriptor. A full counter (EAGAIN) has woken the reader already.
        unsafe { libc::write(self.0.as_raw_fd(), ptr::from_ref(&one).cast(), 8) };
    }

    /// Takes back the wake-ups so far.
    pub(crate) fn drain(&self) {
        let mut count = 0_u64;
        // SAFETY: fills the eight bytes of a live local; `self` owns the
        // descriptor, which does not block.
        unsafe { libc::read(self.0.as_raw_fd(), ptr::from_mut(&mut count).cast(), 8) };
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn own(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call that made this descriptor gave it to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of the descriptors is readable or broken, or for so many
/// milliseconds (-1: for ever). An interruption counts as "nothing yet".
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout_ms: i32) {
    // SAFETY: the slice is exclusively ours for the call, with its own length.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    if ready < 0 {
        for fd in fds {
            fd.revents = 0;
        }
    }
}

/// Words of memory that processes share: a memfd, mapped.
pub(crate) struct SharedWords {
    file: File,
    words: NonNull<AtomicU64>,
    length: usize,
}

// SAFETY: the mapping belongs to this value and is only reached through atomics.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// New words, all 0.
    pub(crate) fn create(length: usize) -> io::Result<Self> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a NUL-terminated constant.
        let fd = unsafe { libc::memfd_create(c"mf-emulator-regions".as_ptr(), flags) };
        let file = File::from(own(fd)?);
        file.set_len((length * size_of::<AtomicU64>()) as u64)?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // So that no reader of the mapping can meet a truncated file (SIGBUS).
        // SAFETY: plain numbers; `file` owns the descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Self::map(file, length, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// The words of another process, read-only.
    pub(crate) fn open(pid: u32, fd: u32, length: usize) -> io::Result<Self> {
        let file = File::open(format!("/proc/{pid}/fd/{fd}"))?;
        if file.metadata()?.len() != (length * size_of::<AtomicU64>()) as u64 {
            return Err(io::Error::other("the peer's region table has another size"));
        }
        Self::map(file, length, libc::PROT_READ)
    }

    fn map(file: File, length: usize, protection: i32) -> io::Result<Self> {
        let bytes = length * size_of::<AtomicU64>();
        // SAFETY: a new mapping of a file that is `bytes` long and cannot
        // shrink; nothing else is replaced.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(address.cast()) {
            Some(words) if address != libc::MAP_FAILED => Ok(Self {
                file,
                words,
                length,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The word at `index`; it can be stored to only by the process that
    /// created it.
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.length, "word {index} of {}", self.length);
        // SAFETY: inside the mapping, which lives as long as `self`.
        let word = unsafe { self.words.add(index) };
        // SAFETY: page-aligned plus a multiple of 8, never written but by
        // atomics, mapped as long as `self`.
        unsafe { word.as_ref() }
    }

    pub(crate) fn load(&self, index: usize, order: Ordering) -> u64 {
        self.word(index).load(order)
    }

    pub(crate) fn store(&self, index: usize, value: u64, order: Ordering) {
        self.word(index).store(value, order);
    }

    /// The descriptor, by which a peer finds the words.
    pub(crate) fn fd(&self) -> u32 {
        self.file.as_raw_fd() as u32
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        let bytes = self.length * size_of::<AtomicU64>();
        // SAFETY: the mapping made in `map`, of that length; the borrows that
        // `word` gave out have ended.
        unsafe { libc::munmap(self.words.as_ptr().cast(), bytes) };
    }
}
