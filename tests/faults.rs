// SPDX-License-Identifier: Apache-2.0
//! Faults end to end: two processes, the emulated library, and what goes wrong
//! between them.
//!
//! The short form runs with the other tests. A day's worth of batches is
//!
//! ```text
//! MEMFABRIC_SOAK_BATCHES=1000000 cargo test --release --locked --test faults soak -- --nocapture
//! ```
//!
//! and `MEMFABRIC_FAULT_ROUNDS=1000` is the number of kills in each test that
//! kills a process.
#![allow(missing_docs)]

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::emulator::{Emulator, Process, config, listen, say};
use common::*;
use memfabric_transport::{Error, Region, Request, SubBatch, TaskState, TaskStatus, Transport};

const LENGTH: usize = 64 << 10;
const PIECE: usize = 4 << 10;
const PIECES: usize = LENGTH / PIECE;

fn given(name: &str, otherwise: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is a number, not {text}")),
        Err(_) => otherwise,
    }
}

fn rounds(otherwise: usize) -> usize {
    given("MEMFABRIC_FAULT_ROUNDS", otherwise)
}

/// Memory that other processes read and write, so its bytes are atomics.
struct Memory(Box<[AtomicU8]>);

impl Memory {
    fn new(byte: u8) -> Self {
        Self((0..LENGTH).map(|_| AtomicU8::new(byte)).collect())
    }

    fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    fn region(&self) -> Region {
        Region {
            address: self.address(),
            length: LENGTH,
        }
    }

    fn fill(&self, piece: usize, byte: u8) {
        for place in &self.0[piece * PIECE..(piece + 1) * PIECE] {
            place.store(byte, Ordering::SeqCst);
        }
    }

    fn holds(&self, piece: usize, byte: u8) -> bool {
        self.0[piece * PIECE..(piece + 1) * PIECE]
            .iter()
            .all(|place| place.load(Ordering::SeqCst) == byte)
    }
}

/// Another process with registered memory, all of it filled with one byte.
struct Target {
    process: Process,
    endpoint: String,
    address: usize,
}

impl Target {
    fn start(byte: u8) -> Self {
        let byte = byte.to_string();
        let mut process = Process::start("target", &[("FILLED_WITH", &byte)]);
        let endpoint = process.hear();
        let address = process.hear().parse().expect("a number");
        Self {
            process,
            endpoint,
            address,
        }
    }

    /// Whether `piece` of its memory is full of `byte`.
    fn holds(&mut self, piece: usize, byte: u8) -> bool {
        self.process.tell(&format!("{piece} {byte}"));
        self.process.hear() == "true"
    }
}

#[test]
#[ignore = "the other process of the tests here"]
fn target() {
    let byte = std::env::var("FILLED_WITH").expect("set");
    let memory = Memory::new(byte.parse().expect("a byte"));
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    say(&transport.endpoint().expect("installed"));
    say(&memory.address().to_string());
    while let Some(line) = listen() {
        let (piece, byte) = line.split_once(' ').expect("piece and byte");
        let piece = piece.parse().expect("a number");
        let byte = byte.parse().expect("a byte");
        say(&memory.holds(piece, byte).to_string());
    }
}

fn submit_to(transport: &Transport, sub_batch: &SubBatch, peers: &[&str], requests: &[Request]) {
    let peers = peers.iter().map(|endpoint| peer(endpoint));
    transport
        .vouched_submit(sub_batch, peers, requests.iter().copied())
        .expect("what concerns a peer is no error of the call");
}

/// What a whole life came to.
#[derive(Debug, Default)]
struct Life {
    /// Calls of the transport that answered an error, in order.
    errors: Vec<String>,
    completed: usize,
    failed: usize,
}

impl Life {
    fn note<T>(&mut self, outcome: Result<T, Error>) -> Option<T> {
        outcome
            .map_err(|error| self.errors.push(error.to_string()))
            .ok()
    }

