// SPDX-License-Identifier: Apache-2.0
//! What the transport says about memory is true: who may still touch it (list A
//! of the faults that a review found), and what grows, is quadratic or floods
//! (list B). Each test has the number of its fault.
#![allow(unsafe_code)] // forks

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::*;
use memfabric_transport::{
    Error, Peer, Region, Request, SubBatch, TaskState, TaskStatus, Transport,
};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

const RANGE: Region = Region {
    address: 0x10_0000,
    length: 0x1_0000,
};
const LONGER: Region = Region {
    length: 0x2_0000,
    ..RANGE
};

/// Registers [`RANGE`], has a READ into it outstanding, and is refused its removal.
fn refused_removal(transport: &Transport) -> SubBatch {
    transport.vouched_register(&[RANGE]).expect("registered");
    let sub_batch = transport.allocate(1);
    submit(transport, &sub_batch, &[read(0, RANGE.address, 0x9000, 8)]).expect("accepted");
    let error = transport.deregister(RANGE).expect_err("it is in use");
    assert!(
        matches!(error, Error::RegionBusy { batches: 1, .. }),
        "{error}"
    );
    sub_batch
}

/// Polls until the vendor was asked and has answered.
fn poll_to_the_end(transport: &Transport, sub_batch: &SubBatch) -> TaskStatus {
    finish(transport, sub_batch, 0)
}

fn removals(backend: &Scripted) -> usize {
    let calls = backend.calls();
    let removals = calls.iter();
    removals
        .filter(|call| matches!(call, Call::Deregister(_)))
        .count()
}

#[test]
fn a02_a_refused_removal_is_made_up_for_when_the_last_batch_ends() {
    let (transport, backend) = installed();
    let sub_batch = refused_removal(&transport);
    assert_eq!(removals(&backend), 0);
    backend.answer_always(0, done(0));
    assert_eq!(poll_to_the_end(&transport, &sub_batch), completed(8));
    assert_eq!(
        backend.calls().last(),
        Some(&Call::Deregister(RANGE.address))
    );
    // Whoever asks again is told that it is gone, and nothing is done twice.
    transport.deregister(RANGE).expect("gone");
    assert_eq!(removals(&backend), 1);
}

#[test]
fn a02_a_range_that_is_not_registered_any_more_is_in_use_all_the_same() {
    let (transport, backend) = installed_with(Duration::from_millis(50));
    let first = refused_removal(&transport);
    backend.answer_always(0, done(0));
    assert_eq!(poll_to_the_end(&transport, &first), completed(8));
    assert_eq!(removals(&backend), 1, "made up for");
    // The caller, who was told "busy", goes on with it and asks again later.
    let second = transport.allocate(1);
    submit(&transport, &second, &[read(0, RANGE.address, 0x9000, 8)]).expect("accepted");
    let error = transport.deregister(RANGE).expect_err("it is in use again");
    assert!(
        matches!(error, Error::RegionBusy { batches: 1, .. }),
        "{error}"
    );
    backend.answer_always(1, done(0));
    transport.deregister(RANGE).expect("not in use any more");
    assert_eq!(removals(&backend), 1);
}

#[test]
fn a02_registering_over_a_refused_removal_is_refused_while_it_is_in_use() {
    for again in [RANGE, LONGER] {
        let (transport, backend) = installed();
        let sub_batch = refused_removal(&transport);
        let calls = backend.calls().len();
        let error = transport.vouched_register(&[again]).expect_err("in use");
        assert!(
            matches!(error, Error::RegionLeaving { batches: 1, .. }),
            "{error}"
        );
        let since = backend.calls().split_off(calls);
        assert_eq!(
            since,
            [Call::Query(0)],
            "asked once, and nothing registered"
        );
        // It ends, which nobody notices before the next attempt asks.
        backend.answer_always(0, done(-1));
        transport.vouched_register(&[again]).expect("free now");
        let since = backend.calls().split_off(calls + 1);
        let expected = [
            Call::Query(0),
            Call::Deregister(RANGE.address),
            Call::Register(vec![again]),
        ];
        assert_eq!(since, expected);
        // The new one is registered once, and removed by one call.
        transport.deregister(again).expect("not in use");
        assert_eq!(removals(&backend), 2);
        assert_eq!(poll_to_the_end(&transport, &sub_batch), TaskStatus::FAILED);
    }
}

