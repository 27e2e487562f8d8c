// SPDX-License-Identifier: Apache-2.0
//! Handles of one process, device memory, and the ways to end.
#![allow(unsafe_code)] // opens libraries

mod common;

use std::ffi::{c_int, c_void};

use common::*;
use libloading::Library;
use mf_smem::abi::*;

#[test]
fn a_handle_can_be_its_own_peer() {
    isolated("a_handle_can_be_its_own_peer", || {
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let memory = memory(256, 1);
        assert_eq!(handle.register(address(memory), 256), SM_OK);
        memory[..64].fill(7);
        let at = address(memory);
        let id = handle
            .write(&handle.url(), &[(at, at + 100, 64)])
            .expect("accepted");
        assert_eq!(handle.result(id), SM_OK);
        assert_eq!(memory[99..165], [&[1][..], &[7; 64], &[1]].concat());
        // Overlapping ranges: as memmove does it.
        let id = handle
            .read(&handle.url(), &[(at + 101, at + 100, 64)])
            .expect("accepted");
        assert_eq!(handle.result(id), SM_OK);
        assert_eq!(memory[100..166], [&[7; 65][..], &[1]].concat());
        assert_eq!(
            handle.write(&handle.url(), &[(at, at + 255, 2)]),
            Err(SM_INVALID_PARAM)
        );
        handle.destroy();
        assert_eq!(
            (count("violations"), count("peers"), count("regions")),
            (0, 0, 0)
        );
    });
}

