// SPDX-License-Identifier: Apache-2.0
//! The contract once more, as plainly as it can be written: lists and loops, no
//! sharing, no caching, no locks.
//!
//! It is told what the vendor was asked, and says what must have been asked and
//! what the caller must have been told. Where the contract leaves a choice, it
//! takes the one that was made, if it is one of them.

use std::time::{Duration, Instant};

use memfabric_transport::{Code, Error, Region, TaskState, TaskStatus};

use super::script::{Answer, BOTH, OTHER, PEERS, Piece, SELF, Source, Target, Verdict};
use super::vendor::{Call, Group, OWN};

/// What a step is told, and the vendor calls that it makes.
pub type Expected<T> = (Result<T, Error>, Vec<Call>);

/// A request with its addresses.
pub type Addressed = (Piece, (usize, usize));

/// Far more than anything takes here, far less than what a script lets pass.
const SLACK: Duration = Duration::from_secs(5);

/// The most batches of freed sub-batches that one call asks about.
const MOST_ORPHANS: usize = 2;

#[derive(Clone)]
pub struct Model {
    lanes: [Lane; BOTH],
    /// Numbers of transports that there were.
    transports: usize,
    /// Every vendor batch that was ever accepted.
    batches: Vec<Batch>,
    pub sub_batches: Vec<SubBatch>,
    pub peers: Peers,
    targets: usize,
}

/// One of the two transports.
#[derive(Clone, Default)]
struct Lane {
    transport: usize,
    installed: bool,
    quiesced: bool,
    timeout: Duration,
    /// One entry for each registration that was not taken back.
    registered: Vec<Region>,
    /// Ranges whose removal was refused, the latest refusal last: each goes with its
    /// last batch (C16).
    condemned: Vec<Region>,
    /// Batches whose sub-batch was freed, those that were asked about last last.
    orphans: Vec<usize>,
    /// Endpoints that something said may be gone, in order.
    signs: Vec<String>,
    /// How many of the signs this thread had seen when it last asked about each
    /// segment.
    seen: [usize; PEERS],
    /// When this thread was last told to read each peer's description again.
    refreshed: [Option<Instant>; PEERS],
}

/// A question and its answer.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub id: u64,
    pub answer: Answer,
    pub at: Instant,
}

/// A step that waited.
pub struct Waited {
    pub begun: Instant,
    pub ended: Instant,
    pub asked: Vec<Asked>,
    /// What was submitted meanwhile.
    pub joined: Option<Joined>,
}

/// Batches from this position on were submitted after so many questions.
#[derive(Clone)]
pub struct Joined {
    pub batches: usize,
    pub after: usize,
    pub at: Instant,
    /// Whether the sweep that began then is not yet about them.
    pub late: bool,
}

#[derive(Clone)]
pub struct SubBatch {
    transport: usize,
    /// The transport whose caller has it.
    pub hands: usize,
    pub freed: bool,
    pub capacity: usize,
    pub tasks: Vec<Task>,
}

#[derive(Clone)]
pub enum Task {
    /// Was over when it was submitted.
    Over(TaskStatus),
    In {
        batch: usize,
        length: u64,
        /// Whether the batch was pending once more since this task was polled.
        news: bool,
    },
}

impl Task {
    fn batch(&self) -> Option<usize> {
        match self {
            Self::In { batch, .. } => Some(*batch),
            Self::Over(_) => None,
        }
    }
}

#[derive(Clone)]
struct Batch {
    transport: usize,
    id: u64,
    peer: String,
    tasks: usize,
    /// Pieces of this process's memory, at either end: address and bytes.
    uses: Vec<(usize, usize)>,
    result: Option<i32>,
    /// When its time began, at the earliest and at the latest: with the first wait
    /// that there was while it was outstanding.
    patience: [Option<Instant>; 2],
}

impl Batch {
    fn uses(&self, range: Region) -> bool {
        self.uses.iter().any(|(address, length)| {
            let begin = (*address).max(range.address);
            let end = (address + length).min(range.address.saturating_add(range.length));
            begin < end
        })
    }
}

/// The peers of a call: two processes, the first of them under a second segment
/// name, the transport itself, one without an endpoint, one with half of one, the
/// other transport.
#[derive(Clone, Default)]
pub struct Peers {
    restarts: [u32; 2],
}