    /// Install, register one and several, write, read, deregister, quiesce,
    /// uninstall. What completes is checked byte by byte.
    fn live(target: &mut Target, byte: u8) -> Self {
        let mut life = Self::default();
        let [one, two, three] = [Memory::new(byte), Memory::new(byte), Memory::new(0)];
        let transport = Transport::new();
        if life.note(transport.install(&config())).is_none() {
            return life;
        }
        life.note(transport.vouched_register(&[one.region()]));
        life.note(transport.vouched_register(&[two.region(), three.region()]));
        // Three vendor batches of their own: written, written, read back.
        let requests = [
            write(0, one.address(), target.address, PIECE),
            write(0, two.address(), target.address + PIECE, PIECE),
            read(0, three.address(), target.address, PIECE),
        ];
        let mut written = [false; 2];
        for (number, request) in requests.into_iter().enumerate() {
            let sub_batch = transport.allocate(1);
            submit_to(&transport, &sub_batch, &[&target.endpoint], &[request]);
            let status = life.end_of(&transport, &sub_batch);
            transport.free(sub_batch);
            let whole = match status.state {
                TaskState::Completed => {
                    assert_eq!(status.bytes, PIECE as u64);
                    true
                }
                _ => {
                    assert_eq!(status, TaskStatus::FAILED);
                    false
                }
            };
            match (number, whole) {
                (0 | 1, true) => {
                    written[number] = true;
                    assert!(target.holds(number, byte), "COMPLETED without its bytes");
                }
                (2, true) if written[0] => assert!(three.holds(0, byte), "read something else"),
                _ => {}
            }
        }
        // One more that is ended by quiesce.
        let last = transport.allocate(1);
        let request = write(0, one.address(), target.address + 2 * PIECE, PIECE);
        submit_to(&transport, &last, &[&target.endpoint], &[request]);
        life.note(transport.quiesce());
        let status = transport.poll(&last, 0).expect("quiesce ended it");
        match status.state {
            TaskState::Completed => life.completed += 1,
            TaskState::Failed => life.failed += 1,
            TaskState::Pending => panic!("quiesce left it pending"),
        }
        transport.free(last);
        for memory in [&one, &two, &three] {
            life.note(transport.deregister(memory.region()));
        }
        transport.uninstall().expect("nothing is outstanding");
        life
    }

    fn end_of(&mut self, transport: &Transport, sub_batch: &SubBatch) -> TaskStatus {
        let deadline = Instant::now() + FOREVER;
        loop {
            let status = self.note(transport.poll(sub_batch, 0));
            match status {
                Some(status) if status.state == TaskState::Completed => {
                    self.completed += 1;
                    return status;
                }
                Some(status) if status.state == TaskState::Failed => {
                    self.failed += 1;
                    return status;
                }
                _ => {}
            }
            assert!(Instant::now() < deadline, "the task never ends");
            thread::yield_now();
        }
    }
}

