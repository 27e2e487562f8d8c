//! The vendor's 13 functions, and the emulator's own.
#![allow(unsafe_code)] // exported symbols, and the caller's pointers

use std::ffi::{CStr, c_char, c_int, c_void};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::abi::{
    BatchParams, DATA_OP_TYPES, DEFAULT_INIT_TIMEOUT_S, OPCODE_READ, OPCODE_WRITE,
    PeerDownCallback, ROLE_BOTH, SM_ERROR, SM_INVALID_PARAM, SM_NEED_RETRY, SM_NOT_INITIALIZED,
    SM_OBJECT_NOT_EXISTS, SM_OK, SM_REPEAT_CALL, TransConfig, TransHandle, code_name,
};
use crate::arguments::{Blocks, Source};
use crate::callback::Callback;
use crate::handle::{self, Handle};
use crate::lane::Answer;
use crate::peer::{Refusal, refuse};
use crate::record::{self, Call, Counter, Entry, Level};
use crate::script::{self, Kind};
use crate::{VERSION, gate};

/// The environment variable with a script.
const SCRIPT_VARIABLE: &str = "MF_EMULATOR";

#[derive(Default)]
struct Library {
    /// Whether `smem_trans_init` succeeded and was not undone.
    initialised: bool,
    /// Whether the script said that somebody else initialised.
    initialised_elsewhere: bool,
    /// Whether the environment was looked at, or is not to be.
    script_settled: bool,
}

static LIBRARY: Mutex<Library> = Mutex::new(Library {
    initialised: false,
    initialised_elsewhere: false,
    script_settled: false,
});

/// Runs a vendor function: scripted behaviour first, then the body, unless the
/// script has an answer of its own. No panic gets out.
fn call<T>(
    call: Call,
    token: usize,
    arguments: impl FnOnce() -> String,
    forced: impl FnOnce(i32) -> T,
    body: impl FnOnce() -> T,
    describe: impl FnOnce(&T) -> String,
) -> Option<T> {
    let run = || {
        record::count_call(call);
        let entry = Entry::begin(call, arguments);
        let scripted = before(call, token);
        let answer = match scripted {
            Some(code) => {
                record::set_error(&format!("the script answers {}", code_name(code)));
                forced(code)
            }
            None => body(),
        };
        if let Some(entry) = entry {
            entry.end(&describe(&answer));
        }
        answer
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(answer) => Some(answer),
        Err(_) => {
            record::set_error("the emulator panicked");
            None
        }
    }
}

/// What the script wants to happen inside a call, and its answer if it has one.
fn before(call: Call, token: usize) -> Option<i32> {
    if let Some(time) = script::time(Kind::Slow(call)) {
        std::thread::sleep(time);
    }
    if script::flag(Kind::Block(call)) {
        gate::wait();
    }
    if let Some(peer) = script::text(Kind::PeerDown(call)) {
        call_peer_down(&concerned(token), &peer);
    }
    if let Some(peer) = script::text(Kind::PeerDownThread(call)) {
        call_peer_down_from_thread(concerned(token), peer);
    }
    script::code(Kind::Answer(call))
}

/// The handles whose callback a scripted peer-down inside a call runs.
fn concerned(token: usize) -> Vec<Arc<Handle>> {
    match token {
        0 => handle::all(),
        token => handle::find(token).into_iter().collect(),
    }
}

fn call_peer_down(handles: &[Arc<Handle>], peer: &str) -> u64 {
    handles
        .iter()
        .filter(|handle| handle.call_peer_down(peer))
        .count() as u64
}

fn call_peer_down_from_thread(handles: Vec<Arc<Handle>>, peer: String) -> u64 {
    let thread = std::thread::Builder::new()
        .name("mf-emu-peer-down".to_owned())
        .spawn(move || call_peer_down(&handles, &peer));
    match thread {
        Ok(thread) => thread.join().unwrap_or(0),
        Err(_) => 0,
    }
}

fn code_call(
    which: Call,
    token: usize,
    arguments: impl FnOnce() -> String,
    body: impl FnOnce() -> Result<(), Refusal>,
) -> c_int {
    let body = || body().map_or_else(refuse, |()| SM_OK);
    call(which, token, arguments, |code| code, body, i32::to_string).unwrap_or(SM_ERROR)
}

fn invalid(text: impl Into<String>) -> Refusal {
    (SM_INVALID_PARAM, text.into())
}

