//! What TENT calls: install, register, submit, poll, quiesce, uninstall.
//!
//! # Locks
//!
//! One lock, `state`, serialises submissions and polls (C15) and is held across
//! the vendor calls that they make, one at a time. Registration has its own, so
//! that a slow registration holds up no poll. `memory` may be held while `state`
//! is taken, never the other way round. No event is logged under either, for a
//! log sink may be anything; the exception is the library's peer-down callback,
//! which may come from inside a vendor call, and which takes neither.
//!
//! A poll of a task that is done, or that has not yet seen the latest "pending",
//! takes no lock at all.
// Takes memory from the caller by number, and hands it on to the backend.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::{debug, error, info, trace, warn};

use crate::backend::{self, Backend, BatchId, Opcode, Opened, Query, Refused};
use crate::batch::{
    Grouping, MAX_TASKS, Peek, Peer, Progress, Request, SubBatch, Table, TaskStatus, Unreachable,
    VendorBatch,
};
use crate::config::Config;
use crate::endpoint::Endpoint;
use crate::error::{Code, Error};
use crate::memory::{Region, Regions};
use crate::suspects::Suspects;

/// First and longest pause between two sweeps of a wait. A wait also ends when
/// a poll on another thread finishes the last batch.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// A wait asks at most this often, over all its batches.
const PAUSE_PER_QUERY: Duration = Duration::from_micros(200);
const LONGEST_SWEEP_PAUSE: Duration = Duration::from_millis(20);
/// At most one ERROR line about failing queries in this time.
const QUERY_ERROR_INTERVAL: Duration = Duration::from_secs(1);
/// At most one progress line of a wait in this time.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Room that is kept for later sub-batches, in tasks and in pieces each.
const KEPT_TASKS: usize = 1 << 16;

/// The transport. All methods may be called from any thread.
///
/// Dropping it tears it down like [`Transport::uninstall`], but for good: what
/// is still outstanding then is leaked on purpose (C13).
#[derive(Debug)]
pub struct Transport {
    /// Tells its sub-batches from those of another transport.
    number: u64,
    state: Mutex<State>,
    /// Signalled when a vendor batch is done.
    done: Condvar,
    memory: Mutex<Regions>,
    suspects: Arc<Suspects>,
    query_errors: QueryErrors,
}

#[derive(Default)]
struct State {
    backend: Option<Arc<dyn Backend>>,
    timeout: Duration,
    quiesced: bool,
    outstanding: Vec<Arc<VendorBatch>>,
    outstanding_tasks: usize,
    grouping: Grouping,
    /// Vendor batches of the call being submitted.
    submitting: Vec<Arc<VendorBatch>>,
    kept: Kept,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("endpoint", &self.backend.as_ref().map(|b| *b.endpoint()))
            .field("quiesced", &self.quiesced)
            .field("outstanding", &self.outstanding.len())
            .finish_non_exhaustive()
    }
}

/// Storage of freed sub-batches, so that the steady state allocates nothing.
#[derive(Default)]
struct Kept {
    tables: Vec<Table>,
    tasks: usize,
    batches: Vec<Arc<VendorBatch>>,
    pieces: usize,
}

/// What was torn down with work outstanding (C13). Nothing is taken out again; it
/// stays in reach so that leak checkers tell it from what was lost by mistake.
static LEFT_BEHIND: Mutex<Vec<State>> = Mutex::new(Vec::new());

/// Limits the rate of ERROR lines about failing queries.
#[derive(Debug, Default)]
struct QueryErrors(Mutex<(Option<Instant>, u64)>);

impl QueryErrors {
    /// Whether to log this one, and how many were passed over before it.
    fn admit(&self) -> Option<u64> {
        let mut state = self.0.lock();
        let now = Instant::now();
        if let Some(last) = state.0
            && now.duration_since(last) < QUERY_ERROR_INTERVAL
        {
            state.1 += 1;
            return None;
        }
        state.0 = Some(now);
        Some(std::mem::take(&mut state.1))
    }
}

/// What a group's submission came to, for the log.
struct Refusal {
    peer: Endpoint,
    opcode: Opcode,
    tasks: usize,
    bytes: u64,
    code: Code,
}

