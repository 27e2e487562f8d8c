// SPDX-License-Identifier: Apache-2.0
//! The completion contract over a library whose copies block: queues, workers,
//! and what ends when. The library is a scripted one; the real one is in
//! `tests/published.rs`.
#![allow(missing_docs)]
#![allow(unsafe_code)] // forks

mod common;
mod model {
    pub mod allocator;
}

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::blocking::{Blocking, Copied, answer_about};
use common::emulator::{Process, say};
use common::*;
use memfabric_transport::vendor::v1::{Pace, Queued};
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Query, Request, SubBatch,
    TaskStatus, Transport,
};
use model::allocator::Poisoning;

/// Freed arguments are not what they were.
#[global_allocator]
static ALLOCATOR: Poisoning = Poisoning;

/// Longer than a test can run on.
const NEVER: Duration = Duration::from_secs(3600);

struct Machine {
    transport: Transport,
    queue: Arc<Queued<Blocking>>,
    library: Blocking,
}

/// A pace at which nothing but the patience is waited for.
fn at_once(patience: Duration) -> Pace {
    Pace {
        idle: NEVER,
        grace: Duration::ZERO,
        confirmation: Duration::ZERO,
        attempts: (Duration::ZERO, Duration::from_millis(1)),
        ..Pace::new(patience)
    }
}

impl Machine {
    fn with(patience: Duration) -> Self {
        Self::at(at_once(patience))
    }

    fn at(pace: Pace) -> Self {
        let library = Blocking::new();
        let queue = Arc::new(Queued::with_pace(library.clone(), pace));
        let transport = Transport::new();
        transport
            .install_backend(Arc::clone(&queue) as Arc<dyn Backend>, TIMEOUT)
            .expect("the first install");
        Self {
            transport,
            queue,
            library,
        }
    }

    fn new() -> Self {
        Self::with(Duration::ZERO)
    }

    fn submit(&self, requests: &[Request]) -> SubBatch {
        let sub_batch = self.transport.allocate(requests.len());
        submit(&self.transport, &sub_batch, requests).expect("submitted");
        sub_batch
    }

    /// The terminal status of a task whose queries may fail before.
    fn end_of(&self, sub_batch: &SubBatch, task: i32) -> TaskStatus {
        let mut end = TaskStatus::PENDING;
        until("the task ends", || {
            end = self
                .transport
                .poll(sub_batch, task)
                .unwrap_or(TaskStatus::PENDING);
            end != TaskStatus::PENDING
        });
        end
    }

    fn poll(&self, sub_batch: &SubBatch) -> TaskStatus {
        // The first answer about a task may be old news.
        let _ = self.transport.poll(sub_batch, 0).expect("no query error");
        self.transport.poll(sub_batch, 0).expect("no query error")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Nothing of this program waits for ever.
        self.library.answer_all(0);
        if !thread::panicking() {
            assert_eq!(self.library.faults(), Vec::<String>::new());
        }
    }
}

fn batch(peer: &str, number: usize) -> CopyBatch {
    let mut batch = CopyBatch::default();
    batch.reset(Endpoint::parse(peer).expect("an endpoint"), Opcode::WRITE);
    batch.push(0x1000 + number, 0x2000, 8);
    batch
}

#[test]
fn a_submission_returns_while_its_copy_blocks_and_its_end_is_the_answer() {
    for (code, expected) in [(0, completed(64)), (-2000, TaskStatus::FAILED)] {
        let machine = Machine::new();
        let sub_batch = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
        let [copy] = &machine.library.begun(PEER_A, 1)[..] else {
            panic!("one copy for one batch");
        };
        let asked = Copied {
            opcode: Opcode::WRITE,
            pieces: vec![(0x1000, 0x2000, 64)],
        };
        assert_eq!(*copy, asked);
        assert_eq!(machine.poll(&sub_batch), TaskStatus::PENDING);
        machine.library.answer(PEER_A, code);
        assert_eq!(finish(&machine.transport, &sub_batch, 0), expected);
        assert_eq!(machine.library.all_begun(), 1);
    }
}

#[test]
fn a_copy_that_blocks_holds_up_no_other_peer() {
    let machine = Machine::new();
    let blocked = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
    machine.library.begun(PEER_A, 1);
    // One call for both peers, and more to the other.
    let both = machine.submit(&[read(0, 0x1100, 0x2100, 1), read(1, 0x1200, 0x2200, 2)]);
    for round in 0..100 {
        let other = machine.submit(&[write(1, 0x3000, 0x4000 + round, 32)]);
        machine.library.answer(PEER_B, 0);
        if round == 0 {
            machine.library.answer(PEER_B, 0);
            assert_eq!(finish(&machine.transport, &both, 1), completed(2));
        }
        assert_eq!(finish(&machine.transport, &other, 0), completed(32));
    }
    assert_eq!(machine.poll(&blocked), TaskStatus::PENDING);
    assert_eq!(machine.poll(&both), TaskStatus::PENDING);
    assert_eq!(machine.library.begun(PEER_A, 1).len(), 1, "one at a time");
    machine.library.answer(PEER_A, 0);
    assert_eq!(finish(&machine.transport, &blocked, 0), completed(64));
    machine.library.answer(PEER_A, 0);
    assert_eq!(finish(&machine.transport, &both, 0), completed(1));
}

#[test]
fn batches_of_one_peer_are_copied_one_at_a_time_and_in_order() {
    const BATCHES: usize = 50;
    let machine = Machine::new();
    let sub_batches: Vec<_> = (0..BATCHES)
        .map(|number| {
            let request = match number % 2 {
                0 => write(0, 0x1000 + number, 0x2000, 1 + number),
                _ => read(0, 0x1000 + number, 0x2000, 1 + number),
            };
            machine.submit(&[request])
        })
        .collect();
    for (number, sub_batch) in sub_batches.iter().enumerate() {
        let begun = machine.library.begun(PEER_A, number + 1);
        assert_eq!(begun.len(), number + 1);
        let copy = &begun[number];
        assert_eq!(copy.pieces, [(0x1000 + number, 0x2000, 1 + number)]);
        assert_eq!(copy.opcode, [Opcode::WRITE, Opcode::READ][number % 2]);
        assert_eq!(machine.poll(sub_batch), TaskStatus::PENDING);
        machine.library.answer(PEER_A, 0);
        let status = finish(&machine.transport, sub_batch, 0);
        assert_eq!(status, completed(1 + number as u64));
    }
    assert_eq!(machine.queue.workers(), 1);
}

