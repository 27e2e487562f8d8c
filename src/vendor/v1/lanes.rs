// SPDX-License-Identifier: Apache-2.0
//! What is queued for whom, and what is known of it: the state that submitters and
//! workers share.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::synchronous::{Pace, Pieces, Synchronous};
use crate::backend::CopyBatch;
use crate::code::Code;
use crate::endpoint::Endpoint;
use crate::limit::Limiter;

/// What a [`Queued`](super::Queued) and its workers have in common.
pub(super) struct Shared<L> {
    // Fields drop in this order: the library ends before the arrays of a probe
    // that it may still use.
    pub(super) library: L,
    pub(super) pace: Pace,
    pub(super) queues: Mutex<Queues>,
    /// Signalled when a peer is ready, and when it is closed.
    pub(super) work: Condvar,
    /// Signalled when a pause may have to end: at each submission, and when it is
    /// closed.
    pub(super) stirred: Condvar,
    pub(super) limiter: Limiter,
}

#[derive(Default)]
pub(super) struct Queues {
    pub(super) latest: u64,
    /// Batches without an answered query.
    pub(super) batches: HashMap<u64, State>,
    /// Peers that have something to do.
    pub(super) lanes: HashMap<Endpoint, Lane>,
    /// Those of them that no worker is at.
    pub(super) ready: VecDeque<Endpoint>,
    pub(super) idle: usize,
    pub(super) workers: usize,
    pub(super) threads: Vec<JoinHandle<()>>,
    /// Workers that have left and were not joined.
    pub(super) left: Vec<JoinHandle<()>>,
    /// Calls of the library that are being made.
    pub(super) calls: usize,
    /// No call is begun any more.
    pub(super) closed: bool,
    /// A teardown wants a moment without a call: no probe is begun any more.
    pub(super) no_probes: bool,
    /// The library has ended, or is ending.
    pub(super) ended: bool,
}

/// What is known of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) enum State {
    /// It is queued, or its copy is under way.
    Waiting,
    /// Its copy failed with this code then, and may still be under way.
    Unproven(Code, Instant),
    /// It has ended: nothing of it is under way.
    Ended(Code),
}

/// What is to be done for a peer, by one worker at a time.
#[derive(Default)]
pub(super) struct Lane {
    pub(super) waiting: VecDeque<Job>,
    /// Copies that have failed and may still be under way.
    pub(super) unproven: Option<Unproven>,
}

pub(super) struct Job {
    pub(super) id: u64,
    pub(super) pieces: Pieces,
    /// Its first remote address: the library may have changed the array when that
    /// is asked for.
    pub(super) remote: Option<usize>,
}

impl Job {
    pub(super) fn peer(&self) -> Endpoint {
        self.pieces.peer
    }
}

pub(super) type Guard<'a> = MutexGuard<'a, Queues>;

impl<L: Synchronous> Shared<L> {
    pub(super) fn new(library: L, pace: Pace) -> Self {
        Self {
            library,
            pace,
            queues: Mutex::default(),
            work: Condvar::new(),
            stirred: Condvar::new(),
            limiter: Limiter::default(),
        }
    }

    /// No call is begun any more, and whoever waits looks around.
    pub(super) fn close(&self, queues: &mut Queues) {
        queues.closed = true;
        self.work.notify_all();
        self.stirred.notify_all();
    }
}

/// The failed copies to one peer.
pub(super) struct Unproven {
    /// Their batches.
    pub(super) batches: Vec<u64>,
    /// How the first of them failed, and when.
    pub(super) code: Code,
    pub(super) since: Instant,
    /// Reads the first byte of the oldest; None if that had no pieces. Made once
    /// and kept, for a probe's arrays are in use like those of any other copy.
    pub(super) probe: Option<CopyBatch>,
    /// The pause that comes next.
    pub(super) pause: Duration,
    pub(super) attempts: u64,
    /// Whether it was said that the peer is not proven, and that it is forgotten.
    pub(super) told: bool,
    pub(super) told_forgotten: bool,
}

/// What has shown that failed copies are over.
#[derive(Clone, Copy, Debug)]
pub(super) enum Proof {
    /// A later copy to the same peer.
    Copy,
    /// The end of the peer's process.
    Death,
}

impl Proof {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Copy => "a later copy succeeded",
            Self::Death => "the peer's process has ended",
        }
    }
}

/// Logs outside of the lock. A log sink may panic, and a worker must not end of it.
pub(super) fn aside(queues: &mut Guard<'_>, log: impl FnOnce()) {
    MutexGuard::unlocked(queues, || {
        let _ = catch_unwind(AssertUnwindSafe(log));
    });
}

impl Queues {
    pub(super) fn unproven(&mut self, peer: &Endpoint) -> Option<&mut Unproven> {
        self.lanes.get_mut(peer)?.unproven.as_mut()
    }

    /// Whether the worker at `peer` has something better to do than to prove.
    pub(super) fn is_wanted(&self, peer: &Endpoint) -> bool {
        let lane = self.lanes.get(peer);
        self.closed || lane.is_none_or(|lane| !lane.waiting.is_empty())
    }

    /// Notes what became of a batch, unless it has ended.
    pub(super) fn settle(&mut self, id: u64, state: State) {
        if let Some(known @ (State::Waiting | State::Unproven(..))) = self.batches.get_mut(&id) {
            *known = state;
        }
    }
}
