//! Workers: what they take up, and the calls that they make.
// Makes the library's calls, with argument arrays by address.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::warn;

use super::abi;
use super::proof::{Proof, Unproven};
use super::queue::{Pace, Pieces, Synchronous};
use crate::endpoint::Endpoint;
use crate::error::Code;
use crate::limit::Limiter;
use crate::process;

/// First and longest pause before a transfer is tried again.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

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

    /// A worker's life.
    pub(super) fn serve(&self) {
        let mut queues = self.queues.lock();
        while !queues.closed {
            let Some(peer) = queues.ready.pop_front() else {
                queues.idle += 1;
                let idle = self.pace.idle;
                let timed_out = self.work.wait_for(&mut queues, idle).timed_out();
                queues.idle -= 1;
                if timed_out && queues.ready.is_empty() {
                    break;
                }
                continue;
            };
            let lane = queues.lanes.get_mut(&peer);
            match lane.and_then(|lane| lane.waiting.pop_front()) {
                Some(job) => self.carry_out(&mut queues, job),
                None => self.prove(&mut queues, peer),
            }
            if let Some(lane) = queues.lanes.get(&peer) {
                if lane.waiting.is_empty() && lane.unproven.is_none() {
                    queues.lanes.remove(&peer);
                } else {
                    queues.ready.push_back(peer);
                }
            }
        }
        self.leave(queues);
    }

    /// A worker's end. It is joined by the next one that leaves, or with the
    /// backend: not by a submission, which holds a lock and may not wait.
    fn leave(&self, mut queues: Guard<'_>) {
        queues.workers -= 1;
        let before = mem::take(&mut queues.left);
        let own = thread::current().id();
        let threads = &mut queues.threads;
        if let Some(index) = threads
            .iter()
            .position(|thread| thread.thread().id() == own)
        {
            let own = threads.swap_remove(index);
            queues.left.push(own);
        }
        drop(queues);
        for thread in before {
            // Joined for what the library does at a thread's end.
            let _ = thread.join();
        }
    }

    fn carry_out(&self, queues: &mut Guard<'_>, job: Job) {
        let Some(code) = self.copy(queues, job.pieces) else {
            // Closed before it began.
            return;
        };
        if let Code::OK | Code(abi::SMEM_INVALID_PARAM) = code {
            queues.settle(job.id, State::Ended(code));
        } else {
            self.keep_unproven(queues, &job, code);
        }
        if code.is_ok() {
            self.proven(queues, job.pieces.peer, Proof::Copy);
        }
    }

    /// Makes the call, again and again within the patience while the library
    /// does not know the peer or its region yet. Nothing else is tried again. None
    /// if it was closed before the first call.
    fn copy(&self, queues: &mut Guard<'_>, pieces: Pieces) -> Option<Code> {
        let mut first_answer = None;
        let mut pause = FIRST_PAUSE;
        let mut unknown = None;
        loop {
            // SAFETY: the caller of `submit` keeps arrays and memory until a query
            // answers Done, which it does only after one of the events that end a
            // copy.
            let Some(code) = (unsafe { self.call(queues, pieces) }) else {
                return unknown;
            };
            if code.0 != abi::SMEM_INVALID_PARAM {
                return Some(code);
            }
            unknown = Some(code);
            // What came before the first answer is no lack of the peer's.
            let first_answer = *first_answer.get_or_insert_with(Instant::now);
            let left = self.pace.patience.saturating_sub(first_answer.elapsed());
            if left.is_zero() || self.closed_within(queues, pause.min(left)) {
                aside(queues, || self.warn_of_unknown(&pieces));
                return unknown;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One call of the library; None if it is closed.
    ///
    /// # Safety
    ///
    /// As for [`Synchronous::copy`].
    pub(super) unsafe fn call(&self, queues: &mut Guard<'_>, pieces: Pieces) -> Option<Code> {
        if queues.closed {
            return None;
        }
        let Some(_call) = process::Call::begin() else {
            self.close(queues);
            return None;
        };
        queues.calls += 1;
        let code = MutexGuard::unlocked(queues, || {
            // SAFETY: the caller's conditions are the same.
            let copy = || unsafe { self.library.copy(pieces) };
            // A panic, such as that of a log sink, says nothing about the copy.
            catch_unwind(AssertUnwindSafe(copy)).unwrap_or(abi::ERROR)
        });
        queues.calls -= 1;
        Some(code)
    }

    fn warn_of_unknown(&self, pieces: &Pieces) {
        let admitted = self.limiter.admit("unknown", pieces.peer.as_str());
        if let Some(passed_over) = admitted {
            warn!(
                peer = %pieces.peer,
                opcode = %pieces.opcode,
                patience_ms = self.pace.patience.as_millis() as u64,
                hint = self.library.hint(),
                passed_over,
                "peer or its memory stays unknown to the library"
            );
        }
    }

    /// Waits for so long; whether it was closed meanwhile.
    pub(super) fn closed_within(&self, queues: &mut Guard<'_>, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        while !queues.closed && !self.stirred.wait_until(queues, until).timed_out() {}
        queues.closed
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