#[test]
fn each_peer_of_many_keeps_its_order_under_many_submitters() {
    const PEERS: usize = 8;
    const EACH: usize = 500;
    let library = Blocking::new();
    library.answer_all(0);
    let queue = Queued::with_idle(library.clone(), Duration::ZERO, Duration::from_millis(1));
    thread::scope(|scope| {
        for peer in 0..PEERS {
            let (queue, library) = (&queue, &library);
            scope.spawn(move || {
                let name = format!("10.0.1.{peer}:1000");
                // The arguments stay until the answer is in.
                let mut batches: Vec<_> = (0..EACH).map(|number| batch(&name, number)).collect();
                let ids: Vec<_> = batches
                    .iter_mut()
                    .map(|batch| queue.vouched_submit(batch).expect("accepted"))
                    .collect();
                for id in ids {
                    assert_eq!(answer_about(queue, id), Query::Done(Code(0)));
                }
                let begun = library.begun(&name, EACH);
                let order = begun.iter().map(|copy| copy.pieces[0].0 - 0x1000);
                assert!(order.eq(0..EACH), "{name}: {begun:?}");
            });
        }
    });
    assert_eq!(library.faults(), Vec::<String>::new());
    assert!(queue.workers() <= PEERS, "{} workers", queue.workers());
}

#[test]
fn workers_are_bounded_and_whoever_waits_for_one_gets_one() {
    const MOST: usize = 512;
    const PEERS: usize = MOST + 20;
    let library = Blocking::new();
    let queue = Queued::with_idle(library.clone(), Duration::ZERO, NEVER);
    let name = |peer: usize| format!("10.1.{}.{}:1000", peer / 256, peer % 256);
    let mut batches: Vec<_> = (0..PEERS).map(|peer| batch(&name(peer), peer)).collect();
    let ids: Vec<_> = batches
        .iter_mut()
        .map(|batch| queue.vouched_submit(batch).expect("accepted"))
        .collect();
    library.running(MOST);
    assert_eq!((queue.workers(), library.all_begun()), (MOST, MOST));
    // The worker of the first goes on to one that had none.
    library.answer(&name(0), 0);
    assert_eq!(answer_about(&queue, ids[0]), Query::Done(Code(0)));
    until("one more has begun", || library.all_begun() == MOST + 1);
    assert_eq!(queue.workers(), MOST);
    library.answer_all(0);
    for id in &ids[1..] {
        assert_eq!(answer_about(&queue, *id), Query::Done(Code(0)));
    }
    assert_eq!(library.all_begun(), PEERS);
    drop(queue);
    // The workers were waited for, and let go of the library.
    assert_eq!(library.holders(), 1);
    assert_eq!(library.faults(), Vec::<String>::new());
}

#[test]
fn workers_leave_when_idle_and_come_back() {
    let library = Blocking::new();
    library.answer_all(0);
    let queue = Queued::with_idle(library, Duration::ZERO, Duration::from_millis(1));
    assert_eq!(queue.workers(), 0, "none before the first submission");
    for round in 0..20 {
        let mut batch = batch(PEER_A, round);
        let id = queue.vouched_submit(&mut batch).expect("accepted");
        assert_eq!(answer_about(&queue, id), Query::Done(Code(0)));
        until("the worker leaves", || queue.workers() == 0);
    }
}

#[test]
fn a_worker_is_called_again_as_long_as_it_stays() {
    let library = Blocking::new();
    library.answer_all(0);
    let queue = Queued::with_idle(library, Duration::ZERO, NEVER);
    for round in 0..1000 {
        let mut batch = batch([PEER_A, PEER_B][round % 2], round);
        let id = queue.vouched_submit(&mut batch).expect("accepted");
        assert_eq!(answer_about(&queue, id), Query::Done(Code(0)));
    }
    // A few, where a submission came before those that there are were back.
    assert!(queue.workers() < 10, "{} workers", queue.workers());
}

#[test]
fn a_result_is_given_once_and_an_unknown_batch_is_an_error() {
    let library = Blocking::new();
    let queue = Queued::new(library.clone(), Duration::ZERO);
    let unknown = Query::Error(Code(-2007));
    assert_eq!(queue.query(BatchId(1)), unknown);
    let mut batch = batch(PEER_A, 0);
    let id = queue.vouched_submit(&mut batch).expect("accepted");
    assert_eq!(queue.query(id), Query::Pending);
    library.answer(PEER_A, -2000);
    assert_eq!(answer_about(&queue, id), Query::Done(Code(-2000)));
    assert_eq!(queue.query(id), unknown);
    assert_eq!(queue.query(BatchId(u64::MAX)), unknown);
}

#[test]
fn what_a_peer_does_not_know_yet_is_tried_again_within_the_patience() {
    let machine = Machine::with(FOREVER);
    for _ in 0..5 {
        machine.library.answer(PEER_A, -2000);
    }
    machine.library.answer(PEER_A, 0);
    let sub_batch = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
    assert_eq!(finish(&machine.transport, &sub_batch, 0), completed(64));
    let begun = machine.library.begun(PEER_A, 6);
    assert_eq!(begun.len(), 6);
    assert!(begun.iter().all(|copy| *copy == begun[0]), "{begun:?}");
}

#[test]
fn another_answer_ends_the_tries() {
    let machine = Machine::with(FOREVER);
    machine.library.gone(PEER_A, true);
    for code in [-2000, -2000, -1] {
        machine.library.answer(PEER_A, code);
    }
    let sub_batch = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
    assert_eq!(machine.end_of(&sub_batch, 0), TaskStatus::FAILED);
    assert_eq!(machine.library.all_begun(), 3);
}

