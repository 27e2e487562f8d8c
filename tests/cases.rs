// SPDX-License-Identifier: Apache-2.0
//! Faults that others have met in public, each tried on the core and named after
//! its number; further ones are next to what they concern (`case_` in `tests/`
//! and `src/`).
#![allow(unsafe_code)] // implements methods that take memory by number
#![allow(missing_docs)]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Query, Refused, Region, Status,
    SubBatch, TaskState, TaskStatus, Transport,
};
use parking_lot::Mutex;

fn statuses(transport: &Transport, sub_batch: &SubBatch) -> Vec<TaskStatus> {
    (0..sub_batch.len())
        .map(|task| {
            transport
                .poll(sub_batch, task as i32)
                .expect("no query error")
        })
        .collect()
}

/// Both directions and two peers, interleaved, in sizes around a page and beyond
/// 32 bits.
#[test]
fn case_23_reads_and_writes_to_several_peers_in_one_call_are_never_mixed_up() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(5);
    let requests = [
        read(0, 0x1000, 0x9_1000, 1),
        write(1, 0x2000, 0x9_2000, 4095),
        write(0, 0x3000, 0x9_3000, 4096),
        read(1, 0x4000, 0x9_4000, 5 << 30),
        read(0, 0x5000, 0x9_5000, 4097),
    ];
    submit(&transport, &sub_batch, &requests).expect("submitted");
    let calls: Vec<_> = backend
        .submitted()
        .into_iter()
        .map(|group| (group.peer, group.opcode, group.pieces))
        .collect();
    let (a, b) = (PEER_A.to_owned(), PEER_B.to_owned());
    let both_reads = vec![(0x1000, 0x9_1000, 1), (0x5000, 0x9_5000, 4097)];
    assert_eq!(
        calls,
        [
            (a.clone(), Opcode::READ, both_reads),
            (b.clone(), Opcode::WRITE, vec![(0x2000, 0x9_2000, 4095)]),
            (a, Opcode::WRITE, vec![(0x3000, 0x9_3000, 4096)]),
            (b, Opcode::READ, vec![(0x4000, 0x9_4000, 5 << 30)]),
        ],
        "local addresses come first for both opcodes"
    );
    for id in 0..4 {
        backend.answer(id, [done(0)]);
    }
    let lengths = requests.map(|request| completed(request.length as u64));
    assert_eq!(statuses(&transport, &sub_batch), lengths);
}

#[test]
fn case_25_a_group_refused_at_once_fails_at_the_first_poll_and_the_other_completes() {
    for code in [-2014, -2004, -2000, -2001] {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(4);
        backend.refuse_next(code);
        backend.accept_next();
        let requests = [
            write(0, 0x1000, 0x9000, 8),
            write(0, 0x2000, 0x9100, 8),
            write(0, 0x3000, 0x9200, 8),
            write(1, 0x4000, 0x9300, 16),
        ];
        let (outcome, events) = events_of(|| submit(&transport, &sub_batch, &requests));
        outcome.expect("a peer is no error of the call");
        // The accepted group's id is 0, which is an id and not "none".
        backend.answer(0, [done(0)]);
        let mut expected = vec![TaskStatus::FAILED; 3];
        expected.push(completed(16));
        assert_eq!(statuses(&transport, &sub_batch), expected);
        let name = Code(code).to_string();
        assert!(name.starts_with("SM_") && name.contains(&code.to_string()));
        assert!(
            events.iter().any(|line| line.contains(&name)),
            "code name and number in the log: {events:?}"
        );
        assert_eq!(backend.queries(0), 1, "nothing else was asked about");
        assert_eq!(backend.calls().len(), 3, "two submissions and one query");
    }
}

#[test]
fn case_27_capacity_is_a_limit_and_not_a_count() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(4);
    submit(&transport, &sub_batch, &writes(3, 8)).expect("3 of 4");
    let error = submit(&transport, &sub_batch, &writes(2, 8)).expect_err("5 of 4");
    assert_eq!(error.status(), Status::TooManyRequests);
    assert_eq!((sub_batch.len(), backend.submitted().len()), (3, 1));
    submit(&transport, &sub_batch, &writes(1, 16)).expect("4 of 4");
    for id in 0..2 {
        backend.answer_always(id, done(0));
    }
    assert_eq!(
        statuses(&transport, &sub_batch),
        [completed(8), completed(8), completed(8), completed(16)],
        "the task after the refused call is number 3"
    );
    assert_eq!(
        transport.poll(&sub_batch, 4).expect("no error"),
        TaskStatus::FAILED
    );
    let error = transport.poll(&sub_batch, -1).expect_err("negative");
    assert_eq!(error.status(), Status::InvalidArgument);
    transport.free(sub_batch);
    // Any fill level can be freed.
    for (capacity, fill) in [(0, 0), (4, 0), (4, 1), (4, 4)] {
        let sub_batch = transport.allocate(capacity);
        submit(&transport, &sub_batch, &writes(fill, 8)).expect("it fits");
        transport.free(sub_batch);
    }
}