impl Peers {
    pub fn restart(&mut self, peer: usize) {
        self.restarts[peer] += 1;
    }

    /// The endpoint as published, and why there is none.
    pub fn published(&self, who: usize, peer: usize) -> (String, &'static str) {
        match peer {
            0 | 2 => (format!("10.0.0.1:{}", 1000 + self.restarts[0]), ""),
            1 => (format!("[::2]:{}", 2000 + self.restarts[1]), ""),
            SELF => (OWN[who].to_owned(), ""),
            OTHER => (OWN[1 - who].to_owned(), ""),
            4 => (String::new(), "has no memfabric_unique_id in its metadata"),
            _ => ("10.0.0.9".to_owned(), ""),
        }
    }

    fn reachable(&self, who: usize, peer: usize) -> Option<String> {
        (peer < 4 || peer == OTHER).then(|| self.published(who, peer).0)
    }
}

/// Whom a wait waits for.
#[derive(Clone, Copy, PartialEq)]
enum Patience {
    /// All, for the whole timeout.
    Explicit,
    /// Those that have not had their time.
    Implicit,
}

impl Default for Model {
    fn default() -> Self {
        let lane = |transport| Lane {
            transport,
            ..Lane::default()
        };
        Self {
            lanes: [lane(0), lane(1)],
            transports: BOTH,
            batches: Vec::new(),
            sub_batches: Vec::new(),
            peers: Peers::default(),
            targets: 0,
        }
    }
}

impl Model {
    pub fn install(&mut self, who: usize, timeout: Duration) -> Expected<()> {
        let lane = &mut self.lanes[who];
        if lane.installed {
            let endpoint = OWN[who].to_owned();
            // The backend that was not wanted is dropped.
            return (Err(Error::AlreadyInstalled { endpoint }), vec![Call::Down]);
        }
        lane.installed = true;
        lane.quiesced = false;
        lane.timeout = timeout;
        (Ok(()), Vec::new())
    }

    pub fn is_installed(&self, who: usize) -> bool {
        self.lanes[who].installed
    }

    pub fn allocate(&mut self, who: usize, capacity: usize) {
        self.sub_batches.push(SubBatch {
            transport: self.lanes[who].transport,
            hands: who,
            freed: false,
            capacity,
            tasks: Vec::new(),
        });
    }

    /// Freeing ends nothing: what is outstanding stays so (C14), and is asked about
    /// now and then.
    pub fn free(
        &mut self,
        who: usize,
        which: usize,
        asked: &[Asked],
    ) -> Result<Expected<()>, String> {
        self.sub_batches[which].freed = true;
        let SubBatch {
            transport, tasks, ..
        } = &self.sub_batches[which];
        let mut orphans: Vec<_> = tasks.iter().filter_map(Task::batch).collect();
        orphans.sort_unstable();
        orphans.dedup();
        if *transport == self.lanes[who].transport {
            self.lanes[who].orphans.extend(orphans);
        }
        let mut calls = self.ask_orphans(who, asked)?;
        calls.extend(self.made_up_for(who, any_ended(&calls), &[]));
        Ok((Ok(()), calls))
    }

    /// Takes the answers about batches that nobody polls any more. Which of them is
    /// asked about is not said; of those with one id it is the one that has waited
    /// longest.
    fn ask_orphans(&mut self, who: usize, asked: &[Asked]) -> Result<Vec<Call>, String> {
        if asked.len() > MOST_ORPHANS {
            let questions = asked.len();
            return Err(format!(
                "{questions} questions of a call that waits for none"
            ));
        }
        let mut orphans = std::mem::take(&mut self.lanes[who].orphans);
        orphans.retain(|batch| self.batches[*batch].result.is_none());
        let mut left = orphans.clone();
        for Asked { id, answer, .. } in asked {
            let before = left.clone();
            self.asked_once(&mut left, *id, *answer)?;
            let asked = before.into_iter().find(|batch| !left.contains(batch));
            if let Some(place) = orphans.iter().position(|batch| Some(*batch) == asked) {
                let asked = orphans.remove(place);
                orphans.push(asked);
            }
        }
        self.lanes[who].orphans = orphans;
        Ok(asked_as_calls(asked))
    }

