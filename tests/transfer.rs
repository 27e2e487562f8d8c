// SPDX-License-Identifier: Apache-2.0
//! Real bytes between real processes, over the emulator.
#![allow(missing_docs)]
#![allow(unsafe_code)] // looks at memory that another process writes to

mod common;

use std::sync::atomic::{AtomicU8, Ordering};

use common::emulator::{Emulator, Process, config, listen, say};
use common::*;
use memfabric_transport::{Region, Request, Status, TaskStatus, Transport};

/// Memory that other processes write to behind this one's back, so its bytes are
/// atomics.
struct Shared(Box<[AtomicU8]>);

impl Shared {
    fn new(length: usize, byte: impl Fn(usize) -> u8) -> Self {
        Self(
            (0..length)
                .map(|index| AtomicU8::new(byte(index)))
                .collect(),
        )
    }

    fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    fn region(&self) -> Region {
        Region {
            address: self.address(),
            length: self.0.len(),
        }
    }

    fn byte(&self, index: usize) -> u8 {
        self.0[index].load(Ordering::SeqCst)
    }

    /// The first byte that differs from what is expected.
    fn mismatch(&self, range: std::ops::Range<usize>, byte: impl Fn(usize) -> u8) -> Option<usize> {
        range
            .into_iter()
            .find(|index| self.byte(*index) != byte(*index))
    }
}

const LENGTH: usize = 1 << 20;

fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |index| {
        (index
            .wrapping_mul(131)
            .wrapping_add(seed * 89 + (index >> 8))
            % 251) as u8
    }
}

/// Another process with registered memory.
struct Target {
    process: Process,
    endpoint: String,
    address: usize,
}

impl Target {
    fn start(seed: usize) -> Self {
        Self::start_with(seed, &[])
    }

    fn start_with(seed: usize, variables: &[(&str, &str)]) -> Self {
        let seed = seed.to_string();
        let mut variables = variables.to_vec();
        variables.push(("SEED", &seed));
        let mut process = Process::start("target", &variables);
        let endpoint = process.hear();
        let address = process.hear().parse().expect("a number");
        Self {
            process,
            endpoint,
            address,
        }
    }

    /// Whether the target finds `seed`'s pattern in its own memory.
    fn holds(&mut self, seed: usize, from: usize, to: usize) -> String {
        self.process.tell(&format!("check {seed} {from} {to}"));
        self.process.hear()
    }
}

#[test]
#[ignore = "the other process of the tests here"]
fn target() {
    let seed: usize = std::env::var("SEED")
        .expect("set")
        .parse()
        .expect("a number");
    let memory = Shared::new(LENGTH, pattern(seed));
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    say(&transport.endpoint().expect("installed"));
    say(&memory.address().to_string());
    while let Some(line) = listen() {
        let words: Vec<_> = line.split(' ').collect();
        match words.as_slice() {
            ["check", numbers @ ..] => {
                let numbers: Vec<usize> = numbers
                    .iter()
                    .map(|word| word.parse().expect("a number"))
                    .collect();
                let found = memory.mismatch(numbers[1]..numbers[2], pattern(numbers[0]));
                say(&found.map_or("same".to_owned(), |index| format!("differs at {index}")));
            }
            ["withdraw"] => {
                transport.deregister(memory.region()).expect("idle");
                say("withdrawn");
            }
            _ => panic!("unknown order {line}"),
        }
    }
}

/// Installed, with `memory` registered.
fn initiator(memory: &Shared) -> Transport {
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    transport
}

fn transfer(transport: &Transport, targets: &[&Target], requests: &[Request]) -> Vec<TaskStatus> {
    let sub_batch = transport.allocate(requests.len());
    transport
        .vouched_submit(
            &sub_batch,
            targets.iter().map(|target| peer(&target.endpoint)),
            requests.iter().copied(),
        )
        .expect("submitted");
    let statuses = (0..requests.len())
        .map(|task| finish(transport, &sub_batch, task))
        .collect();
    transport.free(sub_batch);
    statuses
}

