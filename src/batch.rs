// SPDX-License-Identifier: Apache-2.0
//! Tasks, sub-batches and vendor batches: the state machine, without I/O.
//!
//! A request of the engine becomes a **task**. Tasks of one call with the same
//! peer and opcode share a **vendor batch**, the unit that the library executes
//! and gives one result for. A **sub-batch** is the engine's container of tasks.
//!
//! What ends a task is the result of its vendor batch and nothing else, so a
//! task keeps no status of its own: it names its vendor batch, whose progress is
//! one atomic word. A poll of a task that is done, or that has not yet seen the
//! latest "pending", therefore takes no lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{BatchId, CopyBatch};
use crate::code::Code;
use crate::endpoint::Endpoint;
use crate::footprint::Footprint;
use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::task::{TaskState, TaskStatus};
use crate::zeroed;

/// Progress of a vendor batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// No result yet; the number of "pending" answers so far, modulo 2^32.
    Outstanding { answers: u32 },
    /// The result, which never changes again (C4).
    Done(Code),
}

const DONE: u64 = 1 << 32;

impl Progress {
    fn pack(self) -> u64 {
        match self {
            Self::Outstanding { answers } => u64::from(answers),
            Self::Done(code) => DONE | u64::from(code.0.cast_unsigned()),
        }
    }

    fn unpack(word: u64) -> Self {
        let low = word as u32;
        if word & DONE == 0 {
            Self::Outstanding { answers: low }
        } else {
            Self::Done(Code(low.cast_signed()))
        }
    }
}

/// One vendor batch, with the arrays that the library may read until it is done.
#[derive(Debug)]
pub(crate) struct VendorBatch {
    progress: AtomicU64,
    /// Place in the transport's list of outstanding batches; guarded by its lock.
    pub(crate) place: AtomicUsize,
    /// When a wait first met this batch: from then on it has one timeout, and no
    /// wait but an explicit quiesce waits for it longer (C19).
    waited_for_since: OnceLock<Instant>,
    pub(crate) id: BatchId,
    pub(crate) submitted: Option<Instant>,
    pub(crate) copy: CopyBatch,
    /// The memory of this process that the batch reads or writes.
    pub(crate) footprint: Footprint,
}

impl Default for VendorBatch {
    fn default() -> Self {
        Self {
            progress: AtomicU64::new(Progress::Outstanding { answers: 0 }.pack()),
            place: AtomicUsize::new(0),
            waited_for_since: OnceLock::new(),
            id: BatchId::default(),
            submitted: None,
            copy: CopyBatch::default(),
            footprint: Footprint::default(),
        }
    }
}

impl VendorBatch {
    /// A batch that is about to be submitted.
    pub(crate) fn renew(&mut self) {
        *self.progress.get_mut() = Progress::Outstanding { answers: 0 }.pack();
        // Mostly empty, and a look is cheaper than a write.
        if self.waited_for_since.get().is_some() {
            self.waited_for_since.take();
        }
        self.submitted = None;
        self.footprint.clear();
    }

    /// Takes the pieces that are to be submitted, and gives up the room of the
    /// last ones for them. A batch to our own endpoint uses our memory at both
    /// ends (C17).
    pub(crate) fn fill(&mut self, copy: &mut CopyBatch, own: &Endpoint) {
        self.copy.take(copy);
        let copy = &self.copy;
        self.footprint.add(copy.local(), copy.lengths());
        if copy.peer().is_same(own) {
            self.footprint.add(copy.remote(), copy.lengths());
        }
    }

    /// Begins this batch's time to be waited for, if nothing did before.
    pub(crate) fn wait_from(&self, now: Instant) {
        self.waited_for_since.get_or_init(|| now);
    }

    /// Whether it was waited for as long as `timeout`.
    pub(crate) fn had_its_time(&self, now: Instant, timeout: Duration) -> bool {
        let since = self.waited_for_since.get();
        since.is_some_and(|since| now.saturating_duration_since(*since) >= timeout)
    }

    /// Acquire: whoever sees the result also sees what happened before it.
    pub(crate) fn progress(&self) -> Progress {
        Progress::unpack(self.progress.load(Ordering::Acquire))
    }

    /// Notes one more "pending" answer. Only under the transport's lock.
    pub(crate) fn answered_pending(&self) {
        if let Progress::Outstanding { answers } = self.progress() {
            let answers = answers.wrapping_add(1);
            self.store(Progress::Outstanding { answers });
        }
    }

    /// Notes the result. Only under the transport's lock, and once.
    pub(crate) fn finish(&self, result: Code) {
        self.store(Progress::Done(result));
    }