#[test]
fn a02_a_neighbour_of_a_refused_removal_is_not_held_up() {
    let (transport, backend) = installed();
    let _sub_batch = refused_removal(&transport);
    let next = Region {
        address: RANGE.address + RANGE.length,
        length: 8,
    };
    transport.vouched_register(&[next]).expect("not in the way");
    transport.deregister(next).expect("nor its removal");
    assert_eq!(removals(&backend), 1);
}

#[test]
fn a03_a_batch_to_oneself_holds_its_remote_range() {
    let (transport, backend) = installed_with(Duration::from_millis(50));
    transport.vouched_register(&[RANGE]).expect("registered");
    let own = transport.endpoint().expect("installed");
    let send = |target| {
        let sub_batch = transport.allocate(1);
        let request = [write(0, 0x7000_0000, target, 64)].into_iter();
        let peers = [peer(&own)].into_iter();
        transport
            .vouched_submit(&sub_batch, peers, request)
            .expect("accepted");
        sub_batch
    };
    let elsewhere = send(RANGE.address + RANGE.length);
    let inside = send(RANGE.address + RANGE.length - 1);
    let error = transport.deregister(RANGE).expect_err("its remote side");
    assert!(
        matches!(error, Error::RegionBusy { batches: 1, .. }),
        "{error}"
    );
    assert_eq!(removals(&backend), 0);
    backend.answer_always(1, done(0));
    assert_eq!(poll_to_the_end(&transport, &inside), completed(64));
    assert_eq!(removals(&backend), 1);
    transport.free(elsewhere);
}

#[test]
fn a03_the_same_addresses_at_another_peer_are_not_ours() {
    let (transport, _backend) = installed();
    transport.vouched_register(&[RANGE]).expect("registered");
    let sub_batch = transport.allocate(1);
    let request = [write(0, 0x7000_0000, RANGE.address, 64)];
    submit(&transport, &sub_batch, &request).expect("accepted");
    let begun = Instant::now();
    transport
        .deregister(RANGE)
        .expect("another process's memory");
    assert!(begun.elapsed() < TIMEOUT, "nothing to wait for");
}

#[test]
fn a05_a_teardown_of_many_stuck_ranges_takes_one_timeout() {
    let timeout = Duration::from_millis(400);
    let (transport, _backend) = installed_with(timeout);
    let regions: Vec<_> = (0..20)
        .map(|index| Region {
            address: 0x1000_0000 + index * 0x1000,
            length: 0x1000,
        })
        .collect();
    transport.vouched_register(&regions).expect("registered");
    let stuck = |region: &Region| {
        let sub_batch = transport.allocate(1);
        let request = [read(0, region.address, 0x9000, 8)];
        submit(&transport, &sub_batch, &request).expect("accepted");
        sub_batch
    };
    let sub_batches: Vec<_> = regions.iter().map(stuck).collect();
    let begun = Instant::now();
    for region in &regions {
        transport.deregister(*region).expect_err("in use");
    }
    let error = transport.uninstall().expect_err("20 batches");
    let took = begun.elapsed();
    assert!(took >= timeout, "each had its time: {took:?}");
    assert!(took < 4 * timeout, "one timeout in all: {took:?}");
    assert!(matches!(error, Error::QuiesceTimeout { batches: 20, .. }));
    drop(sub_batches);
}