#[test]
fn each_vendor_call_may_fail_at_each_point_of_a_life() {
    let emulator = Emulator::start();
    let mut target = Target::start(0);
    let mut byte = 0_u8;
    let mut next_byte = || {
        byte = byte % 250 + 1;
        byte
    };
    // Not `init`: a process initialises the library once, and the other tests here
    // may have done so.
    let calls = [
        "config_init",
        "create",
        "get_rpc_port",
        "set_peer_down_callback",
        "set_log_level",
        "register",
        "batch_register",
        "submit",
        "query",
        "deregister",
    ];
    emulator.script("");
    let counts = || calls.map(|call| emulator.count(call));
    let before = counts();
    let life = Life::live(&mut target, next_byte());
    assert_eq!((life.completed, life.failed), (4, 0));
    assert!(life.errors.is_empty(), "{:?}", life.errors);
    let made: BTreeMap<_, _> = calls
        .into_iter()
        .zip(
            counts()
                .iter()
                .zip(before)
                .map(|(after, before)| after - before),
        )
        .collect();
    assert!(made.values().all(|count| *count > 0), "{made:?}");

    let mut faults = 0;
    for (call, count) in &made {
        for occasion in 1..=*count.min(&6) {
            for code in ["SM_ERROR", "SM_NOT_CONNECTED", "42"] {
                let code = match *call {
                    "create" => "null",
                    _ => code,
                };
                emulator.script(&format!("{call}={code}@{occasion}"));
                let life = Life::live(&mut target, next_byte());
                let at = format!("{call}={code}@{occasion}: {life:?}");
                faults += 1;
                let (errors, completed, failed) = (life.errors.len(), life.completed, life.failed);
                match *call {
                    "config_init" | "create" | "get_rpc_port" => {
                        assert_eq!((errors, completed, failed), (1, 0, 0), "{at}");
                    }
                    // Worth a warning, and nothing else.
                    "set_peer_down_callback" | "set_log_level" => {
                        assert_eq!((errors, completed, failed), (0, 4, 0), "{at}");
                    }
                    // Unregistered local memory is allowed. A registration that
                    // failed is undone by deregistrations, so that one of those
                    // may be the fault's occasion.
                    "register" | "batch_register" | "deregister" => {
                        assert_eq!((errors, completed, failed), (1, 4, 0), "{at}");
                    }
                    "submit" => assert_eq!((errors, completed, failed), (0, 3, 1), "{at}"),
                    // Told once by a poll; quiesce takes one and asks again.
                    "query" => {
                        assert!(errors <= 1, "{at}");
                        assert_eq!((completed, failed), (4, 0), "{at}");
                    }
                    _ => unreachable!("{call} is in the list"),
                }
                emulator.assert_no_violation();
                assert_eq!(emulator.count("handles"), 0, "{at}");
            }
        }
    }
    emulator.script("");
    let life = Life::live(&mut target, next_byte());
    assert_eq!((life.completed, life.failed, life.errors.len()), (4, 0, 0));
    eprintln!("{faults} faults in {} lives", faults + 2);
    assert!(faults > 30);
    target.process.end();
}

#[test]
fn case_38_a_peer_killed_at_any_moment_fails_its_own_tasks_alone() {
    let emulator = Emulator::start();
    let mut healthy = Target::start(7);
    let memory = Memory::new(9);
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    let mut random = Random(38);
    let (mut completed_by_doomed, mut failed_by_doomed) = (0, 0);
    for round in 0..rounds(15) {
        emulator.script("delay=50us@%3");
        let doomed = Target::start(7);
        let endpoint = doomed.endpoint.clone();
        let address = doomed.address;
        let moment = Duration::from_micros(random.below(3000) as u64);
        let killed = thread::scope(|scope| {
            let killer = scope.spawn(|| {
                let begun = Instant::now();
                while begun.elapsed() < moment {
                    thread::yield_now();
                }
                doomed.process.kill();
            });
            let mut after = 0;
            // On until the peer has been gone for a while.
            while after < 3 {
                after += usize::from(killer.is_finished());
                let sub_batch = transport.allocate(3);
                let byte = 1 + random.below(200) as u8;
                memory.fill(0, byte);
                memory.fill(1, 0);
                let requests = [
                    write(0, memory.address(), address, PIECE),
                    read(0, memory.address() + PIECE, address + PIECE, PIECE),
                    write(1, memory.address(), healthy.address, PIECE),
                ];
                submit_to(
                    &transport,
                    &sub_batch,
                    &[&endpoint, &healthy.endpoint],
                    &requests,
                );
                for task in 0..2 {
                    match finish(&transport, &sub_batch, task).state {
                        TaskState::Completed => completed_by_doomed += 1,
                        _ => failed_by_doomed += 1,
                    }
                }
                let read = transport.poll(&sub_batch, 1).expect("terminal");
                if read.state == TaskState::Completed {
                    assert!(memory.holds(1, 7), "COMPLETED without its bytes");
                }
                let other = finish(&transport, &sub_batch, 2);
                assert_eq!(other, completed(PIECE as u64), "round {round}: B lost it");
                assert!(healthy.holds(0, byte), "round {round}: B's bytes");
                transport.free(sub_batch);
            }
            killer.join()
        });
        killed.expect("no panic");
        assert!(transport.must_refresh(round as u64, &endpoint));
        assert_eq!(transport.outstanding(), (0, 0));
    }
    emulator.assert_no_violation();
    transport.quiesce().expect("nothing hangs");
    transport.uninstall().expect("nothing is outstanding");
    eprintln!("{completed_by_doomed} completed before, {failed_by_doomed} failed after kills");
    assert!(completed_by_doomed > 0 && failed_by_doomed > 0);
    healthy.process.end();
}