    /// Takes the answer about a batch of a sweep.
    fn asked_once(
        &mut self,
        sweep: &mut Vec<usize>,
        id: u64,
        answer: Answer,
    ) -> Result<(), String> {
        let of_this_id = |batch: &usize| self.batches[*batch].id == id;
        let position = sweep.iter().position(of_this_id);
        let position = position.ok_or(format!("batch {id} is not to be asked about"))?;
        self.answered(sweep.remove(position), answer);
        Ok(())
    }

    /// Addresses of a request.
    pub fn addresses(&mut self, who: usize, piece: &Piece) -> (usize, usize) {
        self.targets += 1;
        let source = match piece.source {
            Source::Near(place) => place.address(who),
            Source::At(address) => address,
        };
        let target = match piece.target {
            Target::Own => 0x7000_0000_0000 + self.targets * 0x1_0000_0000,
            Target::Near(place) if piece.peer == OTHER => place.address(1 - who),
            Target::Near(place) => place.address(who),
            Target::Null => 0,
            Target::Wrapping => usize::MAX,
        };
        (source, target)
    }

    /// Batches that there were so far.
    pub fn batches(&self) -> usize {
        self.batches.len()
    }

    pub fn submit(
        &mut self,
        who: usize,
        into: usize,
        requests: &[Addressed],
        verdicts: &[Verdict],
        mut fresh_id: u64,
        asked: &[Asked],
    ) -> Result<Expected<()>, String> {
        let rejected = |error| Ok((Err(error), Vec::new()));
        let lane = &self.lanes[who];
        let sub_batch = &self.sub_batches[into];
        let capacity = sub_batch.capacity;
        let allowed = capacity - sub_batch.tasks.len();
        if sub_batch.transport != lane.transport {
            return rejected(Error::ForeignSubBatch);
        }
        if !lane.installed {
            return rejected(Error::NotInstalled);
        }
        if lane.quiesced {
            return rejected(Error::Quiesced);
        }
        if requests.len() > allowed {
            return rejected(Error::OverCapacity {
                asked: requests.len(),
                allowed,
                capacity,
            });
        }
        for (request, (piece, _)) in requests.iter().enumerate() {
            if piece.peer >= PEERS {
                return rejected(Error::PeerOutOfRange {
                    request,
                    peer: piece.peer as u32,
                    peers: PEERS,
                });
            }
            if piece.opcode > 1 {
                return rejected(Error::OpcodeUnknown {
                    request,
                    opcode: piece.opcode,
                });
            }
        }

        // The call is taken. First the groups, in the order in which they begin.
        let mut groups: Vec<Group> = Vec::new();
        let mut group_of = Vec::new();
        for (piece, (local, remote)) in requests {
            let null = *local == 0 || *remote == 0;
            let wraps = |address: usize| address.checked_add(piece.length).is_none();
            let executable = piece.length > 0 && !null && !wraps(*local) && !wraps(*remote);
            let peer = self.peers.reachable(who, piece.peer);
            let peer = peer.filter(|_| executable);
            group_of.push(peer.map(|peer| {
                let same = |group: &Group| group.peer == peer && group.opcode == piece.opcode;
                let position = groups.iter().position(same).unwrap_or_else(|| {
                    groups.push(Group {
                        peer: peer.clone(),
                        opcode: piece.opcode,
                        pieces: Vec::new(),
                    });
                    groups.len() - 1
                });
                groups[position]
                    .pieces
                    .push((*local, *remote, piece.length));
                position
            }));
        }

        // Then the vendor's verdict on each.
        let mut calls = self.ask_orphans(who, asked)?;
        let mut accepted = Vec::new();
        for group in groups {
            let batch = Batch {
                transport: self.lanes[who].transport,
                id: 0,
                peer: group.peer.clone(),
                tasks: group.pieces.len(),
                uses: memory_of(who, &group),
                result: None,
                patience: [None; 2],
            };
            let verdict = verdicts.get(accepted.len()).or(verdicts.last());
            calls.push(Call::Submit(group));
            let id = match verdict.copied().unwrap_or(Verdict::Accept) {
                Verdict::Accept => {
                    fresh_id += 1;
                    fresh_id - 1
                }
                Verdict::AcceptAs(id) => id,
                Verdict::Refuse(_) | Verdict::Doubt(_) => {
                    self.lanes[who].signs.push(batch.peer);
                    accepted.push(None);
                    continue;
                }
            };
            accepted.push(Some(self.batches.len()));
            self.batches.push(Batch { id, ..batch });
        }

        // Then one task a request, in their order.
        for ((piece, _), group) in requests.iter().zip(group_of) {
            let task = match group.and_then(|group| accepted[group]) {
                Some(batch) => Task::In {
                    batch,
                    length: piece.length as u64,
                    news: false,
                },
                None if piece.length == 0 => Task::Over(completed(0)),
                None => Task::Over(TaskStatus::FAILED),
            };
            self.sub_batches[into].tasks.push(task);
        }
        calls.extend(self.made_up_for(who, any_ended(&calls), &[]));
        Ok((Ok(()), calls))
    }

