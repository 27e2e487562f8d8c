// SPDX-License-Identifier: Apache-2.0
//! The generation whose batches are asynchronous, with the four-argument query
//! \[spec\].
// Calls the vendor's functions, which take raw pointers.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use tracing::info;

use super::library::Library;
use super::session::{self, PeerWatch, check, data_op_type, set_log_level};
use super::{abi, cann};
use crate::backend::{Backend, BatchId, Block, CopyBatch, Opcode, Query, Refused};
use crate::code::Code;
use crate::config::Config;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::process::{Process, watch_exit};
use crate::region::Region;
use crate::stale::Stale;

// The engine, this crate and the library number the two alike, so the number
// is handed on as it is.
const _: () = {
    assert!(Opcode::READ.0 as u32 == abi::SMEM_TRANS_READ);
    assert!(Opcode::WRITE.0 as u32 == abi::SMEM_TRANS_WRITE);
};

/// The vendor's parameters are in the batch's [`Block`].
const _FITS: () = {
    use std::mem::{align_of, size_of};
    assert!(size_of::<abi::smem_trans_batch_params_t>() <= size_of::<Block>());
    assert!(align_of::<abi::smem_trans_batch_params_t>() <= align_of::<Block>());
};

/// [`Backend`] over `libmf_smem.so` with asynchronous batches.
pub struct Batched {
    // Fields drop in this order: the handle ends before the peer watch that
    // its callback names.
    handle: Handle,
    _watch: PeerWatch,
    library: Arc<Library>,
    device: u32,
    endpoint: Endpoint,
    need_retry: i32,
}

impl Batched {
    /// Opens the library and creates a handle, in the order: library,
    /// device, init, config_init, create, get_rpc_port, peer-down callback. If a
    /// later step fails the handle is destroyed; the initialisation stays, like the
    /// library itself (C18).
    ///
    /// Must be called on a thread whose current Ascend device is the one to use;
    /// nothing depends on the thread afterwards.
    ///
    /// # Errors
    ///
    /// Those of [`Library::load`] and [`cann::current`]; [`Error::Vendor`] for
    /// a call that answered a failure; [`Error::CreateFailed`];
    /// [`Error::NoPort`].
    pub fn open(config: &Config) -> Result<Self, Error> {
        Self::open_with(config, Arc::new(Stale::default()))
    }

    pub(crate) fn open_with(config: &Config, stale: Arc<Stale>) -> Result<Self, Error> {
        let library = Arc::new(match config.linked {
            Some(linked) => Library::linked(linked)?,
            None => Library::load(&config.library)?,
        });
        info!(
            library = %library.path().display(),
            abi_version = library.abi_version().as_deref().unwrap_or("not told"),
            "MemFabric library opened"
        );
        set_log_level(library.smem_set_log_level, config.log_level);
        let device = cann::current(config.protocol)?;
        session::initialise(library.smem_trans_init as usize, device, || {
            // SAFETY: takes numbers only.
            unsafe { (library.smem_trans_init)(device, 0) }
        })?;
        let url = config.host.at(0);
        let handle = Handle::create(&library, config, device, &url)?;
        let endpoint = config.host.at(handle.rpc_port(&url)?);
        let watch = PeerWatch::new(stale);
        // SAFETY: the handle is live and of this library.
        unsafe {
            watch.attach(library.smem_trans_set_peer_down_callback, handle.raw);
        }
        watch_exit();
        Ok(Self {
            handle,
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

impl fmt::Debug for Batched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batched")
            .field("library", &self.library.path())
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

/// A `smem_trans_t` that is destroyed when dropped.
struct Handle {
    library: Arc<Library>,
    raw: NonNull<c_void>,
    process: Process,
}

// SAFETY: the handle is a token that only the library follows, and the library
// takes calls on one handle from any thread [pub: 8 threads observed].
unsafe impl Send for Handle {}
// SAFETY: as for Send.
unsafe impl Sync for Handle {}

impl Handle {
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
        vendor.dataOpType = data_op_type(config.protocol);
        vendor.url = url.as_c_bytes().map(|byte| byte as c_char);
        // SAFETY: reads one config, whose url is terminated, during the call.
        let raw = unsafe { (library.smem_trans_create)(&raw const vendor, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::CreateFailed {
            url: url.to_string(),
            protocol: config.protocol,
            device,
        })?;
        Ok(Self {
            library: Arc::clone(library),
            raw,
            process: Process::current(),
        })
    }

    fn rpc_port(&self, url: &Endpoint) -> Result<u16, Error> {
        let mut port = 0;
        // SAFETY: the handle is live; one u16 is written through the pointer.
        let code =
            unsafe { (self.library.smem_trans_get_rpc_port)(self.raw.as_ptr(), &raw mut port) };
        check("smem_trans_get_rpc_port", code, || format!(" (url {url})"))?;
        if port == 0 {
            return Err(Error::NoPort {
                url: url.to_string(),
            });
        }
        Ok(port)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A child after fork has the handle's memory, and nothing of what it is for;
        // at exit the library may be gone.
        if !self.process.is_alive() {
            return;
        }
        // SAFETY: the handle is live and this is its last use; the transport
        // drops a backend only when no batch is outstanding (C13).
        unsafe { (self.library.smem_trans_destroy)(self.raw.as_ptr(), 0) };
    }
}

impl Backend for Batched {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        // SAFETY: the handle is live and of this library; the caller keeps the
        // memory mapped until `deregister`.
        unsafe {
            session::register(
                self.library.smem_trans_register_mem,
                self.library.smem_trans_batch_register_mem,
                self.handle.raw,
                regions,
            )
        }
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        // SAFETY: the handle is live and of this library.
        unsafe {
            session::deregister(
                self.library.smem_trans_deregister_mem,
                self.handle.raw,
                address,
            )
        }
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        let pieces = batch.pieces()?;
        let peer = batch.peer().as_c_bytes().as_ptr();
        let params: *mut abi::smem_trans_batch_params_t = (&raw mut batch.block.0).cast();
        let filled = abi::smem_trans_batch_params_t {
            destUrl: peer.cast(),
            // Addresses of both sides are numbers here and pointers there.
            srcList: pieces.local.cast(),
            destList: pieces.remote.cast(),
            sizeList: pieces.lengths,
            batchSize: pieces.count,
            opcode: u32::from(pieces.opcode.0),
            stream: std::ptr::null_mut(),
            flags: 0,
        };
        // SAFETY: the block has the size and the alignment, as asserted above.
        unsafe { params.write(filled) };
        let mut id = 0;
        // SAFETY:
        // - the handle is live
        // - arrays and name belong to `batch`, which the caller keeps in place
        //   and unchanged until a query answers Done, after a doubtful refusal
        //   for good
        // - the caller keeps the memory at the local addresses usable for as
        //   long; remote addresses are checked by the library
        let code = Code(unsafe {
            (self.library.smem_trans_batch_copy)(self.handle.raw.as_ptr(), params, &raw mut id)
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
                self.handle.raw.as_ptr(),
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
        0 => Query::Done(Code(result)),
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
