// SPDX-License-Identifier: Apache-2.0
//! What the generations of the vendor's library have in common: codes to errors,
//! the process-wide initialisation, the log level, the peer-down callback.
// Calls the vendor's functions, which take raw pointers.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::abi;
use crate::code::Code;
use crate::config::{LogLevel, Protocol};
use crate::endpoint::{MAX_BYTES, excerpt};
use crate::error::Error;
use crate::limit::Limiter;
use crate::process::Process;
use crate::region::Region;
use crate::stale::Stale;

/// The library's `smem_bm_data_op_type` \[pub\].
pub fn data_op_type(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::DeviceSdma => abi::SMEMB_DATA_OP_SDMA,
        Protocol::DeviceRdma => abi::SMEMB_DATA_OP_DEVICE_RDMA,
        Protocol::HostRdma => abi::SMEMB_DATA_OP_HOST_RDMA,
        Protocol::DeviceUrma => abi::SMEMB_DATA_OP_DEVICE_URMA,
        Protocol::DeviceUboe => abi::SMEMB_DATA_OP_DEVICE_UBOE,
        Protocol::HostTcp => abi::SMEMB_DATA_OP_HOST_TCP,
    }
}

/// Turns a vendor code into a `Result` that names the call.
pub(crate) fn check(
    call: &'static str,
    code: i32,
    context: impl FnOnce() -> String,
) -> Result<(), Error> {
    let code = Code(code);
    if code.is_ok() {
        return Ok(());
    }
    let context = context();
    Err(Error::Vendor {
        call,
        code,
        context,
    })
}

pub(crate) fn set_log_level(function: abi::smem_set_log_level, level: LogLevel) {
    let level = level.vendor_level();
    // SAFETY: takes a number only, and is allowed at any time [pub].
    let code = Code(unsafe { function(level) });
    if !code.is_ok() {
        warn!(level, %code, "smem_set_log_level failed, the library keeps its own level");
    }
}

/// Libraries that were initialised, by the address of a function of theirs, and
/// for which device.
static INITIALISED: Mutex<Vec<(usize, u32)>> = Mutex::new(Vec::new());

/// Initialises a library for this process, unless that was done. It is never
/// taken back (C18): other engines may use it, and other copies of this code,
/// which Mooncake's Python modules link statically, and whose uses cannot be
/// counted here. So an initialisation that somebody else made (SM_REPEAT_CALL) is
/// success as well.
///
/// # Errors
///
/// The vendor's code; a later attempt calls `init` again.
pub(crate) fn initialise(
    library: usize,
    device: u32,
    init: impl FnOnce() -> i32,
) -> Result<(), Error> {
    // Held across the call so that a second install waits for the first one's
    // outcome. The library's callback never takes it.
    let mut all = INITIALISED.lock();
    let known = all.iter().find(|(known, _)| *known == library);
    let Some(&(_, first)) = known else {
        let code = init();
        if Code(code) != Code::REPEAT_CALL {
            check("smem_trans_init", code, || format!(" (device {device})"))?;
        }
        all.push((library, device));
        return Ok(());
    };
    drop(all);
    if first != device {
        warn!(
            device,
            first, "the library was initialised for another device in this process"
        );
    }
    Ok(())
}

/// Whom a peer-down callback is for.
///
/// The library is given a number and not a pointer, for it may call from its own
/// thread until long after the instance is gone.
pub(crate) struct PeerWatch {
    number: usize,
    process: Process,
}

static WATCHES: LazyLock<Mutex<Watches>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Watches {
    latest: usize,
    by_number: HashMap<usize, Arc<Stale>>,
}

impl PeerWatch {
    pub(crate) fn new(stale: Arc<Stale>) -> Self {
        let mut watches = WATCHES.lock();
        watches.latest += 1;
        let number = watches.latest;
        watches.by_number.insert(number, stale);
        Self {
            number,
            process: Process::current(),
        }
    }

