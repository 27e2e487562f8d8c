// SPDX-License-Identifier: Apache-2.0
//! The current device of a thread.

use std::cell::Cell;

use crate::{ACL_ERROR_RT_CONTEXT_NULL, ACL_ERROR_RT_PARAM_INVALID};

const VARIABLE: &str = "MF_EMULATOR_DEVICE";

thread_local! {
    /// What this thread has set: a device, or the code to answer.
    static CURRENT: Cell<Option<Result<i32, i32>>> = const { Cell::new(None) };
}

/// Sets what [`current`] answers on this thread; `None` is what it was before.
pub(crate) fn set(current: Option<Result<i32, i32>>) {
    // A thread that is ending has no current device to keep.
    let _ = CURRENT.try_with(|cell| cell.set(current));
}

/// This thread's device, or why it has none.
pub(crate) fn current() -> Result<i32, i32> {
    let set = CURRENT.try_with(Cell::get).ok().flatten();
    set.unwrap_or_else(|| default(std::env::var(VARIABLE).ok().as_deref()))
}

fn default(variable: Option<&str>) -> Result<i32, i32> {
    let Some(text) = variable else {
        return Err(ACL_ERROR_RT_CONTEXT_NULL);
    };
    let bad = |_| {
        eprintln!("libascendcl.so (emulator): {VARIABLE}={text} is no device id and no code:<n>");
        ACL_ERROR_RT_PARAM_INVALID
    };
    match text.strip_prefix("code:") {
        Some(code) => Err(code.parse().unwrap_or_else(bad)),
        None => text.parse().map_err(bad),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_gives_a_device_or_a_code() {
        assert_eq!(default(None), Err(ACL_ERROR_RT_CONTEXT_NULL));
        assert_eq!(default(Some("5")), Ok(5));
        assert_eq!(default(Some("code:507000")), Err(507_000));
        assert_eq!(default(Some("five")), Err(ACL_ERROR_RT_PARAM_INVALID));
        assert_eq!(default(Some("code:x")), Err(ACL_ERROR_RT_PARAM_INVALID));
    }

    #[test]
    fn each_thread_has_its_own() {
        set(Some(Ok(3)));
        let other = std::thread::spawn(|| {
            set(Some(Ok(4)));
            current()
        });
        assert_eq!(other.join().expect("no panic"), Ok(4));
        assert_eq!(current(), Ok(3));
        set(Some(Err(7)));
        assert_eq!(current(), Err(7));
    }
}
