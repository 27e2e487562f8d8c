// SPDX-License-Identifier: Apache-2.0
//! Real bytes between real processes, and what happens when one of them ends.
#![allow(unsafe_code)] // the peer-down callback, and resource limits

mod common;

use std::ffi::{CStr, c_char, c_void};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::*;
use mf_smem::abi::*;

#[test]
#[ignore = "a role for the other tests, not a test"]
fn peer_process() {
    serve_peer();
}

/// An initiator with some memory, and a peer in another process.
struct Setting {
    peer: PeerProcess,
    handle: Handle,
    from: &'static mut [u8],
}

impl Setting {
    fn new() -> Self {
        let peer = PeerProcess::start();
        assert_eq!(init(), SM_OK);
        Self {
            peer,
            handle: Handle::create(),
            from: memory(4096, 0x5a),
        }
    }

    fn block(&self) -> [Block; 1] {
        [(address(self.from), self.peer.pool, 8)]
    }

    fn try_write(&self) -> Result<u64, i32> {
        self.handle.write(&self.peer.url, &self.block())
    }

    fn write(&self) -> u64 {
        self.try_write()
            .unwrap_or_else(|code| panic!("{code}: {}", last_error()))
    }
}

static DOWN: Mutex<Vec<String>> = Mutex::new(Vec::new());

extern "C" fn record_down(peer: *const c_char, _: *mut c_void) {
    // SAFETY: the emulator gives a terminated string.
    let peer = unsafe { CStr::from_ptr(peer) }
        .to_str()
        .expect("UTF-8")
        .to_owned();
    DOWN.lock().expect("no panic").push(peer);
}

fn downs() -> Vec<String> {
    DOWN.lock().expect("no panic").clone()
}

fn record_downs_of(handle: Handle) {
    assert_eq!(
        handle.set_callback(Some(record_down), std::ptr::null_mut()),
        SM_OK
    );
}

#[test]
fn bytes_are_written_to_and_read_from_another_process() {
    isolated("bytes_are_written_to_and_read_from_another_process", || {
        let Setting {
            mut peer,
            handle,
            from,
        } = Setting::new();
        let to = memory(4096, 0);
        let write = [
            (address(from), peer.pool + 100, 1000),
            (address(from), peer.pool + 5000, 1),
            (address(from), peer.pool + POOL - 96, 96),
        ];
        let first = handle.write(&peer.url, &write).expect("accepted");
        assert_eq!(first, 0, "batch ids count from 0");
        assert_eq!(handle.result(first), SM_OK);
        assert_eq!(peer.bytes(99, 2), [POOL_FILL, 0x5a]);
        assert_eq!(peer.bytes(1099, 2), [0x5a, POOL_FILL]);
        assert_eq!(peer.bytes(4999, 3), [POOL_FILL, 0x5a, POOL_FILL]);
        assert_eq!(peer.bytes(POOL - 97, 2), [POOL_FILL, 0x5a]);
        let read = [(address(to) + 1, peer.pool + 99, 3)];
        let second = handle.read(&peer.url, &read).expect("accepted");
        assert_eq!((second, handle.result(second)), (1, SM_OK));
        assert_eq!(to[..5], [0, POOL_FILL, 0x5a, 0x5a, 0]);
        assert_eq!(
            (count("bytes_written"), count("bytes_read"), count("blocks")),
            (1097, 3, 4)
        );
        handle.destroy();
        uninit();
        assert_eq!(violations(), Vec::<String>::new());
    });
}

#[test]
fn both_sides_can_write_to_each_other() {
    isolated("both_sides_can_write_to_each_other", || {
        let Setting {
            mut peer,
            handle,
            from,
        } = Setting::new();
        let pool = memory(64, 0);
        assert_eq!(handle.register(address(pool), 64), SM_OK);
        let url = handle.url();
        let answer = peer.ask(&format!("write {url} {} 0 8", address(pool)));
        assert_eq!(
            (answer.as_str(), &pool[..9]),
            ("0", &[17, 17, 17, 17, 17, 17, 17, 17, 0][..])
        );
        let block = [(address(from), peer.pool + 8, 8)];
        let id = handle.write(&peer.url, &block).expect("accepted");
        assert_eq!(
            (handle.result(id), peer.bytes(8, 8)),
            (SM_OK, vec![0x5a; 8])
        );
    });
}

