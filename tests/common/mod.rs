// SPDX-License-Identifier: Apache-2.0
//! A scripted backend and an event recorder, shared by the integration tests.
#![allow(unsafe_code)] // implements methods that take memory by number
#![allow(dead_code, missing_docs)]

pub mod blocking;
pub mod emulator;
pub mod peers;
pub mod published;
pub mod vouched;

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use memfabric_transport::{
    Backend, BatchId, Code, CopyBatch, Endpoint, Error, Opcode, Peer, Query, Refused, Region,
    Request, SubBatch, TaskState, TaskStatus, Transport,
};
use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
pub use vouched::{VouchedBackend, VouchedTransport};

pub const TIMEOUT: Duration = Duration::from_millis(200);
/// Longer than anything here takes; running into it is a failure.
pub const FOREVER: Duration = Duration::from_secs(30);
pub const PEER_A: &str = "10.0.0.1:1001";
pub const PEER_B: &str = "10.0.0.2:1002";

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % end as u64) as usize
    }
}

/// Waits for what happens on another thread or in another process.
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(FOREVER, what, holds);
}

/// As [`until`], of which `limit` says when it is a failure.
pub fn until_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "still waiting: {what}");
        std::thread::yield_now();
    }
}

/// Polls `task` until it is terminal.
pub fn finish(transport: &Transport, sub_batch: &SubBatch, task: usize) -> TaskStatus {
    finish_within(FOREVER, transport, sub_batch, task)
}

/// As [`finish`], of which `limit` says when it is a failure.
pub fn finish_within(
    limit: Duration,
    transport: &Transport,
    sub_batch: &SubBatch,
    task: usize,
) -> TaskStatus {
    let deadline = Instant::now() + limit;
    loop {
        let status = transport
            .poll(sub_batch, task as i32)
            .expect("no query error");
        if status.state != TaskState::Pending {
            return status;
        }
        assert!(Instant::now() < deadline, "task {task} never ends");
        std::thread::yield_now();
    }
}

/// Local address, remote address, bytes of each piece.
pub fn pieces_of(batch: &CopyBatch) -> Vec<(usize, usize, usize)> {
    let addresses = batch.local().iter().zip(batch.remote());
    addresses
        .zip(batch.lengths())
        .map(|((local, remote), length)| (*local, *remote, *length))
        .collect()
}

