// SPDX-License-Identifier: Apache-2.0
//! What the emulator refuses, and what of it counts as a broken contract.
#![allow(unsafe_code)] // calls with bad arguments

mod common;

use std::ptr;

use common::*;
use mf_smem::abi::*;

/// An initiator with a batch to a target of the same process.
struct Setting {
    handle: Handle,
    target: Handle,
    memory: &'static mut [u8],
}

impl Setting {
    fn new() -> Self {
        assert_eq!(init(), SM_OK);
        let (handle, target, memory) = (Handle::create(), Handle::create(), memory(4096, 1));
        assert_eq!(target.register(address(memory), 4096), SM_OK);
        Self {
            handle,
            target,
            memory,
        }
    }

    fn arguments(&self) -> Arguments {
        let block = (address(self.memory), address(self.memory) + 64, 64);
        Arguments::new(&self.target.url(), OPCODE_WRITE, &[block])
    }

    fn write(&self) -> u64 {
        let arguments = Box::leak(Box::new(self.arguments()));
        self.handle.submit_arguments(arguments).expect("accepted")
    }
}

/// Asserts that `call` was the one violation since the last time.
#[track_caller]
fn violates(text: &str, call: impl FnOnce()) {
    reset();
    call();
    let violations = violations();
    assert_eq!(violations.len(), 1, "{violations:?}");
    assert!(violations[0].contains(text), "{violations:?}");
    assert_eq!(count("violations"), 1);
}

#[test]
fn a_broken_contract_is_counted_with_a_text() {
    isolated("a_broken_contract_is_counted_with_a_text", || {
        violates("smem_trans_init has not been called", || {
            assert_eq!(Handle::try_create(&config("127.0.0.1:0")), Handle(0));
        });
        violates("without smem_trans_init", uninit);
        let it = Setting::new();
        let id = it.write();
        assert_eq!(it.handle.result(id), SM_OK);
        violates("batch 0 was queried after its result", || {
            assert_eq!(it.handle.query(id), (SM_OBJECT_NOT_EXISTS, UNWRITTEN));
        });
        violates("batch 1 was never accepted", || {
            assert_eq!(it.handle.query(1), (SM_OBJECT_NOT_EXISTS, UNWRITTEN));
        });
        violates("was never created", || {
            assert_eq!(Handle(0x1234).query(0).0, SM_OBJECT_NOT_EXISTS);
        });
        violates("was never created", || Handle(it.handle.0 + 1).destroy());
        script("hang");
        it.write();
        violates("results of 1 batches are not known", || it.handle.destroy());
        violates("was destroyed before", || it.handle.destroy());
        violates("was destroyed before", || {
            assert_eq!(it.handle.register(8, 8), SM_OBJECT_NOT_EXISTS);
        });
        violates("1 handles are not destroyed", uninit);
        violates("after smem_trans_uninit", || {
            assert_eq!(it.target.port(), (SM_NOT_INITIALIZED, 0));
        });
        assert_eq!(
            (count("held"), count("outstanding"), count("unfinished")),
            (0, 0, 0)
        );
    });
}

#[test]
fn a_region_that_an_outstanding_batch_uses_stays_registered() {
    isolated(
        "a_region_that_an_outstanding_batch_uses_stays_registered",
        || {
            let it = Setting::new();
            assert_eq!(it.handle.register(address(it.memory), 64), SM_OK);
            let id = it.write();
            violates("the outstanding batch 0 uses", || {
                assert_eq!(it.handle.deregister(address(it.memory)), SM_RESOURCE_IN_USE);
            });
            assert_eq!(it.handle.result(id), SM_OK);
            reset();
            assert_eq!(it.handle.deregister(address(it.memory)), SM_OK);
            assert_eq!(count("violations"), 0);
        },
    );
}

