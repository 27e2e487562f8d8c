// SPDX-License-Identifier: Apache-2.0
//! How the core's time grows with what a caller may have much of: each case at
//! one, ten and a hundred times a size at which it once was quadratic. Linear is
//! a ratio of 1, or little above it where memory leaves the caches.
#![allow(missing_docs)]
#![allow(unsafe_code)] // names memory to a backend by number

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Peer, Query, Refused, Region,
    Request, SubBatch, TaskState, Transport,
};
use tracing::span;

/// Copies nothing; a batch is pending while its number is in `pending`.
struct Null {
    endpoint: Endpoint,
    submits: AtomicU64,
    pending: std::ops::Range<u64>,
    refuses: bool,
}

impl Backend for Null {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        black_box(regions);
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        black_box(batch);
        if self.refuses {
            return Err(Refused::from(Code(-2014)));
        }
        Ok(BatchId(self.submits.fetch_add(1, Ordering::Relaxed)))
    }

    fn query(&self, id: BatchId) -> Query {
        if self.pending.contains(&id.0) {
            Query::Pending
        } else {
            Query::Done(Code::OK)
        }
    }
}

fn installed(pending: std::ops::Range<u64>, refuses: bool) -> Transport {
    let transport = Transport::new();
    let backend = Null {
        endpoint: Endpoint::parse("127.0.0.1:4000").expect("a literal"),
        submits: AtomicU64::new(0),
        pending,
        refuses,
    };
    transport
        .install_backend(Arc::new(backend), Duration::from_millis(1))
        .expect("the first install");
    transport
}

/// One request of a peer of its own if there is more than one peer.
fn request(index: usize, peers: usize) -> Request {
    Request {
        source: (index + 1) << 12,
        target: (index + 1) << 12,
        length: 1 << 12,
        peer: (index % peers) as u32,
        opcode: Opcode::WRITE,
    }
}

fn submit(transport: &Transport, sub_batch: &SubBatch, peers: &[String], count: usize) {
    let peer = |endpoint| Peer {
        name: endpoint,
        endpoint,
        problem: "",
    };
    let requests = (0..count).map(|index| request(index, peers.len()));
    // SAFETY: the backend follows no address.
    let submitted =
        unsafe { transport.submit(sub_batch, peers.iter().map(|name| peer(name)), requests) };
    submitted.expect("a submission that fits");
}

fn one_peer() -> Vec<String> {
    vec!["192.168.1.1:45000".to_owned()]
}

struct Cost {
    time: Duration,
    /// Pages that the kernel gave, which cost more than the work in them.
    pages: u64,
}

fn timed(body: impl FnOnce()) -> Cost {
    let before = pages();
    let begun = Instant::now();
    body();
    let time = begun.elapsed();
    let pages = pages() - before;
    Cost { time, pages }
}

/// Minor page faults of this process so far.
fn pages() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("linux");
    let (_, fields) = stat.rsplit_once(')').expect("the program's name");
    let faults = fields.split_ascii_whitespace().nth(7).expect("minflt");
    faults.parse().expect("a number")
}

/// Submissions, each of one task, that are freed while it is pending, beside as
/// many that the vendor never ends.
fn freed_with_tasks_pending(count: usize) -> Cost {
    let transport = installed(0..count as u64, false);
    let peers = one_peer();
    let freed = || {
        for _ in 0..count {
            let sub_batch = transport.allocate(1);
            submit(&transport, &sub_batch, &peers, 1);
            transport.free(sub_batch);
        }
    };
    freed();
    timed(freed)
}

/// Sub-batches of 64 after so many of one task were freed.
fn larger_sub_batches_than_those_that_are_kept(count: usize) -> Cost {
    let transport = installed(0..0, false);
    let small: Vec<_> = (0..count).map(|_| transport.allocate(1)).collect();
    small.into_iter().for_each(|small| transport.free(small));
    timed(|| {
        for _ in 0..count {
            transport.free(transport.allocate(64));
        }
    })
}