#[test]
fn a_range_outside_the_registered_ones_refuses_the_batch_and_writes_nothing() {
    let name = "a_range_outside_the_registered_ones_refuses_the_batch_and_writes_nothing";
    isolated(name, || {
        let mut it = Setting::new();
        let (pool, from) = (it.peer.pool, address(it.from));
        for bad in [
            (pool + POOL - 8, 9),
            (pool - 1, 2),
            (0x10, 8),
            (usize::MAX, 8),
        ] {
            let blocks = [(from, pool, 8), (from, bad.0, bad.1)];
            assert_eq!(
                it.handle.write(&it.peer.url, &blocks),
                Err(SM_INVALID_PARAM)
            );
            assert!(last_error().contains("block 1"), "{}", last_error());
        }
        assert_eq!(it.peer.bytes(0, 8), [POOL_FILL; 8]);
        assert_eq!(it.peer.bytes(POOL - 8, 8), [POOL_FILL; 8]);
        assert_eq!(it.peer.ask("deregister"), "0");
        assert_eq!(it.try_write(), Err(SM_INVALID_PARAM), "withdrawn");
        assert_eq!(it.peer.ask("register"), "0");
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
        assert_eq!(count("violations"), 0, "a refused range is no violation");
    });
}

#[test]
fn a_region_withdrawn_between_submission_and_execution_is_not_written() {
    let name = "a_region_withdrawn_between_submission_and_execution_is_not_written";
    isolated(name, || {
        let mut it = Setting::new();
        script("hang");
        let id = it.write();
        assert_eq!(it.peer.ask("deregister"), "0");
        release();
        assert_eq!(it.handle.result(id), SM_INVALID_PARAM);
        assert_eq!(it.peer.bytes(0, 8), [POOL_FILL; 8]);
    });
}

#[test]
fn a_stopped_peer_is_written_all_the_same() {
    isolated("a_stopped_peer_is_written_all_the_same", || {
        let mut it = Setting::new();
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
        it.peer.signal(libc::SIGSTOP);
        let blocks = [(address(it.from), it.peer.pool + 64, 64)];
        let id = it.handle.write(&it.peer.url, &blocks).expect("accepted");
        assert_eq!(
            it.handle.result(id),
            SM_OK,
            "no CPU of the target is needed"
        );
        it.peer.signal(libc::SIGCONT);
        assert_eq!(it.peer.bytes(64, 64), [0x5a; 64]);
    });
}

#[test]
fn the_target_spends_no_cpu_time_per_copy() {
    isolated("the_target_spends_no_cpu_time_per_copy", || {
        let mut it = Setting::new();
        let from = memory(POOL, 0x5a);
        let cpu_us = |peer: &mut PeerProcess| peer.ask("cpu_us").parse::<u64>().expect("a number");
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK, "connected");
        let before = cpu_us(&mut it.peer);
        for _ in 0..200 {
            let id = it
                .handle
                .write(&it.peer.url, &[(address(from), it.peer.pool, POOL)]);
            assert_eq!(it.handle.result(id.expect("accepted")), SM_OK);
        }
        let spent = cpu_us(&mut it.peer) - before;
        assert!(spent < 5_000, "{spent} us for 200 MiB");
    });
}

#[test]
fn a_killed_peer_ends_its_batches_at_once_and_calls_back_once() {
    isolated(
        "a_killed_peer_ends_its_batches_at_once_and_calls_back_once",
        || {
            let mut it = Setting::new();
            record_downs_of(it.handle);
            let mut healthy = PeerProcess::start();
            script("delay=3600s@2..4");
            let id = it.write();
            assert_eq!(it.handle.result(id), SM_OK);
            let waiting = [it.write(), it.write(), it.write()];
            it.peer.kill();
            let begin = Instant::now();
            assert_eq!(
                waiting.map(|id| it.handle.result(id)),
                [SM_NOT_CONNECTED; 3]
            );
            assert!(
                begin.elapsed() < Duration::from_millis(500),
                "{:?}",
                begin.elapsed()
            );
            assert_eq!(it.try_write(), Err(SM_NOT_CONNECTED));
            wait_for("the callback", || !downs().is_empty());
            let block = [(address(it.from), healthy.pool, 8)];
            let id = it
                .handle
                .write(&healthy.url, &block)
                .expect("others are not touched");
            assert_eq!(
                (it.handle.result(id), healthy.bytes(0, 8)),
                (SM_OK, vec![0x5a; 8])
            );
            it.handle.destroy();
            assert_eq!(downs(), [it.peer.url.clone()]);
            assert_eq!(count("violations"), 0);
        },
    );
}

