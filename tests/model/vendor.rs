//! A vendor that answers as the step says, and reads its arguments late.
#![allow(unsafe_code)] // reads argument arrays by address, as the library does

use std::collections::HashMap;
use std::sync::Arc;

use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Query, Refused, Region,
};
use parking_lot::Mutex;

use super::script::{Answer, Answers, Verdict};
use super::twin::{Twin, Watch};
use crate::common::{pieces_of, vendor};

/// What the vendor was asked, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Register(Vec<Region>),
    Deregister(usize),
    Submit(Group),
    Query(u64, Answer),
    /// The instance was destroyed.
    Down,
}

/// A submission.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub peer: String,
    pub opcode: u8,
    /// Local address, remote address, bytes.
    pub pieces: Vec<(usize, usize, usize)>,
}

/// An accepted batch whose arguments the vendor may still read.
#[derive(Debug)]
struct Kept {
    life: usize,
    id: u64,
    group: Group,
    peer_at: usize,
    arrays_at: [usize; 3],
}

/// How a backend does what the script says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Kind {
    /// By answering.
    #[default]
    Answers,
    /// Through copies that block until the script has them end.
    Blocks,
}

#[derive(Default)]
struct Inner {
    kind: Kind,
    calls: Vec<Call>,
    kept: Vec<Kept>,
    misread: Option<String>,
    lives: usize,
    twins: Vec<Watch>,
    fresh_id: u64,
    // What the current step says.
    answers: Option<Answers>,
    asked: HashMap<u64, usize>,
    verdicts: Vec<Verdict>,
    register: Option<Code>,
    deregister: Option<Code>,
}

/// The test's side; backends of several lives share it.
#[derive(Clone, Default)]
pub struct Vendor(Arc<Mutex<Inner>>);

impl Vendor {
    pub fn of(kind: Kind) -> Self {
        let vendor = Self::default();
        vendor.0.lock().kind = kind;
        vendor
    }

    /// A backend for one more install.
    pub fn backend(&self) -> Arc<dyn Backend> {
        let mut inner = self.0.lock();
        inner.lives += 1;
        let instance = Instance {
            life: inner.lives,
            endpoint: Endpoint::parse(OWN).expect("a literal"),
            vendor: self.clone(),
        };
        match inner.kind {
            Kind::Answers => Arc::new(instance),
            Kind::Blocks => {
                let (twin, watch) = Twin::new(instance);
                inner.twins.push(watch);
                twin
            }
        }
    }

    /// Ends what still blocks at the end of a sequence; what was wrong with it.
    pub fn finish(&self) -> Option<String> {
        let twins = std::mem::take(&mut self.0.lock().twins);
        twins.into_iter().find_map(Watch::finish)
    }

    /// Answers to the questions of the coming step.
    pub fn answer(&self, answers: &Answers) {
        let mut inner = self.0.lock();
        inner.asked.clear();
        inner.answers = Some(answers.clone());
    }

    /// A queue of blocking copies chooses its ids itself, each a new one.
    pub fn possible(&self, verdicts: &[Verdict]) -> Vec<Verdict> {
        let kind = self.0.lock().kind;
        let possible = |verdict: &Verdict| match (kind, *verdict) {
            (Kind::Blocks, Verdict::AcceptAs(_)) => Verdict::Accept,
            (_, verdict) => verdict,
        };
        verdicts.iter().map(possible).collect()
    }

    /// Verdicts on the submissions of the coming step.
    pub fn decide(&self, verdicts: &[Verdict]) {
        let mut inner = self.0.lock();
        inner.verdicts = verdicts.iter().rev().copied().collect();
    }

    pub fn refuse_register(&self, code: Option<i32>) {
        self.0.lock().register = code.map(Code);
    }

    pub fn refuse_deregister(&self, code: Option<i32>) {
        self.0.lock().deregister = code.map(Code);
    }

    /// The id that the next fresh one will be.
    pub fn fresh_id(&self) -> u64 {
        self.0.lock().fresh_id
    }

    /// The calls since the last time.
    pub fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().calls)
    }

    /// Reads the arguments of every batch that has no result, as a slow library
    /// would: the first that no longer says what was submitted.
    pub fn misread(&self) -> Option<String> {
        let inner = self.0.lock();
        let now = || inner.kept.iter().find_map(Kept::misread);
        inner.misread.clone().or_else(now)
    }

    /// What was wrong with how copies were begun and ended.
    pub fn fault(&self) -> Option<String> {
        self.0.lock().twins.iter().find_map(Watch::fault)
    }
}