#[test]
fn a05_a_batch_is_not_given_up_at_another_ones_deadline() {
    let timeout = Duration::from_millis(500);
    let (transport, backend) = installed_with(timeout);
    transport.vouched_register(&[RANGE]).expect("registered");
    let send = || {
        let sub_batch = transport.allocate(1);
        let request = [read(0, RANGE.address, 0x9000, 8)];
        submit(&transport, &sub_batch, &request).expect("accepted");
        sub_batch
    };
    let stuck = send();
    let young = std::thread::scope(|scope| {
        let removal = scope.spawn(|| transport.deregister(RANGE));
        until("the removal waits", || backend.queries(0) > 3);
        // Late enough to be young at the removal's deadline.
        let begun = Instant::now();
        until("most of the time is over", || {
            begun.elapsed() > timeout * 3 / 4
        });
        let young = send();
        let error = removal.join().expect("no panic").expect_err("in use");
        assert!(matches!(error, Error::RegionBusy { .. }), "{error}");
        young
    });
    backend.answer_always(0, done(0));
    // It ends when it was asked a few times more, within its own time.
    backend.answer(
        1,
        std::iter::repeat_n(memfabric_transport::Query::Pending, 20),
    );
    backend.answer_always(1, done(0));
    transport.uninstall().expect("nothing was given up");
    assert_eq!(transport.poll(&young, 0).expect("done"), completed(8));
    drop(stuck);
}

#[test]
fn a07_the_undo_of_a_failed_registration_waits_for_the_batch_that_uses_it() {
    let (transport, backend) = installed_with(Duration::from_millis(50));
    let sub_batch = transport.allocate(1);
    // Memory that is not registered may be sent from.
    let request = [read(0, RANGE.address, 0x9000, 8)];
    submit(&transport, &sub_batch, &request).expect("accepted");
    backend.fail_register(-2001);
    let free = Region {
        address: 0x90_0000,
        length: 8,
    };
    let error = transport.vouched_register(&[RANGE, free]);
    assert!(matches!(error, Err(Error::Vendor { .. })));
    assert_eq!(
        backend.calls().last(),
        Some(&Call::Deregister(free.address))
    );
    assert_eq!(removals(&backend), 1, "not the one in use");
    backend.answer_always(0, done(0));
    poll_to_the_end(&transport, &sub_batch);
    assert_eq!(
        backend.calls().last(),
        Some(&Call::Deregister(RANGE.address))
    );
}

#[test]
fn a08_a_slow_registration_stalls_neither_polls_nor_other_memory() {
    let (transport, backend) = installed();
    let other = Region {
        address: 0x90_0000,
        length: 8,
    };
    backend.answer_always(0, done(0));
    let everything_else = || {
        transport.vouched_register(&[other]).expect("registered");
        let sub_batch = transport.allocate(1);
        submit(&transport, &sub_batch, &writes(1, 8)).expect("accepted");
        transport.deregister(other).expect("not in use");
        transport.free(sub_batch);
    };
    for slow in ["register", "deregister"] {
        let gate = match slow {
            "register" => backend.gate_register(),
            _ => backend.gate_deregister(),
        };
        std::thread::scope(|scope| {
            let call = scope.spawn(|| match slow {
                "register" => transport.vouched_register(&[RANGE]),
                _ => transport.deregister(RANGE),
            });
            gate.entered.recv_timeout(FOREVER).expect("at the library");
            everything_else();
            assert!(!call.is_finished());
            gate.leave.send(()).expect("it waits");
            call.join().expect("no panic").expect(slow);
        });
    }
}