fn handle_text(handle: TransHandle) -> String {
    format!("handle={:#x}", handle.addr())
}

/// The handle, in a library that is initialised.
fn live(handle: TransHandle) -> Result<Arc<Handle>, Refusal> {
    let found = handle::find(handle.addr())?;
    let library = LIBRARY.lock();
    if library.initialised || library.initialised_elsewhere {
        return Ok(found);
    }
    drop(library);
    let text = format!(
        "the handle {:#x} was used after smem_trans_uninit",
        handle.addr()
    );
    record::violation(text.clone());
    Err((SM_NOT_INITIALIZED, text))
}

/// Initialises the library for this process.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_init(device_id: u32, flags: u32) -> i32 {
    let settled = catch_unwind(settle_script).unwrap_or_else(|_| Err("a panic".to_owned()));
    if let Err(text) = settled {
        record::print(Level::Error, &text);
        return refuse(invalid(text));
    }
    let body = || {
        if flags != 0 {
            return refuse(invalid(format!("flags is {flags}, not 0")));
        }
        let mut library = LIBRARY.lock();
        if library.initialised {
            return SM_REPEAT_CALL;
        }
        library.initialised = true;
        record::print(Level::Info, &format!("{VERSION}, device {device_id}"));
        SM_OK
    };
    let forced = |code| {
        if code == SM_REPEAT_CALL {
            LIBRARY.lock().initialised_elsewhere = true;
        }
        code
    };
    let arguments = || format!("device_id={device_id} flags={flags}");
    call(Call::Init, 0, arguments, forced, body, i32::to_string).unwrap_or(SM_ERROR)
}

/// Takes the script from the environment, once, unless there was one already.
fn settle_script() -> Result<(), String> {
    let mut library = LIBRARY.lock();
    if library.script_settled {
        return Ok(());
    }
    match std::env::var_os(SCRIPT_VARIABLE) {
        None => {}
        Some(text) => {
            let text = text.to_string_lossy();
            script::install(&text).map_err(|why| format!("{SCRIPT_VARIABLE}: {why}"))?;
        }
    }
    library.script_settled = true;
    Ok(())
}

/// Undoes `smem_trans_init`.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_uninit(flags: u32) {
    let body = || {
        if flags != 0 {
            record::violation(format!("smem_trans_uninit: flags is {flags}, not 0"));
        }
        let mut library = LIBRARY.lock();
        if !library.initialised {
            let whose = match library.initialised_elsewhere {
                true => "by a caller that did not initialise",
                false => "without smem_trans_init",
            };
            drop(library);
            record::violation(format!("smem_trans_uninit: {whose}"));
            return;
        }
        library.initialised = false;
        drop(library);
        let alive = handle::all().len();
        if alive != 0 {
            record::violation(format!(
                "smem_trans_uninit: {alive} handles are not destroyed"
            ));
        }
        record::report_counters();
    };
    let arguments = || format!("flags={flags}");
    call(
        Call::Uninit,
        0,
        arguments,
        |_| (),
        body,
        |()| "void".to_owned(),
    );
}

/// Fills a configuration with defaults. They name no role and no operation, so
/// that forgetting to set them shows.
///
/// # Safety
/// `config` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_config_init(config: *mut TransConfig) -> i32 {
    let body = || {
        if config.is_null() {
            return Err(invalid("config is NULL"));
        }
        // SAFETY: not NULL, so the caller lets us write it; zeros are a value of
        // every field.
        unsafe { ptr::write_bytes(config, 0, 1) };
        // SAFETY: as above, and now initialised.
        unsafe { (*config).init_timeout = DEFAULT_INIT_TIMEOUT_S };
        Ok(())
    };
    code_call(Call::ConfigInit, 0, String::new, body)
}

/// Creates a handle that listens on `config.url`. NULL on failure.
///
/// # Safety
/// `config` is NULL or can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_create(config: *const TransConfig, flags: u32) -> TransHandle {
    // SAFETY: NULL becomes None; else the caller lets us read it.
    let config = unsafe { config.as_ref() }.copied();
    let arguments = || match &config {
        None => format!("config=0x0 flags={flags}"),
        Some(config) => format!("{} flags={flags}", describe_config(config)),
    };
    let body = || match create(config.as_ref(), flags) {
        Ok(token) => token,
        Err(refusal) => {
            refuse(refusal);
            0
        }
    };
    let token = call(
        Call::Create,
        0,
        arguments,
        |_| 0,
        body,
        |token| format!("{token:#x}"),
    );
    ptr::without_provenance_mut(token.unwrap_or(0))
}

