// SPDX-License-Identifier: Apache-2.0
//! Handles: what a `smem_trans_t` stands for, and the table of them.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock};

use crate::abi::{
    SM_ERROR, SM_INVALID_PARAM, SM_NEW_OBJECT_FAILED, SM_NOT_CONNECTED, SM_OBJECT_NOT_EXISTS,
    SM_RESOURCE_IN_USE,
};
use crate::arguments::{Blocks, Source};
use crate::callback::Callback;
use crate::lane::{Answer, Lane, Plan, Request};
use crate::peer::{Hello, Peer, Refusal, Welcome};
use crate::record::{self, Counter};
use crate::regions::{Region, Regions};
use crate::script::{self, Kind};
use crate::service::Service;
use crate::sys::{self, Waker};
use crate::{device_memory, worker};

/// How long a peer may take to accept, whatever `initTimeout` allows.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);

/// One `smem_trans_t`.
pub(crate) struct Handle {
    pub(crate) instance: u64,
    endpoint: SocketAddr,
    connect_timeout: Duration,
    pub(crate) regions: RwLock<Regions>,
    pub(crate) lane: Mutex<Lane>,
    /// Signalled when the lane has something new for the worker.
    pub(crate) work: Condvar,
    slots: Mutex<HashMap<String, Arc<Mutex<Slot>>>>,
    /// The connections that the service thread watches.
    pub(crate) peers: Mutex<Vec<Arc<Peer>>>,
    callback: Mutex<Option<Callback>>,
    pub(crate) waker: Waker,
    pub(crate) stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What is known of one endpoint.
#[derive(Default)]
struct Slot {
    peer: Option<Arc<Peer>>,
    /// Given up by `lose_peer`.
    lost: bool,
}

impl Handle {
    fn open(address: SocketAddr, init_timeout: Duration) -> Result<Arc<Self>, Refusal> {
        let failed =
            |what: &str, error: std::io::Error| (SM_NEW_OBJECT_FAILED, format!("{what}: {error}"));
        let listener = TcpListener::bind(address)
            .map_err(|error| failed(&format!("cannot listen on {address}"), error))?;
        listener
            .set_nonblocking(true)
            .map_err(|error| failed("listening", error))?;
        let endpoint = listener
            .local_addr()
            .map_err(|error| failed("listening", error))?;
        let instance = RandomState::new().hash_one(endpoint);
        let regions =
            Regions::new(instance).map_err(|error| failed("the table of regions", error))?;
        let waker = Waker::new().map_err(|error| failed("an eventfd", error))?;
        sys::allow_peers();
        let handle = Arc::new(Self {
            instance,
            endpoint,
            connect_timeout: init_timeout.clamp(Duration::from_secs(1), LONGEST_CONNECT),
            regions: RwLock::new(regions),
            lane: Mutex::default(),
            work: Condvar::new(),
            slots: Mutex::default(),
            peers: Mutex::default(),
            callback: Mutex::default(),
            waker,
            stopping: AtomicBool::new(false),
            threads: Mutex::default(),
        });
        let started = handle.start("mf-emu-service", {
            let service = Service::new(Arc::clone(&handle), listener);
            move || service.run()
        });
        let started = started.and_then(|()| {
            let worker = Arc::clone(&handle);
            handle.start("mf-emu-worker", move || worker::run(&worker))
        });
        if let Err(error) = started {
            handle.close();
            return Err(failed("a thread", error));
        }
        Ok(handle)
    }

    fn start(&self, name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body)?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// The handle of this process that has this instance, if it is one.
    pub(crate) fn of_this_process(instance: u64) -> Option<Weak<Self>> {
        let table = TABLE.lock();
        table
            .handles
            .values()
            .find(|it| it.instance == instance)
            .map(Arc::downgrade)
    }

    /// The port that it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.endpoint.port()
    }

    pub(crate) fn welcome(&self) -> Welcome {
        let table_fd = self.regions.read().fd();
        Welcome {
            instance: self.instance,
            pid: std::process::id(),
            table_fd,
        }
    }