#[test]
fn a08_no_batch_begins_to_use_memory_that_is_being_deregistered() {
    let (transport, backend) = installed();
    transport.vouched_register(&[RANGE]).expect("registered");
    let gate = backend.gate_deregister();
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| transport.deregister(RANGE));
        gate.entered.recv_timeout(FOREVER).expect("at the library");
        let sub_batch = transport.allocate(2);
        let requests = [
            read(0, RANGE.address, 0x9000, 8),
            read(1, 0x5000, 0x9000, 8),
        ];
        submit(&transport, &sub_batch, &requests).expect("one of them");
        assert_eq!(backend.submitted().len(), 1);
        assert_eq!(
            transport.poll(&sub_batch, 0).expect("ended"),
            TaskStatus::FAILED
        );
        assert_eq!(
            transport.poll(&sub_batch, 1).expect("runs"),
            TaskStatus::PENDING
        );
        gate.leave.send(()).expect("it waits");
        removal.join().expect("no panic").expect("not in use");
        // Afterwards it is memory like any other.
        let after = transport.allocate(1);
        submit(&transport, &after, &requests[..1]).expect("accepted");
        assert_eq!(backend.submitted().len(), 2);
        transport.free(after);
        transport.free(sub_batch);
    });
}

#[test]
fn a09_a_library_that_writes_to_its_arguments_frees_no_memory() {
    let (transport, backend) = installed_with(Duration::from_millis(50));
    backend.scribble();
    let _sub_batch = refused_removal(&transport);
    assert_eq!(removals(&backend), 0);
}

#[test]
fn a10_the_arguments_of_a_doubtful_refusal_stay() {
    let (transport, backend) = installed();
    backend.refuse_doubtfully();
    let lengths = |events: &[String], level: &str| {
        let lines = events.iter().filter(|event| event.starts_with(level));
        lines.count()
    };
    let (at, events) = events_of(|| {
        backend.refuse_next(-2012);
        let sub_batch = transport.allocate(3);
        submit(&transport, &sub_batch, &writes(3, 64)).expect("a failed task is no error");
        assert_eq!(
            transport.poll(&sub_batch, 0).expect("ended"),
            TaskStatus::FAILED
        );
        transport.free(sub_batch);
        backend.submitted()[0].lengths_at
    });
    assert_eq!(lengths(&events, "ERROR"), 1, "{events:?}");
    // Later batches of the same size take other arrays.
    for _ in 0..100 {
        let sub_batch = transport.allocate(3);
        submit(&transport, &sub_batch, &writes(3, 32)).expect("accepted");
        let latest = backend.submitted().pop().expect("one more");
        assert_ne!(latest.lengths_at, at);
        transport.free(sub_batch);
    }
    let array = std::ptr::with_exposed_provenance::<usize>(at);
    // SAFETY: that it is still there is what is tested.
    let kept = unsafe { std::slice::from_raw_parts(array, 3) };
    assert_eq!(kept, [64; 3]);
}

#[test]
fn a15_an_uninstall_waits_for_a_registration_that_is_at_the_library() {
    let (transport, backend) = installed();
    let dropped = backend.dropped();
    let gate = backend.gate_register();
    drop(backend);
    std::thread::scope(|scope| {
        let registration = scope.spawn(|| transport.vouched_register(&[RANGE]));
        gate.entered.recv_timeout(FOREVER).expect("at the library");
        let uninstall = scope.spawn(|| transport.uninstall());
        until("the uninstall has begun", || {
            let no_room = transport.allocate(0);
            let told = submit(&transport, &no_room, &writes(1, 8));
            matches!(told, Err(Error::Quiesced))
        });
        assert!(!dropped.load(Ordering::SeqCst), "under its call");
        gate.leave.send(()).expect("it waits");
        registration.join().expect("no panic").expect("registered");
        uninstall.join().expect("no panic").expect("uninstalled");
    });
    assert!(dropped.load(Ordering::SeqCst));
    let told = transport.vouched_register(&[RANGE]);
    assert!(matches!(told, Err(Error::NotInstalled)));
}

#[test]
fn a16_a_forked_child_leaves_everything_alone() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(child: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 8)).expect("accepted");
    let calls = backend.calls().len();
    let transport = Arc::into_inner(transport).expect("one owner");
    // SAFETY: the child does nothing but what is tested, and leaves at once.
    let child = unsafe { fork() };
    if child == 0 {
        transport.uninstall().expect("it is not the child's");
        drop(transport);
        let untouched = backend.calls().len() == calls && !backend.dropped().load(Ordering::SeqCst);
        // SAFETY: ends this process.
        unsafe { _exit(if untouched { 0 } else { 1 }) }
    }
    let mut status = -1;
    // SAFETY: one int is written.
    let ended = unsafe { waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0));
    backend.answer_always(0, done(0));
    assert_eq!(poll_to_the_end(&transport, &sub_batch), completed(8));
}