#[test]
fn bad_arguments_of_a_submission_are_errors_and_no_violations() {
    isolated(
        "bad_arguments_of_a_submission_are_errors_and_no_violations",
        || {
            let it = Setting::new();
            let refused = |what: &str, change: &dyn Fn(&mut BatchParams)| {
                let mut arguments = it.arguments();
                let mut params = arguments.params();
                change(&mut params);
                assert_eq!(
                    it.handle.submit_params(&mut params),
                    Err(SM_INVALID_PARAM),
                    "{what}"
                );
                assert!(last_error().contains(what), "{what}: {}", last_error());
            };
            refused("destUrl", &|params| params.dest_url = ptr::null());
            refused("NULL", &|params| params.src_list = ptr::null_mut());
            refused("NULL", &|params| params.dest_list = ptr::null_mut());
            refused("NULL", &|params| params.size_list = ptr::null_mut());
            refused("batchSize is 0", &|params| params.batch_size = 0);
            refused("opcode is 2", &|params| params.opcode = 2);
            refused("stream", &|params| {
                params.stream = ptr::without_provenance_mut(8)
            });
            refused("flags is 1", &|params| params.flags = 1);
            refused("\"nowhere\" is no ip:port", &|params| {
                params.dest_url = c"nowhere".as_ptr()
            });
            let copy = functions().smem_trans_batch_copy;
            let (mut arguments, mut id) = (it.arguments(), 0);
            let mut params = arguments.params();
            // SAFETY: NULL is what is tried.
            let code = unsafe { copy(it.handle.pointer(), ptr::null_mut(), &mut id) };
            assert_eq!(code, SM_INVALID_PARAM);
            // SAFETY: as above.
            let code = unsafe { copy(it.handle.pointer(), &mut params, ptr::null_mut()) };
            assert_eq!(code, SM_INVALID_PARAM);
            // SAFETY: as above.
            let code = unsafe { copy(ptr::null_mut(), &mut params, &mut id) };
            assert_eq!(code, SM_INVALID_PARAM);
            assert_eq!(
                (count("batches"), count("refused"), count("violations")),
                (0, 12, 0)
            );
        },
    );
}

#[test]
fn bad_arguments_of_a_query_are_errors_and_the_result_stays() {
    isolated(
        "bad_arguments_of_a_query_are_errors_and_the_result_stays",
        || {
            let it = Setting::new();
            let id = it.write();
            wait_for("the batch", || count("unfinished") == 0);
            let query = functions().smem_trans_batch_status_query;
            let mut result = UNWRITTEN;
            // SAFETY: NULL is what is tried.
            let code = unsafe { query(it.handle.pointer(), id, ptr::null_mut(), 0) };
            assert_eq!(code, SM_INVALID_PARAM);
            // SAFETY: `result` is live.
            let code = unsafe { query(it.handle.pointer(), id, &mut result, 1) };
            assert_eq!((code, result), (SM_INVALID_PARAM, UNWRITTEN));
            assert_eq!(it.handle.query(id), (SM_OK, SM_OK));
            assert_eq!(count("violations"), 0);
        },
    );
}

#[test]
fn bad_registrations_are_errors_and_no_violations() {
    isolated("bad_registrations_are_errors_and_no_violations", || {
        let it = Setting::new();
        let at = address(it.memory);
        assert_eq!(it.handle.register(0, 8), SM_INVALID_PARAM);
        assert_eq!(it.handle.register(at, 0), SM_INVALID_PARAM);
        assert_eq!(it.handle.register(usize::MAX, 8), SM_INVALID_PARAM);
        assert_eq!(it.handle.register(at, 64), SM_OK);
        assert_eq!(it.handle.register(at, 64), SM_OK, "the same twice");
        assert_eq!(it.handle.register(at, 65), SM_ERROR, "another length");
        assert_eq!(it.handle.register(at + 63, 8), SM_ERROR, "an overlap");
        assert_eq!(it.handle.deregister(at + 1), SM_OBJECT_NOT_EXISTS);
        assert_eq!(it.handle.deregister(0), SM_INVALID_PARAM);
        assert_eq!(it.handle.deregister(at), SM_OK);
        assert_eq!(
            it.handle.deregister(at),
            SM_OBJECT_NOT_EXISTS,
            "registered twice is once"
        );
        assert_eq!(it.handle.batch_register(&[]), SM_INVALID_PARAM);
        let register = functions().smem_trans_batch_register_mem;
        let (mut size, null) = (8, ptr::null_mut());
        // SAFETY: NULL is what is tried.
        let code = unsafe { register(it.handle.pointer(), null, &mut size, 1, 0) };
        assert_eq!(code, SM_INVALID_PARAM);
        let register = functions().smem_trans_register_mem;
        // SAFETY: plain values.
        let code = unsafe { register(it.handle.pointer(), it.memory.as_mut_ptr().cast(), 8, 1) };
        assert_eq!(code, SM_INVALID_PARAM, "flags");
        assert_eq!(count("violations"), 0);
    });
}