    pub fn poll(
        &mut self,
        who: usize,
        of: usize,
        number: i32,
        answer: Answer,
    ) -> Expected<TaskStatus> {
        let sub_batch = &mut self.sub_batches[of];
        if sub_batch.transport != self.lanes[who].transport {
            return (Err(Error::ForeignSubBatch), Vec::new());
        }
        if number < 0 {
            return (Err(Error::NegativeTask { task: number }), Vec::new());
        }
        let Some(task) = sub_batch.tasks.get_mut(number as usize) else {
            return (Ok(TaskStatus::FAILED), Vec::new());
        };
        let (batch, length) = match task {
            Task::Over(status) => return (Ok(*status), Vec::new()),
            Task::In { batch, news, .. } if *news && self.batches[*batch].result.is_none() => {
                *news = false;
                return (Ok(TaskStatus::PENDING), Vec::new());
            }
            Task::In { batch, length, .. } => (*batch, *length),
        };
        if let Some(result) = self.batches[batch].result {
            return (Ok(ended(result, length)), Vec::new());
        }
        let call = Call::Query(self.batches[batch].id, answer);
        self.answered(batch, answer);
        let told = match answer {
            Answer::Pending => {
                if let Task::In { news, .. } = &mut self.sub_batches[of].tasks[number as usize] {
                    *news = false;
                }
                Ok(TaskStatus::PENDING)
            }
            Answer::Done(result) => Ok(ended(result, length)),
            Answer::Error(code) => Err(Error::QueryFailed {
                batch: self.batches[batch].id,
                peer: self.batches[batch].peer.clone(),
                code: Code(code),
            }),
        };
        let mut calls = vec![call];
        calls.extend(self.made_up_for(who, any_ended(&calls), &[]));
        (told, calls)
    }

    /// What a terminal task must be told, without a vendor call.
    pub fn terminal(&self, of: usize, number: usize) -> Option<TaskStatus> {
        let sub_batch = &self.sub_batches[of];
        match sub_batch.tasks[number] {
            _ if sub_batch.transport != self.lanes[sub_batch.hands].transport => None,
            Task::Over(status) => Some(status),
            Task::In { batch, length, .. } => {
                let result = self.batches[batch].result;
                result.map(|result| ended(result, length))
            }
        }
    }

    fn answered(&mut self, batch: usize, answer: Answer) {
        match answer {
            Answer::Pending => {
                for sub_batch in &mut self.sub_batches {
                    for task in &mut sub_batch.tasks {
                        match task {
                            Task::In {
                                batch: of, news, ..
                            } if *of == batch => *news = true,
                            _ => {}
                        }
                    }
                }
            }
            Answer::Done(result) => {
                self.batches[batch].result = Some(result);
                let Batch {
                    transport, peer, ..
                } = &self.batches[batch];
                let lane = |lane: &&mut Lane| lane.transport == *transport;
                if let Some(lane) = self.lanes.iter_mut().find(lane)
                    && result != 0
                {
                    lane.signs.push(peer.clone());
                }
            }
            Answer::Error(_) => {}
        }
    }

    /// Vendor batches and tasks without a result.
    pub fn outstanding(&self, who: usize) -> (usize, usize) {
        let outstanding = self.outstanding_where(who, |_| true);
        let tasks = outstanding.iter().map(|batch| self.batches[*batch].tasks);
        (outstanding.len(), tasks.sum())
    }

