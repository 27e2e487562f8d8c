//! The seam to the vendor: what the transport asks, and how the library is
//! asked.
// Calls the vendor's functions, which take raw pointers.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::fmt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use tracing::info;

use crate::abi;
use crate::config::Config;
use crate::device;
use crate::endpoint::Endpoint;
use crate::error::{Code, Error};
use crate::library::Library;
use crate::memory::Region;
use crate::process::{Process, watch_exit};
use crate::published::{Pieces, PublishedBackend};
use crate::suspects::Suspects;
use crate::vendor::{self, PeerWatch, check, set_log_level};

/// What the backend calls a batch. 0 is as good an id as any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BatchId(pub u64);

/// Direction of a transfer, seen from this process.
///
/// An open enumeration, for the number comes from outside; a submission checks
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

impl Opcode {
    /// Remote to local.
    pub const READ: Self = Self(0);
    /// Local to remote.
    pub const WRITE: Self = Self(1);
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::READ => f.write_str("READ"),
            Self::WRITE => f.write_str("WRITE"),
            Self(number) => write!(f, "opcode {number}"),
        }
    }
}

// The engine, this crate and the library number the two alike, so the number
// is handed on as it is.
const _: () = {
    assert!(Opcode::READ.0 as u32 == abi::SMEM_TRANS_READ);
    assert!(Opcode::WRITE.0 as u32 == abi::SMEM_TRANS_WRITE);
};

/// The answer to one question about a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// Still running; ask again (C1).
    Pending,
    /// Ended, and **all memory accesses of the batch have stopped**, whatever
    /// the result (C2, C3). Given once per batch (C4).
    Done(Code),
    /// The question failed; nothing is known of the batch (C5).
    Error(Code),
}

/// One vendor batch: pieces for one peer in one direction.
///
/// The library may read the arrays, the peer's name and the parameter block
/// until the batch is done, for the ABI does not say that it copies them. So
/// once submitted, a batch is neither moved, changed nor freed before its result
/// is in. Entry `i` of the three arrays is one piece.
#[derive(Debug)]
pub struct CopyBatch {
    peer: Endpoint,
    opcode: Opcode,
    local: Vec<usize>,
    remote: Vec<usize>,
    lengths: Vec<usize>,
    params: Params,
}

/// The vendor's own view of a [`CopyBatch`], filled in by [`SmemBackend`].
#[derive(Debug)]
struct Params(abi::smem_trans_batch_params_t);

// SAFETY: the pointers point into the `CopyBatch` around them, or nowhere; only
// the library follows them, and our own code reads and writes the block through
// a unique reference alone.
unsafe impl Send for Params {}
// SAFETY: as for Send.
unsafe impl Sync for Params {}

impl Params {
    const EMPTY: Self = Self(abi::smem_trans_batch_params_t {
        destUrl: std::ptr::null(),
        srcList: std::ptr::null_mut(),
        destList: std::ptr::null_mut(),
        sizeList: std::ptr::null_mut(),
        batchSize: 0,
        opcode: 0,
        stream: std::ptr::null_mut(),
        flags: 0,
    });
}

impl Default for CopyBatch {
    fn default() -> Self {
        Self {
            peer: Endpoint::EMPTY,
            opcode: Opcode::READ,
            local: Vec::new(),
            remote: Vec::new(),
            lengths: Vec::new(),
            params: Params::EMPTY,
        }
    }
}

impl CopyBatch {
    /// Begins anew for another peer and direction, keeping the room of the
    /// arrays.
    pub fn reset(&mut self, peer: Endpoint, opcode: Opcode) {
        self.peer = peer;
        self.opcode = opcode;
        self.local.clear();
        self.remote.clear();
        self.lengths.clear();
    }

    /// Takes what `other` has and leaves it the room of its own arrays.
    pub(crate) fn take(&mut self, other: &mut Self) {
        self.peer = other.peer;
        self.opcode = other.opcode;
        std::mem::swap(&mut self.local, &mut other.local);
        std::mem::swap(&mut self.remote, &mut other.remote);
        std::mem::swap(&mut self.lengths, &mut other.lengths);
    }

    /// Adds a piece: local address, remote address, bytes.
    #[inline]
    pub fn push(&mut self, local: usize, remote: usize, length: usize) {
        self.local.push(local);
        self.remote.push(remote);
        self.lengths.push(length);
    }

    /// Adds many pieces, array by array.
    pub(crate) fn extend(&mut self, pieces: impl Iterator<Item = (usize, usize, usize)> + Clone) {
        self.local.extend(pieces.clone().map(|(local, _, _)| local));
        self.remote
            .extend(pieces.clone().map(|(_, remote, _)| remote));
        self.lengths.extend(pieces.map(|(_, _, length)| length));
    }