#[test]
fn nothing_else_is_tried_again() {
    for code in [
        -1,
        -2,
        -2001,
        -2002,
        -2007,
        -2011,
        -2012,
        -2014,
        1,
        i32::MIN,
    ] {
        let machine = Machine::with(FOREVER);
        machine.library.gone(PEER_A, true);
        machine.library.answer(PEER_A, code);
        let sub_batch = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
        let status = machine.end_of(&sub_batch, 0);
        assert_eq!(status, TaskStatus::FAILED, "{code}");
        assert_eq!(machine.library.all_begun(), 1, "{code}");
    }
}

#[test]
fn the_patience_ends_and_the_line_says_what_may_be_wrong() {
    let events = events_of_process();
    for patience in [0, 60] {
        let machine = Machine::with(Duration::from_millis(patience));
        machine.library.answer_all(-2000);
        let begun = Instant::now();
        let peer = format!("10.2.0.1:{}", 1000 + patience);
        let mut batch = batch(&peer, 0);
        let id = machine.queue.vouched_submit(&mut batch).expect("accepted");
        assert_eq!(answer_about(&machine.queue, id), Query::Done(Code(-2000)));
        assert!(begun.elapsed() >= Duration::from_millis(patience));
        let tries = machine.library.all_begun();
        match patience {
            0 => assert_eq!(tries, 1),
            // At least one each 10 ms, at most one each 1 ms.
            _ => assert!((3..=61).contains(&tries), "{tries} tries"),
        }
        let events = events.lock();
        let lines: Vec<_> = events.iter().filter(|line| line.contains(&peer)).collect();
        let [line] = &lines[..] else {
            panic!("one line, not {lines:?}");
        };
        let patience = format!("patience_ms={patience} ");
        for part in [
            "WARN peer or its memory stays unknown",
            "opcode=WRITE",
            &patience,
            "scripted",
        ] {
            assert!(format!("{line} ").contains(part), "{part} in {line}");
        }
    }
}

#[test]
fn quiesce_waits_for_a_copy_that_blocks_and_for_those_behind_it() {
    let machine = Machine::new();
    let sub_batches = [(); 3].map(|()| machine.submit(&[write(0, 0x1000, 0x2000, 64)]));
    machine.library.begun(PEER_A, 1);
    thread::scope(|scope| {
        let quiesce = scope.spawn(|| machine.transport.quiesce());
        until("quiesce has begun", || {
            // Too many in any case, so that nothing is submitted.
            let refused = machine.transport.allocate(1);
            let outcome = submit(&machine.transport, &refused, &writes(2, 8));
            matches!(outcome, Err(Error::Quiesced))
        });
        assert!(
            !quiesce.is_finished(),
            "quiesce returned with a copy running"
        );
        machine.library.answer_all(0);
        quiesce.join().expect("no panic").expect("all have ended");
    });
    assert_eq!(machine.library.all_begun(), 3);
    machine.library.nothing_begins();
    for sub_batch in &sub_batches {
        assert_eq!(machine.poll(sub_batch), completed(64));
    }
    assert_eq!(machine.transport.outstanding(), (0, 0));
}

#[test]
fn a_quiesce_that_times_out_interrupts_nothing_and_a_later_one_succeeds() {
    let machine = Machine::new();
    let running = machine.submit(&writes(2, 64));
    let behind = machine.submit(&writes(1, 8));
    machine.library.begun(PEER_A, 1);
    let error = machine.transport.quiesce().expect_err("the copy blocks");
    match error {
        Error::QuiesceTimeout {
            batches,
            tasks,
            last_error,
            ..
        } => assert_eq!((batches, tasks, last_error), (2, 3, None)),
        other => panic!("{other}"),
    }
    assert_eq!(machine.poll(&running), TaskStatus::PENDING);
    assert_eq!(machine.poll(&behind), TaskStatus::PENDING);
    assert_eq!(machine.library.all_begun(), 1, "still the same call");
    // What was accepted before is still carried out.
    machine.library.answer_all(0);
    machine.transport.quiesce().expect("nothing blocks now");
    assert_eq!(machine.poll(&running), completed(64));
    assert_eq!(machine.poll(&behind), completed(8));
}

#[test]
fn a_sub_batch_freed_early_leaves_its_arguments_in_place() {
    let machine = Machine::new();
    for _ in 0..3 {
        let sub_batch = machine.submit(&writes(100, 64));
        machine.transport.free(sub_batch);
    }
    for number in 1..=3 {
        // Each is read when it begins and again at its end.
        let begun = machine.library.begun(PEER_A, number);
        let pieces: Vec<_> = writes(100, 64)
            .iter()
            .map(|request| (request.source, request.target, request.length))
            .collect();
        assert_eq!(begun[number - 1].pieces, pieces);
        machine.library.answer(PEER_A, 0);
    }
    machine.transport.quiesce().expect("all answered");
}

#[test]
fn c13_teardown_with_a_copy_blocked_leaks_the_worker_and_begins_nothing_more() {
    let mut machine = Machine::new();
    let running = machine.submit(&writes(100, 64));
    let behind = machine.submit(&writes(100, 8));
    let other = machine.submit(&[write(1, 0x1000, 0x2000, 64)]);
    machine.library.begun(PEER_A, 1);
    machine.library.begun(PEER_B, 1);
    for sub_batch in [running, behind, other] {
        machine.transport.free(sub_batch);
    }
    assert_eq!(machine.queue.workers(), 2);
    let (_, events) = events_of(|| drop(std::mem::take(&mut machine.transport)));
    let leaked = |line: &String| line.starts_with("ERROR") && line.contains("leaked on purpose");
    assert_eq!(
        events.iter().filter(|line| leaked(line)).count(),
        1,
        "{events:?}"
    );
    let Machine { queue, library, .. } = &machine;
    library.nothing_begins();
    assert_eq!(Arc::strong_count(queue), 2, "leaked, not dropped");
    assert_eq!(queue.workers(), 2, "nobody interrupted them");
    // The calls end at last; their arguments were still there.
    library.answer_all(0);
    until("the workers leave", || queue.workers() == 0);
    assert_eq!(library.all_begun(), 2, "the batch behind was never begun");
    assert_eq!(library.faults(), Vec::<String>::new());
}

