// SPDX-License-Identifier: Apache-2.0
//! Asking the library about batches, and what follows from its answers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{debug, error, trace, warn};

use crate::backend::Query;
use crate::batch::{Peek, Progress, SubBatch, VendorBatch};
use crate::code::Code;
use crate::error::{Error, pending_hint};
use crate::task::TaskStatus;
use crate::transport::{State, Transport};

/// First and longest pause between two questions of a wait.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// So many batches of freed sub-batches are asked about by a submission or a
/// release: more than those make on average, so that they do not pile up.
const ORPHANS_A_CALL: usize = 2;

/// What a question about a batch came to, for the log.
#[derive(Clone, Copy)]
pub(crate) enum Asked {
    Pending,
    Done(Code),
    Failed(Code),
}

impl Transport {
    /// The status of one task. A number past the end is FAILED.
    ///
    /// Asks the library at most once, and only if this task has already seen the
    /// latest answer about its batch; so a sweep over the tasks of a batch is
    /// one vendor query, and a caller that polls a single task gets a fresh
    /// answer each time.
    ///
    /// # Errors
    ///
    /// [`Error::QueryFailed`]: the task stays PENDING, and the next poll asks
    /// again (C5). [`Error::NegativeTask`], [`Error::ForeignSubBatch`].
    pub fn poll(&self, sub_batch: &SubBatch, task: i32) -> Result<TaskStatus, Error> {
        if sub_batch.owner() != self.number {
            return Err(Error::ForeignSubBatch);
        }
        let number = usize::try_from(task).map_err(|_| Error::NegativeTask { task })?;
        match sub_batch.peek(number) {
            Peek::Answer(status) => return Ok(status),
            Peek::Ask { batch, answers } => self.ask(batch, Some(answers))?,
        }
        match sub_batch.peek(number) {
            Peek::Answer(status) => Ok(status),
            Peek::Ask { .. } => Ok(TaskStatus::PENDING),
        }
    }

