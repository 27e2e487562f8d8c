// SPDX-License-Identifier: Apache-2.0
//! The completion contract, one or more tests a clause, over a scripted backend.
#![allow(missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use memfabric_transport::{Backend, Error, Opcode, Query, Region, Status, TaskStatus, Transport};

#[test]
fn c01_a_pending_answer_leaves_every_task_pending_with_0_bytes() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(4);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("submitted");
    for _ in 0..3 {
        for task in 0..3 {
            let status = transport
                .poll(&sub_batch, task)
                .expect("pending is no error");
            assert_eq!(status, TaskStatus::PENDING);
        }
    }
    assert_eq!(transport.outstanding(), (1, 3));
    backend.answer_always(0, done(0));
}

#[test]
fn c02_a_successful_result_completes_every_task_with_its_own_length() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    let requests = [
        write(0, 0x1000, 0x9000, 1),
        write(0, 0x2000, 0xa000, 4095),
        write(0, 0x3000, 0xb000, 5 << 30),
    ];
    submit(&transport, &sub_batch, &requests).expect("submitted");
    backend.answer(0, [Query::Pending, done(0)]);
    let pending = transport.poll(&sub_batch, 1).expect("polled");
    assert_eq!(pending, TaskStatus::PENDING);
    let ended = transport.poll(&sub_batch, 1).expect("polled");
    assert_eq!(
        ended,
        completed(4095),
        "the poll that receives the result returns it"
    );
    assert_eq!(transport.poll(&sub_batch, 0).expect("polled"), completed(1));
    assert_eq!(
        transport.poll(&sub_batch, 2).expect("polled"),
        completed(5 << 30)
    );
    assert_eq!(transport.outstanding(), (0, 0));
}

#[test]
fn c03_any_other_result_fails_every_task_with_0_bytes() {
    for result in [-1, -2012, -2014, 1, 7, i32::MIN, i32::MAX] {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(2);
        submit(&transport, &sub_batch, &writes(2, 64)).expect("submitted");
        backend.answer(0, [done(result)]);
        for task in [1, 0, 1] {
            let status = transport
                .poll(&sub_batch, task)
                .expect("an ending is no error");
            assert_eq!(status, TaskStatus::FAILED, "result {result}");
        }
        assert_eq!(transport.outstanding(), (0, 0));
    }
}

#[test]
fn c03_a_failed_batch_is_logged_with_what_an_operator_asks_for() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(2, 64)).expect("submitted");
    backend.answer(0, [done(-2012)]);
    let (_, events) = events_of(|| transport.poll(&sub_batch, 0));
    let [line] = events.as_slice() else {
        panic!("one line for one failed batch: {events:?}");
    };
    for part in [
        "WARN vendor batch failed",
        "partly written",
        "batch_id=0",
        "peer=10.0.0.1:1001",
        "opcode=WRITE",
        "tasks=2",
        "bytes=128",
        "code=SM_PARTIAL_FAILED (-2012)",
    ] {
        assert!(line.contains(part), "{part} in {line}");
    }
}

#[test]
fn c04_a_result_is_fetched_once_and_serves_every_task() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(4);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("submitted");
    submit(&transport, &sub_batch, &writes(1, 8)).expect("submitted");
    for id in 0..2 {
        backend.answer(id, [Query::Pending, Query::Pending, done(0)]);
        backend.answer_always(id, query_error(-2007));
    }
    for task in [2, 0, 1, 3] {
        finish(&transport, &sub_batch, task);
    }
    let asked = (backend.queries(0), backend.queries(1));
    assert_eq!(asked, (3, 3), "two pending answers and the result each");
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..3 {
                    for (task, bytes) in [(0, 64), (1, 64), (2, 64), (3, 8)] {
                        let status = transport.poll(&sub_batch, task).expect("cached");
                        assert_eq!(status, completed(bytes));
                    }
                }
            });
        }
    });
    assert_eq!((backend.queries(0), backend.queries(1)), asked);
}

#[test]
fn c04_two_pollers_of_one_batch_fetch_its_result_once() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(2, 64)).expect("submitted");
    backend.answer(0, [done(0)]);
    backend.answer_always(0, query_error(-2007));
    let gate = backend.gate_query();
    thread::scope(|scope| {
        let first = scope.spawn(|| transport.poll(&sub_batch, 0));
        gate.entered
            .recv_timeout(FOREVER)
            .expect("the first poll asks");
        // The second poller arrives while the first one's answer is under way.
        let second = scope.spawn(|| transport.poll(&sub_batch, 1));
        gate.leave.send(()).expect("the first poll waits");
        for poller in [first, second] {
            let status = poller.join().expect("no panic").expect("no query error");
            assert_eq!(status, completed(64));
        }
    });
    assert_eq!(backend.queries(0), 1);
}

