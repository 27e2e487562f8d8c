//! Real bytes between real processes, and what happens when one of them ends.

mod common;

use std::time::{Duration, Instant};

use common::*;
use mf_smem::abi::{SM_INVALID_PARAM, SM_NOT_CONNECTED, SM_OK};

#[test]
#[ignore = "a role for the other tests, not a test"]
fn peer_process() {
    serve_peer();
}

#[test]
fn bytes_are_written_to_and_read_from_another_process() {
    isolated("bytes_are_written_to_and_read_from_another_process", || {
        let mut peer = PeerProcess::start();
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let from = memory(4096, 0x5a);
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
fn a_range_outside_the_registered_ones_refuses_the_whole_batch_and_writes_nothing() {
    isolated(
        "a_range_outside_the_registered_ones_refuses_the_whole_batch_and_writes_nothing",
        || {
            let mut peer = PeerProcess::start();
            assert_eq!(init(), SM_OK);
            let handle = Handle::create();
            let from = memory(4096, 0x5a);
            for bad in [
                (peer.pool + POOL - 8, 9),
                (peer.pool - 1, 2),
                (0x10, 8),
                (usize::MAX, 8),
            ] {
                let blocks = [(address(from), peer.pool, 8), (address(from), bad.0, bad.1)];
                assert_eq!(handle.write(&peer.url, &blocks), Err(SM_INVALID_PARAM));
                assert!(last_error().contains("block 1"), "{}", last_error());
            }
            assert_eq!(peer.bytes(0, 8), [POOL_FILL; 8]);
            assert_eq!(peer.bytes(POOL - 8, 8), [POOL_FILL; 8]);
            assert_eq!(peer.ask("deregister"), "0");
            let good = [(address(from), peer.pool, 8)];
            assert_eq!(
                handle.write(&peer.url, &good),
                Err(SM_INVALID_PARAM),
                "withdrawn"
            );
            assert_eq!(peer.ask("register"), "0");
            let id = handle.write(&peer.url, &good).expect("registered again");
            assert_eq!(handle.result(id), SM_OK);
            assert_eq!(count("violations"), 0, "a refused range is no violation");
        },
    );
}

#[test]
fn a_killed_peer_ends_its_batches_within_milliseconds_and_calls_back_once() {
    isolated(
        "a_killed_peer_ends_its_batches_within_milliseconds_and_calls_back_once",
        || {
            let mut peer = PeerProcess::start();
            assert_eq!(init(), SM_OK);
            let handle = Handle::create();
            let from = memory(4096, 0x5a);
            let block = [(address(from), peer.pool, 8)];
            script("delay=3600s@2..");
            let id = handle.write(&peer.url, &block).expect("accepted");
            assert_eq!(handle.result(id), SM_OK);
            let waiting: Vec<u64> = (0..3)
                .map(|_| handle.write(&peer.url, &block).expect("accepted"))
                .collect();
            peer.kill();
            let begin = Instant::now();
            for id in waiting {
                assert_eq!(handle.result(id), SM_NOT_CONNECTED);
            }
            assert!(
                begin.elapsed() < Duration::from_millis(500),
                "{:?}",
                begin.elapsed()
            );
            script("");
            assert_eq!(handle.write(&peer.url, &block), Err(SM_NOT_CONNECTED));
            handle.destroy();
            assert_eq!(count("violations"), 0);
        },
    );
}
