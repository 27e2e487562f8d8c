// SPDX-License-Identifier: Apache-2.0
//! One replay: requests in, sub-batches out, several in flight.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use memfabric_transport::{Opcode, Region, TaskState};

use super::content::{Content, Mismatch};
use super::emulator;
use super::interrupt::Interrupt;
use super::lane::{Lane, Piece};
use super::memory::Memory;
use super::pool::{Claim, Pool};
use super::problem::Problem;

/// Sub-batches that may fail before a replay gives up.
const MOST_FAILURES: u64 = 100;

/// Mismatches that are told one by one.
pub const MISMATCHES_TOLD: usize = 5;

/// Sweeps that only yield before the first pause, and the pause. A pause leaves
/// the core to the library's worker.
const SWEEPS_BEFORE_PAUSE: u32 = 20;
const PAUSE: Duration = Duration::from_micros(20);

/// The longest latency that is told apart, in nanoseconds.
const LONGEST_LATENCY_NS: u64 = 60_000_000_000;

/// The sizes of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Blocks that the target's pool holds.
    pub slots: NonZeroUsize,
    /// Sub-batches in flight.
    pub in_flight: usize,
    /// Blocks that a sub-batch holds.
    pub blocks_per_sub_batch: usize,
}

/// Calls of the library on the way of the data.
#[derive(Clone, Copy, Debug, Default)]
pub struct Calls {
    /// `smem_trans_batch_copy`.
    pub submit: u64,
    /// `smem_trans_batch_status_query`.
    pub query: u64,
}

impl Calls {
    fn so_far() -> Self {
        Self {
            submit: emulator::count(c"submit"),
            query: emulator::count(c"query"),
        }
    }

    fn add(&mut self, now: Self, before: Self) {
        self.submit += now.submit - before.submit;
        self.query += now.query - before.query;
    }
}

/// What was done so far.
#[derive(Clone, Debug)]
pub struct Totals {
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Requests of which everything was submitted.
    pub requests: u64,
    /// Sub-batches that are done.
    pub sub_batches: u64,
    /// Of these, those with a failed task.
    pub failed_sub_batches: u64,
    /// Vendor batches submitted, for which the library need not be asked.
    pub vendor_batches: u64,
    /// Blocks written to the pool.
    pub blocks_written: u64,
    /// Blocks read from the pool.
    pub blocks_read: u64,
    /// Ids that their request had already named.
    pub duplicates: u64,
    /// Tasks that polled FAILED.
    pub failed_tasks: u64,
    /// Polls that were answered with an error.
    pub query_errors: u64,
    /// Blocks that were read and are not what they should be.
    pub mismatches: u64,
    /// The first of them.
    pub first_mismatches: Vec<Mismatch>,
    /// From submission to the poll that saw the last task done, in nanoseconds.
    pub latency: Histogram<u64>,
    /// Calls of the library, as the emulator counted them.
    pub calls: Calls,
    /// Time that the replay took.
    pub elapsed: Duration,
    /// Of it, time that went into making and comparing contents.
    pub contents: Duration,
}

impl Totals {
    /// Bytes moved, both ways.
    pub fn bytes(&self) -> u64 {
        (self.blocks_written + self.blocks_read) * self.block_bytes
    }

    /// Nothing yet.
    pub fn new(block_bytes: usize) -> Self {
        let latency = Histogram::new_with_bounds(1, LONGEST_LATENCY_NS, 3);
        Self {
            block_bytes: block_bytes as u64,
            requests: 0,
            sub_batches: 0,
            failed_sub_batches: 0,
            vendor_batches: 0,
            blocks_written: 0,
            blocks_read: 0,
            duplicates: 0,
            failed_tasks: 0,
            query_errors: 0,
            mismatches: 0,
            first_mismatches: Vec::new(),
            latency: latency.expect("the bounds are constants in order"),
            calls: Calls::default(),
            elapsed: Duration::ZERO,
            contents: Duration::ZERO,
        }
    }
}

/// A sub-batch with memory of its own.
struct Flight {
    staging: Memory,
    pieces: Vec<Piece>,
    /// When it was submitted, if it was.
    submitted: Option<Instant>,
}

/// One replay through one lane.
pub struct Side {
    lane: Box<dyn Lane>,
    pool: Pool,
    /// Where the target's pool begins.
    remote: usize,
    sizes: Sizes,
    content: Content,
    flights: Vec<Flight>,
    in_flight: usize,
    timeout: Duration,
    last_query_error: Option<String>,
    /// Blocks of the current request so far.
    named: HashSet<u64>,
    totals: Totals,
}