#[test]
fn case_27_single_submissions_fill_a_sub_batch_while_another_thread_polls() {
    const CAPACITY: usize = 1000;
    let (transport, backend) = installed();
    for id in 0..CAPACITY as u64 {
        backend.answer_always(id, done(0));
    }
    let sub_batch = transport.allocate(CAPACITY);
    thread::scope(|scope| {
        scope.spawn(|| {
            for task in 0..CAPACITY {
                let request = write(0, 0x1000, 0x9000, 1 + task);
                submit(&transport, &sub_batch, &[request]).expect("it fits");
            }
        });
        let mut ended = 0;
        while ended < CAPACITY {
            let length = sub_batch.len();
            while ended < length {
                let status = transport.poll(&sub_batch, ended as i32).expect("done");
                assert_eq!(status, completed(1 + ended as u64), "task {ended}");
                ended += 1;
            }
            thread::yield_now();
        }
    });
    assert_eq!(transport.outstanding(), (0, 0));
}

#[test]
fn case_31_results_are_handed_out_once_and_pollers_share_them() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(4);
    submit(&transport, &sub_batch, &writes(3, 64)).expect("submitted");
    submit(&transport, &sub_batch, &writes(1, 8)).expect("submitted");
    for id in 0..2 {
        backend.answer(id, [Query::Pending, Query::Pending, done(0)]);
        backend.answer_always(id, query_error(-2007));
    }
    let order = [2, 0, 1, 3];
    let mut over = [false; 4];
    while over.contains(&false) {
        for task in order {
            let asked = (backend.queries(0), backend.queries(1));
            let status = transport.poll(&sub_batch, task).expect("never asked again");
            let ended = status.state == TaskState::Completed;
            let third = (backend.queries(0), backend.queries(1));
            let id = usize::from(task == 3);
            let just_now = asked != third && [third.0, third.1][id] == 3;
            assert!(
                ended || !just_now,
                "the poll that gets the result returns it"
            );
            over[task as usize] |= ended;
        }
    }
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for task in order.repeat(3) {
                    let bytes = if task == 3 { 8 } else { 64 };
                    let status = transport.poll(&sub_batch, task).expect("cached");
                    assert_eq!(status, completed(bytes));
                }
            });
        }
    });
    assert_eq!((backend.queries(0), backend.queries(1)), (3, 3));
}

/// A second poller that comes while the first one's question is under way takes
/// its answer, be it pending or the result, and does not ask as well.
#[test]
fn case_31_a_poller_that_waited_for_an_answer_takes_it() {
    for round in 0..40 {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(2);
        submit(&transport, &sub_batch, &writes(2, 64)).expect("submitted");
        let (answer, status) = match round % 2 {
            0 => (Query::Pending, TaskStatus::PENDING),
            _ => (done(0), completed(64)),
        };
        backend.answer(0, [answer]);
        backend.answer_always(0, query_error(-2007));
        let gate = backend.gate_query();
        let coming = AtomicBool::new(false);
        thread::scope(|scope| {
            let first = scope.spawn(|| transport.poll(&sub_batch, 0));
            gate.entered
                .recv_timeout(FOREVER)
                .expect("the first poll asks");
            let second = scope.spawn(|| {
                coming.store(true, Ordering::SeqCst);
                transport.poll(&sub_batch, 1)
            });
            // Time for it to reach the lock; if it does not, the test is weaker
            // in this round and no less right.
            while !coming.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(1) {
                thread::yield_now();
            }
            gate.leave.send(()).expect("the first poll waits");
            for poller in [first, second] {
                let told = poller.join().expect("no panic");
                assert_eq!(told.expect("no query error"), status, "round {round}");
            }
        });
        assert_eq!(backend.queries(0), 1, "round {round}");
        backend.answer(0, [done(0)]);
        transport.quiesce().expect("it ends");
    }
}

