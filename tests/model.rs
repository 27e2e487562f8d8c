//! Random sequences of everything that the engine may do, against a vendor that
//! answers anything, compared with a reference model after every step.
//!
//! What is compared: what the caller is told, the vendor calls in their order,
//! the counts of what is outstanding, the length of every sub-batch, that a
//! terminal answer never changes nor costs a vendor call, and that the arguments
//! of every batch without a result are where they were and say what they said.
//!
//! A failure shrinks to a script of one line a step. The sequences are the same
//! in each run; other ones, and more of them, are tried with
//!
//! ```text
//! PROPTEST_CASES=1000000 cargo test --release --locked --test model
//! ```
//!
//! which prints its seed; `PROPTEST_RNG_SEED` repeats one.
#![allow(missing_docs)]

mod common;
mod model {
    pub mod allocator;
    pub mod reference;
    pub mod script;
    pub mod twin;
    pub mod vendor;
}

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use common::VouchedTransport;
use memfabric_transport::{Error, Opcode, Peer, Request, SubBatch, Transport};
use model::allocator::Poisoning;
use model::reference::{Expected, Model};
use model::script::{Answer, Answers, PEERS, Piece, RANGES, Script, Step, Target, Task, Verdict};
use model::vendor::{Call, Kind, Vendor};
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

#[global_allocator]
static ALLOCATOR: Poisoning = Poisoning;

/// Sequences of a run that asks for no other number.
const CASES: u32 = 2000;
const SEED: u64 = 1;
const STEPS: usize = 30;

/// What a run tried: steps by what they were told, and vendor calls.
#[derive(Debug, Default)]
struct Figures {
    sequences: u64,
    steps: u64,
    told: BTreeMap<String, u64>,
    vendor_calls: BTreeMap<String, u64>,
}

/// What a step came to.
struct Outcome {
    told: String,
    calls: Vec<Call>,
}

impl Outcome {
    /// A step that had nothing to do or cannot be told anything.
    fn none() -> Self {
        Self {
            told: "nothing".to_owned(),
            calls: Vec::new(),
        }
    }
}

impl Figures {
    fn count(&mut self, step: &Step, outcome: Outcome) {
        self.steps += 1;
        let step = format!("{step:?}");
        let verb = step.split([' ', ',']).next().unwrap_or_default();
        // The variant, without what it holds.
        let told = outcome.told.replace(['(', '{'], " ");
        let mut words = told.split_whitespace().take(2).collect::<Vec<_>>();
        if let Some(state) = outcome.told.split_once("state: ") {
            words.push(state.1.split([',', ' ']).next().unwrap_or_default());
        }
        *self
            .told
            .entry(format!("{verb}: {}", words.join(" ")))
            .or_default() += 1;
        for call in outcome.calls {
            let call = match call {
                Call::Register(_) => "register",
                Call::Deregister(_) => "deregister",
                Call::Submit(_) => "submit",
                Call::Query(_, Answer::Pending) => "query pending",
                Call::Query(_, Answer::Done(_)) => "query done",
                Call::Query(_, Answer::Error(_)) => "query error",
                Call::Down => "down",
            };
            *self.vendor_calls.entry(call.to_owned()).or_default() += 1;
        }
    }
}

#[test]
fn random_sequences_are_told_what_the_reference_model_says() {
    random_sequences(Kind::Answers);
}

/// The same over the queue of the published library's backend, whose scripted
/// library blocks in every copy.
#[test]
fn random_sequences_over_blocking_copies_are_told_the_same() {
    random_sequences(Kind::Blocks);
}

