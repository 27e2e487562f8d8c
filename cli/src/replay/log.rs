// SPDX-License-Identifier: Apache-2.0
//! tracing events on standard error, around the progress bar.

use std::io::{self, IsTerminal, Write};

use indicatif::ProgressBar;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, reload};

/// How much is logged.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Verbosity {
    /// Log more to standard error: -v informs, -vv debugs, -vvv traces
    #[arg(short = 'v', long = "verbose", action = clap::ArgAction::Count)]
    pub level: u8,
}

/// The log of this process.
pub struct Log {
    level: reload::Handle<LevelFilter, Registry>,
    bar: ProgressBar,
}

impl Log {
    /// From now on, with a bar that is not drawn before it has a length.
    pub fn start(verbosity: Verbosity) -> Self {
        let level = match verbosity.level {
            0 => LevelFilter::WARN,
            1 => LevelFilter::INFO,
            2 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        };
        let (filter, level) = reload::Layer::new(level);
        let bar = ProgressBar::hidden();
        let lines = tracing_subscriber::fmt::layer()
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .with_writer(Lines(bar.clone()));
        tracing_subscriber::registry()
            .with(filter)
            .with(lines)
            .init();
        Self { level, bar }
    }

    /// The bar that lines of the log do not cut through.
    pub fn bar(&self) -> &ProgressBar {
        &self.bar
    }

    /// Leaves warnings and less out from now on.
    pub fn errors_only(&self) {
        // Fails only if nothing is logged at all.
        let _ = self.level.modify(|level| *level = LevelFilter::ERROR);
    }
}

/// Makes room for a line, writes it and draws the bar again.
#[derive(Clone)]
struct Lines(ProgressBar);

impl Write for Lines {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(text))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
