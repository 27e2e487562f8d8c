// SPDX-License-Identifier: Apache-2.0
//! A library whose copies block until the test says what they answer, and that
//! reads its arguments when a copy begins and once more when it ends.
#![allow(dead_code, missing_docs)]
#![allow(unsafe_code)] // reads argument arrays by address, as the library does

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use memfabric_transport::vendor::v1::{Pieces, Queued, Synchronous};
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Query, Region,
};
use parking_lot::{Condvar, Mutex};

use super::{FOREVER, pieces_of};

/// What a copy was asked to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    pub opcode: Opcode,
    /// Local address, remote address, bytes.
    pub pieces: Vec<(usize, usize, usize)>,
}

/// The test's side of it; the one that a queue owns is a clone.
#[derive(Clone)]
pub struct Blocking(Arc<Shared>);

struct Shared {
    endpoint: Endpoint,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    lanes: HashMap<String, Lane>,
    /// What a copy answers that the test has said nothing about.
    otherwise: Option<Code>,
    /// No copy may begin any more.
    ended: bool,
    panic_next: bool,
    /// Peers that the operating system says are gone, and how often it was asked
    /// about each.
    gone: HashSet<String>,
    all_gone: bool,
    /// Peers about which the next answer alone is that they are gone.
    gone_once: HashSet<String>,
    asked: HashMap<String, usize>,
    registrations: usize,
    /// Whether the library was ended.
    end: bool,
    faults: Vec<String>,
}

/// The copies to one peer.
#[derive(Default)]
struct Lane {
    begun: Vec<Copied>,
    running: bool,
    answers: VecDeque<Code>,
}

