// SPDX-License-Identifier: Apache-2.0
//! What the core costs, in numbers that do not depend on the machine: vendor
//! calls, allocations, memory.
// Counts allocations, by an allocator of its own.
#![allow(unsafe_code, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Peer, Query, Refused, Region,
    Request, SubBatch, TaskState, Transport,
};

thread_local! {
    // Each test has its thread, so tests do not count each other's.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static LIVE_BYTES: Cell<i64> = const { Cell::new(0) };
}

fn count(allocations: u64, bytes: i64) {
    ALLOCATIONS.set(ALLOCATIONS.get() + allocations);
    LIVE_BYTES.set(LIVE_BYTES.get() + bytes);
}

struct Counting;

// SAFETY: every call is the system allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        // SAFETY: the caller's conditions are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, -(layout.size() as i64));
        // SAFETY: the caller's conditions are the same.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(1, size as i64 - layout.size() as i64);
        // SAFETY: the caller's conditions are the same.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations that `body` makes.
fn allocations<T>(body: impl FnOnce() -> T) -> (u64, T) {
    let before = ALLOCATIONS.get();
    let value = body();
    (ALLOCATIONS.get() - before, value)
}

/// Accepts at once, copies nothing, and has results from the moment at which the
/// test says so.
struct Null {
    endpoint: Endpoint,
    done: AtomicBool,
    submits: AtomicU64,
    pieces: AtomicU64,
    queries: AtomicU64,
}

impl Null {
    fn vendor_calls(&self) -> (u64, u64) {
        (
            self.submits.swap(0, Ordering::Relaxed),
            self.queries.swap(0, Ordering::Relaxed),
        )
    }
}

impl Backend for Null {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, _: &[Region]) -> Result<(), Error> {
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        self.pieces.fetch_add(batch.len() as u64, Ordering::Relaxed);
        Ok(BatchId(self.submits.fetch_add(1, Ordering::Relaxed)))
    }

    fn query(&self, _: BatchId) -> Query {
        self.queries.fetch_add(1, Ordering::Relaxed);
        if self.done.load(Ordering::Relaxed) {
            Query::Done(Code::OK)
        } else {
            Query::Pending
        }
    }
}

fn installed(done: bool) -> (Transport, Arc<Null>) {
    let backend = Arc::new(Null {
        endpoint: Endpoint::parse("127.0.0.1:4000").expect("a literal"),
        done: AtomicBool::new(done),
        submits: AtomicU64::new(0),
        pieces: AtomicU64::new(0),
        queries: AtomicU64::new(0),
    });
    let transport = Transport::new();
    transport
        .install_backend(
            Arc::clone(&backend) as Arc<dyn Backend>,
            Duration::from_secs(10),
        )
        .expect("the first install");
    (transport, backend)
}

const ENDPOINTS: [&str; 8] = [
    "10.0.0.1:1001",
    "10.0.0.2:1002",
    "10.0.0.3:1003",
    "10.0.0.4:1004",
    "10.0.0.5:1005",
    "10.0.0.6:1006",
    "10.0.0.7:1007",
    "[fd00::8]:1008",
];

/// One call: its requests take turns among the peers and the opcodes.
struct Case {
    peers: usize,
    opcodes: usize,
    requests: Vec<Request>,
}

impl Case {
    fn new(requests: usize, peers: usize, opcodes: usize) -> Self {
        let request = |index: usize| Request {
            source: 0x10_0000 + index * 4096,
            target: 0x80_0000 + index * 4096,
            length: 4096,
            peer: (index % peers) as u32,
            opcode: [Opcode::WRITE, Opcode::READ][index / peers % opcodes],
        };
        Self {
            peers,
            opcodes,
            requests: (0..requests).map(request).collect(),
        }
    }

    fn every() -> impl Iterator<Item = Self> {
        let shapes = [(1, 1), (1, 2), (8, 1), (8, 2)];
        [1, 16, 128, 1024, 8192]
            .into_iter()
            .flat_map(move |requests| {
                shapes
                    .into_iter()
                    .filter(move |(peers, opcodes)| peers * opcodes <= requests)
                    .map(move |(peers, opcodes)| Self::new(requests, peers, opcodes))
            })
    }

    fn groups(&self) -> u64 {
        (self.peers * self.opcodes) as u64
    }

    fn submit(&self, transport: &Transport, sub_batch: &SubBatch) {
        let peers = ENDPOINTS[..self.peers].iter().map(|endpoint| Peer {
            name: endpoint,
            endpoint,
            problem: "",
        });
        // SAFETY: the backend follows no address.
        let submitted =
            unsafe { transport.submit(sub_batch, peers, self.requests.iter().copied()) };
        submitted.expect("it fits");
    }

