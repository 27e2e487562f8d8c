// SPDX-License-Identifier: Apache-2.0
//! One instance of the published library, from the store to the handle.
// Calls the vendor's functions, which take raw pointers.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::fmt;
use std::net::UdpSocket;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{info, warn};

use super::library::Library;
use super::liveness::Liveness;
use super::names::Names;
use super::queue::Queued;
use super::synchronous::{Pieces, Synchronous};
use super::{abi, log};
use crate::backend::Opcode;
use crate::code::Code;
use crate::config::Config;
use crate::config::Role;
use crate::config::v1::Settings;
use crate::endpoint::{Endpoint, Host};
use crate::error::Error;
use crate::process::Process;
use crate::region::Region;
use crate::stale::Stale;
use crate::vendor::cann;
use crate::vendor::session::{self, PeerWatch, check, data_op_type, set_log_level};

/// See the module.
pub struct Instance {
    // Fields drop in this order: the handle ends before the peer watch that its
    // callback names, and before the port that says that this process lives.
    handle: Handle,
    _watch: PeerWatch,
    _port: UdpSocket,
    library: Arc<Library>,
    device: u32,
    endpoint: Endpoint,
    role: Role,
    names: Names,
    liveness: Liveness,
}

impl Queued<Instance> {
    /// Opens the library and brings an instance up, in the order: library,
    /// device, store (where this process hosts it), init, config_init, create,
    /// peer-down callback. If a later step fails the handle ends; the store and the
    /// initialisation stay, like the library itself (C18).
    ///
    /// Waits for the store for as long as the library does, two minutes.
    ///
    /// # Errors
    ///
    /// Those of [`Library::load`] and [`cann::current`];
    /// [`Error::NoUniqueId`]; [`Error::Vendor`] for a call that answered a
    /// failure; [`Error::JoinFailed`] where create answered NULL.
    pub(crate) fn open(
        config: &Config,
        settings: &Settings,
        stale: Arc<Stale>,
    ) -> Result<Self, Error> {
        let instance = Instance::open(config, settings, stale)?;
        Ok(Self::new(instance, settings.patience))
    }
}

impl Instance {
    fn open(config: &Config, settings: &Settings, stale: Arc<Stale>) -> Result<Self, Error> {
        let library = Arc::new(Library::load(&config.library)?);
        info!(
            library = %library.path().display(),
            abi_version = library.abi_version().as_deref().unwrap_or("not told"),
            "MemFabric library opened"
        );
        log::take(&library);
        set_log_level(library.smem_set_log_level, config.log_level);
        let device = cann::current(config.protocol)?;
        let (port, endpoint) = unique_id(config.host, settings.port)?;
        let vendor = vendor_config(&library, config, settings, device)?;
        initialise(&library, settings, device, &vendor)?;
        info!(
            store = %settings.store_url.to_string_lossy(),
            role = %settings.role,
            unique_id = %endpoint,
            "joining the configuration store"
        );
        let handle = Handle::create(&library, config, settings, &endpoint, &vendor)?;
        let watch = PeerWatch::new(stale);
        // SAFETY: the handle is live and of this library.
        unsafe {
            watch.attach(library.smem_trans_set_peer_down_callback, handle.handle);
        }
        Ok(Self {
            handle,
            _watch: watch,
            _port: port,
            library,
            device,
            endpoint,
            role: settings.role,
            names: Names::new(),
            liveness: Liveness::default(),
        })
    }

    /// The Ascend device that it works with; 0 where none is needed.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The file that the library was taken from.
    pub fn library_path(&self) -> &Path {
        self.library.path()
    }

    /// Has the library look a name up. It refuses the rest: nobody can have
    /// registered memory at the remote address.
    fn show(&self, peer: Endpoint) {
        let mut byte = 0u8;
        let mut local = (&raw mut byte).expose_provenance();
        let mut remote = 1;
        let mut length = 1;
        self.call(Pieces {
            peer,
            opcode: Opcode::READ,
            local: &raw mut local,
            remote: &raw mut remote,
            lengths: &raw mut length,
            count: 1,
        });
    }

    /// Makes the library's call.
    fn call(&self, pieces: Pieces) -> Code {
        let handle = self.handle.handle.as_ptr();
        let peer = pieces.peer.as_c_bytes().as_ptr().cast();
        let Pieces {
            local,
            remote,
            lengths,
            count,
            ..
        } = pieces;
        // The numbers of both sides are pointers to the library.
        Code(if pieces.opcode == Opcode::WRITE {
            // SAFETY:
            // - the handle is live until `end`, after which no call is made, or
            //   until every worker has left
            // - the arrays have `count` entries and stay, like the memory at the
            //   local addresses, until the copy is proven to be over; the name is
            //   this frame's: a request that is late names its peer no more, it is
            //   at that peer
            // - remote addresses are checked by the library
            unsafe {
                (self.library.smem_trans_batch_write)(
                    handle,
                    local.cast_const().cast(),
                    peer,
                    remote.cast(),
                    lengths,
                    count,
                    0,
                )
            }
        } else {
            // SAFETY: as for the write.
            unsafe {
                (self.library.smem_trans_batch_read)(
                    handle,
                    local.cast(),
                    peer,
                    remote.cast_const().cast(),
                    lengths,
                    count,
                    0,
                )
            }
        })
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instance")
            .field("library", &self.library.path())
            .field("endpoint", &self.endpoint)
            .field("role", &self.role)
            .finish_non_exhaustive()
    }
}