/// The endpoint of every backend here.
pub const OWN: &str = "127.0.0.1:4000";

/// What answers as the script says.
pub struct Instance {
    life: usize,
    endpoint: Endpoint,
    vendor: Vendor,
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.vendor.0.lock().calls.push(Call::Down);
    }
}

impl Backend for Instance {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        let mut inner = self.vendor.0.lock();
        inner.calls.push(Call::Register(regions.to_vec()));
        vendor("smem_trans_batch_register_mem", inner.register)
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        let mut inner = self.vendor.0.lock();
        inner.calls.push(Call::Deregister(address));
        vendor("smem_trans_deregister_mem", inner.deregister)
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        let mut inner = self.vendor.0.lock();
        let group = Group {
            peer: batch.peer().to_string(),
            opcode: batch.opcode().0,
            pieces: pieces_of(batch),
        };
        inner.calls.push(Call::Submit(group.clone()));
        let verdict = match inner.verdicts.len() {
            0 => Verdict::Accept,
            1 => inner.verdicts[0],
            _ => inner.verdicts.pop().expect("there are two or more"),
        };
        let id = match verdict {
            Verdict::Accept => {
                inner.fresh_id += 1;
                inner.fresh_id - 1
            }
            Verdict::AcceptAs(id) => id,
            Verdict::Refuse(code) => return Err(Code(code).into()),
        };
        inner.kept.push(Kept {
            life: self.life,
            id,
            group,
            peer_at: batch.peer().as_c_bytes().as_ptr().expose_provenance(),
            arrays_at: [batch.local(), batch.remote(), batch.lengths()]
                .map(|array| array.as_ptr().expose_provenance()),
        });
        Ok(BatchId(id))
    }

    fn query(&self, id: BatchId) -> Query {
        self.answer(id, true).query()
    }
}

impl Instance {
    /// Answers a question about `id`, which cannot have ended unless it `may`.
    pub fn answer(&self, id: BatchId, may: bool) -> Answer {
        let mut inner = self.vendor.0.lock();
        let about: Vec<_> = inner
            .kept
            .iter()
            .filter(|kept| kept.life == self.life && kept.id == id.0)
            .collect();
        let sharing = about.len();
        let misread = about.into_iter().find_map(Kept::misread);
        inner.misread = inner.misread.take().or(misread);
        let answers = inner
            .answers
            .clone()
            .unwrap_or(Answers::always(Answer::Pending));
        let asked = inner.asked.entry(id.0).or_default();
        *asked += 1;
        // A vendor that gives one id twice cannot tell whom a question is about.
        let answer = match answers.about(id.0) {
            _ if sharing == 1 && *asked <= answers.pending_first => Answer::Pending,
            Answer::Done(_) if !may => Answer::Pending,
            answer => answer,
        };
        inner.calls.push(Call::Query(id.0, answer));
        if let Answer::Done(_) = answer {
            let life = self.life;
            inner
                .kept
                .retain(|kept| kept.life != life || kept.id != id.0);
        }
        answer
    }
}

impl Kept {
    fn misread(&self) -> Option<String> {
        let name = self.group.peer.as_bytes();
        let terminated = [name, &[0]].concat();
        if read::<u8>(self.peer_at, terminated.len()) != terminated {
            return Some(format!("batch {}: the peer's name changed", self.id));
        }
        for (array, at) in self.arrays_at.into_iter().enumerate() {
            let now = read::<usize>(at, self.group.pieces.len());
            let then = self.group.pieces.iter().map(|piece| match array {
                0 => piece.0,
                1 => piece.1,
                _ => piece.2,
            });
            if !now.iter().copied().eq(then) {
                let which = ["local", "remote", "length"][array];
                return Some(format!(
                    "batch {}: the {which} array is now {now:x?}, it was {:x?}",
                    self.id, self.group.pieces
                ));
            }
        }
        None
    }
}

fn read<T: Copy>(address: usize, count: usize) -> Vec<T> {
    (0..count)
        .map(|index| {
            let element = std::ptr::with_exposed_provenance::<T>(address + index * size_of::<T>());
            // SAFETY: the address is that of an array of `count` elements that the
            // contract keeps alive until the batch is done. Where the contract is
            // broken the memory was freed to an allocator that keeps it mapped;
            // volatile, for the compiler must not reason about it.
            unsafe { element.read_volatile() }
        })
        .collect()
}