fn random_sequences(kind: Kind) {
    let config = config();
    eprintln!("{} sequences, seed {:?}", config.cases, config.rng_seed);
    let figures = std::cell::RefCell::new(Figures::default());
    let outcome = TestRunner::new(config).run(&Script::any(STEPS), |script| {
        let mut figures = figures.borrow_mut();
        figures.sequences += 1;
        Run::over(kind).all(&script, &mut figures)
    });
    let figures = figures.into_inner();
    eprintln!("{figures:#?}");
    match outcome {
        // Sequences in which little happens would find little.
        Ok(()) if figures.sequences >= u64::from(CASES) => {
            let kinds = (figures.told.len(), figures.vendor_calls.len());
            assert!(
                kinds >= (30, 7),
                "only {kinds:?} kinds of outcomes and calls"
            );
            let rare = figures.told.iter().filter(|(_, count)| **count < 10);
            let rare: Vec<_> = rare.collect();
            assert!(rare.len() < 5, "too rare to find anything: {rare:?}");
        }
        Ok(()) => {}
        Err(TestError::Fail(reason, script)) => panic!("{reason}\nin the script{script:?}"),
        Err(error) => panic!("{error}"),
    }
}

/// What chance would seldom write: a batch that a wait gave up on ends, is freed,
/// and its storage serves another, which is then waited for in full.
#[test]
fn a_recycled_batch_is_waited_for_like_a_new_one() {
    let submit = Step::Submit {
        into: 0,
        requests: vec![Piece {
            peer: 0,
            opcode: 1,
            source: 0x10_0000,
            target: Target::Own,
            length: 64,
        }],
        verdicts: vec![Verdict::Accept],
    };
    let poll = |answer| Step::Poll {
        of: 0,
        task: Task::Nth(0),
        answer,
    };
    let life = |timeout_ms| {
        [
            Step::Install { timeout_ms },
            Step::Allocate { capacity: 1 },
            submit.clone(),
            Step::Quiesce(Answers::always(Answer::Pending)),
            // The first poll takes the answer that quiesce had.
            poll(Answer::Done(0)),
            poll(Answer::Done(0)),
            Step::Free { which: 0 },
            Step::Uninstall(Answers::always(Answer::Done(0))),
        ]
    };
    let script = Script([life(1), life(20)].concat());
    let mut implicit = script.clone();
    implicit.0[11] = Step::Uninstall(Answers::always(Answer::Pending));
    for script in [script, implicit] {
        if let Err(why) = Run::default().all(&script, &mut Figures::default()) {
            panic!("{why}\nin the script{script:?}");
        }
    }
}

fn config() -> Config {
    let given = |name: &str| std::env::var_os(name).is_some();
    let mut config = Config {
        failure_persistence: None,
        max_shrink_iters: 20_000,
        // A sequence that hangs is not shrunk for ever.
        max_shrink_time: 120_000,
        ..Config::default()
    };
    if !given("PROPTEST_CASES") {
        config.cases = CASES;
    }
    if !given("PROPTEST_RNG_SEED") {
        config.rng_seed = RngSeed::Fixed(match given("PROPTEST_CASES") {
            true => RandomState::new().hash_one(()),
            false => SEED,
        });
    }
    config
}

/// One sequence under way.
#[derive(Default)]
struct Run {
    transport: Transport,
    sub_batches: Vec<SubBatch>,
    vendor: Vendor,
    model: Model,
}

impl Run {
    fn over(kind: Kind) -> Self {
        Self {
            vendor: Vendor::of(kind),
            ..Self::default()
        }
    }

    fn all(mut self, script: &Script, figures: &mut Figures) -> Result<(), TestCaseError> {
        for (number, step) in script.0.iter().enumerate() {
            let after = |why: String| TestCaseError::fail(format!("step {number}: {why}"));
            let outcome = self.step(step).map_err(after)?;
            figures.count(step, outcome);
            self.audit().map_err(after)?;
        }
        // Whatever was left is let go of, and the vendor is taken down.
        let done = Answers::always(Answer::Done(0));
        for step in [Step::Uninstall(done.clone()), Step::Drop(done)] {
            self.step(&step)
                .and_then(|_| self.audit())
                .map_err(|why| TestCaseError::fail(format!("at the end: {why}")))?;
        }
        match self.vendor.finish() {
            Some(why) => Err(TestCaseError::fail(format!("after the end: {why}"))),
            None => Ok(()),
        }
    }

