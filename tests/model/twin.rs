//! The scripted vendor behind the queue that serves a library whose copies block.
#![allow(unsafe_code)] // implements methods that take memory by number

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Weak};
use std::time::Duration;

use memfabric_transport::published::{Pace, Queued};
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Query, Refused, Region,
};
use parking_lot::Mutex;

use super::script::Answer;
use super::vendor::Instance;
use crate::common::blocking::{Blocking, Copied, answer_about};
use crate::common::{VouchedBackend, until};

/// Gives the batches to the queue and lets each copy end when the script says
/// that its batch has. What the script cannot have, for a copy before it still
/// blocks, is pending.
pub struct Twin {
    // Dropped first: the library ends when its workers have.
    queue: Queued<Blocking>,
    vendor: Instance,
    library: Blocking,
    lanes: Mutex<Lanes>,
}

#[derive(Default)]
struct Lanes {
    /// What was submitted for each peer, and how many of it have ended.
    of: HashMap<String, (Vec<Copied>, usize)>,
    /// Batches without a result by the script's id: the peer, the place in its
    /// lane, the queue's id.
    batches: HashMap<u64, (String, usize, BatchId)>,
}

/// What a sequence keeps of a twin.
pub struct Watch {
    library: Blocking,
    twin: Weak<Twin>,
}

impl Twin {
    pub fn new(vendor: Instance) -> (Arc<Self>, Watch) {
        let library = Blocking::new();
        // What failed is proven to be over before anybody can ask.
        library.all_gone();
        let pace = Pace {
            grace: Duration::MAX,
            confirmation: Duration::ZERO,
            ..Pace::new(Duration::ZERO)
        };
        let twin = Arc::new(Self {
            queue: Queued::with_pace(library.clone(), pace),
            vendor,
            library: library.clone(),
            lanes: Mutex::default(),
        });
        let watch = Watch {
            library,
            twin: Arc::downgrade(&twin),
        };
        (twin, watch)
    }

    /// Lets the copy end that is at the head of its lane, and asks the queue.
    fn end(&self, peer: &str, real: BatchId, code: Code) {
        self.library.answer(peer, code.0);
        let answers = [answer_about(&self.queue, real), self.queue.query(real)];
        self.expect(answers, [Query::Done(code), Query::Error(Code(-2007))]);
    }

    /// Waits for the copy that is next at a peer. That none other runs there is
    /// seen by the library.
    fn head_has_begun(&self, peer: &str, submitted: &[Copied], ended: usize) {
        if let Some(head) = submitted.get(ended) {
            let begun = self.library.begun(peer, ended + 1);
            self.expect(begun.last(), Some(head));
        }
    }

    /// Whatever differs fails the sequence; a panic here could meet another in a
    /// destructor.
    fn expect<T: PartialEq + Debug>(&self, found: T, expected: T) {
        if found != expected {
            let fault = format!("the queue gives {found:?}, should be {expected:?}");
            self.library.report(fault);
        }
    }
}

impl Backend for Twin {
    fn endpoint(&self) -> &Endpoint {
        self.vendor.endpoint()
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        self.vendor.vouched_register(regions)
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        self.vendor.deregister(address)
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        let id = self.vendor.vouched_submit(batch)?;
        let peer = batch.peer().to_string();
        let copied = Copied::of(batch);
        let real = self.queue.vouched_submit(batch)?;
        let mut lanes = self.lanes.lock();
        let (submitted, ended) = lanes.of.entry(peer.clone()).or_default();
        submitted.push(copied);
        let place = submitted.len() - 1;
        if place == *ended {
            self.head_has_begun(&peer, submitted, *ended);
        }
        lanes.batches.insert(id.0, (peer, place, real));
        Ok(id)
    }

    fn query(&self, id: BatchId) -> Query {
        let mut lanes = self.lanes.lock();
        let (peer, place, real) = lanes.batches[&id.0].clone();
        self.expect(self.queue.query(real), Query::Pending);
        let answer = self.vendor.answer(id, lanes.of[&peer].1 == place);
        if let Answer::Done(code) = answer {
            self.end(&peer, real, Code(code));
            lanes.batches.remove(&id.0);
            if let Some((submitted, ended)) = lanes.of.get_mut(&peer) {
                *ended += 1;
                self.head_has_begun(&peer, submitted, *ended);
            }
        }
        answer.query()
    }

    fn abandon(&self) {
        self.queue.abandon();
        self.library.nothing_begins();
    }
}

impl Watch {
    pub fn fault(&self) -> Option<String> {
        self.library.faults().pop()
    }

    /// Lets everything end that was left behind, and waits for the workers.
    pub fn finish(self) -> Option<String> {
        self.library.answer_all(0);
        // A twin that was dropped has waited for its workers itself.
        until("the workers of a twin leave", || {
            let twin = self.twin.upgrade();
            twin.is_none_or(|twin| twin.queue.workers() == 0)
        });
        if self.twin.strong_count() == 0 && self.library.holders() != 1 {
            return Some("a twin is gone, a worker is not".to_owned());
        }
        self.fault()
    }
}
