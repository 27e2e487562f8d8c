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

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::backend::{BatchId, CopyBatch, Opcode};
use crate::endpoint::{self, Endpoint};
use crate::error::{Code, Error};

/// One transfer that the engine asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Local address.
    pub source: usize,
    /// Address in the peer's memory.
    pub target: usize,
    /// Bytes; 0 is COMPLETED at once and never reaches the library.
    pub length: usize,
    /// Position of the peer in the call's list.
    pub peer: u32,
    /// Direction.
    pub opcode: Opcode,
}

/// One target of a call, as the engine's metadata describes it.
///
/// Two entries with one endpoint are one peer.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// The segment's name, for messages.
    pub name: &'a str,
    /// Its endpoint as published, `ip:port`.
    pub endpoint: &'a str,
    /// Why there is no endpoint; empty if there is one.
    pub problem: &'a str,
}

/// Most characters of a peer's name and of its problem in a message.
const LONGEST_NAME: usize = 255;
const LONGEST_PROBLEM: usize = 511;

impl Peer<'_> {
    fn parse(&self) -> Result<Endpoint, String> {
        if !self.problem.is_empty() {
            // It may quote what the peer published.
            return Err(endpoint::excerpt(self.problem, LONGEST_PROBLEM));
        }
        Endpoint::parse(self.endpoint).map_err(|problem| {
            let published = endpoint::excerpt(self.endpoint, endpoint::MAX_BYTES);
            format!("memfabric_unique_id '{published}' {problem}")
        })
    }
}

/// What a task is told to TENT as; the engine handles no other state well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Not done, or not known to be.
    Pending,
    /// Every byte was moved.
    Completed,
    /// Not moved, or only partly: memory may have been written, and nothing
    /// rolls back (C3).
    Failed,
}

/// Answer to a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskStatus {
    /// The state.
    pub state: TaskState,
    /// Bytes known to be moved: all of them if completed, else 0.
    pub bytes: u64,
}

impl TaskStatus {
    /// PENDING with 0 bytes (C1).
    pub const PENDING: Self = Self {
        state: TaskState::Pending,
        bytes: 0,
    };
    /// FAILED with 0 bytes (C3, C6).
    pub const FAILED: Self = Self {
        state: TaskState::Failed,
        bytes: 0,
    };
}

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
    /// Whether a wait for this batch ran into its deadline: nothing but an
    /// explicit quiesce waits for it again.
    pub(crate) waited_out: AtomicBool,
    pub(crate) id: BatchId,
    pub(crate) submitted: Option<Instant>,
    pub(crate) copy: CopyBatch,
}

impl Default for VendorBatch {
    fn default() -> Self {
        Self {
            progress: AtomicU64::new(Progress::Outstanding { answers: 0 }.pack()),
            place: AtomicUsize::new(0),
            waited_out: AtomicBool::new(false),
            id: BatchId::default(),
            submitted: None,
            copy: CopyBatch::default(),
        }
    }
}

