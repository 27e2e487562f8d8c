// SPDX-License-Identifier: Apache-2.0
//! What the core costs by itself, over a backend that costs nothing. For the
//! whole path, with a baseline beside it, see `transport.cpp`.
#![allow(missing_docs)]
#![allow(unsafe_code)] // names memory to a backend by number

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Peer, Query, Refused, Region,
    Request, SubBatch, TaskState, Transport,
};

/// Accepts at once, is done at the first query, copies nothing.
struct Null {
    endpoint: Endpoint,
    submits: AtomicU64,
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
        black_box(batch);
        Ok(BatchId(self.submits.fetch_add(1, Ordering::Relaxed)))
    }

    fn query(&self, _: BatchId) -> Query {
        Query::Done(Code::OK)
    }
}

fn installed() -> Transport {
    let transport = Transport::new();
    let backend = Null {
        endpoint: Endpoint::parse("127.0.0.1:4000").expect("a literal"),
        submits: AtomicU64::new(0),
    };
    transport
        .install_backend(Arc::new(backend), Duration::from_secs(10))
        .expect("the first install");
    transport
}

/// One call: its requests take turns among the peers and the opcodes.
struct Case {
    endpoints: Vec<String>,
    requests: Vec<Request>,
    name: String,
}

impl Case {
    fn new(requests: usize, peers: usize, mixed: bool) -> Self {
        let opcodes = if mixed { 2 } else { 1 };
        let request = |index: usize| Request {
            source: (index + 1) << 16,
            target: (index + 1) << 16,
            length: 1 << 16,
            peer: (index % peers) as u32,
            opcode: [Opcode::WRITE, Opcode::READ][index / peers % opcodes],
        };
        let opcodes = if mixed { "mixed" } else { "one opcode" };
        Self {
            endpoints: (1..=peers)
                .map(|peer| format!("192.168.100.{peer}:45000"))
                .collect(),
            requests: (0..requests).map(request).collect(),
            name: format!("{peers} peers, {opcodes}"),
        }
    }

    fn submit(&self, transport: &Transport) -> SubBatch {
        let sub_batch = transport.allocate(self.requests.len());
        let peers = self.endpoints.iter().map(|endpoint| Peer {
            name: endpoint,
            endpoint,
            problem: "",
        });
        // SAFETY: the backend follows no address.
        let submitted =
            unsafe { transport.submit(&sub_batch, peers, self.requests.iter().copied()) };
        submitted.expect("a submission that fits");
        sub_batch
    }

    /// Task by task, as the engine does.
    fn sweep(&self, transport: &Transport, sub_batch: &SubBatch) {
        for task in 0..self.requests.len() {
            let status = transport.poll(sub_batch, task as i32).expect("an answer");
            assert_eq!(status.state, TaskState::Completed);
        }
    }
}

fn cases(
    criterion: &mut Criterion,
    group: &str,
    mut bench: impl FnMut(&mut criterion::Bencher, &Case),
) {
    let mut group = criterion.benchmark_group(group);
    for requests in [1, 16, 128, 1024, 8192] {
        for (peers, mixed) in [(1, false), (1, true), (8, false), (8, true)] {
            if requests < peers * if mixed { 2 } else { 1 } {
                continue;
            }
            let case = Case::new(requests, peers, mixed);
            group.throughput(Throughput::Elements(requests as u64));
            let id = BenchmarkId::new(&case.name, requests);
            group.bench_with_input(id, &case, &mut bench);
        }
    }
    group.finish();
}

fn cycle(criterion: &mut Criterion) {
    let transport = installed();
    cases(
        criterion,
        "allocate, submit, poll each, free",
        |bencher, case| {
            bencher.iter(|| {
                let sub_batch = case.submit(&transport);
                case.sweep(&transport, &sub_batch);
                transport.free(sub_batch);
            });
        },
    );
}

fn poll(criterion: &mut Criterion) {
    let transport = installed();
    cases(criterion, "poll each, when done", |bencher, case| {
        let sub_batch = case.submit(&transport);
        case.sweep(&transport, &sub_batch);
        bencher.iter(|| case.sweep(&transport, &sub_batch));
        transport.free(sub_batch);
    });
}

criterion_group!(benches, cycle, poll);
criterion_main!(benches);