#[test]
fn a_teardown_ends_the_pause_between_two_tries() {
    let library = Blocking::new();
    library.answer(PEER_A, -2000);
    let queue = Queued::with_idle(library.clone(), NEVER, NEVER);
    let mut batch = batch(PEER_A, 0);
    let id = queue.vouched_submit(&mut batch).expect("accepted");
    library.begun(PEER_A, 1);
    // The pauses are 10 ms at most, so it may be within a try as well.
    queue.abandon();
    library.answer_all(-2000);
    assert_eq!(answer_about(&queue, id), Query::Done(Code(-2000)));
    until("the worker leaves", || queue.workers() == 0);
    assert!(library.all_begun() <= 3, "{} tries", library.all_begun());
}

#[test]
fn a01_a_panic_in_a_worker_is_no_ending_and_concerns_its_batch_alone() {
    let machine = Machine::new();
    machine.library.panic_in_next();
    let panicked = machine.submit(&writes(2, 64));
    machine.library.asked(PEER_A, 1);
    let failed = machine.transport.poll(&panicked, 0);
    assert!(
        matches!(failed, Err(Error::QueryFailed { .. })),
        "{failed:?}"
    );
    assert_eq!(machine.transport.outstanding(), (1, 2));
    // The next one is a proof as well.
    machine.library.answer_all(0);
    let next = machine.submit(&writes(1, 64));
    assert_eq!(finish(&machine.transport, &next, 0), completed(64));
    for task in [1, 0] {
        assert_eq!(machine.end_of(&panicked, task), TaskStatus::FAILED);
    }
    assert_eq!(machine.queue.workers(), 1);
}

/// A queue in which a copy to [`PEER_A`] has failed, with no proof.
struct Unproven {
    queue: Arc<Queued<Blocking>>,
    library: Blocking,
    /// The arguments stay until the answer is in.
    _batch: CopyBatch,
    id: BatchId,
}

const FAILED: Query = Query::Error(Code(-1));

impl Unproven {
    /// Where no probe is made before a test submits: the next attempt is far away.
    fn without_probes() -> Self {
        let attempts = (NEVER, NEVER);
        Self::at(Pace {
            attempts,
            ..at_once(Duration::ZERO)
        })
    }

    fn at(pace: Pace) -> Self {
        let library = Blocking::new();
        let queue = Arc::new(Queued::with_pace(library.clone(), pace));
        let mut batch = batch(PEER_A, 0);
        let id = queue.vouched_submit(&mut batch).expect("accepted");
        library.answer(PEER_A, -1);
        // The first attempt, which makes no probe.
        library.asked(PEER_A, 1);
        Self {
            queue,
            library,
            _batch: batch,
            id,
        }
    }

    fn submit(&self, batch: &mut CopyBatch) -> BatchId {
        self.queue.vouched_submit(batch).expect("accepted")
    }

    /// It ends as what it failed with, once.
    fn ends(&self) {
        ends(&self.queue, self.id, -1);
    }
}

fn ends(queue: &Queued<Blocking>, id: BatchId, code: i32) {
    let mut end = Query::Pending;
    until("the batch ends", || {
        end = queue.query(id);
        matches!(end, Query::Done(_))
    });
    assert_eq!(end, Query::Done(Code(code)));
    assert_eq!(queue.query(id), Query::Error(Code(-2007)), "given once");
}

impl Drop for Unproven {
    fn drop(&mut self) {
        self.library.answer_all(0);
        if !thread::panicking() {
            assert_eq!(self.library.faults(), Vec::<String>::new());
        }
    }
}

#[test]
fn a01_a_copy_that_failed_has_not_ended_whatever_its_code() {
    for code in [
        -1,
        -2,
        -2001,
        -2002,
        -2004,
        -2007,
        -2012,
        -2014,
        1,
        i32::MIN,
    ] {
        let machine = Machine::at(Pace {
            attempts: (NEVER, NEVER),
            ..at_once(Duration::ZERO)
        });
        let sub_batch = machine.submit(&[read(0, 0x1000, 0x2000, 64)]);
        machine.library.answer(PEER_A, code);
        machine.library.asked(PEER_A, 1);
        for _ in 0..3 {
            match machine.transport.poll(&sub_batch, 0) {
                Err(Error::QueryFailed { code: failed, .. }) => assert_eq!(failed, Code(code)),
                other => panic!("{code} is no ending: {other:?}"),
            }
        }
        assert_eq!(machine.transport.outstanding(), (1, 1), "{code}");
    }
}

#[test]
fn a01_a_query_is_pending_for_a_grace_before_it_is_an_error() {
    let grace = Duration::from_millis(300);
    let unproven = Unproven::at(Pace {
        grace,
        attempts: (NEVER, NEVER),
        ..at_once(Duration::ZERO)
    });
    let failed = Instant::now();
    let mut answer = unproven.queue.query(unproven.id);
    while answer == Query::Pending {
        assert!(failed.elapsed() < FOREVER, "for ever");
        answer = unproven.queue.query(unproven.id);
    }
    assert_eq!(answer, FAILED);
    // It failed a moment before this test knew.
    let pending = failed.elapsed() + Duration::from_millis(100);
    assert!(pending >= grace, "an error after {pending:?}");
}

#[test]
fn a01_a_later_copy_to_the_peer_that_succeeds_ends_it_in_either_direction() {
    for opcode in [Opcode::READ, Opcode::WRITE] {
        let unproven = Unproven::without_probes();
        let mut next = batch(PEER_A, 1);
        next.reset(*next.peer(), opcode);
        next.push(0x1000, 0x2000, 8);
        let id = unproven.submit(&mut next);
        unproven.library.begun(PEER_A, 2);
        assert_eq!(unproven.queue.query(unproven.id), FAILED, "it has begun");
        unproven.library.answer(PEER_A, 0);
        ends(&unproven.queue, id, 0);
        unproven.ends();
    }
}

