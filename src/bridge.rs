// SPDX-License-Identifier: Apache-2.0
//! The boundary to C++, and nothing else: plain data in, an outcome out.
//!
//! No exception and no panic crosses it. Calls may come from any C++ thread.
// cxx expands to unsafe code, several operations to a block.
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block)]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tracing::Level;

use crate::config::{Config, LogLevel, TentSettings, Value, table};
use crate::error::{Error, Status};
use crate::process::Process;
use crate::task::{TaskState, TaskStatus};
use crate::vendor::cann;
use crate::{batch, logging, region, task, transport};

#[cxx::bridge(namespace = "mooncake::tent::memfabric")]
mod ffi {
    /// How a call ended: `code` is TENT's (`tent/common/status.h`), 0 is success
    /// and has no message.
    struct Outcome {
        code: u16,
        message: String,
    }

    /// What a value of TENT's configuration is.
    enum SettingKind {
        Text,
        Integer,
        /// Anything else, as JSON in `text`.
        Other,
    }

    struct Setting {
        path: String,
        kind: SettingKind,
        text: String,
        integer: i64,
    }

    /// What TENT knows at install.
    struct Settings {
        /// Those of `settingPaths()` that are set.
        keys: Vec<Setting>,
        rpc_server_addr: String,
        local_segment_name: String,
        /// glog's FLAGS_minloglevel.
        log_level: i32,
    }

    struct Region {
        address: usize,
        length: usize,
    }

    /// One target of a call, as its description says.
    struct Peer<'a> {
        name: &'a [u8],
        endpoint: &'a [u8],
        /// Why there is no endpoint; empty if there is one.
        problem: &'a [u8],
    }

    struct Request {
        source: usize,
        target: u64,
        length: usize,
        /// Position in the call's peers.
        peer: u32,
        /// TENT's: 0 READ, 1 WRITE.
        opcode: u8,
    }

    enum TaskState {
        Pending,
        Completed,
        Failed,
        /// The poll failed: `pollError` says why.
        Unknown,
    }

    struct Polled {
        state: TaskState,
        /// Whether it is worth asking for `completed` now: the task is COMPLETED,
        /// and of the last vendor batch.
        last: bool,
        bytes: usize,
    }

    extern "Rust" {
        type Transport;
        type SubBatch;

        fn newTransport() -> Box<Transport>;
        /// What `install` looks for, below "transports/memfabric/".
        #[cxx_name = "settingPaths"]
        fn setting_paths() -> Vec<String>;
        fn install(self: &Transport, settings: &Settings) -> Outcome;
        /// `ip:port`; empty if not installed.
        fn endpoint(self: &Transport) -> String;
        /// Whether the protocol of the latest install reaches device memory.
        #[cxx_name = "reachesDevices"]
        fn reaches_devices(self: &Transport) -> bool;
        /// Whether this process is a child, by fork, of the one that installed it,
        /// without the library's threads and with locks that they may hold; or
        /// exits, when the library may be gone. `deregisterMemory`, `quiesce` and
        /// `uninstall` do nothing then, and dropping it leaks it.
        #[cxx_name = "isLeftAlone"]
        fn is_left_alone(self: &Transport) -> bool;
        #[cxx_name = "registerMemory"]
        fn register(self: &Transport, regions: &[Region]) -> Outcome;
        #[cxx_name = "deregisterMemory"]
        fn deregister(self: &Transport, region: &Region) -> Outcome;
        fn allocate(self: &Transport, capacity: usize) -> Box<SubBatch>;
        #[cxx_name = "release"]
        fn free(self: &Transport, sub_batch: Box<SubBatch>);
        #[cxx_name = "mustRefresh"]
        fn must_refresh(self: &Transport, segment: u64, endpoint: &[u8]) -> bool;
        #[cxx_name = "mayReread"]
        fn may_reread(self: &Transport, segment: u64) -> bool;
        fn submit(
            self: &Transport,
            sub_batch: &SubBatch,
            peers: &[Peer],
            requests: &[Request],
        ) -> Outcome;
        fn poll(self: &Transport, sub_batch: &SubBatch, task: i32) -> Polled;
        /// How this thread's last failed poll ended. Apart, because an engine
        /// polls once a task, and an outcome costs more than an answer.
        #[cxx_name = "pollError"]
        fn poll_error() -> Outcome;
        fn quiesce(self: &Transport) -> Outcome;
        fn uninstall(self: &Transport) -> Outcome;

        fn size(self: &SubBatch) -> usize;
        /// The lengths of the tasks so far if all of them are COMPLETED, else
        /// none. What this once showed stays as it is and where it is until the
        /// sub-batch is released.
        fn completed(self: &SubBatch) -> &[u64];

        /// The device whose memory `address` is, -1 for host memory.
        #[cxx_name = "deviceOf"]
        fn device_of(address: usize) -> i32;
        /// Copies where a side is device memory. Both sides must be valid and
        /// apart, and nobody else may use them meanwhile.
        #[cxx_name = "copyDeviceMemory"]
        unsafe fn copy_device_memory(destination: usize, source: usize, length: usize) -> Outcome;
    }

    unsafe extern "C++" {
        include!("memfabric/log_sink.h");

        #[cxx_name = "writeLog"]
        fn write_log(severity: i32, file: &str, line: u32, message: &str);
    }
}