    /// The peer.
    pub fn peer(&self) -> &Endpoint {
        &self.peer
    }

    /// The direction.
    pub fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// Local addresses, for both directions.
    pub fn local(&self) -> &[usize] {
        &self.local
    }

    /// Remote addresses, for both directions.
    pub fn remote(&self) -> &[usize] {
        &self.remote
    }

    /// Bytes of each piece.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there is no piece.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The arguments of a call that blocks. The batch must stay in place and
    /// unchanged until that call has ended.
    ///
    /// # Errors
    ///
    /// SM_INVALID_PARAM for more pieces than the ABI can count: refused as the
    /// library would.
    pub(crate) fn pieces(&mut self) -> Result<Pieces, Code> {
        let count = self.count()?;
        Ok(Pieces {
            peer: self.peer,
            opcode: self.opcode,
            local: self.local.as_mut_ptr(),
            remote: self.remote.as_mut_ptr(),
            lengths: self.lengths.as_mut_ptr(),
            count,
        })
    }

    fn count(&self) -> Result<u32, Code> {
        u32::try_from(self.len()).map_err(|_| Code(-2000))
    }

    /// Pieces that fit without growing the arrays.
    pub(crate) fn room(&self) -> usize {
        self.lengths.capacity()
    }

    /// Bytes of all pieces; no more than there are numbers for.
    pub fn bytes(&self) -> u64 {
        let lengths = self.lengths.iter();
        lengths.fold(0, |sum: u64, length| sum.saturating_add(*length as u64))
    }
}

/// Why the vendor did not take a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The vendor's code; success makes no success of it.
    pub code: Code,
    /// What else there is to say, empty if nothing.
    pub reason: String,
    /// Whether the code may also mean that the batch was taken in part: its
    /// arrays must stay then, for the library may still read them.
    pub doubtful: bool,
}

impl From<Code> for Refused {
    fn from(code: Code) -> Self {
        Self {
            code,
            reason: String::new(),
            doubtful: false,
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason.as_str() {
            "" => self.code.fmt(f),
            reason => write!(f, "{}: {reason}", self.code),
        }
    }
}

/// What moves the bytes: the library, or a scripted stand-in in a test.
///
/// Calls come from any thread. The transport makes `submit`, `query` and `fence`
/// one at a time (C15). `register` and `deregister` may run beside them and, for
/// ranges that share no byte, beside each other; no batch that the transport
/// knows of uses a range when it is deregistered. No method may call back into
/// the transport, but for marking a peer as down.
///
/// Dropping a backend ends it; the transport drops it only when nothing is
/// outstanding, and otherwise leaks it (C13).
pub trait Backend: Send + Sync {
    /// What peers connect to.
    fn endpoint(&self) -> &Endpoint;

    /// Registers every region or reports a failure, after which the transport
    /// deregisters each of them. Nothing is rounded.
    ///
    /// # Errors
    ///
    /// The vendor's code with its function.
    ///
    /// # Safety
    ///
    /// Each region is memory of this process that stays mapped until it was
    /// deregistered. Peers may read and write it from now on, at any time.
    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error>;

    /// Withdraws the region that begins at `address`.
    ///
    /// # Errors
    ///
    /// The vendor's code with its function.
    fn deregister(&self, address: usize) -> Result<(), Error>;

    /// Gives a batch to the vendor and returns at once.
    ///
    /// # Errors
    ///
    /// Nothing of the batch was or will be executed (C6), unless the refusal is
    /// doubtful.
    ///
    /// # Safety
    ///
    /// - until a query answered [`Query::Done`], or the backend was dropped,
    ///   `batch` is neither moved, changed nor freed; after a doubtful refusal,
    ///   never
    /// - for as long, the memory at its local addresses can be read (WRITE) or
    ///   written (READ), and nobody else writes it (WRITE) or uses it (READ);
    ///   where the peer is this process, the same holds for its remote addresses
    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused>;

    /// Asks once about a batch that was accepted and is not done. An answer that
    /// does not prove that the batch's accesses have stopped is an error, not an
    /// ending (C20).
    fn query(&self, id: BatchId) -> Query;

    /// The last resort of a teardown that has waited in vain: ends whatever the
    /// library still does to this process's memory, if it can be ended for
    /// certain, after which queries answer [`Query::Done`]. Answers whether there
    /// is anything to ask about again. Nothing is submitted, registered or
    /// deregistered any more. Interrupts no call (C12).
    fn fence(&self) -> bool {
        false
    }

