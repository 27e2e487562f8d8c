// SPDX-License-Identifier: Apache-2.0
//! A vendor that answers as the step says, and reads its arguments late.
#![allow(unsafe_code)] // reads argument arrays by address, as the library does

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Query, Refused, Region,
};
use parking_lot::Mutex;

use super::clock;
use super::picture::Picture;
use super::script::{Answer, Answers, BOTH, Verdict};
use super::twin::{Twin, Watch};
use crate::common::{pieces_of, vendor};

/// What the vendor was asked, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Register(Vec<Region>),
    Deregister(usize),
    Submit(Group),
    Query(u64, Answer),
    /// Whether it ended anything.
    Fence(bool),
    /// The instance was destroyed.
    Down,
    /// The instance is left behind.
    Abandon,
}

/// A call, and how it was made.
#[derive(Clone, Debug)]
pub struct Logged {
    /// The library.
    pub who: usize,
    pub call: Call,
    /// When it had been answered.
    pub at: Instant,
    pub thread: ThreadId,
}

/// A submission.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub peer: String,
    pub opcode: u8,
    /// Local address, remote address, bytes.
    pub pieces: Vec<(usize, usize, usize)>,
}

/// A batch whose arguments the vendor may still read.
#[derive(Debug)]
struct Kept {
    life: usize,
    /// None if it was refused and perhaps taken in part: for good.
    id: Option<u64>,
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
    calls: Vec<Logged>,
    kept: Vec<Kept>,
    misread: Option<String>,
    picture: Picture,
    /// How many instances there were.
    lives: usize,
    /// The one of each library that was installed last; 0 is none.
    installed: [usize; BOTH],
    twins: Vec<Watch>,
    fresh_id: [u64; BOTH],
    // What the current step says.
    answers: Option<Answers>,
    asked: HashMap<u64, usize>,
    fenced: bool,
    hold: Option<Hold>,
    verdicts: Vec<Verdict>,
    register: Option<Code>,
    deregister: Option<Code>,
}

/// While something else is done in the middle of a wait, nothing ends and, after
/// the first question, no time goes by. When it has been done, that goes on until a
/// sweep begins that can only have been planned later.
struct Hold {
    /// The thread that does something else.
    by: ThreadId,
    first_takes: Duration,
    ahead: Duration,
    asked: usize,
    /// Of the sweep that the waiting thread makes.
    sweep: Vec<u64>,
    /// Sweeps that have begun since it was done; None before that.
    sweeps_since: Option<usize>,
}

