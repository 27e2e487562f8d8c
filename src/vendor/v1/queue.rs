// SPDX-License-Identifier: Apache-2.0
//! A [`Backend`] over a library whose copies block: a submission is queued, a
//! worker makes the call, and its end is what a query reports.
//!
//! A peer's batches are executed one at a time and in order, so that a call that
//! blocks, 31 s for a peer that was stopped \[pub\], holds up no other peer.
//! Workers are threads that take up whatever peer has something to do; they
//! leave when nothing came for a while, and with the backend.
//!
//! A copy that failed may still be under way (C20): see [`super::proof`].
// Hands argument arrays to a worker by address.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::abi;
use super::lanes::{Job, Lane, Queues, Shared, State};
use super::synchronous::{Pace, Pieces, Synchronous};
use crate::backend::{Backend, BatchId, CopyBatch, Query, Refused};
use crate::code::Code;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::process::{Process, watch_exit};
use crate::region::Region;

/// Most workers: the library has no more peers, so none waits for another's.
const MOST_WORKERS: usize = abi::SMEM_TRANS_RANK_COUNT_MAX;

/// See the module.
pub struct Queued<L: Synchronous> {
    shared: Arc<Shared<L>>,
    process: Process,
}

impl<L: Synchronous> Queued<L> {
    /// Starts no thread before the first submission.
    pub fn new(library: L, patience: Duration) -> Self {
        Self::with_pace(library, Pace::new(patience))
    }

    /// As [`Self::new`], with workers that stay for `idle` with nothing to do.
    pub fn with_idle(library: L, patience: Duration, idle: Duration) -> Self {
        let pace = Pace::new(patience);
        Self::with_pace(library, Pace { idle, ..pace })
    }

    /// As [`Self::new`], at another pace.
    pub fn with_pace(library: L, pace: Pace) -> Self {
        watch_exit();
        Self {
            shared: Arc::new(Shared::new(library, pace)),
            process: Process::current(),
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

    /// Threads that were started and not yet joined.
    pub fn threads(&self) -> usize {
        let queues = self.shared.queues.lock();
        queues.threads.len() + queues.left.len()
    }

    fn close(&self) {
        self.shared.close(&mut self.shared.queues.lock());
    }

    /// Puts a batch in its peer's queue.
    fn enqueue(&self, pieces: Pieces, remote: Option<usize>) -> Result<BatchId, Refused> {
        let mut queues = self.shared.queues.lock();
        let queues = &mut *queues;
        if queues.closed {
            return Err(Refused {
                reason: "the library is being taken down".to_owned(),
                ..Refused::from(Code::NOT_SUBMITTED)
            });
        }
        let id = queues.latest + 1;
        let job = Job { id, pieces, remote };
        match queues.lanes.get_mut(&pieces.peer) {
            // Whoever is at this peer, or will be, takes this one up as well.
            Some(lane) => lane.waiting.push_back(job),
            None => {
                queues.ready.push_back(pieces.peer);
                if let Err(error) = self.call_a_worker(queues)
                    && queues.workers == 0
                {
                    queues.ready.pop_back();
                    // Not logged here, where the caller holds a lock.
                    return Err(Refused {
                        reason: format!("no thread for the library's blocking calls: {error}"),
                        ..Refused::from(Code::NEW_OBJECT_FAILED)
                    });
                }
                let lane = Lane {
                    waiting: VecDeque::from([job]),
                    unproven: None,
                };
                queues.lanes.insert(pieces.peer, lane);
            }
        }
        self.shared.stirred.notify_all();
        queues.latest = id;
        queues.batches.insert(id, State::Waiting);
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
        let shared = Arc::clone(&self.shared);
        let thread = Builder::new()
            .name("memfabric-copy".to_owned())
            .spawn(move || shared.serve())?;
        queues.workers += 1;
        queues.threads.push(thread);
        Ok(())
    }

    /// Makes a call about memory, unless the library has ended.
    fn unless_ended<T>(&self, call: impl FnOnce(&L) -> T) -> Option<T> {
        /// Counts a call until it has ended, in whatever way.
        struct Counted<'a>(&'a Mutex<Queues>);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.lock().calls -= 1;
            }
        }
        let counted = {
            let mut queues = self.shared.queues.lock();
            if queues.ended {
                return None;
            }
            queues.calls += 1;
            Counted(&self.shared.queues)
        };
        let outcome = call(&self.shared.library);
        drop(counted);
        Some(outcome)
    }
}

impl<L: Synchronous> Drop for Queued<L> {
    /// Waits for the calls that are being made: the library must not end under
    /// them.
    fn drop(&mut self) {
        if !self.process.is_alive() {
            // A child after fork has neither the workers nor the library's threads,
            // and any lock may be held by one of them. At exit a worker may be in
            // the library for long. All is left as it is.
            mem::forget(Arc::clone(&self.shared));
            return;
        }
        let threads = {
            let mut queues = self.shared.queues.lock();
            self.shared.close(&mut queues);
            let left = mem::take(&mut queues.left);
            let threads = mem::take(&mut queues.threads);
            left.into_iter().chain(threads)
        };
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
        let outcome = self.unless_ended(|library| unsafe { library.register(regions) });
        outcome.unwrap_or(Err(Error::NotInstalled))
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        let outcome = self.unless_ended(|library| library.deregister(address));
        // Nothing is registered with a library that has ended.
        outcome.unwrap_or(Ok(()))
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        if batch.peer() == self.endpoint() {
            return Err(Refused {
                reason: "the published library does not transfer to its own process".to_owned(),
                ..Refused::from(Code::INVALID_PARAM)
            });
        }
        let remote = batch.remote().first().copied();
        let pieces = batch.pieces()?;
        self.enqueue(pieces, remote)
    }

    fn query(&self, id: BatchId) -> Query {
        let mut queues = self.shared.queues.lock();
        match queues.batches.get(&id.0) {
            None => Query::Error(Code::OBJECT_NOT_EXISTS),
            Some(State::Waiting) => Query::Pending,
            Some(State::Unproven(code, since)) => match since.elapsed() < self.shared.pace.grace {
                true => Query::Pending,
                false => Query::Error(*code),
            },
            Some(State::Ended(code)) => {
                let code = *code;
                queues.batches.remove(&id.0);
                Query::Done(code)
            }
        }
    }

    /// Ends the library if it is in no call: to end it under one makes later ones
    /// hang \[pub\]. While it is in one, only probes are given up, so that a later
    /// attempt does not meet one.
    fn fence(&self) -> bool {
        let mut queues = self.shared.queues.lock();
        queues.no_probes = true;
        if queues.ended || queues.calls > 0 {
            return queues.ended;
        }
        queues.ended = true;
        self.shared.close(&mut queues);
        MutexGuard::unlocked(&mut queues, || {
            // SAFETY: no call was being made, and none begins from then on: workers
            // look for `closed` under the lock, registrations for `ended`.
            unsafe { self.shared.library.end() };
        });
        for state in queues.batches.values_mut() {
            *state = match *state {
                State::Waiting => State::Ended(Code::NOT_SUBMITTED),
                State::Unproven(code, _) | State::Ended(code) => State::Ended(code),
            };
        }
        queues.lanes.clear();
        queues.ready.clear();
        true
    }

    fn abandon(&self) {
        self.close();
    }
}
