// SPDX-License-Identifier: Apache-2.0
//! Waiting for outstanding batches, and taking the library down.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{debug, error, info, warn};

use crate::batch::{Progress, VendorBatch};
use crate::code::Code;
use crate::error::Error;
use crate::memory::Regions;
use crate::process::Process;
use crate::region::Region;
use crate::sync::MutexGuard;
use crate::transport::{State, Transport};

/// First and longest pause between two sweeps of a wait. A wait also ends when
/// a poll on another thread finishes the last batch.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// A wait asks at most this often, over all its batches.
const PAUSE_PER_QUERY: Duration = Duration::from_micros(200);
const LONGEST_SWEEP_PAUSE: Duration = Duration::from_millis(20);
/// At most one progress line of a wait in this time.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// What was torn down with work outstanding (C13). Nothing is taken out again; it
/// stays in reach so that leak checkers tell it from what was lost by mistake.
static LEFT_BEHIND: parking_lot::Mutex<Vec<State>> = parking_lot::Mutex::new(Vec::new());

/// Whom a wait waits for.
#[derive(Clone, Copy)]
pub(crate) enum Whom {
    /// Every batch.
    All,
    /// Batches that use a byte of this memory.
    Using(Region),
}

/// How long a wait waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// The timeout, whatever was waited before.
    Explicit,
    /// The timeout, but for no batch longer than that in all (C19).
    Implicit,
}

/// How a wait for outstanding batches went.
pub(crate) struct Waited {
    pub(crate) batches: usize,
    pub(crate) tasks: usize,
    pub(crate) elapsed: Duration,
    last_error: Option<Code>,
}

impl Waited {
    /// The error of a wait that left something outstanding (C11).
    fn timeout(&self) -> Error {
        Error::QuiesceTimeout {
            batches: self.batches,
            tasks: self.tasks,
            waited_ms: self.elapsed.as_millis(),
            last_error: self.last_error,
        }
    }
}

impl Transport {
    /// Refuses submissions for good (C9) and polls what is outstanding until all
    /// of it is done or the timeout passes (C10). Nothing is cancelled, and a
    /// blocked vendor call is waited for (C12).
    ///
    /// May be called again, and then waits again.
    ///
    /// # Errors
    ///
    /// [`Error::QuiesceTimeout`] (C11): not proof that buffers are safe to
    /// reclaim, quite the contrary. [`Error::NotInstalled`].
    pub fn quiesce(&self) -> Result<(), Error> {
        let (batches, timeout) = {
            let mut state = self.state.lock();
            if state.backend.is_none() {
                return Err(Error::NotInstalled);
            }
            state.quiesced = true;
            (state.outstanding.len(), state.timeout)
        };
        debug!(
            batches,
            timeout_ms = timeout.as_millis() as u64,
            "quiesce begins"
        );
        let waited = self.wait(Whom::All, Patience::Explicit);
        if waited.batches == 0 {
            info!(
                elapsed_ms = waited.elapsed.as_millis() as u64,
                "quiesced, nothing is outstanding"
            );
            return Ok(());
        }
        warn!(
            batches = waited.batches,
            tasks = waited.tasks,
            elapsed_ms = waited.elapsed.as_millis() as u64,
            "quiesce timed out with work outstanding"
        );
        Err(waited.timeout())
    }

