// SPDX-License-Identifier: Apache-2.0
//! Install, init counting and teardown, over the emulator.
#![allow(missing_docs)]
#![allow(unsafe_code)] // calls the library beside the transport, forks

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use common::emulator::{Emulator, Process, built, config, config_with, listen, say};
use common::*;
use memfabric_transport::config::TentSettings;
use memfabric_transport::vendor::{abi, data_op_type};
use memfabric_transport::{Batched, Config, Error, LogLevel, Region, Status, TaskState, Transport};

#[test]
fn an_install_takes_every_step_once_and_an_uninstall_ends_the_instance_alone() {
    let emulator = Emulator::fresh();
    emulator.script("log");
    let transport = Transport::new();
    transport.install(&emulator.config()).expect("installed");
    let endpoint = transport.endpoint().expect("installed");
    assert!(
        endpoint.starts_with("127.0.0.1:") && !endpoint.ends_with(":0"),
        "{endpoint}"
    );
    transport.uninstall().expect("nothing is outstanding");
    assert_eq!(transport.endpoint(), None);

    let calls: Vec<_> = (0..).map_while(|index| emulator.logged(index)).collect();
    let names: Vec<_> = calls
        .iter()
        .map(|call| call.split(' ').next().unwrap_or(""))
        .collect();
    assert_eq!(
        names,
        [
            "smem_set_log_level",
            "smem_trans_init",
            "smem_trans_config_init",
            "smem_trans_create",
            "smem_trans_get_rpc_port",
            "smem_trans_set_peer_down_callback",
            "smem_trans_destroy",
        ]
    );
    for part in [
        "role=3",
        "deviceId=0",
        "dataOpType=2",
        "url=\"127.0.0.1:0\"",
        "flags=0",
    ] {
        assert!(calls[3].contains(part), "{part} in {}", calls[3]);
    }
    emulator.assert_no_violation();
}

#[test]
fn an_install_says_what_an_operator_asks_for_first() {
    let _emulator = Emulator::start();
    let (_, events) = events_of(|| Transport::new().install(&config()));
    let line = |start: &str| events.iter().find(|line| line.starts_with(start));
    let opened = line("INFO MemFabric library opened").expect("told");
    for part in ["library=", "libmf_smem.so", "abi_version=not told"] {
        assert!(opened.contains(part), "{part} in {opened}");
    }
    let installed = line("INFO memfabric transport installed").expect("told");
    for part in [
        "endpoint=127.0.0.1:",
        "protocol=host_rdma",
        "device=0",
        "timeout_ms=10000",
    ] {
        assert!(installed.contains(part), "{part} in {installed}");
    }
}

#[test]
fn case_07_each_failing_step_is_named_undone_and_leaves_a_second_install_possible() {
    struct Case {
        script: &'static str,
        status: Status,
        parts: &'static [&'static str],
        destroyed: u64,
    }
    let cases = [
        Case {
            script: "init=-2000",
            status: Status::InternalError,
            parts: &["smem_trans_init", "SM_INVALID_PARAM (-2000)", "device 0"],
            destroyed: 0,
        },
        Case {
            script: "config_init=-1",
            status: Status::InternalError,
            parts: &["smem_trans_config_init", "SM_ERROR (-1)"],
            destroyed: 0,
        },
        Case {
            script: "create=null",
            status: Status::DeviceNotFound,
            parts: &[
                "smem_trans_create returned NULL",
                "127.0.0.1:0",
                "host_rdma",
                "device 0",
            ],
            destroyed: 0,
        },
        Case {
            script: "get_rpc_port=-2013",
            status: Status::InternalError,
            parts: &[
                "smem_trans_get_rpc_port",
                "SM_INNER_BUSY (-2013)",
                "127.0.0.1:0",
            ],
            destroyed: 1,
        },
        Case {
            script: "port=0",
            status: Status::InternalError,
            parts: &["smem_trans_get_rpc_port", "port 0"],
            destroyed: 1,
        },
    ];
    for case in cases {
        let emulator = Emulator::fresh();
        let config = emulator.config();
        emulator.script(case.script);
        let transport = Transport::new();
        let error = transport.install(&config).expect_err(case.script);
        assert_eq!(error.status(), case.status, "{}", case.script);
        for part in case.parts {
            assert!(error.to_string().contains(part), "{part} in {error}");
        }
        assert_eq!(
            (emulator.count("destroy"), emulator.count("uninit")),
            (case.destroyed, 0),
            "{}",
            case.script
        );
        transport.uninstall().expect("nothing is installed");

        emulator.script("");
        transport.install(&config).expect("the fault is gone");
        let error = transport.install(&config).expect_err("installed already");
        assert_eq!(error.status(), Status::InvalidArgument);
        transport.uninstall().expect("nothing is outstanding");
        transport
            .uninstall()
            .expect("a second uninstall is a no-op");
        assert_eq!(emulator.count("handles"), 0);
        emulator.assert_no_violation();
    }
}