#[test]
fn a01_a_copy_proves_earlier_ones_of_its_peer_and_none_that_began_later() {
    let unproven = Unproven::without_probes();
    let mut batches = [1, 2, 3].map(|number| batch(PEER_A, number));
    let [second, success, third] = batches.each_mut().map(|batch| unproven.submit(batch));
    let mut elsewhere = batch(PEER_B, 4);
    let elsewhere = unproven.submit(&mut elsewhere);
    unproven.library.answer(PEER_B, -1);
    unproven.library.asked(PEER_B, 1);
    for code in [-2004, 0, -2] {
        unproven.library.answer(PEER_A, code);
    }
    unproven.ends();
    ends(&unproven.queue, second, -2004);
    ends(&unproven.queue, success, 0);
    until("the third has failed", || {
        unproven.queue.query(third) == Query::Error(Code(-2))
    });
    assert_eq!(unproven.queue.query(elsewhere), FAILED, "another peer's");
}

#[test]
fn a01_that_nothing_was_sent_proves_nothing() {
    let unproven = Unproven::without_probes();
    let mut next = batch(PEER_A, 1);
    let id = unproven.submit(&mut next);
    unproven.library.answer(PEER_A, -2000);
    ends(&unproven.queue, id, -2000);
    unproven.library.asked(PEER_A, 2);
    assert_eq!(unproven.queue.query(unproven.id), FAILED);
}

#[test]
fn a01_another_failure_proves_nothing() {
    let unproven = Unproven::without_probes();
    let mut next = batch(PEER_A, 1);
    let id = unproven.submit(&mut next);
    unproven.library.answer(PEER_A, -1);
    until("it fails", || unproven.queue.query(id) == FAILED);
    unproven.library.asked(PEER_A, 2);
    assert_eq!(unproven.queue.query(unproven.id), FAILED);
}

#[test]
fn a01_a_probe_reads_a_byte_of_the_failed_copys_memory_until_one_succeeds() {
    let unproven = Unproven::at(at_once(Duration::ZERO));
    for count in 2..6 {
        let begun = unproven.library.begun(PEER_A, count);
        let Copied { opcode, pieces } = &begun[count - 1];
        let [(local, remote, length)] = pieces[..] else {
            panic!("one piece: {pieces:?}");
        };
        assert_eq!((*opcode, remote, length), (Opcode::READ, 0x2000, 1));
        assert!(
            ![0, 0x1000].contains(&local),
            "not into the caller's memory"
        );
        assert_eq!(unproven.queue.query(unproven.id), FAILED);
        let answer = [-1, -2000, -2, 0][count - 2];
        unproven.library.answer(PEER_A, answer);
    }
    unproven.ends();
    assert_eq!(unproven.library.all_begun(), 5, "and no further one");
    until("the worker has nothing to do", || {
        let mut next = batch(PEER_A, 9);
        let id = unproven.submit(&mut next);
        unproven.library.answer(PEER_A, 0);
        answer_about(&unproven.queue, id) == Query::Done(Code(0))
    });
}

#[test]
fn a01_what_is_submitted_comes_before_the_next_probe() {
    let unproven = Unproven::at(at_once(Duration::ZERO));
    unproven.library.begun(PEER_A, 2);
    let mut batches = [1, 2, 3].map(|number| batch(PEER_A, number));
    let ids = batches.each_mut().map(|batch| unproven.submit(batch));
    unproven.library.answer(PEER_A, -1);
    for (number, id) in ids.into_iter().enumerate() {
        let begun = unproven.library.begun(PEER_A, 3 + number);
        assert_eq!(begun[2 + number].pieces[0].0, 0x1001 + number);
        unproven.library.answer(PEER_A, 0);
        ends(&unproven.queue, id, 0);
    }
    unproven.ends();
}

#[test]
fn a01_a_submission_ends_the_pause_between_two_attempts() {
    let unproven = Unproven::without_probes();
    let mut next = batch(PEER_A, 1);
    let begun = Instant::now();
    let id = unproven.submit(&mut next);
    unproven.library.answer(PEER_A, 0);
    ends(&unproven.queue, id, 0);
    assert!(begun.elapsed() < FOREVER);
}

#[test]
fn a01_the_death_of_the_peer_must_be_said_twice() {
    // Once only.
    let confirmation = Duration::from_millis(20);
    let unproven = Unproven::at(Pace {
        confirmation,
        ..at_once(Duration::ZERO)
    });
    unproven.library.begun(PEER_A, 2);
    unproven.library.gone_once(PEER_A);
    unproven.library.answer(PEER_A, -1);
    // A probe is the attempt's second half, so that the first said no.
    unproven.library.begun(PEER_A, 3);
    assert_eq!(unproven.queue.query(unproven.id), FAILED);
    // Twice.
    unproven.library.gone(PEER_A, true);
    let asked = Instant::now();
    unproven.library.answer(PEER_A, -2000);
    unproven.ends();
    assert!(asked.elapsed() >= confirmation, "no pause between the two");
}

#[test]
fn a01_a_system_that_cannot_tell_proves_nothing() {
    let unproven = Unproven::at(at_once(Duration::ZERO));
    unproven.library.answer_all(-2000);
    unproven.library.asked(PEER_A, 20);
    assert_eq!(unproven.queue.query(unproven.id), FAILED);
    assert!(unproven.library.all_begun() > 2, "it goes on to try");
}

#[test]
fn a01_an_ordinary_death_is_never_seen_as_a_query_error() {
    let library = Blocking::new();
    let queue = Queued::new(library.clone(), Duration::ZERO);
    library.gone(PEER_A, true);
    library.answer(PEER_A, -1);
    let mut batch = batch(PEER_A, 0);
    let id = queue.vouched_submit(&mut batch).expect("accepted");
    assert_eq!(answer_about(&queue, id), Query::Done(Code(-1)));
}