    fn step(&mut self, step: &Step) -> Result<Outcome, String> {
        let picked = |number: usize| {
            let back = number.checked_rem(self.sub_batches.len())?;
            Some(self.sub_batches.len() - 1 - back)
        };
        match step {
            Step::Install { timeout_ms } => {
                let timeout = Duration::from_millis(*timeout_ms);
                let told = self
                    .transport
                    .install_backend(self.vendor.backend(), timeout);
                let expected = self.model.install(*timeout_ms);
                self.compare(told, expected)
            }
            Step::Allocate { capacity } => {
                self.sub_batches.push(self.transport.allocate(*capacity));
                self.model.allocate(*capacity);
                Ok(Outcome::none())
            }
            Step::Submit {
                into,
                requests,
                verdicts,
            } => {
                let Some(into) = picked(*into) else {
                    return Ok(Outcome::none());
                };
                let requests: Vec<_> = requests
                    .iter()
                    .map(|piece| (piece.clone(), self.model.addresses(piece)))
                    .collect();
                let fresh_id = self.vendor.fresh_id();
                let verdicts = &self.vendor.possible(verdicts);
                self.vendor.decide(verdicts);
                let published: Vec<_> = (0..PEERS)
                    .map(|peer| self.model.peers.published(peer))
                    .collect();
                let peers = published.iter().map(|(endpoint, problem)| Peer {
                    name: "segment",
                    endpoint,
                    problem,
                });
                let told = self.transport.vouched_submit(
                    &self.sub_batches[into],
                    peers,
                    requests.iter().map(|(piece, (source, target))| Request {
                        source: *source,
                        target: *target,
                        length: piece.length,
                        peer: piece.peer as u32,
                        opcode: Opcode(piece.opcode),
                    }),
                );
                let expected = self.model.submit(into, &requests, verdicts, fresh_id);
                self.compare(told, expected)
            }
            Step::Poll { of, task, answer } => {
                let Some(of) = picked(*of) else {
                    return Ok(Outcome::none());
                };
                let task = match *task {
                    Task::Number(number) => number,
                    Task::Nth(number) => {
                        let tasks = self.sub_batches[of].len();
                        number.checked_rem(tasks).unwrap_or(0) as i32
                    }
                };
                self.vendor.answer(&Answers::always(*answer));
                let told = self.transport.poll(&self.sub_batches[of], task);
                let calls = self.vendor.calls();
                // A library that blocks cannot give every answer at any time.
                let given = calls.iter().find_map(|call| match call {
                    Call::Query(_, given) => Some(*given),
                    _ => None,
                });
                let expected = self.model.poll(of, task, given.unwrap_or(*answer));
                same(told, expected, calls)
            }
            Step::Free { which } => {
                let Some(which) = picked(*which) else {
                    return Ok(Outcome::none());
                };
                self.transport.free(self.sub_batches.remove(which));
                self.model.free(which);
                self.compare(Ok(()), (Ok(()), Vec::new()))
            }
            Step::Quiesce(answers) => self.waiting(answers, Transport::quiesce, Model::quiesce),
            Step::Uninstall(answers) => {
                self.waiting(answers, Transport::uninstall, Model::uninstall)
            }
            Step::Drop(answers) => {
                let old = std::mem::take(&mut self.transport);
                let end = |_: &Transport| {
                    drop(old);
                    Ok(())
                };
                self.waiting(answers, end, Model::drop_transport)
            }
            Step::Register { ranges, refuse } => {
                self.vendor.refuse_register(*refuse);
                let regions: Vec<_> = ranges.iter().map(|range| RANGES[*range]).collect();
                let told = self.transport.vouched_register(&regions);
                let expected = self.model.register(ranges, *refuse);
                self.compare(told, expected)
            }
            Step::Deregister {
                range,
                answers,
                refuse,
            } => {
                self.vendor.refuse_deregister(*refuse);
                self.waiting(
                    answers,
                    |transport| transport.deregister(RANGES[*range]),
                    |model, calls, elapsed| model.deregister(*range, *refuse, calls, elapsed),
                )
            }
            Step::Restart { peer } => {
                self.model.peers.restart(*peer);
                Ok(Outcome::none())
            }
            Step::Refresh { peer } => {
                let endpoint = self.model.peers.published(*peer).0;
                let asked = Instant::now();
                let told = self.transport.must_refresh(*peer as u64, &endpoint);
                let expected = self.model.must_refresh(*peer, asked, told);
                self.compare(Ok(told), (Ok(expected), Vec::new()))
            }
        }
    }

