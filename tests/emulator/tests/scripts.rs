// SPDX-License-Identifier: Apache-2.0
//! Every script rule, once. Both handles are of one process.
#![allow(unsafe_code)] // the peer-down callback

mod common;

use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::*;
use mf_smem::abi::*;

/// An initiator, a target, memory of each, and the target's registered.
struct Pair {
    handle: Handle,
    url: String,
    from: &'static mut [u8],
    to: &'static mut [u8],
}

impl Pair {
    fn new() -> Self {
        assert_eq!(init(), SM_OK, "{}", last_error());
        let (handle, target) = (Handle::create(), Handle::create());
        let (from, to) = (memory(4096, 0x5a), memory(4096, POOL_FILL));
        assert_eq!(target.register(address(to), 4096), SM_OK);
        Self {
            handle,
            url: target.url(),
            from,
            to,
        }
    }

    fn blocks(&self, lengths: &[usize]) -> Vec<Block> {
        let place = |(i, &length): (usize, &usize)| {
            (
                address(self.from) + 64 * i,
                address(self.to) + 64 * i,
                length,
            )
        };
        lengths.iter().enumerate().map(place).collect()
    }

    fn try_write(&self) -> Result<u64, i32> {
        self.handle.write(&self.url, &self.blocks(&[8, 8, 8]))
    }

    fn write(&self) -> u64 {
        self.try_write()
            .unwrap_or_else(|code| panic!("{code}: {}", last_error()))
    }

