// SPDX-License-Identifier: Apache-2.0
//! The batches of one handle: queued, held, and waiting for their query.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use crate::arguments::{Blocks, Source};
use crate::peer::Peer;
use crate::record::{self, Counter};
use crate::script::{self, Kind};

/// What the script wants of one accepted batch.
pub(crate) struct Plan {
    delay: Option<Duration>,
    hang: bool,
    pending: u64,
    pub(crate) result: Option<i32>,
    pub(crate) partial: Option<u64>,
    pub(crate) no_result: bool,
    pub(crate) lose_peer: bool,
}

impl Plan {
    /// Takes one occasion of each rule about accepted batches.
    pub(crate) fn next() -> Self {
        Self {
            delay: script::time(Kind::Delay),
            hang: script::flag(Kind::Hang),
            pending: script::count(Kind::Pending).unwrap_or(0),
            result: script::code(Kind::Result),
            partial: script::count(Kind::Partial),
            no_result: script::flag(Kind::NoResult),
            lose_peer: script::flag(Kind::LosePeer),
        }
    }
}

/// What one submission asks for.
pub(crate) struct Request {
    pub(crate) url: String,
    pub(crate) opcode: u32,
    /// The arguments as they were at submission.
    pub(crate) blocks: Blocks,
    /// Known at submission unless the arguments are read late.
    pub(crate) peer: Option<Arc<Peer>>,
    /// Where to read the arguments late.
    pub(crate) late: Option<Source>,
}

/// One accepted batch.
pub(crate) struct Batch {
    pub(crate) id: u64,
    pub(crate) request: Request,
    pub(crate) plan: Plan,
    outcome: AtomicI64,
}

const UNFINISHED: i64 = i64::MIN;

impl Batch {
    /// Ends the batch. Every access to its memory has stopped by now.
    pub(crate) fn finish(&self, result: i32) {
        let outcome = i64::from(result);
        let order = Ordering::Release;
        if self
            .outcome
            .compare_exchange(UNFINISHED, outcome, order, Ordering::Relaxed)
            .is_ok()
        {
            record::subtract(Counter::unfinished, 1);
        }
    }

    fn result(&self) -> Option<i32> {
        match self.outcome.load(Ordering::Acquire) {
            UNFINISHED => None,
            outcome => Some(outcome as i32),
        }
    }
}

struct Outstanding {
    batch: Arc<Batch>,
    pending_answers: u64,
}

/// What a query finds.
pub(crate) enum Answer {
    Pending,
    Done(Arc<Batch>, i32),
    /// The result was given before.
    Given,
    /// There never was such a batch.
    Unknown,
}

/// The next thing for the worker to do.
pub(crate) enum Work {
    Execute(Arc<Batch>),
    WaitUntil(Instant),
    Wait,
    Stop,
}

#[derive(Default)]
pub(crate) struct Lane {
    next_id: u64,
    outstanding: HashMap<u64, Outstanding>,
    ready: VecDeque<Arc<Batch>>,
    delayed: Vec<(Instant, Arc<Batch>)>,
    held: Vec<Arc<Batch>>,
    stopped: bool,
}

impl Lane {
    /// Accepts a batch; `None` when the handle is being destroyed.
    pub(crate) fn accept(&mut self, request: Request, plan: Plan) -> Option<Arc<Batch>> {
        if self.stopped {
            return None;
        }
        let id = self.next_id;
        self.next_id += 1;
        let batch = Arc::new(Batch {
            id,
            request,
            plan,
            outcome: AtomicI64::new(UNFINISHED),
        });
        let pending_answers = batch.plan.pending;
        self.outstanding.insert(
            id,
            Outstanding {
                batch: Arc::clone(&batch),
                pending_answers,
            },
        );
        record::add(Counter::batches, 1);
        record::add(Counter::outstanding, 1);
        record::add(Counter::unfinished, 1);
        let queued = Arc::clone(&batch);
        if batch.plan.hang {
            self.held.push(queued);
            record::add(Counter::held, 1);
        } else if let Some(delay) = batch.plan.delay {
            self.delayed.push((Instant::now() + delay, queued));
        } else {
            self.ready.push_back(queued);
        }
        Some(batch)
    }

    /// What the worker does next.
    pub(crate) fn next(&mut self) -> Work {
        if self.stopped {
            return Work::Stop;
        }
        let mut next_due = None;
        if !self.delayed.is_empty() {
            let now = Instant::now();
            let mut due: Vec<_> = self.delayed.extract_if(.., |(at, _)| *at <= now).collect();
            due.sort_by_key(|(at, batch)| (*at, batch.id));
            self.ready.extend(due.into_iter().map(|(_, batch)| batch));
            next_due = self.delayed.iter().map(|(at, _)| *at).min();
        }
        match (self.ready.pop_front(), next_due) {
            (Some(batch), _) => Work::Execute(batch),
            (None, Some(at)) => Work::WaitUntil(at),
            (None, None) => Work::Wait,
        }
    }

    /// Answers a query, and forgets a batch whose result it gives.
    pub(crate) fn query(&mut self, id: u64) -> Answer {
        let Some(entry) = self.outstanding.get_mut(&id) else {
            return if id < self.next_id {
                Answer::Given
            } else {
                Answer::Unknown
            };
        };
        if entry.pending_answers > 0 {
            entry.pending_answers -= 1;
            return Answer::Pending;
        }
        let Some(result) = entry.batch.result() else {
            return Answer::Pending;
        };
        match self.outstanding.remove(&id) {
            Some(entry) => {
                record::subtract(Counter::outstanding, 1);
                Answer::Done(entry.batch, result)
            }
            None => Answer::Given,
        }
    }

    /// Ends every queued batch for a peer that is gone.
    pub(crate) fn fail(&mut self, peer: &Arc<Peer>, code: i32) {
        let is_for = |batch: &Batch| {
            batch
                .request
                .peer
                .as_ref()
                .is_some_and(|other| Arc::ptr_eq(other, peer))
        };
        self.ready.retain(|batch| {
            let fails = is_for(batch);
            if fails {
                batch.finish(code);
            }
            !fails
        });
        for (_, batch) in self.delayed.extract_if(.., |(_, batch)| is_for(batch)) {
            batch.finish(code);
        }
    }

    /// Lets go of the held batches.
    pub(crate) fn release(&mut self) {
        record::subtract(Counter::held, self.held.len() as u64);
        self.ready.extend(self.held.drain(..));
    }

    /// An outstanding batch that uses part of this range locally.
    pub(crate) fn user_of(&self, address: u64, length: u64) -> Option<u64> {
        let uses = |entry: &&Outstanding| entry.batch.request.blocks.use_locally(address, length);
        self.outstanding
            .values()
            .filter(uses)
            .map(|entry| entry.batch.id)
            .min()
    }

    /// Ends the lane; returns how many batches were outstanding.
    pub(crate) fn stop(&mut self) -> usize {
        self.stopped = true;
        let count = self.outstanding.len();
        record::subtract(Counter::outstanding, count as u64);
        record::subtract(Counter::held, self.held.len() as u64);
        let delayed = self.delayed.drain(..).map(|(_, batch)| batch);
        for batch in self
            .ready
            .drain(..)
            .chain(delayed)
            .chain(self.held.drain(..))
        {
            batch.finish(crate::abi::SM_ERROR);
        }
        self.outstanding.clear();
        count
    }
}