#[test]
fn reads_and_writes_with_several_peers_in_one_call_move_every_byte() {
    let emulator = Emulator::start();
    let mut targets: Vec<_> = (0..3).map(Target::start).collect();
    let memory = Shared::new(2 * LENGTH, pattern(9));
    let transport = initiator(&memory);
    // Each target's second half is written, its first half read; the pieces of
    // all of them are interleaved.
    let half = LENGTH / 2;
    let pieces = 64;
    let piece = half / pieces;
    let mut requests = Vec::new();
    for index in 0..pieces {
        for (number, target) in targets.iter().enumerate() {
            let at = index * piece;
            let peer = number as u32;
            requests.push(write(
                peer,
                memory.address() + half + at,
                target.address + half + at,
                piece,
            ));
            requests.push(read(
                peer,
                memory.address() + LENGTH + number * (LENGTH / 4) + at / 2,
                target.address + at,
                piece / 2,
            ));
        }
    }
    let statuses = {
        let targets: Vec<_> = targets.iter().collect();
        transfer(&transport, &targets, &requests)
    };
    for (status, request) in statuses.iter().zip(&requests) {
        assert_eq!(*status, completed(request.length as u64));
    }
    assert_eq!(
        emulator.count("submit"),
        6,
        "one vendor call for each peer and opcode"
    );
    for (number, target) in targets.iter_mut().enumerate() {
        assert_eq!(
            target.holds(9, half, LENGTH),
            "same",
            "written to target {number}"
        );
        assert_eq!(
            target.holds(number, 0, half),
            "same",
            "only the second half was written"
        );
        for index in 0..pieces {
            let at = index * piece;
            let local = LENGTH + number * (LENGTH / 4) + at / 2;
            let theirs = pattern(number);
            let shifted = |byte: usize| theirs(byte - local + at);
            assert_eq!(
                memory.mismatch(local..local + piece / 2, shifted),
                None,
                "read from target {number}, piece {index}"
            );
        }
    }
    emulator.assert_no_violation();
    for target in targets {
        target.process.end();
    }
}

#[test]
fn sizes_from_one_byte_up_and_odd_alignments_arrive_whole() {
    let emulator = Emulator::start();
    let mut target = Target::start(1);
    let memory = Shared::new(LENGTH, pattern(5));
    let transport = initiator(&memory);
    let mut at = 0;
    let mut requests = Vec::new();
    for length in [1, 2, 3, 63, 64, 65, 4095, 4096, 4097, 65_537, 262_145] {
        requests.push(write(0, memory.address() + at, target.address + at, length));
        at += length;
    }
    for status in transfer(&transport, &[&target], &requests) {
        assert_ne!(status, TaskStatus::FAILED);
    }
    assert_eq!(target.holds(5, 0, at), "same");
    assert_eq!(
        target.holds(1, at, LENGTH),
        "same",
        "nothing beyond was written"
    );
    emulator.assert_no_violation();
    target.process.end();
}

#[test]
fn unregistered_remote_memory_is_refused_and_never_written() {
    let emulator = Emulator::start();
    let mut target = Target::start(2);
    let memory = Shared::new(LENGTH, pattern(6));
    let transport = initiator(&memory);
    for remote in [target.address + LENGTH - 8, target.address - 8] {
        let requests = [
            write(0, memory.address(), target.address, 64),
            write(0, memory.address(), remote, 16),
        ];
        let statuses = transfer(&transport, &[&target], &requests);
        assert_eq!(
            statuses,
            [TaskStatus::FAILED; 2],
            "the library refuses the whole group"
        );
    }
    assert_eq!(target.holds(2, 0, LENGTH), "same");
    target.process.tell("withdraw");
    assert_eq!(target.process.hear(), "withdrawn");
    let statuses = transfer(
        &transport,
        &[&target],
        &[write(0, memory.address(), target.address, 64)],
    );
    assert_eq!(
        statuses,
        [TaskStatus::FAILED],
        "a withdrawn range is refused"
    );
    assert_eq!(target.holds(2, 0, LENGTH), "same");
    emulator.assert_no_violation();
    target.process.end();
}

#[test]
fn unregistered_local_memory_is_allowed() {
    let _emulator = Emulator::start();
    let mut target = Target::start(3);
    let registered = Shared::new(64, pattern(0));
    let transport = initiator(&registered);
    let memory = Shared::new(4096, pattern(7));
    let request = write(0, memory.address(), target.address, 4096);
    assert_eq!(
        transfer(&transport, &[&target], &[request]),
        [completed(4096)]
    );
    assert_eq!(target.holds(7, 0, 4096), "same");
    target.process.end();
}

#[test]
fn case_38_a_peer_killed_half_way_fails_its_own_tasks_and_nobody_elses() {
    let emulator = Emulator::start();
    let doomed = Target::start(4);
    let mut healthy = Target::start(5);
    let memory = Shared::new(LENGTH, pattern(8));
    let transport = initiator(&memory);
    // Held batches are accepted and not executed: half-way, for certain.
    emulator.script("hang@..1");
    let sub_batch = transport.allocate(2);
    let peers = [peer(&doomed.endpoint), peer(&healthy.endpoint)];
    let requests = [
        write(0, memory.address(), doomed.address, LENGTH),
        write(1, memory.address(), healthy.address, LENGTH),
    ];
    transport
        .vouched_submit(&sub_batch, peers.into_iter(), requests.into_iter())
        .expect("submitted");
    assert_eq!(finish(&transport, &sub_batch, 1), completed(LENGTH as u64));
    let endpoint = doomed.endpoint.clone();
    doomed.process.kill();
    emulator.release();
    assert_eq!(finish(&transport, &sub_batch, 0), TaskStatus::FAILED);
    assert!(transport.must_refresh(1, &endpoint));

    let requests = [
        write(0, memory.address(), 0x1000, 64),
        write(1, memory.address(), healthy.address, 64),
    ];
    let again = transport.allocate(2);
    transport
        .vouched_submit(
            &again,
            [peer(&endpoint), peer(&healthy.endpoint)].into_iter(),
            requests.into_iter(),
        )
        .expect("the dead peer costs its own task alone");
    assert_eq!(finish(&transport, &again, 0), TaskStatus::FAILED);
    assert_eq!(finish(&transport, &again, 1), completed(64));
    assert_eq!(healthy.holds(8, 0, LENGTH), "same");
    transport.quiesce().expect("nothing hangs");
    emulator.assert_no_violation();
    healthy.process.end();
}