/// A vendor call, as the backend saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Register(Vec<Region>),
    Deregister(usize),
    Submit(Submitted),
    Query(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submitted {
    pub peer: String,
    pub opcode: Opcode,
    /// (local, remote, length)
    pub pieces: Vec<(usize, usize, usize)>,
    /// Where the library would read the lengths until the batch is done.
    pub lengths_at: usize,
}

/// A point at which a vendor call stops until the test lets it go on.
pub struct Gate {
    pub entered: Receiver<()>,
    pub leave: Sender<()>,
}

struct GateInside {
    entered: Sender<()>,
    leave: Receiver<()>,
}

#[derive(Default)]
struct Knobs {
    submits: VecDeque<Result<(), Code>>,
    queries: HashMap<u64, VecDeque<Query>>,
    always: HashMap<u64, Query>,
    register: Option<Code>,
    deregister: Option<Code>,
    next_id: u64,
    submit_gate: Option<GateInside>,
    query_gate: Option<GateInside>,
    register_gate: Option<GateInside>,
    deregister_gate: Option<GateInside>,
    scribbles: bool,
    doubtful: bool,
    panic_in_query: bool,
}

/// Answers what the test says, and remembers what it was asked. A batch without
/// a script is pending for ever.
pub struct Scripted {
    endpoint: Endpoint,
    knobs: Mutex<Knobs>,
    calls: Mutex<Vec<Call>>,
    dropped: Arc<AtomicBool>,
}

impl Scripted {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            endpoint: Endpoint::parse("127.0.0.1:4000").expect("a literal"),
            knobs: Mutex::default(),
            calls: Mutex::default(),
            dropped: Arc::default(),
        })
    }

    // Knobs.

    /// The next submission answers `code`.
    pub fn refuse_next(&self, code: i32) {
        self.knobs.lock().submits.push_back(Err(Code(code)));
    }

    /// The next submission is accepted.
    pub fn accept_next(&self) {
        self.knobs.lock().submits.push_back(Ok(()));
    }

    /// The next answers about batch `id`, in order.
    pub fn answer(&self, id: u64, answers: impl IntoIterator<Item = Query>) {
        let mut knobs = self.knobs.lock();
        knobs.queries.entry(id).or_default().extend(answers);
    }

    /// What is answered about batch `id` when no answer is left.
    pub fn answer_always(&self, id: u64, answer: Query) {
        self.knobs.lock().always.insert(id, answer);
    }

    pub fn fail_register(&self, code: i32) {
        self.knobs.lock().register = Some(Code(code));
    }

    pub fn fail_deregister(&self, code: i32) {
        self.knobs.lock().deregister = Some(Code(code));
    }

    pub fn panic_in_query(&self, on: bool) {
        self.knobs.lock().panic_in_query = on;
    }

    pub fn gate_submit(&self) -> Gate {
        gate(|inside| self.knobs.lock().submit_gate = Some(inside))
    }

    pub fn gate_query(&self) -> Gate {
        gate(|inside| self.knobs.lock().query_gate = Some(inside))
    }

    pub fn gate_register(&self) -> Gate {
        gate(|inside| self.knobs.lock().register_gate = Some(inside))
    }

    pub fn gate_deregister(&self) -> Gate {
        gate(|inside| self.knobs.lock().deregister_gate = Some(inside))
    }

    /// The vendor writes over the addresses of each batch, as one that translates
    /// them in place would.
    pub fn scribble(&self) {
        self.knobs.lock().scribbles = true;
    }

    /// Refusals may mean that a part was accepted.
    pub fn refuse_doubtfully(&self) {
        self.knobs.lock().doubtful = true;
    }

    // Observations.

    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().clone()
    }

    pub fn queries(&self, id: u64) -> usize {
        let calls = self.calls.lock();
        calls
            .iter()
            .filter(|call| **call == Call::Query(id))
            .count()
    }

    pub fn submitted(&self) -> Vec<Submitted> {
        let calls = self.calls.lock();
        calls
            .iter()
            .filter_map(|call| match call {
                Call::Submit(submitted) => Some(submitted.clone()),
                _ => None,
            })
            .collect()
    }

    /// Set when the backend is dropped, that is, when the library is taken down.
    pub fn dropped(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.dropped)
    }
}

fn gate(install: impl FnOnce(GateInside)) -> Gate {
    let (entered_in, entered) = channel();
    let (leave, leave_in) = channel();
    install(GateInside {
        entered: entered_in,
        leave: leave_in,
    });
    Gate { entered, leave }
}

fn pass(gate: Option<GateInside>) {
    if let Some(gate) = gate {
        gate.entered.send(()).expect("the test waits at the gate");
        gate.leave.recv().expect("the test opens the gate");
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

impl Backend for Scripted {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        self.calls.lock().push(Call::Register(regions.to_vec()));
        let gate = self.knobs.lock().register_gate.take();
        pass(gate);
        vendor("smem_trans_batch_register_mem", self.knobs.lock().register)
    }

    fn deregister(&self, address: usize) -> Result<(), Error> {
        self.calls.lock().push(Call::Deregister(address));
        let gate = self.knobs.lock().deregister_gate.take();
        pass(gate);
        vendor("smem_trans_deregister_mem", self.knobs.lock().deregister)
    }

    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        self.calls.lock().push(Call::Submit(Submitted {
            peer: batch.peer().to_string(),
            opcode: batch.opcode(),
            pieces: pieces_of(batch),
            lengths_at: batch.lengths().as_ptr().addr(),
        }));
        let gate = self.knobs.lock().submit_gate.take();
        pass(gate);
        let mut knobs = self.knobs.lock();
        if let Err(code) = knobs.submits.pop_front().unwrap_or(Ok(())) {
            return Err(Refused {
                doubtful: knobs.doubtful,
                ..Refused::from(code)
            });
        }
        if knobs.scribbles {
            for array in [batch.local(), batch.remote()] {
                // SAFETY: the batch is the vendor's until its result is in.
                unsafe { array.as_ptr().cast_mut().write_bytes(0xff, array.len()) };
            }
        }
        let id = knobs.next_id;
        knobs.next_id += 1;
        Ok(BatchId(id))
    }

    fn query(&self, id: BatchId) -> Query {
        self.calls.lock().push(Call::Query(id.0));
        let gate = self.knobs.lock().query_gate.take();
        pass(gate);
        let mut knobs = self.knobs.lock();
        assert!(!knobs.panic_in_query, "scripted panic");
        let next = knobs.queries.get_mut(&id.0).and_then(VecDeque::pop_front);
        let always = knobs.always.get(&id.0).copied();
        next.or(always).unwrap_or(Query::Pending)
    }
}