#[test]
fn a_peer_killed_while_bytes_move_ends_the_batch() {
    isolated("a_peer_killed_while_bytes_move_ends_the_batch", || {
        const LENGTH: usize = 64 << 20;
        let mut peer = PeerProcess::start_with(&[(POOL_VARIABLE, &LENGTH.to_string())]);
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let from = memory(LENGTH, 0x5a);
        // The same memory again and again: seconds of work.
        let blocks = vec![(address(from), peer.pool, LENGTH); 100];
        let id = handle.write(&peer.url, &blocks).expect("accepted");
        wait_for("the first bytes", || peer.bytes(0, 1) == [0x5a]);
        assert_eq!(handle.query(id).0, SM_NEED_RETRY, "it is under way");
        peer.kill();
        let begin = Instant::now();
        assert_eq!(handle.result(id), SM_NOT_CONNECTED);
        assert!(
            begin.elapsed() < Duration::from_millis(500),
            "{:?}",
            begin.elapsed()
        );
    });
}

#[test]
fn a_batch_for_a_killed_peer_does_not_wait_for_those_before_it() {
    isolated(
        "a_batch_for_a_killed_peer_does_not_wait_for_those_before_it",
        || {
            const LENGTH: usize = 64 << 20;
            let mut it = Setting::new();
            let other = Handle::create();
            let (from, to) = (memory(LENGTH, 1), memory(LENGTH, 0));
            assert_eq!(other.register(address(to), LENGTH), SM_OK);
            // Seconds of work; the process does not wait for its end.
            let long = vec![(address(from), address(to), LENGTH); 400];
            let long = it.handle.write(&other.url(), &long).expect("accepted");
            let short = it.write();
            it.peer.kill();
            assert_eq!(it.handle.result(short), SM_NOT_CONNECTED);
            assert_eq!(
                it.handle.query(long).0,
                SM_NEED_RETRY,
                "it is still under way"
            );
        },
    );
}

#[test]
fn a_peer_that_destroys_its_handle_is_gone_like_a_dead_one() {
    isolated(
        "a_peer_that_destroys_its_handle_is_gone_like_a_dead_one",
        || {
            let mut it = Setting::new();
            record_downs_of(it.handle);
            script("delay=3600s");
            let id = it.write();
            assert_eq!(it.peer.ask("destroy"), "destroyed");
            assert_eq!(it.handle.result(id), SM_NOT_CONNECTED);
            assert_eq!(it.try_write(), Err(SM_NOT_CONNECTED));
            wait_for("the callback", || downs() == [it.peer.url.clone()]);
            assert_eq!(it.peer.bytes(0, 8), [POOL_FILL; 8]);
        },
    );
}

#[test]
fn a_target_hears_of_its_initiators_end_once() {
    isolated("a_target_hears_of_its_initiators_end_once", || {
        let mut it = Setting::new();
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
        let pool = memory(64, 0);
        assert_eq!(it.handle.register(address(pool), 64), SM_OK);
        let ask = format!("write {} {} 0 8", it.handle.url(), address(pool));
        assert_eq!(it.peer.ask(&ask), "0", "connected both ways");
        assert_eq!(it.peer.ask("count peer_downs"), "0");
        it.handle.destroy();
        wait_for("the callback", || it.peer.ask("count peer_downs") != "0");
        assert_eq!(it.peer.ask(&ask), SM_NOT_CONNECTED.to_string());
        assert_eq!(it.peer.ask("count peer_downs"), "1");
        assert_eq!(it.peer.ask("violations"), "[]");
    });
}

#[test]
fn a_restarted_peer_has_a_new_endpoint() {
    isolated("a_restarted_peer_has_a_new_endpoint", || {
        let mut it = Setting::new();
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
        it.peer.kill();
        wait_for("the peer's end", || it.try_write() == Err(SM_NOT_CONNECTED));
        it.peer = PeerProcess::start();
        let id = it.write();
        assert_eq!(
            (it.handle.result(id), it.peer.bytes(0, 8)),
            (SM_OK, vec![0x5a; 8])
        );
    });
}