#[test]
fn an_initiator_killed_at_any_moment_leaves_its_target_in_service() {
    let emulator = Emulator::start();
    let memory = Memory::new(1);
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    let half = Region {
        address: memory.address(),
        length: LENGTH / 2,
    };
    transport.vouched_register(&[half]).expect("registered");
    let endpoint = transport.endpoint().expect("installed");
    let address = memory.address().to_string();
    let mut random = Random(7);
    for _ in 0..rounds(8) {
        let variables = [("TARGET", endpoint.as_str()), ("ADDRESS", &address)];
        let mut initiator = Process::start("initiator", &variables);
        assert_eq!(initiator.hear(), "first batch completed");
        let moment = Instant::now() + Duration::from_micros(random.below(3000) as u64);
        while Instant::now() < moment {
            thread::yield_now();
        }
        initiator.kill();
        for piece in PIECES / 2..PIECES {
            assert!(memory.holds(piece, 1), "written beyond what is registered");
        }
    }
    // The target goes on as target and as initiator.
    let sub_batch = transport.allocate(1);
    let request = write(0, memory.address() + LENGTH / 2, memory.address(), PIECE);
    submit_to(&transport, &sub_batch, &[&endpoint], &[request]);
    assert_eq!(finish(&transport, &sub_batch, 0), completed(PIECE as u64));
    assert!(memory.holds(0, 1));
    transport.deregister(half).expect("idle");
    transport.uninstall().expect("nothing is outstanding");
    emulator.assert_no_violation();
}

#[test]
#[ignore = "the other process of an_initiator_killed_at_any_moment_leaves_its_target_in_service"]
fn initiator() {
    let endpoint = std::env::var("TARGET").expect("set");
    let address: usize = std::env::var("ADDRESS")
        .expect("set")
        .parse()
        .expect("a number");
    let memory = Memory::new(200);
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    let requests: Vec<_> = (0..PIECES / 2)
        .map(|piece| {
            let at = piece * PIECE;
            write(0, memory.address() + at, address + at, PIECE)
        })
        .collect();
    for batch in 0.. {
        let sub_batch = transport.allocate(requests.len());
        submit_to(&transport, &sub_batch, &[&endpoint], &requests);
        let status = finish(&transport, &sub_batch, 0);
        transport.free(sub_batch);
        if batch == 0 {
            assert_eq!(status, completed(PIECE as u64));
            say("first batch completed");
        }
    }
}

#[test]
fn a_target_that_comes_back_on_another_port_is_found_after_one_refresh() {
    let emulator = Emulator::start();
    const SEGMENT: u64 = 7;
    let memory = Memory::new(3);
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    // What the engine has cached about the segment, in this thread.
    let old = Target::start(0);
    let mut cached = (old.endpoint.clone(), old.address);
    let transfer = |(endpoint, address): &(String, usize)| {
        let sub_batch = transport.allocate(1);
        let request = write(0, memory.address(), *address, PIECE);
        submit_to(&transport, &sub_batch, &[endpoint], &[request]);
        let status = finish(&transport, &sub_batch, 0);
        transport.free(sub_batch);
        status
    };
    assert!(!transport.must_refresh(SEGMENT, &cached.0));
    assert_eq!(transfer(&cached), completed(PIECE as u64));
    let mut current = old;
    for _ in 0..rounds(3) {
        current.process.kill();
        let mut next = Target::start(0);
        assert_ne!(next.endpoint, cached.0, "another port");
        // The stale description costs one task, and is then dropped.
        if !transport.must_refresh(SEGMENT, &cached.0) {
            assert_eq!(transfer(&cached), TaskStatus::FAILED);
            // At once, or when the second since the last one has passed.
            until("a refresh is asked for", || {
                transport.must_refresh(SEGMENT, &cached.0)
            });
        }
        cached = (next.endpoint.clone(), next.address);
        assert_eq!(transfer(&cached), completed(PIECE as u64));
        assert!(
            !transport.must_refresh(SEGMENT, &cached.0),
            "once is enough"
        );
        assert!(next.holds(0, 3));
        current = next;
    }
    emulator.assert_no_violation();
    current.process.end();
}