/// The outcome of a vendor call that fails with `code`, or does not.
pub fn vendor(call: &'static str, code: Option<Code>) -> Result<(), Error> {
    match code {
        None => Ok(()),
        Some(code) => Err(Error::Vendor {
            call,
            code,
            context: String::new(),
        }),
    }
}

pub fn done(code: i32) -> Query {
    Query::Done(Code(code))
}

pub fn query_error(code: i32) -> Query {
    Query::Error(Code(code))
}

/// A transport over a scripted backend.
pub fn installed() -> (Arc<Transport>, Arc<Scripted>) {
    installed_with(TIMEOUT)
}

/// As [`installed`], with another timeout.
pub fn installed_with(timeout: Duration) -> (Arc<Transport>, Arc<Scripted>) {
    let backend = Scripted::new();
    let transport = Arc::new(Transport::new());
    transport
        .install_backend(Arc::clone(&backend) as Arc<dyn Backend>, timeout)
        .expect("the first install");
    (transport, backend)
}

pub fn peer(endpoint: &str) -> Peer<'_> {
    Peer {
        name: endpoint,
        endpoint,
        problem: "",
    }
}

pub fn read(peer: u32, source: usize, target: usize, length: usize) -> Request {
    Request {
        source,
        target,
        length,
        peer,
        opcode: Opcode::READ,
    }
}

pub fn write(peer: u32, source: usize, target: usize, length: usize) -> Request {
    Request {
        opcode: Opcode::WRITE,
        ..read(peer, source, target, length)
    }
}

/// `count` writes of `length` bytes each to the first peer.
pub fn writes(count: usize, length: usize) -> Vec<Request> {
    (0..count)
        .map(|index| {
            write(
                0,
                0x10_0000 + index * length,
                0x80_0000 + index * length,
                length,
            )
        })
        .collect()
}

/// Submits to peers A (0) and B (1).
pub fn submit(
    transport: &Transport,
    sub_batch: &SubBatch,
    requests: &[Request],
) -> Result<(), Error> {
    transport.vouched_submit(
        sub_batch,
        [peer(PEER_A), peer(PEER_B)].into_iter(),
        requests.iter().copied(),
    )
}

pub fn completed(bytes: u64) -> TaskStatus {
    TaskStatus {
        state: TaskState::Completed,
        bytes,
    }
}

/// One event as text: `LEVEL message field=value …`.
pub type Events = Arc<Mutex<Vec<String>>>;

/// Runs `body` and gives the events that it emitted on this thread.
pub fn events_of<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    let recorder = Recorder::default();
    let events = Arc::clone(&recorder.0);
    let subscriber = tracing_subscriber::registry().with(recorder);
    let value = tracing::subscriber::with_default(subscriber, body);
    let events = events.lock().clone();
    (value, events)
}

/// The events of all threads from now on, down to INFO. Once in a process.
pub fn events_of_process() -> Events {
    let recorder = Recorder::default();
    let events = Arc::clone(&recorder.0);
    let subscriber = tracing_subscriber::registry()
        .with(LevelFilter::INFO)
        .with(recorder);
    tracing::subscriber::set_global_default(subscriber).expect("the first one");
    events
}

#[derive(Default)]
pub struct Recorder(pub Events);

impl<S: tracing::Subscriber> Layer<S> for Recorder {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let line = format!(
            "{} {}{}",
            event.metadata().level(),
            text.message,
            text.fields
        );
        self.0.lock().push(line);
    }
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let outcome = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
        outcome.expect("writing to a string");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
