//! What the generations of the vendor's library have in common: codes to errors,
//! the process-wide initialisation, the log level, the peer-down callback.
// Calls the vendor's functions, which take raw pointers.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tracing::warn;

use crate::abi;
use crate::config::LogLevel;
use crate::error::{Code, Error};
use crate::memory::Region;
use crate::suspects::Suspects;

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

/// One use of the library's process-wide initialisation.
///
/// Several engines in a process are normal, and so are two copies of this
/// static in one process that meet one library, for Mooncake's Python modules
/// link it statically. So uses are counted per library, an initialisation that
/// somebody else made (SM_REPEAT_CALL) is success, and only a copy that made it
/// takes it back, with its last use.
pub(crate) struct Initialised {
    library: usize,
}

/// Uses by the address of a function of the library's, which tells two
/// libraries apart.
static INITIALISATIONS: Mutex<Vec<Initialisation>> = Mutex::new(Vec::new());

struct Initialisation {
    library: usize,
    device: u32,
    /// What takes it back; None if somebody else made it.
    uninit: Option<Box<dyn FnOnce() + Send>>,
    uses: usize,
}

impl Initialised {
    /// Calls `init` if this is the first use of `library`; `uninit` is called
    /// with the last.
    pub(crate) fn acquire(
        library: usize,
        device: u32,
        init: impl FnOnce() -> i32,
        uninit: impl FnOnce() + Send + 'static,
    ) -> Result<Self, Error> {
        let mut all = INITIALISATIONS.lock();
        if let Some(known) = all.iter_mut().find(|known| known.library == library) {
            known.uses += 1;
            let first = known.device;
            drop(all);
            if first != device {
                warn!(
                    device,
                    first, "the library was initialised for another device in this process"
                );
            }
        } else {
            // The lock is held across the call so that a second install waits for
            // the first one's outcome. The library's callback never takes it.
            let code = init();
            if code != abi::SM_REPEAT_CALL {
                check("smem_trans_init", code, || format!(" (device {device})"))?;
            }
            all.push(Initialisation {
                library,
                device,
                uninit: (code == abi::SM_OK).then(|| Box::new(uninit) as _),
                uses: 1,
            });
        }
        Ok(Self { library })
    }
}

impl Drop for Initialised {
    fn drop(&mut self) {
        let mut all = INITIALISATIONS.lock();
        let Some(index) = all.iter().position(|known| known.library == self.library) else {
            return;
        };
        all[index].uses -= 1;
        if all[index].uses == 0
            && let Some(uninit) = all.swap_remove(index).uninit
        {
            // Every instance of this copy was destroyed before its `Initialised`
            // was dropped.
            uninit();
        }
    }
}

/// Whom a peer-down callback is for.
///
/// The library is given a number and not a pointer, for it may call from its own
/// thread until long after the instance is gone.
pub(crate) struct PeerWatch {
    number: usize,
}

static WATCHES: LazyLock<Mutex<Watches>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Watches {
    latest: usize,
    by_number: HashMap<usize, Arc<Suspects>>,
}

impl PeerWatch {
    pub(crate) fn new(suspects: Arc<Suspects>) -> Self {
        let mut watches = WATCHES.lock();
        watches.latest += 1;
        let number = watches.latest;
        watches.by_number.insert(number, suspects);
        Self { number }
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
        WATCHES.lock().by_number.remove(&self.number);
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
        if let Some(suspects) = watch {
            suspects.mark(&peer);
            warn!(peer = %peer, "peer is down");
        }
    }));
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
