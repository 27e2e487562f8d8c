//! The contract once more, as plainly as it can be written: lists and loops, no
//! sharing, no caching, no locks.
//!
//! It is told what the vendor was asked, and says what must have been asked and
//! what the caller must have been told.

use std::time::{Duration, Instant};

use memfabric_transport::{Code, Error, Region, TaskState, TaskStatus};

use super::script::{Answer, PEERS, Piece, RANGES, Target, Verdict};
use super::vendor::{Call, Group, OWN};

/// What a step is told, and the vendor calls that it makes.
pub type Expected<T> = (Result<T, Error>, Vec<Call>);

#[derive(Default)]
pub struct Model {
    transport: usize,
    installed: bool,
    quiesced: bool,
    timeout_ms: u64,
    /// Every vendor batch that was ever accepted.
    batches: Vec<Batch>,
    pub sub_batches: Vec<SubBatch>,
    /// One entry for each registration that was not taken back.
    registered: Vec<Region>,
    /// Endpoints that something said may be gone, in order.
    signs: Vec<String>,
    /// How many of the signs this thread had seen when it last asked about each
    /// segment.
    seen: [usize; PEERS],
    /// When this thread was last told to read each peer's description again.
    refreshed: [Option<Instant>; PEERS],
    pub peers: Peers,
    targets: usize,
}

pub struct SubBatch {
    transport: usize,
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

struct Batch {
    transport: usize,
    id: u64,
    peer: String,
    tasks: usize,
    /// Local pieces: address and bytes.
    local: Vec<(usize, usize)>,
    result: Option<i32>,
    /// A wait ran into its deadline with this batch outstanding.
    given_up: bool,
}

/// The peers of a call: two processes, the first of them under a second segment
/// name, this process itself, one without an endpoint, one with half of one.
#[derive(Default)]
pub struct Peers {
    restarts: [u32; 2],
}

impl Peers {
    pub fn restart(&mut self, peer: usize) {
        self.restarts[peer] += 1;
    }

    /// The endpoint as published, and why there is none.
    pub fn published(&self, peer: usize) -> (String, &'static str) {
        match peer {
            0 | 2 => (format!("10.0.0.1:{}", 1000 + self.restarts[0]), ""),
            1 => (format!("[::2]:{}", 2000 + self.restarts[1]), ""),
            3 => (OWN.to_owned(), ""),
            4 => (String::new(), "has no memfabric_unique_id in its metadata"),
            _ => ("10.0.0.9".to_owned(), ""),
        }
    }

    fn reachable(&self, peer: usize) -> Option<String> {
        (peer < 4).then(|| self.published(peer).0)
    }
}

/// Whether a wait gives up at once on batches that another wait gave up on.
#[derive(PartialEq)]
enum Patience {
    Explicit,
    Implicit,
}

impl Model {
    pub fn install(&mut self, timeout_ms: u64) -> Expected<()> {
        if self.installed {
            let endpoint = OWN.to_owned();
            // The backend that was not wanted is dropped.
            return (Err(Error::AlreadyInstalled { endpoint }), vec![Call::Down]);
        }
        self.installed = true;
        self.quiesced = false;
        self.timeout_ms = timeout_ms;
        (Ok(()), Vec::new())
    }

    pub fn is_installed(&self) -> bool {
        self.installed
    }

    pub fn allocate(&mut self, capacity: usize) {
        self.sub_batches.push(SubBatch {
            transport: self.transport,
            capacity,
            tasks: Vec::new(),
        });
    }

    /// Freeing ends nothing: what is outstanding stays so (C14).
    pub fn free(&mut self, which: usize) {
        self.sub_batches.remove(which);
    }

    /// Addresses of a request; every target is used once.
    pub fn addresses(&mut self, piece: &Piece) -> (usize, usize) {
        self.targets += 1;
        let target = match piece.target {
            Target::Own => 0x7000_0000_0000 + self.targets * 0x1_0000_0000,
            Target::Null => 0,
            Target::Wrapping => usize::MAX,
        };
        (piece.source, target)
    }

