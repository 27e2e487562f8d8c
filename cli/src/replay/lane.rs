// SPDX-License-Identifier: Apache-2.0
//! The two ways that blocks take: through the transport, or straight through
//! the library's calls.
#![allow(unsafe_code)] // names memory to the library by number

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Peer, Query, Request, SubBatch,
    TaskState, Transport,
};

/// One block on its way.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Its id.
    pub block: u64,
    /// Its place in the pool.
    pub slot: usize,
    /// Direction.
    pub opcode: Opcode,
    /// Address in this process.
    pub local: usize,
    /// Address in the target.
    pub remote: usize,
    /// Bytes.
    pub length: usize,
    /// How far it is.
    pub state: TaskState,
}

/// What carries sub-batches; they are known by their flight's number.
pub trait Lane {
    /// Starts a flight. A piece that is refused is told by the first sweep.
    fn submit(&mut self, flight: usize, pieces: &[Piece]) -> Result<(), Error>;

    /// Asks once about every piece that is pending and notes what is known.
    /// After an error the pieces are still pending, and may be asked for again.
    fn sweep(&mut self, flight: usize, pieces: &mut [Piece]) -> Result<(), Error>;

    /// Forgets a flight whose pieces are all done.
    fn retire(&mut self, flight: usize);

    /// Takes no more and waits until nothing is outstanding, or for the timeout.
    fn quiesce(&mut self) -> Result<(), Error>;
}

/// Through the transport, as TENT uses it.
pub struct TransportLane {
    transport: Arc<Transport>,
    target: String,
    sub_batches: Vec<Option<SubBatch>>,
}

impl TransportLane {
    /// For `flights` flights to the process at `target`.
    pub fn new(transport: Arc<Transport>, target: &Endpoint, flights: usize) -> Self {
        Self {
            transport,
            target: target.to_string(),
            sub_batches: std::iter::repeat_with(|| None).take(flights).collect(),
        }
    }
}

impl Lane for TransportLane {
    fn submit(&mut self, flight: usize, pieces: &[Piece]) -> Result<(), Error> {
        let sub_batch = self.transport.allocate(pieces.len());
        let sub_batch = self.sub_batches[flight].insert(sub_batch);
        let target = Peer {
            name: "target",
            endpoint: &self.target,
            problem: "",
        };
        let requests = pieces.iter().map(|piece| Request {
            source: piece.local,
            target: piece.remote,
            length: piece.length,
            peer: 0,
            opcode: piece.opcode,
        });
        // SAFETY: the pieces' local memory is the staging memory, which the session
        // leaks with the transport, and which is looked at when a piece is done.
        unsafe {
            self.transport
                .submit(sub_batch, std::iter::once(target), requests)
        }
    }

    fn sweep(&mut self, flight: usize, pieces: &mut [Piece]) -> Result<(), Error> {
        let Some(sub_batch) = &self.sub_batches[flight] else {
            return Ok(());
        };
        // Task by task, as TENT does.
        let mut outcome = Ok(());
        for (task, piece) in (0..).zip(pieces) {
            if piece.state == TaskState::Pending {
                match self.transport.poll(sub_batch, task) {
                    Ok(status) => piece.state = status.state,
                    Err(error) => outcome = Err(error),
                }
            }
        }
        outcome
    }

    fn retire(&mut self, flight: usize) {
        if let Some(sub_batch) = self.sub_batches[flight].take() {
            self.transport.free(sub_batch);
        }
    }

    fn quiesce(&mut self) -> Result<(), Error> {
        self.transport.quiesce()
    }
}

/// First and longest pause while quiescing.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Straight through the library's calls: a batch for each direction, and no
/// bookkeeping beyond that. This is the ceiling that the transport is held to.
///
/// Not to be dropped while a batch is outstanding, for the library may read the
/// arrays until then.
pub struct RawLane {
    backend: Arc<dyn Backend>,
    target: Endpoint,
    timeout: Duration,
    /// READ and WRITE of each flight. Never resized: a batch stays where it is.
    flights: Box<[[RawBatch; 2]]>,
}

