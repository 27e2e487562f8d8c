// SPDX-License-Identifier: Apache-2.0
//! What a sequence does, and what the vendor answers meanwhile.

use std::fmt;

use memfabric_transport::{Code, Query, Region};
use proptest::prelude::*;

/// Local ranges that scripts register: two of one address, one that overlaps
/// another, and three that nobody can register.
pub const RANGES: [Region; 7] = [
    Region {
        address: 0x10_0000,
        length: 0x1000,
    },
    Region {
        address: 0x10_0000,
        length: 0x2000,
    },
    Region {
        address: 0x10_0800,
        length: 0x1000,
    },
    Region {
        address: 0x20_0000,
        length: 0x1000,
    },
    Region {
        address: 0,
        length: 16,
    },
    Region {
        address: 0x30_0000,
        length: 0,
    },
    Region {
        address: usize::MAX - 3,
        length: 16,
    },
];

/// Two transports live in a script, each with a library of its own in the same
/// process.
pub const BOTH: usize = 2;

/// A range in the memory of one of the two.
pub fn range_of(who: usize, range: usize) -> Region {
    let Region { address, length } = RANGES[range];
    Region {
        address: if range < USABLE {
            address + (who << 32)
        } else {
            address
        },
        length,
    }
}

/// So many of [`RANGES`], the first, can be registered.
const USABLE: usize = 4;

/// Peers of every call; see `Peers` for what they are.
pub const PEERS: usize = 7;
/// The transport itself, and the other one.
pub const SELF: usize = 3;
pub const OTHER: usize = 6;

/// One step of one transport. Sub-batches are picked by number among those that it
/// has then, the latest first, modulo their count; a step without a sub-batch to
/// pick does nothing.
#[derive(Clone)]
pub enum Step {
    /// Installs over the vendor, with this timeout.
    Install {
        timeout_s: u64,
    },
    /// Allocates a sub-batch.
    Allocate {
        capacity: usize,
    },
    Submit(Submit),
    /// Polls a task.
    Poll {
        of: usize,
        task: Task,
        answer: Answer,
    },
    /// Frees a sub-batch, whatever is outstanding. About the batches of those that
    /// were freed before the vendor answers this, if it is asked.
    Free {
        which: usize,
        orphans: Answer,
    },
    /// Gives a sub-batch to the other transport, which does not own it.
    Stray {
        which: usize,
    },
    /// Quiesces.
    Quiesce(Answers),
    /// Registers ranges by their position in [`RANGES`]; None is success.
    Register {
        ranges: Vec<usize>,
        answers: Answers,
        refuse: Option<i32>,
    },
    Deregister(Deregister),
    /// Uninstalls.
    Uninstall(Answers),
    /// Drops the transport in whatever state it is, and makes a new one.
    Drop(Answers),
    /// A peer dies and comes back on another port.
    Restart {
        peer: usize,
    },
    /// Asks whether a peer's cached description must be dropped.
    Refresh {
        peer: usize,
    },
    /// Time goes by.
    Pass {
        seconds: u64,
    },
}

/// Submits; the vendor answers its groups in turn, the last verdict again and
/// again, and about batches of freed sub-batches, if it is asked, as said.
#[derive(Clone)]
pub struct Submit {
    pub into: usize,
    pub requests: Vec<Piece>,
    pub verdicts: Vec<Verdict>,
    pub orphans: Answer,
}

/// Deregisters a range.
#[derive(Clone)]
pub struct Deregister {
    pub range: usize,
    pub answers: Answers,
    pub refuse: Option<i32>,
    /// Whether the caller unmaps the range also if it is busy, as TENT's does.
    pub granted: bool,
    /// What another thread submits after so many seconds of the wait.
    pub meanwhile: Option<(u64, Submit)>,
}

/// Which task is polled.
#[derive(Clone, Copy, Debug)]
pub enum Task {
    /// One that there is, modulo their count.
    Nth(usize),
    /// This number, whatever there is.
    Number(i32),
}

/// One request.
#[derive(Clone)]
pub struct Piece {
    /// Position in the call's peers; [`PEERS`] is past its end.
    pub peer: usize,
    /// 0 and 1 are opcodes, 2 is none.
    pub opcode: u8,
    pub source: Source,
    pub target: Target,
    pub length: usize,
}