#[test]
fn forty_processes_are_written_at_once() {
    isolated("forty_processes_are_written_at_once", || {
        let mut peers: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..40).map(|_| scope.spawn(PeerProcess::start)).collect();
            starts
                .into_iter()
                .map(|start| start.join().expect("it starts"))
                .collect()
        });
        let urls: std::collections::HashSet<_> = peers.iter().map(|it| it.url.clone()).collect();
        assert_eq!(urls.len(), 40, "every endpoint is another");
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let from = memory(40, 0);
        for (i, byte) in from.iter_mut().enumerate() {
            *byte = 100 + i as u8;
        }
        let write = |(i, peer): (usize, &PeerProcess)| {
            let block = [(address(from) + i, peer.pool + i, 1)];
            handle.write(&peer.url, &block).expect("accepted")
        };
        let ids: Vec<u64> = peers.iter().enumerate().map(write).collect();
        assert!(ids.into_iter().all(|id| handle.result(id) == SM_OK));
        assert_eq!(count("peers"), 40);
        for (i, peer) in peers.iter_mut().enumerate() {
            assert_eq!(peer.bytes(i, 2), [100 + i as u8, POOL_FILL]);
        }
    });
}

#[test]
fn who_does_not_speak_as_an_emulator_is_no_peer() {
    isolated("who_does_not_speak_as_an_emulator_is_no_peer", || {
        assert_eq!(init(), SM_OK);
        let mut config = config("127.0.0.1:0");
        config.init_timeout = 1;
        let handle = Handle::try_create(&config);
        let from = memory(8, 0);
        let write = |url: &str| handle.write(url, &[(address(from), address(from), 8)]);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = listener.local_addr().expect("a port").to_string();
        let other = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the emulator connects");
            stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                .expect("it listens");
            listener
        });
        assert_eq!(write(&url), Err(SM_NOT_CONNECTED));
        // The next connection is made by the kernel, and nobody ever answers.
        let _listener = other.join().expect("no panic");
        assert_eq!(write(&url), Err(SM_TIMEOUT));
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn strangers_at_the_port_do_no_harm() {
    isolated("strangers_at_the_port_do_no_harm", || {
        let it = Setting::new();
        let mut silent = TcpStream::connect(&it.peer.url).expect("it listens");
        let mut rude = TcpStream::connect(&it.peer.url).expect("it listens");
        rude.write_all(&[0xff; 4096]).expect("it listens");
        drop(TcpStream::connect(&it.peer.url).expect("it listens"));
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
        let mut rest = Vec::new();
        // Closed, or reset as it had not read everything.
        let _ = rude.read_to_end(&mut rest);
        silent.set_nonblocking(true).expect("a socket");
        let mut welcome = [0; 24];
        silent.read_exact(&mut welcome).expect("still connected");
        let still = silent.read(&mut [0]).expect_err("still connected").kind();
        assert_eq!(still, std::io::ErrorKind::WouldBlock);
    });
}

/// Lowers or restores the limit of descriptors; returns what it was.
fn limit_descriptors(limit: u64) -> u64 {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limits` is live.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits) };
    assert_eq!(code, 0);
    let before = limits.rlim_cur;
    limits.rlim_cur = limit;
    // SAFETY: `limits` is live.
    let code = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limits) };
    assert_eq!(code, 0);
    before
}

#[test]
fn exhausted_descriptors_are_an_error_that_passes() {
    isolated("exhausted_descriptors_are_an_error_that_passes", || {
        let mut it = Setting::new();
        let pool = memory(64, 0);
        assert_eq!(it.handle.register(address(pool), 64), SM_OK);
        let ask = format!("write {} {} 0 8", it.handle.url(), address(pool));
        let before = limit_descriptors(3);
        assert_eq!(
            it.try_write(),
            Err(SM_NEW_OBJECT_FAILED),
            "{}",
            last_error()
        );
        assert_eq!(Handle::try_create(&config("127.0.0.1:0")), Handle(0));
        assert!(
            last_error().contains("Too many open files"),
            "{}",
            last_error()
        );
        // A peer that connects meanwhile waits, until there are descriptors again.
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| it.peer.ask(&ask));
            let cpu = cpu_us();
            std::thread::sleep(Duration::from_millis(100));
            let spent = cpu_us() - cpu;
            limit_descriptors(before);
            assert_eq!(asked.join().expect("no panic"), "0");
            assert!(spent < 10_000, "{spent} us of CPU in 100 ms of waiting");
        });
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
    });
}