#[test]
fn a01_a_fence_with_no_call_in_flight_ends_the_library_and_every_batch() {
    let unproven = Unproven::without_probes();
    let mut behind = [1, 2].map(|number| batch(PEER_B, number));
    let [running, waiting] = behind.each_mut().map(|batch| unproven.submit(batch));
    unproven.library.begun(PEER_B, 1);
    let queue = &unproven.queue;
    // Under a call it does nothing.
    assert!(!queue.fence());
    assert!(!unproven.library.has_ended());
    assert_eq!(queue.query(unproven.id), FAILED);
    assert_eq!(queue.query(running), Query::Pending);
    // The other peer is not one that a call is made to at once again.
    unproven.library.answer(PEER_B, -1);
    unproven.library.begun(PEER_B, 2);
    unproven.library.answer(PEER_B, -2000);
    unproven.library.asked(PEER_B, 1);
    assert!(queue.fence());
    assert!(unproven.library.has_ended());
    unproven.ends();
    ends(queue, running, -1);
    ends(queue, waiting, -2000);
    until("the workers leave", || queue.workers() == 0);
    assert!(queue.fence(), "a second one does no harm");

    let begun = unproven.library.all_begun();
    let refused = queue.vouched_submit(&mut batch(PEER_A, 3));
    let refused = refused.expect_err("the library has ended");
    assert_eq!(refused.code, Code::NOT_SUBMITTED, "{refused:?}");
    assert!(!refused.reason.is_empty());
    let region = memfabric_transport::Region {
        address: 0x1000,
        length: 64,
    };
    queue
        .vouched_register(&[region])
        .expect_err("nobody is there");
    queue
        .deregister(0x1000)
        .expect("nothing is registered any more");
    assert_eq!(unproven.library.registrations(), 0);
    assert_eq!(unproven.library.all_begun(), begun);
}

#[test]
fn a01_after_a_fence_what_was_never_begun_says_so() {
    let library = Blocking::new();
    let queue = Queued::with_pace(library.clone(), at_once(NEVER));
    let mut batches = [1, 2].map(|number| batch(PEER_A, number));
    let [tried, waiting] = batches
        .each_mut()
        .map(|batch| queue.vouched_submit(batch).expect("accepted"));
    library.answer(PEER_A, -2000);
    // Between two tries no call is in flight; it may be within one as well.
    until("the library ends", || {
        library.answer(PEER_A, -2000);
        queue.fence()
    });
    for id in [tried, waiting] {
        let end = answer_about(&queue, id);
        assert!(
            [Code(-2000), Code::NOT_SUBMITTED]
                .map(Query::Done)
                .contains(&end),
            "{end:?}"
        );
        assert_eq!(queue.query(id), Query::Error(Code(-2007)), "given once");
    }
    drop(queue);
    assert_eq!(library.faults(), Vec::<String>::new());
}

#[test]
fn a01_a_fence_under_a_probe_gives_probes_up_so_that_the_next_one_succeeds() {
    let unproven = Unproven::at(at_once(Duration::ZERO));
    unproven.library.begun(PEER_A, 2);
    assert!(!unproven.queue.fence());
    assert_eq!(unproven.queue.query(unproven.id), FAILED);
    unproven.library.answer(PEER_A, -1);
    // It goes on to ask the system.
    let questions = unproven.library.questions(PEER_A);
    unproven.library.asked(PEER_A, questions + 3);
    assert_eq!(
        unproven.library.begun(PEER_A, 2).len(),
        2,
        "no further probe"
    );
    assert!(unproven.queue.fence());
    unproven.ends();
}

#[test]
fn a01_a_teardown_ends_what_no_proof_could_be_had_for() {
    let mut machine = Machine::at(Pace {
        attempts: (NEVER, NEVER),
        ..at_once(Duration::ZERO)
    });
    let sub_batch = machine.submit(&writes(2, 64));
    machine.library.answer(PEER_A, -1);
    machine.library.asked(PEER_A, 1);
    machine.transport.quiesce().expect_err("not proven");
    assert_eq!(machine.transport.outstanding(), (1, 2));
    let (outcome, events) = events_of(|| machine.transport.uninstall());
    outcome.expect("the library's end is one");
    assert!(machine.library.has_ended());
    assert_eq!(machine.transport.outstanding(), (0, 0));
    assert_eq!(
        machine.transport.poll(&sub_batch, 0).expect("known"),
        TaskStatus::FAILED
    );
    assert!(
        !events.iter().any(|line| line.contains("leaked")),
        "{events:?}"
    );
    machine.transport.free(sub_batch);
    drop(std::mem::take(&mut machine.transport));
}

#[test]
fn a01_a_teardown_under_a_probe_leaks() {
    let mut machine = Machine::new();
    let sub_batch = machine.submit(&writes(2, 64));
    machine.library.answer(PEER_A, -1);
    machine.library.begun(PEER_A, 2);
    machine.transport.free(sub_batch);
    let (_, events) = events_of(|| drop(std::mem::take(&mut machine.transport)));
    assert!(
        events.iter().any(|line| line.contains("leaked")),
        "{events:?}"
    );
    assert!(!machine.library.has_ended());
    machine.library.nothing_begins();
    machine.library.answer_all(-1);
    until("the worker leaves", || machine.queue.workers() == 0);
}

#[test]
fn a01_a_close_ends_the_attempts_at_once() {
    let unproven = Unproven::without_probes();
    unproven.queue.abandon();
    until("the worker leaves", || unproven.queue.workers() == 0);
    assert_eq!(unproven.queue.query(unproven.id), FAILED, "still no proof");
}

#[test]
fn a01_many_unproven_peers_take_turns_where_there_are_too_few_workers() {
    // One worker: the process has room for no other thread.
    Process::start_limited("one_worker", ("-v", 1 << 19), &[("STARVE", "")]).end();
}

#[test]
#[ignore = "the process of a01_many_unproven_peers_…"]
fn one_worker() {
    std::env::var("STARVE").expect("started by the test that limits it");
    let unproven = Unproven::at(Pace {
        attempts: (NEVER, NEVER),
        ..at_once(Duration::ZERO)
    });
    let taken = starve();
    let mut other = batch(PEER_B, 1);
    let id = unproven.submit(&mut other);
    assert_eq!(unproven.queue.workers(), 1);
    unproven.library.answer(PEER_B, 0);
    ends(&unproven.queue, id, 0);
    drop(taken);
}