#[test]
fn c05_a_query_error_is_returned_and_changes_nothing() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(2, 64)).expect("submitted");
    backend.answer(
        0,
        [query_error(-2014), Query::Pending, query_error(-1), done(0)],
    );

    let error = transport
        .poll(&sub_batch, 0)
        .expect_err("the first answer is an error");
    assert_eq!(error.status(), Status::InternalError);
    for part in ["batch 0", PEER_A, "SM_NOT_CONNECTED (-2014)"] {
        assert!(error.to_string().contains(part), "{part} in {error}");
    }
    assert_eq!(transport.outstanding(), (1, 2), "counts do not change");

    assert_eq!(
        transport.poll(&sub_batch, 0).expect("asked again"),
        TaskStatus::PENDING
    );
    assert!(transport.poll(&sub_batch, 0).is_err());
    assert_eq!(transport.outstanding(), (1, 2));
    assert_eq!(
        transport.poll(&sub_batch, 0).expect("asked again"),
        completed(64)
    );
    assert_eq!(backend.queries(0), 4);
}

#[test]
fn c05_a_persistent_query_error_stays_an_error_and_holds_up_nobody_else() {
    let (transport, backend) = installed();
    let stuck = transport.allocate(1);
    let other = transport.allocate(1);
    submit(&transport, &stuck, &writes(1, 64)).expect("submitted");
    submit(&transport, &other, &writes(1, 64)).expect("submitted");
    backend.answer_always(0, query_error(-2007));
    backend.answer_always(1, done(0));
    let (_, events) = events_of(|| {
        for _ in 0..100 {
            assert!(transport.poll(&stuck, 0).is_err());
        }
    });
    assert_eq!(
        transport.poll(&other, 0).expect("unaffected"),
        completed(64)
    );
    assert_eq!(transport.outstanding(), (1, 1));
    let errors: Vec<_> = events
        .iter()
        .filter(|line| line.starts_with("ERROR"))
        .collect();
    assert!(
        (1..=3).contains(&errors.len()),
        "100 failing polls are a line or two, not {}",
        errors.len()
    );
    assert!(errors[0].contains("batch_id=0"), "{}", errors[0]);
    assert!(
        errors[0].contains("SM_OBJECT_NOT_EXISTS (-2007)"),
        "{}",
        errors[0]
    );
}

#[test]
fn c05_an_unknown_answer_is_a_query_error_with_its_number() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    backend.answer(0, [query_error(42)]);
    let error = transport.poll(&sub_batch, 0).expect_err("42 is neither");
    assert!(error.to_string().contains("unknown code (42)"), "{error}");
    assert_eq!(transport.outstanding(), (1, 1));
}

#[test]
fn c06_a_refused_group_fails_at_once_and_the_others_go_on() {
    for code in [-2014, -2004, -2000, -2001, 1, 0] {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(3);
        backend.refuse_next(code);
        let requests = [
            write(0, 0x1000, 0x9000, 8),
            write(1, 0x2000, 0xa000, 16),
            write(0, 0x3000, 0xb000, 24),
        ];
        let (outcome, events) = events_of(|| submit(&transport, &sub_batch, &requests));
        outcome.expect("a refused group is no error of the call");
        assert_eq!(
            transport.outstanding(),
            (1, 1),
            "only the accepted group is in flight"
        );
        for task in [0, 2] {
            let status = transport.poll(&sub_batch, task).expect("terminal");
            assert_eq!(status, TaskStatus::FAILED, "code {code}");
        }
        assert!(
            !backend
                .calls()
                .iter()
                .any(|call| matches!(call, Call::Query(_))),
            "a refused group is never queried"
        );
        // Id 0 is an id like any other.
        backend.answer(0, [done(0)]);
        assert_eq!(
            transport.poll(&sub_batch, 1).expect("accepted"),
            completed(16)
        );
        let [line] = events.as_slice() else {
            panic!("one line for one refusal: {events:?}");
        };
        assert!(line.starts_with("WARN submission refused"), "{line}");
        assert!(
            line.contains(PEER_A) && line.contains(&format!("({code})")),
            "{line}"
        );
    }
}

#[test]
fn c07_a_call_that_does_not_fit_changes_nothing() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(4);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("3 of 4");
    let error = submit(&transport, &sub_batch, &writes(2, 64)).expect_err("5 of 4");
    assert_eq!(error.status(), Status::TooManyRequests);
    let text = error.to_string();
    assert!(
        text.contains("2 requests") && text.contains("room for 1 of 4"),
        "{text}"
    );
    assert_eq!(sub_batch.len(), 3);
    assert_eq!(backend.submitted().len(), 1, "no vendor call");
    submit(&transport, &sub_batch, &writes(1, 8)).expect("4 of 4");
    backend.answer_always(0, done(0));
    backend.answer_always(1, done(0));
    assert_eq!(
        transport.poll(&sub_batch, 3).expect("the next task is 3"),
        completed(8)
    );
    let past = transport
        .poll(&sub_batch, 4)
        .expect("past the end is no error");
    assert_eq!(past, TaskStatus::FAILED);
    let error = transport.poll(&sub_batch, -1).expect_err("negative");
    assert_eq!(error.status(), Status::InvalidArgument);
}

