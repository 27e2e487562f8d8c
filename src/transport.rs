// SPDX-License-Identifier: Apache-2.0
//! What TENT calls: install, register, submit, poll, quiesce, uninstall.
//!
//! Registration is in `registration`, polls in `polling`, waiting and teardown in
//! `quiesce`: more
//! methods of the same [`Transport`].
//!
//! # Locks
//!
//! One lock, `state`, serialises submissions and polls (C15) and is held across
//! the vendor calls that they make, one at a time. Registration has its own,
//! `memory`, which is held across no vendor call: what is at the library is noted
//! in the table of ranges instead, and holds up calls about the same memory alone.
//! `memory` may be held while `state` is taken, never the other way round. No
//! event is logged under either, for a log sink may be anything; the exception is
//! the library's peer-down callback, which may come from inside a vendor call, and
//! which takes neither.
//!
//! A poll of a task that is done, or that has not yet seen the latest "pending",
//! takes no lock at all.
// Takes memory from the caller by number, and hands it on to the backend.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use crate::backend::{Backend, BatchId, Opcode, Refused};
use crate::batch::{MAX_TASKS, Progress, SubBatch, Table, VendorBatch};
use crate::code::Code;
use crate::config::Config;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::grouping::{Grouping, Unreachable};
use crate::limit::Limiter;
use crate::memory::Regions;
use crate::recycle::Kept;
use crate::region::Region;
use crate::stale::Stale;
use crate::sync::{Condvar, Mutex};
use crate::task::{Described, Peer, Request};
use crate::vendor::{self, Opened};

/// The transport. All methods may be called from any thread.
///
/// Dropping it tears it down like [`Transport::uninstall`], but for good: what
/// is still outstanding then is leaked on purpose (C13).
#[derive(Debug)]
pub struct Transport {
    /// Tells its sub-batches from those of another transport.
    pub(crate) number: u64,
    pub(crate) state: Mutex<State>,
    /// Signalled when a vendor batch is done.
    pub(crate) done: Condvar,
    pub(crate) memory: parking_lot::Mutex<Regions>,
    /// Signalled when a call about memory has ended.
    pub(crate) memory_changed: parking_lot::Condvar,
    /// How many ranges are condemned, for whom that is worth a lock.
    pub(crate) condemned: AtomicUsize,
    /// The process that installed it; 0 before that.
    pub(crate) process: AtomicU32,
    pub(crate) stale: Arc<Stale>,
    pub(crate) limiter: Limiter,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) backend: Option<Arc<dyn Backend>>,
    pub(crate) timeout: Duration,
    pub(crate) quiesced: bool,
    pub(crate) outstanding: Vec<Arc<VendorBatch>>,
    pub(crate) outstanding_tasks: usize,
    /// Those of them whose sub-batch was freed: nobody polls them (C14).
    pub(crate) orphans: VecDeque<Arc<VendorBatch>>,
    /// Memory that is being withdrawn from the library: no batch may begin to use
    /// it.
    pub(crate) leaving: Vec<Region>,
    grouping: Grouping,
    /// Vendor batches of the call being submitted.
    submitting: Vec<Arc<VendorBatch>>,
    pub(crate) kept: Kept,
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

/// Batches that the library may hold although it refused them. Nothing is taken
/// out again.
static DOUBTFUL: parking_lot::Mutex<Vec<Arc<VendorBatch>>> = parking_lot::Mutex::new(Vec::new());

