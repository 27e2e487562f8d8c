//! A [`Backend`] over a library whose copies block: a submission is queued, a
//! worker makes the call, and its end is what a query reports.
//!
//! A peer's batches are executed one at a time and in order, so that a call that
//! blocks, 31 s for a peer that was stopped \[pub\], holds up no other peer.
//! Workers are threads that take up whatever peer has something to do; they
//! leave when nothing came for a while, and with the backend.
// Hands argument arrays to a worker by address.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::warn;

use super::abi;
use crate::backend::{Backend, BatchId, CopyBatch, Opcode, Query, Refused};
use crate::endpoint::Endpoint;
use crate::error::{Code, Error};
use crate::memory::Region;

/// Most workers: the library has no more peers, so none waits for another's.
const MOST_WORKERS: usize = abi::SMEM_TRANS_RANK_COUNT_MAX;
/// How long a worker stays with nothing to do, where nobody says otherwise.
const IDLE: Duration = Duration::from_secs(10);
/// First and longest pause before a transfer is tried again.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// A library whose copies block until they have ended.
pub trait Synchronous: Send + Sync + 'static {
    /// What peers connect to.
    fn endpoint(&self) -> &Endpoint;

    /// See [`Backend::register`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error>;

    /// See [`Backend::deregister`].
    ///
    /// # Errors
    ///
    /// As there.
    fn deregister(&self, address: usize) -> Result<(), Error>;

    /// Moves the pieces of one batch. When it returns, all memory accesses of
    /// the batch have stopped, whatever the code says. Comes from several
    /// threads at once, for one peer from one at a time.
    ///
    /// # Safety
    ///
    /// The arrays have `count` entries each and stay in place and unchanged, and
    /// the memory at the local addresses usable, until it returns.
    unsafe fn copy(&self, pieces: Pieces) -> Code;

    /// What to add to the message about a peer that stays unknown.
    fn hint(&self) -> String;
}

/// The arguments of one copy. The arrays have `count` entries each and belong to
/// a [`CopyBatch`] that stays as it is until its result was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// The peer's name.
    pub peer: Endpoint,
    /// Direction.
    pub opcode: Opcode,
    /// Local addresses.
    pub local: *mut usize,
    /// Remote addresses.
    pub remote: *mut usize,
    /// Bytes of each piece.
    pub lengths: *mut usize,
    /// Entries.
    pub count: u32,
}

// SAFETY: the arrays stay in place and unchanged until a query has answered
// Done, which it does only after the worker has given them up.
unsafe impl Send for Pieces {}

/// See the module.
pub struct Queued<L: Synchronous> {
    shared: Arc<Shared<L>>,
}

struct Shared<L> {
    library: L,
    /// How long a copy is tried again while the peer or its region is unknown.
    patience: Duration,
    /// How long a worker stays with nothing to do.
    idle: Duration,
    queues: Mutex<Queues>,
    /// Signalled when a peer is ready, and when it is closed.
    work: Condvar,
    /// Signalled when it is closed.
    closing: Condvar,
}

#[derive(Default)]
struct Queues {
    latest: u64,
    /// Batches without an answered query, with the result of those that ended.
    batches: HashMap<u64, Option<Code>>,
    /// What is to be done for each peer that has something to do.
    waiting: HashMap<Endpoint, VecDeque<(u64, Pieces)>>,
    /// Those of them that no worker is at.
    ready: VecDeque<Endpoint>,
    idle: usize,
    workers: usize,
    threads: Vec<JoinHandle<()>>,
    /// No worker begins anything any more.
    closed: bool,
}

impl<L: Synchronous> Queued<L> {
    /// Starts no thread before the first submission.
    pub fn new(library: L, patience: Duration) -> Self {
        Self::with_idle(library, patience, IDLE)
    }

    /// As [`Self::new`], with workers that stay for `idle` with nothing to do.
    pub fn with_idle(library: L, patience: Duration, idle: Duration) -> Self {
        Self {
            shared: Arc::new(Shared {
                library,
                patience,
                idle,
                queues: Mutex::default(),
                work: Condvar::new(),
                closing: Condvar::new(),
            }),
        }
    }

    /// The library.
    pub fn library(&self) -> &L {
        &self.shared.library
    }

    /// Workers that there are now.
    pub fn workers(&self) -> usize {
        self.shared.queues.lock().workers
    }

    fn close(&self) {
        self.shared.queues.lock().closed = true;
        self.shared.work.notify_all();
        self.shared.closing.notify_all();
    }