#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// In the memory of the transport, or beside it.
    Near(Place),
    At(usize),
}

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// Every such request has a target of its own.
    Own,
    /// In the peer's memory, or beside it; numbers without a meaning where the peer
    /// is another process.
    Near(Place),
    Null,
    Wrapping,
}

/// So many blocks behind the byte before the block that begins or ends a range.
#[derive(Clone, Copy)]
pub struct Place {
    pub range: usize,
    pub end: bool,
    pub blocks: usize,
}

impl Place {
    pub fn address(self, who: usize) -> usize {
        let region = range_of(who, self.range);
        let edge = region.address + if self.end { region.length } else { 0 };
        edge + self.blocks * BLOCK - BLOCK
    }
}

/// What the vendor says to a submission.
#[derive(Clone, Copy)]
pub enum Verdict {
    /// Accepted, with an id that is new in the script.
    Accept,
    /// Accepted with this id, which another batch may have as well.
    AcceptAs(u64),
    /// Refused. No code makes a refusal a success, not even 0.
    Refuse(i32),
    /// Refused, and perhaps taken in part.
    Doubt(i32),
}

/// What the vendor says to a question.
#[derive(Clone, Copy, PartialEq)]
pub enum Answer {
    Pending,
    /// Ended with this result, known or not.
    Done(i32),
    /// The question failed with this code, known or not.
    Error(i32),
}

impl Answer {
    pub fn query(self) -> Query {
        match self {
            Self::Pending => Query::Pending,
            Self::Done(code) => Query::Done(Code(code)),
            Self::Error(code) => Query::Error(Code(code)),
        }
    }
}

impl From<Query> for Answer {
    fn from(query: Query) -> Self {
        match query {
            Query::Pending => Self::Pending,
            Query::Done(Code(code)) => Self::Done(code),
            Query::Error(Code(code)) => Self::Error(code),
        }
    }
}

/// The vendor's answers during a step that may ask about several batches, more
/// than once: a batch is pending so many times, then what its id says.
#[derive(Clone)]
pub struct Answers {
    pub pending_first: usize,
    pub by_id: Vec<Answer>,
    /// Seconds that each question takes.
    pub each_takes: u64,
    /// What is said after a fence, if it can end anything.
    pub fenced: Option<Answer>,
}

impl Answers {
    pub fn always(answer: Answer) -> Self {
        Self {
            pending_first: 0,
            by_id: vec![answer],
            each_takes: 50,
            fenced: None,
        }
    }

    pub fn about(&self, id: u64) -> Answer {
        self.by_id[(id % self.by_id.len() as u64) as usize]
    }
}

/// A whole sequence, each step with whose it is; prints as one line a step.
#[derive(Clone)]
pub struct Script(pub Vec<(usize, Step)>);

impl Script {
    /// Steps of the first transport alone.
    pub fn of_one(steps: impl IntoIterator<Item = Step>) -> Self {
        Self(steps.into_iter().map(|step| (0, step)).collect())
    }

    pub fn any(steps: usize) -> impl Strategy<Value = Self> {
        // Most sequences begin with what the engine begins with; the others
        // come to it by chance.
        let opening = prop_oneof![
            9 => life(),
            1 => Just(Vec::new()),
        ];
        let alone = prop_oneof![2 => Just(true), 1 => Just(false)];
        let rest = prop::collection::vec((0..3usize, some_steps()), 1..steps);
        (opening.clone(), opening, alone, rest).prop_map(|(first, second, alone, rest)| {
            let whose = |number: usize| if alone { 0 } else { number / 2 };
            let mut steps: Vec<_> = rest
                .into_iter()
                .map(|(number, steps)| (whose(number), steps))
                .collect();
            if !alone {
                steps.insert(0, (1, second));
            }
            steps.insert(0, (0, first));
            let each =
                |(who, steps): (usize, Vec<Step>)| steps.into_iter().map(move |step| (who, step));
            Self(steps.into_iter().flat_map(each).collect())
        })
    }
}

/// The beginning of a transport's life.
fn life() -> BoxedStrategy<Vec<Step>> {
    (install(), 2..20usize)
        .prop_map(|(install, capacity)| vec![install, Step::Allocate { capacity }])
        .boxed()
}