fn create(config: Option<&TransConfig>, flags: u32) -> Result<usize, Refusal> {
    let library = LIBRARY.lock();
    if !library.initialised && !library.initialised_elsewhere {
        drop(library);
        let text = "smem_trans_create: smem_trans_init has not been called".to_owned();
        record::violation(text.clone());
        return Err((SM_NOT_INITIALIZED, text));
    }
    drop(library);
    let config = config.ok_or_else(|| invalid("config is NULL"))?;
    if flags != 0 || config.flags != 0 {
        return Err(invalid(format!(
            "flags are {flags} and {}, not 0",
            config.flags
        )));
    }
    if config.role != ROLE_BOTH {
        return Err(invalid(format!(
            "role is {}, not BOTH ({ROLE_BOTH})",
            config.role
        )));
    }
    let operations = config.data_op_type;
    if operations == 0 || operations & !DATA_OP_TYPES != 0 {
        return Err(invalid(format!(
            "dataOpType is {operations:#x}, no set of operations"
        )));
    }
    if config.tls.tls_enable != 0 {
        return Err(invalid("the emulator has no TLS"));
    }
    terminated(&config.nic).ok_or_else(|| invalid("nic is not terminated within 64 bytes"))?;
    let url =
        terminated(&config.url).ok_or_else(|| invalid("url is not terminated within 64 bytes"))?;
    let address: SocketAddr = url
        .parse()
        .map_err(|_| invalid(format!("url {url:?} is no numeric ip:port")))?;
    handle::create(address, Duration::from_secs(config.init_timeout.into()))
}

/// The text in a fixed array, if it ends there.
fn terminated(field: &[c_char]) -> Option<String> {
    let end = field.iter().position(|&byte| byte == 0)?;
    let bytes: Vec<u8> = field[..end].iter().map(|&byte| byte as u8).collect();
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn describe_config(config: &TransConfig) -> String {
    format!(
        "role={} initTimeout={} deviceId={} config.flags={} dataOpType={} nic={:?} url={:?} \
         tlsEnable={}",
        config.role,
        config.init_timeout,
        config.device_id,
        config.flags,
        config.data_op_type,
        terminated(&config.nic).unwrap_or_else(|| "(unterminated)".to_owned()),
        terminated(&config.url).unwrap_or_else(|| "(unterminated)".to_owned()),
        config.tls.tls_enable,
    )
}

/// Destroys a handle. When it returns, no memory is touched any more and no
/// callback runs; batches without a result are a violation.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_destroy(handle: TransHandle, flags: u32) {
    let body = || {
        if flags != 0 {
            record::violation(format!("smem_trans_destroy: flags is {flags}, not 0"));
        }
        if let Err(refusal) = handle::destroy(handle.addr()) {
            refuse(refusal);
        }
    };
    let arguments = || format!("{} flags={flags}", handle_text(handle));
    call(
        Call::Destroy,
        handle.addr(),
        arguments,
        |_| (),
        body,
        |()| "void".to_owned(),
    );
}

/// Gives the port that a handle listens on.
///
/// # Safety
/// `port` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_get_rpc_port(handle: TransHandle, port: *mut u16) -> i32 {
    let body = || {
        let own = live(handle)?.port();
        if port.is_null() {
            return Err(invalid("port is NULL"));
        }
        let answer = script::count(Kind::Port).map_or(own, |port| port as u16);
        // SAFETY: not NULL, so the caller lets us write it.
        unsafe { port.write(answer) };
        Ok(())
    };
    code_call(
        Call::GetRpcPort,
        handle.addr(),
        || handle_text(handle),
        body,
    )
}

/// Registers one range.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_register_mem(
    handle: TransHandle,
    address: *mut c_void,
    capacity: usize,
    flags: u32,
) -> i32 {
    let body = || {
        let handle = live(handle)?;
        if flags != 0 {
            return Err(invalid(format!("flags is {flags}, not 0")));
        }
        handle.register(&[(address.addr() as u64, capacity as u64)])
    };
    let arguments = || {
        let handle = handle_text(handle);
        format!(
            "{handle} address={:#x} capacity={capacity} flags={flags}",
            address.addr()
        )
    };
    code_call(Call::RegisterMem, handle.addr(), arguments, body)
}