#[test]
fn a01_an_unproven_peer_is_told_once_and_once_more_when_it_is_proven() {
    let recorded = Process::start("unproven_events", &[]);
    recorded.end();
}

#[test]
#[ignore = "the process of a01_an_unproven_peer_is_told_once_…"]
fn unproven_events() {
    let events = events_of_process();
    let unproven = Unproven::at(at_once(Duration::ZERO));
    for count in 2..20 {
        unproven.library.begun(PEER_A, count);
        unproven.library.answer(PEER_A, [-1, -2000][count % 2]);
    }
    unproven.library.begun(PEER_A, 20);
    let about = |text: &str| {
        let events = events.lock();
        let found = events.iter().filter(|line| line.contains(text));
        found.cloned().collect::<Vec<_>>()
    };
    let [told] = &about("may still be under way, their memory stays in use")[..] else {
        panic!("{:#?}", events.lock());
    };
    for part in ["WARN ", PEER_A, "code=SM_ERROR (-1)", "batches=1"] {
        assert!(told.contains(part), "{part} in {told}");
    }
    let [forgotten] = &about("MF_CONFIG_STORE_HEARTBEAT_TIMEOUT_S")[..] else {
        panic!("{:#?}", events.lock());
    };
    assert!(forgotten.starts_with("WARN"), "{forgotten}");
    unproven.library.answer(PEER_A, 0);
    unproven.ends();
    until("it is told", || !about("are over").is_empty());
    let [over] = &about("failed copies are over")[..] else {
        panic!("{:#?}", events.lock());
    };
    for part in ["INFO ", PEER_A, "batches=1", "elapsed_ms=", "a later copy"] {
        assert!(over.contains(part), "{part} in {over}");
    }
    assert_eq!(events.lock().len(), 3);
}

/// A log sink that panics.
struct Panicking;

impl tracing::Subscriber for Panicking {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event()
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        panic!("a log sink");
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_log_sink_that_panics_ends_no_worker() {
    Process::start("panicking_sink", &[]).end();
}

#[test]
#[ignore = "the process of a_log_sink_that_panics_…"]
fn panicking_sink() {
    tracing::subscriber::set_global_default(Panicking).expect("the first one");
    let unproven = Unproven::at(at_once(Duration::ZERO));
    // Each message of a worker.
    unproven.library.begun(PEER_A, 2);
    unproven.library.answer(PEER_A, -2000);
    unproven.library.begun(PEER_A, 3);
    let mut next = batch(PEER_A, 1);
    let id = unproven.submit(&mut next);
    unproven.library.answer(PEER_A, -1);
    unproven.library.answer(PEER_A, -2000);
    ends(&unproven.queue, id, -2000);
    unproven.library.answer_all(0);
    unproven.ends();
    assert_eq!(unproven.queue.workers(), 1);
}

#[test]
fn a06_a_transfer_to_oneself_is_refused_at_once_with_the_reason() {
    let machine = Machine::with(NEVER);
    let own = machine.queue.endpoint().to_string();
    let refused = machine.queue.vouched_submit(&mut batch(&own, 0));
    let refused = refused.expect_err("the library does not do it");
    assert_eq!(refused.code, Code(-2000));
    assert!(refused.reason.contains("its own process"), "{refused:?}");
    assert!(!refused.doubtful);
    assert_eq!(
        (machine.queue.workers(), machine.library.all_begun()),
        (0, 0)
    );
}

#[test]
fn b08_the_patience_begins_with_the_first_answer() {
    let patience = Duration::from_millis(200);
    let machine = Machine::with(patience);
    let sub_batch = machine.submit(&writes(1, 64));
    machine.library.begun(PEER_A, 1);
    // What is waited for before the first answer, such as a gate, does not count.
    let begun = Instant::now();
    while begun.elapsed() < patience * 2 {
        thread::yield_now();
    }
    machine.library.answer(PEER_A, -2000);
    machine.library.answer(PEER_A, 0);
    assert_eq!(finish(&machine.transport, &sub_batch, 0), completed(64));
}

#[test]
fn b09_threads_that_have_left_are_joined_without_a_submission() {
    const PEERS: usize = 20;
    let library = Blocking::new();
    let queue = Queued::with_idle(library.clone(), Duration::ZERO, Duration::from_millis(1));
    for _ in 0..3 {
        let mut batches: Vec<_> = (0..PEERS)
            .map(|peer| batch(&format!("10.0.3.{peer}:1000"), peer))
            .collect();
        let ids: Vec<_> = batches
            .iter_mut()
            .map(|batch| queue.vouched_submit(batch).expect("accepted"))
            .collect();
        library.running(PEERS);
        library.answer_all(0);
        for id in ids {
            assert_eq!(answer_about(&queue, id), Query::Done(Code(0)));
        }
        until("the workers leave", || queue.workers() == 0);
        until("all but the last are joined", || queue.threads() <= 1);
        library.answer_no_more();
    }
}

#[test]
fn b09_the_failure_to_start_a_thread_is_the_reason_and_not_logged_under_a_lock() {
    Process::start_limited("refused_starving", ("-v", 1 << 19), &[("STARVE", "")]).end();
}

#[test]
#[ignore = "the process of b09_the_failure_to_start_…"]
fn refused_starving() {
    std::env::var("STARVE").expect("started by the test that limits it");
    let library = Blocking::new();
    let queue = Queued::new(library, Duration::ZERO);
    let mut batch = batch(PEER_A, 0);
    let taken = starve();
    let (refused, events) = events_of(|| queue.vouched_submit(&mut batch));
    drop(taken);
    let refused = refused.expect_err("no thread");
    assert_eq!(refused.code, Code(-2002));
    assert!(refused.reason.contains("no thread"), "{refused:?}");
    assert_eq!(events, Vec::<String>::new());
}

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn atexit(function: extern "C" fn()) -> i32;
    fn exit(status: i32) -> !;
}

