// SPDX-License-Identifier: Apache-2.0
//! Submitters, pollers, a registrar and a quiescer on one transport.
//!
//! Rounds are run for a few seconds; longer with
//!
//! ```text
//! MEMFABRIC_THREADS_SECONDS=600 cargo test --release --locked --test threads
//! ```
//!
//! and under ThreadSanitizer, which needs a nightly compiler, with
//!
//! ```text
//! RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
//! TSAN_OPTIONS=suppressions=tests/tsan.supp \
//!     cargo +nightly test --locked --test threads \
//!     --target x86_64-unknown-linux-gnu -- --test-threads=1 --skip emulator
//! ```
//!
//! Valgrind's drd and helgrind are of no use here: they know pthread's locks and
//! take every atomic for a race.
#![allow(missing_docs)]
#![allow(unsafe_code)] // looks at memory that the emulator writes to

mod common;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use common::emulator::{Emulator, config};
use common::*;
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Query, Refused, Region, Request, SubBatch,
    TaskState, TaskStatus, Transport,
};
use parking_lot::Mutex;

const SUBMITTERS: usize = 3;
const POLLERS: usize = 2;
const SHARED_TASKS: usize = 64;
const PIECE: usize = 64;
/// Pieces of memory of each submitter: half to write from, half to write to.
const SLOTS: usize = 32;

fn seconds() -> Duration {
    let given = std::env::var("MEMFABRIC_THREADS_SECONDS").ok();
    let given = given.map(|text| text.parse().expect("MEMFABRIC_THREADS_SECONDS is a number"));
    Duration::from_secs(given.unwrap_or(4))
}

/// Runs rounds until the time is over. A round that never ends is a deadlock,
/// which nothing inside the process can undo, so it ends the program.
fn rounds(name: &str, mut round: impl FnMut(u64)) {
    let (alive, watch) = channel();
    let watchdog = thread::spawn(move || {
        loop {
            match watch.recv_timeout(4 * FOREVER) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("a round has not ended after {:?}: deadlock", 4 * FOREVER);
                    std::process::abort();
                }
            }
        }
    });
    let end = Instant::now() + seconds();
    let mut count = 0;
    while count == 0 || Instant::now() < end {
        count += 1;
        round(count);
        alive.send(()).expect("the watchdog lives");
    }
    drop(alive);
    watchdog.join().expect("no panic");
    eprintln!("{name}: {count} rounds");
}

/// Where a round works: memory, and whom with.
struct Site {
    transport: Transport,
    peers: Vec<String>,
    /// Address of `SUBMITTERS` areas of `SLOTS` pieces each.
    local: usize,
    remote: usize,
    /// Whether the memory is real: bytes are then compared.
    real: bool,
    figures: Figures,
}

#[derive(Default)]
struct Figures {
    completed: AtomicU64,
    failed: AtomicU64,
    freed_early: AtomicU64,
    query_errors: AtomicU64,
    polls: AtomicU64,
    busy: AtomicU64,
    deregistered: AtomicU64,
}

impl Site {
    fn area(&self, submitter: usize) -> Region {
        Region {
            address: self.local + submitter * SLOTS * PIECE,
            length: SLOTS * PIECE,
        }
    }

