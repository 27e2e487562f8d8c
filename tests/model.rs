// SPDX-License-Identifier: Apache-2.0
//! Random sequences of everything that the engine may do, against a vendor that
//! answers anything, compared with a reference model after every step.
//!
//! What is compared: what the caller is told, the vendor calls in their order,
//! the counts of what is outstanding, the length of every sub-batch, the ranges
//! that the library has, that a terminal answer never changes nor costs a vendor
//! call, and that the arguments of every batch without a result are where they were
//! and say what they said.
//!
//! Before all that comes the picture of memory (`model/picture.rs`): nobody may
//! write what the caller was told is free.
//!
//! A failure shrinks to a script of one line a step. The sequences are the same
//! in each run; other ones, and more of them, are tried with
//!
//! ```text
//! PROPTEST_CASES=1000000 cargo test --release --locked --test model
//! ```
//!
//! which prints its seed; `PROPTEST_RNG_SEED` repeats one. With
//! `MEMFABRIC_MODEL_PICTURE=1` the picture alone is looked at: what a change does to
//! memory, whatever else it changes.
#![allow(missing_docs)]

mod common;
mod model {
    pub mod allocator;
    pub mod clock;
    pub mod picture;
    pub mod reference;
    pub mod script;
    pub mod twin;
    pub mod vendor;
}

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use common::{VouchedTransport, until};
use memfabric_transport::{Error, Opcode, Peer, Region, Request, SubBatch, Transport};
use model::allocator::Poisoning;
use model::clock;
use model::picture::Picture;
use model::reference::{Addressed, Asked, Expected, Joined, Model, Waited};
use model::script::{
    Answer, Answers, BOTH, Deregister, PEERS, Piece, Script, Source, Step, Submit, Target, Task,
    Verdict, range_of,
};
use model::vendor::{Call, Group, Kind, Logged, Vendor};
use proptest::test_runner::{Config, RngAlgorithm, RngSeed, TestCaseError, TestError, TestRunner};

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

    /// Sets it apart from others of its step.
    fn which(mut self, which: &str) -> Self {
        self.told.insert_str(0, which);
        self
    }
}

impl Figures {
    fn count(&mut self, step: &Step, outcome: Outcome) {
        self.steps += 1;
        let step = format!("{step:?}");
        let verb = match step.split([' ', ',']).next().unwrap_or_default() {
            number if number.starts_with(|first: char| first.is_ascii_digit()) => "pass",
            verb => verb,
        };
        // The variant, without what it holds.
        let told = outcome.told.replace(['(', '{'], " ");
        let many = if told.starts_with(['b', 'g']) { 3 } else { 2 };
        let mut words = told.split_whitespace().take(many).collect::<Vec<_>>();
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
                Call::Fence(_) => "fence",
                Call::Down => "down",
                Call::Abandon => "abandon",
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
            for what in [
                "deregister: granted Err RegionBusy",
                "deregister: beside Err RegionBusy",
                "deregister: beside Ok",
                "register: Err RegionLeaving",
                "uninstall: Err QuiesceTimeout",
            ] {
                let counts = figures.told.iter();
                let counts = counts.filter(|(told, _)| told.starts_with(what));
                let count: u64 = counts.map(|(_, count)| count).sum();
                assert!(count >= 20, "{what}: only {count}");
            }
        }
        Ok(()) => {}
        Err(TestError::Fail(_, script)) => {
            let (why, script) = least(kind, script);
            panic!("{why}\nin the script{script:?}");
        }
        Err(error) => panic!("{error}"),
    }
}

/// The script without the steps that it also fails without: some were written
/// together, and are not left out one by one before.
fn least(kind: Kind, mut script: Script) -> (TestCaseError, Script) {
    let why = |script: &Script| Run::over(kind).all(script, &mut Figures::default()).err();
    let mut last = why(&script);
    let mut place = script.0.len();
    while place > 0 {
        place -= 1;
        let mut shorter = script.clone();
        shorter.0.remove(place);
        if let Some(why) = why(&shorter) {
            (last, script) = (Some(why), shorter);
        }
    }
    let nothing = || TestCaseError::fail("fails no more, so something else decides");
    (last.unwrap_or_else(nothing), script)
}