/// How a wait for outstanding batches went.
struct Waited {
    batches: usize,
    tasks: usize,
    elapsed: Duration,
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

impl Default for Transport {
    fn default() -> Self {
        Self::new()
    }
}

impl Transport {
    /// A transport that is not installed. Sub-batches may be allocated already.
    pub fn new() -> Self {
        static TRANSPORTS: AtomicU64 = AtomicU64::new(1);
        Self {
            number: TRANSPORTS.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            done: Condvar::new(),
            memory: Mutex::default(),
            suspects: Arc::default(),
            query_errors: QueryErrors::default(),
        }
    }

    /// Brings the library up; see [`backend::open`] for the steps. The
    /// calling thread's current Ascend device is the one that is used.
    ///
    /// A failed install leaves nothing behind and may be repeated.
    ///
    /// # Errors
    ///
    /// Those of [`backend::open`], and [`Error::AlreadyInstalled`].
    pub fn install(&self, config: &Config) -> Result<(), Error> {
        self.refuse_second_install(&self.state.lock())?;
        let Opened {
            backend,
            library,
            device,
        } = backend::open_with(config, Arc::clone(&self.suspects))?;
        self.install_backend(backend, config.timeout)?;
        info!(
            endpoint = %self.endpoint().unwrap_or_default(),
            protocol = %config.protocol,
            device,
            timeout_ms = config.timeout.as_millis() as u64,
            library = %library.display(),
            "memfabric transport installed"
        );
        Ok(())
    }