    /// Registers ranges in their order; on failure those before stay.
    pub(crate) fn register(&self, ranges: &[(u64, u64)]) -> Result<(), Refusal> {
        for &(address, length) in ranges {
            if let Some(code) = script::code(Kind::Region) {
                return Err((code, format!("the script fails the region {address:#x}")));
            }
            let visible_since = script::time(Kind::VisibleAfter)
                .map_or(0, |after| sys::monotonic_ns() + after.as_nanos() as u64);
            let shift = device_memory::shift(address);
            self.regions.write().add(Region {
                address,
                length,
                visible_since,
                shift,
            })?;
        }
        Ok(())
    }

    /// Withdraws the region that begins at `address`.
    pub(crate) fn deregister(&self, address: u64) -> Result<(), Refusal> {
        let Some(region) = self.regions.read().find(address) else {
            return Err((
                SM_OBJECT_NOT_EXISTS,
                format!("no region begins at {address:#x}"),
            ));
        };
        if let Some(id) = self.lane.lock().user_of(address, region.length) {
            let text = format!(
                "smem_trans_deregister_mem: the outstanding batch {id} uses {address:#x}+{}",
                region.length
            );
            record::violation(text.clone());
            return Err((SM_RESOURCE_IN_USE, text));
        }
        // Waits for a copy of this process that is under way.
        self.regions.write().remove(address);
        Ok(())
    }

    /// Accepts a batch, or says why not.
    pub(crate) fn submit(&self, opcode: u32, source: Source) -> Result<u64, Refusal> {
        let refuses_zero = script::flag(Kind::RefuseZero);
        let late = script::flag(Kind::LateArgs);
        let url = source.url();
        let mut blocks = Blocks::default();
        source.read(&mut blocks);
        if refuses_zero && let Some(index) = blocks.lengths().iter().position(|it| *it == 0) {
            return Err((
                SM_INVALID_PARAM,
                format!("the script refuses block {index}: length 0"),
            ));
        }
        let peer = if late {
            None
        } else {
            let peer = self.peer(&url)?;
            peer.check(&blocks, |_, _| {})?;
            Some(peer)
        };
        let late = late.then_some(source);
        let request = Request {
            url,
            opcode,
            blocks,
            peer,
            late,
        };
        let batch = self
            .lane
            .lock()
            .accept(request, Plan::next())
            .ok_or_else(|| {
                (
                    SM_OBJECT_NOT_EXISTS,
                    "the handle is being destroyed".to_owned(),
                )
            })?;
        if batch.plan.lose_peer {
            self.lose(&batch.request.url);
        }
        // The service thread ends the batches that it finds queued; this one may
        // have come after that.
        if let Some(peer) = &batch.request.peer
            && !peer.alive()
        {
            self.lane.lock().fail(peer, SM_NOT_CONNECTED);
        }
        self.work.notify_one();
        Ok(batch.id)
    }

    pub(crate) fn query(&self, id: u64) -> Answer {
        self.lane.lock().query(id)
    }

    /// The connected peer at `url`, connecting if need be.
    pub(crate) fn peer(&self, url: &str) -> Result<Arc<Peer>, Refusal> {
        let slot = self.slot(url);
        let mut slot = slot.lock();
        if slot.lost {
            return Err((
                SM_NOT_CONNECTED,
                format!("the script has lost the peer {url}"),
            ));
        }
        if let Some(peer) = &slot.peer
            && peer.alive()
        {
            return Ok(Arc::clone(peer));
        }
        let hello = Hello {
            instance: self.instance,
            port: self.endpoint.port(),
        };
        let peer = Arc::new(Peer::connect(url, hello, self.connect_timeout)?);
        slot.peer = Some(Arc::clone(&peer));
        self.peers.lock().push(Arc::clone(&peer));
        record::add(Counter::peers, 1);
        self.waker.wake();
        Ok(peer)
    }

    fn slot(&self, url: &str) -> Arc<Mutex<Slot>> {
        let mut slots = self.slots.lock();
        match slots.get(url) {
            Some(slot) => Arc::clone(slot),
            None => Arc::clone(slots.entry(url.to_owned()).or_default()),
        }
    }

