// SPDX-License-Identifier: Apache-2.0
//! Workers: what they take up, and the calls that they make.
// Makes the library's calls, with argument arrays by address.
#![allow(unsafe_code)]

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{self};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use tracing::warn;

use super::lanes::{Guard, Job, Proof, Shared, State, aside};
use super::synchronous::{Pieces, Synchronous};
use crate::code::Code;
use crate::process;

/// First and longest pause before a transfer is tried again.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

impl<L: Synchronous> Shared<L> {
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
        if let Code::OK | Code::INVALID_PARAM = code {
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
            if code != Code::INVALID_PARAM {
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
            catch_unwind(AssertUnwindSafe(copy)).unwrap_or(Code::ERROR)
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