    fn outstanding_where(&self, who: usize, concerned: impl Fn(&Batch) -> bool) -> Vec<usize> {
        let transport = self.lanes[who].transport;
        let outstanding = |batch: &Batch| {
            batch.transport == transport && batch.result.is_none() && concerned(batch)
        };
        (0..self.batches.len())
            .filter(|batch| outstanding(&self.batches[*batch]))
            .collect()
    }

    fn users(&self, who: usize, range: Region) -> Vec<usize> {
        self.outstanding_where(who, |batch| batch.uses(range))
    }

    /// The ranges that the library has, sorted.
    pub fn table(&self, who: usize) -> Vec<Region> {
        let lane = &self.lanes[who];
        let known = lane.registered.iter().chain(&lane.condemned);
        let mut table: Vec<_> = known.copied().collect();
        table.sort_by_key(|range| (range.address, range.length));
        table.dedup();
        table
    }

    pub fn is_condemned(&self, who: usize, range: Region) -> bool {
        self.lanes[who].condemned.contains(&range)
    }

    /// Removals that were refused and that nothing is in the way of any more: they
    /// are made when a batch ends, `now`, or else if they are among the `calls`.
    fn made_up_for(&mut self, who: usize, now: bool, calls: &[Call]) -> Vec<Call> {
        let condemned = std::mem::take(&mut self.lanes[who].condemned);
        let (gone, left) = condemned.into_iter().partition(|range: &Region| {
            let made = now || calls.contains(&Call::Deregister(range.address));
            made && self.users(who, *range).is_empty()
        });
        self.lanes[who].condemned = left;
        removals(&gone)
    }

    /// Whether a removal of this range begins to wait, whatever the first answers
    /// are.
    pub fn would_wait(&self, who: usize, range: Region) -> bool {
        let lane = &self.lanes[who];
        let registrations = lane.registered.iter().filter(|known| **known == range);
        let last = registrations.count() == 1 || lane.condemned.contains(&range);
        let now = Instant::now();
        let patient = |batch: &usize| {
            let [earliest, _] = self.batches[*batch].patience;
            earliest.is_none_or(|begun| now < begun + lane.timeout)
        };
        lane.installed
            && last
            && !lane.timeout.is_zero()
            && self.users(who, range).iter().any(patient)
    }

    /// Checks the questions of a wait, sweep by sweep, and takes their answers:
    /// each sweep asks once about every batch that concerns it and is outstanding,
    /// and there is a next one only while something is left that has not had its
    /// time.
    fn wait(
        &mut self,
        who: usize,
        concerned: impl Fn(&Batch) -> bool,
        patience: Patience,
        waited: &Waited,
    ) -> Result<Vec<usize>, String> {
        let timeout = self.lanes[who].timeout;
        let asked = &waited.asked;
        for batch in self.outstanding_where(who, |_| true) {
            let joined = waited.joined.as_ref();
            let joined = joined.filter(|joined| batch >= joined.batches);
            let begun = joined.map_or(waited.begun, |joined| joined.at);
            self.batches[batch].patience[0].get_or_insert(begun);
        }
        let mut position = 0;
        loop {
            let (mut sweep, begun_at) = (self.outstanding_where(who, &concerned), position);
            let is_there = |batch: usize, sweep: usize| match &waited.joined {
                Some(joined) if batch >= joined.batches => {
                    sweep > joined.after || sweep == joined.after && !joined.late
                }
                _ => true,
            };
            sweep.retain(|batch| is_there(*batch, begun_at));
            let questions = asked.get(begun_at..begun_at + sweep.len());
            let questions = questions.ok_or_else(|| {
                let missing = begun_at + sweep.len() - asked.len();
                format!("{missing} batches were not asked about in a sweep")
            })?;
            for Asked { id, answer, .. } in questions {
                self.asked_once(&mut sweep, *id, *answer)?;
            }
            position += questions.len();
            let mut left = self.outstanding_where(who, &concerned);
            left.retain(|batch| is_there(*batch, position));
            let now = questions.last().map_or(waited.begun, |last| last.at);
            if !left.is_empty() {
                let waiting = self.outstanding_where(who, |_| true).into_iter();
                for batch in waiting.filter(|batch| is_there(*batch, begun_at)) {
                    self.batches[batch].patience[1].get_or_insert(now);
                }
            }
            let past =
                |begun: Option<Instant>| begun.is_some_and(|begun| now >= begun + timeout + SLACK);
            let had_theirs = left
                .iter()
                .all(|batch| past(self.batches[*batch].patience[1]));
            let over = left.is_empty()
                || timeout.is_zero()
                || past(Some(waited.begun))
                || patience == Patience::Implicit && had_theirs;
            if over && position < asked.len() {
                return Err(format!(
                    "asked on after the wait was over: {:?}",
                    asked_as_calls(&asked[position..])
                ));
            }
            if position < asked.len() {
                continue;
            }
            let whole = Some(waited.begun + timeout);
            let theirs = left
                .iter()
                .filter_map(|batch| self.batches[*batch].patience[0]);
            let due = match patience {
                Patience::Explicit => whole,
                Patience::Implicit => theirs.max().map(|begun| begun + timeout).min(whole),
            };
            if let Some(due) = due
                && !left.is_empty()
                && !timeout.is_zero()
                && waited.ended + SLACK < due
            {
                return Err(format!(
                    "gave a batch up {:?} before it had had its time",
                    due - waited.ended
                ));
            }
            return Ok(left);
        }
    }

