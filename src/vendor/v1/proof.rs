// SPDX-License-Identifier: Apache-2.0
//! What proves that a copy that failed is over.
//!
//! The library gives a peer that does not answer up after 31 s and says so, while
//! the request is still in the peer's sockets: when the peer goes on, a READ is
//! written into this process's memory, and a WRITE reads it \[pub\]. Nothing that
//! the library says about such a copy later is worth anything either. These events
//! are, and no others:
//!
//! * a copy to the same peer that began after the failed one returned, and
//!   succeeds: there is one connection for each pair of processes, in order;
//! * the end of the peer's process, as the operating system has it, twice with a
//!   pause between for what is still on its way;
//! * the end of the library's handle, [`Backend::fence`](crate::Backend::fence).
//!
//! Until then the batch is pending, with its memory in use, and after a moment its
//! query is an error (C20). The first two events are not waited for but provoked:
//! the peer's worker, when it has nothing else to do, asks the system and makes a
//! copy of its own, a **probe** that reads one byte.
// Makes copies of its own.
#![allow(unsafe_code)]

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU8;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use tracing::{info, warn};

use super::lanes::{Guard, Job, Proof, Shared, State, Unproven, aside};
use super::synchronous::Synchronous;
use crate::backend::{CopyBatch, Opcode};
use crate::code::Code;
use crate::endpoint::Endpoint;

/// The longest that a worker rests at a peer while another peer has nobody.
const WANTED: Duration = Duration::from_millis(10);

/// Where probes read to. They may be late as well, so it is never freed.
static SCRATCH: AtomicU8 = AtomicU8::new(0);

fn probe(peer: Endpoint, remote: usize) -> CopyBatch {
    let mut probe = CopyBatch::default();
    probe.reset(peer, Opcode::READ);
    probe.push(SCRATCH.as_ptr().expose_provenance(), remote, 1);
    probe
}

impl<L: Synchronous> Shared<L> {
    /// Takes note of a copy that failed, with no proof that it is over.
    pub(super) fn keep_unproven(&self, queues: &mut Guard<'_>, job: &Job, code: Code) {
        let now = Instant::now();
        queues.settle(job.id, State::Unproven(code, now));
        let Some(lane) = queues.lanes.get_mut(&job.peer()) else {
            return;
        };
        let unproven = lane.unproven.get_or_insert_with(|| Unproven {
            batches: Vec::new(),
            code,
            since: now,
            probe: job.remote.map(|remote| probe(job.peer(), remote)),
            pause: self.pace.attempts.0,
            attempts: 0,
            told: false,
            told_forgotten: false,
        });
        unproven.batches.push(job.id);
    }

    /// One attempt to prove that the failed copies to `peer` are over, and a pause
    /// if that did not succeed.
    pub(super) fn prove(&self, queues: &mut Guard<'_>, peer: Endpoint) {
        if self.is_dead(queues, &peer) {
            return self.proven(queues, peer, Proof::Death);
        }
        let Some(unproven) = queues.unproven(&peer) else {
            return;
        };
        unproven.attempts += 1;
        // An ordinary death is proven by the second look at the latest, without a
        // probe or a word.
        if unproven.attempts > 1 {
            self.tell_unproven(queues, &peer);
            if self.probe(queues, peer) {
                return self.proven(queues, peer, Proof::Copy);
            }
        }
        self.rest(queues, &peer);
    }

    /// Whether the system says twice that the process of `peer` has ended.
    fn is_dead(&self, queues: &mut Guard<'_>, peer: &Endpoint) -> bool {
        let is_gone = |queues: &mut Guard<'_>| {
            MutexGuard::unlocked(queues, || {
                let ask = || self.library.is_gone(peer);
                catch_unwind(AssertUnwindSafe(ask)).unwrap_or(false)
            })
        };
        is_gone(queues) && !self.closed_within(queues, self.pace.confirmation) && is_gone(queues)
    }

    /// Reads a byte of the peer's memory; whether that succeeded. Copies that wait
    /// come first, and prove as much.
    fn probe(&self, queues: &mut Guard<'_>, peer: Endpoint) -> bool {
        if queues.no_probes || queues.is_wanted(&peer) {
            return false;
        }
        let unproven = queues.unproven(&peer);
        let probe = unproven.and_then(|unproven| unproven.probe.as_mut());
        let Some(Ok(pieces)) = probe.map(CopyBatch::pieces) else {
            return false;
        };
        // SAFETY: the arrays are those of the peer's `Unproven`, which is dropped
        // after a proof or with the library, and which nobody changes; the byte that
        // is written is never freed and is read by nobody.
        let code = unsafe { self.call(queues, pieces) };
        if code == Some(Code::INVALID_PARAM) {
            self.tell_forgotten(queues, &peer);
        }
        code == Some(Code::OK)
    }

    /// A pause, which ends early when the peer's worker is wanted.
    fn rest(&self, queues: &mut Guard<'_>, peer: &Endpoint) {
        let Some(unproven) = queues.unproven(peer) else {
            return;
        };
        let longest = self.pace.attempts.1;
        let next = (unproven.pause * 2).min(longest);
        let pause = mem::replace(&mut unproven.pause, next);
        let begun = Instant::now();
        while !queues.is_wanted(peer) {
            // Another peer that is ready, and nobody to go there.
            let elsewhere = !queues.ready.is_empty() && queues.idle == 0;
            let pause = match elsewhere {
                true => pause.min(WANTED),
                false => pause,
            };
            let until = begun + pause;
            if self.stirred.wait_until(queues, until).timed_out() {
                return;
            }
        }
    }

    /// The failed copies to `peer` are over.
    pub(super) fn proven(&self, queues: &mut Guard<'_>, peer: Endpoint, proof: Proof) {
        let lane = queues.lanes.get_mut(&peer);
        let Some(unproven) = lane.and_then(|lane| lane.unproven.take()) else {
            return;
        };
        for id in &unproven.batches {
            if let Some(State::Unproven(code, _)) = queues.batches.get(id) {
                let code = *code;
                queues.settle(*id, State::Ended(code));
            }
        }
        if !unproven.told {
            return;
        }
        aside(queues, || {
            info!(
                %peer,
                batches = unproven.batches.len(),
                elapsed_ms = unproven.since.elapsed().as_millis() as u64,
                proof = proof.text(),
                "failed copies are over, their memory is free"
            );
        });
    }

    fn tell_unproven(&self, queues: &mut Guard<'_>, peer: &Endpoint) {
        let Some(unproven) = queues.unproven(peer).filter(|unproven| !unproven.told) else {
            return;
        };
        unproven.told = true;
        let (code, batches) = (unproven.code, unproven.batches.len());
        aside(queues, || {
            if let Some(passed_over) = self.limiter.admit("unproven", peer.as_str()) {
                warn!(
                    %peer,
                    %code,
                    batches,
                    passed_over,
                    "copies failed and may still be under way, their memory stays in use until the peer answers or ends"
                );
            }
        });
    }

    fn tell_forgotten(&self, queues: &mut Guard<'_>, peer: &Endpoint) {
        let told = queues
            .unproven(peer)
            .filter(|unproven| !unproven.told_forgotten);
        let Some(unproven) = told else {
            return;
        };
        unproven.told_forgotten = true;
        aside(queues, || {
            if let Some(passed_over) = self.limiter.admit("forgotten", peer.as_str()) {
                warn!(
                    %peer,
                    passed_over,
                    "the library has forgotten a peer with copies that may still be under way: only its end or this transport's ends them; a larger MF_CONFIG_STORE_HEARTBEAT_TIMEOUT_S keeps a stopped peer known"
                );
            }
        });
    }
}