#[derive(Default)]
struct RawBatch {
    copy: CopyBatch,
    progress: RawProgress,
}

#[derive(Clone, Copy, Default)]
enum RawProgress {
    #[default]
    Unused,
    Outstanding(BatchId),
    Done(Code),
}

impl RawBatch {
    /// Asks if there is something to ask.
    fn advance(&mut self, backend: &dyn Backend) -> Result<(), Error> {
        let RawProgress::Outstanding(id) = self.progress else {
            return Ok(());
        };
        match backend.query(id) {
            Query::Pending => Ok(()),
            Query::Done(code) => {
                self.finish(code);
                Ok(())
            }
            Query::Error(code) => Err(Error::QueryFailed {
                batch: id.0,
                peer: self.copy.peer().to_string(),
                code,
            }),
        }
    }

    fn finish(&mut self, code: Code) {
        self.progress = RawProgress::Done(code);
        if !code.is_ok() {
            tracing::warn!(
                peer = %self.copy.peer(),
                opcode = %self.copy.opcode(),
                tasks = self.copy.len(),
                %code,
                "raw batch failed"
            );
        }
    }

    fn is_outstanding(&self) -> bool {
        matches!(self.progress, RawProgress::Outstanding(_))
    }
}

impl RawLane {
    /// For `flights` flights to the process at `target`.
    pub fn new(
        backend: Arc<dyn Backend>,
        target: Endpoint,
        timeout: Duration,
        flights: usize,
    ) -> Self {
        Self {
            backend,
            target,
            timeout,
            flights: std::iter::repeat_with(Default::default)
                .take(flights)
                .collect(),
        }
    }
}

impl Lane for RawLane {
    fn submit(&mut self, flight: usize, pieces: &[Piece]) -> Result<(), Error> {
        let batches = &mut self.flights[flight];
        for (batch, opcode) in batches.iter_mut().zip([Opcode::READ, Opcode::WRITE]) {
            batch.copy.reset(self.target, opcode);
        }
        for piece in pieces {
            let batch = &mut batches[usize::from(piece.opcode.0)];
            batch.copy.push(piece.local, piece.remote, piece.length);
        }
        for batch in batches.iter_mut().filter(|batch| !batch.copy.is_empty()) {
            // SAFETY: a flight is filled again only once its batches are done, and
            // is leaked with the session; so is the staging memory, see above.
            match unsafe { self.backend.submit(&mut batch.copy) } {
                Ok(id) => batch.progress = RawProgress::Outstanding(id),
                Err(refused) => batch.finish(refused.code),
            }
        }
        Ok(())
    }

    fn sweep(&mut self, flight: usize, pieces: &mut [Piece]) -> Result<(), Error> {
        let batches = &mut self.flights[flight];
        let mut outcome = Ok(());
        for batch in batches.iter_mut() {
            if let Err(error) = batch.advance(&*self.backend) {
                outcome = Err(error);
            }
        }
        for piece in pieces {
            if let RawProgress::Done(code) = batches[usize::from(piece.opcode.0)].progress {
                piece.state = if code.is_ok() {
                    TaskState::Completed
                } else {
                    TaskState::Failed
                };
            }
        }
        outcome
    }

    fn retire(&mut self, flight: usize) {
        for batch in &mut self.flights[flight] {
            batch.progress = RawProgress::Unused;
        }
    }

    fn quiesce(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let mut last_error = None;
            let (mut batches, mut tasks) = (0, 0);
            for batch in self.flights.iter_mut().flatten() {
                if let Err(Error::QueryFailed { code, .. }) = batch.advance(&*self.backend) {
                    last_error = Some(code);
                }
                if batch.is_outstanding() {
                    batches += 1;
                    tasks += batch.copy.len();
                }
            }
            if batches == 0 {
                return Ok(());
            }
            if begun.elapsed() >= self.timeout {
                return Err(Error::QuiesceTimeout {
                    batches,
                    tasks,
                    waited_ms: begun.elapsed().as_millis(),
                    last_error,
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}