    /// Which of the first blocks of 8 bytes have arrived.
    fn arrived(&self) -> Vec<usize> {
        (0..4)
            .filter(|i| self.to[64 * i..][..8] == [0x5a; 8])
            .collect()
    }
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn a_call_answers_a_code_on_its_occasions_and_does_nothing_else() {
    isolated(
        "a_call_answers_a_code_on_its_occasions_and_does_nothing_else",
        || {
            let pair = Pair::new();
            script("submit=-2014@3; submit=SM_TIMEOUT@4..5");
            let answers: Vec<_> = (0..6).map(|_| pair.try_write()).collect();
            assert_eq!(
                answers,
                [Ok(0), Ok(1), Err(-2014), Err(-2004), Err(-2004), Ok(2)]
            );
            assert_eq!(
                (count("submit"), count("batches"), count("refused")),
                (6, 3, 3)
            );
            assert!((0..3).all(|id| pair.handle.result(id) == SM_OK));

            let extra = memory(64, 0);
            script("register=-2001@1; batch_register=-1; deregister=-2007@1; get_rpc_port=-2003");
            assert_eq!(pair.handle.register(address(extra), 64), SM_MALLOC_FAILED);
            assert_eq!(
                pair.handle.batch_register(&[(address(extra), 64)]),
                SM_ERROR
            );
            assert_eq!(count("regions"), 1, "nothing was registered");
            assert_eq!(pair.handle.register(address(extra), 64), SM_OK);
            assert_eq!(pair.handle.deregister(address(extra)), SM_OBJECT_NOT_EXISTS);
            assert_eq!(pair.handle.deregister(address(extra)), SM_OK);
            assert_eq!(pair.handle.port(), (SM_NOT_STARTED, 0));

            script("set_peer_down_callback=-1; set_log_level=-2; config_init=-3@1; create=null");
            assert_eq!(pair.handle.set_callback(None, std::ptr::null_mut()), -1);
            // SAFETY: a plain number.
            assert_eq!(unsafe { (functions().smem_set_log_level)(0) }, -2);
            assert_eq!(count("log_level"), 2, "it was not set");
            // SAFETY: NULL is not touched by a call that does nothing.
            let code = unsafe { (functions().smem_trans_config_init)(std::ptr::null_mut()) };
            assert_eq!(code, -3);
            assert_eq!(Handle::try_create(&config("127.0.0.1:0")), Handle(0));
            assert_eq!(count("violations"), 0);
        },
    );
}

#[test]
fn init_answers_that_somebody_else_has_initialised() {
    isolated("init_answers_that_somebody_else_has_initialised", || {
        script("init=SM_REPEAT_CALL");
        assert_eq!(init(), SM_REPEAT_CALL);
        Handle::create().destroy();
        assert_eq!(count("violations"), 0);
        uninit();
        assert!(
            violations()[0].contains("did not initialise"),
            "{:?}",
            violations()
        );
    });
}

#[test]
fn init_fails_and_can_succeed_later() {
    isolated("init_fails_and_can_succeed_later", || {
        script("init=-2000@1");
        assert_eq!(init(), SM_INVALID_PARAM);
        assert_eq!(init(), SM_OK);
        assert_eq!(init(), SM_REPEAT_CALL);
        uninit();
        assert_eq!(init(), SM_OK);
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn a_query_answers_any_code_and_the_result_stays() {
    isolated("a_query_answers_any_code_and_the_result_stays", || {
        let pair = Pair::new();
        let id = pair.write();
        wait_for("the batch", || count("unfinished") == 0);
        script("query=-2014@1; query=1@2; query=-1@3");
        let answers: Vec<_> = (0..4).map(|_| pair.handle.query(id)).collect();
        let slot = UNWRITTEN;
        assert_eq!(
            answers,
            [(-2014, slot), (1, slot), (-1, slot), (SM_OK, SM_OK)]
        );
        assert_eq!((count("queries_pending"), count("query_errors")), (1, 2));

        script("query=-2007");
        let id = pair.write();
        assert!((0..50).all(|_| pair.handle.query(id) == (SM_OBJECT_NOT_EXISTS, slot)));
        script("");
        assert_eq!(pair.handle.result(id), SM_OK);
        assert_eq!(
            count("violations"),
            0,
            "scripted answers are nobody's fault"
        );
    });
}

#[test]
fn batches_answer_pending_as_often_as_wanted() {
    isolated("batches_answer_pending_as_often_as_wanted", || {
        let pair = Pair::new();
        script("pending=3@1");
        let (first, second) = (pair.write(), pair.write());
        wait_for("both batches", || count("unfinished") == 0);
        let codes: Vec<_> = (0..4).map(|_| pair.handle.query(first).0).collect();
        assert_eq!(codes, [1, 1, 1, SM_OK]);
        assert_eq!(pair.handle.query(second).0, SM_OK);
    });
}

#[test]
fn pending_can_have_another_number() {
    isolated("pending_can_have_another_number", || {
        let pair = Pair::new();
        script("pending=1; need_retry=77");
        let id = pair.write();
        wait_for("the batch", || count("unfinished") == 0);
        assert_eq!(pair.handle.query(id), (77, UNWRITTEN));
        assert_eq!(pair.handle.query(id), (SM_OK, SM_OK));
    });
}

#[test]
fn a_delayed_batch_is_executed_later_and_others_overtake_it() {
    isolated(
        "a_delayed_batch_is_executed_later_and_others_overtake_it",
        || {
            let pair = Pair::new();
            script("delay=50ms@1");
            let begin = Instant::now();
            let (first, second) = (pair.write(), pair.write());
            assert_eq!(pair.handle.result(second), SM_OK);
            let overtaken = pair.handle.query(first).0 == SM_NEED_RETRY;
            assert!(overtaken || begin.elapsed() >= millis(50));
            assert_eq!(pair.handle.result(first), SM_OK);
            assert!(begin.elapsed() >= millis(50), "{:?}", begin.elapsed());
        },
    );
}

#[test]
fn a_result_fails_and_nothing_is_copied() {
    isolated("a_result_fails_and_nothing_is_copied", || {
        let pair = Pair::new();
        script("result=-2012@1; result=7@2");
        let ids = [pair.write(), pair.write()];
        assert_eq!(ids.map(|id| pair.handle.result(id)), [-2012, 7]);
        assert!(pair.arrived().is_empty());
        assert_eq!((count("results"), count("failed")), (2, 2));
        let id = pair.write();
        assert_eq!(pair.handle.result(id), SM_OK);
        assert_eq!(pair.arrived(), [0, 1, 2]);
    });
}

#[test]
fn a_partial_batch_leaves_some_blocks_written() {
    isolated("a_partial_batch_leaves_some_blocks_written", || {
        let pair = Pair::new();
        script("partial=2@1; result=-5@2; partial=1@2");
        let id = pair.write();
        assert_eq!(pair.handle.result(id), SM_PARTIAL_FAILED);
        assert_eq!(pair.arrived(), [0, 1]);
        assert_eq!(count("bytes_written"), 16);
        let id = pair.write();
        assert_eq!(pair.handle.result(id), -5);
    });
}

#[test]
fn a_held_batch_finishes_only_after_a_release() {
    isolated("a_held_batch_finishes_only_after_a_release", || {
        let pair = Pair::new();
        script("hang@1");
        let (held, other) = (pair.write(), pair.write());
        assert_eq!(pair.handle.result(other), SM_OK);
        assert!((0..100).all(|_| pair.handle.query(held) == (SM_NEED_RETRY, UNWRITTEN)));
        assert_eq!(
            (count("held"), count("unfinished"), count("outstanding")),
            (1, 1, 1)
        );
        release();
        assert_eq!(pair.handle.result(held), SM_OK);
        assert_eq!(
            (count("held"), count("unfinished"), count("outstanding")),
            (0, 0, 0)
        );
    });
}

#[test]
fn a_result_can_stay_unwritten() {
    isolated("a_result_can_stay_unwritten", || {
        let pair = Pair::new();
        script("no_result@1");
        let id = pair.write();
        wait_for("the batch", || count("unfinished") == 0);
        assert_eq!(pair.handle.query(id), (SM_OK, UNWRITTEN));
        assert_eq!(
            pair.handle.query(id).0,
            SM_OBJECT_NOT_EXISTS,
            "it was given all the same"
        );
        let id = pair.write();
        assert_eq!(pair.handle.result(id), SM_OK);
    });
}

#[test]
fn zero_lengths_are_nothing_to_copy_unless_refused() {
    isolated("zero_lengths_are_nothing_to_copy_unless_refused", || {
        let pair = Pair::new();
        let blocks = pair.blocks(&[8, 0, 8]);
        let id = pair.handle.write(&pair.url, &blocks).expect("accepted");
        assert_eq!(pair.handle.result(id), SM_OK);
        assert_eq!(pair.arrived(), [0, 2]);
        script("refuse_zero");
        assert_eq!(pair.handle.write(&pair.url, &blocks), Err(SM_INVALID_PARAM));
        let id = pair.write();
        assert_eq!(
            pair.handle.result(id),
            SM_OK,
            "without a zero it is accepted"
        );
    });
}

#[test]
fn arguments_read_late_must_still_be_there() {
    isolated("arguments_read_late_must_still_be_there", || {
        let pair = Pair::new();
        script("late_args; hang");
        let mut kept = Arguments::new(&pair.url, OPCODE_WRITE, &pair.blocks(&[8, 8]));
        let kept_id = pair.handle.submit_arguments(&mut kept).expect("accepted");
        let mut changed = Arguments::new(&pair.url, OPCODE_WRITE, &pair.blocks(&[8, 8, 8]));
        let changed_id = pair
            .handle
            .submit_arguments(&mut changed)
            .expect("accepted");
        // What the next owner of freed memory might do.
        changed.sizes[2] = 9;
        release();
        assert_eq!(pair.handle.result(kept_id), SM_OK);
        assert_eq!(pair.handle.result(changed_id), SM_INVALID_PARAM);
        assert_eq!(pair.arrived(), [0, 1], "only the kept arguments were used");
        assert_eq!(violations().len(), 1);
        assert!(
            violations()[0].contains("arguments of batch 1"),
            "{:?}",
            violations()
        );
    });
}

#[test]
fn arguments_freed_while_the_batch_runs_are_noticed_too() {
    isolated(
        "arguments_freed_while_the_batch_runs_are_noticed_too",
        || {
            let pair = Pair::new();
            // A batch that reads into its own argument array changes it while it runs.
            let mut arguments = Arguments::new(&pair.url, OPCODE_READ, &pair.blocks(&[8]));
            arguments.local[0] = arguments.sizes.as_mut_ptr().cast();
            script("late_args");
            let id = pair
                .handle
                .submit_arguments(&mut arguments)
                .expect("accepted");
            assert_eq!(pair.handle.result(id), SM_OK);
            assert!(
                violations()[0].contains("changed or freed"),
                "{:?}",
                violations()
            );
        },
    );
}

#[test]
fn what_is_wrong_with_late_arguments_is_the_result() {
    isolated("what_is_wrong_with_late_arguments_is_the_result", || {
        let pair = Pair::new();
        script("late_args");
        let bad_range = [(address(pair.from), address(pair.from), 8)];
        let id = pair
            .handle
            .write(&pair.url, &bad_range)
            .expect("accepted unread");
        assert_eq!(pair.handle.result(id), SM_INVALID_PARAM);
        let id = pair
            .handle
            .write("127.0.0.1:1", &pair.blocks(&[8]))
            .expect("accepted unread");
        assert_eq!(pair.handle.result(id), SM_NOT_CONNECTED);
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn a_call_can_be_slow() {
    isolated("a_call_can_be_slow", || {
        let pair = Pair::new();
        script("slow_submit=30ms@1; slow_batch_register=30; slow_query=30000us@1");
        let takes_long = |call: &mut dyn FnMut()| {
            let begin = Instant::now();
            call();
            begin.elapsed() >= millis(30)
        };
        assert!(takes_long(&mut || assert_eq!(pair.try_write(), Ok(0))));
        let extra = memory(64, 0);
        assert!(takes_long(&mut || {
            assert_eq!(pair.handle.batch_register(&[(address(extra), 64)]), SM_OK);
        }));
        assert!(takes_long(&mut || {
            pair.handle.query(0);
        }));
    });
}

#[test]
fn a_call_can_block_until_a_release() {
    isolated("a_call_can_block_until_a_release", || {
        let pair = Pair::new();
        script("block_submit@1; block_query@1");
        for _ in 0..2 {
            std::thread::scope(|scope| {
                let call = scope.spawn(|| match pair.try_write() {
                    Ok(0) => true,
                    _ => pair.handle.query(0).0 == SM_OK,
                });
                wait_for("the call to block", || count("blocked") == 1);
                assert!(!call.is_finished());
                release();
                assert!(call.join().expect("no panic"));
            });
            assert_eq!(count("blocked"), 0);
            wait_for("the batch", || count("unfinished") == 0);
        }
    });
}

#[test]
fn the_port_can_be_any() {
    isolated("the_port_can_be_any", || {
        let pair = Pair::new();
        script("port=0@1; port=65535@2");
        assert_eq!(pair.handle.port(), (SM_OK, 0));
        assert_eq!(pair.handle.port(), (SM_OK, 65_535));
        let (code, port) = pair.handle.port();
        assert!(code == SM_OK && port != 0 && port != 65_535);
    });
}

#[test]
fn a_batch_registration_fails_half_way() {
    isolated("a_batch_registration_fails_half_way", || {
        let pair = Pair::new();
        let more = memory(300, 0);
        let regions = [0, 100, 200].map(|offset| (address(more) + offset, 100));
        script("region=-2001@3");
        assert_eq!(pair.handle.batch_register(&regions), SM_MALLOC_FAILED);
        let codes = regions.map(|(address, _)| pair.handle.deregister(address));
        assert_eq!(
            codes,
            [SM_OK, SM_OK, SM_OBJECT_NOT_EXISTS],
            "two were registered"
        );
        assert_eq!(pair.handle.batch_register(&regions), SM_OK);
    });
}

#[test]
fn peers_see_a_registration_late() {
    isolated("peers_see_a_registration_late", || {
        let pair = Pair::new();
        let target = Handle::create();
        let late = memory(64, 0);
        script("visible_after=40ms");
        let begin = Instant::now();
        assert_eq!(target.register(address(late), 64), SM_OK);
        let block = [(address(pair.from), address(late), 8)];
        let mut answer = pair.handle.write(&target.url(), &block);
        assert!(answer == Err(SM_INVALID_PARAM) || begin.elapsed() >= millis(40));
        wait_for("the region", || {
            answer = pair.handle.write(&target.url(), &block);
            answer != Err(SM_INVALID_PARAM)
        });
        assert!(begin.elapsed() >= millis(40));
        assert_eq!(pair.handle.result(answer.expect("accepted")), SM_OK);
    });
}

/// Peer-down callbacks: who, and on which thread.
static DOWN: Mutex<Vec<(String, std::thread::ThreadId)>> = Mutex::new(Vec::new());

extern "C" fn record_down(peer: *const c_char, user: *mut c_void) {
    assert_eq!(user.addr(), 77);
    // SAFETY: the emulator gives a terminated string.
    let peer = unsafe { CStr::from_ptr(peer) }
        .to_str()
        .expect("UTF-8")
        .to_owned();
    DOWN.lock()
        .expect("no panic")
        .push((peer, std::thread::current().id()));
}

fn downs() -> Vec<(String, std::thread::ThreadId)> {
    DOWN.lock().expect("no panic").clone()
}

fn record_downs_of(handle: Handle) {
    let user = std::ptr::without_provenance_mut(77);
    assert_eq!(handle.set_callback(Some(record_down), user), SM_OK);
}

#[test]
fn the_peer_down_callback_runs_inside_a_call() {
    isolated("the_peer_down_callback_runs_inside_a_call", || {
        let pair = Pair::new();
        record_downs_of(pair.handle);
        script("peer_down_submit=10.0.0.9:1@2; peer_down_query=10.0.0.9:2@1");
        pair.write();
        assert!(downs().is_empty());
        pair.write();
        pair.handle.query(0);
        let here = std::thread::current().id();
        let expected = ["10.0.0.9:1", "10.0.0.9:2"].map(|peer| (peer.to_owned(), here));
        assert_eq!(downs(), expected);
        assert_eq!(count("peer_downs"), 2);
    });
}

#[test]
fn the_peer_down_callback_runs_from_a_thread() {
    isolated("the_peer_down_callback_runs_from_a_thread", || {
        let pair = Pair::new();
        record_downs_of(pair.handle);
        script("peer_down_thread_submit=10.0.0.9:1");
        pair.write();
        // SAFETY: a terminated string.
        let told = unsafe { (functions().mf_emu_peer_down)(c"10.0.0.9:2".as_ptr()) };
        assert_eq!(told, 1, "only one handle has a callback");
        let names: Vec<_> = downs().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["10.0.0.9:1", "10.0.0.9:2"]);
        let here = std::thread::current().id();
        assert!(downs().iter().all(|(_, thread)| *thread != here));
    });
}

#[test]
fn a_lost_peer_ends_its_batches_and_stays_lost() {
    isolated("a_lost_peer_ends_its_batches_and_stays_lost", || {
        let pair = Pair::new();
        record_downs_of(pair.handle);
        let other = Handle::create();
        assert_eq!(other.register(address(pair.from), 64), SM_OK);
        script("delay=3600s@..2; lose_peer@3");
        let ids = [pair.write(), pair.write(), pair.write()];
        assert_eq!(ids.map(|id| pair.handle.result(id)), [SM_NOT_CONNECTED; 3]);
        assert_eq!(pair.try_write(), Err(SM_NOT_CONNECTED));
        wait_for("the callback", || !downs().is_empty());
        assert_eq!(downs()[0].0, pair.url);
        let block = [(address(pair.to), address(pair.from), 8)];
        let id = pair
            .handle
            .write(&other.url(), &block)
            .expect("another peer");
        assert_eq!(pair.handle.result(id), SM_OK);
        assert_eq!((downs().len(), count("violations")), (1, 0));
    });
}

#[test]
fn rules_can_be_added_and_a_bad_script_changes_nothing() {
    isolated(
        "rules_can_be_added_and_a_bad_script_changes_nothing",
        || {
            let pair = Pair::new();
            script("pending=1");
            script("+result=-9");
            assert_eq!(try_script("pending=0; nonsense=1"), SM_INVALID_PARAM);
            assert!(last_error().contains("nonsense"), "{}", last_error());
            let id = pair.write();
            wait_for("the batch", || count("unfinished") == 0);
            assert_eq!(pair.handle.query(id), (SM_NEED_RETRY, UNWRITTEN));
            assert_eq!(pair.handle.query(id), (SM_OK, -9));
        },
    );
}

#[test]
fn the_environment_has_a_script_for_other_processes() {
    let name = "the_environment_has_a_script_for_other_processes";
    isolated_with(
        name,
        &[("MF_EMULATOR", "submit=-2014@2\npending=1")],
        || {
            let pair = Pair::new();
            assert_eq!(pair.try_write(), Ok(0));
            assert_eq!(pair.try_write(), Err(SM_NOT_CONNECTED));
            assert_eq!(pair.handle.query(0).0, SM_NEED_RETRY);
            uninit();
            reset();
            assert_eq!(init(), SM_OK, "the environment counts once");
            assert_eq!((pair.try_write(), pair.try_write()), (Ok(1), Ok(2)));
        },
    );
}

#[test]
fn a_script_of_the_process_wins_over_the_environment() {
    let name = "a_script_of_the_process_wins_over_the_environment";
    isolated_with(name, &[("MF_EMULATOR", "submit=-2014")], || {
        script("pending=1");
        assert_eq!(Pair::new().try_write(), Ok(0));
    });
}

#[test]
fn init_refuses_a_bad_script_in_the_environment() {
    let name = "init_refuses_a_bad_script_in_the_environment";
    isolated_with(name, &[("MF_EMULATOR", "dealy=5ms")], || {
        assert_eq!(init(), SM_INVALID_PARAM);
        let error = last_error();
        assert!(
            error.contains("MF_EMULATOR") && error.contains("dealy"),
            "{error}"
        );
    });
}
