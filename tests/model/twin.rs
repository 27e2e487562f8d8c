// SPDX-License-Identifier: Apache-2.0
//! The scripted vendor behind the queue that serves a library whose copies block.
#![allow(unsafe_code)] // implements methods that take memory by number

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Weak};
use std::time::Duration;

use memfabric_transport::vendor::v1::{Pace, Pieces, Queued, Synchronous};
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Query, Refused, Region,
};
use parking_lot::Mutex;

use super::script::Answer;
use super::vendor::Instance;
use crate::common::blocking::{Blocking, Copied};
use crate::common::{VouchedBackend, until};

/// Gives the batches to the queue and lets each copy end when the script says
/// that its batch has. What the script cannot have, for a copy before it still
/// blocks, is pending.
///
/// A copy that ends with 0 or -2000 is over. With any other code the call has
/// returned and its accesses go on, as those of the published library do, until a
/// later copy to the same peer has answered 0, the peer has died, or the instance
/// was fenced with no call in flight.
pub struct Twin {
    // Dropped first: the library ends when its workers have.
    queue: Queued<Library>,
    vendor: Instance,
    arrays: Arrays,
    library: Blocking,
    lanes: Mutex<Lanes>,
}

#[derive(Default)]
struct Lanes {
    of: HashMap<String, Lane>,
    /// Batches without a result, by the script's id.
    batches: HashMap<u64, Batch>,
}

/// What was submitted for a peer.
#[derive(Default)]
struct Lane {
    submitted: Vec<Copied>,
    /// How many of them have returned.
    returned: usize,
    died: bool,
}

#[derive(Clone)]
struct Batch {
    peer: String,
    /// In its lane.
    place: usize,
    /// The queue's id.
    real: BatchId,
    /// Where its local addresses are.
    array: usize,
    copy: Copy,
}

#[derive(Clone, PartialEq)]
enum Copy {
    /// Not begun, or in the library.
    Blocks,
    /// Has returned and goes on all the same.
    GoesOn,
    /// Has returned, and something has proved since that it is over.
    Proved,
}

/// The arrays of the batches without a result.
type Arrays = Arc<Mutex<HashSet<usize>>>;

/// The blocking library, in which no copy but those of the script's batches blocks:
/// the queue's own ones, its probes, fail and prove nothing.
struct Library(Blocking, Arrays);

impl Synchronous for Library {
    fn endpoint(&self) -> &Endpoint {
        self.0.endpoint()
    }