/// One step; or steps that belong together, for little happens to a transport
/// that is down and to a sub-batch without tasks.
fn some_steps() -> BoxedStrategy<Vec<Step>> {
    let next_life = |end: BoxedStrategy<Step>| {
        (end, life()).prop_map(|(end, begin)| [vec![end], begin].concat())
    };
    let polled = prop::collection::vec(poll(), 0..6);
    let another = (prop::bool::ANY, free(), 2..12usize).prop_map(|(free, which, capacity)| {
        let free = free.then_some(which);
        free.into_iter()
            .chain([Step::Allocate { capacity }])
            .collect::<Vec<_>>()
    });
    prop_oneof![
        40 => step().prop_map(|step| vec![step]),
        12 => (submit(), polled)
            .prop_map(|(submit, polls)| [vec![Step::Submit(submit)], polls].concat()),
        6 => (another, submit())
            .prop_map(|(another, submit)| [another, vec![Step::Submit(submit)]].concat()),
        4 => used_range(),
        3 => taken_for_granted(),
        3 => ranges_with_batches(),
        1 => next_life(answers().prop_map(Step::Uninstall).boxed()),
        1 => next_life(Just(Step::Uninstall(Answers::always(Answer::Done(0)))).boxed()),
        1 => next_life(answers().prop_map(Step::Drop).boxed()),
    ]
    .boxed()
}

/// A range that is registered, perhaps used by what is submitted then, and taken
/// back.
fn used_range() -> BoxedStrategy<Vec<Step>> {
    (range(), submit(), deregister(range()))
        .prop_map(|(range, submit, deregister)| {
            vec![
                register(range),
                Step::Submit(submit),
                Step::Deregister(Deregister {
                    range,
                    ..deregister
                }),
            ]
        })
        .boxed()
}

/// A range is used and taken back; whatever was said to that, its memory becomes
/// other memory, which is registered, used and taken back.
fn taken_for_granted() -> BoxedStrategy<Vec<Step>> {
    let meanwhile = prop::collection::vec(
        prop_oneof![4 => poll(), 1 => free(), 1 => allocate(), 1 => pass()],
        0..4,
    );
    let first = range().prop_flat_map(|range| (Just(range), inside(range)));
    let again = (range(), answers(), refusal());
    let removals = (deregister(range()), deregister(range()));
    (first, meanwhile, again, submit(), removals)
        .prop_map(
            |((old, used), meanwhile, (new, answers, refuse), submit, (removal, last))| {
                let busy = Deregister {
                    range: old,
                    granted: true,
                    ..removal
                };
                let anew = Step::Register {
                    ranges: vec![new],
                    answers,
                    refuse,
                };
                let begin = vec![
                    Step::Allocate { capacity: 4 },
                    register(old),
                    Step::Submit(used),
                    Step::Deregister(busy),
                ];
                let last = Deregister { range: new, ..last };
                let end = vec![anew, Step::Submit(submit), Step::Deregister(last)];
                [begin, meanwhile, end].concat()
            },
        )
        .boxed()
}

/// Several ranges, a batch or two in each, and their removal one after the other;
/// then, perhaps, the end.
fn ranges_with_batches() -> BoxedStrategy<Vec<Step>> {
    let used = prop_oneof![2 => Just(0), 1 => Just(1), 2 => Just(3usize)]
        .prop_flat_map(|range| (inside(range), prop::option::of(inside(range)), pass()));
    let removed = deregister(prop_oneof![1 => Just(0), 1 => Just(3usize)]);
    let end = prop_oneof![
        2 => Just(Vec::new()),
        1 => answers().prop_map(|answers| vec![Step::Uninstall(answers)]),
        1 => answers().prop_map(|answers| vec![Step::Drop(answers)]),
    ];
    (
        prop::collection::vec(used, 1..4),
        prop::collection::vec(removed, 1..4),
        end,
    )
        .prop_map(|(used, removed, end)| {
            let registered = [Step::Allocate { capacity: 8 }, register(0), register(3)];
            let used = used.into_iter().flat_map(|(one, another, pass)| {
                let another = another.map(|another| [Step::Submit(another), pass]);
                std::iter::once(Step::Submit(one)).chain(another.into_iter().flatten())
            });
            let removed = removed.into_iter().map(Step::Deregister);
            registered
                .into_iter()
                .chain(used)
                .chain(removed)
                .chain(end)
                .collect()
        })
        .boxed()
}