/// A sweep over tasks that all have a vendor batch of their own, the first of
/// which is slow. (What the shim looks at after each is counted by a unit test.)
fn sweep_behind_a_slow_batch(count: usize) -> Cost {
    let transport = installed(0..1, false);
    let peers = one_peer();
    let sub_batch = transport.allocate(count);
    for _ in 0..count {
        submit(&transport, &sub_batch, &peers, 1);
    }
    let time = timed(|| {
        for task in 0..count as i32 {
            let status = transport.poll(&sub_batch, task).expect("an answer");
            let state = [TaskState::Completed, TaskState::Pending][usize::from(task == 0)];
            assert_eq!(status.state, state);
        }
    });
    transport.free(sub_batch);
    time
}

fn regions(count: usize) -> Vec<Region> {
    (0..count)
        .map(|index| Region {
            address: (index + 1) << 12,
            length: 1 << 12,
        })
        .collect()
}

fn ranges_of_one_registration(count: usize) -> Cost {
    let transport = installed(0..0, false);
    let regions = regions(count);
    // SAFETY: the backend follows no address.
    timed(|| unsafe { transport.register(&regions) }.expect("new ranges"))
}

/// One removal after the other, with a batch outstanding in each range.
fn removals_beside_batches(count: usize) -> Cost {
    let transport = installed(0..u64::MAX, false);
    let regions = regions(count + 1);
    // SAFETY: the backend follows no address.
    unsafe { transport.register(&regions) }.expect("new ranges");
    let sub_batch = transport.allocate(count);
    submit(&transport, &sub_batch, &one_peer(), count);
    // No piece of the batch is in the last range.
    let time = timed(|| {
        transport.deregister(regions[count]).expect("not in use");
    });
    transport.free(sub_batch);
    time
}

fn peers_of_one_call(count: usize) -> Cost {
    let transport = installed(0..0, false);
    let peers: Vec<_> = (0..count)
        .map(|peer| format!("10.{}.{}.{}:45000", peer >> 16, peer >> 8 & 255, peer & 255))
        .collect();
    let sub_batch = transport.allocate(count);
    let time = timed(|| submit(&transport, &sub_batch, &peers, count));
    transport.free(sub_batch);
    time
}

fn refused_submissions(count: usize) -> Cost {
    let transport = installed(0..0, true);
    let peers = one_peer();
    timed(|| {
        for _ in 0..count {
            let sub_batch = transport.allocate(1);
            submit(&transport, &sub_batch, &peers, 1);
            transport.free(sub_batch);
        }
    })
}

fn capacity_that_nobody_uses(count: usize) -> Cost {
    let transport = installed(0..0, false);
    timed(|| transport.free(transport.allocate(count)))
}

/// Counts log lines.
struct Lines;

static LINES: AtomicU64 = AtomicU64::new(0);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn main() {
    tracing::subscriber::set_global_default(Lines).expect("the only one");
    type Case = (&'static str, usize, fn(usize) -> Cost);
    let cases: [Case; 8] = [
        ("B1 freed while pending", 20_000, freed_with_tasks_pending),
        (
            "B2 larger than what is kept",
            4_000,
            larger_sub_batches_than_those_that_are_kept,
        ),
        (
            "B3 sweep behind a slow batch",
            16_000,
            sweep_behind_a_slow_batch,
        ),
        (
            "B4 ranges of a registration",
            50_000,
            ranges_of_one_registration,
        ),
        ("B4 peers of a call", 4_000, peers_of_one_call),
        ("B4 removal beside pieces", 100_000, removals_beside_batches),
        ("B6 refused submissions", 1_000, refused_submissions),
        (
            "B9 capacity nobody uses",
            1 << 17,
            capacity_that_nobody_uses,
        ),
    ];
    println!(
        "{:<30} {:>10} {:>12} {:>9} {:>7} {:>8} {:>6}",
        "", "size", "ms", "ns each", "ratio", "pages", "lines"
    );
    for (name, size, case) in cases {
        let mut first = 0.0;
        for size in [size, 10 * size, 100 * size] {
            LINES.store(0, Ordering::Relaxed);
            let Cost { time, pages } = case(size);
            let each = time.as_nanos() as f64 / size as f64;
            if first == 0.0 {
                first = each;
            }
            println!(
                "{name:<30} {size:>10} {:>12.3} {each:>9.1} {:>7.2} {pages:>8} {:>6}",
                time.as_secs_f64() * 1e3,
                each / first,
                LINES.load(Ordering::Relaxed)
            );
        }
    }
}