/// Registers several ranges in their order. On failure those before the failing
/// one stay registered.
///
/// # Safety
/// The two lists are NULL or have `count` readable elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_batch_register_mem(
    handle: TransHandle,
    addresses: *mut *mut c_void,
    capacities: *mut usize,
    count: u32,
    flags: u32,
) -> i32 {
    let ranges = (!addresses.is_null() && !capacities.is_null()).then(|| {
        // SAFETY: not NULL, so it has `count` elements, which nobody changes
        // during the call.
        let addresses = unsafe { slice::from_raw_parts(addresses, count as usize) };
        // SAFETY: as above.
        let capacities = unsafe { slice::from_raw_parts(capacities, count as usize) };
        let pairs = addresses.iter().zip(capacities);
        pairs
            .map(|(it, size)| (it.addr() as u64, *size as u64))
            .collect::<Vec<_>>()
    });
    let arguments = || {
        let ranges: Vec<_> = ranges
            .iter()
            .flatten()
            .map(|(at, size)| format!("{at:#x}+{size}"))
            .collect();
        let handle = handle_text(handle);
        format!(
            "{handle} count={count} regions=[{}] flags={flags}",
            ranges.join(",")
        )
    };
    let body = || {
        let handle = live(handle)?;
        if flags != 0 {
            return Err(invalid(format!("flags is {flags}, not 0")));
        }
        match &ranges {
            None => Err(invalid("addresses or capacities is NULL")),
            Some(ranges) if ranges.is_empty() => Err(invalid("count is 0")),
            Some(ranges) => handle.register(ranges),
        }
    };
    code_call(Call::BatchRegisterMem, handle.addr(), arguments, body)
}

/// Withdraws the region that begins at `address`.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_deregister_mem(handle: TransHandle, address: *mut c_void) -> i32 {
    let body = || {
        let handle = live(handle)?;
        if address.is_null() {
            return Err(invalid("address is NULL"));
        }
        handle.deregister(address.addr() as u64)
    };
    let arguments = || format!("{} address={:#x}", handle_text(handle), address.addr());
    code_call(Call::DeregisterMem, handle.addr(), arguments, body)
}

/// Submits a batch and returns; the worker executes it.
///
/// # Safety
/// `params` and `batch_id` are NULL or can be read and written. `destUrl` and
/// the lists in `params` are NULL, or terminated and of `batchSize` elements,
/// and stay so until the batch's result was given; until then the local ranges
/// may be copied from and to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_batch_copy(
    handle: TransHandle,
    params: *mut BatchParams,
    batch_id: *mut u64,
) -> i32 {
    // SAFETY: NULL becomes None; else the caller lets us read it.
    let params = unsafe { params.as_ref() }.copied();
    let source = || {
        let params = params.as_ref()?;
        // SAFETY: NULL and empty lists become None; for the others the caller
        // vouched until the batch's result is given, and a Source lives shorter.
        unsafe { Source::new(params) }
    };
    let arguments = || {
        let handle = handle_text(handle);
        let Some(params) = &params else {
            return format!("{handle} params=0x0");
        };
        let (url, lists) = match source() {
            Some(source) => {
                let mut blocks = Blocks::default();
                source.read(&mut blocks);
                (source.url(), blocks.describe())
            }
            None => (String::new(), "(nothing)".to_owned()),
        };
        format!(
            "{handle} destUrl={url:?} opcode={} batchSize={} stream={:#x} flags={} {lists}",
            params.opcode,
            params.batch_size,
            params.stream.addr(),
            params.flags,
        )
    };
    let body = || {
        let handle = live(handle)?;
        if batch_id.is_null() {
            return Err(invalid("batch_id is NULL"));
        }
        let params = params.as_ref().ok_or_else(|| invalid("params is NULL"))?;
        let source =
            source().ok_or_else(|| invalid("destUrl or a list is NULL, or batchSize is 0"))?;
        if ![OPCODE_READ, OPCODE_WRITE].contains(&params.opcode) {
            return Err(invalid(format!(
                "opcode is {}, not READ or WRITE",
                params.opcode
            )));
        }
        if !params.stream.is_null() {
            return Err(invalid("stream is not NULL"));
        }
        if params.flags != 0 {
            return Err(invalid(format!("flags is {}, not 0", params.flags)));
        }
        handle.submit(params.opcode, source)
    };
    let body = || match body() {
        Ok(id) => {
            // SAFETY: not NULL, or `body` had refused; the caller lets us write.
            unsafe { batch_id.write(id) };
            (SM_OK, Some(id))
        }
        Err(refusal) => (refuse(refusal), None),
    };
    let describe = |(code, id): &(i32, Option<u64>)| match id {
        Some(id) => format!("{code} batch_id={id}"),
        None => code.to_string(),
    };
    let forced = |code| (code, None);
    let answer = call(
        Call::BatchCopy,
        handle.addr(),
        arguments,
        forced,
        body,
        describe,
    );
    let code = answer.map_or(SM_ERROR, |(code, _)| code);
    if code != SM_OK {
        record::add(Counter::refused, 1);
    }
    code
}