    /// Polls the outstanding batches that `whom` means until none is left or the
    /// patience ends. At least one sweep is made, and a batch is asked for once
    /// a sweep; the lock is free between two questions.
    pub(crate) fn wait(&self, whom: Whom, patience: Patience) -> Waited {
        let begun = Instant::now();
        let mut last_error = None;
        let mut pause = FIRST_PAUSE;
        let mut next_report = begun + PROGRESS_INTERVAL;
        loop {
            for batch in self.concerned(whom) {
                if let Err(Error::QueryFailed { code, .. }) = self.ask(&batch, None) {
                    last_error = Some(code);
                }
            }
            let left = self.concerned(whom);
            let mut state = self.state.lock();
            let (now, timeout) = (Instant::now(), state.timeout);
            let deadline = begun.checked_add(timeout);
            let expired = deadline.is_some_and(|deadline| now >= deadline);
            let had_their_time = patience == Patience::Implicit
                && left.iter().all(|batch| batch.had_its_time(now, timeout));
            if !left.is_empty() {
                // Not of `left` alone: a teardown waits for one range after the
                // other, and takes one timeout (C19).
                // From when this wait began, not from its first sweep's end, or
                // the next one waits again for what that took.
                for batch in &state.outstanding {
                    batch.wait_from(batch.submitted.map_or(now, |at| at.max(begun)));
                }
            }
            if left.is_empty() || expired || had_their_time {
                return Waited {
                    batches: left.len(),
                    tasks: left.iter().map(|batch| batch.tasks()).sum(),
                    elapsed: begun.elapsed(),
                    last_error,
                };
            }
            if now >= next_report {
                next_report = now + PROGRESS_INTERVAL;
                MutexGuard::unlocked(&mut state, || {
                    info!(
                        batches = left.len(),
                        elapsed_ms = begun.elapsed().as_millis() as u64,
                        "waiting for outstanding vendor batches"
                    );
                });
            }
            let sweep =
                PAUSE_PER_QUERY.saturating_mul(u32::try_from(left.len()).unwrap_or(u32::MAX));
            let mut until = now + pause.max(sweep.min(LONGEST_SWEEP_PAUSE));
            if let Some(deadline) = deadline {
                until = until.min(deadline);
            }
            // Every ending signals; only the last one is worth waking up for.
            while !self.done.wait_until(&mut state, until).timed_out() {
                if left
                    .iter()
                    .all(|batch| matches!(batch.progress(), Progress::Done(_)))
                {
                    break;
                }
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The outstanding batches that `whom` means.
    pub(crate) fn concerned(&self, whom: Whom) -> Vec<Arc<VendorBatch>> {
        let mut batches: Vec<_> = {
            let state = self.state.lock();
            let may_be = |batch: &&Arc<VendorBatch>| match whom {
                Whom::All => true,
                Whom::Using(region) => batch.footprint.touches_if_known(region) != Some(false),
            };
            let outstanding = state.outstanding.iter();
            outstanding.filter(may_be).cloned().collect()
        };
        if let Whom::Using(region) = whom {
            // The first question sorts, so it is asked outside the lock.
            batches.retain(|batch| batch.footprint.touches(region));
        }
        batches
    }

    /// Quiesces and takes the library down. Does nothing if not installed, and in
    /// a child of the process that installed it, or while the process exits.
    ///
    /// Where batches are left after the timeout, the backend may be able to end
    /// what they still do to this process's memory for certain; else they are.
    ///
    /// # Errors
    ///
    /// [`Error::QuiesceTimeout`]: nothing was destroyed (C13), the transport
    /// stays installed and quiesced, and polls, quiesce and uninstall may be
    /// tried again. Batches that had their time in an earlier wait are asked once
    /// more and not waited for again (C19).
    pub fn uninstall(&self) -> Result<(), Error> {
        if self.is_left_alone() {
            return Ok(());
        }
        {
            let mut state = self.state.lock();
            if state.backend.is_none() {
                return Ok(());
            }
            state.quiesced = true;
        }
        let mut waited = self.wait(Whom::All, Patience::Implicit);
        if waited.batches > 0 {
            self.fence(&mut waited);
        }
        if waited.batches > 0 {
            return Err(waited.timeout());
        }
        let backend = {
            let mut memory = self.memory.lock();
            // What is at the library must not be overtaken by its end.
            self.memory_changed
                .wait_while(&mut memory, |memory| !memory.is_idle());
            *memory = Regions::default();
            self.condemned.store(0, Ordering::Relaxed);
            self.state.lock().backend.take()
        };
        if let Some(backend) = backend {
            let endpoint = *backend.endpoint();
            // Ends the instance.
            drop(backend);
            info!(%endpoint, "memfabric transport uninstalled");
        }
        Ok(())
    }

    /// The last resort of a teardown.
    fn fence(&self, waited: &mut Waited) {
        let fenced = {
            let state = self.state.lock();
            // Under the lock like every call that it ends.
            let backend = state.backend.as_ref();
            backend.is_some_and(|backend| backend.fence())
        };
        if !fenced {
            return;
        }
        for batch in self.concerned(Whom::All) {
            if let Err(Error::QueryFailed { code, .. }) = self.ask(&batch, None) {
                waited.last_error = Some(code);
            }
        }
        let state = self.state.lock();
        waited.batches = state.outstanding.len();
        waited.tasks = state.outstanding_tasks;
    }

    /// Whether this is a child of the process that installed the transport, which
    /// has none of the library's threads and whose locks may be held for ever; or
    /// the process exits, and the library may be gone.
    pub fn is_left_alone(&self) -> bool {
        let process = self.process.load(Ordering::Relaxed);
        process != 0 && !Process(process).is_alive()
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        if self.is_left_alone() {
            std::mem::forget(std::mem::take(self.state.get_mut()));
            return;
        }
        // A log sink may panic; what must not be freed is kept all the same.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.uninstall()));
        if let Ok(Ok(())) = outcome {
            return;
        }
        let state = self.state.get_mut();
        let batches = state.outstanding.len();
        // C13: the library may still read the arrays and write to memory, so the
        // handle, the library and the arrays all stay, for good.
        let backend = state.backend.clone();
        LEFT_BEHIND.lock().push(std::mem::take(state));
        if let Some(backend) = backend {
            backend.abandon();
        }
        let error = match outcome {
            Ok(Ok(())) => String::new(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "a panic".to_owned(),
        };
        error!(
            batches,
            %error,
            "torn down with work outstanding: the library's instance and the arrays of these batches are leaked on purpose"
        );
    }
}