impl Blocking {
    pub fn new() -> Self {
        Self(Arc::new(Shared {
            endpoint: Endpoint::parse("127.0.0.1:4000").expect("a literal"),
            inner: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    // Knobs.

    /// Ends the copy to `peer` that runs; or the next, at once.
    pub fn answer(&self, peer: &str, code: i32) {
        let mut inner = self.0.inner.lock();
        let lane = inner.lanes.entry(peer.to_owned()).or_default();
        lane.answers.push_back(Code(code));
        self.0.changed.notify_all();
    }

    /// Ends every copy that runs or begins, without another word.
    pub fn answer_all(&self, code: i32) {
        self.0.inner.lock().otherwise = Some(Code(code));
        self.0.changed.notify_all();
    }

    /// Takes that back.
    pub fn answer_no_more(&self) {
        self.0.inner.lock().otherwise = None;
    }

    /// From now on no copy may begin.
    pub fn nothing_begins(&self) {
        self.0.inner.lock().ended = true;
    }

    /// From now on the operating system says whether the process of `peer` exists.
    pub fn gone(&self, peer: &str, gone: bool) {
        let mut inner = self.0.inner.lock();
        match gone {
            true => inner.gone.insert(peer.to_owned()),
            false => inner.gone.remove(peer),
        };
    }

    /// The next answer about `peer` is that it is gone; later ones are that it exists.
    pub fn gone_once(&self, peer: &str) {
        self.0.inner.lock().gone_once.insert(peer.to_owned());
    }

    /// As [`Self::gone`] of every peer, so that each failed copy is over at once.
    pub fn all_gone(&self) {
        self.0.inner.lock().all_gone = true;
    }

    pub fn panic_in_next(&self) {
        self.0.inner.lock().panic_next = true;
    }

    // Observations.

    /// The copies to `peer` in the order in which they began, once there are
    /// `count`.
    pub fn begun(&self, peer: &str, count: usize) -> Vec<Copied> {
        self.wait(&format!("copy {count} to {peer} to begin"), |inner| {
            let begun = &inner.lanes.get(peer)?.begun;
            (begun.len() >= count).then(|| begun.clone())
        })
    }

    /// Waits until the system was asked `count` times whether `peer` exists.
    pub fn asked(&self, peer: &str, count: usize) {
        self.wait(&format!("question {count} about {peer}"), |inner| {
            (inner.asked.get(peer).copied().unwrap_or(0) >= count).then_some(())
        });
    }

    /// How often it was asked until now.
    pub fn questions(&self, peer: &str) -> usize {
        let inner = self.0.inner.lock();
        inner.asked.get(peer).copied().unwrap_or(0)
    }

    /// Whether the library was ended.
    pub fn has_ended(&self) -> bool {
        self.0.inner.lock().end
    }

    /// Calls that register or deregister.
    pub fn registrations(&self) -> usize {
        self.0.inner.lock().registrations
    }

    /// How many copies have begun, to any peer.
    pub fn all_begun(&self) -> usize {
        let inner = self.0.inner.lock();
        inner.lanes.values().map(|lane| lane.begun.len()).sum()
    }

    /// Waits until `count` copies run at once.
    pub fn running(&self, count: usize) {
        self.wait(&format!("{count} copies to run"), |inner| {
            let running = inner.lanes.values().filter(|lane| lane.running).count();
            (running >= count).then_some(())
        });
    }

    /// Whether a copy runs.
    pub fn is_running(&self) -> bool {
        let inner = self.0.inner.lock();
        inner.lanes.values().any(|lane| lane.running)
    }

    /// Those that hold it: the test, and a queue with its workers.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// What it saw that may not be: two copies to one peer at once, arguments
    /// that changed, a copy that began too late.
    pub fn faults(&self) -> Vec<String> {
        self.0.inner.lock().faults.clone()
    }

    /// Adds what the test saw itself.
    pub fn report(&self, fault: String) {
        self.0.inner.lock().faults.push(fault);
    }

    fn registration(&self) {
        let mut inner = self.0.inner.lock();
        inner.registrations += 1;
        inner.no_call_after_the_end("a registration");
    }

    fn wait<T>(&self, what: &str, ready: impl Fn(&Inner) -> Option<T>) -> T {
        let deadline = Instant::now() + FOREVER;
        let mut inner = self.0.inner.lock();
        loop {
            if let Some(value) = ready(&inner) {
                return value;
            }
            let late = self.0.changed.wait_until(&mut inner, deadline).timed_out();
            assert!(!late, "still waiting for {what}");
        }
    }
}

impl Synchronous for Blocking {
    fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    unsafe fn register(&self, _: &[Region]) -> Result<(), Error> {
        self.registration();
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        self.registration();
        Ok(())
    }

    fn is_gone(&self, peer: &Endpoint) -> bool {
        let mut inner = self.0.inner.lock();
        let peer = peer.to_string();
        let once = inner.gone_once.remove(&peer);
        let gone = once || inner.all_gone || inner.gone.contains(&peer);
        *inner.asked.entry(peer).or_default() += 1;
        self.0.changed.notify_all();
        gone
    }

    unsafe fn end(&self) {
        let mut inner = self.0.inner.lock();
        let running = inner.lanes.values().filter(|lane| lane.running).count();
        if running > 0 {
            inner.faults.push(format!("ended under {running} copies"));
        }
        if std::mem::replace(&mut inner.end, true) {
            inner.faults.push("ended twice".to_owned());
        }
    }

    unsafe fn copy(&self, pieces: Pieces) -> Code {
        let peer = pieces.peer.to_string();
        let asked = Copied::read(pieces);
        let mut inner = self.0.inner.lock();
        if inner.ended {
            inner.faults.push(format!("{peer}: a copy begins too late"));
        }
        inner.no_call_after_the_end("a copy");
        assert!(!std::mem::take(&mut inner.panic_next), "scripted panic");
        let lane = inner.lanes.entry(peer.clone()).or_default();
        lane.begun.push(asked.clone());
        if std::mem::replace(&mut lane.running, true) {
            inner.faults.push(format!("{peer}: two copies at once"));
        }
        self.0.changed.notify_all();
        let code = loop {
            let otherwise = inner.otherwise;
            let answers = inner.lanes.get_mut(&peer).map(|lane| &mut lane.answers);
            if let Some(code) = answers.and_then(VecDeque::pop_front).or(otherwise) {
                break code;
            }
            self.0.changed.wait(&mut inner);
        };
        let now = Copied::read(pieces);
        if now != asked {
            let fault = format!("{peer}: the arguments were {asked:x?}, now {now:x?}");
            inner.faults.push(fault);
        }
        if let Some(lane) = inner.lanes.get_mut(&peer) {
            lane.running = false;
        }
        self.0.changed.notify_all();
        code
    }

    fn hint(&self) -> String {
        "scripted".to_owned()
    }
}

impl Inner {
    fn no_call_after_the_end(&mut self, call: &str) {
        if self.end {
            self.faults.push(format!("{call} after the library's end"));
        }
    }
}

/// The answer about `id`, once it has one.
pub fn answer_about(queue: &Queued<Blocking>, id: BatchId) -> Query {
    let deadline = Instant::now() + FOREVER;
    loop {
        match queue.query(id) {
            Query::Pending => assert!(Instant::now() < deadline, "{id:?} never ends"),
            answer => return answer,
        }
        std::thread::yield_now();
    }
}

impl Copied {
    /// What a copy of this batch must be asked.
    pub fn of(batch: &CopyBatch) -> Self {
        Self {
            opcode: batch.opcode(),
            pieces: pieces_of(batch),
        }
    }

    fn read(pieces: Pieces) -> Self {
        let entry = |array: *mut usize, index| {
            // SAFETY: `count` entries that the contract keeps in place until the
            // batch's result was asked for. Where the contract is broken the memory
            // was freed to an allocator that keeps it mapped; volatile, for the
            // compiler must not reason about it.
            unsafe { array.wrapping_add(index).read_volatile() }
        };
        Self {
            opcode: pieces.opcode,
            pieces: (0..pieces.count as usize)
                .map(|index| {
                    (
                        entry(pieces.local, index),
                        entry(pieces.remote, index),
                        entry(pieces.lengths, index),
                    )
                })
                .collect(),
        }
    }
}
