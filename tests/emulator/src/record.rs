// SPDX-License-Identifier: Apache-2.0
//! What tests can observe: counters, violations, the call log, the last error.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::sys;

/// One of the vendor's 13 functions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    Init,
    Uninit,
    ConfigInit,
    Create,
    Destroy,
    GetRpcPort,
    RegisterMem,
    BatchRegisterMem,
    DeregisterMem,
    BatchCopy,
    Query,
    SetPeerDownCallback,
    SetLogLevel,
}

/// Each call's name in scripts, and the vendor's.
const CALLS: [(Call, &str, &str); 13] = [
    (Call::Init, "init", "smem_trans_init"),
    (Call::Uninit, "uninit", "smem_trans_uninit"),
    (Call::ConfigInit, "config_init", "smem_trans_config_init"),
    (Call::Create, "create", "smem_trans_create"),
    (Call::Destroy, "destroy", "smem_trans_destroy"),
    (Call::GetRpcPort, "get_rpc_port", "smem_trans_get_rpc_port"),
    (Call::RegisterMem, "register", "smem_trans_register_mem"),
    (
        Call::BatchRegisterMem,
        "batch_register",
        "smem_trans_batch_register_mem",
    ),
    (
        Call::DeregisterMem,
        "deregister",
        "smem_trans_deregister_mem",
    ),
    (Call::BatchCopy, "submit", "smem_trans_batch_copy"),
    (Call::Query, "query", "smem_trans_batch_status_query"),
    (
        Call::SetPeerDownCallback,
        "set_peer_down_callback",
        "smem_trans_set_peer_down_callback",
    ),
    (Call::SetLogLevel, "set_log_level", "smem_set_log_level"),
];

const _: () = {
    let mut index = 0;
    while index < CALLS.len() {
        assert!(
            CALLS[index].0 as usize == index,
            "CALLS is in the order of Call"
        );
        index += 1;
    }
};

impl Call {
    pub(crate) fn from_script_name(name: &str) -> Option<Self> {
        CALLS
            .iter()
            .find(|(_, script, _)| *script == name)
            .map(|(call, _, _)| *call)
    }

    pub(crate) fn vendor_name(self) -> &'static str {
        CALLS[self as usize].2
    }
}

static CALL_COUNTS: [AtomicU64; CALLS.len()] = [const { AtomicU64::new(0) }; CALLS.len()];

/// Counts an entry into a vendor function.
pub(crate) fn count_call(call: Call) {
    CALL_COUNTS[call as usize].fetch_add(1, Ordering::Relaxed);
}

macro_rules! counters {
    ($($name:ident)*) => {
        /// Counters of events, and gauges of what is.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Counter { $($name),* }
        const COUNTER_NAMES: &[(Counter, &str)] = &[$((Counter::$name, stringify!($name))),*];
    };
}

counters! {
    batches refused results failed blocks bytes_written bytes_read queries_pending query_errors
    violations peer_downs log
    handles regions peers outstanding unfinished held blocked
}

impl Counter {
    /// Whether it tells what is, and so survives a reset.
    fn is_gauge(self) -> bool {
        self as usize >= Counter::handles as usize
    }
}

static COUNTERS: [AtomicU64; 19] = [const { AtomicU64::new(0) }; 19];
const _: () = assert!(COUNTERS.len() == COUNTER_NAMES.len());

/// Adds to a counter.
pub(crate) fn add(counter: Counter, amount: u64) {
    COUNTERS[counter as usize].fetch_add(amount, Ordering::Relaxed);
}

/// Takes from a gauge. Who sees that it fell sees what came before, too.
pub(crate) fn subtract(counter: Counter, amount: u64) {
    COUNTERS[counter as usize].fetch_sub(amount, Ordering::Release);
}

/// A counter's value by its name, or by a call's name of either kind.
pub(crate) fn count(name: &str) -> Option<u64> {
    if name == "log_level" {
        return Some(LOG_LEVEL.load(Ordering::Relaxed).max(0) as u64);
    }
    if let Some((call, _, _)) = CALLS
        .iter()
        .find(|(_, script, vendor)| *script == name || *vendor == name)
    {
        return Some(CALL_COUNTS[*call as usize].load(Ordering::Relaxed));
    }
    let (counter, _) = COUNTER_NAMES.iter().find(|(_, known)| *known == name)?;
    Some(COUNTERS[*counter as usize].load(Ordering::Acquire))
}

/// The vendor's default is unknown; warnings only, so that tests stay quiet.
const DEFAULT_LOG_LEVEL: i32 = 2;
static LOG_LEVEL: AtomicI32 = AtomicI32::new(DEFAULT_LOG_LEVEL);

/// `smem_set_log_level`'s levels, of which errors alone are always shown.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Info = 1,
    Warn = 2,
    Error = 3,
}

pub(crate) fn set_log_level(level: i32) {
    LOG_LEVEL.store(level, Ordering::Relaxed);
}