fn register(range: usize) -> Step {
    Step::Register {
        ranges: vec![range],
        answers: Answers::always(Answer::Pending),
        refuse: None,
    }
}

/// A batch that uses a range, at one end of it or the other.
fn inside(range: usize) -> BoxedStrategy<Submit> {
    let place = (1..6usize).prop_map(move |blocks| Place {
        range,
        end: false,
        blocks,
    });
    let opcode = 0..2u8;
    (place, piece(), opcode, orphans(), prop::bool::weighted(0.3))
        .prop_map(|(place, piece, opcode, orphans, to_oneself)| {
            let piece = Piece {
                opcode,
                length: BLOCK,
                ..piece
            };
            let piece = match to_oneself {
                true => Piece {
                    peer: SELF,
                    source: Source::At(0x50_0000),
                    target: Target::Near(place),
                    ..piece
                },
                false => Piece {
                    peer: piece.peer % 3,
                    source: Source::Near(place),
                    target: Target::Own,
                    ..piece
                },
            };
            Submit {
                into: 0,
                requests: vec![piece],
                verdicts: vec![Verdict::Accept],
                orphans,
            }
        })
        .boxed()
}

fn install() -> impl Strategy<Value = Step> + Clone {
    // Often 0: a wait is then one sweep, and its questions are known.
    let timeout_s = prop_oneof![1 => Just(0), 1 => Just(100u64)];
    timeout_s.prop_map(|timeout_s| Step::Install { timeout_s })
}

fn step() -> BoxedStrategy<Step> {
    prop_oneof![
        2 => install(),
        2 => allocate(),
        8 => submit().prop_map(Step::Submit),
        40 => poll(),
        2 => free(),
        1 => pick().prop_map(|which| Step::Stray { which }),
        2 => answers().prop_map(Step::Quiesce),
        8 => (prop::collection::vec(any_range(), 0..4), answers(), refusal())
            .prop_map(|(ranges, answers, refuse)| Step::Register { ranges, answers, refuse }),
        10 => deregister(any_range()).prop_map(Step::Deregister),
        2 => answers().prop_map(Step::Uninstall),
        2 => (0..2usize).prop_map(|peer| Step::Restart { peer }),
        8 => (0..PEERS).prop_map(|peer| Step::Refresh { peer }),
        2 => pass(),
    ]
    .boxed()
}

fn allocate() -> impl Strategy<Value = Step> {
    (0..12usize).prop_map(|capacity| Step::Allocate { capacity })
}

fn free() -> impl Strategy<Value = Step> {
    (pick(), orphans()).prop_map(|(which, orphans)| Step::Free { which, orphans })
}

fn pass() -> impl Strategy<Value = Step> {
    prop::sample::select(vec![10, 50, 200]).prop_map(|seconds| Step::Pass { seconds })
}

fn deregister(range: impl Strategy<Value = usize> + 'static) -> BoxedStrategy<Deregister> {
    let meanwhile = (prop::sample::select(vec![0, 60]), submit());
    let meanwhile = prop_oneof![2 => Just(None), 1 => meanwhile.prop_map(Some)];
    let granted = prop::bool::ANY;
    (range, answers(), refusal(), granted, meanwhile)
        .prop_map(|(range, answers, refuse, granted, meanwhile)| Deregister {
            range,
            answers,
            refuse,
            granted,
            meanwhile,
        })
        .boxed()
}

fn submit() -> BoxedStrategy<Submit> {
    let mixed = prop::collection::vec(piece(), 0..7);
    // Most calls of an engine are of one kind.
    let alike = mixed.clone().prop_map(|mut pieces| {
        if let Some(Piece { peer, opcode, .. }) = pieces.first().cloned() {
            for piece in &mut pieces {
                (piece.peer, piece.opcode) = (peer, opcode);
            }
        }
        pieces
    });
    let requests = prop_oneof![2 => mixed, 1 => alike];
    let verdicts = prop::collection::vec(verdict(), 1..4);
    (pick(), requests, verdicts, orphans())
        .prop_map(|(into, requests, verdicts, orphans)| Submit {
            into,
            requests,
            verdicts,
            orphans,
        })
        .boxed()
}