#[test]
fn case_38_a_query_that_fails_for_ever_is_an_error_until_quiesce_gives_up() {
    let emulator = Emulator::start();
    let target = Target::start(6);
    let memory = Shared::new(4096, pattern(0));
    let mut config = config();
    config.timeout = TIMEOUT;
    let transport = Transport::new();
    transport.install(&config).expect("installed");
    emulator.script("query=SM_NOT_CONNECTED");
    let sub_batch = transport.allocate(1);
    transport
        .vouched_submit(
            &sub_batch,
            [peer(&target.endpoint)].into_iter(),
            [write(0, memory.address(), target.address, 64)].into_iter(),
        )
        .expect("submitted");
    for _ in 0..3 {
        let error = transport.poll(&sub_batch, 0).expect_err("a query error");
        assert_eq!(error.status(), Status::InternalError);
    }
    let text = transport.quiesce().expect_err("outstanding").to_string();
    assert!(text.contains("SM_NOT_CONNECTED (-2014)"), "{text}");
    emulator.script("");
    assert_eq!(
        finish(&transport, &sub_batch, 0),
        completed(64),
        "a later poll completes it"
    );
    transport.uninstall().expect("nothing is outstanding");
    emulator.assert_no_violation();
    target.process.end();
}

#[test]
fn case_29_the_own_endpoint_is_a_target_like_any_other() {
    let emulator = Emulator::start();
    let memory = Shared::new(8192, pattern(3));
    let transport = initiator(&memory);
    let own = transport.endpoint().expect("installed");
    let sub_batch = transport.allocate(1);
    transport
        .vouched_submit(
            &sub_batch,
            [peer(&own)].into_iter(),
            [read(0, memory.address() + 4096, memory.address(), 4096)].into_iter(),
        )
        .expect("submitted");
    assert_eq!(finish(&transport, &sub_batch, 0), completed(4096));
    let shifted = |index: usize| pattern(3)(index - 4096);
    assert_eq!(memory.mismatch(4096..8192, shifted), None);
    emulator.assert_no_violation();
}

#[test]
fn zero_lengths_beside_others_never_cost_a_strict_library_the_batch() {
    let emulator = Emulator::start();
    emulator.script("refuse_zero");
    let mut target = Target::start(7);
    let memory = Shared::new(4096, pattern(2));
    let transport = initiator(&memory);
    let requests = [
        write(0, memory.address(), target.address, 0),
        write(0, memory.address(), target.address, 4096),
    ];
    assert_eq!(
        transfer(&transport, &[&target], &requests),
        [completed(0), completed(4096)]
    );
    assert_eq!(target.holds(2, 0, 4096), "same");
    target.process.end();
}

#[test]
fn a_result_that_the_library_never_writes_is_a_failure() {
    let emulator = Emulator::start();
    emulator.script("no_result");
    let memory = Shared::new(4096, pattern(2));
    let transport = initiator(&memory);
    let own = transport.endpoint().expect("installed");
    let sub_batch = transport.allocate(1);
    transport
        .vouched_submit(
            &sub_batch,
            [peer(&own)].into_iter(),
            [write(0, memory.address(), memory.address() + 2048, 8)].into_iter(),
        )
        .expect("submitted");
    assert_eq!(finish(&transport, &sub_batch, 0), TaskStatus::FAILED);
}

#[test]
fn argument_arrays_that_are_read_late_are_still_there() {
    let emulator = Emulator::start();
    emulator.script("late_args; delay=20ms");
    let mut target = Target::start(8);
    let memory = Shared::new(LENGTH, pattern(4));
    let transport = initiator(&memory);
    let pieces = 256;
    let piece = LENGTH / pieces;
    let mut batches = Vec::new();
    for index in 0..pieces {
        let sub_batch = transport.allocate(1);
        let at = index * piece;
        transport
            .vouched_submit(
                &sub_batch,
                [peer(&target.endpoint)].into_iter(),
                [write(0, memory.address() + at, target.address + at, piece)].into_iter(),
            )
            .expect("submitted");
        // Half of them are freed at once, with their transfers under way.
        if index % 2 == 0 {
            transport.free(sub_batch);
        } else {
            batches.push(sub_batch);
        }
    }
    transport.quiesce().expect("they all end");
    for sub_batch in batches {
        assert_eq!(finish(&transport, &sub_batch, 0), completed(piece as u64));
        transport.free(sub_batch);
    }
    assert_eq!(target.holds(4, 0, LENGTH), "same");
    emulator.assert_no_violation();
    target.process.end();
}