    /// Notes that the backend did not take the batch: no code makes that a
    /// success.
    pub(crate) fn refuse(&self, code: Code) {
        self.finish(if code.is_ok() { Code::UNWRITTEN } else { code });
    }

    fn store(&self, progress: Progress) {
        self.progress.store(progress.pack(), Ordering::Release);
    }

    /// Number of tasks.
    pub(crate) fn tasks(&self) -> usize {
        self.copy.len()
    }
}

/// [`Task::batch`] of a task that was done at submission: empty, so COMPLETED.
pub(crate) const EMPTY: u32 = u32::MAX;
/// [`Task::batch`] of a task that no vendor batch could take: FAILED.
pub(crate) const REFUSED: u32 = u32::MAX - 1;
/// The most tasks that a sub-batch can hold, whatever was asked for: 16 bytes of
/// address space for each.
pub(crate) const MAX_TASKS: usize = 1 << 24;

/// What a task is part of, and what it was told. With its length, 16 bytes.
pub(crate) type Task = [AtomicU32; 2];
/// Position of its vendor batch in the sub-batch, or one of the above.
const BATCH: usize = 0;
/// The number of "pending" answers of its vendor batch when it was last polled.
const SEEN: usize = 1;

/// Makes `task` one of the vendor batch at position `batch`.
pub(crate) fn begin(task: &Task, batch: u32) {
    task[BATCH].store(batch, Ordering::Relaxed);
    task[SEEN].store(0, Ordering::Relaxed);
}

/// TENT's container of tasks, of fixed capacity.
///
/// Tasks are appended in the order of their requests, all of a call or none, and
/// are visible to polls from the moment at which the whole call was submitted.
/// Any number of threads may poll while one submits.
#[derive(Debug)]
pub struct SubBatch {
    owner: u64,
    capacity: usize,
    table: Box<Table>,
}

/// A sub-batch's storage, recycled between sub-batches: slots past the lengths
/// are never read, so they need not be cleared.
#[derive(Debug, Default)]
pub(crate) struct Table {
    tasks: Box<[Task]>,
    /// Bytes of each task; apart from the rest so that they can be shown as they
    /// are.
    lengths: Box<[AtomicU64]>,
    /// Whether a task may be REFUSED.
    refused: AtomicBool,
    /// Tasks that polls may read; stored last, with Release.
    length: AtomicUsize,
    batches: Batches,
    batch_count: AtomicUsize,
    /// So many vendor batches from the first on are known to have succeeded.
    succeeded: AtomicUsize,
}

/// The vendor batches of a sub-batch, at most one a task and mostly one a call:
/// room for them is made as it is needed, each time 16 times as much as before,
/// and none of it moves.
#[derive(Debug, Default)]
struct Batches {
    first: [BatchSlot; FIRST],
    others: [OnceLock<Box<[BatchSlot]>>; 6],
}

type BatchSlot = OnceLock<Arc<VendorBatch>>;

/// Slots that need no further room.
const FIRST: usize = 16;
/// The number that the slot behind those has for [`Batches::place`], a power of two.
const SECOND: usize = 4;
/// How much larger each piece of room is than the one before, as a shift.
const GROWTH: u32 = 4;

impl Batches {
    /// Which of the other pieces of room the slot `index`, which is none of the
    /// first, is in, and where in it.
    fn place(index: usize) -> (usize, usize) {
        let number = index - FIRST + SECOND;
        let room = (number / SECOND).ilog2() / GROWTH;
        (room as usize, number - (SECOND << (GROWTH * room)))
    }

    /// How many slots a piece of room has: from its own first number to the next
    /// one's.
    fn slots(room: usize) -> usize {
        (SECOND << (GROWTH as usize * room)) * ((1 << GROWTH) - 1)
    }

    #[inline]
    fn get(&self, index: usize) -> Option<&Arc<VendorBatch>> {
        match self.first.get(index) {
            Some(slot) => slot.get(),
            None => {
                let (room, slot) = Self::place(index);
                self.others.get(room)?.get()?.get(slot)?.get()
            }
        }
    }

    fn set(&self, index: usize, batch: Arc<VendorBatch>) {
        // Empty: slots past the count were taken out by `clear`.
        let _ = match self.first.get(index) {
            Some(slot) => slot.set(batch),
            None => {
                let (room, slot) = Self::place(index);
                let room = self.others[room].get_or_init(|| {
                    let slots = Self::slots(room);
                    std::iter::repeat_with(OnceLock::new).take(slots).collect()
                });
                room[slot].set(batch)
            }
        };
    }

