// SPDX-License-Identifier: Apache-2.0
//! The paths without a lock under every order that the memory model allows.
//!
//! A processor that hides a missing barrier hides it from every test that runs
//! on it. So loom (`--cfg loom`) runs these with every order of the threads, and
//! with every value that a load may see, and Miri with many of them. Both report
//! a read of the bytes that is not ordered behind the library's write of them.
#![allow(unsafe_code)] // memory without an order of its own

use std::sync::atomic::Ordering;
use std::time::Duration;

#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::{Arc, atomic::AtomicPtr},
    thread,
};
#[cfg(not(loom))]
use std::{
    cell::UnsafeCell,
    sync::{Arc, atomic::AtomicPtr},
    thread,
};

use crate::backend::{Backend, BatchId, CopyBatch, Opcode, Query, Refused};
use crate::batch::SubBatch;
use crate::code::Code;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::region::Region;
use crate::stale::Stale;
use crate::sync::atomic::{AtomicU64, AtomicUsize};
use crate::task::{Peer, Request, TaskState, TaskStatus};
use crate::transport::Transport;

/// Runs `body` in every order that loom finds, or many times.
fn model(body: impl Fn() + Send + Sync + 'static) {
    #[cfg(loom)]
    {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(body);
    }
    #[cfg(not(loom))]
    for _ in 0..if cfg!(miri) { 4 } else { 1000 } {
        body();
    }
}

/// Memory that a transfer writes. Not atomic: an access that is not ordered
/// behind the one before is a data race, which loom and Miri report.
#[derive(Default)]
struct Memory(UnsafeCell<u64>);

// SAFETY: the tests show that no two threads are there at once.
unsafe impl Sync for Memory {}

const MOVED: u64 = 0x600d;

impl Memory {
    fn write(&self) {
        #[cfg(loom)]
        // SAFETY: as for Sync.
        self.0.with_mut(|place| unsafe { *place = MOVED });
        #[cfg(not(loom))]
        // SAFETY: as for Sync.
        unsafe {
            *self.0.get() = MOVED;
        }
    }

    fn read(&self) -> u64 {
        #[cfg(loom)]
        // SAFETY: as for Sync.
        return self.0.with(|place| unsafe { *place });
        #[cfg(not(loom))]
        // SAFETY: as for Sync.
        unsafe {
            *self.0.get()
        }
    }
}

/// For each vendor batch, in the order of submission, what it moves.
type Moved = std::sync::Arc<[Memory; 5]>;

/// A library that has moved the bytes of a batch when it is first asked.
struct Library {
    endpoint: Endpoint,
    submitted: std::sync::atomic::AtomicUsize,
    moved: Moved,
}

impl Backend for Library {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, _: &[Region]) -> Result<(), Error> {
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    unsafe fn submit(&self, _: &mut CopyBatch) -> Result<BatchId, Refused> {
        let number = self.submitted.fetch_add(1, Ordering::Relaxed);
        Ok(BatchId(number as u64))
    }

    fn query(&self, id: BatchId) -> Query {
        self.moved[id.0 as usize].write();
        Query::Done(Code::OK)
    }
}

/// A transport, one sub-batch of it, and what the shim keeps beside that.
struct Engine {
    transport: std::sync::Arc<Transport>,
    sub_batch: SubBatch,
    /// The first vendor batch of the sub-batch.
    first: usize,
    moved: Moved,
    cached: Cached,
}

/// The first call has one task; the second one that needs no transfer, and one
/// that does.
const CALLS: [&[usize]; 2] = [&[8], &[0, 16]];
/// For each task, its length and the number of its vendor batch.
const TASKS: [(u64, Option<usize>); 3] = [(8, Some(0)), (0, None), (16, Some(1))];

impl Engine {
    /// With storage in which each task was another one before, so that an old
    /// value is a wrong one.
    fn new() -> Self {
        let moved = Moved::default();
        let library = Library {
            endpoint: Endpoint::EMPTY,
            submitted: std::sync::atomic::AtomicUsize::new(0),
            moved: std::sync::Arc::clone(&moved),
        };
        let transport = Transport::new();
        transport
            .install_backend(std::sync::Arc::new(library), Duration::from_secs(3600))
            .expect("not yet installed");
        let earlier = Self {
            sub_batch: transport.allocate(TASKS.len()),
            transport: std::sync::Arc::new(transport),
            first: 0,
            moved,
            cached: Cached::default(),
        };
        earlier.submit(&[0, 32, 0]);
        assert_eq!(earlier.poll(1).bytes, 32);
        earlier.next(1)
    }

    /// Frees the sub-batch; the next one gets its storage.
    fn next(self, first: usize) -> Self {
        self.transport.free(self.sub_batch);
        Self {
            sub_batch: self.transport.allocate(TASKS.len()),
            transport: self.transport,
            first,
            moved: self.moved,
            cached: Cached::default(),
        }
    }

    fn submit(&self, call: &[usize]) {
        let peers = [Peer {
            name: "peer",
            endpoint: "10.0.0.1:1",
            problem: "",
        }];
        let requests = call.iter().map(|&length| Request {
            source: 0x1000,
            target: 0x2000,
            length,
            peer: 0,
            opcode: Opcode::READ,
        });
        // SAFETY: the library here follows no address.
        let submitted =
            unsafe { (self.transport).submit(&self.sub_batch, peers.into_iter(), requests) };
        submitted.expect("it fits");
    }

    fn poll(&self, task: usize) -> TaskStatus {
        let polled = self.transport.poll(&self.sub_batch, task as i32);
        polled.expect("no query fails")
    }