#[test]
fn c07_every_rejected_call_makes_no_vendor_call() {
    let (transport, backend) = installed();
    let other = Transport::new();
    let own = transport.allocate(2);
    let foreign = other.allocate(2);
    let one = [writes(1, 64)[0]];
    let mut no_such_peer = one;
    no_such_peer[0].peer = 2;
    let mut no_such_opcode = one;
    no_such_opcode[0].opcode = Opcode(2);

    let cases = [
        (submit(&transport, &foreign, &one), Status::InvalidArgument),
        (
            submit(&transport, &own, &no_such_peer),
            Status::InvalidArgument,
        ),
        (
            submit(&transport, &own, &no_such_opcode),
            Status::InvalidArgument,
        ),
        (
            submit(&transport, &own, &writes(3, 64)),
            Status::TooManyRequests,
        ),
        (submit(&other, &foreign, &one), Status::InternalError),
    ];
    for (outcome, status) in cases {
        assert_eq!(outcome.expect_err("rejected").status(), status);
    }
    transport.quiesce().expect("nothing is outstanding");
    let error = submit(&transport, &own, &one).expect_err("quiesced");
    assert_eq!(error.status(), Status::InternalError);
    assert!(error.to_string().contains("quiesced"), "{error}");

    assert!(backend.calls().is_empty(), "{:?}", backend.calls());
    assert_eq!((own.len(), foreign.len()), (0, 0));
    assert!(
        transport.poll(&foreign, 0).is_err(),
        "nor is a foreign sub-batch polled"
    );
}

#[test]
fn c07_an_empty_call_is_fine_and_makes_no_vendor_call() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(0);
    submit(&transport, &sub_batch, &[]).expect("nothing to do");
    assert!(backend.calls().is_empty());
    let error = submit(&transport, &sub_batch, &writes(1, 1)).expect_err("no room at all");
    assert_eq!(error.status(), Status::TooManyRequests);
    transport.free(sub_batch);
}

#[test]
fn c08_requests_are_grouped_by_peer_and_opcode_in_their_order() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(8);
    let requests = [
        read(0, 0x1000, 0x9000, 1),
        write(1, 0x2000, 0xa000, 4095),
        write(0, 0x3000, 0xb000, 4096),
        read(1, 0x4000, 0xc000, 5 << 30),
        read(0, 0x5000, 0xd000, 7),
        write(1, 0x6000, 0xe000, 9),
    ];
    submit(&transport, &sub_batch, &requests).expect("submitted");
    let groups: Vec<_> = backend
        .submitted()
        .into_iter()
        .map(|group| (group.peer, group.opcode, group.pieces))
        .collect();
    let a = PEER_A.to_owned();
    let b = PEER_B.to_owned();
    assert_eq!(
        groups,
        [
            // Local addresses come first for both opcodes.
            (
                a.clone(),
                Opcode::READ,
                vec![(0x1000, 0x9000, 1), (0x5000, 0xd000, 7)]
            ),
            (
                b.clone(),
                Opcode::WRITE,
                vec![(0x2000, 0xa000, 4095), (0x6000, 0xe000, 9)]
            ),
            (a, Opcode::WRITE, vec![(0x3000, 0xb000, 4096)]),
            (b, Opcode::READ, vec![(0x4000, 0xc000, 5 << 30)]),
        ]
    );
    // Each task follows its own vendor batch.
    backend.answer(0, [done(-1)]);
    backend.answer(1, [done(0)]);
    backend.answer(2, [Query::Pending]);
    backend.answer(3, [done(0)]);
    let polled: Vec<_> = (0..6)
        .map(|task| transport.poll(&sub_batch, task).expect("no query error"))
        .collect();
    assert_eq!(
        polled,
        [
            TaskStatus::FAILED,
            completed(4095),
            TaskStatus::PENDING,
            completed(5 << 30),
            TaskStatus::FAILED,
            completed(9),
        ]
    );
}

#[test]
fn c08_two_targets_with_one_endpoint_are_one_peer() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    let peers = [peer(PEER_A), peer(PEER_B), peer(PEER_A)];
    let requests = [write(0, 1, 1, 1), write(2, 2, 2, 2), write(1, 3, 3, 3)];
    transport
        .vouched_submit(&sub_batch, peers.into_iter(), requests.into_iter())
        .expect("submitted");
    let sizes: Vec<_> = backend
        .submitted()
        .iter()
        .map(|group| group.pieces.len())
        .collect();
    assert_eq!(sizes, [2, 1]);
}

#[test]
fn c08_a_large_call_is_one_vendor_call_with_each_piece_once() {
    let (transport, backend) = installed();
    let requests = writes(131_072, 4096);
    let sub_batch = transport.allocate(requests.len());
    submit(&transport, &sub_batch, &requests).expect("submitted");
    let submitted = backend.submitted();
    assert_eq!(submitted.len(), 1);
    let expected: Vec<_> = requests
        .iter()
        .map(|request| (request.source, request.target, request.length))
        .collect();
    assert!(submitted[0].pieces == expected, "each piece once, in order");
    backend.answer(0, [done(0)]);
    for task in 0..requests.len() {
        let status = transport.poll(&sub_batch, task as i32).expect("done");
        assert_eq!(status, completed(4096));
    }
    assert_eq!(backend.queries(0), 1);
}

#[test]
fn c09_quiesce_refuses_submissions_for_good_also_after_a_timeout() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    assert!(transport.quiesce().is_err(), "the batch never ends");
    let refused = |when: &str| {
        let error = submit(&transport, &sub_batch, &writes(1, 64)).expect_err(when);
        assert!(matches!(error, Error::Quiesced), "{when}: {error}");
    };
    refused("after a timeout");
    backend.answer_always(0, done(0));
    transport.quiesce().expect("it ended");
    refused("after success");
    assert_eq!(backend.submitted().len(), 1);
}

