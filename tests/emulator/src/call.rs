// SPDX-License-Identifier: Apache-2.0
//! What every vendor function has in common: counting, logging, the script, and
//! no panic that gets out.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::abi::{SM_ERROR, SM_INVALID_PARAM, SM_OK, code_name};
use crate::gate;
use crate::handle::{self, Handle};
use crate::peer::{Refusal, refuse};
use crate::record::{self, Call, Entry};
use crate::script::{self, Kind};

/// Runs a vendor function: scripted behaviour first, then the body, unless the
/// script has an answer of its own. No panic gets out.
pub(crate) fn call<T>(
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

/// Runs the callbacks of these handles; returns how many have one.
fn call_peer_down(handles: &[Arc<Handle>], peer: &str) -> u64 {
    handles
        .iter()
        .filter(|handle| handle.call_peer_down(peer))
        .count() as u64
}

/// The same from a thread of its own.
pub(crate) fn call_peer_down_from_thread(handles: Vec<Arc<Handle>>, peer: String) -> u64 {
    let thread = std::thread::Builder::new()
        .name("mf-emu-peer-down".to_owned())
        .spawn(move || call_peer_down(&handles, &peer));
    match thread {
        Ok(thread) => thread.join().unwrap_or(0),
        Err(_) => 0,
    }
}

/// A call that answers a code.
pub(crate) fn code_call(
    which: Call,
    token: usize,
    arguments: impl FnOnce() -> String,
    body: impl FnOnce() -> Result<(), Refusal>,
) -> c_int {
    let body = || body().map_or_else(refuse, |()| SM_OK);
    call(which, token, arguments, |code| code, body, i32::to_string).unwrap_or(SM_ERROR)
}

/// A call that answers a code, and when it succeeds something to describe.
pub(crate) fn code_call_with<T>(
    which: Call,
    token: usize,
    arguments: impl FnOnce() -> String,
    body: impl FnOnce() -> Result<(i32, Option<T>), Refusal>,
    describe: impl FnOnce(&T) -> String,
) -> c_int {
    let body = || body().unwrap_or_else(|refusal| (refuse(refusal), None));
    let describe = |(code, more): &(i32, Option<T>)| match more {
        Some(more) => format!("{code} {}", describe(more)),
        None => code.to_string(),
    };
    let forced = |code| (code, None);
    let answer = call(which, token, arguments, forced, body, describe);
    answer.map_or(SM_ERROR, |(code, _)| code)
}

/// The refusal of a bad argument.
pub(crate) fn invalid(text: impl Into<String>) -> Refusal {
    (SM_INVALID_PARAM, text.into())
}

/// Refuses flags that are not 0: none are known.
pub(crate) fn no_flags(flags: u32) -> Result<(), Refusal> {
    match flags {
        0 => Ok(()),
        _ => Err(invalid(format!("flags is {flags}, not 0"))),
    }
}