    /// Installs over any backend; `timeout` bounds quiesce and waits for busy
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyInstalled`].
    pub fn install_backend(
        &self,
        backend: Arc<dyn Backend>,
        timeout: Duration,
    ) -> Result<(), Error> {
        let mut state = self.state.lock();
        self.refuse_second_install(&state)?;
        state.backend = Some(backend);
        state.timeout = timeout;
        state.quiesced = false;
        Ok(())
    }

    fn refuse_second_install(&self, state: &State) -> Result<(), Error> {
        match &state.backend {
            None => Ok(()),
            Some(backend) => Err(Error::AlreadyInstalled {
                endpoint: backend.endpoint().to_string(),
            }),
        }
    }

    /// The `ip:port` that peers reach this process at; None if not installed.
    pub fn endpoint(&self) -> Option<String> {
        let state = self.state.lock();
        state
            .backend
            .as_ref()
            .map(|backend| backend.endpoint().to_string())
    }

    /// Vendor batches and tasks without a result.
    pub fn outstanding(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.outstanding.len(), state.outstanding_tasks)
    }

    /// Whether the caller must drop what its thread has cached about `segment`
    /// before it uses `endpoint`, which it found there: since this thread last
    /// asked about the segment, a refused submission, a failed batch or the
    /// library said that the endpoint may be gone. Asks for one drop a sign.
    pub fn must_refresh(&self, segment: u64, endpoint: &str) -> bool {
        self.suspects.must_refresh(self.number, segment, endpoint)
    }

    /// Registers memory, all of it or none, in one vendor call. A range that is
    /// registered already is counted and not given to the library again; an
    /// empty list is fine and makes no call.
    ///
    /// # Errors
    ///
    /// [`Error::NotInstalled`]; [`Error::RegionInvalid`] before any vendor call;
    /// [`Error::Vendor`], after every range of the call was deregistered.
    ///
    /// # Safety
    ///
    /// Each region is memory of this process that stays mapped until
    /// [`Self::deregister`] answered success for it, or the transport was
    /// uninstalled. Peers may read and write it meanwhile, at any time.
    pub unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        let backend = self.backend()?;
        let mut memory = self.memory.lock();
        let unknown = memory.unknown(regions)?;
        let outcome = if unknown.is_empty() {
            Ok(())
        } else {
            // SAFETY: the caller's conditions are the same.
            unsafe { backend.register(&unknown) }
        };
        let mut undo_errors = Vec::new();
        match &outcome {
            Ok(()) => memory.add(regions),
            // The library may have taken some of them: it does not say which.
            Err(_) => undo_errors.extend(
                unknown
                    .iter()
                    .rev()
                    .filter_map(|region| backend.deregister(region.address).err()),
            ),
        }
        drop(memory);
        for error in undo_errors {
            debug!(%error, "range of a failed registration was not known to the library");
        }
        outcome?;
        for region in &unknown {
            debug!(
                address = region.address,
                length = region.length,
                "region registered"
            );
        }
        Ok(())
    }

    /// Takes one registration of exactly this range back; the last one
    /// deregisters it. A range that is not ours is fine and does nothing.
    ///
    /// A range that an outstanding batch uses locally is waited for, up to the
    /// timeout; batches that some wait has already given up on are asked once
    /// more and not waited for again, so that a teardown of many ranges ends.
    ///
    /// # Errors
    ///
    /// [`Error::RegionBusy`]: the range stays registered and must not be freed.
    /// [`Error::Vendor`]: the library refused; the range counts as removed.
    pub fn deregister(&self, region: Region) -> Result<(), Error> {
        let backend = match self.backend() {
            Ok(backend) => backend,
            // Nothing is registered with a library that is not there.
            Err(_) => return Ok(()),
        };
        if !self.memory.lock().is_last_owner(region) {
            return Ok(());
        }
        let uses = |batch: &VendorBatch| batch.copy.uses(region);
        let waited = self.wait(&uses, Patience::Implicit);
        let mut memory = self.memory.lock();
        if !memory.is_last_owner(region) {
            return Ok(());
        }
        // Held across the call, so that no submission slips in between.
        let state = self.state.lock();
        let busy = state.outstanding.iter().filter(|batch| uses(batch)).count();
        if busy > 0 {
            return Err(Error::RegionBusy {
                address: region.address,
                length: region.length,
                batches: busy,
                waited_ms: waited.elapsed.as_millis(),
            });
        }
        let outcome = backend.deregister(region.address);
        memory.remove(region);
        drop((state, memory));
        debug!(
            address = region.address,
            length = region.length,
            "region deregistered"
        );
        outcome
    }

    /// A sub-batch for up to `capacity` tasks, at most 2^24. Does not fail: the
    /// engine hangs on a transport whose allocation does.
    pub fn allocate(&self, capacity: usize) -> SubBatch {
        let capacity = capacity.min(MAX_TASKS);
        let table = self.state.lock().kept.table(capacity);
        let table = table.unwrap_or_else(|| Table::with_room_for(capacity));
        SubBatch::new(self.number, capacity, table)
    }

    /// Frees a sub-batch. Vendor batches of it that are outstanding stay
    /// tracked, their arrays alive, until they are done (C14).
    pub fn free(&self, sub_batch: SubBatch) {
        let mut table = sub_batch.into_table();
        let mut state = self.state.lock();
        for batch in table.clear() {
            state.kept.keep_batch(batch);
        }
        state.kept.keep_table(table);
    }

    /// Submits a call's requests, one vendor batch for each peer and opcode
    /// (C8), and appends one task for each, in order.
    ///
    /// What concerns one peer or the library is no error but a FAILED task, so
    /// that the engine can fail it over: a peer without a usable endpoint, and a
    /// group that the library refuses (C6).
    ///
    /// # Errors
    ///
    /// [`Error::NotInstalled`], [`Error::Quiesced`], [`Error::ForeignSubBatch`],
    /// [`Error::OverCapacity`], [`Error::PeerOutOfRange`],
    /// [`Error::OpcodeUnknown`]: no vendor call was made and the sub-batch is as
    /// it was (C7).
    ///
    /// # Safety
    ///
    /// Until a request's task polls COMPLETED or FAILED, or the transport was
    /// uninstalled: its local memory can be read (WRITE) or written (READ), and
    /// nobody else writes it (WRITE) or uses it (READ). Where the peer is this
    /// process, the same holds for the memory at its target. Memory of another
    /// process is checked by the library alone.
    pub unsafe fn submit<'a>(
        &self,
        sub_batch: &SubBatch,
        peers: impl Iterator<Item = Peer<'a>>,
        requests: impl ExactSizeIterator<Item = Request> + Clone,
    ) -> Result<(), Error> {
        if sub_batch.owner() != self.number {
            return Err(Error::ForeignSubBatch);
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(backend) = &state.backend else {
            return Err(Error::NotInstalled);
        };
        if state.quiesced {
            return Err(Error::Quiesced);
        }
        let tasks = requests.len();
        let unreachable = state.grouping.begin(peers);
        state.grouping.fill(sub_batch, requests)?;

        let now = Instant::now();
        let mut refusals = Vec::new();
        state.submitting.clear();
        state.outstanding.reserve(state.grouping.groups.len());
        for copy in &mut state.grouping.groups {
            let mut batch = state.kept.batch();
            let fresh = Arc::get_mut(&mut batch).expect("`keep_batch` keeps what has one owner");
            std::mem::swap(&mut fresh.copy, copy);
            // SAFETY: the batch is in an `Arc` that stays in the list of outstanding
            // ones, unchanged, until a query answers Done, and is leaked if the
            // transport ends before; the memory is the caller's word.
            match unsafe { backend.submit(&mut fresh.copy) } {
                Ok(id) => {
                    fresh.id = id;
                    fresh.submitted = Some(now);
                    *fresh.place.get_mut() = state.outstanding.len();
                    state.outstanding_tasks += batch.tasks();
                    state.outstanding.push(Arc::clone(&batch));
                }
                Err(Refused { code, .. }) => {
                    batch.refuse(code);
                    refusals.push(Refusal {
                        peer: *batch.copy.peer(),
                        opcode: batch.copy.opcode(),
                        tasks: batch.tasks(),
                        bytes: batch.copy.bytes(),
                        code,
                    });
                }
            }
            state.submitting.push(batch);
        }
        sub_batch.publish(tasks, state.submitting.drain(..));
        let unaddressable = state.grouping.unaddressable.take();
        let own = (!refusals.is_empty()).then(|| *backend.endpoint());
        drop(guard);
        if let Some((
            request,
            Request {
                source,
                target,
                length,
                ..
            },
        )) = unaddressable
        {
            warn!(
                request,
                source, target, length, "request has a null or wrapping address, task failed"
            );
        }
        self.report_submission(&unreachable, &refusals, own);
        Ok(())
    }

    fn report_submission(
        &self,
        unreachable: &[Unreachable],
        refusals: &[Refusal],
        own: Option<Endpoint>,
    ) {
        for peer in unreachable {
            warn!(
                peer = peer.name,
                problem = peer.problem,
                "peer cannot be reached, tasks failed"
            );
        }
        for refusal in refusals {
            self.suspects.mark(refusal.peer.as_str());
            warn!(
                peer = %refusal.peer,
                own_endpoint = own == Some(refusal.peer),
                opcode = %refusal.opcode,
                tasks = refusal.tasks,
                bytes = refusal.bytes,
                code = %refusal.code,
                "submission refused, tasks failed"
            );
        }
    }

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
    /// answer than the `seen` ones. The only place that queries: polls, quiesce
    /// and waits for memory all come here.
    fn ask(&self, batch: &Arc<VendorBatch>, seen: Option<u32>) -> Result<(), Error> {
        let mut state = self.state.lock();
        match batch.progress() {
            Progress::Outstanding { answers } if seen.is_none_or(|seen| seen == answers) => {}
            _ => return Ok(()),
        }
        let Some(backend) = &state.backend else {
            return Err(Error::NotInstalled);
        };
        match backend.query(batch.id) {
            Query::Pending => {
                batch.answered_pending();
                drop(state);
                trace!(batch_id = batch.id.0, "vendor batch pending");
                Ok(())
            }
            Query::Done(result) => {
                batch.finish(result);
                let place = batch.place.load(Ordering::Relaxed);
                state.outstanding.swap_remove(place);
                if let Some(moved) = state.outstanding.get(place) {
                    moved.place.store(place, Ordering::Relaxed);
                }
                state.outstanding_tasks -= batch.tasks();
                drop(state);
                self.done.notify_all();
                self.report_result(batch, result);
                Ok(())
            }
            Query::Error(code) => {
                drop(state);
                let peer = batch.copy.peer().to_string();
                if let Some(passed_over) = self.query_errors.admit() {
                    error!(
                        batch_id = batch.id.0,
                        peer,
                        tasks = batch.tasks(),
                        %code,
                        passed_over,
                        "query failed, tasks stay pending and are asked for again"
                    );
                }
                Err(Error::QueryFailed {
                    batch: batch.id.0,
                    peer,
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
        self.suspects.mark(batch.copy.peer().as_str());
        warn!(
            batch_id = batch.id.0,
            peer = %batch.copy.peer(),
            opcode = %batch.copy.opcode(),
            tasks = batch.tasks(),
            bytes = batch.copy.bytes(),
            code = %result,
            elapsed_ms = elapsed_ms(),
            "vendor batch failed, its memory may be partly written"
        );
    }

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
        let waited = self.wait(&|_| true, Patience::Explicit);
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

    /// Polls the outstanding batches that `concerns` until none is left or the
    /// timeout passes. At least one sweep is made, and a batch is asked for once
    /// a sweep; the lock is free between two questions.
    fn wait(&self, concerns: &dyn Fn(&VendorBatch) -> bool, patience: Patience) -> Waited {
        let begun = Instant::now();
        let mut last_error = None;
        let mut pause = FIRST_PAUSE;
        let mut next_report = begun + PROGRESS_INTERVAL;
        loop {
            let (batches, deadline) = {
                let state = self.state.lock();
                (
                    self.concerned(&state, concerns),
                    begun.checked_add(state.timeout),
                )
            };
            for batch in &batches {
                if let Err(Error::QueryFailed { code, .. }) = self.ask(batch, None) {
                    last_error = Some(code);
                }
            }
            let mut state = self.state.lock();
            let left = self.concerned(&state, concerns);
            let now = Instant::now();
            let expired = deadline.is_some_and(|deadline| now >= deadline);
            let given_up = patience == Patience::Implicit
                && left
                    .iter()
                    .all(|batch| batch.waited_out.load(Ordering::Relaxed));
            if left.is_empty() || expired || given_up {
                for batch in &left {
                    batch.waited_out.store(true, Ordering::Relaxed);
                }
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

    fn concerned(
        &self,
        state: &State,
        concerns: &dyn Fn(&VendorBatch) -> bool,
    ) -> Vec<Arc<VendorBatch>> {
        state
            .outstanding
            .iter()
            .filter(|batch| concerns(batch))
            .cloned()
            .collect()
    }

    /// Quiesces and takes the library down. Does nothing if not installed.
    ///
    /// # Errors
    ///
    /// [`Error::QuiesceTimeout`]: nothing was destroyed (C13), the transport
    /// stays installed and quiesced, and polls, quiesce and uninstall may be
    /// tried again. Batches that a quiesce has already waited for in vain are
    /// asked once more and not waited for again.
    pub fn uninstall(&self) -> Result<(), Error> {
        {
            let mut state = self.state.lock();
            if state.backend.is_none() {
                return Ok(());
            }
            state.quiesced = true;
        }
        let waited = self.wait(&|_| true, Patience::Implicit);
        if waited.batches > 0 {
            return Err(waited.timeout());
        }
        let backend = {
            let mut state = self.state.lock();
            state.backend.take()
        };
        *self.memory.lock() = Regions::default();
        if let Some(backend) = backend {
            let endpoint = *backend.endpoint();
            // Ends the instance, and with the last one the library's use.
            drop(backend);
            info!(%endpoint, "memfabric transport uninstalled");
        }
        Ok(())
    }

    fn backend(&self) -> Result<Arc<dyn Backend>, Error> {
        self.state.lock().backend.clone().ok_or(Error::NotInstalled)
    }
}

/// Whom a wait waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    /// Every batch.
    Explicit,
    /// Batches that no wait has given up on.
    Implicit,
}

impl Drop for Transport {
    fn drop(&mut self) {
        let Err(error) = self.uninstall() else {
            return;
        };
        let state = self.state.get_mut();
        let batches = state.outstanding.len();
        // C13: the library may still read the arrays and write to memory, so the
        // handle, the library and the arrays all stay, for good.
        if let Some(backend) = &state.backend {
            backend.abandon();
        }
        LEFT_BEHIND.lock().push(std::mem::take(state));
        error!(
            batches,
            %error,
            "torn down with work outstanding: the library's instance and the arrays of these batches are leaked on purpose"
        );
    }
}

impl Kept {
    fn table(&mut self, capacity: usize) -> Option<Table> {
        // The latest fits in the steady state, in which capacities are alike.
        let index = self
            .tables
            .iter()
            .rposition(|table| table.room() >= capacity)?;
        let table = self.tables.swap_remove(index);
        self.tasks -= table.room();
        Some(table)
    }

    fn keep_table(&mut self, table: Table) {
        if table.room() > 0 && self.tasks + table.room() <= KEPT_TASKS {
            self.tasks += table.room();
            self.tables.push(table);
        }
    }

    fn batch(&mut self) -> Arc<VendorBatch> {
        let Some(batch) = self.batches.pop() else {
            return Arc::default();
        };
        self.pieces -= batch.copy.room();
        batch
    }

    /// Keeps a batch that nobody else holds; one that is outstanding has another
    /// owner, the transport's list.
    fn keep_batch(&mut self, mut batch: Arc<VendorBatch>) {
        if let Some(unique) = Arc::get_mut(&mut batch)
            && self.pieces + unique.copy.room() <= KEPT_TASKS
        {
            unique.renew();
            self.pieces += unique.copy.room();
            self.batches.push(batch);
        }
    }
}

/// Ids are the vendor's; a message shows the number.
impl std::fmt::Display for BatchId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