#[test]
fn c09_quiesce_refuses_submissions_while_it_waits() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    let gate = backend.gate_query();
    backend.answer_always(0, done(0));
    thread::scope(|scope| {
        let quiescer = scope.spawn(|| transport.quiesce());
        gate.entered.recv_timeout(FOREVER).expect("quiesce asks");
        let submitter = scope.spawn(|| submit(&transport, &sub_batch, &writes(1, 64)));
        gate.leave.send(()).expect("quiesce waits at the gate");
        let refused = submitter.join().expect("no panic");
        assert!(matches!(refused, Err(Error::Quiesced)), "{refused:?}");
        quiescer.join().expect("no panic").expect("the batch ended");
    });
    assert_eq!(backend.submitted().len(), 1);
}

#[test]
fn c10_quiesce_polls_every_outstanding_batch_until_all_are_done() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    for id in 0..3 {
        submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
        backend.answer(id, vec![Query::Pending; 4 * id as usize]);
        backend.answer_always(id, done(if id == 1 { -1 } else { 0 }));
    }
    transport.quiesce().expect("all of them end");
    assert_eq!(transport.outstanding(), (0, 0));
    let queries = backend.calls().len();
    assert_eq!(transport.poll(&sub_batch, 0).expect("done"), completed(64));
    assert_eq!(
        transport.poll(&sub_batch, 1).expect("done"),
        TaskStatus::FAILED
    );
    assert_eq!(transport.poll(&sub_batch, 2).expect("done"), completed(64));
    assert_eq!(
        backend.calls().len(),
        queries,
        "quiesce updated the tasks as a poll does"
    );
    for id in 0..3 {
        assert_eq!(backend.queries(id), 4 * id as usize + 1);
    }
}

#[test]
fn c10_the_lock_is_free_between_two_questions() {
    // On a slow machine, three questions take longer than most tests wait.
    let (transport, backend) = installed_with(FOREVER);
    let waiting = transport.allocate(1);
    let ended = transport.allocate(1);
    submit(&transport, &waiting, &writes(1, 64)).expect("submitted");
    submit(&transport, &ended, &writes(1, 64)).expect("submitted");
    thread::scope(|scope| {
        let quiescer = scope.spawn(|| transport.quiesce());
        // Polls of the other sub-batch get through while quiesce waits.
        let deadline = Instant::now() + FOREVER;
        while backend.queries(0) < 3 {
            let status = transport.poll(&ended, 0).expect("polled");
            assert_eq!(status, TaskStatus::PENDING);
            assert!(Instant::now() < deadline, "quiesce never asked three times");
        }
        backend.answer_always(0, done(0));
        backend.answer_always(1, done(0));
        quiescer.join().expect("no panic").expect("both ended");
    });
}

#[test]
fn c10_quiesce_ends_when_a_poll_elsewhere_ends_the_last_batch() {
    let backend = Scripted::new();
    let transport = Transport::new();
    let endless = Duration::from_millis(u64::MAX);
    transport
        .install_backend(Arc::clone(&backend) as Arc<dyn Backend>, endless)
        .expect("installed");
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    thread::scope(|scope| {
        let quiescer = scope.spawn(|| transport.quiesce());
        backend.answer_always(0, done(0));
        finish(&transport, &sub_batch, 0);
        quiescer
            .join()
            .expect("no panic")
            .expect("nothing is outstanding");
    });
    assert_eq!(transport.outstanding(), (0, 0));
}

#[test]
fn c10_quiesce_does_not_burn_a_core() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    assert!(transport.quiesce().is_err());
    let queries = backend.queries(0);
    let most = TIMEOUT.as_millis() as usize * 5;
    assert!(queries <= most, "{queries} queries in {TIMEOUT:?}");
    assert!(queries >= 2, "it asked {queries} times only");
}

#[test]
fn c11_a_timeout_says_what_is_outstanding_and_completes_nothing() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(5);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("submitted");
    submit(&transport, &sub_batch, &writes(2, 64)).expect("submitted");
    backend.answer_always(1, query_error(-2013));
    let begun = Instant::now();
    let error = transport.quiesce().expect_err("neither ends");
    let elapsed = begun.elapsed();
    assert!(elapsed >= TIMEOUT, "gave up after {elapsed:?}");
    assert_eq!(error.status(), Status::InternalError);
    let text = error.to_string();
    for part in [
        "timed out after 2",
        "2 vendor batches with 5 tasks",
        "SM_INNER_BUSY (-2013)",
        "must not be freed",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(transport.outstanding(), (2, 5));
    assert_eq!(
        transport.poll(&sub_batch, 0).expect("polled"),
        TaskStatus::PENDING
    );

    // A later poll, or quiesce, can still complete them.
    backend.answer(0, [done(0)]);
    assert_eq!(finish(&transport, &sub_batch, 0), completed(64));
    assert_eq!(transport.outstanding(), (1, 2));
    backend.answer_always(1, done(0));
    transport.quiesce().expect("the other ended too");
    assert_eq!(transport.poll(&sub_batch, 4).expect("done"), completed(64));
}