    /// A step that may ask about any number of batches, any number of times: the
    /// model is shown the questions.
    fn waiting(
        &mut self,
        answers: &Answers,
        step: impl FnOnce(&Transport) -> Result<(), Error>,
        expect: impl FnOnce(&mut Model, &[Call], u128) -> Result<Expected<()>, String>,
    ) -> Result<Outcome, String> {
        self.vendor.answer(answers);
        let begun = Instant::now();
        let told = step(&self.transport);
        let elapsed = begun.elapsed().as_millis();
        let calls = self.vendor.calls();
        let expected = expect(&mut self.model, &calls, elapsed)?;
        same(told, expected, calls)
    }

    fn compare<T: std::fmt::Debug>(
        &self,
        told: Result<T, Error>,
        expected: Expected<T>,
    ) -> Result<Outcome, String> {
        same(told, expected, self.vendor.calls())
    }

    /// What must hold after every step.
    fn audit(&self) -> Result<(), String> {
        if let Some(misread) = self.vendor.misread() {
            return Err(format!("a slow library misreads its arguments: {misread}"));
        }
        if let Some(fault) = self.vendor.fault() {
            return Err(fault);
        }
        let outstanding = (self.transport.outstanding(), self.model.outstanding());
        if outstanding.0 != outstanding.1 {
            return Err(format!(
                "outstanding (batches, tasks) are {:?}, should be {:?}",
                outstanding.0, outstanding.1
            ));
        }
        if self.transport.endpoint().is_some() != self.model.is_installed() {
            return Err(format!("the endpoint is {:?}", self.transport.endpoint()));
        }
        for (of, sub_batch) in self.sub_batches.iter().enumerate() {
            let tasks = self.model.sub_batches[of].tasks.len();
            let capacity = self.model.sub_batches[of].capacity;
            let said = (sub_batch.len(), sub_batch.is_empty(), sub_batch.capacity());
            if said != (tasks, tasks == 0, capacity) {
                return Err(format!(
                    "sub-batch {of} says {said:?}, has {tasks} of {capacity} tasks"
                ));
            }
            for number in 0..tasks {
                let Some(status) = self.model.terminal(of, number) else {
                    continue;
                };
                let told = self.transport.poll(sub_batch, number as i32);
                same(told, (Ok(status), Vec::new()), self.vendor.calls())
                    .map(|_| ())
                    .map_err(|why| format!("task {number} of {of} was over, and now {why}"))?;
            }
        }
        Ok(())
    }
}

fn same<T: std::fmt::Debug>(
    told: Result<T, Error>,
    expected: Expected<T>,
    calls: Vec<Call>,
) -> Result<Outcome, String> {
    let told = format!("{:?}", told.map_err(timeless));
    let should = format!("{:?}", expected.0);
    if told != should {
        return Err(format!("told {told}, should be {should}"));
    }
    if calls != expected.1 {
        return Err(format!(
            "vendor calls {calls:x?}, should be {:x?}",
            expected.1
        ));
    }
    Ok(Outcome { told, calls })
}

/// The error without what a model cannot know: how long it took, and how it is
/// worded.
fn timeless(error: Error) -> Error {
    match error {
        Error::QuiesceTimeout {
            batches,
            tasks,
            last_error,
            ..
        } => Error::QuiesceTimeout {
            batches,
            tasks,
            waited_ms: 0,
            last_error,
        },
        Error::RegionBusy {
            address,
            length,
            batches,
            ..
        } => Error::RegionBusy {
            address,
            length,
            batches,
            waited_ms: 0,
        },
        Error::RegionInvalid {
            address, length, ..
        } => Error::RegionInvalid {
            address,
            length,
            reason: String::new(),
        },
        other => other,
    }
}