/// A name that no other process of this machine has, and what keeps it so: the
/// library itself does not listen there, and takes a second process of one name
/// for the first.
fn unique_id(host: Host, port: u16) -> Result<(UdpSocket, Endpoint), Error> {
    let ip = host.ip();
    let everywhere = match ip.is_ipv4() {
        true => "0.0.0.0",
        false => "::",
    };
    // The address may be one that others see and this machine has not.
    let socket = UdpSocket::bind((ip, port)).or_else(|_| UdpSocket::bind((everywhere, port)));
    let taken = socket.and_then(|socket| {
        let port = socket.local_addr()?.port();
        Ok((socket, host.at(port)))
    });
    taken.map_err(|error| Error::NoUniqueId {
        host: ip.to_string(),
        reason: error.to_string(),
    })
}

fn vendor_config(
    library: &Library,
    config: &Config,
    settings: &Settings,
    device: u32,
) -> Result<abi::smem_trans_config_t, Error> {
    let mut vendor = abi::smem_trans_config_t::ZERO;
    // SAFETY: writes one config through the pointer and keeps nothing.
    let code = unsafe { (library.smem_trans_config_init)(&raw mut vendor) };
    check("smem_trans_config_init", code, String::new)?;
    vendor.role = match settings.role {
        Role::Sender => abi::SMEM_TRANS_SENDER,
        Role::Receiver => abi::SMEM_TRANS_RECEIVER,
    };
    vendor.deviceId = device;
    vendor.dataOpType = data_op_type(config.protocol);
    if let Some(nic) = &settings.nic {
        // The settings hold it to this size.
        for (to, from) in vendor.nic.iter_mut().zip(nic.as_bytes_with_nul()) {
            *to = *from as c_char;
        }
    }
    Ok(vendor)
}

/// Hosts the store, if this process is to, and initialises the library. Neither
/// is taken back: another copy of this code in the process may use them (C18).
fn initialise(
    library: &Library,
    settings: &Settings,
    device: u32,
    vendor: &abi::smem_trans_config_t,
) -> Result<(), Error> {
    if settings.store_host {
        let store = &settings.store_url;
        // SAFETY: reads the terminated url during the call; may be called again
        // for a store that this process hosts [pub].
        let code = Code(unsafe { (library.smem_create_config_store)(store.as_ptr(), 0) });
        if !code.is_ok() {
            warn!(
                store = %store.to_string_lossy(),
                %code,
                "smem_create_config_store failed, somebody else must host the store"
            );
        }
    }
    session::initialise(library.smem_trans_init as usize, device, || {
        // SAFETY: reads one config during the call.
        unsafe { (library.smem_trans_init)(&raw const *vendor) }
    })
}

/// A `smem_trans_t` that is destroyed when dropped, unless it was before.
struct Handle {
    library: Arc<Library>,
    handle: NonNull<c_void>,
    destroyed: AtomicBool,
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
        settings: &Settings,
        endpoint: &Endpoint,
        vendor: &abi::smem_trans_config_t,
    ) -> Result<Self, Error> {
        // SAFETY: reads two terminated texts and one config during the call.
        let handle = unsafe {
            (library.smem_trans_create)(
                settings.store_url.as_ptr(),
                endpoint.as_c_bytes().as_ptr().cast(),
                &raw const *vendor,
            )
        };
        let handle = NonNull::new(handle).ok_or_else(|| Error::JoinFailed {
            store: settings.store_url.to_string_lossy().into_owned(),
            unique_id: endpoint.to_string(),
            role: settings.role,
            protocol: config.protocol,
            device: vendor.deviceId,
        })?;
        Ok(Self {
            library: Arc::clone(library),
            handle,
            destroyed: AtomicBool::new(false),
            process: Process::current(),
        })
    }

    /// Destroys it, once.
    ///
    /// # Safety
    ///
    /// No call about the handle is being made or is made afterwards: the library
    /// hangs if one is \[pub\].
    unsafe fn destroy(&self) {
        // A child after fork has the handle's memory, and nothing of what it is for;
        // at exit the library may be gone.
        if self.process.is_alive() && !self.destroyed.swap(true, Ordering::Relaxed) {
            // SAFETY: the handle is live and this is its last use.
            unsafe { (self.library.smem_trans_destroy)(self.handle.as_ptr(), 0) };
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: nobody else has it, so that nobody is in a call.
        unsafe { self.destroy() };
    }
}

impl Synchronous for Instance {
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
                self.handle.handle,
                regions,
            )
        }
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        // SAFETY: the handle is live and of this library.
        unsafe {
            session::deregister(
                self.library.smem_trans_deregister_mem,
                self.handle.handle,
                address,
            )
        }
    }

    unsafe fn copy(&self, pieces: Pieces) -> Code {
        let peer = pieces.peer;
        self.liveness.meet(&peer);
        let show = || log::of_no_interest(|| self.show(peer));
        let call = || log::of_copy(&peer, || self.call(pieces));
        self.names.call(peer, show, call)
    }

    fn is_gone(&self, peer: &Endpoint) -> bool {
        self.liveness.is_gone(peer)
    }

    unsafe fn end(&self) {
        // SAFETY: the caller's conditions are the same.
        unsafe { self.handle.destroy() };
    }

    fn hint(&self) -> String {
        format!(
            "one side of a connection must be the sender and the other the receiver, this process is the {}; the remote range must be registered",
            self.role
        )
    }
}