fn poll() -> BoxedStrategy<Step> {
    let task = prop_oneof![
        40 => (0..6usize).prop_map(Task::Nth),
        3 => prop::sample::select(vec![-1, i32::MIN, i32::MAX, 6, 0]).prop_map(Task::Number),
    ];
    (pick(), task, answer())
        .prop_map(|(of, task, answer)| Step::Poll { of, task, answer })
        .boxed()
}

fn pick() -> impl Strategy<Value = usize> {
    prop_oneof![6 => Just(0), 3 => Just(1), 1 => 2..4usize]
}

fn piece() -> BoxedStrategy<Piece> {
    (
        prop_oneof![
            150 => 0..SELF,
            30 => Just(SELF),
            12 => Just(OTHER),
            12 => SELF + 1..OTHER,
            1 => Just(PEERS),
        ],
        prop_oneof![200 => 0..2u8, 1 => Just(2u8)],
        source(),
        prop_oneof![
            14 => Just(Target::Own),
            6 => place().prop_map(Target::Near),
            1 => Just(Target::Null),
            1 => Just(Target::Wrapping),
        ],
        prop_oneof![
            2 => Just(0),
            9 => prop::sample::select(vec![1, BLOCK - 1, BLOCK, BLOCK + 1]),
            3 => 1..4 * BLOCK,
            1 => Just(5 << 30),
        ],
    )
        .prop_map(|(peer, opcode, source, target, length)| Piece {
            peer,
            opcode,
            source,
            target,
            length,
        })
        .boxed()
}

/// Where two ranges and a request can miss each other by a byte.
pub const BLOCK: usize = 0x80;

/// In the ranges, across their ends, beside them; and nowhere.
fn source() -> impl Strategy<Value = Source> + Clone {
    prop_oneof![
        16 => place().prop_map(Source::Near),
        4 => Just(Source::At(0x50_0000)),
        1 => Just(Source::At(0)),
        1 => Just(Source::At(usize::MAX - 3)),
    ]
}

fn place() -> impl Strategy<Value = Place> + Clone {
    (range(), prop::bool::ANY, 0..3usize).prop_map(|(range, end, blocks)| Place {
        range,
        end,
        blocks,
    })
}

/// A range that can be registered.
fn range() -> impl Strategy<Value = usize> + Clone {
    prop_oneof![3 => Just(0), 1 => Just(1), 1 => Just(2), 1 => Just(3usize)]
}

/// Any range.
fn any_range() -> impl Strategy<Value = usize> {
    prop_oneof![9 => range(), 1 => USABLE..RANGES.len()]
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        16 => Just(Verdict::Accept),
        1 => prop_oneof![0..3u64, Just(u64::MAX)].prop_map(Verdict::AcceptAs),
        2 => code().prop_map(Verdict::Refuse),
        1 => code().prop_map(Verdict::Doubt),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        4 => Just(Answer::Pending),
        3 => Just(Answer::Done(0)),
        2 => code().prop_map(Answer::Done),
        2 => code().prop_map(Answer::Error),
    ]
}

/// Whatever is answered about batches that nobody asks for any more.
fn orphans() -> impl Strategy<Value = Answer> {
    prop_oneof![1 => Just(Answer::Pending), 1 => answer()]
}

fn answers() -> BoxedStrategy<Answers> {
    (
        prop_oneof![9 => Just(0), 1 => 1..3usize],
        prop::collection::vec(answer(), 1..4),
        prop::sample::select(vec![40, 50, 50, 150]),
        prop_oneof![2 => Just(None), 1 => code().prop_map(|code| Some(Answer::Done(code)))],
    )
        .prop_map(|(pending_first, by_id, each_takes, fenced)| Answers {
            pending_first,
            by_id,
            each_takes,
            fenced,
        })
        .boxed()
}

/// Codes that the library has, that it has not, and that a refusal, a result or
/// an error should not be.
fn code() -> impl Strategy<Value = i32> {
    prop::sample::select(vec![
        0,
        1,
        -1,
        -2000,
        -2007,
        -2012,
        -2014,
        42,
        i32::MIN,
        i32::MAX,
    ])
}