/// What chance would seldom write: a batch that a wait gave up on ends, is freed,
/// and its storage serves another, which is then waited for in full.
#[test]
fn a_recycled_batch_is_waited_for_like_a_new_one() {
    let submit = Step::Submit(Submit {
        into: 0,
        requests: vec![Piece {
            peer: 0,
            opcode: 1,
            source: Source::At(0x10_0000),
            target: Target::Own,
            length: 64,
        }],
        verdicts: vec![Verdict::Accept],
        orphans: Answer::Pending,
    });
    let poll = |answer| Step::Poll {
        of: 0,
        task: Task::Nth(0),
        answer,
    };
    let life = |timeout_s| {
        [
            Step::Install { timeout_s },
            Step::Allocate { capacity: 1 },
            submit.clone(),
            Step::Quiesce(Answers::always(Answer::Pending)),
            // The first poll takes the answer that quiesce had.
            poll(Answer::Done(0)),
            poll(Answer::Done(0)),
            Step::Free {
                which: 0,
                orphans: Answer::Pending,
            },
            Step::Uninstall(Answers::always(Answer::Done(0))),
        ]
    };
    let script = [life(0), life(100)].concat();
    let mut implicit = script.clone();
    implicit[11] = Step::Uninstall(Answers::always(Answer::Pending));
    for script in [script, implicit].map(Script::of_one) {
        if let Err(why) = Run::over(Kind::Answers).all(&script, &mut Figures::default()) {
            panic!("{why}\nin the script{script:?}");
        }
    }
}

/// The picture of memory is what finds the worst, so it must be able to.
#[test]
fn the_picture_of_memory_calls_what_may_not_be() {
    const LIFE: usize = 1;
    const RANGE: Region = Region {
        address: 0x10_0000,
        length: 0x1000,
    };
    let batch = |peer: &str, local| Group {
        peer: peer.to_owned(),
        opcode: 0,
        pieces: vec![(local, RANGE.address + 0x800, 8)],
    };
    let used = |picture: &mut Picture| {
        picture.registered(LIFE, &[RANGE]);
        picture.told_registered(LIFE, &[RANGE]);
        picture.accepted(LIFE, 7, &batch("a peer", RANGE.address), "oneself");
    };
    let fault = |what: &dyn Fn(&mut Picture)| {
        let mut picture = Picture::default();
        used(&mut picture);
        assert_eq!(picture.fault(), None);
        what(&mut picture);
        picture.fault().unwrap_or_default()
    };
    let over = |picture: &mut Picture| {
        picture.stopped(LIFE, 7);
        picture.result_given(LIFE, 7, -1);
        picture.deregistered(LIFE, RANGE.address);
        picture.told_removed(LIFE, RANGE);
        used(picture);
        picture.told_busy(LIFE, RANGE, true);
        picture.stopped(LIFE, 7);
        picture.deregistered(LIFE, RANGE.address);
        used(picture);
        picture.stopped(LIFE, 7);
        picture.down(LIFE);
    };
    assert_eq!(fault(&over), "");
    type Events<'a> = &'a dyn Fn(&mut Picture);
    let cases: [(&str, Events); 9] = [
        ("has the result -1", &|picture| {
            picture.result_given(LIFE, 7, -1);
        }),
        ("is deregistered, batch 7 may still write", &|picture| {
            picture.deregistered(LIFE, RANGE.address);
        }),
        ("is said to be free, the library still has it", &|picture| {
            picture.stopped(LIFE, 7);
            picture.told_removed(LIFE, RANGE);
        }),
        ("is said to be free, batch 8 may still read", &|picture| {
            picture.stopped(LIFE, 7);
            picture.deregistered(LIFE, RANGE.address);
            picture.registered(LIFE, &[RANGE]);
            picture.accepted(LIFE, 8, &batch("oneself", 0x50_0000), "oneself");
            picture.told_removed(LIFE, RANGE);
        }),
        ("the library has 0x100000+0x1000 from before", &|picture| {
            picture.told_busy(LIFE, RANGE, true);
            picture.stopped(LIFE, 7);
            picture.told_registered(LIFE, &[RANGE]);
        }),
        (
            "batch 9 may still write 0x200000+0x8 as it was",
            &|picture| {
                let other = Region {
                    address: 0x20_0000,
                    ..RANGE
                };
                let over_it = Region {
                    address: other.address - 8,
                    ..RANGE
                };
                picture.registered(LIFE, &[other]);
                picture.told_registered(LIFE, &[other]);
                picture.accepted(LIFE, 9, &batch("a peer", other.address), "oneself");
                picture.told_busy(LIFE, other, true);
                picture.registered(LIFE, &[over_it]);
                picture.told_registered(LIFE, &[over_it]);
            },
        ),
        ("is said to be free, batch 9 may still write", &|picture| {
            let other = Region {
                address: 0x20_0000,
                ..RANGE
            };
            picture.accepted(LIFE, 9, &batch("a peer", other.address), "oneself");
            picture.told_removed(LIFE, other);
        }),
        ("the library does not have it", &|picture| {
            picture.stopped(LIFE, 7);
            picture.deregistered(LIFE, RANGE.address);
            picture.told_registered(LIFE, &[RANGE]);
        }),
        ("is taken down, batch 7", &|picture| picture.down(LIFE)),
    ];
    for (expected, what) in cases {
        let fault = fault(what);
        assert!(fault.contains(expected), "{expected}: {fault:?}");
    }
}