    /// Takes the first `count` out.
    fn take(&mut self, count: usize) -> impl Iterator<Item = Arc<VendorBatch>> {
        let others = self.others.iter_mut().filter_map(OnceLock::get_mut);
        let others = others.flat_map(|room| room.iter_mut());
        let slots = self.first.iter_mut().chain(others);
        slots.take(count).filter_map(OnceLock::take)
    }
}

impl Table {
    /// None if there is no memory for it. What is not used costs none.
    pub(crate) fn with_room_for(tasks: usize) -> Option<Box<Self>> {
        Some(Box::new(Self {
            tasks: zeroed::slice(tasks)?,
            lengths: zeroed::slice(tasks)?,
            ..Self::default()
        }))
    }

    /// Number of tasks that it has room for.
    pub(crate) fn room(&self) -> usize {
        self.tasks.len()
    }

    /// Forgets every task and gives up the vendor batches.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = Arc<VendorBatch>> {
        *self.length.get_mut() = 0;
        *self.refused.get_mut() = false;
        *self.succeeded.get_mut() = 0;
        let count = *self.batch_count.get_mut();
        *self.batch_count.get_mut() = 0;
        self.batches.take(count)
    }
}

/// What a task's own memory says about it.
pub(crate) enum Peek<'a> {
    /// The answer to the poll.
    Answer(TaskStatus),
    /// The vendor must be asked first, unless another poll did so since the batch
    /// had this many answers.
    Ask {
        batch: &'a Arc<VendorBatch>,
        answers: u32,
    },
}

impl SubBatch {
    pub(crate) fn new(owner: u64, capacity: usize, table: Box<Table>) -> Self {
        Self {
            owner,
            capacity: capacity.min(table.room()),
            table,
        }
    }

    /// One that no transport takes, for when none can be allocated.
    pub(crate) fn without_owner() -> Self {
        Self::new(0, 0, Box::default())
    }

    pub(crate) fn into_table(self) -> Box<Table> {
        self.table
    }

    pub(crate) fn owner(&self) -> u64 {
        self.owner
    }

    /// The most tasks that it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tasks that it holds.
    pub fn len(&self) -> usize {
        self.table.length.load(Ordering::Acquire)
    }

    /// Whether it holds no task.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is known about `task` without asking the vendor. A number past the
    /// end is FAILED: the engine asks for one after a failed failover.
    ///
    /// `task` counts as polled: it has seen the batch's latest answer.
    #[inline]
    pub(crate) fn peek(&self, task: usize) -> Peek<'_> {
        let table = &self.table;
        let (Some(length), Some(task)) = (self.lengths().get(task), table.tasks.get(task)) else {
            return Peek::Answer(TaskStatus::FAILED);
        };
        let batch = match task[BATCH].load(Ordering::Relaxed) {
            EMPTY => {
                return Peek::Answer(TaskStatus {
                    state: TaskState::Completed,
                    bytes: 0,
                });
            }
            REFUSED => return Peek::Answer(TaskStatus::FAILED),
            index => table.batches.get(index as usize),
        };
        let Some(batch) = batch else {
            return Peek::Answer(TaskStatus::FAILED);
        };
        match batch.progress() {
            Progress::Done(code) if code.is_ok() => Peek::Answer(TaskStatus {
                state: TaskState::Completed,
                bytes: length.load(Ordering::Relaxed),
            }),
            Progress::Done(_) => Peek::Answer(TaskStatus::FAILED),
            Progress::Outstanding { answers } => {
                if task[SEEN].swap(answers, Ordering::Relaxed) == answers {
                    Peek::Ask { batch, answers }
                } else {
                    Peek::Answer(TaskStatus::PENDING)
                }
            }
        }
    }
}

impl SubBatch {
    fn lengths(&self) -> &[AtomicU64] {
        self.table.lengths.get(..self.len()).unwrap_or_default()
    }

    /// Whether a task is of the last vendor batch, the one that a sweep ends last:
    /// before it is COMPLETED, [`Self::completed`] has nothing.
    #[inline]
    pub(crate) fn is_of_last_batch(&self, task: i32) -> bool {
        let count = self.table.batch_count.load(Ordering::Relaxed);
        let task = usize::try_from(task).ok();
        let task = task.and_then(|task| self.table.tasks.get(task));
        task.is_some_and(|task| task[BATCH].load(Ordering::Relaxed) as usize + 1 == count)
    }