    /// Puts a batch in its peer's queue; an error if nobody will ever come for it.
    fn enqueue(&self, pieces: Pieces) -> std::io::Result<BatchId> {
        let mut queues = self.shared.queues.lock();
        let queues = &mut *queues;
        let id = queues.latest + 1;
        match queues.waiting.get_mut(&pieces.peer) {
            // Whoever is at this peer, or will be, takes this one up as well.
            Some(waiting) => waiting.push_back((id, pieces)),
            None => {
                queues.ready.push_back(pieces.peer);
                if let Err(error) = self.call_a_worker(queues)
                    && queues.workers == 0
                {
                    queues.ready.pop_back();
                    return Err(error);
                }
                queues
                    .waiting
                    .insert(pieces.peer, VecDeque::from([(id, pieces)]));
            }
        }
        queues.latest = id;
        queues.batches.insert(id, None);
        Ok(BatchId(id))
    }

    /// Sees to it that somebody takes up the peers that are ready.
    fn call_a_worker(&self, queues: &mut Queues) -> std::io::Result<()> {
        if queues.ready.len() <= queues.idle {
            self.shared.work.notify_one();
            return Ok(());
        }
        if queues.workers == MOST_WORKERS {
            return Ok(());
        }
        for thread in queues.threads.extract_if(.., |thread| thread.is_finished()) {
            // Joined like any other, for what the library does at a thread's end.
            let _ = thread.join();
        }
        let shared = Arc::clone(&self.shared);
        let thread = Builder::new()
            .name("memfabric-copy".to_owned())
            .spawn(move || shared.serve())?;
        queues.workers += 1;
        queues.threads.push(thread);
        Ok(())
    }
}

impl<L: Synchronous> Drop for Queued<L> {
    /// Waits for the calls that are being made: the library must not end under
    /// them.
    fn drop(&mut self) {
        self.close();
        let threads = std::mem::take(&mut self.shared.queues.lock().threads);
        for thread in threads {
            // A worker that panicked is gone as well.
            let _ = thread.join();
        }
    }
}

impl<L: Synchronous> Backend for Queued<L> {
    fn endpoint(&self) -> &Endpoint {
        self.shared.library.endpoint()
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        // SAFETY: the caller's conditions are the same.
        unsafe { self.shared.library.register(regions) }
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        self.shared.library.deregister(address)
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        let pieces = batch.pieces()?;
        self.enqueue(pieces).map_err(|error| Refused {
            reason: format!("no thread for the library's blocking calls: {error}"),
            ..Refused::from(abi::NO_RESOURCES)
        })
    }

    fn query(&self, id: BatchId) -> Query {
        let mut queues = self.shared.queues.lock();
        match queues.batches.get(&id.0) {
            None => Query::Error(abi::NOT_EXIST),
            Some(None) => Query::Pending,
            Some(Some(code)) => {
                let code = *code;
                queues.batches.remove(&id.0);
                Query::Done(code)
            }
        }
    }

    fn abandon(&self) {
        self.close();
    }
}

impl<L: Synchronous> Shared<L> {
    /// A worker's life.
    fn serve(&self) {
        let mut queues = self.queues.lock();
        while !queues.closed {
            let Some(peer) = queues.ready.pop_front() else {
                queues.idle += 1;
                let timed_out = self.work.wait_for(&mut queues, self.idle).timed_out();
                queues.idle -= 1;
                if timed_out && queues.ready.is_empty() {
                    break;
                }
                continue;
            };
            let next = queues.waiting.get_mut(&peer).and_then(VecDeque::pop_front);
            if let Some((id, pieces)) = next {
                let code = MutexGuard::unlocked(&mut queues, || {
                    // A panic of a log sink; the call itself has ended.
                    catch_unwind(AssertUnwindSafe(|| self.copy(pieces))).unwrap_or(abi::ERROR)
                });
                queues.batches.insert(id, Some(code));
            }
            if queues.waiting.get(&peer).is_some_and(VecDeque::is_empty) {
                queues.waiting.remove(&peer);
            } else {
                queues.ready.push_back(peer);
            }
        }
        queues.workers -= 1;
    }

    /// Makes the call, again and again within the patience while the library
    /// does not know the peer or its region yet. Nothing else is tried again.
    fn copy(&self, pieces: Pieces) -> Code {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            // SAFETY: the caller of `submit` keeps arrays and memory until a query
            // answers Done, which it does only after this worker has the result.
            let code = unsafe { self.library.copy(pieces) };
            if code.0 != abi::SMEM_INVALID_PARAM {
                return code;
            }
            let left = self.patience.saturating_sub(begun.elapsed());
            if left.is_zero() || self.closed_within(pause.min(left)) {
                warn!(
                    peer = %pieces.peer,
                    opcode = %pieces.opcode,
                    patience_ms = self.patience.as_millis() as u64,
                    hint = self.library.hint(),
                    "peer or its memory stays unknown to the library"
                );
                return code;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits for so long; whether it was closed meanwhile.
    fn closed_within(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut queues = self.queues.lock();
        while !queues.closed && !self.closing.wait_until(&mut queues, until).timed_out() {}
        queues.closed
    }
}