/// What a group's submission came to, for the log.
struct Refusal {
    peer: Endpoint,
    opcode: Opcode,
    tasks: usize,
    bytes: u64,
    refused: Refused,
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
            memory: parking_lot::Mutex::default(),
            memory_changed: parking_lot::Condvar::new(),
            condemned: AtomicUsize::new(0),
            process: AtomicU32::new(0),
            stale: Arc::default(),
            limiter: Limiter::default(),
        }
    }

    /// Brings the library up; see [`vendor::open`] for the steps. The
    /// calling thread's current Ascend device is the one that is used.
    ///
    /// A failed install leaves nothing behind and may be repeated.
    ///
    /// # Errors
    ///
    /// Those of [`vendor::open`], and [`Error::AlreadyInstalled`].
    pub fn install(&self, config: &Config) -> Result<(), Error> {
        self.refuse_second_install(&self.state.lock())?;
        let Opened {
            backend,
            library,
            device,
        } = vendor::open_with(config, Arc::clone(&self.stale))?;
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
        self.process.store(std::process::id(), Ordering::Relaxed);
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
    /// library said that the endpoint may be gone. Asks for one drop a sign, and
    /// for one a second at most; a sign within that second waits for its end.
    pub fn must_refresh(&self, segment: u64, endpoint: impl AsRef<[u8]>) -> bool {
        self.stale
            .must_refresh(self.number, segment, endpoint.as_ref())
    }

    /// A sub-batch for up to `capacity` tasks, at most 2^24. Does not fail: the
    /// engine hangs on a transport whose allocation does.
    pub fn allocate(&self, capacity: usize) -> SubBatch {
        let capacity = capacity.min(MAX_TASKS);
        let table = self.state.lock().kept.table(capacity);
        let table = table.or_else(|| Table::with_room_for(Kept::room_for(capacity)));
        let table = table.unwrap_or_else(|| {
            error!(
                capacity,
                "no memory for the tasks of a sub-batch, it takes none"
            );
            Box::default()
        });
        SubBatch::new(self.number, capacity, table)
    }

    /// Frees a sub-batch. Vendor batches of it that are outstanding stay
    /// tracked, their arrays alive, until they are done (C14): later calls ask
    /// about them.
    pub fn free(&self, sub_batch: SubBatch) {
        let own = sub_batch.owner() == self.number;
        let mut table = sub_batch.into_table();
        let mut state = self.state.lock();
        for batch in table.clear() {
            match batch.progress() {
                Progress::Done(_) => {
                    state.kept.keep_batch(batch);
                }
                Progress::Outstanding { .. } if !own => {}
                Progress::Outstanding { .. } => state.orphans.push_back(batch),
            }
        }
        state.kept.keep_table(table);
        let answers = state.ask_orphans();
        drop(state);
        if let Some(answers) = answers {
            self.report_orphans(answers);
        }
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
        // SAFETY: the caller's conditions are the same.
        unsafe { self.submit_described(sub_batch, peers.map(Described::from), requests) }
    }

    /// See [`Self::submit`].
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn submit_described<'a>(
        &self,
        sub_batch: &SubBatch,
        peers: impl Iterator<Item = Described<'a>>,
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
        let own = *backend.endpoint();
        let unreachable = state.grouping.begin(peers);
        state.grouping.fill(sub_batch, requests)?;

        let now = Instant::now();
        let mut refusals = Vec::new();
        let mut doubtful = Vec::new();
        state.submitting.clear();
        state.outstanding.reserve(state.grouping.groups.len());
        for copy in &mut state.grouping.groups {
            let mut batch = state.kept.batch();
            let fresh = Arc::get_mut(&mut batch).expect("`keep_batch` keeps what has one owner");
            fresh.fill(copy, &own);
            let leaving = |region: &Region| fresh.footprint.touches(*region);
            let outcome = if state.leaving.iter().any(leaving) {
                Err(Refused {
                    reason: "its memory is being deregistered".to_owned(),
                    ..Refused::from(Code::NOT_SUBMITTED)
                })
            } else {
                // SAFETY: the batch is in an `Arc` that stays in the list of
                // outstanding ones, unchanged, until a query answers Done, and is
                // leaked if the transport ends before, or the refusal is doubtful;
                // the memory is the caller's word.
                unsafe { backend.submit(&mut fresh.copy) }
            };
            match outcome {
                Ok(id) => {
                    fresh.id = id;
                    fresh.submitted = Some(now);
                    *fresh.place.get_mut() = state.outstanding.len();
                    state.outstanding_tasks += batch.tasks();
                    state.outstanding.push(Arc::clone(&batch));
                }
                Err(refused) => {
                    batch.refuse(refused.code);
                    if refused.doubtful {
                        doubtful.push(Arc::clone(&batch));
                    }
                    refusals.push(Refusal {
                        peer: *batch.copy.peer(),
                        opcode: batch.copy.opcode(),
                        tasks: batch.tasks(),
                        bytes: batch.copy.bytes(),
                        refused,
                    });
                }
            }
            state.submitting.push(batch);
        }
        let refused = state.grouping.refused;
        sub_batch.publish(tasks, state.submitting.drain(..), refused);
        let unaddressable = state.grouping.unaddressable.take();
        let answers = state.ask_orphans();
        drop(guard);
        if !doubtful.is_empty() {
            DOUBTFUL.lock().append(&mut doubtful);
        }
        if let Some(answers) = answers {
            self.report_orphans(answers);
        }
        self.report_submission(&unreachable, unaddressable, &refusals, own);
        Ok(())
    }

    fn report_submission(
        &self,
        unreachable: &[Unreachable],
        unaddressable: Option<(usize, Request)>,
        refusals: &[Refusal],
        own: Endpoint,
    ) {
        if let Some((request, what)) = unaddressable
            && let Some(passed_over) = self.limiter.admit("unaddressable", "")
        {
            warn!(
                request,
                source = what.source,
                target = what.target,
                length = what.length,
                passed_over,
                "request has a null or wrapping address, task failed"
            );
        }
        for peer in unreachable {
            if let Some(passed_over) = self.limiter.admit("unreachable", &peer.name) {
                warn!(
                    peer = peer.name,
                    problem = peer.problem,
                    passed_over,
                    "peer cannot be reached, tasks failed"
                );
            }
        }
        for refusal in refusals {
            self.stale.mark(refusal.peer.as_str());
            if refusal.refused.doubtful {
                error!(
                    peer = %refusal.peer,
                    tasks = refusal.tasks,
                    code = %refusal.refused.code,
                    "submission refused by a code that may mean a part was accepted, its arguments are kept for good"
                );
            }
            if let Some(passed_over) = self.limiter.admit("refused", refusal.peer.as_str()) {
                warn!(
                    peer = %refusal.peer,
                    own_endpoint = own == refusal.peer,
                    opcode = %refusal.opcode,
                    tasks = refusal.tasks,
                    bytes = refusal.bytes,
                    code = %refusal.refused,
                    passed_over,
                    "submission refused, tasks failed"
                );
            }
        }
    }

    /// Whether the calling thread may read the description of `segment` again now,
    /// because what it has cached lacks an endpoint: at most once a second, with
    /// the reads that [`Self::must_refresh`] asks for.
    pub fn may_reread(&self, segment: u64) -> bool {
        self.stale.may_reread(self.number, segment)
    }
}

/// Ids are the vendor's; a message shows the number.
impl std::fmt::Display for BatchId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