impl Hold {
    /// Whether to go on holding when asked about `id`.
    fn asked(&mut self, id: u64) -> bool {
        if std::thread::current().id() == self.by {
            return true;
        }
        if self.asked == 0 {
            clock::pass(self.first_takes);
            self.ahead = clock::ahead();
        }
        self.asked += 1;
        if self.sweep.contains(&id) {
            self.sweep.clear();
            self.sweeps_since = self.sweeps_since.map(|sweeps| sweeps + 1);
        }
        self.sweep.push(id);
        self.sweeps_since.is_none_or(|sweeps| sweeps < 2)
    }
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
    pub fn backend(&self, who: usize) -> Arc<dyn Backend> {
        let mut inner = self.0.lock();
        inner.lives += 1;
        let instance = Instance {
            who,
            life: inner.lives,
            endpoint: Endpoint::parse(OWN[who]).expect("a literal"),
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

    /// What the caller is told goes into the picture of memory.
    pub fn told(&self, who: usize, say: impl FnOnce(&mut Picture, usize)) {
        let mut inner = self.0.lock();
        let life = inner.installed[who];
        say(&mut inner.picture, life);
    }

    /// The backend that was made last was installed.
    pub fn installed(&self, who: usize) {
        let mut inner = self.0.lock();
        inner.installed[who] = inner.lives;
    }

    /// Its transport is gone, and what it was told with it.
    pub fn left_behind(&self, who: usize) {
        self.0.lock().installed[who] = 0;
    }

    /// The ranges that the installed instance of this library has, sorted.
    pub fn table(&self, who: usize) -> Vec<Region> {
        let inner = self.0.lock();
        inner.picture.table(inner.installed[who])
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
        inner.fenced = false;
        inner.hold = None;
        inner.answers = Some(answers.clone());
    }

    /// As [`Self::answer`], in no time.
    pub fn answer_at_once(&self, answer: Answer) {
        self.answer(&Answers {
            each_takes: 0,
            ..Answers::always(answer)
        });
    }

    /// Until [`Self::go_on`] nothing ends. The first question takes some time, the
    /// others none.
    pub fn hold(&self, first_takes: Duration) {
        self.0.lock().hold = Some(Hold {
            by: std::thread::current().id(),
            first_takes,
            ahead: clock::ahead(),
            asked: 0,
            sweep: Vec::new(),
            sweeps_since: None,
        });
    }

    /// Questions since then, and the time on the asking thread.
    pub fn held(&self) -> (usize, Duration) {
        let inner = self.0.lock();
        let hold = inner.hold.as_ref().expect("it is held");
        (hold.asked, hold.ahead)
    }

    pub fn go_on(&self) {
        if let Some(hold) = &mut self.0.lock().hold {
            hold.sweeps_since = Some(0);
        }
    }

    /// A process is gone, and the operating system says so.
    pub fn died(&self, endpoint: &str) {
        // Not under the lock: what ended is noted here.
        let twins: Vec<_> = self.0.lock().twins.iter().filter_map(Watch::twin).collect();
        for twin in twins {
            twin.died(endpoint);
        }
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
    pub fn fresh_id(&self, who: usize) -> u64 {
        self.0.lock().fresh_id[who]
    }

    /// The calls since the last time.
    pub fn calls(&self) -> Vec<Logged> {
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

    /// What may not be in the picture of memory.
    pub fn picture_fault(&self) -> Option<String> {
        self.0.lock().picture.fault()
    }
}

/// The endpoints of the backends of the two. Neither is that of a [`Blocking`]
/// library, which cannot copy to itself.
///
/// [`Blocking`]: crate::common::blocking::Blocking
pub const OWN: [&str; BOTH] = ["127.0.0.1:5000", "127.0.0.1:5001"];

/// What answers as the script says.
pub struct Instance {
    who: usize,
    life: usize,
    endpoint: Endpoint,
    vendor: Vendor,
}

impl Drop for Instance {
    fn drop(&mut self) {
        let mut inner = self.vendor.0.lock();
        self.log(&mut inner, Call::Down);
        inner.picture.down(self.life);
    }
}

impl Backend for Instance {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        let mut inner = self.vendor.0.lock();
        self.log(&mut inner, Call::Register(regions.to_vec()));
        // Also if it is refused, as far as anybody knows.
        inner.picture.registered(self.life, regions);
        vendor("smem_trans_batch_register_mem", inner.register)
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        let mut inner = self.vendor.0.lock();
        self.log(&mut inner, Call::Deregister(address));
        // Also if it is refused: there is no other way to take it back.
        inner.picture.deregistered(self.life, address);
        vendor("smem_trans_deregister_mem", inner.deregister)
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        let mut inner = self.vendor.0.lock();
        let group = Group {
            peer: batch.peer().to_string(),
            opcode: batch.opcode().0,
            pieces: pieces_of(batch),
        };
        self.log(&mut inner, Call::Submit(group.clone()));
        let verdict = match inner.verdicts.len() {
            0 => Verdict::Accept,
            1 => inner.verdicts[0],
            _ => inner.verdicts.pop().expect("there are two or more"),
        };
        let id = match verdict {
            Verdict::Accept => {
                let fresh_id = &mut inner.fresh_id[self.who];
                *fresh_id += 1;
                Some(*fresh_id - 1)
            }
            Verdict::AcceptAs(id) => Some(id),
            Verdict::Refuse(code) => return Err(Code(code).into()),
            Verdict::Doubt(_) => None,
        };
        if let Some(id) = id {
            inner.picture.accepted(self.life, id, &group, OWN[self.who]);
        }
        inner.kept.push(Kept {
            life: self.life,
            id,
            group,
            peer_at: batch.peer().as_c_bytes().as_ptr().expose_provenance(),
            arrays_at: [batch.local(), batch.remote(), batch.lengths()]
                .map(|array| array.as_ptr().expose_provenance()),
        });
        match (id, verdict) {
            (Some(id), _) => Ok(BatchId(id)),
            (None, Verdict::Doubt(code)) => Err(Refused {
                doubtful: true,
                ..Refused::from(Code(code))
            }),
            (None, _) => unreachable!("only a doubtful refusal is kept without an id"),
        }
    }

    fn query(&self, id: BatchId) -> Query {
        let answer = self.decide(id, true);
        if let Answer::Done(_) = answer {
            self.stopped(id);
        }
        self.give(id, answer);
        answer.query()
    }

    fn fence(&self) -> bool {
        self.fence_with(false)
    }

    fn abandon(&self) {
        self.log(&mut self.vendor.0.lock(), Call::Abandon);
    }
}

impl Instance {
    fn log(&self, inner: &mut Inner, call: Call) {
        inner.calls.push(Logged {
            who: self.who,
            call,
            at: Instant::now(),
            thread: std::thread::current().id(),
        });
    }

    /// A fence, of which something else than the script may have ended something.
    pub fn fence_with(&self, other: bool) -> bool {
        let mut inner = self.vendor.0.lock();
        let fenced = inner.answers.as_ref().and_then(|answers| answers.fenced);
        inner.fenced = true;
        let ended = fenced.is_some() || other;
        self.log(&mut inner, Call::Fence(ended));
        ended
    }

    /// The answer to a question about `id`, which cannot have ended unless it `may`.
    pub fn decide(&self, id: BatchId, may: bool) -> Answer {
        let mut inner = self.vendor.0.lock();
        let about: Vec<_> = inner
            .kept
            .iter()
            .filter(|kept| kept.life == self.life && kept.id == Some(id.0))
            .collect();
        let sharing = about.len();
        let misread = about.into_iter().find_map(Kept::misread);
        inner.misread = inner.misread.take().or(misread);
        if inner.hold.as_mut().is_some_and(|hold| hold.asked(id.0)) {
            return Answer::Pending;
        }
        inner.hold = None;
        let asked = inner.asked.entry(id.0).or_default();
        *asked += 1;
        let asked = *asked;
        let Some(answers) = &inner.answers else {
            return Answer::Pending;
        };
        clock::pass(Duration::from_secs(answers.each_takes));
        let about = answers.about(id.0);
        // A vendor that gives one id twice cannot tell whom a question is about.
        match answers.fenced.filter(|_| inner.fenced).unwrap_or(about) {
            _ if sharing == 1 && asked <= answers.pending_first => Answer::Pending,
            Answer::Done(_) if !may => Answer::Pending,
            answer => answer,
        }
    }

    /// What batch `id` did to memory has stopped.
    pub fn stopped(&self, id: BatchId) {
        self.vendor.0.lock().picture.stopped(self.life, id.0);
    }

    /// Notes what is answered about `id`.
    pub fn give(&self, id: BatchId, answer: Answer) {
        let mut inner = self.vendor.0.lock();
        self.log(&mut inner, Call::Query(id.0, answer));
        if let Answer::Done(result) = answer {
            inner.picture.result_given(self.life, id.0, result);
            inner
                .kept
                .retain(|kept| kept.life != self.life || kept.id != Some(id.0));
        }
    }
}

impl Kept {
    fn misread(&self) -> Option<String> {
        let name = self.group.peer.as_bytes();
        let terminated = [name, &[0]].concat();
        if read::<u8>(self.peer_at, terminated.len()) != terminated {
            return Some(format!("batch {:?}: the peer's name changed", self.id));
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
                    "batch {:?}: the {which} array is now {now:x?}, it was {:x?}",
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
