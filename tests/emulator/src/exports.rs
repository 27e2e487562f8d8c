// SPDX-License-Identifier: Apache-2.0
//! The vendor's 13 functions.
#![allow(unsafe_code)] // exported symbols, and the caller's pointers

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::ptr;
use std::slice;

use crate::abi::{
    BatchParams, DEFAULT_INIT_TIMEOUT_S, OPCODE_READ, OPCODE_WRITE, PeerDownCallback, SM_ERROR,
    SM_NEED_RETRY, SM_OBJECT_NOT_EXISTS, SM_OK, SM_REPEAT_CALL, TransConfig, TransHandle,
};
use crate::arguments::{Blocks, Source};
use crate::call::{call, code_call, code_call_with, invalid, no_flags};
use crate::callback::Callback;
use crate::lane::Answer;
use crate::peer::{Refusal, refuse};
use crate::record::{self, Call, Counter, Level};
use crate::script::{self, Kind};
use crate::{handle, library};

fn handle_text(handle: TransHandle) -> String {
    format!("handle={:#x}", handle.addr())
}

/// Initialises the library for this process.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_init(device_id: u32, flags: u32) -> i32 {
    let settled =
        catch_unwind(library::settle_script).unwrap_or_else(|_| Err("a panic".to_owned()));
    if let Err(text) = settled {
        record::print(Level::Error, &text);
        return refuse(invalid(text));
    }
    let body = || {
        let initialised = no_flags(flags).and_then(|()| library::init(device_id));
        initialised.map_or_else(refuse, |()| SM_OK)
    };
    let forced = |code| {
        if code == SM_REPEAT_CALL {
            library::initialised_elsewhere();
        }
        code
    };
    let arguments = || format!("device_id={device_id} flags={flags}");
    call(Call::Init, 0, arguments, forced, body, i32::to_string).unwrap_or(SM_ERROR)
}

/// Undoes `smem_trans_init`.
#[unsafe(no_mangle)]
pub extern "C" fn smem_trans_uninit(flags: u32) {
    let body = || {
        if flags != 0 {
            record::violation(format!("smem_trans_uninit: flags is {flags}, not 0"));
        }
        library::uninit();
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
        Some(config) => format!("{} flags={flags}", library::describe_config(config)),
    };
    let body = || match library::create(config.as_ref(), flags) {
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
        let own = library::live(handle.addr())?.port();
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
        let handle = library::live(handle.addr())?;
        no_flags(flags)?;
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
        let handle = library::live(handle.addr())?;
        no_flags(flags)?;
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
        let handle = library::live(handle.addr())?;
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
        let handle = library::live(handle.addr())?;
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
        no_flags(params.flags)?;
        let id = handle.submit(params.opcode, source)?;
        // SAFETY: not NULL; the caller lets us write it.
        unsafe { batch_id.write(id) };
        Ok((SM_OK, Some(id)))
    };
    let describe = |id: &u64| format!("batch_id={id}");
    let code = code_call_with(Call::BatchCopy, handle.addr(), arguments, body, describe);
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
    let body = || {
        let (code, outcome) = query(handle, batch_id, result.is_null(), flags)?;
        if let Some(outcome) = &outcome
            && !outcome.unwritten
        {
            // SAFETY: not NULL, or `query` had refused; the caller lets us write.
            unsafe { result.write(outcome.result) };
        }
        Ok((code, outcome))
    };
    let describe = |outcome: &Outcome| match outcome.unwritten {
        true => "result=unwritten".to_owned(),
        false => format!("result={}", outcome.result),
    };
    let arguments = || format!("{} batch_id={batch_id} flags={flags}", handle_text(handle));
    let code = code_call_with(Call::Query, handle.addr(), arguments, body, describe);
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
    result_is_null: bool,
    flags: u32,
) -> Result<(i32, Option<Outcome>), Refusal> {
    let handle = library::live(handle.addr())?;
    if result_is_null {
        return Err(invalid("result is NULL"));
    }
    no_flags(flags)?;
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
        let handle = library::live(handle.addr())?;
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