    /// Told in place of a drop when the transport is torn down with batches
    /// outstanding (C13): what is running goes on, and nothing that only waits
    /// in this process is begun any more.
    fn abandon(&self) {}
}

/// A backend that was brought up, and what a log tells of it.
pub struct Opened {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// The file that the library was taken from.
    pub library: PathBuf,
    /// The Ascend device that it works with; 0 where none is needed.
    pub device: u32,
}

/// Opens the backend for the generation of the library that is configured.
///
/// # Errors
///
/// Those of [`SmemBackend::open`], and for the published library those of
/// [`Error`] that concern it.
pub fn open(config: &Config) -> Result<Opened, Error> {
    open_with(config, Arc::default())
}

pub(crate) fn open_with(config: &Config, suspects: Arc<Suspects>) -> Result<Opened, Error> {
    Ok(match &config.published {
        None => {
            let backend = SmemBackend::open_with(config, suspects)?;
            Opened {
                library: backend.library_path().to_owned(),
                device: backend.device(),
                backend: Arc::new(backend),
            }
        }
        Some(settings) => {
            let backend = PublishedBackend::open(config, settings, suspects)?;
            Opened {
                library: backend.library().library_path().to_owned(),
                device: backend.library().device(),
                backend: Arc::new(backend),
            }
        }
    })
}

/// [`Backend`] over `libmf_smem.so` in the revision with the four-argument
/// query \[spec\].
pub struct SmemBackend {
    // Fields drop in this order: the instance ends before the peer watch that
    // its callback names.
    instance: Instance,
    _watch: PeerWatch,
    library: Arc<Library>,
    device: u32,
    endpoint: Endpoint,
    need_retry: i32,
}

impl SmemBackend {
    /// Opens the library and brings an instance up, in the order: library,
    /// device, init, config_init, create, get_rpc_port, peer-down callback. If a
    /// later step fails the instance ends; the initialisation stays, like the
    /// library itself (C18).
    ///
    /// Must be called on a thread whose current Ascend device is the one to use;
    /// nothing depends on the thread afterwards.
    ///
    /// # Errors
    ///
    /// Those of [`Library::load`] and [`device::current`]; [`Error::Vendor`] for
    /// a call that answered a failure; [`Error::CreateFailed`];
    /// [`Error::NoPort`].
    pub fn open(config: &Config) -> Result<Self, Error> {
        Self::open_with(config, Arc::new(Suspects::default()))
    }

    pub(crate) fn open_with(config: &Config, suspects: Arc<Suspects>) -> Result<Self, Error> {
        let library = Arc::new(Library::load(&config.library)?);
        info!(
            library = %library.path().display(),
            abi_version = library.abi_version().as_deref().unwrap_or("not told"),
            "MemFabric library opened"
        );
        set_log_level(library.smem_set_log_level, config.log_level);
        let device = device::current(config.protocol)?;
        vendor::initialise(library.smem_trans_init as usize, device, || {
            // SAFETY: takes numbers only.
            unsafe { (library.smem_trans_init)(device, 0) }
        })?;
        let url = config.host.at(0);
        let instance = Instance::create(&library, config, device, &url)?;
        let endpoint = config.host.at(instance.rpc_port(&url)?);
        let watch = PeerWatch::new(suspects);
        // SAFETY: the instance is live and of this library.
        unsafe {
            watch.attach(library.smem_trans_set_peer_down_callback, instance.handle);
        }
        watch_exit();
        Ok(Self {
            instance,
            _watch: watch,
            library,
            device,
            endpoint,
            need_retry: config.need_retry,
        })
    }

    /// The Ascend device that it works with; 0 where none is needed.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The file that the library was taken from.
    pub fn library_path(&self) -> &std::path::Path {
        self.library.path()
    }
}

impl fmt::Debug for SmemBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmemBackend")
            .field("library", &self.library.path())
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

/// A `smem_trans_t` that is destroyed when dropped.
struct Instance {
    library: Arc<Library>,
    handle: NonNull<c_void>,
    process: Process,
}

// SAFETY: the handle is a token that only the library follows, and the library
// takes calls on one handle from any thread [pub: 8 threads observed].
unsafe impl Send for Instance {}
// SAFETY: as for Send.
unsafe impl Sync for Instance {}

impl Instance {
    fn create(
        library: &Arc<Library>,
        config: &Config,
        device: u32,
        url: &Endpoint,
    ) -> Result<Self, Error> {
        let mut vendor = abi::smem_trans_config_t::ZERO;
        // SAFETY: writes one config through the pointer and keeps nothing.
        let code = unsafe { (library.smem_trans_config_init)(&raw mut vendor) };
        check("smem_trans_config_init", code, String::new)?;
        vendor.role = abi::SMEM_TRANS_BOTH;
        vendor.deviceId = device;
        vendor.dataOpType = config.protocol.data_op_type();
        vendor.url = url.as_c_bytes().map(|byte| byte as c_char);
        // SAFETY: reads one config, whose url is terminated, during the call.
        let handle = unsafe { (library.smem_trans_create)(&raw const vendor, 0) };
        let handle = NonNull::new(handle).ok_or_else(|| Error::CreateFailed {
            url: url.to_string(),
            protocol: config.protocol,
            device,
        })?;
        Ok(Self {
            library: Arc::clone(library),
            handle,
            process: Process::current(),
        })
    }