/// Panics with every event once it is armed.
struct PanickingSink(Arc<AtomicBool>);

impl<S: tracing::Subscriber> Layer<S> for PanickingSink {
    fn on_event(&self, _: &tracing::Event<'_>, _: Context<'_, S>) {
        assert!(!self.0.load(Ordering::SeqCst), "a log sink's own panic");
    }
}

#[test]
fn a17_a_panic_in_teardown_frees_nothing_that_is_in_use() {
    let (transport, backend) = installed_with(Duration::from_millis(1100));
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 8)).expect("accepted");
    let at = backend.submitted()[0].lengths_at;
    let dropped = backend.dropped();
    drop(backend);
    transport.free(sub_batch);
    let armed = Arc::new(AtomicBool::new(true));
    let sink = PanickingSink(Arc::clone(&armed));
    let subscriber = tracing_subscriber::registry().with(sink);
    let transport = Arc::into_inner(transport).expect("one owner");
    tracing::subscriber::with_default(subscriber, || {
        let teardown = catch_unwind(AssertUnwindSafe(|| drop(transport)));
        teardown.expect_err("the sink panics with the last line too");
    });
    assert!(!dropped.load(Ordering::SeqCst), "the library is left up");
    let array = std::ptr::with_exposed_provenance::<usize>(at);
    // SAFETY: that it is still there is what is tested.
    assert_eq!(unsafe { array.read_volatile() }, 8);
}

#[test]
fn a17_lengths_that_no_number_can_hold_in_sum_are_no_panic() {
    let (transport, backend) = installed();
    backend.accept_next();
    backend.refuse_next(-2000);
    let sub_batch = transport.allocate(3);
    let big = (1usize << 63) + 1;
    let requests = [
        write(0, 0x1000, 0x2000, 8),
        write(1, 1, 1, big),
        write(1, 1, 1, big),
    ];
    submit(&transport, &sub_batch, &requests).expect("one group is refused");
    assert_eq!(transport.outstanding(), (1, 1));
    assert_eq!(
        transport.poll(&sub_batch, 1).expect("ended"),
        TaskStatus::FAILED
    );
}

#[test]
fn b01_batches_of_freed_sub_batches_do_not_pile_up() {
    for count in [20_000u64, 200_000] {
        let (transport, backend) = installed();
        let mut most = 0;
        for id in 0..count {
            backend.answer_always(id, done(0));
            let sub_batch = transport.allocate(1);
            submit(&transport, &sub_batch, &writes(1, 64)).expect("accepted");
            transport.free(sub_batch);
            most = most.max(transport.outstanding().0);
        }
        assert!(most <= 2, "{most} outstanding that the vendor has finished");
        // At most one question for each that was needed.
        let queries = backend.calls().len() as u64 - count;
        assert!(queries <= count, "{queries} queries");
    }
}

#[test]
fn b01_a_freed_batch_that_stays_pending_costs_two_questions_a_call() {
    let (transport, backend) = installed();
    for _ in 0..100 {
        let sub_batch = transport.allocate(1);
        submit(&transport, &sub_batch, &writes(1, 64)).expect("accepted");
        transport.free(sub_batch);
    }
    let before = backend.calls().len();
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 64)).expect("accepted");
    let since = backend.calls().split_off(before);
    assert_eq!(since.len(), 3, "{since:?}");
    // In turn: nobody is asked about twice before all were asked about once.
    let asked = |id| backend.queries(id);
    let (least, most) = (0..100).fold((usize::MAX, 0), |(least, most), id| {
        (least.min(asked(id)), most.max(asked(id)))
    });
    assert!(most - least <= 100, "{least} to {most}");
    transport.free(sub_batch);
}