#[test]
fn a16_a_child_after_fork_leaves_the_library_and_the_threads_alone() {
    // In a process of its own, whose other threads hold no lock at that moment.
    Process::start("forking", &[]).end();
}

#[test]
#[ignore = "the process of a16_a_child_after_fork_…"]
fn forking() {
    let unproven = Unproven::without_probes();
    let mut running = batch(PEER_B, 1);
    let id = unproven.submit(&mut running);
    unproven.library.begun(PEER_B, 1);
    // SAFETY: the child uses what it has of the heap, which the C library keeps in
    // order for it, and leaves by `_exit`.
    let child = unsafe { fork() };
    if child == 0 {
        let Unproven { queue, library, .. } = &unproven;
        let holders = library.holders();
        // SAFETY: `queue` is not used again, for the child leaves.
        drop(unsafe { std::ptr::read(queue) });
        let untouched = library.holders() == holders;
        // SAFETY: ends the child, running nothing of the parent's.
        unsafe { _exit(i32::from(!untouched)) };
    }
    let mut status = -1;
    let deadline = Instant::now() + FOREVER;
    loop {
        const WNOHANG: i32 = 1;
        // SAFETY: writes one number; the child is ours.
        match unsafe { waitpid(child, &raw mut status, WNOHANG) } {
            0 => assert!(Instant::now() < deadline, "the child hangs"),
            _ => break,
        }
        thread::yield_now();
    }
    assert_eq!(status, 0, "the child");
    unproven.library.answer(PEER_B, 0);
    ends(&unproven.queue, id, 0);
}

/// The library of a process that exits.
static LIBRARY: std::sync::OnceLock<Blocking> = std::sync::OnceLock::new();

/// Stands for the library's destructors, under which a copy would crash.
extern "C" fn destroy_the_library() {
    let library = LIBRARY.get().expect("there is one");
    let (begun, running) = (library.all_begun(), library.is_running());
    say(&format!(
        "destroyed after {begun} copies, running: {running}"
    ));
}

/// Ends the copy, but not before the exit waits for it.
extern "C" fn end_the_copy_soon() {
    thread::spawn(|| {
        thread::sleep(Duration::from_millis(100));
        LIBRARY.get().expect("there is one").answer(PEER_A, 0);
    });
}

/// Exits with 7 while a copy is in the library and another one waits.
fn exit_in_a_copy(that_ends: bool) -> ! {
    // SAFETY: the function stays.
    unsafe { atexit(destroy_the_library) };
    let library = LIBRARY.get_or_init(Blocking::new);
    let queue = Queued::new(library.clone(), Duration::ZERO);
    let mut batches = [batch(PEER_A, 0), batch(PEER_A, 1)];
    for batch in &mut batches {
        queue.vouched_submit(batch).expect("accepted");
    }
    library.begun(PEER_A, 1);
    if that_ends {
        // Runs first, for it is the latest.
        // SAFETY: the function stays.
        unsafe { atexit(end_the_copy_soon) };
    }
    // SAFETY: this function does not return, so that all of it stays.
    unsafe { exit(7) }
}

#[test]
fn a16_an_exit_waits_for_the_copy_that_is_in_the_library() {
    let (status, said) = Process::start("exiting_in_a_copy", &[]).ended();
    assert_eq!(said, ["destroyed after 1 copies, running: false"]);
    assert_eq!(status, Some(7));
}

#[test]
#[ignore = "the process of a16_an_exit_waits_for_…"]
fn exiting_in_a_copy() {
    exit_in_a_copy(true);
}

#[test]
fn a16_an_exit_in_a_copy_that_never_ends_leaves_the_destructors_out() {
    let (status, said) = Process::start("exiting_in_a_stuck_copy", &[]).ended();
    assert_eq!(said, [""; 0]);
    assert_eq!(status, Some(7));
}

#[test]
#[ignore = "the process of a16_an_exit_in_a_copy_that_never_ends_…"]
fn exiting_in_a_stuck_copy() {
    exit_in_a_copy(false);
}

/// Takes what is left of the address space, so that no thread gets a stack.
fn starve() -> Vec<Vec<u8>> {
    let mut taken = Vec::with_capacity(1 << 14);
    loop {
        let mut chunk = Vec::new();
        if chunk.try_reserve_exact(1 << 20).is_err() {
            return taken;
        }
        taken.push(chunk);
    }
}

#[test]
fn without_a_thread_a_batch_is_refused_or_waits_for_one_that_there_is() {
    Process::start_limited("starving", ("-v", 1 << 19), &[("STARVE", "")]).end();
}

#[test]
#[ignore = "the process of without_a_thread_…"]
fn starving() {
    // Without its limit it would take the machine's memory.
    std::env::var("STARVE").expect("started by the test that limits it");
    let machine = Machine::new();
    let taken = starve();
    let refused = machine.submit(&writes(2, 64));
    assert_eq!(machine.transport.outstanding(), (0, 0));
    assert_eq!(machine.poll(&refused), TaskStatus::FAILED);
    drop(taken);

    let first = machine.submit(&writes(1, 64));
    machine.library.begun(PEER_A, 1);
    let taken = starve();
    let second = machine.submit(&[write(1, 0x1000, 0x2000, 8)]);
    assert_eq!(machine.queue.workers(), 1);
    machine.library.answer(PEER_A, 0);
    assert_eq!(finish(&machine.transport, &first, 0), completed(64));
    machine.library.answer(PEER_B, 0);
    assert_eq!(finish(&machine.transport, &second, 0), completed(8));
    drop(taken);
}

#[test]
fn a_batch_that_was_not_submitted_reaches_no_worker() {
    let machine = Machine::new();
    // Rejected as a whole: for its size, then because it is too late.
    let sub_batch = machine.transport.allocate(1);
    submit(&machine.transport, &sub_batch, &writes(2, 64)).expect_err("over capacity");
    machine.transport.quiesce().expect("nothing outstanding");
    submit(&machine.transport, &sub_batch, &writes(1, 64)).expect_err("quiesced");
    assert_eq!(
        (machine.queue.workers(), machine.library.all_begun()),
        (0, 0)
    );
}