    fn timed_out(&self, left: &[usize], last_error: Option<Code>) -> Error {
        Error::QuiesceTimeout {
            batches: left.len(),
            tasks: left.iter().map(|batch| self.batches[*batch].tasks).sum(),
            waited_ms: 0,
            last_error,
        }
    }

    pub fn quiesce(&mut self, who: usize, waited: &Waited) -> Result<Expected<()>, String> {
        if !self.lanes[who].installed {
            return Ok((Err(Error::NotInstalled), Vec::new()));
        }
        self.lanes[who].quiesced = true;
        let left = self.wait(who, |_| true, Patience::Explicit, waited)?;
        let outcome = match left.is_empty() {
            true => Ok(()),
            false => Err(self.timed_out(&left, last_error(&waited.asked))),
        };
        let mut expected = asked_as_calls(&waited.asked);
        expected.extend(self.made_up_for(who, any_ended(&expected), &[]));
        Ok((outcome, expected))
    }

    /// Of the `calls` that it made, those that it may make or not are looked at.
    pub fn uninstall(
        &mut self,
        who: usize,
        mut waited: Waited,
        calls: &[Call],
        told: &Result<(), Error>,
    ) -> Result<Expected<()>, String> {
        if !self.lanes[who].installed {
            return Ok((Ok(()), Vec::new()));
        }
        self.lanes[who].quiesced = true;
        let before_fence = calls
            .iter()
            .take_while(|call| !matches!(call, Call::Fence(_)));
        let questions = before_fence.filter(|call| matches!(call, Call::Query(..)));
        let fenced = waited.asked.split_off(questions.count());
        let mut left = self.wait(who, |_| true, Patience::Implicit, &waited)?;
        let mut expected = asked_as_calls(&waited.asked);
        if !left.is_empty() {
            let ends_something = calls.contains(&Call::Fence(true));
            expected.push(Call::Fence(ends_something));
            // Then once more about each of them.
            let mut sweep = left.clone();
            for Asked { id, answer, .. } in &fenced {
                self.asked_once(&mut sweep, *id, *answer)?;
                expected.push(Call::Query(*id, *answer));
            }
            if ends_something && !sweep.is_empty() {
                let missing = sweep.len();
                return Err(format!(
                    "{missing} batches were not asked about after the fence"
                ));
            }
            left = self.outstanding_where(who, |_| true);
        }
        if !left.is_empty() {
            expected.extend(self.made_up_for(who, any_ended(&expected), &[]));
            // Whichever is meant by the last one.
            let errors = [
                last_error(&fenced).or(last_error(&waited.asked)),
                last_error(&waited.asked),
                last_error(&fenced),
            ];
            let said = match told {
                Err(Error::QuiesceTimeout { last_error, .. }) => *last_error,
                _ => None,
            };
            let error = if errors.contains(&said) {
                said
            } else {
                errors[0]
            };
            return Ok((Err(self.timed_out(&left, error)), expected));
        }
        // What goes with the library need not be taken back before.
        expected.extend(self.made_up_for(who, false, calls));
        expected.push(Call::Down);
        let lane = &mut self.lanes[who];
        lane.installed = false;
        lane.registered.clear();
        lane.condemned.clear();
        Ok((Ok(()), expected))
    }