#[test]
fn case_32_a_query_error_is_not_an_ending() {
    let (transport, backend) = installed();
    let [first, second, stuck] = [1, 1, 1].map(|capacity| transport.allocate(capacity));
    for sub_batch in [&first, &second, &stuck] {
        submit(&transport, sub_batch, &writes(1, 64)).expect("submitted");
    }
    backend.answer(
        0,
        [query_error(-2014), Query::Pending, query_error(-1), done(0)],
    );
    backend.answer(1, [done(-2012)]);
    backend.answer_always(2, query_error(-2007));

    let told: Vec<_> = (0..4)
        .map(|_| transport.poll(&first, 0).map_err(|error| error.to_string()))
        .collect();
    let refused = |told: &Result<TaskStatus, String>, name: &str| {
        told.as_ref().is_err_and(|text| text.contains(name))
    };
    assert!(refused(&told[0], "SM_NOT_CONNECTED (-2014)"), "{told:?}");
    assert_eq!(told[1], Ok(TaskStatus::PENDING));
    assert!(refused(&told[2], "SM_ERROR (-1)"), "{told:?}");
    assert_eq!(told[3], Ok(completed(64)));

    assert_eq!(
        transport.poll(&second, 0).expect("an ending"),
        TaskStatus::FAILED
    );
    for asked in 1..=100 {
        let error = transport.poll(&stuck, 0).expect_err("for ever");
        assert!(error.to_string().contains("(-2007)"), "{error}");
        assert_eq!(backend.queries(2), asked, "one question a poll, no spin");
        assert_eq!(transport.outstanding(), (1, 1));
    }
}

#[test]
fn case_35_quiesce_has_a_deadline_and_tells_the_truth() {
    // Nothing outstanding.
    let (transport, _backend) = installed();
    let begun = Instant::now();
    transport.quiesce().expect("nothing is outstanding");
    assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());

    // One batch that ends on the way.
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            while begun.elapsed() < TIMEOUT / 3 {
                thread::yield_now();
            }
            backend.answer_always(0, done(0));
        });
        transport.quiesce().expect("it ended in time");
    });
    assert!(begun.elapsed() >= TIMEOUT / 3);
    assert_eq!(statuses(&transport, &sub_batch), [completed(64)]);

    // One that never ends, and one whose queries fail.
    for (answer, said) in [
        (Query::Pending, None),
        (query_error(-2013), Some("(-2013)")),
    ] {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(1);
        submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
        backend.answer_always(0, answer);
        for attempt in 1..=2 {
            let asked = backend.queries(0);
            let begun = Instant::now();
            let error = transport.quiesce().expect_err("it never ends").to_string();
            let elapsed = begun.elapsed();
            assert!(elapsed >= TIMEOUT, "attempt {attempt}: {elapsed:?}");
            assert!(elapsed < 10 * TIMEOUT, "attempt {attempt}: {elapsed:?}");
            assert!(error.contains("1 vendor batches with 1 tasks"), "{error}");
            assert!(said.is_none_or(|code| error.contains(code)), "{error}");
            let queries = backend.queries(0) - asked;
            let most = elapsed.as_millis() as usize * 5;
            assert!(queries <= most, "{queries} queries in {elapsed:?}");
            assert_eq!(transport.outstanding(), (1, 1));
        }
        let refused = submit(&transport, &sub_batch, &writes(1, 64));
        assert!(matches!(refused, Err(Error::Quiesced)), "{refused:?}");
        backend.answer_always(0, done(0));
        let deadline = Instant::now() + FOREVER;
        while transport.poll(&sub_batch, 0).expect("polled") != completed(64) {
            assert!(Instant::now() < deadline, "the answer is there");
        }
        transport.quiesce().expect("nothing is outstanding");
    }
}

#[test]
fn case_35_a_poller_is_not_held_up_for_the_length_of_a_quiesce() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
    thread::scope(|scope| {
        let quiescer = scope.spawn(|| transport.quiesce());
        let deadline = Instant::now() + FOREVER;
        while backend.queries(0) == 0 {
            assert!(Instant::now() < deadline, "quiesce never asked");
        }
        let mut polls = 0;
        while !quiescer.is_finished() {
            let status = transport.poll(&sub_batch, 0).expect("pending");
            assert_eq!(status, TaskStatus::PENDING);
            polls += 1;
        }
        assert!(polls > 10, "{polls} polls in a quiesce of {TIMEOUT:?}");
        quiescer
            .join()
            .expect("no panic")
            .expect_err("it never ends");
    });
}

/// Panics in the call that the test names, once.
#[derive(Default)]
struct Panicking {
    next: Mutex<Option<(&'static str, usize)>>,
    ids: Mutex<u64>,
    asked: Mutex<Vec<u64>>,
}

impl Panicking {
    /// Lets occasion `occasion`, counted from 0, of `call` panic.
    fn panic_in(&self, call: &'static str, occasion: usize) {
        *self.next.lock() = Some((call, occasion));
    }

    fn enter(&self, call: &str) {
        let mut next = self.next.lock();
        match &mut *next {
            Some((wanted, 0)) if *wanted == call => {
                *next = None;
                drop(next);
                panic!("scripted panic in {call}");
            }
            Some((wanted, left)) if *wanted == call => *left -= 1,
            _ => {}
        }
    }
}

impl Backend for Panicking {
    fn endpoint(&self) -> &Endpoint {
        static OWN: std::sync::LazyLock<Endpoint> =
            std::sync::LazyLock::new(|| Endpoint::parse("127.0.0.1:4000").expect("a literal"));
        &OWN
    }