fn warnings(events: &[String]) -> usize {
    events
        .iter()
        .filter(|event| event.starts_with("WARN"))
        .count()
}

/// Makes `count` calls, whose lines it counts: one a second at most, with room for
/// a machine on which they take several.
fn few_warnings(count: usize, mut call: impl FnMut(&Transport, &Scripted)) {
    let begun = Instant::now();
    let (_, events) = events_of(|| {
        let (transport, backend) = installed();
        for _ in 0..count {
            call(&transport, &backend);
        }
    });
    let most = 1 + begun.elapsed().as_secs() as usize;
    let found = warnings(&events);
    assert!((1..=most).contains(&found), "{found} lines, {most} seconds");
}

fn one_request() -> impl ExactSizeIterator<Item = Request> + Clone {
    [write(0, 0x1000, 0x2000, 64)].into_iter()
}

#[test]
fn b06_a_peer_without_an_endpoint_is_a_line_a_second() {
    few_warnings(10_000, |transport, _| {
        let sub_batch = transport.allocate(1);
        let peer = Peer {
            name: "10.0.0.9:1",
            endpoint: "",
            problem: "segment 7 has no memfabric_unique_id",
        };
        let peers = std::iter::once(peer);
        transport
            .vouched_submit(&sub_batch, peers, one_request())
            .expect("a failed task is no error");
        transport.free(sub_batch);
    });
}

#[test]
fn b06_a_peer_that_refuses_is_a_line_a_second() {
    few_warnings(10_000, |transport, backend| {
        backend.refuse_next(-2014);
        let sub_batch = transport.allocate(1);
        submit(transport, &sub_batch, &writes(1, 64)).expect("a failed task is no error");
        transport.free(sub_batch);
    });
}

#[test]
fn b06_batches_that_fail_are_a_line_a_second() {
    let mut id = 0;
    few_warnings(10_000, |transport, backend| {
        backend.answer_always(id, done(-1));
        id += 1;
        let sub_batch = transport.allocate(1);
        submit(transport, &sub_batch, &writes(1, 64)).expect("accepted");
        assert_eq!(
            poll_to_the_end(transport, &sub_batch).state,
            TaskState::Failed
        );
        transport.free(sub_batch);
    });
}

#[test]
fn b09_the_largest_sub_batch_costs_what_is_used_of_it() {
    let (transport, _backend) = installed();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/statm").expect("linux");
        let pages = status.split(' ').nth(1).expect("resident");
        pages.parse::<usize>().expect("a number")
    };
    let before = resident();
    let sub_batches: Vec<_> = (0..4).map(|_| transport.allocate(1 << 24)).collect();
    let pages = resident() - before;
    assert!(pages < 16_384, "{pages} pages for what nobody uses");
    assert_eq!(sub_batches[0].capacity(), 1 << 24);
    for sub_batch in sub_batches {
        transport.free(sub_batch);
    }
}

#[test]
fn c05_an_undeclared_positive_answer_names_the_setting_for_it() {
    let (transport, backend) = installed();
    backend.answer_always(0, query_error(7));
    let sub_batch = transport.allocate(1);
    submit(&transport, &sub_batch, &writes(1, 8)).expect("accepted");
    let (error, events) = events_of(|| transport.poll(&sub_batch, 0));
    let error = match error {
        // The first poll may take the answer of the submission.
        Ok(_) => transport
            .poll(&sub_batch, 0)
            .expect_err("an unknown answer"),
        Err(error) => error,
    };
    let setting = "set transports/memfabric/need_retry_code to 7";
    assert!(error.to_string().contains(setting), "{error}");
    assert!(
        events.iter().any(|event| event.contains(setting)),
        "{events:?}"
    );
    backend.answer_always(0, query_error(-2014));
    let error = transport.poll(&sub_batch, 0).expect_err("no pending");
    assert!(!error.to_string().contains("need_retry_code"), "{error}");
}
