// SPDX-License-Identifier: Apache-2.0
//! The library's own life: initialised or not, and what a handle needs.

use std::ffi::c_char;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::VERSION;
use crate::abi::{DATA_OP_TYPES, ROLE_BOTH, SM_NOT_INITIALIZED, SM_REPEAT_CALL, TransConfig};
use crate::call::invalid;
use crate::handle::{self, Handle};
use crate::peer::Refusal;
use crate::record::{self, Level};
use crate::script;

/// The environment variable with a script.
const SCRIPT_VARIABLE: &str = "MF_EMULATOR";

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

impl Library {
    /// Whether anybody in this process has initialised.
    fn usable(&self) -> bool {
        self.initialised || self.initialised_elsewhere
    }
}

/// Initialises for this process.
pub(crate) fn init(device_id: u32) -> Result<(), Refusal> {
    let mut library = LIBRARY.lock();
    if library.initialised {
        let text = "smem_trans_init: it is initialised already".to_owned();
        return Err((SM_REPEAT_CALL, text));
    }
    library.initialised = true;
    record::print(Level::Info, &format!("{VERSION}, device {device_id}"));
    Ok(())
}

/// Takes note that somebody else in this process has initialised.
pub(crate) fn initialised_elsewhere() {
    LIBRARY.lock().initialised_elsewhere = true;
}

/// Undoes [`init`].
pub(crate) fn uninit() {
    let was = {
        let mut library = LIBRARY.lock();
        let was = std::mem::take(&mut library.initialised);
        was.then_some(()).ok_or(library.initialised_elsewhere)
    };
    match was {
        Ok(()) => {}
        Err(true) => {
            return record::violation("smem_trans_uninit: the caller did not initialise".into());
        }
        Err(false) => {
            return record::violation("smem_trans_uninit: without smem_trans_init".into());
        }
    }
    let alive = handle::all().len();
    if alive != 0 {
        record::violation(format!(
            "smem_trans_uninit: {alive} handles are not destroyed"
        ));
    }
    record::report_counters();
}

/// The handle of a token, in a library that is initialised.
pub(crate) fn live(token: usize) -> Result<Arc<Handle>, Refusal> {
    let found = handle::find(token)?;
    if LIBRARY.lock().usable() {
        return Ok(found);
    }
    let text = format!("the handle {token:#x} was used after smem_trans_uninit");
    record::violation(text.clone());
    Err((SM_NOT_INITIALIZED, text))
}

/// Takes the script from the environment, once, unless there was one already.
pub(crate) fn settle_script() -> Result<(), String> {
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

/// Ends the wait for a script from the environment: there is one already.
pub(crate) fn script_is_settled() {
    LIBRARY.lock().script_settled = true;
}

/// Creates a handle, and returns its token.
pub(crate) fn create(config: Option<&TransConfig>, flags: u32) -> Result<usize, Refusal> {
    if !LIBRARY.lock().usable() {
        let text = "smem_trans_create: smem_trans_init has not been called".to_owned();
        record::violation(text.clone());
        return Err((SM_NOT_INITIALIZED, text));
    }
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
    let bytes: Vec<u8> = field[..end]
        .iter()
        .flat_map(|byte| byte.to_ne_bytes())
        .collect();
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// A configuration as the call log shows it.
pub(crate) fn describe_config(config: &TransConfig) -> String {
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