fn config() -> Config {
    let given = |name: &str| std::env::var_os(name).is_some();
    let mut config = Config {
        failure_persistence: None,
        max_shrink_iters: 20_000,
        // In a debug build the other one takes half of the time.
        rng_algorithm: RngAlgorithm::XorShift,
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
struct Run {
    transports: [Transport; BOTH],
    /// None if it was freed.
    sub_batches: Vec<Option<SubBatch>>,
    vendor: Vendor,
    model: Model,
    picture_alone: bool,
}

impl Run {
    fn over(kind: Kind) -> Self {
        Self {
            transports: Default::default(),
            sub_batches: Vec::new(),
            vendor: Vendor::of(kind),
            model: Model::default(),
            picture_alone: std::env::var_os("MEMFABRIC_MODEL_PICTURE").is_some(),
        }
    }

    fn all(mut self, script: &Script, figures: &mut Figures) -> Result<(), TestCaseError> {
        let outcome = self.steps(script, figures);
        // A sequence that failed ends soon as well.
        self.vendor.answer(&Answers::always(Answer::Done(0)));
        self.vendor.go_on();
        let vendor = self.vendor.clone();
        drop(self);
        clock::set_ahead(Duration::ZERO);
        outcome.map_err(TestCaseError::fail)?;
        match vendor.finish() {
            Some(why) => Err(TestCaseError::fail(format!("after the end: {why}"))),
            None => Ok(()),
        }
    }

    fn steps(&mut self, script: &Script, figures: &mut Figures) -> Result<(), String> {
        clock::set_ahead(Duration::ZERO);
        for (number, (who, step)) in script.0.iter().enumerate() {
            let outcome = self.checked(*who, step);
            figures.count(
                step,
                outcome.map_err(|why| format!("step {number}: {why}"))?,
            );
        }
        // Whatever was left is let go of, and the vendor is taken down.
        let done = Answers::always(Answer::Done(0));
        for who in 0..BOTH {
            for step in [Step::Uninstall(done.clone()), Step::Drop(done.clone())] {
                self.checked(who, &step)
                    .map_err(|why| format!("at the end: {why}"))?;
            }
        }
        Ok(())
    }

    /// A step, and what must hold after it.
    fn checked(&mut self, who: usize, step: &Step) -> Result<Outcome, String> {
        let outcome = self.step(who, step);
        if let Some(fault) = self.vendor.picture_fault() {
            return Err(fault);
        }
        if self.picture_alone {
            return Ok(outcome.unwrap_or_else(|_| Outcome::none()));
        }
        let outcome = outcome?;
        self.audit()?;
        Ok(outcome)
    }

    /// The sub-batch that a step means.
    fn picked(&self, who: usize, number: usize) -> Option<usize> {
        let sub_batches = self.model.sub_batches.iter().enumerate().rev();
        let has = sub_batches.filter(|(_, known)| known.hands == who && !known.freed);
        let has: Vec<_> = has.map(|(place, _)| place).collect();
        has.get(number.checked_rem(has.len())?).copied()
    }

    fn step(&mut self, who: usize, step: &Step) -> Result<Outcome, String> {
        match step {
            Step::Install { timeout_s } => {
                let timeout = Duration::from_secs(*timeout_s);
                let backend = self.vendor.backend(who);
                let told = self.transports[who].install_backend(backend, timeout);
                if told.is_ok() {
                    self.vendor.installed(who);
                }
                let expected = self.model.install(who, timeout);
                same(&told, &expected, self.calls(who)?)
            }
            Step::Allocate { capacity } => {
                let allocated = self.transports[who].allocate(*capacity);
                self.sub_batches.push(Some(allocated));
                self.model.allocate(who, *capacity);
                Ok(Outcome::none())
            }
            Step::Submit(submit) => {
                let Some(submission) = self.submission(who, submit) else {
                    return Ok(Outcome::none());
                };
                self.vendor.answer_at_once(submit.orphans);
                let told = self.submit(&submission);
                let log = self.log(who)?;
                let expected = self.expect_submit(&submission, &log)?;
                same(&told, &expected, questions_first(&log))
            }
            Step::Poll { of, task, answer } => {
                let Some(of) = self.picked(who, *of) else {
                    return Ok(Outcome::none());
                };
                let sub_batch = self.sub_batches[of].as_ref().expect("it is not freed");
                let task = match *task {
                    Task::Number(number) => number,
                    Task::Nth(number) => number.checked_rem(sub_batch.len()).unwrap_or(0) as i32,
                };
                self.vendor.answer_at_once(*answer);
                let told = self.transports[who].poll(sub_batch, task);
                let log = self.log(who)?;
                // A library that blocks cannot give every answer at any time.
                let given = asked_of(&log).first().map(|asked| asked.answer);
                let expected = self.model.poll(who, of, task, given.unwrap_or(*answer));
                same(&told, &expected, calls_of(&log))
            }
            Step::Free { which, orphans } => {
                let Some(which) = self.picked(who, *which) else {
                    return Ok(Outcome::none());
                };
                self.vendor.answer_at_once(*orphans);
                let freed = self.sub_batches[which].take().expect("it is not freed");
                self.transports[who].free(freed);
                let log = self.log(who)?;
                let expected = self.model.free(who, which, &asked_of(&log))?;
                same(&Ok(()), &expected, calls_of(&log))
            }
            Step::Stray { which } => {
                if let Some(which) = self.picked(who, *which) {
                    self.model.sub_batches[which].hands = 1 - who;
                }
                Ok(Outcome::none())
            }
            Step::Quiesce(answers) => {
                let Waiting { told, waited, log } =
                    self.waiting(who, answers, Transport::quiesce)?;
                same(&told, &self.model.quiesce(who, &waited)?, calls_of(&log))
            }
            Step::Uninstall(answers) => {
                let Waiting { told, waited, log } =
                    self.waiting(who, answers, Transport::uninstall)?;
                let calls = calls_of(&log);
                let expected = self.model.uninstall(who, waited, &calls, &told)?;
                same(&told, &expected, calls)
            }
            Step::Drop(answers) => {
                let old = std::mem::take(&mut self.transports[who]);
                let end = |_: &Transport| {
                    drop(old);
                    Ok(())
                };
                let Waiting { told, waited, log } = self.waiting(who, answers, end)?;
                self.vendor.left_behind(who);
                let calls = calls_of(&log);
                let expected = self.model.drop_transport(who, waited, &calls)?;
                same(&told, &expected, calls)
            }
            Step::Register {
                ranges,
                answers,
                refuse,
            } => {
                self.vendor.refuse_register(*refuse);
                let ranges = ranges.iter().map(|range| range_of(who, *range));
                let ranges: Vec<_> = ranges.collect();
                let register = |transport: &Transport| transport.vouched_register(&ranges);
                let Waiting { told, waited, log } = self.waiting(who, answers, register)?;
                if told.is_ok() {
                    self.vendor
                        .told(who, |picture, life| picture.told_registered(life, &ranges));
                }
                let (asked, calls) = (&waited.asked, calls_of(&log));
                let expected = self
                    .model
                    .register(who, &ranges, *refuse, asked, &calls, &told)?;
                same(&told, &expected, calls)
            }
            Step::Deregister(step) => self.deregister(who, step),
            Step::Restart { peer } => {
                self.vendor.died(&self.model.peers.published(who, *peer).0);
                self.model.peers.restart(*peer);
                Ok(Outcome::none())
            }
            Step::Refresh { peer } => {
                let endpoint = self.model.peers.published(who, *peer).0;
                let asked = Instant::now();
                let told = self.transports[who].must_refresh(*peer as u64, &endpoint);
                let expected = self.model.must_refresh(who, *peer, asked, told);
                same(&Ok(told), &(Ok(expected), Vec::new()), self.calls(who)?)
            }
            Step::Pass { seconds } => {
                clock::pass(Duration::from_secs(*seconds));
                Ok(Outcome::none())
            }
        }
    }

    fn deregister(&mut self, who: usize, step: &Deregister) -> Result<Outcome, String> {
        let range = range_of(who, step.range);
        // Nobody is told what a library says to a removal that is made up for.
        let refuse = step.refuse.filter(|_| !self.model.is_condemned(who, range));
        self.vendor.refuse_deregister(refuse);
        let waits = self.model.would_wait(who, range);
        let meanwhile = step.meanwhile.as_ref().filter(|_| waits);
        let meanwhile = meanwhile.and_then(|(after, submit)| {
            let submission = self.submission(who, submit)?;
            Some((Duration::from_secs(*after), submission))
        });
        let remove = |transport: &Transport| transport.deregister(range);
        let outcome = match meanwhile {
            None => {
                let Waiting { told, waited, log } = self.waiting(who, &step.answers, remove)?;
                self.told_about_removal(who, range, step.granted, &told);
                let expected = self.model.deregister(who, range, refuse, &waited)?;
                let granted = step.granted && matches!(told, Err(Error::RegionBusy { .. }));
                same(&told, &expected, calls_of(&log))
                    .map(|outcome| outcome.which(if granted { "granted " } else { "" }))
            }
            Some((after, submission)) => {
                self.vendor.answer(&step.answers);
                self.vendor.hold(after);
                let begun = Instant::now();
                let both = self.beside(&submission, &remove);
                self.told_about_removal(who, range, step.granted, &both.waiting);
                self.expect_both(range, refuse, &submission, begun, both)
                    .map(|outcome| outcome.which("beside "))
            }
        };
        self.vendor.refuse_deregister(None);
        outcome
    }

    fn told_about_removal(
        &self,
        who: usize,
        range: Region,
        granted: bool,
        told: &Result<(), Error>,
    ) {
        let busy = matches!(told, Err(Error::RegionBusy { .. }));
        self.vendor.told(who, |picture, life| match busy {
            true => picture.told_busy(life, range, granted),
            false => picture.told_removed(life, range),
        });
    }

    /// Makes a call that waits on another thread, and a submission in the middle of
    /// it.
    fn beside(
        &self,
        submission: &Submission,
        waits: &(dyn Fn(&Transport) -> Result<(), Error> + Sync),
    ) -> Both {
        let ahead = clock::ahead();
        let transport = &self.transports[submission.who];
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                clock::set_ahead(ahead);
                (waits(transport), clock::ahead())
            });
            until("the wait to ask", || {
                waiting.is_finished() || self.vendor.held().0 > 0
            });
            clock::set_ahead(self.vendor.held().1);
            let at = Instant::now();
            let submitted = self.submit(submission);
            self.vendor.go_on();
            let (waiting, ahead) = waiting.join().expect("no panic");
            clock::set_ahead(ahead);
            Both {
                waiting,
                submitted,
                at,
            }
        })
    }

    /// What must come of a removal and a submission beside it. Which of them was
    /// first where is seen in the vendor's calls.
    fn expect_both(
        &mut self,
        range: Region,
        refuse: Option<i32>,
        submission: &Submission,
        begun: Instant,
        both: Both,
    ) -> Result<Outcome, String> {
        let who = submission.who;
        let log = self.log(who)?;
        let this = std::thread::current().id();
        let is_ours = |logged: &Logged| logged.thread == this;
        let (ours, theirs): (Vec<_>, Vec<_>) = log.iter().cloned().partition(is_ours);
        let before = log
            .iter()
            .take_while(|logged| !matches!(logged.call, Call::Submit(_)));
        let after = before.filter(|logged| !is_ours(logged)).count();
        let ended = Instant::now();
        let before = self.model.clone();
        let mut trial = |late| {
            self.model = before.clone();
            let batches = self.model.batches();
            let expected = self.expect_submit(submission, &ours)?;
            same(&both.submitted, &expected, questions_first(&ours))?;
            let waited = Waited {
                begun,
                ended,
                asked: asked_of(&theirs),
                joined: Some(Joined {
                    batches,
                    after,
                    at: both.at,
                    late,
                }),
            };
            let expected = self.model.deregister(who, range, refuse, &waited)?;
            same(&both.waiting, &expected, calls_of(&theirs))
        };
        // The sweep that began then may be about what was submitted, or not yet.
        trial(false).or_else(|why| trial(true).map_err(|_| why))
    }

    /// A submission with its addresses; None if there is nothing to submit into.
    fn submission(&mut self, who: usize, submit: &Submit) -> Option<Submission> {
        let into = self.picked(who, submit.into)?;
        let requests = submit.requests.iter();
        let requests = requests.map(|piece| (piece.clone(), self.model.addresses(who, piece)));
        Some(Submission {
            who,
            into,
            requests: requests.collect(),
            verdicts: self.vendor.possible(&submit.verdicts),
            fresh_id: self.vendor.fresh_id(who),
        })
    }

    fn submit(&self, submission: &Submission) -> Result<(), Error> {
        let who = submission.who;
        self.vendor.decide(&submission.verdicts);
        let published: Vec<_> = (0..PEERS)
            .map(|peer| self.model.peers.published(who, peer))
            .collect();
        let peers = published.iter().map(|(endpoint, problem)| Peer {
            name: "segment",
            endpoint,
            problem,
        });
        let sub_batch = &self.sub_batches[submission.into];
        let sub_batch = sub_batch.as_ref().expect("it is not freed");
        let requests = submission.requests.iter();
        let requests = requests.map(|(piece, (source, target))| Request {
            source: *source,
            target: *target,
            length: piece.length,
            peer: piece.peer as u32,
            opcode: Opcode(piece.opcode),
        });
        self.transports[who].vouched_submit(sub_batch, peers, requests)
    }

    fn expect_submit(
        &mut self,
        submission: &Submission,
        log: &[Logged],
    ) -> Result<Expected<()>, String> {
        self.model.submit(
            submission.who,
            submission.into,
            &submission.requests,
            &submission.verdicts,
            submission.fresh_id,
            &asked_of(log),
        )
    }

    /// A step that may ask about any number of batches, any number of times: the
    /// model is shown the questions.
    fn waiting(
        &self,
        who: usize,
        answers: &Answers,
        step: impl FnOnce(&Transport) -> Result<(), Error>,
    ) -> Result<Waiting, String> {
        self.vendor.answer(answers);
        let begun = Instant::now();
        let told = step(&self.transports[who]);
        let ended = Instant::now();
        let log = self.log(who)?;
        let waited = Waited {
            begun,
            ended,
            asked: asked_of(&log),
            joined: None,
        };
        Ok(Waiting { told, waited, log })
    }

    /// The calls that a step made, all of them to its own library.
    fn log(&self, who: usize) -> Result<Vec<Logged>, String> {
        let log = self.vendor.calls();
        match log.iter().find(|logged| logged.who != who) {
            Some(logged) => Err(format!("the other library is called: {:x?}", logged.call)),
            None => Ok(log),
        }
    }

    fn calls(&self, who: usize) -> Result<Vec<Call>, String> {
        Ok(calls_of(&self.log(who)?))
    }

    /// What must hold after every step.
    fn audit(&self) -> Result<(), String> {
        if let Some(misread) = self.vendor.misread() {
            return Err(format!("a slow library misreads its arguments: {misread}"));
        }
        if let Some(fault) = self.vendor.fault() {
            return Err(fault);
        }
        for (who, transport) in self.transports.iter().enumerate() {
            let outstanding = (transport.outstanding(), self.model.outstanding(who));
            if outstanding.0 != outstanding.1 {
                return Err(format!(
                    "outstanding (batches, tasks) are {:?}, should be {:?}",
                    outstanding.0, outstanding.1
                ));
            }
            if transport.endpoint().is_some() != self.model.is_installed(who) {
                return Err(format!("the endpoint is {:?}", transport.endpoint()));
            }
            let installed = self.model.is_installed(who);
            let table = (self.vendor.table(who), self.model.table(who));
            if installed && table.0 != table.1 {
                return Err(format!(
                    "the library has {:x?}, should have {:x?}",
                    table.0, table.1
                ));
            }
        }
        let sub_batches = self.sub_batches.iter().enumerate();
        for (of, sub_batch) in sub_batches.filter_map(|(of, known)| Some((of, known.as_ref()?))) {
            let known = &self.model.sub_batches[of];
            let tasks = known.tasks.len();
            let said = (sub_batch.len(), sub_batch.is_empty(), sub_batch.capacity());
            if said != (tasks, tasks == 0, known.capacity) {
                return Err(format!(
                    "sub-batch {of} says {said:?}, has {tasks} of {} tasks",
                    known.capacity
                ));
            }
            for number in 0..tasks {
                let Some(status) = self.model.terminal(of, number) else {
                    continue;
                };
                let told = self.transports[known.hands].poll(sub_batch, number as i32);
                same(&told, &(Ok(status), Vec::new()), self.calls(known.hands)?)
                    .map(|_| ())
                    .map_err(|why| format!("task {number} of {of} was over, and now {why}"))?;
            }
        }
        Ok(())
    }
}

