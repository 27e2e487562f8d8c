// SPDX-License-Identifier: Apache-2.0
//! From tracing events to the host's log.
//!
//! The core only emits; the shim installs this subscriber, once per process and
//! copy of the core, so that two engines do not double the lines. What lies
//! below the host's level costs one comparison.

use std::fmt::{self, Write as _};
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber, callsite};

use crate::config::LogLevel;

/// Writes one event: level, file, line, message with its fields.
pub(crate) type Sink = fn(&Level, &str, u32, &str);

/// Sends events to `sink` from now on, down to `level`. The first call of the
/// process decides on the sink, the latest one on the level, as with the host's
/// own.
pub(crate) fn start(sink: Sink, level: LogLevel) {
    static INSTALLED: Once = Once::new();
    LEVEL.store(level as u8, Ordering::Relaxed);
    INSTALLED.call_once(|| {
        // Fails only where the program has a subscriber of its own, which then
        // receives the events instead.
        let _ = tracing::subscriber::set_global_default(HostLog { sink });
    });
    callsite::rebuild_interest_cache();
}

/// A [`LogLevel`] as its number.
static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Info as u8);

fn filter() -> LevelFilter {
    match LEVEL.load(Ordering::Relaxed) {
        level if level == LogLevel::Info as u8 => LevelFilter::INFO,
        level if level == LogLevel::Warning as u8 => LevelFilter::WARN,
        _ => LevelFilter::ERROR,
    }
}

struct HostLog {
    sink: Sink,
}

impl Subscriber for HostLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= filter()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(filter())
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut line = Line::default();
        event.record(&mut line);
        (self.sink)(
            metadata.level(),
            metadata.file().unwrap_or("memfabric"),
            metadata.line().unwrap_or(0),
            &line.finish(),
        );
    }

    // The core has no spans; those of other crates are not the host's concern.

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// `message, field=value, field=value`, as one line.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn finish(mut self) -> String {
        self.message.push_str(&self.fields);
        // A linker's or a peer's text may bring line ends of its own.
        if self.message.contains(['\n', '\r']) {
            self.message = self.message.replace(['\n', '\r'], " ");
        }
        self.message
    }

    fn add(&mut self, field: &Field, value: &dyn fmt::Display) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "memfabric: {value}"),
            name => write!(self.fields, ", {name}={value}"),
        };
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format_args!("{value:?}"));
    }
}