    /// Compares an answer with what may be true, and with the bytes.
    fn check(&self, task: usize, status: TaskStatus) {
        let (length, batch) = TASKS[task];
        match status.state {
            TaskState::Completed => {
                assert_eq!(status.bytes, length, "task {task}");
                if let Some(batch) = batch {
                    assert_eq!(self.moved[self.first + batch].read(), MOVED, "task {task}");
                }
            }
            TaskState::Pending => assert!(batch.is_some(), "task {task} needs no transfer"),
            TaskState::Failed => panic!("task {task} has not failed"),
        }
    }
}

/// `MemFabricSubBatch` of `cpp/memfabric_transport.cpp`: the same loads and
/// stores in the same order.
#[derive(Default)]
struct Cached {
    lengths: AtomicPtr<AtomicU64>,
    completed: AtomicUsize,
}

impl Engine {
    /// `MemFabricTransport::getTransferStatus`.
    fn get_transfer_status(&self, task: usize) -> TaskStatus {
        if let Some(bytes) = self.completed(task) {
            return TaskStatus {
                state: TaskState::Completed,
                bytes,
            };
        }
        let status = self.poll(task);
        if status.state == TaskState::Completed && self.sub_batch.is_of_last_batch(task as i32) {
            let lengths = self.sub_batch.completed();
            if !lengths.is_empty() {
                let first = lengths.as_ptr().cast_mut();
                self.cached.lengths.store(first, Ordering::Relaxed);
                self.cached
                    .completed
                    .store(lengths.len(), Ordering::Release);
            }
        }
        status
    }

    fn completed(&self, task: usize) -> Option<u64> {
        let count = self.cached.completed.load(Ordering::Acquire);
        if task >= count {
            return None;
        }
        let lengths = self.cached.lengths.load(Ordering::Relaxed);
        assert!(!lengths.is_null(), "the counter is read first");
        let length = lengths.wrapping_add(task);
        // SAFETY: the array has `count` lengths and is there as long as the
        // sub-batch.
        let length = unsafe { &*length };
        // C++ reads a plain u64.
        #[cfg(loom)]
        // SAFETY: loom checks that nobody writes to it.
        return Some(unsafe { length.unsync_load() });
        #[cfg(not(loom))]
        // SAFETY: nobody writes to it any more, which Miri checks.
        Some(unsafe { *length.as_ptr() })
    }
}

#[test]
fn a_task_shows_what_it_is_and_what_its_transfer_moved() {
    model(|| {
        let engine = Arc::new(Engine::new());
        let pollers = [0, 1].map(|_| {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                for task in (0..engine.sub_batch.len()).rev() {
                    engine.check(task, engine.poll(task));
                }
            })
        });
        for call in CALLS {
            engine.submit(call);
        }
        for poller in pollers {
            poller.join().expect("no panic");
        }
    });
}

#[test]
fn lengths_that_the_shim_keeps_are_those_of_completed_tasks() {
    model(|| {
        let engine = Arc::new(Engine::new());
        let pollers = [0, 1].map(|_| {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                for task in 0..engine.sub_batch.len() {
                    engine.check(task, engine.get_transfer_status(task));
                }
            })
        });
        for call in CALLS {
            engine.submit(call);
        }
        for poller in pollers {
            poller.join().expect("no panic");
        }
    });
}

/// The poller that asks about the last batch first may hear of the others from
/// what the other poller has noted. The first question shows the submission.
#[test]
fn what_one_poller_notes_as_completed_is_so_for_the_other() {
    model(|| {
        let engine = Engine::new();
        for call in CALLS {
            engine.submit(call);
        }
        let engine = Arc::new(engine);
        let poll = |engine: Arc<Engine>, tasks: [usize; 3]| {
            for task in tasks {
                engine.check(task, engine.get_transfer_status(task));
            }
        };
        let other = Arc::clone(&engine);
        let poller = thread::spawn(move || poll(other, [2, 2, 0]));
        poll(engine, [0, 0, 2]);
        poller.join().expect("no panic");
    });
}

#[test]
fn the_last_poller_frees_and_the_next_sub_batch_begins_anew() {
    model(|| {
        let engine = Engine::new();
        for call in CALLS {
            engine.submit(call);
        }
        let engine = Arc::new(engine);
        let poll = |engine: Arc<Engine>| {
            for task in 0..TASKS.len() {
                engine.check(task, engine.poll(task));
            }
            let engine = Arc::try_unwrap(engine).ok()?;
            let engine = engine.next(3);
            assert!(engine.sub_batch.is_empty());
            engine.submit(CALLS[0]);
            engine.check(0, engine.poll(0));
            Some(())
        };
        let other = Arc::clone(&engine);
        let poller = thread::spawn(move || poll(other));
        poll(engine);
        poller.join().expect("no panic");
    });
}

#[test]
fn no_mark_is_lost() {
    model(|| {
        // What a thread has seen is by transport.
        static TRANSPORTS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let transport = TRANSPORTS.fetch_add(1, Ordering::Relaxed);
        let stale = Arc::new(Stale::default());
        let markers = ["10.0.0.1:1", "10.0.0.2:1"].map(|endpoint| {
            let stale = Arc::clone(&stale);
            thread::spawn(move || stale.mark(endpoint))
        });
        let early = stale.must_refresh(transport, 0, b"10.0.0.1:1");
        for marker in markers {
            marker.join().expect("no panic");
        }
        let late = stale.must_refresh(transport, 0, b"10.0.0.1:1");
        assert!(
            early || late,
            "a description is used that should be dropped"
        );
    });
}
