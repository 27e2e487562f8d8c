// SPDX-License-Identifier: Apache-2.0
//! What can be observed: the call log, the report, what is printed.
#![allow(unsafe_code)] // calls the library's functions

mod common;

use std::process::Command;

use common::*;
use mf_smem::abi::*;

/// A line without its times and its thread, which must be there.
fn without_times(line: &str) -> String {
    let mut words: Vec<&str> = line.split(' ').collect();
    let mut number = |key: &str| {
        let word = words.remove(1);
        let value = word
            .strip_prefix(key)
            .unwrap_or_else(|| panic!("{key} in {line}"));
        value
            .parse::<u64>()
            .unwrap_or_else(|_| panic!("{key} in {line}"))
    };
    let (begin, end, thread) = (number("begin="), number("end="), number("thread="));
    assert!(0 < begin && begin <= end, "{line}");
    assert_ne!(thread, 0);
    words.join(" ")
}

#[test]
fn the_call_log_has_every_argument() {
    isolated("the_call_log_has_every_argument", || {
        script("log; pending=1");
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let url = handle.url();
        let memory = memory(64, 1);
        let at = address(memory);
        assert_eq!(handle.register(at, 64), SM_OK);
        let mut arguments =
            Arguments::new(&url, OPCODE_READ, &[(at, at + 8, 3), (at + 4, at + 9, 5)]);
        assert_eq!(handle.submit_arguments(&mut arguments), Ok(0));
        let mut params = arguments.params();
        params.flags = 9;
        params.opcode = 1;
        params.stream = std::ptr::without_provenance_mut(0x77);
        assert_eq!(handle.submit_params(&mut params), Err(SM_INVALID_PARAM));
        wait_for("the batch", || count("unfinished") == 0);
        handle.query(0);
        handle.query(0);
        assert_eq!(handle.deregister(at), SM_OK);
        // SAFETY: a plain number.
        assert_eq!(unsafe { (functions().smem_set_log_level)(2) }, SM_OK);
        handle.destroy();
        uninit();
        let h = format!("handle={:#x}", handle.0);
        let lists = format!(
            "srcList=[{at:#x},{:#x}] destList=[{:#x},{:#x}] sizeList=[3,5]",
            at + 4,
            at + 8,
            at + 9
        );
        let expected = [
            "smem_trans_init device_id=3 flags=0 -> 0".to_owned(),
            "smem_trans_config_init -> 0".to_owned(),
            format!(
                "smem_trans_create role=3 initTimeout=120 deviceId=3 config.flags=0 dataOpType=2 \
                 nic=\"\" url=\"127.0.0.1:0\" tlsEnable=0 flags=0 -> {:#x}",
                handle.0
            ),
            format!("smem_trans_get_rpc_port {h} -> 0"),
            format!("smem_trans_register_mem {h} address={at:#x} capacity=64 flags=0 -> 0"),
            format!(
                "smem_trans_batch_copy {h} destUrl={url:?} opcode=0 batchSize=2 stream=0x0 flags=0 \
                 {lists} -> 0 batch_id=0"
            ),
            format!(
                "smem_trans_batch_copy {h} destUrl={url:?} opcode=1 batchSize=2 stream=0x77 flags=9 \
                 {lists} -> -2000"
            ),
            format!("smem_trans_batch_status_query {h} batch_id=0 flags=0 -> 1"),
            format!("smem_trans_batch_status_query {h} batch_id=0 flags=0 -> 0 result=0"),
            format!("smem_trans_deregister_mem {h} address={at:#x} -> 0"),
            "smem_set_log_level level=2 -> 0".to_owned(),
            format!("smem_trans_destroy {h} flags=0 -> void"),
            "smem_trans_uninit flags=0 -> void".to_owned(),
        ];
        let calls: Vec<String> = calls().iter().map(|line| without_times(line)).collect();
        for (call, expected) in calls.iter().zip(&expected) {
            assert_eq!(call, expected);
        }
        assert_eq!(
            (calls.len(), count("log")),
            (expected.len(), expected.len() as u64)
        );
    });
}