mod convert;

use ffi::{Outcome, Peer, Polled, Region, Request, Settings};

/// Turns a panic into an error that names the method.
fn guard<T>(method: &'static str, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let message = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(Error::Panicked {
            method,
            message: message.unwrap_or("(no message)").to_owned(),
        })
    })
}

/// A [`transport::Transport`] that C++ owns.
struct Transport {
    core: ManuallyDrop<transport::Transport>,
    /// Whether the protocol of the latest install reaches device memory.
    devices: AtomicBool,
    /// The process that installed it; 0 if it is not installed.
    process: AtomicU32,
}

/// A [`batch::SubBatch`] that C++ owns.
struct SubBatch(batch::SubBatch);

#[allow(non_snake_case)] // as C++ names functions
fn newTransport() -> Box<Transport> {
    Box::new(Transport {
        core: ManuallyDrop::new(transport::Transport::new()),
        devices: AtomicBool::new(false),
        process: AtomicU32::new(0),
    })
}

impl Drop for Transport {
    fn drop(&mut self) {
        if self.is_left_alone() {
            return;
        }
        let owner = self.owner();
        let teardown = guard("destructor", || {
            // SAFETY: this is the only place that takes the value out, and it
            // runs once.
            drop(unsafe { ManuallyDrop::take(&mut self.core) });
            cann::all_removed(owner);
            Ok(())
        });
        if let Err(error) = teardown {
            tracing::error!(%error, "teardown failed");
        }
    }
}

impl Transport {
    fn install(&self, settings: &Settings) -> Outcome {
        guard("install", || {
            let level = log_level(settings.log_level);
            logging::start(write_to_host, level);
            let mut tent = TentSettings {
                log_level: level,
                rpc_server_addr: settings.rpc_server_addr.clone(),
                local_segment_name: settings.local_segment_name.clone(),
                ..TentSettings::default()
            };
            for setting in &settings.keys {
                if let Some(known) = table::find(&setting.path) {
                    tent.set(known, Value::from(setting));
                }
            }
            let config = Config::resolve(Config::process_environment, &tent)?;
            // Before the first vendor call. A child's attempt to install what its
            // parent has installed changes nothing.
            let process = std::process::id();
            let _ = self
                .process
                .compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed);
            if let Err(error) = self.core.install(&config) {
                if self.core.endpoint().is_none() {
                    self.process.store(0, Ordering::Relaxed);
                }
                return Err(error);
            }
            let devices = config.protocol.needs_device();
            self.devices.store(devices, Ordering::Relaxed);
            Ok(())
        })
        .into()
    }

    fn endpoint(&self) -> String {
        let endpoint = guard("endpoint", || Ok(self.core.endpoint()));
        endpoint.ok().flatten().unwrap_or_default()
    }

    fn reaches_devices(&self) -> bool {
        self.devices.load(Ordering::Relaxed)
    }

    fn is_left_alone(&self) -> bool {
        let process = self.process.load(Ordering::Relaxed);
        process != 0 && !Process(process).is_alive()
    }

    /// Tells its regions from another transport's: C++ owns a box, which stays
    /// where it is.
    fn owner(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn register(&self, regions: &[Region]) -> Outcome {
        guard("addMemoryBuffer", || {
            let regions: Vec<_> = regions.iter().map(region::Region::from).collect();
            // SAFETY: the engine keeps registered memory mapped until it was removed,
            // as TENT asks of those who register with it.
            unsafe { self.core.register(&regions) }?;
            cann::registered(&regions, self.owner());
            if self.core.endpoint().is_none() {
                // Uninstalled in between, by a call that may have been here first.
                cann::all_removed(self.owner());
            }
            Ok(())
        })
        .into()
    }

    fn deregister(&self, region: &Region) -> Outcome {
        guard("removeMemoryBuffer", || {
            let region = region.into();
            if self.is_left_alone() {
                return Ok(());
            }
            // First, for the engine takes the memory for free whatever the answer.
            cann::removed(&region);
            self.core.deregister(region)
        })
        .into()
    }

    fn allocate(&self, capacity: usize) -> Box<SubBatch> {
        let sub_batch = guard("allocateSubBatch", || Ok(self.core.allocate(capacity)));
        Box::new(SubBatch(sub_batch.unwrap_or_else(|error| {
            tracing::error!(%error, capacity, "sub-batch without room");
            batch::SubBatch::without_owner()
        })))
    }

    #[allow(clippy::boxed_local)] // what C++ owns is a Box
    fn free(&self, sub_batch: Box<SubBatch>) {
        let freed = guard("freeSubBatch", || {
            self.core.free(sub_batch.0);
            Ok(())
        });
        if let Err(error) = freed {
            tracing::error!(%error, "sub-batch not recycled");
        }
    }

    fn must_refresh(&self, segment: u64, endpoint: &[u8]) -> bool {
        guard("mustRefresh", || {
            Ok(self.core.must_refresh(segment, endpoint))
        })
        .unwrap_or(true)
    }

    fn may_reread(&self, segment: u64) -> bool {
        guard("mayReread", || Ok(self.core.may_reread(segment))).unwrap_or(true)
    }

    fn submit(&self, sub_batch: &SubBatch, peers: &[Peer], requests: &[Request]) -> Outcome {
        guard("submitTransferTasks", || {
            let peers = peers.iter().map(task::Described::from);
            let requests = requests.iter().map(task::Request::from);
            // SAFETY: TENT asks of its callers that a request's local memory stays
            // usable until the task is terminal.
            unsafe { self.core.submit_described(&sub_batch.0, peers, requests) }
        })
        .into()
    }

    #[inline]
    fn poll(&self, sub_batch: &SubBatch, task: i32) -> Polled {
        // Cannot panic, so it does without the guard, which costs more than it.
        match self.core.peek(&sub_batch.0, task) {
            Some(status) => sub_batch.polled(task, status),
            None => self.poll_guarded(sub_batch, task),
        }
    }

    #[cold]
    fn poll_guarded(&self, sub_batch: &SubBatch, task: i32) -> Polled {
        match guard("getTransferStatus", || self.core.poll(&sub_batch.0, task)) {
            Ok(status) => sub_batch.polled(task, status),
            Err(error) => {
                // At the thread's end it may be gone; then the reason is lost, the
                // failure is not.
                let _ = POLL_ERROR.try_with(|latest| latest.set(Some(error)));
                Polled {
                    state: ffi::TaskState::Unknown,
                    last: false,
                    bytes: 0,
                }
            }
        }
    }

    fn quiesce(&self) -> Outcome {
        guard("quiesce", || match self.is_left_alone() {
            true => Ok(()),
            false => self.core.quiesce(),
        })
        .into()
    }

    fn uninstall(&self) -> Outcome {
        guard("uninstall", || {
            if self.is_left_alone() {
                return Ok(());
            }
            self.core.uninstall()?;
            cann::all_removed(self.owner());
            self.process.store(0, Ordering::Relaxed);
            Ok(())
        })
        .into()
    }
}