/// What is submitted, to whom and how that is answered.
struct Submission {
    who: usize,
    into: usize,
    requests: Vec<Addressed>,
    verdicts: Vec<Verdict>,
    fresh_id: u64,
}

/// What a step that may wait was told, and what it did.
struct Waiting {
    told: Result<(), Error>,
    waited: Waited,
    log: Vec<Logged>,
}

/// What a wait and a submission in the middle of it were told.
struct Both {
    waiting: Result<(), Error>,
    submitted: Result<(), Error>,
    /// When it was submitted.
    at: Instant,
}

fn calls_of(log: &[Logged]) -> Vec<Call> {
    log.iter().map(|logged| logged.call.clone()).collect()
}

/// The calls of a submission, which may ask about other batches whenever it likes.
fn questions_first(log: &[Logged]) -> Vec<Call> {
    let is_question = |call: &Call| matches!(call, Call::Query(..));
    let (questions, others): (Vec<_>, Vec<_>) = calls_of(log).into_iter().partition(is_question);
    [questions, others].concat()
}

fn asked_of(log: &[Logged]) -> Vec<Asked> {
    let asked = |logged: &Logged| match logged.call {
        Call::Query(id, answer) => Some(Asked {
            id,
            answer,
            at: logged.at,
        }),
        _ => None,
    };
    log.iter().filter_map(asked).collect()
}