    unsafe fn register(&self, _: &[Region]) -> Result<(), Error> {
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    unsafe fn copy(&self, pieces: Pieces) -> Code {
        if !self.1.lock().contains(&pieces.local.addr()) {
            return Code(-1);
        }
        // SAFETY: the caller's conditions are the same.
        unsafe { self.0.copy(pieces) }
    }

    fn is_gone(&self, peer: &Endpoint) -> bool {
        self.0.is_gone(peer)
    }

    unsafe fn end(&self) {
        // SAFETY: the caller's conditions are the same.
        unsafe { self.0.end() };
    }

    fn hint(&self) -> String {
        self.0.hint()
    }
}

/// What a sequence keeps of a twin.
pub struct Watch {
    library: Blocking,
    twin: Weak<Twin>,
}

impl Twin {
    pub fn new(vendor: Instance) -> (Arc<Self>, Watch) {
        let library = Blocking::new();
        // The script alone says what proves that a copy is over.
        let never = Duration::from_secs(3600);
        let pace = Pace {
            grace: Duration::ZERO,
            confirmation: Duration::ZERO,
            attempts: (never, never),
            ..Pace::new(Duration::ZERO)
        };
        let arrays = Arrays::default();
        let probed = Library(library.clone(), Arc::clone(&arrays));
        let twin = Arc::new(Self {
            queue: Queued::with_pace(probed, pace),
            arrays,
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

    /// Lets the copy return that is at the head of its lane. What the queue makes
    /// of it.
    fn end(&self, lanes: &mut Lanes, id: BatchId, batch: &Batch, code: i32) -> Answer {
        self.library.answer(&batch.peer, code);
        let mut answer = Query::Pending;
        until("a copy that was answered has ended", || {
            answer = self.queue.query(batch.real);
            answer != Query::Pending
        });
        let lane = lanes.of.get_mut(&batch.peer).expect("it was submitted");
        lane.returned += 1;
        let proved = lane.died;
        self.head_has_begun(&batch.peer, &lane.submitted, lane.returned);
        if code == 0 || code == -2000 {
            self.vendor.stopped(id);
            self.expect(answer, Query::Done(Code(code)));
        } else if let Some(batch) = lanes.batches.get_mut(&id.0) {
            batch.copy = Copy::GoesOn;
        }
        if code == 0 || proved {
            self.prove(lanes, |other| other.peer == batch.peer);
        }
        answer.into()
    }

    /// Something proves that returned copies are over.
    fn prove(&self, lanes: &mut Lanes, concerns: impl Fn(&Batch) -> bool) {
        for (id, batch) in &mut lanes.batches {
            if batch.copy == Copy::GoesOn && concerns(batch) {
                batch.copy = Copy::Proved;
                self.vendor.stopped(BatchId(*id));
            }
        }
    }

    pub fn died(&self, endpoint: &str) {
        let mut lanes = self.lanes.lock();
        self.library.gone(endpoint, true);
        lanes.of.entry(endpoint.to_owned()).or_default().died = true;
        self.prove(&mut lanes, |batch| batch.peer == endpoint);
    }

    /// Waits for the copy that is next at a peer. That none other runs there is
    /// seen by the library.
    fn head_has_begun(&self, peer: &str, submitted: &[Copied], returned: usize) {
        if let Some(head) = submitted.get(returned) {
            let begun = self.library.begun(peer, returned + 1);
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
        let array = batch.local().as_ptr().addr();
        self.arrays.lock().insert(array);
        let real = self.queue.vouched_submit(batch)?;
        let mut lanes = self.lanes.lock();
        let lane = lanes.of.entry(peer.clone()).or_default();
        lane.submitted.push(copied);
        let place = lane.submitted.len() - 1;
        if place == lane.returned {
            self.head_has_begun(&peer, &lane.submitted, lane.returned);
        }
        let batch = Batch {
            peer,
            place,
            real,
            array,
            copy: Copy::Blocks,
        };
        lanes.batches.insert(id.0, batch);
        Ok(id)
    }

    fn query(&self, id: BatchId) -> Query {
        let mut lanes = self.lanes.lock();
        let batch = lanes.batches[&id.0].clone();
        let answer = if batch.copy == Copy::Blocks {
            self.expect(self.queue.query(batch.real), Query::Pending);
            let head = lanes.of[&batch.peer].returned == batch.place;
            match self.vendor.decide(id, head) {
                Answer::Done(code) => self.end(&mut lanes, id, &batch, code),
                answer => answer,
            }
        } else {
            // Takes its time as another question does; the queue alone answers.
            self.vendor.decide(id, false);
            self.queue.query(batch.real).into()
        };
        if let Answer::Done(_) = answer {
            lanes.batches.remove(&id.0);
            self.arrays.lock().remove(&batch.array);
            // A result is given once.
            let again = self.queue.query(batch.real);
            self.expect(again, Query::Error(Code(-2007)));
        }
        self.vendor.give(id, answer);
        answer.query()
    }

    fn fence(&self) -> bool {
        let ended = self.queue.fence();
        if ended {
            let mut lanes = self.lanes.lock();
            let blocks = |lane: &Lane| lane.returned < lane.submitted.len();
            // Nothing is proved while a call is in flight.
            self.expect(lanes.of.values().any(blocks), false);
            self.prove(&mut lanes, |_| true);
        }
        self.vendor.fence_with(ended)
    }

    fn abandon(&self) {
        self.vendor.abandon();
        self.queue.abandon();
        self.library.nothing_begins();
    }
}

impl Watch {
    pub fn twin(&self) -> Option<Arc<Twin>> {
        self.twin.upgrade()
    }

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