    /// Lets go of a peer that is gone: its descriptors, its mapping.
    pub(crate) fn forget(&self, peer: &Arc<Peer>) {
        let mut slots = self.slots.lock();
        let Some(slot) = slots.get(&peer.url) else {
            return;
        };
        // Whoever holds it is connecting afresh, and replaces the peer.
        let Some(mut known) = slot.try_lock() else {
            return;
        };
        if known
            .peer
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, peer))
        {
            known.peer = None;
        }
        let forgotten = known.peer.is_none() && !known.lost && Arc::strong_count(slot) == 1;
        drop(known);
        if forgotten {
            slots.remove(&peer.url);
        }
    }

    /// Drops the connection; the service thread sees it and does the rest.
    fn lose(&self, url: &str) {
        let slot = self.slot(url);
        let mut slot = slot.lock();
        slot.lost = true;
        if let Some(peer) = &slot.peer {
            peer.end();
        }
    }

    pub(crate) fn set_callback(&self, callback: Option<Callback>) {
        *self.callback.lock() = callback;
    }

    /// Runs the peer-down callback; whether there is one.
    pub(crate) fn call_peer_down(&self, peer: &str) -> bool {
        let callback = *self.callback.lock();
        if let Some(callback) = callback {
            callback.call(peer);
        }
        callback.is_some()
    }

    /// Lets go of what `hang` holds.
    pub(crate) fn release(&self) {
        self.lane.lock().release();
        self.work.notify_one();
    }

    /// Ends the threads and the connections; every access to memory has stopped
    /// when it returns the number of batches that were outstanding.
    fn close(&self) -> usize {
        self.set_callback(None);
        let outstanding = self.lane.lock().stop();
        self.stopping.store(true, Ordering::Release);
        self.work.notify_all();
        self.waker.wake();
        self.regions.write().close();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A callback that destroys its handle runs on one of them.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        self.slots.lock().clear();
        let peers = std::mem::take(&mut *self.peers.lock());
        record::subtract(Counter::peers, peers.len() as u64);
        for peer in peers {
            peer.end();
        }
        outstanding
    }
}

#[derive(Default)]
struct Table {
    handles: HashMap<usize, Arc<Handle>>,
    created: usize,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

/// Tokens are addresses that no process can touch, so a caller that
/// dereferences one stops there.
const FIRST_TOKEN: usize = 0x5eed_0000_0000_0000;
const TOKEN_STEP: usize = 0x10;

/// Creates a handle and returns its token.
pub(crate) fn create(address: SocketAddr, init_timeout: Duration) -> Result<usize, Refusal> {
    let handle = Handle::open(address, init_timeout)?;
    let mut table = TABLE.lock();
    table.created += 1;
    let token = FIRST_TOKEN + table.created * TOKEN_STEP;
    table.handles.insert(token, handle);
    record::add(Counter::handles, 1);
    Ok(token)
}

/// Destroys the handle of a token.
pub(crate) fn destroy(token: usize) -> Result<(), Refusal> {
    let removed = TABLE.lock().handles.remove(&token);
    let Some(handle) = removed else {
        return find(token).map(|_| ());
    };
    record::subtract(Counter::handles, 1);
    match handle.close() {
        0 => Ok(()),
        count => {
            let text = format!("smem_trans_destroy: the results of {count} batches are not known");
            record::violation(text.clone());
            Err((SM_ERROR, text))
        }
    }
}

/// The handle of a token. Anything else is an error, and a violation unless NULL.
pub(crate) fn find(token: usize) -> Result<Arc<Handle>, Refusal> {
    let table = TABLE.lock();
    if let Some(handle) = table.handles.get(&token) {
        return Ok(Arc::clone(handle));
    }
    if token == 0 {
        return Err((SM_INVALID_PARAM, "the handle is NULL".to_owned()));
    }
    let last = FIRST_TOKEN + table.created * TOKEN_STEP;
    let given = token > FIRST_TOKEN && token <= last && token.is_multiple_of(TOKEN_STEP);
    drop(table);
    let text = match given {
        true => format!("the handle {token:#x} was destroyed before"),
        false => format!("the handle {token:#x} was never created"),
    };
    record::violation(text.clone());
    Err((SM_OBJECT_NOT_EXISTS, text))
}

/// Every handle there is.
pub(crate) fn all() -> Vec<Arc<Handle>> {
    TABLE.lock().handles.values().map(Arc::clone).collect()
}