#[test]
fn batch_ids_and_regions_belong_to_their_handle() {
    isolated("batch_ids_and_regions_belong_to_their_handle", || {
        assert_eq!(init(), SM_OK);
        let (first, second) = (Handle::create(), Handle::create());
        let url = second.url();
        assert_ne!(first.url(), url);
        let (from, to) = (memory(64, 7), memory(64, 1));
        assert_eq!(second.register(address(to), 64), SM_OK);
        let block = [(address(from), address(to), 8)];
        assert_eq!(
            first.write(&first.url(), &block),
            Err(SM_INVALID_PARAM),
            "not its region"
        );
        let ids = [first.write(&url, &block), second.write(&url, &block)];
        assert_eq!(ids, [Ok(0), Ok(0)], "each counts from 0");
        assert_eq!((first.result(0), second.result(0)), (SM_OK, SM_OK));
        // A destroyed handle of the same process is a peer that is gone.
        second.destroy();
        assert_eq!(first.write(&url, &block), Err(SM_NOT_CONNECTED));
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn ipv6_endpoints_have_brackets() {
    isolated("ipv6_endpoints_have_brackets", || {
        if std::net::TcpListener::bind("[::1]:0").is_err() {
            println!("there is no IPv6 here");
            return;
        }
        assert_eq!(init(), SM_OK);
        let (handle, target) = (Handle::create(), Handle::try_create(&config("[::1]:0")));
        let url = format!("[::1]:{}", target.port().1);
        let (from, to) = (memory(8, 7), memory(8, 0));
        assert_eq!(target.register(address(to), 8), SM_OK);
        let id = handle
            .write(&url, &[(address(from), address(to), 8)])
            .expect("accepted");
        assert_eq!((handle.result(id), &to[..]), (SM_OK, &[7; 8][..]));
    });
}

#[test]
fn many_threads_share_a_handle() {
    isolated("many_threads_share_a_handle", || {
        assert_eq!(init(), SM_OK);
        let (handle, target) = (Handle::create(), Handle::create());
        let to = memory(8 * 4096, 0);
        assert_eq!(target.register(address(to), to.len()), SM_OK);
        let url = target.url();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (url, at) = (&url, address(to) + thread * 4096);
                scope.spawn(move || {
                    let from = memory(4096, thread as u8 + 1);
                    for i in 0..256 {
                        let block = [(address(from), at + 16 * i, 16)];
                        let id = handle.write(url, &block).expect("accepted");
                        assert_eq!(handle.result(id), SM_OK);
                    }
                });
            }
        });
        for (i, part) in to.chunks(4096).enumerate() {
            assert!(
                part.iter().all(|byte| usize::from(*byte) == i + 1),
                "thread {i}"
            );
        }
        assert_eq!(
            (count("batches"), count("results"), count("outstanding")),
            (2048, 2048, 0)
        );
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn a_region_is_not_withdrawn_while_bytes_move_to_it() {
    isolated("a_region_is_not_withdrawn_while_bytes_move_to_it", || {
        const LENGTH: usize = 32 << 20;
        assert_eq!(init(), SM_OK);
        let (handle, target) = (Handle::create(), Handle::create());
        let (from, to) = (memory(LENGTH, 7), memory(LENGTH, 0));
        assert_eq!(target.register(address(to), LENGTH), SM_OK);
        let blocks = vec![(address(from), address(to), LENGTH); 8];
        let id = handle.write(&target.url(), &blocks).expect("accepted");
        // SAFETY: a live byte, which the worker writes.
        let seen = || unsafe { std::ptr::read_volatile(&to[0]) };
        wait_for("the first byte", || seen() == 7);
        assert_eq!(target.deregister(address(to)), SM_OK);
        // Its owner's again: to free it would be no crash now.
        to.fill(0);
        assert_eq!(handle.result(id), SM_OK);
        assert!(
            to.iter().all(|byte| *byte == 0),
            "written after it was withdrawn"
        );
    });
}

#[test]
fn a_process_with_live_handles_and_held_batches_ends_at_once() {
    let name = "a_process_with_live_handles_and_held_batches_ends_at_once";
    let begin = std::time::Instant::now();
    isolated(name, || {
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let memory = memory(64, 1);
        assert_eq!(handle.register(address(memory), 64), SM_OK);
        script("hang; block_query");
        let block = [(address(memory), address(memory), 8)];
        assert!(handle.write(&handle.url(), &block).is_ok());
        std::thread::spawn(move || handle.query(0));
        wait_for("the query to block", || count("blocked") == 1);
    });
    assert!(begin.elapsed() < std::time::Duration::from_secs(5));
}

#[test]
fn closing_the_library_unmaps_nothing() {
    isolated("closing_the_library_unmaps_nothing", || {
        // SAFETY: the emulator runs no code when it is opened.
        let library = unsafe { Library::new(library_path()) }.expect("it opens");
        type Count = unsafe extern "C" fn(*const std::ffi::c_char) -> u64;
        // SAFETY: the signature is the export's.
        let count = unsafe { library.get::<Count>(b"mf_emu_count") };
        let count = *count.expect("it is exported");
        library.close().expect("it closes");
        // SAFETY: the library says of itself that it stays (NODELETE).
        assert_eq!(unsafe { count(c"handles".as_ptr()) }, 0);
    });
}

#[test]
fn a_destroyed_handle_can_be_followed_by_another_life() {
    isolated("a_destroyed_handle_can_be_followed_by_another_life", || {
        let memory = memory(64, 1);
        let block = [(address(memory), address(memory) + 32, 32)];
        let threads = || std::fs::read_dir("/proc/self/task").expect("Linux").count();
        let descriptors = || std::fs::read_dir("/proc/self/fd").expect("Linux").count();
        let mut before = None;
        for _ in 0..20 {
            assert_eq!(init(), SM_OK);
            let handle = Handle::create();
            assert_eq!(handle.register(address(memory), 64), SM_OK);
            let id = handle.write(&handle.url(), &block).expect("accepted");
            assert_eq!((id, handle.result(id)), (0, SM_OK));
            handle.destroy();
            uninit();
            // Joined threads leave /proc a moment later.
            let before = *before.get_or_insert_with(|| (threads(), descriptors()));
            wait_for("threads and descriptors", || {
                (threads(), descriptors()) <= before
            });
        }
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn peers_that_come_and_go_leave_no_descriptors_behind() {
    isolated("peers_that_come_and_go_leave_no_descriptors_behind", || {
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let memory = memory(64, 1);
        let block = [(address(memory), address(memory) + 32, 32)];
        let descriptors = || std::fs::read_dir("/proc/self/fd").expect("Linux").count();
        let before = descriptors();
        for _ in 0..50 {
            let target = Handle::create();
            assert_eq!(target.register(address(memory), 64), SM_OK);
            let id = handle.write(&target.url(), &block).expect("accepted");
            assert_eq!(handle.result(id), SM_OK);
            target.destroy();
            wait_for("the descriptors", || descriptors() <= before);
        }
        assert_eq!((count("peers"), count("violations")), (0, 0));
    });
}

/// A function of the emulated libascendcl.so.
fn acl<T: Copy>(name: &str) -> T {
    let path = library_path().with_file_name("libascendcl.so");
    // SAFETY: the emulator runs no code when it is opened.
    let library = unsafe { Library::new(path) }.expect("it is built with the tests");
    let library: &'static Library = Box::leak(Box::new(library));
    // SAFETY: the caller names the type of that export.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    *symbol.expect("it is exported")
}

#[test]
fn guarded_device_memory_is_copied_from_and_to() {
    isolated("guarded_device_memory_is_copied_from_and_to", || {
        // The emulated CANN is linked for its library alone.
        assert_eq!(ascendcl::ACL_SUCCESS, 0);
        let allocate: extern "C" fn(usize, i32) -> *mut c_void = acl("mf_emu_alloc_guarded_memory");
        let set_device: extern "C" fn(i32) = acl("mf_emu_set_device");
        type Memcpy =
            unsafe extern "C" fn(*mut c_void, usize, *const c_void, usize, c_int) -> c_int;
        let memcpy: Memcpy = acl("aclrtMemcpy");
        set_device(0);
        let peek = |device: usize| {
            let mut bytes = [0_u8; 16];
            let pointer = std::ptr::without_provenance(device);
            // SAFETY: 16 bytes on both sides.
            let code = unsafe { memcpy(bytes.as_mut_ptr().cast(), 16, pointer, 16, 2) };
            assert_eq!(code, 0);
            bytes
        };
        assert_eq!(init(), SM_OK);
        let (handle, target) = (Handle::create(), Handle::create());
        let host = memory(16, 7);
        let (near, far) = (allocate(8192, 0).addr(), allocate(8192, 1).addr());
        assert_eq!(target.register(far + 4096, 4096), SM_OK);
        assert_eq!(handle.register(near, 8192), SM_OK);
        let run = |submitted: Result<u64, i32>| {
            assert_eq!(handle.result(submitted.expect("accepted")), SM_OK);
        };
        run(handle.write(&target.url(), &[(address(host), far + 5000, 16)]));
        assert_eq!(peek(far + 5000), [7; 16], "host to device");
        run(handle.read(&target.url(), &[(near + 1000, far + 5000, 16)]));
        assert_eq!(peek(near + 1000), [7; 16], "device to device");
        host.fill(0);
        run(handle.read(&target.url(), &[(address(host), far + 5000, 16)]));
        assert_eq!(host, [7; 16], "device to host");
        assert_eq!(
            handle.write(&target.url(), &[(address(host), far, 16)]),
            Err(SM_INVALID_PARAM),
            "that part is not registered"
        );
    });
}