    /// The lengths of the tasks so far if all of them are COMPLETED, else none.
    /// What this once showed neither changes nor moves while the sub-batch is
    /// there, for a terminal answer stays.
    pub(crate) fn completed(&self) -> &[AtomicU64] {
        // Before the vendor batches: those of later tasks may be among them,
        // never the other way round.
        let lengths = self.lengths();
        let table = &self.table;
        let count = table.batch_count.load(Ordering::Relaxed);
        let has_succeeded = |index| {
            let batch: Option<&Arc<VendorBatch>> = table.batches.get(index);
            batch.is_some_and(
                |batch| matches!(batch.progress(), Progress::Done(code) if code.is_ok()),
            )
        };
        // The last one first, which a sweep asks for last.
        if count > 0 && !has_succeeded(count - 1) {
            return &[];
        }
        // What has succeeded stays so, and is mostly looked at once: of two threads
        // the one that saw less may be the last to say so. Acquire and Release: who
        // goes on from here sees what the one before saw.
        let known = table.succeeded.load(Ordering::Acquire);
        let mut succeeded = known;
        while succeeded + 1 < count && has_succeeded(succeeded) {
            succeeded += 1;
        }
        if succeeded + 1 == count {
            succeeded = count;
        }
        if succeeded > known {
            table.succeeded.store(succeeded, Ordering::Release);
        }
        if succeeded >= count && !table.refused.load(Ordering::Relaxed) {
            lengths
        } else {
            &[]
        }
    }

    /// The tasks and lengths of later calls, not visible yet. Only under the
    /// transport's lock.
    pub(crate) fn room(&self) -> (&[Task], &[AtomicU64]) {
        let used = self.len();
        let room = used..self.capacity;
        (&self.table.tasks[room.clone()], &self.table.lengths[room])
    }

    /// Number of vendor batches so far. Only under the transport's lock.
    pub(crate) fn batch_count(&self) -> usize {
        self.table.batch_count.load(Ordering::Relaxed)
    }