#[test]
fn a_refused_callback_or_log_level_costs_a_warning_and_not_the_transport() {
    let emulator = Emulator::start();
    for (script, call) in [
        (
            "set_peer_down_callback=-1",
            "smem_trans_set_peer_down_callback",
        ),
        ("set_log_level=-2000", "smem_set_log_level"),
    ] {
        emulator.script(script);
        let transport = Transport::new();
        let (outcome, events) = events_of(|| transport.install(&config()));
        outcome.expect("it works without");
        let warned = |line: &&String| line.starts_with("WARN") && line.contains(call);
        assert!(events.iter().any(|line| warned(&line)), "{events:?}");
    }
}

#[test]
fn a04_the_library_is_initialised_once_for_all_transports_and_for_good() {
    let emulator = Emulator::fresh();
    let config = emulator.config();
    for round in 1..=2 {
        let [first, second] = [Transport::new(), Transport::new()];
        first.install(&config).expect("installed");
        second.install(&config).expect("installed");
        assert_ne!(first.endpoint(), second.endpoint());
        drop(first);
        drop(second);
        let counts = ["init", "destroy", "uninit"].map(|name| emulator.count(name));
        assert_eq!(counts, [1, 2 * round, 0]);
    }
    emulator.assert_no_violation();
}

/// Another copy of the core in this process, with statics of its own, as each of
/// Mooncake's Python modules has one: all that this copy sees of it are its calls.
struct OtherCopy<'a>(&'a Emulator);

impl OtherCopy<'_> {
    fn initialise(&self) -> i32 {
        // SAFETY: the function's type.
        let init = unsafe { self.0.function::<abi::smem_trans_init>("smem_trans_init") };
        // SAFETY: takes numbers only.
        unsafe { init(0, 0) }
    }

    fn create(&self) -> abi::smem_trans_t {
        let mut config = abi::smem_trans_config_t::ZERO;
        config.role = abi::SMEM_TRANS_BOTH;
        config.dataOpType = data_op_type(self.0.config().protocol);
        for (to, from) in config.url.iter_mut().zip(b"127.0.0.1:0") {
            *to = *from as std::ffi::c_char;
        }
        // SAFETY: the function's type.
        let create = unsafe {
            self.0
                .function::<abi::smem_trans_create>("smem_trans_create")
        };
        // SAFETY: a whole configuration.
        unsafe { create(&raw const config, 0) }
    }

    /// What its instance answers to a registration.
    fn register(&self, handle: abi::smem_trans_t, memory: &mut [u8]) -> i32 {
        type Register = abi::smem_trans_register_mem;
        // SAFETY: the function's type.
        let register = unsafe { self.0.function::<Register>("smem_trans_register_mem") };
        // SAFETY: memory that outlives the instance, which nobody connects to.
        unsafe { register(handle, memory.as_mut_ptr().cast(), memory.len(), 0) }
    }

    fn destroy(&self, handle: abi::smem_trans_t) {
        // SAFETY: the function's type.
        let destroy = unsafe {
            self.0
                .function::<abi::smem_trans_destroy>("smem_trans_destroy")
        };
        // SAFETY: created and not destroyed.
        unsafe { destroy(handle, 0) };
    }
}