    /// All of them on this transport, until a quiesce in the middle of it has ended:
    /// it begins after some of the vendor's `submissions`, and `quiesced` is called
    /// the moment it has returned.
    fn round(&self, seed: u64, submissions: impl Fn() -> u64, quiesced: impl FnOnce()) {
        let shared = self.transport.allocate(SHARED_TASKS);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (shared, over) = (&shared, &over);
            let mut threads = Vec::new();
            for number in 0..SUBMITTERS {
                threads.push(scope.spawn(move || self.submit_and_poll(number, seed)));
            }
            threads.push(scope.spawn(move || self.append(shared, seed)));
            for number in 0..POLLERS {
                let seed = seed + number as u64;
                threads.push(scope.spawn(move || self.poll_shared(shared, over, seed)));
            }
            threads.push(scope.spawn(move || self.register(over)));
            let mut random = Random(seed << 8);
            let enough = 10 + random.below(150) as u64;
            while submissions() < enough {
                thread::yield_now();
            }
            self.transport.quiesce().expect("every batch ends");
            quiesced();
            assert_eq!(self.transport.outstanding(), (0, 0));
            over.store(true, Ordering::SeqCst);
            // Joined by name, for a race detector sees that and not a scope's end.
            for thread in threads {
                thread.join().expect("no panic");
            }
        });
        for task in 0..shared.len() {
            let status = self.transport.poll(&shared, task as i32).expect("done");
            assert_ne!(status.state, TaskState::Pending, "quiesce ended it");
        }
        self.transport.free(shared);
        self.transport.uninstall().expect("nothing is outstanding");
        assert_eq!(self.transport.outstanding(), (0, 0));
    }

    fn peers(&self) -> impl Iterator<Item = memfabric_transport::Peer<'_>> {
        self.peers.iter().map(|endpoint| peer(endpoint))
    }

    /// One thread's own sub-batches: submitted to in one or two calls, polled to
    /// their end or freed at once.
    fn submit_and_poll(&self, number: usize, seed: u64) {
        let mut random = Random(seed * 31 + number as u64);
        let area = self.area(number).address;
        let remote = self.remote + number * SLOTS * PIECE;
        for turn in (1..=u8::MAX).cycle() {
            let freed_early = random.below(4) == 0;
            // What is freed early may still be written to: it has slots of its own,
            // the last quarter.
            let (slots, first) = match freed_early {
                true => (SLOTS / 4, SLOTS - SLOTS / 4),
                false => (1 + random.below(SLOTS / 2), 0),
            };
            let mut requests: Vec<Request> = Vec::new();
            for slot in first..first + slots {
                let (at, target) = (area + slot * PIECE, remote + slot * PIECE);
                let peer = random.below(self.peers.len()) as u32;
                if self.real && !freed_early {
                    fill(at, turn);
                }
                requests.push(write(peer, at, target, PIECE));
            }
            let sub_batch = self.transport.allocate(slots);
            let (begin, rest) = requests.split_at(random.below(slots));
            for part in [begin, rest] {
                let outcome =
                    self.transport
                        .vouched_submit(&sub_batch, self.peers(), part.iter().copied());
                match outcome {
                    Ok(()) => {}
                    Err(Error::Quiesced) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            let all = sub_batch.len() == slots;
            if freed_early {
                self.figures.freed_early.fetch_add(1, Ordering::Relaxed);
            } else {
                for (task, request) in requests.iter().enumerate().take(sub_batch.len()) {
                    let status = self.end_of(&sub_batch, task as i32);
                    if status.state == TaskState::Failed {
                        assert_eq!(status.bytes, 0);
                        continue;
                    }
                    assert_eq!(status, completed(PIECE as u64));
                    if self.real {
                        assert_eq!(
                            first_other(request.target, turn),
                            None,
                            "COMPLETED before its bytes had arrived"
                        );
                    }
                }
            }
            self.transport.free(sub_batch);
            if !all {
                return;
            }
        }
    }

    fn end_of(&self, sub_batch: &SubBatch, task: i32) -> TaskStatus {
        loop {
            if let Some(status) = self.polled(sub_batch, task)
                && status.state != TaskState::Pending
            {
                let ended = match status.state {
                    TaskState::Completed => &self.figures.completed,
                    _ => &self.figures.failed,
                };
                ended.fetch_add(1, Ordering::Relaxed);
                return status;
            }
            thread::yield_now();
        }
    }

    /// None after a query error, which says nothing.
    fn polled(&self, sub_batch: &SubBatch, task: i32) -> Option<TaskStatus> {
        self.figures.polls.fetch_add(1, Ordering::Relaxed);
        match self.transport.poll(sub_batch, task) {
            Ok(status) => Some(status),
            Err(Error::QueryFailed { .. }) => {
                self.figures.query_errors.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Appends to a sub-batch that others poll meanwhile.
    fn append(&self, shared: &SubBatch, seed: u64) {
        let mut random = Random(seed * 17);
        // The last submitter's slots that nobody compares.
        let slot = SLOTS - 1;
        let local = self.area(SUBMITTERS - 1).address + slot * PIECE;
        let remote = self.remote + (SUBMITTERS * SLOTS - 1) * PIECE;
        while shared.len() < SHARED_TASKS {
            let begin = shared.len();
            let count = (1 + random.below(4)).min(SHARED_TASKS - begin);
            let requests: Vec<_> = (begin..begin + count)
                .map(|task| write(0, local, remote, 1 + task % PIECE))
                .collect();
            match self
                .transport
                .vouched_submit(shared, self.peers(), requests.into_iter())
            {
                Ok(()) => assert_eq!(shared.len(), begin + count),
                Err(Error::Quiesced) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn poll_shared(&self, shared: &SubBatch, over: &AtomicBool, seed: u64) {
        let mut random = Random(seed * 13);
        let mut ended = HashMap::new();
        while !over.load(Ordering::SeqCst) {
            // The submitters' turn, on a machine with few cores.
            thread::yield_now();
            let tasks = shared.len();
            if tasks == 0 {
                continue;
            }
            let task = random.below(tasks);
            let Some(status) = self.polled(shared, task as i32) else {
                continue;
            };
            match status.state {
                TaskState::Pending => assert!(
                    !ended.contains_key(&task),
                    "task {task} was over and is pending again"
                ),
                TaskState::Completed => {
                    assert_eq!(status.bytes, (1 + task % PIECE) as u64);
                    assert_eq!(*ended.entry(task).or_insert(status), status);
                }
                TaskState::Failed => {
                    assert_eq!(status.bytes, 0);
                    assert_eq!(*ended.entry(task).or_insert(status), status);
                }
            }
        }
    }

    /// Registers and deregisters the memory that the others submit from.
    fn register(&self, over: &AtomicBool) {
        while !over.load(Ordering::SeqCst) {
            let areas: Vec<_> = (0..SUBMITTERS).map(|number| self.area(number)).collect();
            match self.transport.vouched_register(&areas) {
                Ok(()) => {}
                // A removal is still to be made up for.
                Err(Error::RegionLeaving { .. }) => {
                    self.figures.busy.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            thread::yield_now();
            for area in areas {
                match self.transport.deregister(area) {
                    Ok(()) => self.figures.deregistered.fetch_add(1, Ordering::Relaxed),
                    Err(Error::RegionBusy { .. }) => {
                        // New batches kept coming.
                        self.figures.busy.fetch_add(1, Ordering::Relaxed)
                    }
                    Err(error) => panic!("{error}"),
                };
            }
        }
    }
}

fn fill(address: usize, byte: u8) {
    let piece = std::ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: the piece is the calling submitter's, in memory that outlives the
    // round; no batch that uses it is outstanding.
    unsafe { piece.write_bytes(byte, PIECE) };
}

/// The first byte of a piece that is not `byte`.
fn first_other(address: usize, byte: u8) -> Option<(usize, u8)> {
    let piece = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: the piece is the calling submitter's, in memory that outlives the
    // round; its batch is done, so the library has stopped to write to it.
    let piece = unsafe { std::slice::from_raw_parts(piece, PIECE) };
    let other = piece.iter().position(|now| *now != byte);
    other.map(|index| (index, piece[index]))
}

/// A backend that watches over the contract while it is used by many threads.
struct Watchful {
    endpoint: Endpoint,
    seed: u64,
    inside: AtomicUsize,
    quiesced: AtomicBool,
    submissions: AtomicU64,
    state: Mutex<Watched>,
    dropped: Arc<AtomicBool>,
}

#[derive(Default)]
struct Watched {
    batches: Vec<Option<Running>>,
    registered: Vec<Region>,
    leaving: Vec<usize>,
    broken: Vec<String>,
}

/// An accepted batch without a result.
struct Running {
    local: Vec<(usize, usize)>,
    lengths_at: usize,
    queries_left: usize,
}

impl Watchful {
    fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            endpoint: Endpoint::parse("127.0.0.1:4000").expect("a literal"),
            seed,
            inside: AtomicUsize::new(0),
            quiesced: AtomicBool::new(false),
            submissions: AtomicU64::new(0),
            state: Mutex::default(),
            dropped: Arc::default(),
        })
    }

    /// A call about memory may run beside others, but no batch uses that memory
    /// then, nor begins to.
    fn watch_use_of(&self, address: usize, body: impl FnOnce(&mut Watched)) {
        self.state.lock().leaving.push(address);
        thread::yield_now();
        let mut state = self.state.lock();
        body(&mut state);
        state.leaving.retain(|leaving| *leaving != address);
    }

    fn alone<T>(&self, call: &str, body: impl FnOnce(&mut Watched) -> T) -> T {
        let others = self.inside.fetch_add(1, Ordering::SeqCst);
        // Long enough for another call to come in, if one can.
        thread::yield_now();
        let mut state = self.state.lock();
        if others > 0 {
            state
                .broken
                .push(format!("{call} began inside another call"));
        }
        let value = body(&mut state);
        drop(state);
        self.inside.fetch_sub(1, Ordering::SeqCst);
        value
    }
}

impl Drop for Watchful {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

impl Backend for Watchful {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        self.state.lock().registered.extend(regions);
        Ok(())
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        self.watch_use_of(address, |state| {
            let region = state
                .registered
                .iter()
                .position(|region| region.address == address)
                .map(|position| state.registered.swap_remove(position));
            let Some(region) = region else {
                state
                    .broken
                    .push(format!("{address:#x} was not registered"));
                return;
            };
            let busy = state.batches.iter().flatten().any(|batch| {
                let mut pieces = batch.local.iter();
                pieces.any(|(address, length)| region.overlaps(*address, *length))
            });
            if busy {
                state.broken.push(format!("{region:x?} was in use"));
            }
        });
        Ok(())
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        self.alone("submit", |state| {
            if self.quiesced.load(Ordering::SeqCst) {
                let late = "a submission began after quiesce had returned";
                state.broken.push(late.to_owned());
            }
            let earlier = self.submissions.fetch_add(1, Ordering::SeqCst);
            let id = state.batches.len();
            let mut random = Random(self.seed.wrapping_add(earlier));
            if random.below(10) == 0 {
                return Err(Code(-2014).into());
            }
            let pieces = batch.local().iter().zip(batch.lengths());
            let leaving = state.registered.iter().any(|region| {
                let mut pieces = pieces.clone();
                state.leaving.contains(&region.address)
                    && pieces.any(|(address, length)| region.overlaps(*address, *length))
            });
            if leaving {
                let late = "a batch began to use memory that was being deregistered";
                state.broken.push(late.to_owned());
            }
            state.batches.push(Some(Running {
                local: pieces.map(|(local, length)| (*local, *length)).collect(),
                lengths_at: batch.lengths().as_ptr().expose_provenance(),
                queries_left: random.below(5),
            }));
            Ok(BatchId(id as u64))
        })
    }

    fn query(&self, id: BatchId) -> Query {
        self.alone("query", |state| {
            let mut random = Random(self.seed.wrapping_sub(id.0));
            let Some(batch) = &mut state.batches[id.0 as usize] else {
                state
                    .broken
                    .push(format!("batch {id} was queried after its result"));
                return query_error(-2007);
            };
            let then = batch.local.iter().map(|piece| piece.1);
            let lengths = read(batch.lengths_at, batch.local.len());
            if !then.eq(lengths.iter().copied()) {
                state
                    .broken
                    .push(format!("the arrays of batch {id} changed"));
            }
            match batch.queries_left.checked_sub(1) {
                Some(left) => {
                    batch.queries_left = left;
                    match random.below(6) {
                        0 => query_error(-2013),
                        _ => Query::Pending,
                    }
                }
                None => {
                    state.batches[id.0 as usize] = None;
                    done(if random.below(10) == 0 { -1 } else { 0 })
                }
            }
        })
    }
}

/// The library's view of an argument array.
fn read(address: usize, count: usize) -> Vec<usize> {
    let array = std::ptr::with_exposed_provenance::<usize>(address);
    // SAFETY: the contract keeps the array alive and unchanged until the batch is
    // done; a query is about one that is not.
    unsafe { std::slice::from_raw_parts(array, count) }.to_vec()
}

#[test]
fn c15_many_threads_over_a_backend_that_watches_the_contract() {
    let figures = Mutex::new(Figures::default());
    rounds("scripted backend", |seed| {
        let backend = Watchful::new(seed);
        let dropped = Arc::clone(&backend.dropped);
        let transport = Transport::new();
        transport
            .install_backend(Arc::clone(&backend) as Arc<dyn Backend>, FOREVER)
            .expect("installed");
        let mut site = Site {
            transport,
            peers: vec![PEER_A.to_owned(), PEER_B.to_owned()],
            local: 0x10_0000,
            remote: 0x80_0000,
            real: false,
            figures: std::mem::take(&mut figures.lock()),
        };
        site.round(
            seed,
            || backend.submissions.load(Ordering::SeqCst),
            || backend.quiesced.store(true, Ordering::SeqCst),
        );
        *figures.lock() = std::mem::take(&mut site.figures);
        drop(site);
        let state = std::mem::take(&mut *backend.state.lock());
        assert!(state.broken.is_empty(), "round {seed}: {:?}", state.broken);
        assert!(state.batches.iter().all(Option::is_none));
        drop(backend);
        assert!(dropped.load(Ordering::SeqCst), "the library is taken down");
    });
    report(&figures.into_inner());
}

#[test]
fn c09_no_submission_begins_after_quiesce_has_returned_in_many_short_lives() {
    rounds("short lives", |seed| {
        let backend = Watchful::new(seed);
        let transport = Transport::new();
        transport
            .install_backend(Arc::clone(&backend) as Arc<dyn Backend>, FOREVER)
            .expect("installed");
        thread::scope(|scope| {
            let submitters = [(); SUBMITTERS].map(|()| {
                scope.spawn(|| {
                    loop {
                        let sub_batch = transport.allocate(1);
                        match submit(&transport, &sub_batch, &writes(1, 64)) {
                            Ok(()) => {
                                // Its result may be some polls away.
                                let _ = transport.poll(&sub_batch, 0);
                                transport.free(sub_batch);
                            }
                            Err(Error::Quiesced) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            });
            while backend.submissions.load(Ordering::SeqCst) < seed % 8 {
                thread::yield_now();
            }
            transport.quiesce().expect("every batch ends");
            backend.quiesced.store(true, Ordering::SeqCst);
            assert_eq!(transport.outstanding(), (0, 0), "round {seed}");
            for submitter in submitters {
                submitter.join().expect("no panic");
            }
        });
        assert_eq!(transport.outstanding(), (0, 0), "round {seed}");
        let state = backend.state.lock();
        assert!(state.broken.is_empty(), "round {seed}: {:?}", state.broken);
    });
}

#[test]
fn c15_many_threads_over_the_emulator_with_peers_down_inside_calls() {
    let emulator = Emulator::start();
    let figures = Mutex::new(Figures::default());
    rounds("emulator", |seed| {
        let memory = Buffer::new(2 * SUBMITTERS * SLOTS * PIECE);
        // Two targets in one memory: the transport itself and another one.
        let other = Transport::new();
        other.install(&config()).expect("installed");
        let remote = Region {
            address: memory.address() + SUBMITTERS * SLOTS * PIECE,
            length: SUBMITTERS * SLOTS * PIECE,
        };
        other.vouched_register(&[remote]).expect("registered");
        let transport = Transport::new();
        let mut config = config();
        config.timeout = FOREVER;
        transport.install(&config).expect("installed");
        transport.vouched_register(&[remote]).expect("registered");
        let peers = vec![
            transport.endpoint().expect("installed"),
            other.endpoint().expect("installed"),
        ];
        emulator.script(
            "log=200000; late_args; delay=300us@%3; pending=2@%2; submit=-2014@%17; \
             result=-1@%13; query=-2013@%19; peer_down_submit=10.0.0.1:1@%5; \
             peer_down_query=10.0.0.2:2@%7; peer_down_thread_query=10.0.0.3:3@%11; \
             peer_down_thread_submit=10.0.0.4:4@%9; peer_down_deregister=10.0.0.5:5@%2; \
             peer_down_batch_register=10.0.0.6:6@%2",
        );
        let begun = emulator.count("submit");
        let at_quiesce = Cell::new(0);
        let mut site = Site {
            transport,
            peers,
            local: memory.address(),
            remote: remote.address,
            real: true,
            figures: std::mem::take(&mut figures.lock()),
        };
        site.round(
            seed,
            || emulator.count("submit") - begun,
            || at_quiesce.set(emulator.count("submit")),
        );
        *figures.lock() = std::mem::take(&mut site.figures);
        assert_eq!(
            emulator.count("submit"),
            at_quiesce.get(),
            "a submission began after quiesce had returned"
        );
        emulator.assert_no_violation();
        assert_eq!(emulator.count("outstanding"), 0);
        assert_one_at_a_time(&emulator);
        emulator.script("");
        drop(other);
        assert_eq!(emulator.count("handles"), 0);
    });
    report(&figures.into_inner());
}

/// No submission or query of a handle began inside another.
fn assert_one_at_a_time(emulator: &Emulator) {
    let mut last: HashMap<String, (u64, String)> = HashMap::new();
    for line in (0..).map_while(|index| emulator.logged(index)) {
        let serialised = ["smem_trans_batch_copy ", "smem_trans_batch_status_query "];
        if !serialised.iter().any(|name| line.starts_with(name)) {
            continue;
        }
        let field = |name: &str| {
            let value = line.split(' ').find_map(|word| word.strip_prefix(name));
            value.expect("the log has it").to_owned()
        };
        let number = |name| field(name).parse::<u64>().expect("nanoseconds");
        // Lines come in the order of returning, so only the one before can overlap.
        if let Some((end, before)) = last.get(&field("handle=")) {
            assert!(
                number("begin=") >= *end,
                "two calls at once:\n{before}\n{line}"
            );
        }
        last.insert(field("handle="), (number("end="), line));
    }
    assert!(!last.is_empty(), "the log has calls");
}

fn report(figures: &Figures) {
    let count = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
    eprintln!(
        "{} tasks completed, {} failed, {} sub-batches freed early, {} polls, {} query errors, \
         {} ranges deregistered, {} busy",
        count(&figures.completed),
        count(&figures.failed),
        count(&figures.freed_early),
        count(&figures.polls),
        count(&figures.query_errors),
        count(&figures.deregistered),
        count(&figures.busy),
    );
    assert!(count(&figures.completed) > 0 && count(&figures.failed) > 0);
    assert!(count(&figures.freed_early) > 0 && count(&figures.deregistered) > 0);
}

/// Memory that the emulator writes to behind the compiler's back, freed at the
/// end of a round.
struct Buffer(*mut [u8]);

impl Buffer {
    fn new(length: usize) -> Self {
        Self(Box::into_raw(vec![0; length].into_boxed_slice()))
    }

    fn address(&self) -> usize {
        self.0.cast::<u8>().expose_provenance()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: it came from `Box::into_raw`, and the round's transports, which
        // alone use it, are gone.
        drop(unsafe { Box::from_raw(self.0) });
    }
}
