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

/// Peers of every call; see `Peers` for what they are.
pub const PEERS: usize = 6;

/// One step. Sub-batches are picked by number among those that exist then, the
/// latest first, modulo their count; a step without a sub-batch to pick does
/// nothing.
#[derive(Clone)]
pub enum Step {
    /// Installs over the vendor, with this timeout.
    Install { timeout_ms: u64 },
    /// Allocates a sub-batch.
    Allocate { capacity: usize },
    /// Submits; the vendor answers its groups in turn, the last verdict again
    /// and again.
    Submit {
        into: usize,
        requests: Vec<Piece>,
        verdicts: Vec<Verdict>,
    },
    /// Polls a task.
    Poll {
        of: usize,
        task: Task,
        answer: Answer,
    },
    /// Frees a sub-batch, whatever is outstanding.
    Free { which: usize },
    /// Quiesces.
    Quiesce(Answers),
    /// Registers ranges by their position in [`RANGES`]; None is success.
    Register {
        ranges: Vec<usize>,
        refuse: Option<i32>,
    },
    /// Deregisters a range.
    Deregister {
        range: usize,
        answers: Answers,
        refuse: Option<i32>,
    },
    /// Uninstalls.
    Uninstall(Answers),
    /// Drops the transport in whatever state it is, and makes a new one.
    Drop(Answers),
    /// A peer comes back on another port.
    Restart { peer: usize },
    /// Asks whether a peer's cached description must be dropped.
    Refresh { peer: usize },
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
    pub source: usize,
    /// Every request has a target of its own, but for null and wrapping ones.
    pub target: Target,
    pub length: usize,
}

#[derive(Clone, Copy, Debug)]
pub enum Target {
    Own,
    Null,
    Wrapping,
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

/// The vendor's answers during a step that may ask about several batches, more
/// than once: a batch is pending so many times, then what its id says.
#[derive(Clone)]
pub struct Answers {
    pub pending_first: usize,
    pub by_id: Vec<Answer>,
}

impl Answers {
    pub fn always(answer: Answer) -> Self {
        Self {
            pending_first: 0,
            by_id: vec![answer],
        }
    }

    pub fn about(&self, id: u64) -> Answer {
        self.by_id[(id % self.by_id.len() as u64) as usize]
    }
}

/// A whole sequence; prints as one line a step.
#[derive(Clone)]
pub struct Script(pub Vec<Step>);

impl Script {
    pub fn any(steps: usize) -> impl Strategy<Value = Self> {
        // Most sequences begin with what the engine begins with; the others
        // come to it by chance.
        let opening = prop_oneof![
            9 => life(),
            1 => Just(Vec::new()),
        ];
        let rest = prop::collection::vec(some_steps(), 1..steps);
        (opening, rest).prop_map(|(opening, rest)| {
            Self(std::iter::once(opening).chain(rest).flatten().collect())
        })
    }
}

/// The beginning of a transport's life.
fn life() -> impl Strategy<Value = Vec<Step>> {
    (install(), 2..20usize)
        .prop_map(|(install, capacity)| vec![install, Step::Allocate { capacity }])
}

/// One step; or steps that belong together, for little happens to a transport
/// that is down and to a sub-batch without tasks.
fn some_steps() -> impl Strategy<Value = Vec<Step>> {
    let next_life = |end: BoxedStrategy<Step>| {
        (end, life()).prop_map(|(end, begin)| [vec![end], begin].concat())
    };
    let polled = prop::collection::vec(poll(), 0..6);
    let another = (prop::bool::ANY, pick(), 2..12usize).prop_map(|(free, which, capacity)| {
        let free = free.then_some(Step::Free { which });
        free.into_iter()
            .chain([Step::Allocate { capacity }])
            .collect::<Vec<_>>()
    });
    prop_oneof![
        40 => step().prop_map(|step| vec![step]),
        12 => (submit(), polled).prop_map(|(submit, polls)| [vec![submit], polls].concat()),
        6 => (another, submit()).prop_map(|(another, submit)| [another, vec![submit]].concat()),
        4 => used_range(),
        1 => next_life(answers().prop_map(Step::Uninstall).boxed()),
        1 => next_life(Just(Step::Uninstall(Answers::always(Answer::Done(0)))).boxed()),
        1 => next_life(answers().prop_map(Step::Drop).boxed()),
    ]
}

/// A range that is registered, perhaps used by what is submitted then, and taken
/// back.
fn used_range() -> impl Strategy<Value = Vec<Step>> {
    let deregister = (answers(), refusal());
    (range(), submit(), deregister).prop_map(|(range, submit, (answers, refuse))| {
        vec![
            Step::Register {
                ranges: vec![range],
                refuse: None,
            },
            submit,
            Step::Deregister {
                range,
                answers,
                refuse,
            },
        ]
    })
}

fn install() -> impl Strategy<Value = Step> {
    // Nearly always 0: a wait is then one sweep, and its questions are known.
    let timeout_ms = prop_oneof![9 => Just(0), 1 => 1..3u64];
    timeout_ms.prop_map(|timeout_ms| Step::Install { timeout_ms })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => install(),
        1 => (0..12usize).prop_map(|capacity| Step::Allocate { capacity }),
        4 => submit(),
        20 => poll(),
        1 => pick().prop_map(|which| Step::Free { which }),
        1 => answers().prop_map(Step::Quiesce),
        4 => (prop::collection::vec(any_range(), 0..4), refusal())
            .prop_map(|(ranges, refuse)| Step::Register { ranges, refuse }),
        5 => (any_range(), answers(), refusal()).prop_map(|(range, answers, refuse)| {
            Step::Deregister {
                range,
                answers,
                refuse,
            }
        }),
        1 => answers().prop_map(Step::Uninstall),
        1 => (0..2usize).prop_map(|peer| Step::Restart { peer }),
        4 => (0..PEERS).prop_map(|peer| Step::Refresh { peer }),
    ]
}