    /// Like an uninstall that nobody can repeat: what is outstanding then stays so
    /// for ever (C13).
    pub fn drop_transport(
        &mut self,
        who: usize,
        waited: Waited,
        calls: &[Call],
    ) -> Result<Expected<()>, String> {
        let (told, mut expected) = self.uninstall(who, waited, calls, &Ok(()))?;
        if told.is_err() {
            expected.push(Call::Abandon);
        }
        self.lanes[who] = Lane {
            transport: self.transports,
            ..Lane::default()
        };
        self.transports += 1;
        Ok((Ok(()), expected))
    }

    #[allow(clippy::too_many_arguments)]
    pub fn register(
        &mut self,
        who: usize,
        ranges: &[Region],
        refuse: Option<i32>,
        asked: &[Asked],
        calls: &[Call],
        told: &Result<(), Error>,
    ) -> Result<Expected<()>, String> {
        let lane = &self.lanes[who];
        if !lane.installed {
            return Ok((Err(Error::NotInstalled), Vec::new()));
        }
        let mut new: Vec<Region> = Vec::new();
        for range in ranges {
            let known = lane.registered.iter().chain(&new);
            let lengths: Vec<_> = known
                .filter(|known| known.address == range.address)
                .map(|known| known.length)
                .collect();
            let impossible = range.address == 0
                || range.length == 0
                || range.address.checked_add(range.length).is_none();
            if impossible || lengths.iter().any(|length| *length != range.length) {
                let error = Error::RegionInvalid {
                    address: range.address,
                    length: range.length,
                    reason: String::new(),
                };
                return Ok((Err(error), Vec::new()));
            }
            if lengths.is_empty() {
                new.push(*range);
            }
        }

        // What is to be removed there goes first, one after the other, each after a
        // question about every batch that uses it.
        let in_the_way = |old: &Region| {
            let overlaps = |range: &Region| range.overlaps(old.address, old.length);
            ranges.iter().any(overlaps)
        };
        let old: Vec<_> = lane.condemned.iter().copied().filter(in_the_way).collect();
        let mut asked = asked.iter();
        let mut expected = Vec::new();
        for old in old {
            let mut sweep = self.users(who, old);
            while let Some(Asked { id, answer, .. }) =
                (!sweep.is_empty()).then(|| asked.next()).flatten()
            {
                self.asked_once(&mut sweep, *id, *answer)?;
                expected.push(Call::Query(*id, *answer));
            }
            if !sweep.is_empty() {
                let missing = sweep.len();
                return Err(format!("{missing} batches in the way were not asked about"));
            }
            let batches = self.users(who, old).len();
            if batches > 0 {
                expected.extend(self.made_up_for(who, false, calls));
                // Any range of the call will do.
                let said = |range: &&Region| matches!(told, Err(Error::RegionLeaving { address, length, .. }) if (*address, *length) == (range.address, range.length));
                let range = ranges.iter().find(said).unwrap_or(&ranges[0]);
                let error = Error::RegionLeaving {
                    address: range.address,
                    length: range.length,
                    old_address: old.address,
                    old_length: old.length,
                    batches,
                };
                return Ok((Err(error), expected));
            }
            let condemned = &mut self.lanes[who].condemned;
            if let Some(place) = condemned.iter().position(|range| *range == old) {
                condemned.remove(place);
                expected.push(Call::Deregister(old.address));
            }
        }
        expected.extend(self.made_up_for(who, any_ended(&expected), &[]));

        if !new.is_empty() {
            expected.push(Call::Register(new.clone()));
            if let Some(code) = refuse {
                // Which of them it took, the library does not say: all are taken
                // back, as far as no batch uses them.
                let (undone, busy): (Vec<Region>, Vec<Region>) = new
                    .iter()
                    .rev()
                    .partition(|range| self.users(who, **range).is_empty());
                self.lanes[who].condemned.extend(busy);
                expected.extend(removals(&undone));
                return Ok((
                    Err(refused("smem_trans_batch_register_mem", code)),
                    expected,
                ));
            }
        }
        self.lanes[who].registered.extend(ranges);
        Ok((Ok(()), expected))
    }