    /// Waits until no task of `sub_batch` is pending any more, for so long at most;
    /// whether that is so. How each of them ended, [`Self::poll`] tells.
    ///
    /// # Errors
    ///
    /// Those of [`Self::poll`].
    pub fn wait_for(&self, sub_batch: &SubBatch, timeout: Duration) -> Result<bool, Error> {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        for task in 0..sub_batch.len() {
            // A sub-batch has no more tasks than that.
            let task = i32::try_from(task).unwrap_or(i32::MAX);
            while self.poll(sub_batch, task)? == TaskStatus::PENDING {
                let left = timeout.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    return Ok(false);
                }
                let mut state = self.state.lock();
                self.done
                    .wait_until(&mut state, Instant::now() + pause.min(left));
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        Ok(true)
    }

    /// The answer to [`Self::poll`] if it needs neither the library nor the lock
    /// and is no error: that of nearly every poll of a sweep. Without it, `poll`
    /// is to be called. Does not panic.
    #[inline]
    pub(crate) fn peek(&self, sub_batch: &SubBatch, task: i32) -> Option<TaskStatus> {
        if sub_batch.owner() != self.number {
            return None;
        }
        match sub_batch.peek(usize::try_from(task).ok()?) {
            Peek::Answer(status) => Some(status),
            Peek::Ask { .. } => None,
        }
    }

    /// Asks the library about one batch, unless it is done or has had another
    /// answer than the `seen` ones.
    pub(crate) fn ask(&self, batch: &Arc<VendorBatch>, seen: Option<u32>) -> Result<(), Error> {
        let mut state = self.state.lock();
        match batch.progress() {
            Progress::Outstanding { answers } if seen.is_none_or(|seen| seen == answers) => {}
            _ => return Ok(()),
        }
        let asked = state.query(batch).ok_or(Error::NotInstalled)?;
        drop(state);
        self.report(batch, asked)
    }

    /// What follows from the answers about batches that nobody polls, outside the
    /// lock.
    #[cold]
    pub(crate) fn report_orphans(&self, answers: Vec<(Arc<VendorBatch>, Asked)>) {
        for (batch, asked) in answers {
            // An error has no caller to go to; it is logged.
            let _ = self.report(&batch, asked);
        }
    }

    /// What follows from an answer, outside the lock.
    #[inline]
    fn report(&self, batch: &VendorBatch, asked: Asked) -> Result<(), Error> {
        match asked {
            Asked::Pending => {
                trace!(batch_id = batch.id.0, "vendor batch pending");
                Ok(())
            }
            Asked::Done(result) => {
                self.done.notify_all();
                self.report_result(batch, result);
                self.make_up_for_removals();
                Ok(())
            }
            Asked::Failed(code) => {
                let peer = *batch.copy.peer();
                if let Some(passed_over) = self.limiter.admit("query", peer.as_str()) {
                    error!(
                        batch_id = batch.id.0,
                        %peer,
                        tasks = batch.tasks(),
                        code = format!("{code}{}", pending_hint(code)),
                        passed_over,
                        "query failed, tasks stay pending and are asked for again"
                    );
                }
                Err(Error::QueryFailed {
                    batch: batch.id.0,
                    peer: peer.to_string(),
                    code,
                })
            }
        }
    }

    fn report_result(&self, batch: &VendorBatch, result: Code) {
        // Reads the clock only if the event is taken.
        let elapsed_ms = || {
            let elapsed = batch.submitted.map(|submitted| submitted.elapsed());
            elapsed.unwrap_or_default().as_millis() as u64
        };
        if result.is_ok() {
            debug!(
                batch_id = batch.id.0,
                peer = %batch.copy.peer(),
                opcode = %batch.copy.opcode(),
                tasks = batch.tasks(),
                elapsed_ms = elapsed_ms(),
                "vendor batch completed"
            );
            return;
        }
        let peer = batch.copy.peer();
        self.stale.mark(peer.as_str());
        if let Some(passed_over) = self.limiter.admit("failed", peer.as_str()) {
            warn!(
                batch_id = batch.id.0,
                %peer,
                opcode = %batch.copy.opcode(),
                tasks = batch.tasks(),
                bytes = batch.copy.bytes(),
                code = %result,
                elapsed_ms = elapsed_ms(),
                passed_over,
                "vendor batch failed, its memory may be partly written"
            );
        }
    }
}

impl State {
    /// Asks about a few batches that nobody polls.
    #[inline]
    pub(crate) fn ask_orphans(&mut self) -> Option<Vec<(Arc<VendorBatch>, Asked)>> {
        (!self.orphans.is_empty()).then(|| self.ask_the_next_orphans())
    }

    #[cold]
    fn ask_the_next_orphans(&mut self) -> Vec<(Arc<VendorBatch>, Asked)> {
        let mut answers = Vec::new();
        for _ in 0..self.orphans.len().min(ORPHANS_A_CALL) {
            let Some(batch) = self.orphans.pop_front() else {
                break;
            };
            // A wait may have ended it.
            if let Progress::Outstanding { .. } = batch.progress() {
                let answer = self.query(&batch);
                answers.extend(answer.map(|asked| (Arc::clone(&batch), asked)));
            }
            match batch.progress() {
                Progress::Outstanding { .. } => self.orphans.push_back(batch),
                Progress::Done(_) => {
                    self.kept.keep_batch(batch);
                }
            }
        }
        answers
    }

    /// Asks about a batch that is not done: the only place that queries, for
    /// polls, quiesce and waits alike. None without a library.
    #[inline]
    fn query(&mut self, batch: &VendorBatch) -> Option<Asked> {
        Some(match self.backend.as_ref()?.query(batch.id) {
            Query::Pending => {
                batch.answered_pending();
                Asked::Pending
            }
            Query::Done(result) => {
                batch.finish(result);
                let place = batch.place.load(Ordering::Relaxed);
                self.outstanding.swap_remove(place);
                if let Some(moved) = self.outstanding.get(place) {
                    moved.place.store(place, Ordering::Relaxed);
                }
                self.outstanding_tasks -= batch.tasks();
                Asked::Done(result)
            }
            Query::Error(code) => Asked::Failed(code),
        })
    }
}