thread_local! {
    static POLL_ERROR: Cell<Option<Error>> = const { Cell::new(None) };
}

fn poll_error() -> Outcome {
    let latest = POLL_ERROR.try_with(Cell::take).ok().flatten();
    latest.map_or_else(
        || Outcome {
            code: Status::InternalError as u16,
            message: "memfabric getTransferStatus failed: the reason is lost with its thread"
                .to_owned(),
        },
        Outcome::from,
    )
}

impl SubBatch {
    #[inline]
    fn polled(&self, task: i32, status: TaskStatus) -> Polled {
        let completed = status.state == TaskState::Completed;
        Polled {
            state: status.state.into(),
            last: completed && self.0.is_of_last_batch(task),
            bytes: status.bytes as usize,
        }
    }

    fn size(&self) -> usize {
        self.0.len()
    }

    fn completed(&self) -> &[u64] {
        let lengths = self.0.completed();
        // SAFETY: an AtomicU64 is a u64 in memory; these are in one slice, and
        // nobody writes to them again while the sub-batch is borrowed.
        unsafe { std::slice::from_raw_parts(lengths.as_ptr().cast(), lengths.len()) }
    }
}

fn device_of(address: usize) -> i32 {
    let device = guard("deviceOf", || Ok(cann::of_memory(address)));
    let device = device.ok().flatten();
    device.map_or(-1, u32::cast_signed)
}

/// # Safety
///
/// As for [`cann::copy`].
unsafe fn copy_device_memory(destination: usize, source: usize, length: usize) -> Outcome {
    guard("copy", || {
        // SAFETY: the caller's conditions are the same.
        unsafe { cann::copy(destination, source, length) }
    })
    .into()
}

/// glog's 0 to 3 (info, warning, error, fatal) as the levels there are here.
fn log_level(minimum: i32) -> LogLevel {
    match minimum {
        ..=0 => LogLevel::Info,
        1 => LogLevel::Warning,
        _ => LogLevel::Error,
    }
}

fn setting_paths() -> Vec<String> {
    let paths = table::ALL.into_iter().map(|setting| setting.path);
    paths.map(str::to_owned).collect()
}

fn write_to_host(level: &Level, file: &str, line: u32, message: &str) {
    let severity = match *level {
        Level::ERROR => 2,
        Level::WARN => 1,
        _ => 0,
    };
    ffi::write_log(severity, file, line, message);
}
