// SPDX-License-Identifier: Apache-2.0
//! An emulated `libmf_smem.so`: MemFabric's 13 `smem_trans` symbols, moving real
//! bytes between real processes on one machine, with no NPU.
//!
//! It is **not** Huawei's library and never says that it is: its version text,
//! its log lines and its errors all say "emulator". It is one-sided (the target's
//! CPU does no work per copy), asynchronous (one worker thread a handle), and
//! strict where the real library is lenient.
//!
//! # What it does
//!
//! * `smem_trans_create` with the url `ip:0` listens on a free port of that
//!   address. Peers find each other by `ip:port` alone: the first batch for an
//!   endpoint connects to it, and a handshake gives the peer's process id and its
//!   table of registered regions, which the initiator maps. Every remote range is
//!   checked against that table before a byte moves, at submission and again at
//!   execution. A range must lie inside **one** region.
//! * Bytes move with `process_vm_writev` and `process_vm_readv`, or through
//!   `/proc/<pid>/mem` where the system has neither (qemu-user), and with
//!   `memmove` when the peer is a handle of the same process (itself included).
//! * A peer that dies, or destroys its handle, ends its outstanding batches with
//!   the result `SM_NOT_CONNECTED`, then the peer-down callback runs, once, on a
//!   thread of the emulator. Both ends of a connection hear of the other's end.
//!   A later submission connects afresh, and answers `SM_NOT_CONNECTED` when
//!   nobody listens.
//! * `smem_trans_batch_status_query` answers [`abi::SM_NEED_RETRY`] while the batch
//!   is outstanding, then `SM_OK` with the result, once. Batch ids count from 0 in
//!   each handle.
//! * Registering the same range twice answers 0 and registers once (one
//!   deregistration withdraws it). A range that overlaps another answers
//!   `SM_ERROR`, as the published library does.
//! * Unregistered *local* memory is allowed.
//! * A second `smem_trans_init` answers `SM_REPEAT_CALL`.
//!
//! # Violations
//!
//! An error that means that the *caller broke the contract* is counted, with a
//! text each: a query after the result was given, a query of an id that was never
//! given, destroy or uninit with work outstanding, uninit with a handle alive or
//! without init, create before init, use of a destroyed or made-up handle,
//! deregistration of a region that an outstanding batch uses locally, and
//! arguments that changed before they were read late. Null pointers, a bad
//! configuration, unknown opcodes and refused remote ranges are errors without
//! being violations. After the first violation the count never falls, until
//! `mf_emu_reset`.
//!
//! # Functions of its own
//!
//! ```c
//! // Replaces the script (NULL or "" clears it; a leading '+' adds to it).
//! // 0, or -2000 and a text in mf_emu_last_error(); a bad script changes nothing.
//! int         mf_emu_script(const char *rules);
//! // The last error's text of this thread; never NULL; valid until its next call.
//! const char *mf_emu_last_error(void);
//! // A counter by name (below); UINT64_MAX for an unknown name.
//! uint64_t    mf_emu_count(const char *name);
//! // The text of violation `index` (from 0). Returns its length without the NUL,
//! // 0 when there is none; writes at most `length` bytes, always NUL-terminated.
//! size_t      mf_emu_violation(uint64_t index, char *buffer, size_t length);
//! // One line for the call `index` (from 0, since the log was enabled or reset);
//! // 0 when there is none (any more). Same buffer rules.
//! size_t      mf_emu_call(uint64_t index, char *buffer, size_t length);
//! // Lets go of every blocked call and every held batch.
//! void        mf_emu_release(void);
//! // Forgets script, counters, violations and call log; handles live on.
//! void        mf_emu_reset(void);
//! // Calls every handle's peer-down callback with this name, from a new thread,
//! // and returns how many were called once they have returned.
//! uint64_t    mf_emu_peer_down(const char *peer);
//! // Contains "emulator".
//! const char *mf_emu_version(void);
//! ```
//!
//! # Scripts
//!
//! `mf_emu_script` from within the process, or the environment variable
//! `MF_EMULATOR`, read by the first `smem_trans_init` of the process unless
//! `mf_emu_script` was called before. Rules are separated by `;` or newlines:
//!
//! ```text
//! rule     = name [ "=" value ] [ "@" selector ]
//! selector = N | N..M | N.. | ..M | %K        (occasions, counted from 1; %K: each K-th)
//! duration = 5us | 5ms | 5s | 5               (without a unit: milliseconds)
//! code     = -2014 | SM_NOT_CONNECTED | ...
//! ```
//!
//! Each rule counts its own occasions from the moment it is installed, whether or
//! not it applies; without a selector it always applies. Rules of different names
//! combine; of several rules of one name, the first that applies wins.
//! `CALL` is one of `init`, `uninit`, `config_init`, `create`, `destroy`,
//! `get_rpc_port`, `register`, `batch_register`, `deregister`, `submit`, `query`,
//! `set_peer_down_callback`, `set_log_level`.
//!
//! | rule | occasion | effect |
//! |---|---|---|
//! | `CALL=code` | each call | answers the code and does nothing else; `create=null`; not for the two `void` calls. `init=SM_REPEAT_CALL` also counts as initialised, by somebody else. `query=1` is one more "pending"; `query=0` is refused (see `no_result`) |
//! | `slow_CALL=duration` | each call | the call takes that much longer |
//! | `block_CALL` | each call | the call does not go on until `mf_emu_release` |
//! | `peer_down_CALL=peer` | each call | the peer-down callback of the call's handle (of every handle for a call without one) runs inside the call, on the calling thread |
//! | `peer_down_thread_CALL=peer` | each call | the same from another thread; the call waits for it |
//! | `port=N` | each `get_rpc_port` | succeeds with port N (0 included) |
//! | `region=code` | each region of `register` and `batch_register` | registering that region fails with the code; the ones before it in the call stay registered |
//! | `visible_after=duration` | each region registered | peers see it that much later |
//! | `refuse_zero` | each `submit` | a batch with a zero length is refused with `SM_INVALID_PARAM` |
//! | `late_args` | each `submit` | `destUrl` and the three arrays are read only when the batch executes, and once more before its result; if they are not what they were at submission, that is a violation. What is wrong with them becomes the result. They are read with `memcpy`, which AddressSanitizer and memcheck watch |
//! | `delay=duration` | each accepted batch | it is executed that much after its submission; other batches overtake it |
//! | `hang` | each accepted batch | it is held, not executed, until `mf_emu_release`, whatever becomes of its peer |
//! | `result=code` | each accepted batch | nothing is copied, the result is the code |
//! | `partial=N` | each accepted batch | the first N blocks are copied, the result is `SM_PARTIAL_FAILED` (or that of `result`) |
//! | `pending=N` | each accepted batch | its first N queries answer pending |
//! | `no_result` | each accepted batch | the query that ends it answers `SM_OK` and leaves `*result` as it was |
//! | `lose_peer` | each accepted batch | the connection to its peer is dropped as if the peer had died, and that endpoint stays unreachable for this handle |
//! | `need_retry=code` | each pending answer | the code that means "pending" |
//! | `log` or `log=N` | at once | keeps one line a call, the last N (default 65536) |
//! | `report=path` | at once | appends each violation to the file as it happens, and the counters at `smem_trans_uninit` |
//!
//! # Counters
//!
//! Events since the start or the last reset: each call by its vendor name
//! (`smem_trans_batch_copy`) or its `CALL` name (`submit`); `batches` (accepted),
//! `refused` (submissions answered with an error), `results` (given),
//! `failed` (given, not `SM_OK`), `blocks`, `bytes_written`, `bytes_read` (as the
//! initiator), `queries_pending`, `query_errors`, `violations`, `peer_downs`
//! (callbacks run), `log` (lines logged).
//!
//! As they are now: `handles`, `regions`, `peers` (connected to), `outstanding`
//! (accepted, result not given), `unfinished` (accepted, not executed to the end),
//! `held` (by `hang`), `blocked` (calls inside `block_CALL`), `log_level`.
//!
//! # Call log
//!
//! One line a call, written as it returns, in the order of returning:
//!
//! ```text
//! smem_trans_batch_copy begin=<ns> end=<ns> thread=<tid> handle=0x… destUrl="127.0.0.1:1"
//!   opcode=1 batchSize=2 stream=0x0 flags=0 srcList=[0x…,0x…] destList=[0x…,0x…]
//!   sizeList=[64,64] -> 0 batch_id=7                                   (all on one line)
//! ```
//!
//! Times are `CLOCK_MONOTONIC`.

use std::ffi::c_void;
use std::ptr::NonNull;

pub mod abi;
mod arguments;
mod call;
mod callback;
pub mod control;
mod copy;
mod device_memory;
pub mod exports;
mod gate;
mod handle;
mod lane;
mod library;
mod peer;
mod record;
mod regions;
mod script;
mod service;
mod sys;
mod worker;

/// What `mf_emu_version` says.
pub const VERSION: &str = concat!("memfabric emulator ", env!("CARGO_PKG_VERSION"));

/// The function of the library with this name, for a program that has the emulator
/// linked in.
pub fn function(name: &str) -> Option<NonNull<c_void>> {
    macro_rules! find {
        ($($function:ident)*) => {
            match name {
                $(stringify!($function) => exports::$function as *mut c_void,)*
                _ => return None,
            }
        };
    }
    let pointer = find! {
        smem_trans_init smem_trans_uninit smem_trans_config_init smem_trans_create
        smem_trans_destroy smem_trans_get_rpc_port smem_trans_register_mem
        smem_trans_batch_register_mem smem_trans_deregister_mem smem_trans_batch_copy
        smem_trans_batch_status_query smem_trans_set_peer_down_callback
        smem_set_log_level
    };
    NonNull::new(pointer)
}