    unsafe fn register(&self, _: &[Region]) -> Result<(), Error> {
        self.enter("register");
        Ok(())
    }

    fn deregister(&self, _: usize) -> Result<(), Error> {
        self.enter("deregister");
        Ok(())
    }

    unsafe fn submit(&self, _: &mut CopyBatch) -> Result<BatchId, Refused> {
        self.enter("submit");
        let mut ids = self.ids.lock();
        *ids += 1;
        Ok(BatchId(*ids - 1))
    }

    fn query(&self, id: BatchId) -> Query {
        self.enter("query");
        self.asked.lock().push(id.0);
        done(0)
    }
}

/// The core's part of it: whatever call of the backend unwinds, and wherever, the
/// transport goes on, and no batch that was accepted is lost.
#[test]
fn case_43_a_panic_inside_any_backend_call_leaves_the_transport_usable() {
    let region = Region {
        address: 0x10_0000,
        length: 0x1000,
    };
    let calls = [
        ("register", 0),
        ("submit", 0),
        ("submit", 1),
        ("query", 0),
        ("deregister", 0),
    ];
    for (call, occasion) in calls {
        let backend = Arc::new(Panicking::default());
        let transport = Transport::new();
        transport
            .install_backend(Arc::clone(&backend) as Arc<dyn Backend>, TIMEOUT)
            .expect("installed");
        let sub_batch = transport.allocate(4);
        let both = [write(0, 0x10_0000, 1, 8), write(1, 0x20_0000, 1, 16)];
        backend.panic_in(call, occasion);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            transport.vouched_register(&[region]).expect("registered");
            submit(&transport, &sub_batch, &both).expect("submitted");
            transport.poll(&sub_batch, 0).expect("polled");
            transport.deregister(region).expect("idle");
        }));
        assert!(outcome.is_err(), "{call} panics");
        let appended = sub_batch.len();
        assert!(
            appended == 0 || appended == 2,
            "{call}: all of a call or none"
        );

        // What TENT does next.
        submit(&transport, &sub_batch, &both).expect("submitted");
        assert_eq!(sub_batch.len(), appended + 2, "{call}");
        transport.vouched_register(&[region]).expect("registered");
        transport.deregister(region).expect("idle");
        transport.quiesce().expect("every batch ends");
        assert_eq!(transport.outstanding(), (0, 0), "{call}");
        let ended = statuses(&transport, &sub_batch);
        let expected = [completed(8), completed(16)].repeat(ended.len() / 2);
        assert_eq!(ended, expected, "{call} {occasion}");
        let mut asked = backend.asked.lock().clone();
        asked.sort_unstable();
        let accepted: Vec<_> = (0..*backend.ids.lock()).collect();
        assert_eq!(asked, accepted, "{call}: each accepted batch is ended once");
        transport.uninstall().expect("nothing is outstanding");
    }
}

/// How long a registration that blocks may hold up what: nothing but other
/// registrations.
#[test]
fn case_20_a_submission_is_not_held_up_by_a_registration() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    let gate = backend.gate_register();
    let region = Region {
        address: 0x10_0000,
        length: 0x1000,
    };
    thread::scope(|scope| {
        let registrar = scope.spawn(|| transport.vouched_register(&[region]));
        gate.entered
            .recv_timeout(FOREVER)
            .expect("the registration is in its vendor call");
        let begun = Instant::now();
        submit(&transport, &sub_batch, &writes(1, 64)).expect("submitted");
        backend.answer_always(0, done(0));
        transport.quiesce().expect("it ends");
        assert!(begun.elapsed() < Duration::from_secs(10));
        gate.leave.send(()).expect("the registration waits");
        registrar.join().expect("no panic").expect("registered");
    });
}

#[test]
fn case_42_the_bridge_generator_and_its_runtime_are_of_one_version() {
    let lock = include_str!("../Cargo.lock");
    let version = |package: &str| {
        let entry = format!("name = \"{package}\"\nversion = \"");
        let mut found = lock.split(&entry).skip(1);
        let version = found.next().and_then(|rest| rest.split('"').next());
        assert!(found.next().is_none(), "{package} is locked twice");
        version.unwrap_or_else(|| panic!("{package} is not locked"))
    };
    let runtime = version("cxx");
    for generator in ["cxx-build", "cxxbridge-macro"] {
        assert_eq!(
            version(generator),
            runtime,
            "{generator} must match cxx: run `cargo update -p cxx -p cxx-build`"
        );
    }
}