#[test]
fn a04_whichever_copy_of_the_core_leaves_first_the_other_goes_on() {
    // What the second initialisation answers: the library of the specification
    // refuses it, the published one does not.
    for answer in ["init=SM_REPEAT_CALL", "init=0"] {
        for other_is_first in [true, false] {
            let case = format!("{answer}, the other copy first: {other_is_first}");
            let emulator = Emulator::fresh();
            let transport = Transport::new();
            let other = OtherCopy(&emulator);
            if other_is_first {
                assert_eq!(other.initialise(), 0);
                emulator.script(answer);
                transport.install(&emulator.config()).expect("installed");
            } else {
                transport.install(&emulator.config()).expect("installed");
                emulator.script(answer);
                other.initialise();
            }
            emulator.script("");
            let survivor = other.create();
            transport.uninstall().expect("nothing is outstanding");
            let mut memory = vec![0u8; 4096];
            assert_eq!(other.register(survivor, &mut memory), 0, "{case}");
            other.destroy(survivor);
            assert_eq!(emulator.count("uninit"), 0, "{case}");
            emulator.assert_no_violation();
        }
    }
}

#[test]
fn an_initialisation_of_somebody_else_is_used() {
    let emulator = Emulator::fresh();
    emulator.script("init=SM_REPEAT_CALL");
    let transport = Transport::new();
    transport
        .install(&emulator.config())
        .expect("already initialised is success");
    transport.uninstall().expect("nothing is outstanding");
    let counts = ["init", "destroy", "uninit"].map(|name| emulator.count(name));
    assert_eq!(counts, [1, 1, 0]);
}

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
}

#[test]
fn a16_a_child_after_fork_calls_no_function_of_the_library() {
    // In a process of its own, whose other threads hold no lock at that moment.
    Process::start("forking", &[]).end();
}