#[test]
fn c12_a_blocked_vendor_call_is_waited_for_and_not_interrupted() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    let gate = backend.gate_query();
    backend.answer_always(0, done(0));
    thread::scope(|scope| {
        let quiescer = scope.spawn(|| transport.quiesce());
        gate.entered.recv_timeout(FOREVER).expect("quiesce asks");
        // The deadline passes while the call is blocked.
        let deadline = Instant::now() + 2 * TIMEOUT;
        while Instant::now() < deadline {
            thread::yield_now();
        }
        assert!(
            !quiescer.is_finished(),
            "quiesce returned under a running vendor call"
        );
        gate.leave.send(()).expect("quiesce waits at the gate");
        quiescer
            .join()
            .expect("no panic")
            .expect("the call brought the result");
    });
    assert_eq!(backend.queries(0), 1);
}

#[test]
fn c13_teardown_with_work_outstanding_leaks_and_says_so() {
    let (transport, backend) = installed();
    let dropped = backend.dropped();
    let sub_batch = transport.allocate(3);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("submitted");
    let lengths_at = backend.submitted()[0].lengths_at;
    transport.free(sub_batch);
    drop(backend);
    let (_, events) = events_of(|| drop(transport));
    assert!(
        !dropped.load(Ordering::SeqCst),
        "the library was taken down under a running batch"
    );
    let errors: Vec<_> = events
        .iter()
        .filter(|line| line.starts_with("ERROR"))
        .collect();
    let [line] = errors.as_slice() else {
        panic!("one ERROR line: {events:?}");
    };
    for part in ["leaked on purpose", "1 vendor batches with 3 tasks"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert_eq!(
        lengths(lengths_at, 3),
        [64, 64, 64],
        "the arrays outlive the transport"
    );
}

#[test]
fn c13_an_uninstall_that_times_out_destroys_nothing_and_can_be_repeated() {
    let (transport, backend) = installed();
    let dropped = backend.dropped();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    let error = transport.uninstall().expect_err("the batch never ends");
    assert!(
        matches!(
            error,
            Error::QuiesceTimeout {
                batches: 1,
                tasks: 1,
                ..
            }
        ),
        "{error}"
    );
    let queries = backend.queries(0);
    transport.uninstall().expect_err("still not");
    assert_eq!(
        backend.queries(0),
        queries + 1,
        "what was waited for in vain is asked once more"
    );
    backend.answer_always(0, done(0));
    drop(backend);
    transport.uninstall().expect("it ended");
    assert!(dropped.load(Ordering::SeqCst));
    assert_eq!(
        transport.poll(&sub_batch, 0).expect("cached"),
        completed(64)
    );
    transport
        .uninstall()
        .expect("a second uninstall does nothing");
}

/// The library's view of an argument array.
#[allow(unsafe_code)]
fn lengths(address: usize, count: usize) -> Vec<usize> {
    let array = std::ptr::with_exposed_provenance::<usize>(address);
    // SAFETY: the address is that of a batch's array, which the contract keeps
    // alive and unchanged until the batch is done; this test shows it.
    unsafe { std::slice::from_raw_parts(array, count) }.to_vec()
}

#[test]
fn c14_a_sub_batch_freed_early_leaves_its_vendor_batches_tracked() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("submitted");
    let lengths_at = backend.submitted()[0].lengths_at;
    transport.free(sub_batch);
    // Others come and go, with arrays of the same size.
    for _ in 0..100 {
        let other = transport.allocate(3);
        let id = backend.submitted().len() as u64;
        submit(&transport, &other, &writes(3, 8)).expect("submitted");
        backend.answer_always(id, done(0));
        finish(&transport, &other, 0);
        transport.free(other);
    }
    assert_eq!(transport.outstanding(), (1, 3));
    assert_eq!(
        lengths(lengths_at, 3),
        [64, 64, 64],
        "its arrays are alive and unchanged"
    );
    assert!(transport.quiesce().is_err(), "quiesce waits for it");
    backend.answer_always(0, done(0));
    transport.quiesce().expect("it ended");
    assert_eq!(transport.outstanding(), (0, 0));
}

#[test]
fn c15_a_poll_and_a_submission_are_one_after_the_other() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    let gate = backend.gate_submit();
    thread::scope(|scope| {
        let submitter = scope.spawn(|| submit(&transport, &sub_batch, &writes(1, 64)));
        gate.entered
            .recv_timeout(FOREVER)
            .expect("the submission is in its vendor call");
        let poller = scope.spawn(|| transport.poll(&sub_batch, 0));
        let deadline = Instant::now() + Duration::from_millis(50);
        while Instant::now() < deadline {
            assert_eq!(backend.queries(0), 0, "a query inside a submission");
            thread::yield_now();
        }
        gate.leave
            .send(())
            .expect("the submission waits at the gate");
        submitter.join().expect("no panic").expect("submitted");
        poller.join().expect("no panic").expect("polled");
    });
    assert_eq!(backend.queries(0), 1);
}

#[test]
fn c15_a_finished_task_is_answered_while_a_vendor_call_is_blocked() {
    let (transport, backend) = installed();
    let done_batch = transport.allocate(1);
    submit(&transport, &done_batch, &writes(1, 64)).expect("submitted");
    backend.answer(0, [done(0)]);
    finish(&transport, &done_batch, 0);
    let other = transport.allocate(1);
    let gate = backend.gate_submit();
    thread::scope(|scope| {
        let submitter = scope.spawn(|| submit(&transport, &other, &writes(1, 64)));
        gate.entered
            .recv_timeout(FOREVER)
            .expect("the submission is in its vendor call");
        // Would deadlock here if it took the lock.
        assert_eq!(
            transport.poll(&done_batch, 0).expect("cached"),
            completed(64)
        );
        gate.leave
            .send(())
            .expect("the submission waits at the gate");
        submitter.join().expect("no panic").expect("submitted");
    });
}

