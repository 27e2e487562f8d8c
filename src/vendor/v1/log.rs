// SPDX-License-Identifier: Apache-2.0
//! The library's log lines, which otherwise go to standard output.
//!
//! It calls its errors what often is none, so they are warnings here, and it logs
//! six to ten of them for one failed copy. Its notices come at any level.
// Is called by the library, with a raw pointer.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use tracing::{debug, warn};

use super::library::Library;
use crate::code::Code;
use crate::endpoint::{Endpoint, excerpt};
use crate::limit::Limiter;

/// Most errors that are held back for one copy.
const MOST_HELD: usize = 16;
/// Characters of a line that are logged.
const LONGEST_LINE: usize = 1000;
/// Characters by which two errors are the same, but for their numbers.
const SAME: usize = 64;

thread_local! {
    /// While this thread is in a copy: the errors that the library logged about
    /// it. Whether they are worth a warning is known when it has ended.
    static HELD: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

static LIMITER: LazyLock<Limiter> = LazyLock::new(Limiter::default);

/// Has the library's lines come here.
pub(super) fn take(library: &Library) {
    // SAFETY: notes a function of this program, which stays as long as that does;
    // is allowed at any time [pub].
    let code = Code(unsafe { (library.smem_set_extern_logger)(Some(log)) });
    if !code.is_ok() {
        warn!(%code, "smem_set_extern_logger failed, the library logs to standard output");
    }
}

/// Makes a call that the library will refuse, and whose errors are none.
pub(super) fn of_no_interest(call: impl FnOnce()) {
    let ((), lines) = holding(call);
    lines.iter().for_each(|line| note(line));
}

/// Makes a copy. The first error about one that failed is worth a warning; one
/// that ends in SM_INVALID_PARAM is mostly tried again.
pub(super) fn of_copy(peer: &Endpoint, copy: impl FnOnce() -> Code) -> Code {
    let (code, lines) = holding(copy);
    let rest = match lines.split_first() {
        Some((first, rest)) if code != Code::INVALID_PARAM => {
            warn_of(peer.as_str(), first, rest.len());
            rest
        }
        _ => &lines[..],
    };
    rest.iter().for_each(|line| note(line));
    code
}

fn holding<T>(call: impl FnOnce() -> T) -> (T, Vec<String>) {
    HELD.set(Some(Vec::new()));
    let outcome = call();
    (outcome, HELD.take().unwrap_or_default())
}

/// Whether it was held back.
fn hold(line: &str) -> bool {
    let held = HELD.try_with(|held| match &mut *held.borrow_mut() {
        Some(lines) if lines.len() < MOST_HELD => {
            lines.push(line.to_owned());
            true
        }
        _ => false,
    });
    held.unwrap_or(false)
}

fn note(line: &str) {
    debug!(level = 3, line, "the library logged");
}

/// `about` is a peer, or what the line is known by.
fn warn_of(about: &str, line: &str, further: usize) {
    if let Some(passed_over) = LIMITER.admit("library", about) {
        warn!(line, further, passed_over, "the library logged an error");
    }
}

/// What two lines about the same have in common.
fn kind(line: &str) -> String {
    let digits = |character: &char| !character.is_ascii_digit();
    line.chars().filter(digits).take(SAME).collect()
}

/// The library's logger.
unsafe extern "C" fn log(level: i32, message: *const c_char) {
    // A panic must not unwind into the library; there is nobody to tell.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        if message.is_null() {
            return;
        }
        // SAFETY: the library passes a NUL-terminated line that lives for the
        // duration of the call [pub].
        let line = unsafe { CStr::from_ptr(message) }.to_string_lossy();
        // It has names in it that come from other processes.
        let line = excerpt(line.trim_end(), LONGEST_LINE);
        match level {
            3 if hold(&line) => {}
            3 => warn_of(&kind(&line), &line, 0),
            _ => debug!(level, line, "the library logged"),
        }
    }));
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use parking_lot::Mutex;
    use tracing::field::{Field, Visit};
    use tracing::span;
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Levels and fields of the events of a thread.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<String>>);

    struct Fields<'a>(&'a mut String);

    impl Visit for Fields<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            *self.0 += &format!(" {field}={value:?}");
        }

        fn record_str(&mut self, field: &Field, value: &str) {
            self.record_debug(field, &format_args!("{value}"));
        }
    }

    impl Subscriber for Recorder {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut text = event.metadata().level().to_string();
            event.record(&mut Fields(&mut text));
            self.0.lock().push(text);
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    fn events(body: impl FnOnce()) -> Vec<String> {
        let recorder = std::sync::Arc::new(Recorder::default());
        tracing::subscriber::with_default(std::sync::Arc::clone(&recorder), body);
        recorder.0.lock().clone()
    }

    fn library_says(line: &str) {
        let line = CString::new(line).expect("no NUL");
        // SAFETY: a terminated line, alive across the call.
        unsafe { log(3, line.as_ptr()) };
    }

    fn peer(port: u16) -> Endpoint {
        Endpoint::parse(&format!("10.7.0.1:{port}")).expect("an address")
    }

    #[test]
    fn b07_a_name_that_is_shown_costs_no_warning_whatever_the_copy_answers() {
        for code in [0, -1, -2000] {
            let events = events(|| {
                of_no_interest(|| library_says("remote address[0] 0x1 is invalid"));
                of_copy(&peer(1), || Code(code));
            });
            let [line] = &events[..] else {
                panic!("one line, not {events:?}");
            };
            assert!(line.starts_with("DEBUG"), "{line}");
        }
    }

    #[test]
    fn b06_the_lines_of_a_failed_copy_are_one_warning_a_second_with_their_number() {
        let events = events(|| {
            for _ in 0..100 {
                of_copy(&peer(2), || {
                    (0..8).for_each(|line| library_says(&format!("line {line}")));
                    Code(-1)
                });
            }
        });
        let warnings: Vec<_> = events
            .iter()
            .filter(|line| line.starts_with("WARN"))
            .collect();
        assert!((1..4).contains(&warnings.len()), "{warnings:?}");
        for part in ["line 0", "further=7"] {
            assert!(warnings[0].contains(part), "{part} in {warnings:?}");
        }
        assert!(events.iter().any(|line| line.contains("line 7")), "DEBUG");
    }

    #[test]
    fn b06_what_a_copy_that_is_tried_again_logs_is_no_warning() {
        let events = events(|| {
            of_copy(&peer(3), || {
                library_says("unknown");
                Code(-2000)
            });
        });
        assert!(
            events.iter().all(|line| line.starts_with("DEBUG")),
            "{events:?}"
        );
    }

    #[test]
    fn b10_an_error_outside_of_a_copy_is_limited_by_what_it_says_and_cut() {
        let long = "x".repeat(1 << 20);
        let events = events(|| {
            for number in 0..1000 {
                library_says(&format!("heartbeat {number} of rank {number} failed"));
            }
            library_says("another error");
            library_says(&format!("a name\n{long}"));
        });
        let about = |text: &str| events.iter().filter(|line| line.contains(text)).count();
        assert!((1..4).contains(&about("heartbeat")), "{events:?}");
        assert_eq!(about("another error"), 1);
        assert_eq!(about("a name\\n"), 1, "escaped");
        assert!(events.iter().all(|line| line.len() < 2000), "cut");
    }
}