    /// Has `handle` call for this watch.
    ///
    /// # Safety
    ///
    /// The handle must be live and belong to the library that `function` is of.
    pub(crate) unsafe fn attach(
        &self,
        function: abi::smem_trans_set_peer_down_callback,
        handle: NonNull<c_void>,
    ) {
        // SAFETY: the caller vouches for the handle; the callback is a function of
        // this program, and `user` is a number that it never follows.
        let code = Code(unsafe {
            function(
                handle.as_ptr(),
                Some(peer_down),
                std::ptr::without_provenance_mut(self.number),
            )
        });
        if !code.is_ok() {
            warn!(
                %code,
                "smem_trans_set_peer_down_callback failed, a lost peer is noticed by its transfers alone"
            );
        }
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        // In a child after fork the lock may be held by a thread that is not there.
        if self.process.is_alive() {
            WATCHES.lock().by_number.remove(&self.number);
        }
    }
}

/// The library's peer-down callback.
///
/// It runs on a thread of the library's, possibly inside a vendor call that this
/// process is making, so it takes no lock that a vendor call is made under. It
/// records and logs; it ends no task, for only a result says that memory
/// accesses have stopped.
unsafe extern "C" fn peer_down(peer: *const c_char, user: *mut c_void) {
    // A panic must not unwind into the library; there is nobody to tell.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let peer = if peer.is_null() {
            "".into()
        } else {
            // SAFETY: the library passes a NUL-terminated name that lives for
            // the duration of the call [pub].
            unsafe { CStr::from_ptr(peer) }.to_string_lossy()
        };
        let watch = WATCHES.lock().by_number.get(&user.addr()).cloned();
        let Some(stale) = watch else {
            return;
        };
        // A longer name is nobody's endpoint.
        if peer.len() <= MAX_BYTES {
            stale.mark(&peer);
        }
        let peer = excerpt(&peer, MAX_BYTES);
        if let Some(passed_over) = DOWN.admit(&peer) {
            warn!(peer, passed_over, "peer is down");
        }
    }));
}

static DOWN: LazyLock<Down> = LazyLock::new(Down::default);

/// So many lines a second are about peers that are down, whatever their names.
const MOST_DOWN: u32 = 10;

/// Limits the lines about peers that are down: for each peer, and for names that
/// are new each time, for all of them.
#[derive(Default)]
struct Down {
    by_peer: Limiter,
    all: Mutex<Burst>,
}

#[derive(Default)]
struct Burst {
    since: Option<Instant>,
    lines: u32,
    passed_over: u64,
}

impl Down {
    /// Whether to log that `peer` is down, and how many such lines were passed over
    /// since the last.
    fn admit(&self, peer: &str) -> Option<u64> {
        let mut all = self.all.lock();
        let old = |since: Instant| since.elapsed() >= Duration::from_secs(1);
        if all.since.is_none_or(old) {
            all.since = Some(Instant::now());
            all.lines = 0;
        }
        if all.lines < MOST_DOWN && self.by_peer.admit("peer is down", peer).is_some() {
            all.lines += 1;
            return Some(std::mem::take(&mut all.passed_over));
        }
        all.passed_over += 1;
        None
    }
}

/// Registers every region in one call, or reports a failure.
///
/// # Errors
///
/// The vendor's code with its function; [`Error::RegionInvalid`] for more
/// regions than the ABI can count.
///
/// # Safety
///
/// The handle must be live and belong to the library that the functions are of,
/// and the memory must stay mapped until it is deregistered.
pub(crate) unsafe fn register(
    one: abi::smem_trans_register_mem,
    several: abi::smem_trans_batch_register_mem,
    handle: NonNull<c_void>,
    regions: &[Region],
) -> Result<(), Error> {
    let handle = handle.as_ptr();
    if let [region] = regions {
        let address = std::ptr::without_provenance_mut(region.address);
        // SAFETY: the caller vouches for the handle; the library notes the range.
        let code = unsafe { one(handle, address, region.length, 0) };
        return check("smem_trans_register_mem", code, || {
            format!(" ({:#x}, {} bytes)", region.address, region.length)
        });
    }
    let mut addresses: Vec<*mut c_void> = regions
        .iter()
        .map(|region| std::ptr::without_provenance_mut(region.address))
        .collect();
    let mut lengths: Vec<usize> = regions.iter().map(|region| region.length).collect();
    let count = u32::try_from(regions.len()).map_err(|_| Error::RegionInvalid {
        address: regions[0].address,
        length: regions[0].length,
        reason: format!(
            "is one of {} in a call, register fewer at once",
            regions.len()
        ),
    })?;
    // SAFETY: as above; both arrays have `count` entries and live across the
    // call, which is synchronous.
    let code = unsafe {
        several(
            handle,
            addresses.as_mut_ptr(),
            lengths.as_mut_ptr(),
            count,
            0,
        )
    };
    check("smem_trans_batch_register_mem", code, || {
        format!(" ({count} ranges)")
    })
}

