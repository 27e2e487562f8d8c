// SPDX-License-Identifier: Apache-2.0
//! Teardown with work outstanding, over the emulator. In a program of its own,
//! for the leak is for good: the library stays initialised in this process.
#![allow(missing_docs)]

mod common;

use std::sync::atomic::Ordering;

use common::emulator::{Emulator, config};
use common::*;
use memfabric_transport::{Error, Region, Transport};

#[test]
fn c13_teardown_under_a_hanging_batch_destroys_nothing_and_the_library_can_finish_it() {
    let emulator = Emulator::start();
    // The arguments are read when the batch is let go, long after the transport.
    emulator.script("hang; late_args");
    let mut config = config();
    config.timeout = TIMEOUT;
    let transport = Transport::new();
    transport.install(&config).expect("installed");
    let own = transport.endpoint().expect("installed");
    let mut memory = vec![0u8; 4096];
    memory[..2048].fill(0x5a);
    let address = memory.as_mut_ptr().expose_provenance();
    let region = Region {
        address,
        length: 4096,
    };
    transport.vouched_register(&[region]).expect("registered");
    let sub_batch = transport.allocate(8);
    let requests =
        (0..8).map(|index| write(0, address + index * 256, address + 2048 + index * 256, 256));
    transport
        .vouched_submit(&sub_batch, [peer(&own)].into_iter(), requests)
        .expect("submitted");
    transport.free(sub_batch);
    let busy = transport.deregister(region).expect_err("in use");
    assert!(
        matches!(busy, Error::RegionBusy { batches: 1, .. }),
        "{busy}"
    );
    let (_, events) = events_of(|| drop(transport));
    assert!(
        events.iter().any(|line| line.contains("leaked on purpose")),
        "{events:?}"
    );
    assert_eq!(
        (emulator.count("destroy"), emulator.count("uninit")),
        (0, 0)
    );

    emulator.release();
    let deadline = std::time::Instant::now() + FOREVER;
    while emulator.count("unfinished") > 0 {
        assert!(
            std::time::Instant::now() < deadline,
            "the batch is not executed"
        );
        std::thread::yield_now();
    }
    emulator.assert_no_violation();
    std::sync::atomic::fence(Ordering::SeqCst);
    let copied = std::hint::black_box(&mut memory);
    assert!(
        copied[2048..].iter().all(|byte| *byte == 0x5a),
        "it was executed as submitted"
    );
}