/// Asks how a batch stands: pending, or its result, once.
///
/// # Safety
/// `result` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_batch_status_query(
    handle: TransHandle,
    batch_id: u64,
    result: *mut i32,
    flags: u32,
) -> i32 {
    let body = || match query(handle, batch_id, result, flags) {
        Ok((code, None)) => (code, None),
        Ok((code, Some(outcome))) => {
            if !outcome.unwritten {
                // SAFETY: not NULL, or `query` had refused; the caller lets us
                // write.
                unsafe { result.write(outcome.result) };
            }
            (code, Some(outcome))
        }
        Err(refusal) => (refuse(refusal), None),
    };
    let describe = |(code, outcome): &(i32, Option<Outcome>)| match outcome {
        Some(outcome) if outcome.unwritten => format!("{code} result=unwritten"),
        Some(outcome) => format!("{code} result={}", outcome.result),
        None => code.to_string(),
    };
    let arguments = || format!("{} batch_id={batch_id} flags={flags}", handle_text(handle));
    let forced = |code| (code, None);
    let answer = call(
        Call::Query,
        handle.addr(),
        arguments,
        forced,
        body,
        describe,
    );
    let code = answer.map_or(SM_ERROR, |(code, _)| code);
    if code == SM_NEED_RETRY {
        record::add(Counter::queries_pending, 1);
    } else if code != SM_OK {
        record::add(Counter::query_errors, 1);
    }
    code
}

/// A result that a query gives.
struct Outcome {
    result: i32,
    unwritten: bool,
}

fn query(
    handle: TransHandle,
    batch_id: u64,
    result: *mut i32,
    flags: u32,
) -> Result<(i32, Option<Outcome>), Refusal> {
    let handle = live(handle)?;
    if result.is_null() {
        return Err(invalid("result is NULL"));
    }
    if flags != 0 {
        return Err(invalid(format!("flags is {flags}, not 0")));
    }
    let wrong = |why: &str| {
        let text = format!("smem_trans_batch_status_query: batch {batch_id} {why}");
        record::violation(text.clone());
        Err((SM_OBJECT_NOT_EXISTS, text))
    };
    match handle.query(batch_id) {
        Answer::Pending => Ok((script::code(Kind::NeedRetry).unwrap_or(SM_NEED_RETRY), None)),
        Answer::Done(batch, result) => {
            record::add(Counter::results, 1);
            if result != SM_OK {
                record::add(Counter::failed, 1);
            }
            Ok((
                SM_OK,
                Some(Outcome {
                    result,
                    unwritten: batch.plan.no_result,
                }),
            ))
        }
        Answer::Given => wrong("was queried after its result"),
        Answer::Unknown => wrong("was never accepted"),
    }
}

/// Sets, replaces or (NULL) removes the peer-down callback.
///
/// # Safety
/// `callback` is NULL, or can be called with `user` from any thread, also
/// inside a call of this library, until it is replaced or the handle destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn smem_trans_set_peer_down_callback(
    handle: TransHandle,
    callback: Option<PeerDownCallback>,
    user: *mut c_void,
) -> i32 {
    let body = || {
        let handle = live(handle)?;
        // SAFETY: what our caller vouched for is what `new` asks for.
        handle.set_callback(callback.map(|function| unsafe { Callback::new(function, user) }));
        Ok(())
    };
    let arguments = || {
        let set = callback.is_some();
        format!(
            "{} callback={set} user={:#x}",
            handle_text(handle),
            user.addr()
        )
    };
    code_call(Call::SetPeerDownCallback, handle.addr(), arguments, body)
}