impl Side {
    /// A replay to an empty pool at `remote`, with one staging memory a flight.
    pub fn new(
        lane: Box<dyn Lane>,
        remote: usize,
        sizes: Sizes,
        staging: Vec<Memory>,
        timeout: Duration,
    ) -> Self {
        let flights = staging.into_iter().map(|staging| Flight {
            staging,
            pieces: Vec::with_capacity(sizes.blocks_per_sub_batch),
            submitted: None,
        });
        Self {
            lane,
            pool: Pool::new(sizes.slots),
            remote,
            sizes,
            content: Content::of(sizes.block_bytes),
            flights: flights.collect(),
            in_flight: 0,
            timeout,
            last_query_error: None,
            named: HashSet::new(),
            totals: Totals::new(sizes.block_bytes),
        }
    }

    /// What was done so far.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Does something and adds what it took, also if it fails.
    pub fn timed<T>(&mut self, emulated: bool, work: impl FnOnce(&mut Self) -> T) -> T {
        let calls = emulated.then(Calls::so_far);
        let begun = Instant::now();
        let outcome = work(self);
        self.totals.elapsed += begun.elapsed();
        if let Some(before) = calls {
            self.totals.calls.add(Calls::so_far(), before);
        }
        outcome
    }

    /// Trades lanes with another side of the same sizes, and with them what was
    /// done so far, while nothing is in flight.
    pub fn trade(&mut self, other: &mut Self) {
        std::mem::swap(&mut self.lane, &mut other.lane);
        std::mem::swap(&mut self.totals, &mut other.totals);
    }

    /// Its staging memory.
    pub fn regions(&self) -> impl Iterator<Item = Region> {
        self.flights.iter().map(|flight| flight.staging.region())
    }

    /// Every block that the target's pool should hold, with its slot.
    pub fn residents(&self) -> impl Iterator<Item = (u64, usize)> {
        self.pool.residents()
    }

    /// Moves the blocks of one request: one sub-batch, or more if they do not fit
    /// into one. Returns as soon as the last one is submitted.
    pub fn request(&mut self, blocks: &[u64], interrupt: &Interrupt) -> Result<(), Problem> {
        let mut flight = self.free_flight(interrupt)?;
        self.named.clear();
        for block in blocks {
            if !self.named.insert(*block) {
                self.totals.duplicates += 1;
                continue;
            }
            loop {
                if self.flights[flight].pieces.len() == self.sizes.blocks_per_sub_batch {
                    self.launch(flight)?;
                    flight = self.free_flight(interrupt)?;
                }
                match self.pool.claim(*block) {
                    Claim::Read(slot) => break self.add(flight, *block, slot, Opcode::READ),
                    Claim::Write(slot) => break self.add(flight, *block, slot, Opcode::WRITE),
                    // The write is in flight, for a request names a block once.
                    Claim::BeingWritten => self.land_one(interrupt)?,
                    Claim::Full if self.in_flight > 0 => self.land_one(interrupt)?,
                    // The request itself fills the pool.
                    Claim::Full => {
                        self.launch(flight)?;
                        flight = self.free_flight(interrupt)?;
                    }
                }
            }
        }
        self.launch(flight)?;
        self.totals.requests += 1;
        Ok(())
    }

    /// Waits until every sub-batch is done.
    pub fn settle(&mut self, interrupt: &Interrupt) -> Result<(), Problem> {
        while self.in_flight > 0 {
            self.land_one(interrupt)?;
        }
        Ok(())
    }

    /// Submits nothing more, waits for what is in flight and accounts for it.
    /// After an error the library may still use the staging memory.
    pub fn quiesce(&mut self) -> Result<(), memfabric_transport::Error> {
        self.lane.quiesce()?;
        for flight in 0..self.flights.len() {
            if self.flights[flight].submitted.is_some() {
                self.sweep(flight);
            }
            // Blocks that were claimed and never submitted.
            for piece in std::mem::take(&mut self.flights[flight].pieces) {
                self.pool.release(piece.block, piece.opcode == Opcode::READ);
            }
        }
        Ok(())
    }

    /// A flight to put pieces into; waits for one if need be.
    fn free_flight(&mut self, interrupt: &Interrupt) -> Result<usize, Problem> {
        interrupt.check()?;
        self.sweep_all();
        loop {
            let free = |flight: &Flight| flight.submitted.is_none() && flight.pieces.is_empty();
            if let Some(flight) = self.flights.iter().position(free) {
                return Ok(flight);
            }
            self.land_one(interrupt)?;
        }
    }