#[test]
fn the_call_log_keeps_the_last_lines_and_their_numbers() {
    isolated(
        "the_call_log_keeps_the_last_lines_and_their_numbers",
        || {
            let line = |index: u64| {
                let mut buffer = [0_u8; 12];
                // SAFETY: the buffer has that length.
                let length =
                    unsafe { (functions().mf_emu_call)(index, buffer.as_mut_ptr().cast(), 12) };
                (length, String::from_utf8_lossy(&buffer).into_owned())
            };
            init();
            assert_eq!(line(0).0, 0, "off unless asked for");
            script("log=2");
            (0..5).for_each(|_| {
                init();
            });
            assert_eq!(count("log"), 5);
            assert_eq!((line(2).0, line(5).0), (0, 0));
            let (length, text) = line(4);
            assert!(length > 12, "the length of all of it");
            assert_eq!(
                text, "smem_trans_\0",
                "as much as there is room for, and terminated"
            );
            script("");
            assert_eq!(line(4).0, 0, "another script, another log");
        },
    );
}

#[test]
fn a_reset_forgets_events_and_keeps_handles() {
    isolated("a_reset_forgets_events_and_keeps_handles", || {
        assert_eq!(init(), SM_OK);
        let handle = Handle::create();
        let memory = memory(64, 1);
        assert_eq!(handle.register(address(memory), 64), SM_OK);
        script("log; hang");
        let block = [(address(memory), address(memory), 8)];
        let id = handle.write(&handle.url(), &block).expect("accepted");
        handle.query(99);
        assert_eq!((count("violations"), count("batches")), (1, 1));
        reset();
        assert_eq!((violations().len(), calls().len()), (0, 0));
        for name in [
            "violations",
            "batches",
            "query",
            "smem_trans_init",
            "query_errors",
            "log",
        ] {
            assert_eq!(count(name), 0, "{name}");
        }
        for name in [
            "handles",
            "regions",
            "outstanding",
            "unfinished",
            "held",
            "peers",
        ] {
            assert_eq!(count(name), 1, "{name}");
        }
        release();
        assert_eq!(handle.result(id), SM_OK);
        let id = handle.write(&handle.url(), &block).expect("accepted");
        assert_eq!(handle.result(id), SM_OK, "the script is forgotten too");
    });
}

#[test]
fn the_report_has_violations_and_counters() {
    isolated("the_report_has_violations_and_counters", || {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("report");
        script(&format!("report={}", path.display()));
        assert_eq!(init(), SM_OK);
        Handle(0x10).destroy();
        uninit();
        let report = std::fs::read_to_string(&path).expect("it was written");
        let lines: Vec<&str> = report.lines().collect();
        let pid = format!("pid={}", std::process::id());
        assert_eq!(lines.len(), 2, "{report}");
        assert!(lines[0].starts_with(&format!("{pid} violation: the handle 0x10 was never")));
        assert!(
            lines[1].starts_with(&format!("{pid} counters: smem_trans_init=1 ")),
            "{report}"
        );
        assert!(lines[1].contains(" smem_trans_destroy=1 ") && lines[1].contains(" violations=1 "));
    });
}

#[test]
#[ignore = "a role for the next tests, not a test"]
fn printing_process() {
    if let Ok(level) = std::env::var("LEVEL") {
        // SAFETY: a plain number.
        unsafe { (functions().smem_set_log_level)(level.parse().expect("a level")) };
    }
    assert_eq!(init(), SM_OK);
    let handle = Handle::create();
    handle.query(99);
}

fn printed(level: Option<&str>) -> (String, String) {
    let mut command = Command::new(std::env::current_exe().expect("a path of this program"));
    command.args(["printing_process", "--exact", "--ignored", "--nocapture"]);
    command
        .env_remove("LEVEL")
        .envs(level.map(|level| ("LEVEL", level)));
    let output = command.output().expect("the test program runs");
    assert!(output.status.success());
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (text(output.stdout), text(output.stderr))
}

#[test]
fn it_says_that_it_is_an_emulator_when_asked_for_information() {
    let (out, err) = printed(Some("1"));
    assert!(
        err.contains("libmf_smem.so (emulator): memfabric emulator"),
        "{err}"
    );
    assert!(!out.contains("emulator"), "stdout is the host's: {out}");
    // SAFETY: takes nothing.
    let version = unsafe { (functions().mf_emu_version)() };
    // SAFETY: a terminated constant.
    let version = unsafe { std::ffi::CStr::from_ptr(version) };
    assert_eq!(version.to_str(), Ok(mf_smem::VERSION));
}

#[test]
fn it_prints_only_warnings_unless_asked() {
    let (_, err) = printed(None);
    assert_eq!(err.matches("emulator").count(), 1, "{err}");
    assert!(
        err.contains("violation: smem_trans_batch_status_query: batch 99"),
        "{err}"
    );
    assert_eq!(printed(Some("3")).1, "", "errors only");
}