/// Sets what is printed: 0 debug, 1 info, 2 warn, 3 error.
#[unsafe(no_mangle)]
pub extern "C" fn smem_set_log_level(level: c_int) -> i32 {
    let body = || {
        if !(0..=3).contains(&level) {
            return Err(invalid(format!("level is {level}, not 0 to 3")));
        }
        record::set_log_level(level);
        Ok(())
    };
    code_call(Call::SetLogLevel, 0, || format!("level={level}"), body)
}

/// Runs one of the emulator's own functions; no panic gets out.
fn own<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(on_panic)
}

/// The text behind a C string; `None` for NULL.
///
/// # Safety
/// `text` is NULL or NUL-terminated.
unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not NULL, so the caller vouched for a terminated string.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

/// Replaces the script, see the crate's documentation.
///
/// # Safety
/// `rules` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_script(rules: *const c_char) -> c_int {
    // SAFETY: what our caller vouched for.
    let rules = unsafe { text(rules) }.unwrap_or_default();
    own(SM_ERROR, || {
        LIBRARY.lock().script_settled = true;
        script::install(&rules).map_or_else(|why| refuse(invalid(why)), |()| SM_OK)
    })
}

/// The last error's text of this thread, until its next error; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_last_error() -> *const c_char {
    own(c"".as_ptr(), record::last_error)
}

/// A counter by name, `UINT64_MAX` for an unknown name.
///
/// # Safety
/// `name` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_count(name: *const c_char) -> u64 {
    // SAFETY: what our caller vouched for.
    let name = unsafe { text(name) }.unwrap_or_default();
    own(u64::MAX, || {
        record::count(&name).unwrap_or_else(|| {
            refuse(invalid(format!("there is no counter {name:?}")));
            u64::MAX
        })
    })
}

/// Copies a text with its NUL, as much as there is room for; returns its length.
///
/// # Safety
/// `buffer` is NULL or has room for `length` bytes.
unsafe fn put(text: Option<String>, buffer: *mut c_char, length: usize) -> usize {
    let Some(text) = text else { return 0 };
    if !buffer.is_null() && length != 0 {
        let fits = text.len().min(length - 1);
        // SAFETY: `fits` bytes are in the text, and less than `length`; the
        // caller's buffer is not our string.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, fits) };
        // SAFETY: `fits` is less than `length`.
        let end = unsafe { buffer.add(fits) };
        // SAFETY: inside the buffer, see above.
        unsafe { end.write(0) };
    }
    text.len()
}

/// The text of a violation, see the crate's documentation.
///
/// # Safety
/// `buffer` is NULL or has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_violation(index: u64, buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: what our caller vouched for.
    own(0, || unsafe {
        put(record::violation_text(index), buffer, length)
    })
}

/// A line of the call log, see the crate's documentation.
///
/// # Safety
/// `buffer` is NULL or has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_call(index: u64, buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: what our caller vouched for.
    own(0, || unsafe {
        put(record::call_line(index), buffer, length)
    })
}

/// Lets go of every blocked call and every held batch.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_release() {
    own((), || {
        for handle in handle::all() {
            handle.release();
        }
        gate::release();
    });
}

/// Forgets script, counters, violations and call log; handles live on.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_reset() {
    own((), || {
        script::clear();
        record::reset();
    });
}

/// Runs every handle's peer-down callback with this name, from a new thread;
/// returns how many have run.
///
/// # Safety
/// `peer` is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mf_emu_peer_down(peer: *const c_char) -> u64 {
    // SAFETY: what our caller vouched for.
    let peer = unsafe { text(peer) }.unwrap_or_default();
    own(0, || call_peer_down_from_thread(handle::all(), peer))
}

/// Says what this library is: an emulator.
#[unsafe(no_mangle)]
pub extern "C" fn mf_emu_version() -> *const c_char {
    VERSION_C.as_ptr()
}

/// [`VERSION`] for C.
static VERSION_C: &CStr = match CStr::from_bytes_with_nul(
    concat!("memfabric emulator ", env!("CARGO_PKG_VERSION"), "\0").as_bytes(),
) {
    Ok(version) => version,
    Err(_) => panic!("a NUL inside the version"),
};
