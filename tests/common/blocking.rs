//! A library whose copies block until the test says what they answer, and that
//! reads its arguments when a copy begins and once more when it ends.
#![allow(dead_code, missing_docs)]
#![allow(unsafe_code)] // reads argument arrays by address, as the library does

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use memfabric_transport::published::{Pieces, Queued, Synchronous};
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

    /// From now on no copy may begin.
    pub fn nothing_begins(&self) {
        self.0.inner.lock().ended = true;
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
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    unsafe fn copy(&self, pieces: Pieces) -> Code {
        let peer = pieces.peer.to_string();
        let asked = Copied::read(pieces);
        let mut inner = self.0.inner.lock();
        if inner.ended {
            inner.faults.push(format!("{peer}: a copy begins too late"));
        }
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