fn refusal() -> impl Strategy<Value = Option<i32>> {
    prop_oneof![3 => Just(None), 1 => Just(Some(-2001))]
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (who, step)) in self.0.iter().enumerate() {
            let who = ["", "the other: "][*who];
            write!(f, "\n  {number:2} {who}{step:?}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Install { timeout_s } => write!(f, "install, timeout {timeout_s} s"),
            Self::Allocate { capacity } => write!(f, "allocate {capacity}"),
            Self::Submit(submit) => write!(f, "submit {submit:?}"),
            Self::Poll { of, task, answer } => {
                write!(f, "poll task {task:?} of {of}, vendor {answer:?}")
            }
            Self::Free { which, orphans } => write!(f, "free {which}, vendor {orphans:?}"),
            Self::Stray { which } => write!(f, "stray {which}"),
            Self::Quiesce(answers) => write!(f, "quiesce, vendor {answers:?}"),
            Self::Register {
                ranges,
                answers,
                refuse,
            } => {
                let ranges: Vec<_> = ranges.iter().map(|range| Shown(*range)).collect();
                write!(
                    f,
                    "register {ranges:?}, vendor {answers:?}, refused {refuse:?}"
                )
            }
            Self::Deregister(deregister) => write!(f, "deregister {deregister:?}"),
            Self::Uninstall(answers) => write!(f, "uninstall, vendor {answers:?}"),
            Self::Drop(answers) => write!(f, "drop the transport, vendor {answers:?}"),
            Self::Restart { peer } => write!(f, "peer {peer} restarts"),
            Self::Refresh { peer } => write!(f, "must peer {peer} be refreshed?"),
            Self::Pass { seconds } => write!(f, "{seconds} s go by"),
        }
    }
}

/// A range as text.
struct Shown(usize);

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Region { address, length } = RANGES[self.0];
        write!(f, "{address:#x}+{length:#x}")
    }
}

impl fmt::Debug for Deregister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            range,
            answers,
            refuse,
            granted,
            meanwhile,
        } = self;
        let range = Shown(*range);
        write!(f, "{range:?}, vendor {answers:?}, refused {refuse:?}")?;
        if *granted {
            write!(f, ", taken for granted")?;
        }
        match meanwhile {
            Some((after, submit)) => write!(f, ", after {after} s submit {submit:?}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Submit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            into,
            requests,
            verdicts,
            orphans,
        } = self;
        write!(f, "into {into}: {requests:?}, vendor {verdicts:?}")?;
        match orphans {
            Answer::Pending => Ok(()),
            answer => write!(f, ", of orphans {answer:?}"),
        }
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = match self.opcode {
            0 => "READ",
            1 => "WRITE",
            _ => "opcode 2",
        };
        match self.peer {
            SELF => write!(f, "{direction} oneself ")?,
            OTHER => write!(f, "{direction} the other transport ")?,
            peer => write!(f, "{direction} peer {peer} ")?,
        }
        match self.source {
            Source::At(address) => write!(f, "{address:#x}")?,
            Source::Near(place) => write!(f, "{place:?}")?,
        }
        write!(f, "+{:#x}", self.length)?;
        match self.target {
            Target::Own => Ok(()),
            Target::Near(place) => write!(f, " target {place:?}"),
            Target::Null => write!(f, " target null"),
            Target::Wrapping => write!(f, " target wraps"),
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address(0))
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => write!(f, "accepts"),
            Self::AcceptAs(id) => write!(f, "accepts as {id}"),
            Self::Refuse(code) => write!(f, "refuses {code}"),
            Self::Doubt(code) => write!(f, "refuses {code}, perhaps in part"),
        }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending => write!(f, "pending"),
            Self::Done(code) => write!(f, "done {code}"),
            Self::Error(code) => write!(f, "error {code}"),
        }
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pending_first {
            0 => write!(f, "{:?} by id", self.by_id)?,
            first => write!(f, "pending {first} times, then {:?} by id", self.by_id)?,
        }
        write!(f, " in {} s", self.each_takes)?;
        match self.fenced {
            None => Ok(()),
            Some(answer) => write!(f, ", fenced {answer:?}"),
        }
    }
}