/// The calls with the removals behind the others: the picture of memory says which
/// order is right, and any of those is.
fn sorted(calls: &[Call]) -> Vec<Call> {
    let is_removal = |call: &Call| matches!(call, Call::Deregister(_));
    let (mut removals, others): (Vec<_>, Vec<_>) = calls.iter().cloned().partition(is_removal);
    removals.sort_by_key(|call| match call {
        Call::Deregister(address) => *address,
        _ => 0,
    });
    [others, removals].concat()
}

fn same<T: std::fmt::Debug>(
    told: &Result<T, Error>,
    expected: &Expected<T>,
    calls: Vec<Call>,
) -> Result<Outcome, String> {
    let (told, should) = (said(told), said(&expected.0));
    if told != should {
        return Err(format!("told {told}, should be {should}"));
    }
    if sorted(&calls) != sorted(&expected.1) {
        return Err(format!(
            "vendor calls {calls:x?}, should be {:x?}",
            expected.1
        ));
    }
    Ok(Outcome { told, calls })
}

fn said<T: std::fmt::Debug>(told: &Result<T, Error>) -> String {
    match told {
        Ok(value) => format!("Ok({value:?})"),
        Err(error) => format!("Err({:?})", timeless(error).as_ref().unwrap_or(error)),
    }
}

/// The error without what a model cannot know: how long it took, and how it is
/// worded. None if there is no such thing in it.
fn timeless(error: &Error) -> Option<Error> {
    Some(match *error {
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
        _ => return None,
    })
}