#[test]
fn a_configuration_that_cannot_work_gives_no_handle_and_a_reason() {
    isolated(
        "a_configuration_that_cannot_work_gives_no_handle_and_a_reason",
        || {
            assert_eq!(init(), SM_OK);
            let refused = |what: &str, change: &dyn Fn(&mut TransConfig)| {
                let mut config = config("127.0.0.1:0");
                change(&mut config);
                assert_eq!(Handle::try_create(&config), Handle(0), "{what}");
                assert!(last_error().contains(what), "{what}: {}", last_error());
            };
            refused("role is 0", &|config| config.role = 0);
            refused("role is 1", &|config| config.role = 1);
            refused("dataOpType", &|config| config.data_op_type = 0);
            refused("dataOpType", &|config| config.data_op_type = 1 << 8);
            refused("flags", &|config| config.flags = 1);
            refused("TLS", &|config| config.tls.tls_enable = 1);
            refused("url is not terminated", &|config| {
                config.url = [b'1' as _; 64]
            });
            refused("nic is not terminated", &|config| {
                config.nic = [b'1' as _; 64]
            });
            for url in [
                "",
                "127.0.0.1",
                "localhost:0",
                "::1:0",
                "[::1:0",
                "127.0.0.1:x",
            ] {
                refused(&format!("url {url:?}"), &|to| *to = config(url));
            }
            refused("cannot listen on 192.0.2.1:0", &|to| {
                *to = config("192.0.2.1:0")
            });
            let create = functions().smem_trans_create;
            // SAFETY: NULL is what is tried.
            assert!(unsafe { create(ptr::null(), 0) }.is_null());
            // SAFETY: a live configuration.
            assert!(unsafe { create(&config("127.0.0.1:0"), 1) }.is_null());
            assert_eq!((count("handles"), count("violations")), (0, 0));
        },
    );
}

#[test]
fn defaults_name_no_role_and_no_operation() {
    isolated("defaults_name_no_role_and_no_operation", || {
        let mut config = config("1.2.3.4:0");
        // SAFETY: a live configuration.
        let code = unsafe { (functions().smem_trans_config_init)(&mut config) };
        assert_eq!((code, config.init_timeout), (SM_OK, 120));
        assert_eq!((config.role, config.data_op_type, config.url[0]), (0, 0, 0));
        // SAFETY: NULL is what is tried.
        let code = unsafe { (functions().smem_trans_config_init)(ptr::null_mut()) };
        assert_eq!(code, SM_INVALID_PARAM);
    });
}

#[test]
fn other_bad_arguments_are_errors() {
    isolated("other_bad_arguments_are_errors", || {
        let it = Setting::new();
        // SAFETY: NULL is what is tried.
        let code =
            unsafe { (functions().smem_trans_get_rpc_port)(it.handle.pointer(), ptr::null_mut()) };
        assert_eq!(code, SM_INVALID_PARAM);
        for (level, expected) in [(-1, SM_INVALID_PARAM), (4, SM_INVALID_PARAM), (3, SM_OK)] {
            // SAFETY: a plain number.
            let code = unsafe { (functions().smem_set_log_level)(level) };
            assert_eq!(code, expected);
        }
        assert_eq!(count("log_level"), 3);
        // SAFETY: plain numbers.
        let code = unsafe { (functions().smem_trans_init)(0, 1) };
        assert_eq!(code, SM_INVALID_PARAM);
        assert_eq!(count("violations"), 0);
        // SAFETY: a terminated string.
        let unknown = unsafe { (functions().mf_emu_count)(c"no_such".as_ptr()) };
        assert_eq!(unknown, u64::MAX);
        assert!(last_error().contains("no_such"));
    });
}