    fn busy(&self, range: Region, batches: usize) -> Error {
        Error::RegionBusy {
            address: range.address,
            length: range.length,
            batches,
            waited_ms: 0,
        }
    }

    pub fn deregister(
        &mut self,
        who: usize,
        range: Region,
        refuse: Option<i32>,
        waited: &Waited,
    ) -> Result<Expected<()>, String> {
        let lane = &mut self.lanes[who];
        let registrations = lane.registered.iter().filter(|known| **known == range);
        let registrations = registrations.count();
        let condemned = lane.condemned.contains(&range);
        if !lane.installed {
            return Ok((Ok(()), Vec::new()));
        }
        let remove_one = |registered: &mut Vec<Region>| {
            if let Some(one) = registered.iter().position(|known| *known == range) {
                registered.swap_remove(one);
            }
        };
        // Others go on using it: there is nothing to wait for.
        if registrations > 1 {
            remove_one(&mut lane.registered);
            return Ok((Ok(()), Vec::new()));
        }
        let left = self.wait(who, |batch| batch.uses(range), Patience::Implicit, waited)?;
        let lane = &mut self.lanes[who];
        remove_one(&mut lane.registered);
        lane.condemned.retain(|known| *known != range);
        let ours = registrations == 1 || condemned;
        let mut expected = asked_as_calls(&waited.asked);
        match left.is_empty() {
            true if ours => expected.push(Call::Deregister(range.address)),
            false if ours => lane.condemned.push(range),
            _ => {}
        }
        expected.extend(self.made_up_for(who, any_ended(&expected), &[]));
        let outcome = match refuse {
            _ if !left.is_empty() => Err(self.busy(range, left.len())),
            Some(code) if ours => Err(refused("smem_trans_deregister_mem", code)),
            _ => Ok(()),
        };
        Ok((outcome, expected))
    }

    /// What the question at `asked` ought to have been answered with; `told` is
    /// what was answered. A sign may wait for as long as a description was read
    /// again less than a second ago.
    pub fn must_refresh(&mut self, who: usize, peer: usize, asked: Instant, told: bool) -> bool {
        let endpoint = self.peers.published(who, peer).0;
        let lane = &mut self.lanes[who];
        let refresh = lane.signs[lane.seen[peer]..].contains(&endpoint);
        let last = lane.refreshed[peer];
        let recent = last.is_some_and(|last| asked - last < Duration::from_secs(1));
        if refresh && recent && !told {
            return false;
        }
        if refresh {
            lane.refreshed[peer] = Some(Instant::now());
        }
        lane.seen[peer] = lane.signs.len();
        refresh
    }
}

/// The memory of this process that a batch of this transport uses (C17).
fn memory_of(who: usize, group: &Group) -> Vec<(usize, usize)> {
    let local = group.pieces.iter().map(|piece| (piece.0, piece.2));
    let remote = group.pieces.iter().map(|piece| (piece.1, piece.2));
    let remote = remote.filter(|_| group.peer == OWN[who]);
    local.chain(remote).collect()
}

fn last_error(asked: &[Asked]) -> Option<Code> {
    asked.iter().rev().find_map(|asked| match asked.answer {
        Answer::Error(code) => Some(Code(code)),
        _ => None,
    })
}

fn completed(bytes: u64) -> TaskStatus {
    TaskStatus {
        state: TaskState::Completed,
        bytes,
    }
}

fn ended(result: i32, length: u64) -> TaskStatus {
    match result {
        0 => completed(length),
        _ => TaskStatus::FAILED,
    }
}

fn refused(call: &'static str, code: i32) -> Error {
    Error::Vendor {
        call,
        code: Code(code),
        context: String::new(),
    }
}

fn removals(ranges: &[Region]) -> Vec<Call> {
    let ranges = ranges.iter();
    ranges
        .map(|range| Call::Deregister(range.address))
        .collect()
}

/// Whether one of the questions was answered with a result.
fn any_ended(calls: &[Call]) -> bool {
    let ended = |call: &Call| matches!(call, Call::Query(_, Answer::Done(_)));
    calls.iter().any(ended)
}

fn asked_as_calls(asked: &[Asked]) -> Vec<Call> {
    asked
        .iter()
        .map(|asked| Call::Query(asked.id, asked.answer))
        .collect()
}