fn submit() -> impl Strategy<Value = Step> {
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
    (pick(), requests, verdicts).prop_map(|(into, requests, verdicts)| Step::Submit {
        into,
        requests,
        verdicts,
    })
}

fn poll() -> impl Strategy<Value = Step> {
    let task = prop_oneof![
        40 => (0..6usize).prop_map(Task::Nth),
        3 => prop::sample::select(vec![-1, i32::MIN, i32::MAX, 6, 0]).prop_map(Task::Number),
    ];
    (pick(), task, answer()).prop_map(|(of, task, answer)| Step::Poll { of, task, answer })
}

fn pick() -> impl Strategy<Value = usize> {
    prop_oneof![6 => Just(0), 3 => Just(1), 1 => 2..4usize]
}

fn piece() -> impl Strategy<Value = Piece> + Clone {
    (
        prop_oneof![160 => 0..3usize, 36 => 3..PEERS, 1 => Just(PEERS)],
        prop_oneof![200 => 0..2u8, 1 => Just(2u8)],
        source(),
        prop_oneof![20 => Just(Target::Own), 1 => Just(Target::Null), 1 => Just(Target::Wrapping)],
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
}

/// Where two ranges and a request can miss each other by a byte.
const BLOCK: usize = 0x80;

/// In the ranges, across their ends, beside them; and nowhere.
fn source() -> impl Strategy<Value = usize> + Clone {
    let edges = (range(), prop::bool::ANY, 0..3usize).prop_map(|(range, end, blocks)| {
        let region = RANGES[range];
        let edge = region.address + if end { region.length } else { 0 };
        edge + blocks * BLOCK - BLOCK
    });
    prop_oneof![
        16 => edges,
        4 => Just(0x50_0000),
        1 => Just(0),
        1 => Just(usize::MAX - 3),
    ]
}

/// A range that can be registered.
fn range() -> impl Strategy<Value = usize> + Clone {
    prop_oneof![3 => Just(0), 1 => Just(1), 1 => Just(2), 1 => Just(3usize)]
}

/// Any range.
fn any_range() -> impl Strategy<Value = usize> {
    prop_oneof![9 => range(), 1 => 4..RANGES.len()]
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        16 => Just(Verdict::Accept),
        1 => prop_oneof![0..3u64, Just(u64::MAX)].prop_map(Verdict::AcceptAs),
        2 => code().prop_map(Verdict::Refuse),
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

fn answers() -> impl Strategy<Value = Answers> {
    (
        prop_oneof![9 => Just(0), 1 => 1..3usize],
        prop::collection::vec(answer(), 1..4),
    )
        .prop_map(|(pending_first, by_id)| Answers {
            pending_first,
            by_id,
        })
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
        for (number, step) in self.0.iter().enumerate() {
            write!(f, "\n  {number:2} {step:?}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Install { timeout_ms } => write!(f, "install, timeout {timeout_ms} ms"),
            Self::Allocate { capacity } => write!(f, "allocate {capacity}"),
            Self::Submit {
                into,
                requests,
                verdicts,
            } => write!(f, "submit into {into}: {requests:?}, vendor {verdicts:?}"),
            Self::Poll { of, task, answer } => {
                write!(f, "poll task {task:?} of {of}, vendor {answer:?}")
            }
            Self::Free { which } => write!(f, "free {which}"),
            Self::Quiesce(answers) => write!(f, "quiesce, vendor {answers:?}"),
            Self::Register { ranges, refuse } => {
                let ranges: Vec<_> = ranges.iter().map(|range| RANGES[*range]).collect();
                write!(f, "register {ranges:x?}, refused {refuse:?}")
            }
            Self::Deregister {
                range,
                answers,
                refuse,
            } => {
                let range = RANGES[*range];
                write!(
                    f,
                    "deregister {range:x?}, vendor {answers:?}, refused {refuse:?}"
                )
            }
            Self::Uninstall(answers) => write!(f, "uninstall, vendor {answers:?}"),
            Self::Drop(answers) => write!(f, "drop the transport, vendor {answers:?}"),
            Self::Restart { peer } => write!(f, "peer {peer} restarts"),
            Self::Refresh { peer } => write!(f, "must peer {peer} be refreshed?"),
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
        write!(f, "{direction} peer {} ", self.peer)?;
        write!(f, "{:#x}+{:#x}", self.source, self.length)?;
        match self.target {
            Target::Own => Ok(()),
            target => write!(f, " target {target:?}"),
        }
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => write!(f, "accepts"),
            Self::AcceptAs(id) => write!(f, "accepts as {id}"),
            Self::Refuse(code) => write!(f, "refuses {code}"),
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
            0 => write!(f, "{:?} by id", self.by_id),
            first => write!(f, "pending {first} times, then {:?} by id", self.by_id),
        }
    }
}
