//! The completion contract over a library whose copies block: queues, workers,
//! and what ends when. The library is a scripted one; the real one is in
//! `tests/published.rs`.
#![allow(missing_docs)]

mod common;
mod model {
    pub mod allocator;
}

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::blocking::{Blocking, Copied, answer_about};
use common::emulator::Process;
use common::*;
use memfabric_transport::published::Queued;
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

impl Machine {
    fn with(patience: Duration, idle: Duration) -> Self {
        let library = Blocking::new();
        let queue = Arc::new(Queued::with_idle(library.clone(), patience, idle));
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
        Self::with(Duration::ZERO, NEVER)
    }

    fn submit(&self, requests: &[Request]) -> SubBatch {
        let sub_batch = self.transport.allocate(requests.len());
        submit(&self.transport, &sub_batch, requests).expect("submitted");
        sub_batch
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
    for (code, expected) in [(0, completed(64)), (-1, TaskStatus::FAILED)] {
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
    library.answer_all(-1);
    for id in &ids[1..] {
        assert_eq!(answer_about(&queue, *id), Query::Done(Code(-1)));
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
    library.answer(PEER_A, -2012);
    assert_eq!(answer_about(&queue, id), Query::Done(Code(-2012)));
    assert_eq!(queue.query(id), unknown);
    assert_eq!(queue.query(BatchId(u64::MAX)), unknown);
}

#[test]
fn what_a_peer_does_not_know_yet_is_tried_again_within_the_patience() {
    let machine = Machine::with(FOREVER, NEVER);
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
    let machine = Machine::with(FOREVER, NEVER);
    for code in [-2000, -2000, -1] {
        machine.library.answer(PEER_A, code);
    }
    let sub_batch = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
    assert_eq!(
        finish(&machine.transport, &sub_batch, 0),
        TaskStatus::FAILED
    );
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
        let machine = Machine::with(FOREVER, NEVER);
        machine.library.answer(PEER_A, code);
        let sub_batch = machine.submit(&[write(0, 0x1000, 0x2000, 64)]);
        let status = finish(&machine.transport, &sub_batch, 0);
        assert_eq!(status, TaskStatus::FAILED, "{code}");
        assert_eq!(machine.library.all_begun(), 1, "{code}");
    }
}

#[test]
fn the_patience_ends_and_the_line_says_what_may_be_wrong() {
    let events = events_of_process();
    for patience in [0, 60] {
        let machine = Machine::with(Duration::from_millis(patience), NEVER);
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
fn a_panic_in_a_worker_fails_its_batch_alone() {
    let machine = Machine::new();
    machine.library.panic_in_next();
    let failed = machine.submit(&writes(2, 64));
    assert_eq!(finish(&machine.transport, &failed, 1), TaskStatus::FAILED);
    assert_eq!(finish(&machine.transport, &failed, 0), TaskStatus::FAILED);
    machine.library.answer(PEER_A, 0);
    let next = machine.submit(&writes(1, 64));
    assert_eq!(finish(&machine.transport, &next, 0), completed(64));
    assert_eq!(machine.queue.workers(), 1);
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