    fn rpc_port(&self, url: &Endpoint) -> Result<u16, Error> {
        let mut port = 0;
        // SAFETY: the handle is live; one u16 is written through the pointer.
        let code =
            unsafe { (self.library.smem_trans_get_rpc_port)(self.handle.as_ptr(), &raw mut port) };
        check("smem_trans_get_rpc_port", code, || format!(" (url {url})"))?;
        if port == 0 {
            return Err(Error::NoPort {
                url: url.to_string(),
            });
        }
        Ok(port)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // A child after fork has the handle's memory, and nothing of what it is for;
        // at exit the library may be gone.
        if !self.process.is_alive() {
            return;
        }
        // SAFETY: the handle is live and this is its last use; the transport
        // drops a backend only when no batch is outstanding (C13).
        unsafe { (self.library.smem_trans_destroy)(self.handle.as_ptr(), 0) };
    }
}

impl Backend for SmemBackend {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        // SAFETY: the handle is live and of this library; the caller keeps the
        // memory mapped until `deregister`.
        unsafe {
            vendor::register(
                self.library.smem_trans_register_mem,
                self.library.smem_trans_batch_register_mem,
                self.instance.handle,
                regions,
            )
        }
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        // SAFETY: the handle is live and of this library.
        unsafe {
            vendor::deregister(
                self.library.smem_trans_deregister_mem,
                self.instance.handle,
                address,
            )
        }
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        let pieces = batch.count()?;
        batch.params.0 = abi::smem_trans_batch_params_t {
            destUrl: batch.peer.as_c_bytes().as_ptr().cast(),
            // Addresses of both sides are numbers here and pointers there.
            srcList: batch.local.as_mut_ptr().cast(),
            destList: batch.remote.as_mut_ptr().cast(),
            sizeList: batch.lengths.as_mut_ptr(),
            batchSize: pieces,
            opcode: u32::from(batch.opcode.0),
            stream: std::ptr::null_mut(),
            flags: 0,
        };
        let mut id = 0;
        // SAFETY:
        // - the handle is live
        // - arrays and name belong to `batch`, which the caller keeps in place
        //   and unchanged until a query answers Done, after a doubtful refusal
        //   for good
        // - the caller keeps the memory at the local addresses usable for as
        //   long; remote addresses are checked by the library
        let code = Code(unsafe {
            (self.library.smem_trans_batch_copy)(
                self.instance.handle.as_ptr(),
                &raw mut batch.params.0,
                &raw mut id,
            )
        });
        if code.is_ok() {
            return Ok(BatchId(id));
        }
        Err(Refused {
            doubtful: abi::MAY_BE_PARTLY_ACCEPTED.contains(&code.0),
            ..Refused::from(code)
        })
    }

    fn query(&self, id: BatchId) -> Query {
        // A library that leaves the slot unwritten is never read as success.
        let mut result = Code::UNWRITTEN.0;
        // SAFETY: the handle is live; one int32 is written through the pointer
        // during the call.
        let code = unsafe {
            (self.library.smem_trans_batch_status_query)(
                self.instance.handle.as_ptr(),
                id.0,
                &raw mut result,
                0,
            )
        };
        answer(code, result, self.need_retry)
    }
}

/// What a query's code and result mean; `need_retry` is configurable, for no
/// published header has its number.
fn answer(code: i32, result: i32, need_retry: i32) -> Query {
    match code {
        abi::SM_OK => Query::Done(Code(result)),
        code if code == need_retry => Query::Pending,
        code => Query::Error(Code(code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c20_an_answer_is_read_by_code_alone_and_a_result_only_after_success() {
        assert_eq!(answer(1, 0, 1), Query::Pending);
        assert_eq!(answer(0, 0, 1), Query::Done(Code::OK));
        assert_eq!(answer(0, -2012, 1), Query::Done(Code(-2012)));
        assert_eq!(answer(-2014, 0, 1), Query::Error(Code(-2014)));
        assert_eq!(answer(2, 0, 1), Query::Error(Code(2)));
        assert_eq!(answer(1, 0, -2013), Query::Error(Code(1)));
        assert_eq!(answer(-2013, 0, -2013), Query::Pending);
    }

    #[test]
    fn an_unwritten_result_is_never_success() {
        let Query::Done(result) = answer(0, Code::UNWRITTEN.0, 1) else {
            panic!("SM_OK is an ending");
        };
        assert!(!result.is_ok());
        assert!(result.to_string().contains("no result written"));
    }
}