#[test]
fn a_sweep_over_a_batch_is_one_query_and_a_single_poller_gets_fresh_answers() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(128);
    submit(&transport, &sub_batch, &writes(128, 64)).expect("submitted");
    for sweep in 1..=5 {
        for task in 0..128 {
            transport.poll(&sub_batch, task).expect("pending");
        }
        assert_eq!(backend.queries(0), sweep, "after {sweep} sweeps");
    }
    for poll in 1..=5 {
        transport.poll(&sub_batch, 7).expect("pending");
        assert_eq!(backend.queries(0), 5 + poll, "a single task asks each time");
    }
}

#[test]
fn a_zero_length_request_is_completed_and_never_reaches_the_library() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    let requests = [
        write(0, 0x1000, 0x9000, 0),
        write(0, 0x2000, 0xa000, 8),
        read(1, 0, 0, 0),
    ];
    submit(&transport, &sub_batch, &requests).expect("submitted");
    let submitted = backend.submitted();
    assert_eq!(submitted.len(), 1, "{submitted:?}");
    assert_eq!(submitted[0].pieces, [(0x2000, 0xa000, 8)]);
    assert_eq!(transport.poll(&sub_batch, 0).expect("done"), completed(0));
    assert_eq!(transport.poll(&sub_batch, 2).expect("done"), completed(0));
    assert_eq!(
        transport.poll(&sub_batch, 1).expect("polled"),
        TaskStatus::PENDING
    );
    assert_eq!(transport.outstanding(), (1, 1));
    backend.answer_always(0, done(0));
}

#[test]
fn case_16_a_peer_without_a_usable_endpoint_fails_its_own_tasks_only() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(5);
    let named = |name, endpoint, problem| memfabric_transport::Peer {
        name,
        endpoint,
        problem,
    };
    let peers = [
        peer(PEER_A),
        named("node-b", "", "has no memfabric_unique_id in its metadata"),
        named("node-c", "", ""),
        named("node-d", "10.0.0.9", ""),
        named("file-e", "", "is a file segment"),
    ];
    let requests: Vec<_> = (0..5).map(|peer| write(peer, 0x1000, 0x9000, 8)).collect();
    let (outcome, events) =
        events_of(|| transport.vouched_submit(&sub_batch, peers.into_iter(), requests.into_iter()));
    outcome.expect("no error of the call");
    assert_eq!(
        backend.submitted().len(),
        1,
        "no vendor call for the others"
    );
    backend.answer(0, [done(0)]);
    assert_eq!(transport.poll(&sub_batch, 0).expect("polled"), completed(8));
    for task in 1..5 {
        let status = transport.poll(&sub_batch, task).expect("terminal");
        assert_eq!(status, TaskStatus::FAILED, "task {task}");
    }
    assert_eq!(events.len(), 4, "{events:?}");
    for (line, parts) in events.iter().zip([
        ["node-b", "memfabric_unique_id"],
        ["node-c", "memfabric_unique_id '' is empty"],
        ["node-d", "memfabric_unique_id '10.0.0.9'"],
        ["file-e", "file segment"],
    ]) {
        assert!(line.starts_with("WARN peer cannot be reached"), "{line}");
        for part in parts {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
}

#[test]
fn a_request_that_cannot_be_addressed_fails_alone() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(4);
    let requests = [
        write(0, 0, 0x9000, 8),
        write(0, usize::MAX - 3, 0x9000, 8),
        write(0, 0x1000, usize::MAX, 8),
        write(0, 0x1000, 0x9000, 8),
    ];
    let (outcome, events) = events_of(|| submit(&transport, &sub_batch, &requests));
    outcome.expect("no error of the call");
    assert_eq!(backend.submitted()[0].pieces, [(0x1000, 0x9000, 8)]);
    for task in 0..3 {
        let status = transport.poll(&sub_batch, task).expect("terminal");
        assert_eq!(status, TaskStatus::FAILED, "task {task}");
    }
    backend.answer(0, [done(0)]);
    assert_eq!(transport.poll(&sub_batch, 3).expect("polled"), completed(8));
    assert!(events[0].contains("null or wrapping"), "{events:?}");
}

#[test]
fn case_29_a_refusal_of_the_own_endpoint_is_said_so() {
    let (transport, backend) = installed();
    let own = transport.endpoint().expect("installed");
    let sub_batch = transport.allocate(2);
    backend.refuse_next(-2000);
    backend.refuse_next(-2000);
    let peers = [peer(&own), peer("127.0.0.1:4001")];
    let requests = [write(0, 1, 1, 1), write(1, 1, 1, 1)];
    let (_, events) =
        events_of(|| transport.vouched_submit(&sub_batch, peers.into_iter(), requests.into_iter()));
    assert!(events[0].contains("own_endpoint=true"), "{events:?}");
    assert!(
        events[1].contains("own_endpoint=false"),
        "another port is not the own endpoint"
    );
}