#[test]
fn c11_a_library_that_hangs_past_the_timeout_is_reported_and_may_still_finish() {
    let emulator = Emulator::start();
    let mut target = Target::start(0);
    let memory = Memory::new(5);
    let mut config = config();
    config.timeout = TIMEOUT;
    let transport = Transport::new();
    transport.install(&config).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    emulator.script("hang@2");
    let sub_batch = transport.allocate(3);
    for piece in 0..3 {
        let at = piece * PIECE;
        let request = write(0, memory.address() + at, target.address + at, PIECE);
        submit_to(&transport, &sub_batch, &[&target.endpoint], &[request]);
    }
    let begun = Instant::now();
    let error = transport.quiesce().expect_err("one hangs");
    assert!(begun.elapsed() >= TIMEOUT);
    let text = error.to_string();
    assert!(text.contains("1 vendor batches with 1 tasks"), "{text}");
    assert_eq!(finish(&transport, &sub_batch, 0), completed(PIECE as u64));
    assert_eq!(finish(&transport, &sub_batch, 2), completed(PIECE as u64));
    let pending = transport.poll(&sub_batch, 1).expect("no query error");
    assert_eq!(pending, TaskStatus::PENDING);
    assert!(target.holds(1, 0), "nothing was moved yet");
    let busy = transport.deregister(memory.region()).expect_err("in use");
    assert!(
        matches!(busy, Error::RegionBusy { batches: 1, .. }),
        "{busy}"
    );
    transport.uninstall().expect_err("outstanding");
    assert_eq!(
        (emulator.count("destroy"), emulator.count("uninit")),
        (0, 0)
    );

    emulator.release();
    assert_eq!(finish(&transport, &sub_batch, 1), completed(PIECE as u64));
    assert!(target.holds(1, 5), "it was executed after all");
    transport.deregister(memory.region()).expect("idle");
    transport.uninstall().expect("nothing is outstanding");
    emulator.assert_no_violation();
    target.process.end();
}

#[test]
fn c12_a_query_that_blocks_past_the_timeout_is_waited_for() {
    let emulator = Emulator::start();
    let memory = Memory::new(5);
    let mut config = config();
    config.timeout = TIMEOUT;
    let transport = Transport::new();
    transport.install(&config).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    let own = transport.endpoint().expect("installed");
    let sub_batch = transport.allocate(1);
    let request = write(0, memory.address(), memory.address() + PIECE, PIECE);
    submit_to(&transport, &sub_batch, &[&own], &[request]);
    emulator.script("block_query@1");
    thread::scope(|scope| {
        let quiescer = scope.spawn(|| transport.quiesce());
        let deadline = Instant::now() + FOREVER;
        while emulator.count("blocked") == 0 {
            assert!(Instant::now() < deadline, "quiesce never asked");
            thread::yield_now();
        }
        let late = Instant::now() + 2 * TIMEOUT;
        while Instant::now() < late {
            thread::yield_now();
        }
        assert!(!quiescer.is_finished(), "returned under a vendor call");
        emulator.release();
        quiescer.join().expect("no panic").expect("it ended");
    });
    assert_eq!(
        transport.poll(&sub_batch, 0).expect("done"),
        completed(PIECE as u64)
    );
    emulator.assert_no_violation();
}

#[test]
fn exhausted_descriptors_are_an_error_or_a_failed_task_and_never_a_crash() {
    let _emulator = Emulator::start();
    let target = Target::start(0);
    let address = target.address.to_string();
    let variables = [("TARGET", target.endpoint.as_str()), ("ADDRESS", &address)];
    let mut told = BTreeMap::new();
    let mut worked = false;
    for descriptors in (5..=32).chain([64]) {
        let mut process =
            Process::start_limited("with_few_descriptors", ("-n", descriptors), &variables);
        let said = process.hear();
        process.end();
        worked |= said == "completed";
        *told.entry(said).or_insert(0) += 1;
    }
    eprintln!("{told:#?}");
    assert!(worked, "enough descriptors were enough: {told:?}");
    assert!(
        told.len() >= 2,
        "too few descriptors were noticed: {told:?}"
    );
    target.process.end();
}