impl VendorBatch {
    /// A batch that is about to be submitted.
    pub(crate) fn renew(&mut self) {
        *self.progress.get_mut() = Progress::Outstanding { answers: 0 }.pack();
        *self.waited_out.get_mut() = false;
        self.submitted = None;
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
const EMPTY: u32 = u32::MAX;
/// [`Task::batch`] of a task that no vendor batch could take: FAILED.
const REFUSED: u32 = u32::MAX - 1;
/// The most tasks that a sub-batch can hold, whatever was asked for: its memory
/// is there from the start, 32 bytes for each.
pub(crate) const MAX_TASKS: usize = 1 << 24;

/// What a task is part of, and what it was told. With its length, 16 bytes.
#[derive(Debug, Default)]
struct Task {
    /// Position of its vendor batch in the sub-batch, or one of the above.
    batch: AtomicU32,
    /// The number of "pending" answers of its vendor batch when it was last
    /// polled.
    seen: AtomicU32,
}

impl Task {
    fn begin(&self, batch: u32) {
        self.batch.store(batch, Ordering::Relaxed);
        self.seen.store(0, Ordering::Relaxed);
    }
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
    table: Table,
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
    /// One entry for each vendor batch, at most one a task.
    batches: Box<[OnceLock<Arc<VendorBatch>>]>,
    batch_count: AtomicUsize,
}

impl Table {
    pub(crate) fn with_room_for(tasks: usize) -> Self {
        Self {
            tasks: std::iter::repeat_with(Task::default).take(tasks).collect(),
            lengths: std::iter::repeat_with(AtomicU64::default)
                .take(tasks)
                .collect(),
            refused: AtomicBool::new(false),
            length: AtomicUsize::new(0),
            batches: std::iter::repeat_with(OnceLock::new).take(tasks).collect(),
            batch_count: AtomicUsize::new(0),
        }
    }

    /// Number of tasks that it has room for.
    pub(crate) fn room(&self) -> usize {
        self.tasks.len()
    }

    /// Forgets every task and gives up the vendor batches.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = Arc<VendorBatch>> {
        *self.length.get_mut() = 0;
        *self.refused.get_mut() = false;
        let count = std::mem::take(self.batch_count.get_mut());
        self.batches[..count].iter_mut().filter_map(OnceLock::take)
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
    pub(crate) fn new(owner: u64, capacity: usize, table: Table) -> Self {
        Self {
            owner,
            capacity: capacity.min(table.room()),
            table,
        }
    }

    /// One that no transport takes, for when none can be allocated.
    pub(crate) fn without_owner() -> Self {
        Self::new(0, 0, Table::default())
    }

    pub(crate) fn into_table(self) -> Table {
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
        let batch = match task.batch.load(Ordering::Relaxed) {
            EMPTY => {
                return Peek::Answer(TaskStatus {
                    state: TaskState::Completed,
                    bytes: 0,
                });
            }
            REFUSED => return Peek::Answer(TaskStatus::FAILED),
            index => table.batches.get(index as usize).and_then(OnceLock::get),
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
                if task.seen.swap(answers, Ordering::Relaxed) == answers {
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

    /// The lengths of the tasks so far if all of them are COMPLETED, else none.
    /// What this once showed neither changes nor moves while the sub-batch is
    /// there, for a terminal answer stays.
    pub(crate) fn completed(&self) -> &[AtomicU64] {
        // Before the vendor batches: those of later tasks may be among them,
        // never the other way round.
        let lengths = self.lengths();
        let table = &self.table;
        let count = table.batch_count.load(Ordering::Relaxed);
        let batches = table.batches.get(..count).unwrap_or_default();
        // From the last one, which a sweep asks for last.
        let all_done = batches
            .iter()
            .rev()
            .filter_map(OnceLock::get)
            .all(|batch| matches!(batch.progress(), Progress::Done(code) if code.is_ok()));
        if all_done && !table.refused.load(Ordering::Relaxed) {
            lengths
        } else {
            &[]
        }
    }
}

/// A call being split into vendor batches (C8); kept between calls for its room.
#[derive(Debug, Default)]
pub(crate) struct Grouping {
    /// For each peer of the call, its endpoint if it has a usable one; behind
    /// them, those of earlier calls.
    endpoints: Vec<Option<Endpoint>>,
    /// For each peer, READ then WRITE: position in `groups`, or [`NO_GROUP`].
    group_of: Vec<[u32; 2]>,
    /// In order of their first request; none is empty.
    pub(crate) groups: Vec<CopyBatch>,
    /// The first request that no library could execute, with its position.
    pub(crate) unaddressable: Option<(usize, Request)>,
    spare: Vec<CopyBatch>,
}

/// Past the end of [`Grouping::groups`]: no request of a peer and direction so
/// far, or none that can have a group.
const NO_GROUP: u32 = u32::MAX;

/// A peer whose tasks are FAILED at submission, and why.
#[derive(Debug)]
pub(crate) struct Unreachable {
    pub(crate) name: String,
    pub(crate) problem: String,
}

impl Grouping {
    /// Takes the call's peers in. Those that cannot be reached are returned, for
    /// the log.
    pub(crate) fn begin<'a>(&mut self, peers: impl Iterator<Item = Peer<'a>>) -> Vec<Unreachable> {
        let mut unreachable = Vec::new();
        self.group_of.clear();
        self.unaddressable = None;
        self.spare.append(&mut self.groups);
        for (index, peer) in peers.enumerate() {
            if index == self.endpoints.len() {
                self.endpoints.push(None);
            }
            // The last call's peers are mostly this one's, so parsing is rare.
            let endpoint = &mut self.endpoints[index];
            if !peer.problem.is_empty() || !endpoint.is_some_and(|known| known.is(peer.endpoint)) {
                *endpoint = peer
                    .parse()
                    .map_err(|problem| {
                        unreachable.push(Unreachable {
                            name: endpoint::excerpt(peer.name, LONGEST_NAME),
                            problem,
                        });
                    })
                    .ok();
            }
            self.group_of.push([NO_GROUP; 2]);
        }
        unreachable
    }

    /// Appends the call's tasks behind the tasks that `sub_batch` has, not yet
    /// visible, and its pieces to `groups`. Only under the transport's lock.
    ///
    /// # Errors
    ///
    /// [`Error::OverCapacity`], [`Error::PeerOutOfRange`],
    /// [`Error::OpcodeUnknown`]; nothing that a poll can see has changed then.
    pub(crate) fn fill(
        &mut self,
        sub_batch: &SubBatch,
        requests: impl ExactSizeIterator<Item = Request> + Clone,
    ) -> Result<(), Error> {
        let first_task = sub_batch.len();
        let first_batch = sub_batch.table.batch_count.load(Ordering::Relaxed) as u32;
        let room = sub_batch.capacity - first_task;
        if requests.len() > room {
            return Err(Error::OverCapacity {
                asked: requests.len(),
                allowed: room,
                capacity: sub_batch.capacity,
            });
        }
        let table = &sub_batch.table;
        let tasks = table.tasks[first_task..].iter();
        let places = tasks.zip(&table.lengths[first_task..]);
        if let Some(group) = self.add_alike(requests.clone()) {
            for (request, (task, length)) in requests.zip(places) {
                task.begin(first_batch + group);
                length.store(request.length as u64, Ordering::Relaxed);
            }
            return Ok(());
        }
        for (index, (request, (task, length))) in requests.zip(places).enumerate() {
            let batch = match self.add(&request) {
                Some(group) => first_batch + group,
                None => self.add_unusual(index, request, first_batch)?,
            };
            if batch == REFUSED {
                table.refused.store(true, Ordering::Relaxed);
            }
            task.begin(batch);
            length.store(request.length as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Adds all requests to one group if they have that in common and nothing
    /// else is to be said about them. The usual call is like that, and costs a
    /// fraction of sorting it.
    fn add_alike(&mut self, requests: impl Iterator<Item = Request> + Clone) -> Option<u32> {
        let first = requests.clone().next()?;
        let alike = requests.clone().all(|request| {
            request.peer == first.peer
                && request.opcode == first.opcode
                && request.is_transferable()
        });
        if !alike {
            return None;
        }
        let position = self.group(first.peer, first.opcode)?;
        let pieces = requests.map(|request| (request.source, request.target, request.length));
        self.groups[position as usize].extend(pieces);
        Some(position)
    }

    /// Adds a request's piece to the group that its peer and direction have; None
    /// if there is more to it. Nearly every request is done with here.
    #[inline]
    fn add(&mut self, request: &Request) -> Option<u32> {
        if !request.is_transferable() {
            return None;
        }
        let groups = self.group_of.get(request.peer as usize)?;
        let position = *groups.get(usize::from(request.opcode.0))?;
        let group = self.groups.get_mut(position as usize)?;
        group.push(request.source, request.target, request.length);
        Some(position)
    }

    /// What becomes of a request that [`Self::add`] did not take: the task's
    /// [`Task::batch`].
    #[cold]
    fn add_unusual(
        &mut self,
        index: usize,
        request: Request,
        first_batch: u32,
    ) -> Result<u32, Error> {
        let Some(groups) = self.group_of.get(request.peer as usize) else {
            return Err(Error::PeerOutOfRange {
                request: index,
                peer: request.peer,
                peers: self.group_of.len(),
            });
        };
        if usize::from(request.opcode.0) >= groups.len() {
            return Err(Error::OpcodeUnknown {
                request: index,
                opcode: request.opcode.0,
            });
        }
        if request.length == 0 {
            return Ok(EMPTY);
        }
        if !request.is_transferable() {
            self.unaddressable.get_or_insert((index, request));
            return Ok(REFUSED);
        }
        let group = self.group(request.peer, request.opcode);
        let group = group.and_then(|_| self.add(&request));
        Ok(group.map_or(REFUSED, |group| first_batch + group))
    }

    /// The group of a peer and direction, made if there is none; None if there
    /// can be none.
    fn group(&mut self, peer: u32, opcode: Opcode) -> Option<u32> {
        let groups = self.group_of.get(peer as usize)?;
        let known = *groups.get(usize::from(opcode.0))?;
        if known != NO_GROUP {
            return Some(known);
        }
        let endpoint = self.endpoints[peer as usize]?;
        let group = self.group_with(endpoint, opcode);
        self.group_of[peer as usize][usize::from(opcode.0)] = group;
        Some(group)
    }

    /// The group of an earlier peer with the same endpoint, or a new one.
    fn group_with(&mut self, endpoint: Endpoint, opcode: Opcode) -> u32 {
        let same = self
            .groups
            .iter()
            .position(|batch| batch.opcode() == opcode && *batch.peer() == endpoint);
        let position = same.unwrap_or_else(|| {
            let mut batch = self.spare.pop().unwrap_or_default();
            batch.reset(endpoint, opcode);
            self.groups.push(batch);
            self.groups.len() - 1
        });
        position as u32
    }
}

impl Request {
    /// Not empty, and neither side is null or wraps: a library may refuse a whole
    /// batch for one such piece.
    #[inline]
    fn is_transferable(&self) -> bool {
        self.length != 0
            && self.source != 0
            && self.target != 0
            && self.source.checked_add(self.length).is_some()
            && self.target.checked_add(self.length).is_some()
    }
}

impl SubBatch {
    /// Makes the tasks that [`Grouping::fill`] wrote visible, with the vendor
    /// batches of the call's groups in their order. Only under the transport's
    /// lock.
    pub(crate) fn publish(&self, tasks: usize, batches: impl Iterator<Item = Arc<VendorBatch>>) {
        let count = &self.table.batch_count;
        for batch in batches {
            let index = count.load(Ordering::Relaxed);
            // Empty: slots past the count were taken out by `clear`.
            let _ = self.table.batches[index].set(batch);
            count.store(index + 1, Ordering::Relaxed);
        }
        let length = self.len() + tasks;
        self.table.length.store(length, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        grouping.begin(peers.into_iter());
        grouping
            .fill(sub_batch, requests.iter().copied())
            .expect("it fits");
        let batches: Vec<Arc<VendorBatch>> =
            grouping.groups.iter().map(|_| Arc::default()).collect();
        sub_batch.publish(requests.len(), batches.iter().cloned());
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
        let sub_batch = SubBatch::new(1, 4, Table::with_room_for(4));
        let first = submit(&sub_batch, &[request(8, 0), request(0, 0)]);
        assert_eq!(shown(&sub_batch), [], "the first task is outstanding");
        first[0].finish(Code::OK);
        assert_eq!(shown(&sub_batch), [8, 0]);
        let second = submit(&sub_batch, &[request(16, 0)]);
        assert_eq!(shown(&sub_batch), [], "a later task is outstanding");
        second[0].finish(Code::OK);
        assert_eq!(shown(&sub_batch), [8, 0, 16]);
        submit(&sub_batch, &[request(32, 1)]);
        assert_eq!(shown(&sub_batch), [], "a later task has failed");
    }

    #[test]
    fn lengths_of_a_failed_batch_are_never_shown() {
        let sub_batch = SubBatch::new(1, 1, Table::with_room_for(1));
        let batches = submit(&sub_batch, &[request(8, 0)]);
        batches[0].finish(Code(-1));
        assert_eq!(shown(&sub_batch), []);
    }

    #[test]
    fn a_task_is_at_most_32_bytes() {
        let task = size_of::<Task>() + size_of::<AtomicU64>();
        assert!(task + size_of::<OnceLock<Arc<VendorBatch>>>() <= 32);
    }
}