#[test]
#[ignore = "the process of a16_a_child_after_fork_…"]
fn forking() {
    let emulator = Emulator::fresh();
    let backend = Batched::open(&emulator.config()).expect("opened");
    // SAFETY: the child uses what it has of the heap, which the C library keeps in
    // order for it, and leaves by `_exit`.
    let child = unsafe { fork() };
    if child == 0 {
        drop(backend);
        let calls = emulator.count("destroy") + emulator.count("uninit");
        // SAFETY: ends the child, running nothing of the parent's.
        unsafe { _exit(i32::from(calls > 0)) };
    }
    let mut status = -1;
    // SAFETY: writes one number; the child is ours.
    unsafe { waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child");
    drop(backend);
    assert_eq!(emulator.count("destroy"), 1);
    emulator.assert_no_violation();
}

#[test]
fn the_log_level_reaches_the_library() {
    let emulator = Emulator::start();
    for (level, number) in [
        (LogLevel::Info, 1),
        (LogLevel::Warning, 2),
        (LogLevel::Error, 3),
    ] {
        let config = Config {
            log_level: level,
            ..config()
        };
        Transport::new().install(&config).expect("installed");
        assert_eq!(emulator.count("log_level"), number);
    }
}

#[test]
fn another_need_retry_code_is_pending_where_it_is_configured() {
    let emulator = Emulator::start();
    emulator.script("need_retry=-2013; pending=2");
    for (code, pending) in [(-2013, true), (1, false)] {
        let transport = Transport::new();
        let config = Config {
            need_retry: code,
            ..config()
        };
        transport.install(&config).expect("installed");
        let own = transport.endpoint().expect("installed");
        let mut memory = vec![7u8; 128];
        let address = memory.as_mut_ptr().expose_provenance();
        let region = Region {
            address,
            length: 128,
        };
        transport.vouched_register(&[region]).expect("registered");
        let sub_batch = transport.allocate(1);
        transport
            .vouched_submit(
                &sub_batch,
                [peer(&own)].into_iter(),
                [write(0, address, address + 64, 64)].into_iter(),
            )
            .expect("submitted");
        let first = transport.poll(&sub_batch, 0);
        match pending {
            true => assert_eq!(first.expect("pending").state, TaskState::Pending),
            false => assert!(matches!(first, Err(Error::QueryFailed { .. })), "{first:?}"),
        }
        transport.quiesce().expect("it ends");
    }
}

#[test]
fn the_five_protocols_reach_the_library_with_the_threads_device() {
    let emulator = Emulator::start();
    let acl = Acl::load();
    for (name, bit) in [
        ("device_sdma", 1),
        ("device_rdma", 8),
        ("host_rdma", 2),
        ("device_urma", 64),
        ("device_uboe", 128),
    ] {
        emulator.script("log");
        let config = config_with(&[("MF_PROTOCOL", name)]);
        // The current device belongs to a thread: each has its own.
        std::thread::scope(|scope| {
            for device in [3, 5] {
                let (acl, config) = (&acl, &config);
                scope
                    .spawn(move || {
                        acl.set_device(device);
                        Transport::new().install(config).expect("installed");
                    })
                    .join()
                    .expect("no panic");
            }
        });
        let calls: Vec<_> = (0..).map_while(|index| emulator.logged(index)).collect();
        let creates: Vec<_> = calls
            .iter()
            .filter(|call| call.contains("trans_create"))
            .collect();
        let [.., first, second] = creates.as_slice() else {
            panic!("two creates: {calls:?}");
        };
        assert!(first.contains(&format!("dataOpType={bit} ")), "{first}");
        assert!(first.contains("deviceId=3 "), "{first}");
        assert!(second.contains("deviceId=5 "), "{second}");
    }
}

#[test]
fn a_device_protocol_without_a_current_device_says_what_to_call() {
    let _emulator = Emulator::start();
    let acl = Acl::load();
    acl.set_device_code(107_002);
    let error = Transport::new()
        .install(&config_with(&[("MF_PROTOCOL", "device_rdma")]))
        .expect_err("no device");
    assert_eq!(error.status(), Status::InternalError);
    for part in ["aclrtGetDevice", "107002", "aclrtSetDevice"] {
        assert!(error.to_string().contains(part), "{part} in {error}");
    }
    // The fast path of a host without devices does not depend on one.
    Transport::new()
        .install(&config())
        .expect("host_rdma needs no device");
}

/// Emulated CANN; its settings are the calling thread's.
struct Acl(libloading::Library);

#[allow(unsafe_code)] // calls functions of a shared object
impl Acl {
    fn load() -> Self {
        // By its name, as the core opens it: cargo may leave a second copy elsewhere.
        // SAFETY: the emulator is ours and has no initialiser of its own.
        Self(unsafe { libloading::Library::new("libascendcl.so") }.expect("it loads"))
    }

    fn number(&self, name: &str, value: i32) {
        // SAFETY: functions of this shape are documented by the emulator.
        let function = unsafe { self.0.get::<unsafe extern "C" fn(i32)>(name) };
        let function = function.expect("the emulator exports it");
        // SAFETY: takes a number.
        unsafe { function(value) };
    }

    fn set_device(&self, device: i32) {
        self.number("mf_emu_set_device", device);
    }

    fn set_device_code(&self, code: i32) {
        self.number("mf_emu_set_device_code", code);
    }
}

#[test]
fn case_05_only_the_device_protocols_need_cann() {
    // A process of its own: the dynamic linker would find the emulated CANN here.
    for (protocol, folder, parts) in [
        ("host_rdma", None, &["installed on device 0"][..]),
        (
            "device_rdma",
            None,
            &["libascendcl.so: cannot open", "device_rdma", "host_rdma"],
        ),
        (
            "device_rdma",
            Some(()),
            &["libascendcl.so", "undefined symbol: aclrtGetDevice"],
        ),
        ("host_rdma", Some(()), &["installed on device 0"]),
    ] {
        let with_library = tempfile::tempdir().expect("there is room");
        let status = std::process::Command::new("cc")
            .args(["-shared", "-o"])
            .arg(with_library.path().join("libascendcl.so"))
            .args(["-x", "c", "/dev/null"])
            .status()
            .expect("a C compiler is installed");
        assert!(status.success());
        let mut process = Process::start_with("install_without_cann", |command| {
            command
                .env_remove("LD_LIBRARY_PATH")
                .env("MF_PROTOCOL", protocol);
            if folder.is_some() {
                command.env("LD_LIBRARY_PATH", with_library.path());
            }
        });
        let said = process.hear();
        process.end();
        for part in parts {
            assert!(said.contains(part), "{protocol}: {part} in {said}");
        }
    }
}

#[test]
#[ignore = "the other process of case_05_only_the_device_protocols_need_cann"]
fn install_without_cann() {
    let emulator = Emulator::start();
    emulator.script("log");
    let tent = TentSettings {
        rpc_server_addr: "127.0.0.1:0".to_owned(),
        ..TentSettings::default()
    };
    let mut config = Config::resolve(Config::process_environment, &tent).expect("valid");
    config.library = built("libmf_smem.so");
    match Transport::new().install(&config) {
        Ok(()) => {
            let calls: Vec<_> = (0..).map_while(|index| emulator.logged(index)).collect();
            let zero = calls.iter().any(|call| call.contains("deviceId=0 "));
            say(if zero {
                "installed on device 0"
            } else {
                "installed elsewhere"
            });
        }
        Err(error) => {
            assert_eq!(error.status(), Status::DeviceNotFound);
            say(&error.to_string());
        }
    }
}

#[test]
fn case_12_forty_processes_install_at_once_on_forty_ports() {
    let mut processes: Vec<_> = (0..40)
        .map(|_| Process::start("install_and_wait", &[]))
        .collect();
    let endpoints: HashSet<_> = processes.iter_mut().map(Process::hear).collect();
    assert_eq!(endpoints.len(), 40, "{endpoints:?}");
    for process in processes {
        process.end();
    }
}

#[test]
#[ignore = "the other process of case_12_forty_processes_install_at_once_on_forty_ports"]
fn install_and_wait() {
    let transport = Transport::new();
    transport.install(&config()).expect("installed");
    say(&transport.endpoint().expect("installed"));
    assert_eq!(listen(), None);
}

#[test]
fn a_peer_down_callback_inside_any_call_deadlocks_nothing() {
    let emulator = Emulator::start();
    let transport = Arc::new(Transport::new());
    emulator.script(
        "peer_down_register=10.0.0.1:1; peer_down_submit=10.0.0.2:2; \
         peer_down_query=10.0.0.3:3; peer_down_deregister=10.0.0.4:4; \
         peer_down_thread_query=10.0.0.5:5",
    );
    transport.install(&config()).expect("installed");
    let own = transport.endpoint().expect("installed");
    let mut memory = vec![0u8; 128];
    let address = memory.as_mut_ptr().expose_provenance();
    let region = Region {
        address,
        length: 128,
    };
    transport.vouched_register(&[region]).expect("registered");
    let sub_batch = transport.allocate(1);
    transport
        .vouched_submit(
            &sub_batch,
            [peer(&own)].into_iter(),
            [write(0, address, address + 64, 64)].into_iter(),
        )
        .expect("submitted");
    assert_eq!(
        finish(&transport, &sub_batch, 0),
        completed(64),
        "it completes no task"
    );
    transport.free(sub_batch);
    transport.deregister(region).expect("idle");
    for number in 1..=5 {
        let endpoint = format!("10.0.0.{number}:{number}");
        assert!(
            transport.must_refresh(number, &endpoint),
            "{endpoint} was reported"
        );
    }
    assert_eq!(emulator.peer_down("10.0.0.6:6"), 1);
    assert!(transport.must_refresh(6, "10.0.0.6:6"));
    emulator.script("");
    transport.uninstall().expect("nothing is outstanding");
    emulator.assert_no_violation();
}
