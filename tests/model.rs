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

mod model {
    pub mod allocator;
    pub mod reference;
    pub mod script;
    pub mod vendor;
}

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use memfabric_transport::{Error, Opcode, Peer, Request, SubBatch, Transport};
use model::allocator::Poisoning;
use model::reference::{Expected, Model};
use model::script::{Answer, Answers, PEERS, RANGES, Script, Step};
use model::vendor::{Call, Vendor};
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

#[global_allocator]
static ALLOCATOR: Poisoning = Poisoning;

/// Sequences of a run that asks for no other number.
const CASES: u32 = 1500;
const SEED: u64 = 1;
const STEPS: usize = 40;

/// What a run tried.
#[derive(Debug, Default)]
struct Figures {
    sequences: u64,
    steps: u64,
    vendor_calls: u64,
}

#[test]
fn random_sequences_are_told_what_the_reference_model_says() {
    let config = config();
    eprintln!("{} sequences, seed {:?}", config.cases, config.rng_seed);
    let figures = std::cell::RefCell::new(Figures::default());
    let outcome = TestRunner::new(config).run(&Script::any(STEPS), |script| {
        let mut figures = figures.borrow_mut();
        figures.sequences += 1;
        Run::default().all(&script, &mut figures)
    });
    eprintln!("{:?}", figures.into_inner());
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(reason, script)) => panic!("{reason}\nin the script{script:?}"),
        Err(error) => panic!("{error}"),
    }
}

fn config() -> Config {
    let given = |name: &str| std::env::var_os(name).is_some();
    let mut config = Config {
        failure_persistence: None,
        max_shrink_iters: 20_000,
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
    fn all(mut self, script: &Script, figures: &mut Figures) -> Result<(), TestCaseError> {
        for (number, step) in script.0.iter().enumerate() {
            let after = |why: String| TestCaseError::fail(format!("step {number}: {why}"));
            figures.steps += 1;
            figures.vendor_calls += self.step(step).map_err(after)?;
            self.audit().map_err(after)?;
        }
        // Whatever was left is let go of, and the vendor is taken down.
        let done = Answers::always(Answer::Done(0));
        for step in [Step::Uninstall(done.clone()), Step::Drop(done)] {
            self.step(&step)
                .and_then(|_| self.audit())
                .map_err(|why| TestCaseError::fail(format!("at the end: {why}")))?;
        }
        Ok(())
    }

    /// Takes a step, and gives the number of vendor calls that it made.
    fn step(&mut self, step: &Step) -> Result<u64, String> {
        let picked = |number: usize| number.checked_rem(self.sub_batches.len());
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
                Ok(0)
            }
            Step::Submit {
                into,
                requests,
                verdicts,
            } => {
                let Some(into) = picked(*into) else {
                    return Ok(0);
                };
                let requests: Vec<_> = requests
                    .iter()
                    .map(|piece| (piece.clone(), self.model.addresses(piece)))
                    .collect();
                let fresh_id = self.vendor.fresh_id();
                self.vendor.decide(verdicts);
                let published: Vec<_> = (0..PEERS)
                    .map(|peer| self.model.peers.published(peer))
                    .collect();
                let peers = published.iter().map(|(endpoint, problem)| Peer {
                    name: "segment",
                    endpoint,
                    problem,
                });
                let told = self.transport.submit(
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
                    return Ok(0);
                };
                self.vendor.answer(&Answers::always(*answer));
                let told = self.transport.poll(&self.sub_batches[of], *task);
                let expected = self.model.poll(of, *task, *answer);
                self.compare(told, expected)
            }
            Step::Free { which } => {
                let Some(which) = picked(*which) else {
                    return Ok(0);
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
                let told = self.transport.register(&regions);
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
                Ok(0)
            }
            Step::Refresh { peer } => {
                let endpoint = self.model.peers.published(*peer).0;
                let told = self.transport.must_refresh(*peer as u64, &endpoint);
                let expected = self.model.must_refresh(*peer);
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
    ) -> Result<u64, String> {
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
    ) -> Result<u64, String> {
        same(told, expected, self.vendor.calls())
    }

    /// What must hold after every step.
    fn audit(&self) -> Result<(), String> {
        if let Some(misread) = self.vendor.misread() {
            return Err(format!("a slow library misreads its arguments: {misread}"));
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
            if sub_batch.len() != tasks {
                return Err(format!("sub-batch {of} has {} tasks", sub_batch.len()));
            }
            for number in 0..tasks {
                let Some(status) = self.model.terminal(of, number) else {
                    continue;
                };
                let told = self.transport.poll(sub_batch, number as i32);
                same(told, (Ok(status), Vec::new()), self.vendor.calls())
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
) -> Result<u64, String> {
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
    Ok(calls.len() as u64)
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