/// Withdraws the region that begins at `address`.
///
/// # Errors
///
/// The vendor's code with its function.
///
/// # Safety
///
/// The handle must be live and belong to the library that `function` is of.
pub(crate) unsafe fn deregister(
    function: abi::smem_trans_deregister_mem,
    handle: NonNull<c_void>,
    address: usize,
) -> Result<(), Error> {
    // SAFETY: the caller vouches for the handle; the address is only compared.
    let code = unsafe { function(handle.as_ptr(), std::ptr::without_provenance_mut(address)) };
    check("smem_trans_deregister_mem", code, || {
        format!(" ({address:#x})")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library_says_down(watch: &PeerWatch, name: &CStr) {
        // SAFETY: a terminated name, alive across the call; the number is never
        // followed.
        unsafe {
            peer_down(
                name.as_ptr(),
                std::ptr::without_provenance_mut(watch.number),
            )
        };
    }

    #[test]
    fn b10_peers_that_are_down_are_a_few_lines_whatever_their_number() {
        let down = Down::default();
        let lines = (0..10_000).filter_map(|peer| down.admit(&peer.to_string()));
        assert!(
            lines.count() <= 3 * MOST_DOWN as usize,
            "names of all kinds"
        );
        let down = Down::default();
        let mut logged = 0;
        let mut passed_over = 0;
        for _ in 0..10_000 {
            if let Some(count) = down.admit("10.0.0.1:1") {
                logged += 1;
                passed_over += count;
            }
        }
        assert!(logged <= 3, "one name: {logged} lines");
        passed_over += down.all.lock().passed_over;
        assert_eq!(logged + passed_over, 10_000, "none is lost");
    }

    #[test]
    fn b10_a_name_that_fits_no_endpoint_marks_nobody() {
        let stale = Arc::new(Stale::default());
        let watch = PeerWatch::new(Arc::clone(&stale));
        let long = std::ffi::CString::new(vec![b'x'; 1 << 20]).expect("no NUL");
        library_says_down(&watch, &long);
        assert_eq!(stale.latest(), 0);
        library_says_down(&watch, c"10.0.0.1:1");
        assert!(stale.marked_since("10.0.0.1:1", 0));
    }

    #[test]
    fn case_09_each_protocol_reaches_the_library_as_its_own_bit() {
        for (protocol, bit) in [
            (Protocol::DeviceSdma, 1 << 0),
            (Protocol::HostRdma, 1 << 1),
            (Protocol::HostTcp, 1 << 2),
            (Protocol::DeviceRdma, 1 << 3),
            (Protocol::DeviceUrma, 1 << 6),
            (Protocol::DeviceUboe, 1 << 7),
        ] {
            assert_eq!(data_op_type(protocol), bit, "{protocol}");
        }
    }

    #[test]
    fn c18_a_library_is_initialised_once_and_again_only_after_a_failure() {
        let mut calls = 0;
        let mut init = |code| {
            initialise(usize::MAX, 0, || {
                calls += 1;
                code
            })
        };
        init(-1).expect_err("refused");
        init(Code::REPEAT_CALL.0).expect("somebody else did");
        init(-1).expect("known");
        assert_eq!(calls, 2);
    }
}
