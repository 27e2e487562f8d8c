// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C: the first one asks for an orderly end, the second one ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::problem::Problem;

/// Exit status after Ctrl-C, as shells count it.
const STATUS: i32 = 130;

/// Whether the user wants to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for SIGINT, SIGTERM and SIGHUP from now on.
    pub fn listen() -> Result<Self, Problem> {
        let interrupt = Self::default();
        let requested = interrupt.clone();
        ctrlc::set_handler(move || {
            if requested.0.swap(true, Ordering::Relaxed) {
                // The target notices that its input ends.
                std::process::exit(STATUS);
            }
        })
        .map_err(|error| Problem::BadInput(format!("cannot listen for Ctrl-C: {error}")))?;
        Ok(interrupt)
    }

    /// Whether it was requested.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends with [`Problem::Interrupted`] if it was requested.
    pub fn check(&self) -> Result<(), Problem> {
        if self.requested() {
            Err(Problem::Interrupted)
        } else {
            Ok(())
        }
    }
}