#[test]
fn a_refusal_and_a_failed_batch_make_the_peer_suspect() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    backend.refuse_next(-2014);
    submit(&transport, &sub_batch, &[write(0, 1, 1, 1)]).expect("submitted");
    assert!(transport.must_refresh(1, PEER_A));
    assert!(!transport.must_refresh(2, PEER_B));
    submit(&transport, &sub_batch, &[write(1, 1, 1, 1)]).expect("submitted");
    backend.answer(0, [done(-1)]);
    finish(&transport, &sub_batch, 1);
    assert!(transport.must_refresh(2, PEER_B));
    assert!(!transport.must_refresh(1, PEER_A), "that was before");
}

const RANGE: Region = Region {
    address: 0x10_0000,
    length: 0x1000,
};

#[test]
fn case_20_a_list_is_one_registration_in_its_order() {
    let (transport, backend) = installed();
    let regions: Vec<_> = (1..=61)
        .rev()
        .map(|index| Region {
            address: index * 0x1_0000,
            length: 0x1000 + index,
        })
        .collect();
    transport.vouched_register(&regions).expect("registered");
    transport
        .vouched_register(&[])
        .expect("an empty list is a duplicate");
    assert_eq!(backend.calls(), [Call::Register(regions)]);
}

#[test]
fn case_20_a_poll_is_not_held_up_by_a_registration() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    let gate = backend.gate_register();
    thread::scope(|scope| {
        let registrar = scope.spawn(|| transport.vouched_register(&[RANGE]));
        gate.entered
            .recv_timeout(FOREVER)
            .expect("the registration is in its vendor call");
        backend.answer(0, [done(0)]);
        assert_eq!(
            transport.poll(&sub_batch, 0).expect("polled"),
            completed(64)
        );
        gate.leave
            .send(())
            .expect("the registration waits at the gate");
        registrar.join().expect("no panic").expect("registered");
    });
}

#[test]
fn case_18_a_range_is_deregistered_with_its_last_owner() {
    let (transport, backend) = installed();
    transport.vouched_register(&[RANGE]).expect("registered");
    transport
        .vouched_register(&[RANGE])
        .expect("a second owner");
    transport.deregister(RANGE).expect("one owner is left");
    assert_eq!(backend.calls(), [Call::Register(vec![RANGE])]);
    transport.deregister(RANGE).expect("the last owner");
    let never = Region {
        address: 0x1,
        length: 0x1,
    };
    transport.deregister(RANGE).expect("not ours any more");
    transport.deregister(never).expect("never ours");
    assert_eq!(
        backend.calls(),
        [Call::Register(vec![RANGE]), Call::Deregister(RANGE.address)]
    );
}

#[test]
fn a_failed_registration_leaves_no_range_behind() {
    let (transport, backend) = installed();
    let second = Region {
        address: 0x30_0000,
        ..RANGE
    };
    backend.fail_register(-2001);
    let error = transport
        .vouched_register(&[RANGE, second])
        .expect_err("refused");
    assert_eq!(error.status(), Status::InternalError);
    assert!(
        error.to_string().contains("SM_MALLOC_FAILED (-2001)"),
        "{error}"
    );
    assert_eq!(
        backend.calls(),
        [
            Call::Register(vec![RANGE, second]),
            Call::Deregister(second.address),
            Call::Deregister(RANGE.address),
        ]
    );
    transport.deregister(RANGE).expect("not ours");
    assert_eq!(backend.calls().len(), 3);
}

#[test]
fn a_busy_range_is_waited_for_before_it_is_deregistered() {
    let (transport, backend) = installed_with(FOREVER);
    transport.vouched_register(&[RANGE]).expect("registered");
    let sub_batch = transport.allocate(1);
    submit(
        &transport,
        &sub_batch,
        &[read(0, RANGE.address + 8, 0x9000, 8)],
    )
    .expect("submitted");
    backend.answer(0, [Query::Pending, Query::Pending, done(0)]);
    transport
        .deregister(RANGE)
        .expect("the batch ended in time");
    let calls = backend.calls();
    let [.., last_query, last] = calls.as_slice() else {
        panic!("{calls:?}");
    };
    assert_eq!(
        (last_query, last),
        (&Call::Query(0), &Call::Deregister(RANGE.address))
    );
    assert_eq!(transport.poll(&sub_batch, 0).expect("done"), completed(8));
}

#[test]
fn case_18_one_of_two_owners_of_a_busy_range_leaves_at_once() {
    let (transport, backend) = installed();
    transport
        .vouched_register(&[RANGE, RANGE])
        .expect("registered");
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &[read(0, RANGE.address, 0x9000, 8)]).expect("submitted");
    transport.deregister(RANGE).expect("another owner is left");
    assert_eq!(backend.queries(0), 0, "nothing was waited for");
    transport
        .deregister(RANGE)
        .expect_err("the last owner waits for the batch");
    backend.answer_always(0, done(0));
    transport.deregister(RANGE).expect("it ended");
    assert_eq!(
        backend.calls().last(),
        Some(&Call::Deregister(RANGE.address))
    );
}