    fn sweep(&self, transport: &Transport, sub_batch: &SubBatch, expected: TaskState) {
        for task in 0..self.requests.len() {
            let status = transport.poll(sub_batch, task as i32);
            assert_eq!(status.expect("an answer").state, expected, "task {task}");
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (requests, peers, opcodes) = (self.requests.len(), self.peers, self.opcodes);
        write!(f, "{requests} requests, {peers} peers, {opcodes} opcodes")
    }
}

#[test]
fn a_call_is_one_vendor_call_for_each_peer_and_opcode() {
    for case in Case::every() {
        let (transport, backend) = installed(true);
        let sub_batch = transport.allocate(case.requests.len());
        case.submit(&transport, &sub_batch);
        assert_eq!(backend.vendor_calls(), (case.groups(), 0), "{case}");
        let pieces = backend.pieces.load(Ordering::Relaxed);
        assert_eq!(pieces, case.requests.len() as u64, "{case}");
        transport.free(sub_batch);
    }
}

#[test]
fn a_sweep_is_one_query_for_each_vendor_batch() {
    for case in Case::every() {
        let (transport, backend) = installed(false);
        let sub_batch = transport.allocate(case.requests.len());
        case.submit(&transport, &sub_batch);
        backend.vendor_calls();
        for sweep in 0..3 {
            case.sweep(&transport, &sub_batch, TaskState::Pending);
            assert_eq!(
                backend.vendor_calls(),
                (0, case.groups()),
                "{case}, {sweep}"
            );
        }
        backend.done.store(true, Ordering::Relaxed);
        case.sweep(&transport, &sub_batch, TaskState::Completed);
        assert_eq!(
            backend.vendor_calls(),
            (0, case.groups()),
            "{case}, the last"
        );
        case.sweep(&transport, &sub_batch, TaskState::Completed);
        assert_eq!(backend.vendor_calls(), (0, 0), "{case}, once done");
        transport.free(sub_batch);
    }
}

#[test]
fn the_steady_state_allocates_nothing() {
    for case in Case::every() {
        let (transport, backend) = installed(true);
        let cycle = || {
            let (allocate, sub_batch) = allocations(|| transport.allocate(case.requests.len()));
            backend.done.store(false, Ordering::Relaxed);
            let (submit, ()) = allocations(|| case.submit(&transport, &sub_batch));
            let (pending, ()) =
                allocations(|| case.sweep(&transport, &sub_batch, TaskState::Pending));
            backend.done.store(true, Ordering::Relaxed);
            let (done, ()) =
                allocations(|| case.sweep(&transport, &sub_batch, TaskState::Completed));
            let (free, ()) = allocations(|| transport.free(sub_batch));
            [allocate, submit, pending, done, free]
        };
        let [_, _, polls @ .., _] = cycle();
        assert_eq!(polls, [0, 0], "{case}: even the first polls");
        cycle();
        for _ in 0..10 {
            assert_eq!(
                cycle(),
                [0; 5],
                "{case}: allocate, submit, poll while pending, poll when done, free"
            );
        }
    }
}

#[test]
fn even_a_first_call_does_not_allocate_for_each_request() {
    for case in Case::every() {
        let (transport, _backend) = installed(true);
        let (allocations, sub_batch) = allocations(|| {
            let sub_batch = transport.allocate(case.requests.len());
            case.submit(&transport, &sub_batch);
            sub_batch
        });
        // A group has its batch and three arrays, which grow by doubling.
        let growth = u64::from(case.requests.len().ilog2());
        let allowed = 16 + case.groups() * (1 + 3 * growth);
        assert!(allocations <= allowed, "{case}: {allocations} > {allowed}");
        transport.free(sub_batch);
    }
}

#[test]
fn a_sub_batch_takes_512_bytes_and_at_most_32_for_each_task() {
    for capacity in [1, 128, 8192, 1 << 20] {
        let transport = Transport::new();
        let before = LIVE_BYTES.get();
        let sub_batch = transport.allocate(capacity);
        let bytes = LIVE_BYTES.get() - before;
        assert!(
            bytes > 0 && bytes <= 512 + 32 * capacity as i64,
            "{bytes} bytes for {capacity} tasks"
        );
        drop(sub_batch);
    }
}

#[test]
fn a_million_outstanding_tasks_fit_in_64_mib_beyond_the_argument_arrays() {
    const TASKS: usize = 1_000_000;
    for (requests, peers) in [(128, 8), (5000, 1), (8192, 8)] {
        let case = Case::new(requests, peers, 1);
        let (transport, backend) = installed(false);
        let before = LIVE_BYTES.get();
        let sub_batches: Vec<_> = (0..TASKS.div_ceil(requests))
            .map(|_| {
                let sub_batch = transport.allocate(requests);
                case.submit(&transport, &sub_batch);
                sub_batch
            })
            .collect();
        let (_, tasks) = transport.outstanding();
        assert!(tasks >= TASKS, "{case}: {tasks}");
        let argument_arrays = (tasks * 3 * size_of::<usize>()) as i64;
        let beyond = LIVE_BYTES.get() - before - argument_arrays;
        assert!(
            beyond <= 64 << 20,
            "{case}: {} MiB beyond the argument arrays",
            beyond >> 20
        );
        backend.done.store(true, Ordering::Relaxed);
        transport.quiesce().expect("every batch is done");
        for sub_batch in sub_batches {
            transport.free(sub_batch);
        }
    }
}