#[test]
#[ignore = "the other process of exhausted_descriptors_are_an_error_or_a_failed_task_and_never_a_crash"]
fn with_few_descriptors() {
    let endpoint = std::env::var("TARGET").expect("set");
    let address: usize = std::env::var("ADDRESS")
        .expect("set")
        .parse()
        .expect("a number");
    let memory = Memory::new(1);
    let transport = Transport::new();
    match transport.install(&config()) {
        Ok(()) => {
            transport
                .vouched_register(&[memory.region()])
                .expect("registered");
            let sub_batch = transport.allocate(1);
            let request = write(0, memory.address(), address, PIECE);
            submit_to(&transport, &sub_batch, &[&endpoint], &[request]);
            let status = finish(&transport, &sub_batch, 0);
            say(match status.state {
                TaskState::Completed => "completed",
                _ => "task failed",
            });
            transport.uninstall().expect("nothing is outstanding");
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("smem_trans_") || text.contains("libmf_smem.so"),
                "the error names what failed: {text}"
            );
            say(&text);
            drop(transport);
        }
    }
}

#[test]
fn a_soak_of_batches_leaves_memory_flat() {
    let emulator = Emulator::start();
    let mut target = Target::start(0);
    let batches = given("MEMFABRIC_SOAK_BATCHES", 6_000);
    let memory = Memory::new(0);
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    // Now and then something goes wrong, for that must not leak either.
    emulator.script("pending=1@%5; result=-2012@%101; query=-2013@%211; submit=-2014@%307");
    let mut after_warm_up = 0;
    let mut verified = 0;
    let (mut done, mut failed) = (0, 0);
    for batch in 0..batches {
        if batch == batches / 4 {
            after_warm_up = resident_bytes();
        }
        let pieces = 1 + batch % 8;
        let sub_batch = transport.allocate(pieces);
        let byte = 1 + (batch % 250) as u8;
        if batch % 64 == 0 {
            memory.fill(0, byte);
        }
        let requests: Vec<_> = (0..pieces)
            .map(|piece| write(0, memory.address(), target.address + piece * PIECE, PIECE))
            .collect();
        submit_to(&transport, &sub_batch, &[&target.endpoint], &requests);
        if batch % 97 == 0 {
            // Freed with its tasks pending.
            transport.free(sub_batch);
            continue;
        }
        let state = loop {
            match transport.poll(&sub_batch, 0) {
                Ok(status) if status.state != TaskState::Pending => break status.state,
                Ok(_) | Err(Error::QueryFailed { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        };
        match state {
            TaskState::Completed => done += 1,
            _ => failed += 1,
        }
        if batch % 64 == 0 && state == TaskState::Completed {
            assert!(target.holds(pieces - 1, byte), "batch {batch}");
            verified += PIECE;
        }
        transport.free(sub_batch);
        if transport.outstanding().0 > 64 {
            // What was freed early is only asked about by waits.
            transport.deregister(memory.region()).expect("it ends");
            transport
                .vouched_register(&[memory.region()])
                .expect("registered");
        }
    }
    let grown = resident_bytes().saturating_sub(after_warm_up);
    transport.quiesce().expect("all of them end");
    transport.uninstall().expect("nothing is outstanding");
    emulator.assert_no_violation();
    eprintln!(
        "{batches} batches: {done} completed, {failed} failed, {verified} bytes verified, \
         {grown} bytes more memory than after a quarter of them"
    );
    assert!(done > batches * 9 / 10 && failed > 0);
    assert!(grown < 512 << 10, "{grown} bytes more");
    target.process.end();
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages = statm.split(' ').nth(1).expect("the second number");
    pages.parse::<usize>().expect("a number") * 4096
}
