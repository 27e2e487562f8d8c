// SPDX-License-Identifier: Apache-2.0
//! How fast the emulator is beside the bare system call, and what it keeps. On
//! demand, in release, on an otherwise idle machine:
//! `cargo test --release -p memfabric-emulator --test throughput -- --ignored --nocapture`
#![allow(unsafe_code)] // the bare system call

mod common;

use std::time::{Duration, Instant};

use common::*;
use mf_smem::abi::SM_OK;

#[test]
#[ignore = "a role for the other test, not a test"]
fn peer_process() {
    serve_peer();
}

const BLOCKS: usize = 128;
const ROUNDS: usize = 300;

/// Writes every block once with one system call.
fn bare(pid: u32, blocks: &[Block]) {
    let vector = |base: usize, length| libc::iovec {
        iov_base: base as _,
        iov_len: length,
    };
    let local: Vec<_> = blocks.iter().map(|it| vector(it.0, it.2)).collect();
    let remote: Vec<_> = blocks.iter().map(|it| vector(it.1, it.2)).collect();
    let count = blocks.len() as libc::c_ulong;
    // SAFETY: live lists; the peer's pool takes the blocks.
    let copied = unsafe {
        libc::process_vm_writev(pid as _, local.as_ptr(), count, remote.as_ptr(), count, 0)
    };
    assert_eq!(copied as usize, blocks.iter().map(|it| it.2).sum::<usize>());
}

fn through_the_emulator(handle: Handle, url: &str, arguments: &mut Arguments) {
    let id = handle
        .submit_arguments(arguments)
        .unwrap_or_else(|_| panic!("{url}: {}", last_error()));
    loop {
        match handle.query(id) {
            (SM_OK, result) => return assert_eq!(result, SM_OK),
            _ => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn throughput_is_within_ten_percent_of_the_bare_call() {
    // Larger than caches, as pools of KV blocks are.
    const POOL: usize = 256 << 20;
    let peer = PeerProcess::start_with(&[(POOL_VARIABLE, &POOL.to_string())]);
    assert_eq!(init(), SM_OK);
    let handle = Handle::create();
    for size in [4 << 10, 64 << 10] {
        let from = memory(POOL, 0x5a);
        let batches: Vec<Vec<Block>> = (0..POOL / (BLOCKS * size))
            .map(|batch| {
                let offset = |i: usize| (batch * BLOCKS + i) * size;
                (0..BLOCKS)
                    .map(|i| (address(from) + offset(i), peer.pool + offset(i), size))
                    .collect()
            })
            .collect();
        let (mut times, mut cpu) = ([vec![], vec![]], [0, 0]);
        let mut measure = |which: usize, copy: &mut dyn FnMut()| {
            let (begin, before) = (Instant::now(), (cpu_us(), thread_cpu_us()));
            copy();
            times[which].push(begin.elapsed());
            let (process, thread) = (cpu_us() - before.0, thread_cpu_us() - before.1);
            // The bare call is this thread's work; the emulator's copies are its
            // worker's, while this thread polls.
            cpu[which] += if which == 0 { thread } else { process - thread };
        };
        // In turns, so that what else runs here meets both alike.
        for round in 0..ROUNDS {
            let blocks = &batches[2 * round % batches.len()];
            measure(0, &mut || bare(peer.child.id(), blocks));
            let blocks = &batches[(2 * round + 1) % batches.len()];
            let mut arguments = Arguments::new(&peer.url, 1, blocks);
            measure(1, &mut || {
                through_the_emulator(handle, &peer.url, &mut arguments)
            });
        }
        let gigabytes = (BLOCKS * size) as f64 / 1e9;
        // The best tenth: the rest shows what else runs on the machine.
        let rates = times.map(|mut times| {
            times.sort();
            gigabytes / times[times.len() / 10].as_secs_f64()
        });
        let cost = cpu[1] as f64 / cpu[0] as f64;
        println!(
            "{BLOCKS} x {} KiB: bare {:.2} GB/s, emulator {:.2} GB/s, ratio {:.3} (best tenth of \
             {ROUNDS}); CPU time {cost:.3} of the bare call's",
            size >> 10,
            rates[0],
            rates[1],
            rates[1] / rates[0],
        );
        // On a busy machine the wall time is the scheduler's: each poll lets
        // others run before the worker goes on. Then its CPU time tells.
        let cheap = rates[1] > 0.9 * rates[0] || cost < 1.1;
        assert!(size < 64 << 10 || cheap, "the emulator costs too much");
    }
}

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("Linux");
    line.split_ascii_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse().ok())
        .expect("a number")
}

#[test]
#[ignore = "a measurement"]
fn a_million_batches_leave_memory_flat() {
    let peer = PeerProcess::start();
    assert_eq!(init(), SM_OK);
    let handle = Handle::create();
    let from = memory(4096, 0x5a);
    let blocks: Vec<Block> = (0..16)
        .map(|i| (address(from) + i, peer.pool + i, 8))
        .collect();
    let mut arguments = Arguments::new(&peer.url, 1, &blocks);
    let begin = Instant::now();
    let mut sizes = vec![];
    for _ in 0..10 {
        for _ in 0..100_000 {
            through_the_emulator(handle, &peer.url, &mut arguments);
        }
        sizes.push(resident_kib());
    }
    println!(
        "KiB after each 100,000 batches: {sizes:?}, {:?}",
        begin.elapsed()
    );
    assert!(sizes[9] < sizes[0] + 256, "{sizes:?}");
}