/// Writes a line to stderr if the level asks for it.
pub(crate) fn print(level: Level, text: &str) {
    if level as i32 >= LOG_LEVEL.load(Ordering::Relaxed) {
        // A closed stderr must not panic inside a vendor call.
        let _ = writeln!(std::io::stderr(), "libmf_smem.so (emulator): {text}");
    }
}

/// Violations kept with their text; more are only counted.
const VIOLATIONS_KEPT: usize = 1_000;
static VIOLATIONS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static REPORT: Mutex<Option<String>> = Mutex::new(None);

/// Records that the caller broke the contract.
pub(crate) fn violation(text: String) {
    add(Counter::violations, 1);
    set_error(&text);
    print(Level::Warn, &format!("violation: {text}"));
    report(&format!("violation: {text}"));
    let mut violations = VIOLATIONS.lock();
    if violations.len() < VIOLATIONS_KEPT {
        violations.push(text);
    }
}

pub(crate) fn violation_text(index: u64) -> Option<String> {
    VIOLATIONS.lock().get(usize::try_from(index).ok()?).cloned()
}

pub(crate) fn set_report(path: Option<String>) {
    *REPORT.lock() = path;
}

fn report(line: &str) {
    let path = REPORT.lock();
    let Some(path) = path.as_ref() else { return };
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| writeln!(file, "pid={} {line}", std::process::id()));
    if let Err(error) = written {
        print(
            Level::Warn,
            &format!("cannot write the report {path}: {error}"),
        );
    }
}

/// Writes every counter to the report, if there is one.
pub(crate) fn report_counters() {
    if REPORT.lock().is_none() {
        return;
    }
    let mut line = String::from("counters:");
    for (_, _, vendor) in &CALLS {
        line += &format!(" {vendor}={}", count(vendor).unwrap_or_default());
    }
    for (_, name) in COUNTER_NAMES {
        line += &format!(" {name}={}", count(name).unwrap_or_default());
    }
    report(&line);
}

/// The ring of the last calls.
struct CallLog {
    capacity: usize,
    logged: u64,
    lines: VecDeque<String>,
}

static LOGGING: AtomicBool = AtomicBool::new(false);
static LOG: Mutex<CallLog> = Mutex::new(CallLog {
    capacity: 0,
    logged: 0,
    lines: VecDeque::new(),
});

/// Starts a new log of so many lines, or ends it.
pub(crate) fn set_log(lines: Option<usize>) {
    let mut log = LOG.lock();
    *log = CallLog {
        capacity: lines.unwrap_or(0),
        logged: 0,
        lines: VecDeque::new(),
    };
    LOGGING.store(lines.is_some(), Ordering::Release);
    COUNTERS[Counter::log as usize].store(0, Ordering::Relaxed);
}

pub(crate) fn call_line(index: u64) -> Option<String> {
    let log = LOG.lock();
    let first = log.logged - log.lines.len() as u64;
    let position = usize::try_from(index.checked_sub(first)?).ok()?;
    log.lines.get(position).cloned()
}

/// A call on its way to the log.
pub(crate) struct Entry {
    call: Call,
    begin: u64,
    arguments: String,
}

impl Entry {
    /// Begins a line, if anybody wants lines.
    pub(crate) fn begin(call: Call, arguments: impl FnOnce() -> String) -> Option<Self> {
        LOGGING.load(Ordering::Acquire).then(|| Self {
            call,
            begin: sys::monotonic_ns(),
            arguments: arguments(),
        })
    }

    /// Logs the line with the call's answer.
    pub(crate) fn end(self, answer: &str) {
        let line = format!(
            "{} begin={} end={} thread={}{}{} -> {answer}",
            self.call.vendor_name(),
            self.begin,
            sys::monotonic_ns(),
            sys::thread_id(),
            if self.arguments.is_empty() { "" } else { " " },
            self.arguments,
        );
        let mut log = LOG.lock();
        if log.capacity == 0 {
            return;
        }
        if log.lines.len() == log.capacity {
            log.lines.pop_front();
        }
        log.lines.push_back(line);
        log.logged += 1;
        add(Counter::log, 1);
    }
}

/// Forgets events, violations and the log; gauges stay.
pub(crate) fn reset() {
    for count in &CALL_COUNTS {
        count.store(0, Ordering::Relaxed);
    }
    for (counter, _) in COUNTER_NAMES
        .iter()
        .filter(|(counter, _)| !counter.is_gauge())
    {
        COUNTERS[*counter as usize].store(0, Ordering::Relaxed);
    }
    VIOLATIONS.lock().clear();
    set_log(None);
    set_report(None);
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

/// Remembers why this thread's call failed.
pub(crate) fn set_error(text: &str) {
    let text: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    if let Ok(text) = CString::new(text) {
        // A thread that is ending has no place for it any more.
        let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
    }
}

/// This thread's last error; the pointer is good until the thread's next one.
pub(crate) fn last_error() -> *const std::ffi::c_char {
    const NONE: &CStr = c"";
    LAST_ERROR
        .try_with(|last| last.borrow().as_ptr())
        .unwrap_or(NONE.as_ptr())
}