    pub fn submit(
        &mut self,
        into: usize,
        requests: &[(Piece, (usize, usize))],
        verdicts: &[Verdict],
        mut fresh_id: u64,
    ) -> Expected<()> {
        let rejected = |error| (Err(error), Vec::new());
        let sub_batch = &self.sub_batches[into];
        let capacity = sub_batch.capacity;
        let allowed = capacity - sub_batch.tasks.len();
        if sub_batch.transport != self.transport {
            return rejected(Error::ForeignSubBatch);
        }
        if !self.installed {
            return rejected(Error::NotInstalled);
        }
        if self.quiesced {
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
            let peer = self.peers.reachable(piece.peer).filter(|_| executable);
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
        let mut accepted = Vec::new();
        for (number, group) in groups.iter().enumerate() {
            let verdict = verdicts.get(number).or(verdicts.last());
            let id = match verdict.copied().unwrap_or(Verdict::Accept) {
                Verdict::Accept => {
                    fresh_id += 1;
                    fresh_id - 1
                }
                Verdict::AcceptAs(id) => id,
                Verdict::Refuse(_) => {
                    self.signs.push(group.peer.clone());
                    accepted.push(None);
                    continue;
                }
            };
            accepted.push(Some(self.batches.len()));
            self.batches.push(Batch {
                transport: self.transport,
                id,
                peer: group.peer.clone(),
                tasks: group.pieces.len(),
                local: group
                    .pieces
                    .iter()
                    .map(|piece| (piece.0, piece.2))
                    .collect(),
                result: None,
                given_up: false,
            });
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
        (Ok(()), groups.into_iter().map(Call::Submit).collect())
    }

    pub fn poll(&mut self, of: usize, number: i32, answer: Answer) -> Expected<TaskStatus> {
        let sub_batch = &mut self.sub_batches[of];
        if sub_batch.transport != self.transport {
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
        (told, vec![call])
    }

    /// What a terminal task must be told, without a vendor call.
    pub fn terminal(&self, of: usize, number: usize) -> Option<TaskStatus> {
        let sub_batch = &self.sub_batches[of];
        match sub_batch.tasks[number] {
            _ if sub_batch.transport != self.transport => None,
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
                if result != 0 {
                    self.signs.push(self.batches[batch].peer.clone());
                }
            }
            Answer::Error(_) => {}
        }
    }

    /// Vendor batches and tasks without a result.
    pub fn outstanding(&self) -> (usize, usize) {
        let outstanding = self.outstanding_where(|_| true);
        let tasks = outstanding.iter().map(|batch| self.batches[*batch].tasks);
        (outstanding.len(), tasks.sum())
    }

    fn outstanding_where(&self, concerned: impl Fn(&Batch) -> bool) -> Vec<usize> {
        let outstanding = |batch: &Batch| {
            batch.transport == self.transport && batch.result.is_none() && concerned(batch)
        };
        (0..self.batches.len())
            .filter(|batch| outstanding(&self.batches[*batch]))
            .collect()
    }

    /// Checks the questions of a wait, sweep by sweep, and takes their answers:
    /// each sweep asks once about every batch that concerns it and is outstanding,
    /// and there is a next one only while something is left, the deadline has not
    /// passed, and some of it was not given up before.
    fn wait(
        &mut self,
        concerned: impl Fn(&Batch) -> bool,
        patience: Patience,
        asked: &[(u64, Answer)],
        elapsed_ms: u128,
    ) -> Result<Vec<usize>, String> {
        let mut asked = asked;
        loop {
            let mut sweep = self.outstanding_where(&concerned);
            if asked.len() < sweep.len() {
                return Err(format!(
                    "{} batches were not asked about in a sweep",
                    sweep.len() - asked.len()
                ));
            }
            let (now, later) = asked.split_at(sweep.len());
            for (id, answer) in now {
                let of_this_id = |batch: &usize| self.batches[*batch].id == *id;
                let position = sweep.iter().position(of_this_id);
                let position = position.ok_or(format!("nothing to ask about batch {id}"))?;
                self.answered(sweep.remove(position), *answer);
            }
            let left = self.outstanding_where(&concerned);
            let given_up = left.iter().all(|batch| self.batches[*batch].given_up);
            let over = left.is_empty()
                || patience == Patience::Implicit && given_up
                || self.timeout_ms == 0;
            if over && !later.is_empty() {
                return Err(format!("asked on after the wait was over: {later:?}"));
            }
            if later.is_empty() {
                if !over && elapsed_ms < u128::from(self.timeout_ms) {
                    return Err(format!("gave up after {elapsed_ms} ms"));
                }
                for batch in &left {
                    self.batches[*batch].given_up = true;
                }
                return Ok(left);
            }
            asked = later;
        }
    }

    fn timed_out(&self, left: &[usize], asked: &[(u64, Answer)]) -> Error {
        let last_error = asked.iter().rev().find_map(|(_, answer)| match answer {
            Answer::Error(code) => Some(Code(*code)),
            _ => None,
        });
        Error::QuiesceTimeout {
            batches: left.len(),
            tasks: left.iter().map(|batch| self.batches[*batch].tasks).sum(),
            waited_ms: 0,
            last_error,
        }
    }

    pub fn quiesce(&mut self, calls: &[Call], elapsed_ms: u128) -> Result<Expected<()>, String> {
        if !self.installed {
            return Ok((Err(Error::NotInstalled), Vec::new()));
        }
        self.quiesced = true;
        let asked = questions(calls);
        let left = self.wait(|_| true, Patience::Explicit, &asked, elapsed_ms)?;
        let outcome = match left.is_empty() {
            true => Ok(()),
            false => Err(self.timed_out(&left, &asked)),
        };
        Ok((outcome, asked_as_calls(&asked)))
    }

    pub fn uninstall(&mut self, calls: &[Call], elapsed_ms: u128) -> Result<Expected<()>, String> {
        if !self.installed {
            return Ok((Ok(()), Vec::new()));
        }
        self.quiesced = true;
        let asked = questions(calls);
        let left = self.wait(|_| true, Patience::Implicit, &asked, elapsed_ms)?;
        let mut expected = asked_as_calls(&asked);
        if !left.is_empty() {
            return Ok((Err(self.timed_out(&left, &asked)), expected));
        }
        expected.push(Call::Down);
        self.installed = false;
        self.registered.clear();
        Ok((Ok(()), expected))
    }

    /// Like an uninstall that nobody can repeat: what is outstanding then stays so
    /// for ever (C13).
    pub fn drop_transport(
        &mut self,
        calls: &[Call],
        elapsed_ms: u128,
    ) -> Result<Expected<()>, String> {
        let (_, expected) = self.uninstall(calls, elapsed_ms)?;
        self.transport += 1;
        self.installed = false;
        self.registered.clear();
        self.signs.clear();
        self.seen = [0; PEERS];
        self.refreshed = [None; PEERS];
        Ok((Ok(()), expected))
    }

    pub fn register(&mut self, ranges: &[usize], refuse: Option<i32>) -> Expected<()> {
        if !self.installed {
            return (Err(Error::NotInstalled), Vec::new());
        }
        let mut new: Vec<Region> = Vec::new();
        for range in ranges.iter().map(|range| RANGES[*range]) {
            let known = self.registered.iter().chain(&new);
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
                return (Err(error), Vec::new());
            }
            if lengths.is_empty() {
                new.push(range);
            }
        }
        let mut calls = Vec::new();
        if !new.is_empty() {
            calls.push(Call::Register(new.clone()));
            if let Some(code) = refuse {
                let undone = new.iter().rev();
                calls.extend(undone.map(|range| Call::Deregister(range.address)));
                return (Err(refused("smem_trans_batch_register_mem", code)), calls);
            }
        }
        let ranges = ranges.iter().map(|range| RANGES[*range]);
        self.registered.extend(ranges);
        (Ok(()), calls)
    }

    pub fn deregister(
        &mut self,
        range: usize,
        refuse: Option<i32>,
        calls: &[Call],
        elapsed_ms: u128,
    ) -> Result<Expected<()>, String> {
        let range = RANGES[range];
        let registrations = self.registered.iter().filter(|known| **known == range);
        let registrations = registrations.count();
        if !self.installed || registrations == 0 {
            return Ok((Ok(()), Vec::new()));
        }
        let remove_one = |registered: &mut Vec<Region>| {
            if let Some(one) = registered.iter().position(|known| *known == range) {
                registered.swap_remove(one);
            }
        };
        // Others go on using it: there is nothing to wait for.
        if registrations > 1 {
            remove_one(&mut self.registered);
            return Ok((Ok(()), Vec::new()));
        }
        let uses = |batch: &Batch| {
            batch.local.iter().any(|(address, length)| {
                let begin = (*address).max(range.address);
                let end = (address + length).min(range.address + range.length);
                begin < end
            })
        };
        let asked = questions(calls);
        let left = self.wait(uses, Patience::Implicit, &asked, elapsed_ms)?;
        let mut expected = asked_as_calls(&asked);
        if !left.is_empty() {
            let error = Error::RegionBusy {
                address: range.address,
                length: range.length,
                batches: left.len(),
                waited_ms: 0,
            };
            return Ok((Err(error), expected));
        }
        remove_one(&mut self.registered);
        expected.push(Call::Deregister(range.address));
        let outcome = match refuse {
            None => Ok(()),
            Some(code) => Err(refused("smem_trans_deregister_mem", code)),
        };
        Ok((outcome, expected))
    }

    /// What the question at `asked` ought to have been answered with; `told` is
    /// what was answered. A sign may wait for as long as a description was read
    /// again less than a second ago.
    pub fn must_refresh(&mut self, peer: usize, asked: Instant, told: bool) -> bool {
        let endpoint = self.peers.published(peer).0;
        let news = &self.signs[self.seen[peer]..];
        let refresh = news.contains(&endpoint);
        let recent = self.refreshed[peer].is_some_and(|last| asked - last < Duration::from_secs(1));
        if refresh && recent && !told {
            return false;
        }
        if refresh {
            self.refreshed[peer] = Some(Instant::now());
        }
        self.seen[peer] = self.signs.len();
        refresh
    }
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

fn questions(calls: &[Call]) -> Vec<(u64, Answer)> {
    calls
        .iter()
        .filter_map(|call| match call {
            Call::Query(id, answer) => Some((*id, *answer)),
            _ => None,
        })
        .collect()
}

fn asked_as_calls(asked: &[(u64, Answer)]) -> Vec<Call> {
    asked
        .iter()
        .map(|(id, answer)| Call::Query(*id, *answer))
        .collect()
}