    /// Makes the next `tasks` visible, with the vendor batches of their call and
    /// whether one of them is in none. Only under the transport's lock.
    pub(crate) fn publish(
        &self,
        tasks: usize,
        batches: impl Iterator<Item = Arc<VendorBatch>>,
        refused: bool,
    ) {
        if refused {
            self.table.refused.store(true, Ordering::Relaxed);
        }
        let mut count = self.batch_count();
        for batch in batches {
            self.table.batches.set(count, batch);
            count += 1;
        }
        self.table.batch_count.store(count, Ordering::Relaxed);
        let length = self.len() + tasks;
        self.table.length.store(length, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Opcode;
    use crate::grouping::Grouping;
    use crate::region::Region;
    use crate::task::{Described, Peer, Request};

    fn request(length: usize, peer: u32) -> Request {
        Request {
            source: 0x1000,
            target: 0x2000,
            length,
            peer,
            opcode: Opcode::WRITE,
        }
    }

    /// Submits to a reachable peer (0) and one that is not (1).
    fn submit(sub_batch: &SubBatch, requests: &[Request]) -> Vec<Arc<VendorBatch>> {
        let mut grouping = Grouping::default();
        let peers = ["10.0.0.1:1", ""].map(|endpoint| Peer {
            name: "peer",
            endpoint,
            problem: "",
        });
        grouping.begin(peers.into_iter().map(Described::from));
        grouping
            .fill(sub_batch, requests.iter().copied())
            .expect("it fits");
        let batches: Vec<Arc<VendorBatch>> =
            grouping.groups.iter().map(|_| Arc::default()).collect();
        sub_batch.publish(requests.len(), batches.iter().cloned(), grouping.refused);
        batches
    }

    fn shown(sub_batch: &SubBatch) -> Vec<u64> {
        let lengths = sub_batch.completed().iter();
        lengths
            .map(|length| length.load(Ordering::Relaxed))
            .collect()
    }

    #[test]
    fn lengths_are_shown_once_every_task_is_completed() {
        let sub_batch = SubBatch::new(1, 4, table(4));
        let first = submit(&sub_batch, &[request(8, 0), request(0, 0)]);
        assert!(
            shown(&sub_batch).is_empty(),
            "the first task is outstanding"
        );
        first[0].finish(Code::OK);
        assert_eq!(shown(&sub_batch), [8, 0]);
        let second = submit(&sub_batch, &[request(16, 0)]);
        assert!(shown(&sub_batch).is_empty(), "a later task is outstanding");
        second[0].finish(Code::OK);
        assert_eq!(shown(&sub_batch), [8, 0, 16]);
        submit(&sub_batch, &[request(32, 1)]);
        assert!(shown(&sub_batch).is_empty(), "a later task has failed");
    }

    #[test]
    fn lengths_of_a_failed_batch_are_never_shown() {
        let sub_batch = SubBatch::new(1, 1, table(1));
        let batches = submit(&sub_batch, &[request(8, 0)]);
        batches[0].finish(Code(-1));
        assert!(shown(&sub_batch).is_empty());
    }

    #[test]
    fn c17_a_batch_to_oneself_covers_memory_at_both_ends() {
        let endpoints = ["10.0.0.1:1", "10.0.0.2:1"];
        let [own, other] = endpoints.map(|text| Endpoint::parse(text).expect("a literal"));
        for (peer, covers_remote) in [(own, true), (other, false)] {
            let mut copy = CopyBatch::default();
            copy.reset(peer, Opcode::WRITE);
            copy.push(0x1000, 0x2000, 8);
            let mut batch = VendorBatch::default();
            batch.fill(&mut copy, &own);
            for (address, covered) in [(0x1007, true), (0x2007, covers_remote)] {
                let region = Region { address, length: 1 };
                assert_eq!(batch.footprint.touches(region), covered, "{region:x?}");
            }
        }
    }

    #[test]
    fn c19_a_batch_has_one_timeout_from_the_first_wait_that_meets_it() {
        let mut batch = VendorBatch::default();
        let begun = Instant::now();
        let after = |ms| begun + Duration::from_millis(ms);
        let timeout = Duration::from_millis(100);
        assert!(!batch.had_its_time(after(1000), timeout), "nobody waited");
        batch.wait_from(after(0));
        batch.wait_from(after(50));
        assert!(!batch.had_its_time(after(99), timeout));
        assert!(
            batch.had_its_time(after(100), timeout),
            "from the first wait"
        );
        batch.renew();
        assert!(!batch.had_its_time(after(1000), timeout), "another batch");
    }

    fn table(tasks: usize) -> Box<Table> {
        Table::with_room_for(tasks).expect("a little memory")
    }

    #[test]
    fn a_task_is_at_most_32_bytes() {
        // With a vendor batch for each, which is rare; twice, as room doubles.
        let task = size_of::<Task>() + size_of::<AtomicU64>();
        assert!(task + size_of::<BatchSlot>() <= 32);
    }

    #[test]
    fn b09_a_rejected_call_leaves_nothing_in_the_sub_batch() {
        let sub_batch = SubBatch::new(1, 4, table(4));
        let batches = submit(&sub_batch, &[request(8, 0)]);
        let mut grouping = Grouping::default();
        let peer = Peer {
            name: "peer",
            endpoint: "",
            problem: "",
        };
        grouping.begin(std::iter::once(peer.into()));
        let rejected = [request(8, 0), request(8, 7)];
        let outcome = grouping.fill(&sub_batch, rejected.into_iter());
        outcome.expect_err("there is no peer 7");
        batches[0].finish(Code::OK);
        assert_eq!(shown(&sub_batch), [8]);
    }

    /// As in a sweep beside a slow batch: each look may go over what is new, not
    /// over all batches again.
    #[test]
    fn b03_looking_for_completed_tasks_is_linear_in_their_number() {
        for slow in [0, 8000, 15_999] {
            let sub_batch = SubBatch::new(1, 16_000, table(16_000));
            let batches: Vec<_> = (0..16_000)
                .flat_map(|_| submit(&sub_batch, &[request(8, 0)]))
                .collect();
            let others = batches.iter().enumerate().filter(|(at, _)| *at != slow);
            let mut before = 0;
            for (finished, (_, batch)) in others.enumerate() {
                batch.finish(Code::OK);
                assert!(sub_batch.completed().is_empty());
                let known = sub_batch.table.succeeded.load(Ordering::Relaxed);
                assert!(known >= before, "it never starts again");
                assert!(known <= (finished + 1).min(slow));
                before = known;
            }
            if slow < 15_999 {
                assert_eq!(before, slow, "all before it were looked at");
            }
            batches[slow].finish(Code::OK);
            assert_eq!(sub_batch.completed().len(), 16_000);
        }
    }

    #[test]
    fn room_for_vendor_batches_is_found_again_whatever_their_number() {
        let batches = Batches::default();
        for index in 0..5000 {
            assert!(batches.get(index).is_none());
            let batch = VendorBatch {
                id: BatchId(index as u64),
                ..VendorBatch::default()
            };
            batches.set(index, Arc::new(batch));
        }
        for index in 0..5000 {
            let id = batches.get(index).map(|batch| batch.id);
            assert_eq!(id, Some(BatchId(index as u64)));
        }
        let (room, slot) = Batches::place(MAX_TASKS - 1);
        assert!(room < batches.others.len() && slot < Batches::slots(room));
    }
}