    fn add(&mut self, flight: usize, block: u64, slot: usize, opcode: Opcode) {
        let flight = &mut self.flights[flight];
        let index = flight.pieces.len();
        let begun = Instant::now();
        if opcode == Opcode::WRITE {
            self.content.fill(flight.staging.block(index), block);
        } else {
            // An earlier flight may have left this very block there.
            flight.staging.poison(index);
        }
        self.totals.contents += begun.elapsed();
        flight.pieces.push(Piece {
            block,
            slot,
            opcode,
            local: flight.staging.address(index),
            remote: self.remote + slot * Memory::stride(self.sizes.block_bytes),
            length: self.sizes.block_bytes,
            state: TaskState::Pending,
        });
    }

    fn launch(&mut self, number: usize) -> Result<(), Problem> {
        let flight = &mut self.flights[number];
        if flight.pieces.is_empty() {
            return Ok(());
        }
        let submitted = Instant::now();
        self.lane.submit(number, &flight.pieces)?;
        flight.submitted = Some(submitted);
        self.in_flight += 1;
        let uses = |opcode| flight.pieces.iter().any(|piece| piece.opcode == opcode);
        self.totals.vendor_batches +=
            u64::from(uses(Opcode::READ)) + u64::from(uses(Opcode::WRITE));
        Ok(())
    }

    /// Waits until a sub-batch is done.
    fn land_one(&mut self, interrupt: &Interrupt) -> Result<(), Problem> {
        let begun = Instant::now();
        let before = self.in_flight;
        let mut sweeps = 0;
        loop {
            self.sweep_all();
            if self.in_flight < before {
                return self.weigh_failures();
            }
            interrupt.check()?;
            if begun.elapsed() > self.timeout {
                return Err(Problem::Stalled {
                    waited_ms: begun.elapsed().as_millis(),
                    in_flight: self.in_flight,
                    last: self.last_query_error.clone(),
                });
            }
            sweeps += 1;
            if sweeps < SWEEPS_BEFORE_PAUSE {
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn weigh_failures(&self) -> Result<(), Problem> {
        match self.totals.failed_sub_batches {
            failures if failures >= MOST_FAILURES => Err(Problem::GaveUp(failures)),
            _ => Ok(()),
        }
    }

    fn sweep_all(&mut self) {
        for flight in 0..self.flights.len() {
            if self.flights[flight].submitted.is_some() {
                self.sweep(flight);
            }
        }
    }

    fn sweep(&mut self, number: usize) {
        let flight = &mut self.flights[number];
        if let Err(error) = self.lane.sweep(number, &mut flight.pieces) {
            self.totals.query_errors += 1;
            self.last_query_error = Some(error.to_string());
        }
        let pending = |piece: &Piece| piece.state == TaskState::Pending;
        if !flight.pieces.iter().any(pending) {
            self.land(number);
        }
    }

    /// Accounts for a sub-batch that is done.
    fn land(&mut self, number: usize) {
        let flight = &mut self.flights[number];
        if let Some(submitted) = flight.submitted.take() {
            let nanoseconds = u64::try_from(submitted.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.totals.latency.saturating_record(nanoseconds);
        }
        self.in_flight -= 1;
        self.totals.sub_batches += 1;
        self.lane.retire(number);

        let begun = Instant::now();
        let mut failed = 0;
        for (index, piece) in flight.pieces.drain(..).enumerate() {
            let done = piece.state == TaskState::Completed;
            let read = piece.opcode == Opcode::READ;
            // A read leaves the pool as it is, also one that fails.
            self.pool.release(piece.block, done || read);
            if !done {
                failed += 1;
            } else if read {
                self.totals.blocks_read += 1;
                let words = flight.staging.block(index);
                if let Err(mismatch) = self.content.check(words, piece.block, piece.slot) {
                    self.totals.mismatches += 1;
                    if self.totals.first_mismatches.len() < MISMATCHES_TOLD {
                        self.totals.first_mismatches.push(mismatch);
                    }
                }
            } else {
                self.totals.blocks_written += 1;
            }
        }
        self.totals.contents += begun.elapsed();
        self.totals.failed_tasks += failed;
        self.totals.failed_sub_batches += u64::from(failed > 0);
    }
}