#[test]
fn a_slow_first_question_is_part_of_the_wait() {
    let (transport, backend) = installed();
    transport.vouched_register(&[RANGE]).expect("registered");
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &[read(0, RANGE.address, 0x9000, 8)]).expect("submitted");
    let gate = backend.gate_query();
    thread::scope(|scope| {
        let first = scope.spawn(|| transport.deregister(RANGE));
        gate.entered.recv_timeout(FOREVER).expect("it is asked");
        let asked = Instant::now();
        until("half of the patience", || asked.elapsed() >= TIMEOUT / 2);
        gate.leave.send(()).expect("the wait is at the gate");
        first.join().expect("no panic").expect_err("it never ends");
    });
    let queries = backend.queries(0);
    transport.deregister(RANGE).expect_err("still busy");
    assert_eq!(backend.queries(0), queries + 1, "no second wait");
}

#[test]
fn a_range_that_stays_busy_stays_registered() {
    let (transport, backend) = installed();
    let idle = Region {
        address: 0x90_0000,
        ..RANGE
    };
    transport
        .vouched_register(&[RANGE, idle])
        .expect("registered");
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &[read(0, RANGE.address, 0x9000, 8)]).expect("submitted");
    let error = transport
        .deregister(RANGE)
        .expect_err("the batch never ends");
    assert_eq!(error.status(), Status::InternalError);
    assert!(
        error.to_string().contains("must not be freed yet"),
        "{error}"
    );
    transport.deregister(idle).expect("nobody uses this one");
    let queries = backend.queries(0);
    transport.deregister(RANGE).expect_err("still busy");
    assert_eq!(
        backend.queries(0),
        queries + 1,
        "one more question, no second wait"
    );
    backend.answer_always(0, done(0));
    transport.deregister(RANGE).expect("it ended");
    let deregistered: Vec<_> = backend
        .calls()
        .into_iter()
        .filter(|call| matches!(call, Call::Deregister(_)))
        .collect();
    assert_eq!(
        deregistered,
        [
            Call::Deregister(idle.address),
            Call::Deregister(RANGE.address)
        ]
    );
}

#[test]
fn a_second_install_is_refused_and_a_reinstall_works() {
    let (transport, backend) = installed();
    let error = transport
        .install_backend(Scripted::new(), TIMEOUT)
        .expect_err("already installed");
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(error.to_string().contains("127.0.0.1:4000"), "{error}");
    drop(backend);
    transport.uninstall().expect("nothing is outstanding");
    assert_eq!(transport.endpoint(), None);
    transport
        .install_backend(Scripted::new(), TIMEOUT)
        .expect("installed again");
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 1)).expect("not quiesced any more");
}

#[test]
fn a_transport_that_is_not_installed_says_so() {
    let transport = Transport::new();
    let sub_batch = transport.allocate(1);
    for error in [
        submit(&transport, &sub_batch, &writes(1, 1)).expect_err("submit"),
        transport.vouched_register(&[RANGE]).expect_err("register"),
        transport.quiesce().expect_err("quiesce"),
    ] {
        assert!(matches!(error, Error::NotInstalled), "{error}");
        assert_eq!(error.status(), Status::InternalError);
    }
    transport.deregister(RANGE).expect("nothing is registered");
    transport.uninstall().expect("nothing to do");
}

#[test]
fn case_31_memory_is_flat_over_100_000_batches() {
    let (transport, backend) = installed();
    let mut arrays = std::collections::HashSet::new();
    for id in 0..100_000 {
        let sub_batch = transport.allocate(1);
        submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
        backend.answer(id, [done(0)]);
        assert_eq!(transport.poll(&sub_batch, 0).expect("done"), completed(64));
        transport.free(sub_batch);
        if id % 1000 == 0 {
            arrays.extend(
                backend
                    .submitted()
                    .last()
                    .map(|submitted| submitted.lengths_at),
            );
        }
    }
    assert_eq!(transport.outstanding(), (0, 0));
    assert!(
        arrays.len() <= 2,
        "arrays are reused, {} places were seen",
        arrays.len()
    );
}

#[test]
fn a_caught_panic_in_a_vendor_call_leaves_the_transport_usable() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(2);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    backend.panic_in_query(true);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        transport.poll(&sub_batch, 0)
    }));
    assert!(outcome.is_err(), "the script panics");
    backend.panic_in_query(false);
    assert_eq!(transport.outstanding(), (1, 1));
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    backend.answer_always(0, done(0));
    backend.answer_always(1, done(0));
    transport.uninstall().expect("both ended");
}

#[test]
fn a_wait_for_a_sub_batch_ends_with_its_last_task_or_its_time() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    let ended = |timeout| transport.wait_for(&sub_batch, timeout).expect("no error");
    assert!(ended(Duration::ZERO), "it has no task");
    submit(&transport, &sub_batch, &writes(2, 8)).expect("accepted");
    submit(&transport, &sub_batch, &writes(1, 8)).expect("accepted");
    backend.answer_always(0, done(0));
    let (begun, patience) = (Instant::now(), Duration::from_millis(50));
    assert!(!ended(patience));
    assert!(begun.elapsed() >= patience);
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| ended(FOREVER));
        backend.answer_always(1, done(-1));
        assert!(wait.join().expect("no panic"));
    });
    let status = [0, 1, 2].map(|task| transport.poll(&sub_batch, task).expect("ended"));
    assert_eq!(status, [completed(8), completed(8), TaskStatus::FAILED]);
}
