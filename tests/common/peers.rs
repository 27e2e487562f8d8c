// SPDX-License-Identifier: Apache-2.0
//! Processes with a transport over the published library, and memory of which
//! every byte is known.
#![allow(unsafe_code)] // maps memory

use std::fs;
use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use memfabric_transport::config::TentSettings;
use memfabric_transport::{
    Config, LogLevel, Opcode, Region, Request, SubBatch, TaskStatus, Transport,
};

use super::emulator::{Process, listen, say};
use super::published::LIBRARY;
use super::{
    FOREVER, Random, VouchedTransport, completed, finish_within, peer, read, until, write,
};

/// Of the library's own two megabytes, so that it widens no range.
pub const LENGTH: usize = 2 << 20;

pub const STORE: &str = "tcp://127.0.0.1:12000";
const SETTINGS: [(&str, &str); 5] = [
    ("MF_ABI", "v1"),
    ("MF_PROTOCOL", "host_tcp"),
    ("MF_CONFIG_STORE_URL", STORE),
    // Far more than the library takes to tell of a region on a busy machine.
    ("MF_VISIBILITY_PATIENCE", "5000"),
    ("MF_TRANSFER_TIMEOUT", "30000"),
];
pub const SENDER: (&str, &str) = ("MF_ROLE", "sender");
pub const RECEIVER: (&str, &str) = ("MF_ROLE", "receiver");
pub const HOSTS_STORE: (&str, &str) = ("MF_CONFIG_STORE_HOST", "true");
/// Port of a peer's unique id.
const PORT: &str = "PEER_PORT";
/// What a peer's memory is filled with at first.
const SEED: &str = "PEER_SEED";

/// Settings of a process: those given, the environment's, those that all have.
pub fn config(given: &[(&str, &str)]) -> Config {
    let lookup = |name: &str| {
        let find = |all: &[(&str, &str)]| {
            let found = all.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        find(given)
            .or_else(|| Config::process_environment(name))
            .or_else(|| find(&SETTINGS))
    };
    let tent = TentSettings {
        rpc_server_addr: "127.0.0.1:0".to_owned(),
        log_level: LogLevel::Warning,
        ..TentSettings::default()
    };
    let mut config = Config::resolve(lookup, &tent).expect("valid settings");
    config.library = lookup(LIBRARY)
        .expect("the tests are entered with it")
        .into();
    config
}

/// The transport of this process.
pub fn installed_as(given: &[(&str, &str)]) -> Transport {
    let transport = Transport::new();
    transport.install(&config(given)).expect("installed");
    transport
}

/// The byte at `index` of what is filled with `seed`: another one for each seed.
pub fn byte(seed: u8, index: usize) -> u8 {
    let number = index.wrapping_mul(131) + usize::from(seed) * 89 + (index >> 8);
    (number % 251) as u8
}

/// Memory that other processes read and write, so its bytes are atomics. It is
/// never freed: the library withdraws nothing, and a late write would end the
/// process.
#[derive(Clone, Copy)]
pub struct Memory(&'static [AtomicU8]);

impl Memory {
    pub fn new(seed: u8) -> Self {
        // Nothing of another range is within the two megabytes that the library
        // widens one to.
        let room = (0..2 * LENGTH).map(|_| AtomicU8::new(0));
        let room = room.collect::<Vec<_>>().leak();
        let begin = room.as_ptr().align_offset(LENGTH);
        let memory = Self(&room[begin..begin + LENGTH]);
        memory.fill(seed);
        memory
    }

    /// Memory with more than two megabytes of nothing on either side.
    fn apart(seed: u8) -> Self {
        let room = (0..6 * LENGTH).map(|_| AtomicU8::new(0));
        let room = room.collect::<Vec<_>>().leak();
        let begin = room.as_ptr().align_offset(LENGTH) + 2 * LENGTH;
        let memory = Self(&room[begin..begin + LENGTH]);
        memory.fill(seed);
        memory
    }

    pub fn address(self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    pub fn region(self) -> Region {
        Region {
            address: self.address(),
            length: LENGTH,
        }
    }

    pub fn fill(self, seed: u8) {
        for (index, place) in self.0.iter().enumerate() {
            place.store(byte(seed, index), Ordering::SeqCst);
        }
    }

    /// The first place of `range` that does not hold the bytes of `seed` from
    /// `from` on.
    pub fn mismatch(self, range: Range<usize>, seed: u8, from: usize) -> Option<usize> {
        let begin = range.start;
        range
            .into_iter()
            .find(|place| self.0[*place].load(Ordering::SeqCst) != byte(seed, from + place - begin))
    }

    /// The first place that is not as `seed` filled it.
    pub fn differs(self, seed: u8) -> Option<usize> {
        self.mismatch(0..LENGTH, seed, 0)
    }
}

/// A piece of a [`Plan`]; without an opcode it is left alone.
struct Piece {
    local: usize,
    remote: usize,
    length: usize,
    opcode: Option<Opcode>,
}

/// Transfers between two memories of which the initiator's was filled with one
/// seed and the other side's with another. The pieces cover both memories, in
/// one order here and in the other there.
pub struct Plan {
    pieces: Vec<Piece>,
    ours: u8,
    theirs: u8,
}

impl Plan {
    /// Both sides make the same plan of the same number.
    pub fn new(number: usize) -> Self {
        let mut random = Random(number as u64);
        let mut pieces = Vec::new();
        let mut local = 0;
        while local < LENGTH {
            let most = [1, 2, 64, 4096, 9001, 100_000][random.below(6)];
            let length = random.below(most).min(LENGTH - local);
            let opcode = match random.below(5) {
                0 => None,
                1 | 2 => Some(Opcode::READ),
                _ => Some(Opcode::WRITE),
            };
            pieces.push(Piece {
                local,
                remote: LENGTH - local - length,
                length,
                opcode,
            });
            local += length;
        }
        Self {
            pieces,
            ours: (number * 2 % 250) as u8,
            theirs: (number * 2 % 250 + 1) as u8,
        }
    }

    /// Fills the initiator's memory.
    pub fn prepare_ours(&self, memory: Memory) {
        memory.fill(self.ours);
    }

    /// Fills the other side's.
    pub fn prepare_theirs(&self, memory: Memory) {
        memory.fill(self.theirs);
    }

    /// The transfers, of the call's peer number `peer`.
    pub fn requests(&self, peer: u32, memory: Memory, address: usize) -> Vec<Request> {
        let transfers = self.pieces.iter().filter_map(|piece| {
            Some(Request {
                source: memory.address() + piece.local,
                target: address + piece.remote,
                length: piece.length,
                peer,
                opcode: piece.opcode?,
            })
        });
        transfers.collect()
    }

    /// The first place of the initiator's memory that is not as it must be.
    pub fn mismatch_of_ours(&self, memory: Memory) -> Option<usize> {
        self.pieces.iter().find_map(|piece| {
            let range = piece.local..piece.local + piece.length;
            match piece.opcode {
                Some(Opcode::READ) => memory.mismatch(range, self.theirs, piece.remote),
                _ => memory.mismatch(range, self.ours, piece.local),
            }
        })
    }

    /// The same of the other side's.
    pub fn mismatch_of_theirs(&self, memory: Memory) -> Option<usize> {
        self.pieces.iter().find_map(|piece| {
            let range = piece.remote..piece.remote + piece.length;
            match piece.opcode {
                Some(Opcode::WRITE) => memory.mismatch(range, self.ours, piece.local),
                _ => memory.mismatch(range, self.theirs, piece.remote),
            }
        })
    }
}

/// Submits what concerns `peers`, by endpoint.
pub fn submit(transport: &Transport, peers: &[&str], requests: &[Request]) -> SubBatch {
    let sub_batch = transport.allocate(requests.len());
    let peers = peers.iter().map(|endpoint| peer(endpoint));
    transport
        .vouched_submit(&sub_batch, peers, requests.iter().copied())
        .expect("what concerns a peer is no error of the call");
    sub_batch
}

/// Polls `task` until it is terminal, for as long as the library may block.
pub fn finish(transport: &Transport, sub_batch: &SubBatch, task: usize) -> TaskStatus {
    finish_within(2 * FOREVER, transport, sub_batch, task)
}

/// Submits `requests`, of which every one must end as COMPLETED with its bytes.
pub fn transfer(transport: &Transport, peers: &[&str], requests: &[Request]) {
    let sub_batch = submit(transport, peers, requests);
    for (task, request) in requests.iter().enumerate() {
        let status = finish(transport, &sub_batch, task);
        let length = request.length as u64;
        assert_eq!(status, completed(length), "task {task}, {request:?}");
    }
    transport.free(sub_batch);
}

/// Submits `requests` and gives the end of each.
pub fn outcomes<const N: usize>(
    transport: &Transport,
    peers: &[&str],
    requests: [Request; N],
) -> [TaskStatus; N] {
    let sub_batch = submit(transport, peers, &requests);
    let ends = std::array::from_fn(|task| finish(transport, &sub_batch, task));
    transport.free(sub_batch);
    ends
}

/// All of `memory` to or from what peer number `peer` has at `address`.
pub fn write_all(peer: u32, memory: Memory, address: usize) -> Request {
    write(peer, memory.address(), address, LENGTH)
}

pub fn read_all(peer: u32, memory: Memory, address: usize) -> Request {
    read(peer, memory.address(), address, LENGTH)
}

/// What a task of all of a memory ends as.
pub fn completed_all() -> TaskStatus {
    completed(LENGTH as u64)
}

/// Another process of the running test program, with one memory registered. It
/// goes on in [`be_a_peer`], which the program calls in an ignored test `peer`.
pub struct Neighbour {
    pub process: Process,
    pub endpoint: &'static str,
    /// Of its registered memory.
    pub address: usize,
}

impl Neighbour {
    pub fn start(variables: &[(&str, &str)], seed: u8) -> Self {
        Self::meet(Self::begin(variables, seed))
    }

    /// Receivers, each with memory filled with its seed.
    pub fn receivers<const N: usize>(seeds: [u8; N]) -> [Self; N] {
        // All of them are up before the first is waited for.
        let processes = seeds.map(|seed| Self::begin(&[RECEIVER], seed));
        processes.map(Self::meet)
    }

    fn begin(variables: &[(&str, &str)], seed: u8) -> Process {
        // It would hang at its end: it has inherited the sockets that it then
        // tries to reach this process at.
        Process::start_tied("peer", |command| {
            command.envs(variables.iter().copied());
            command.env(SEED, seed.to_string());
        })
    }

    /// A receiver whose memory is where that of the one before was, and that is
    /// known as it was, if there is one. The library keeps what a dead process
    /// had registered: where a successor's memory is elsewhere, it takes the old
    /// address, which the successor refuses without a word.
    pub fn successor(before: Option<&Self>, seed: u8) -> Self {
        let port = before.and_then(|before| before.endpoint.rsplit(':').next());
        Self::meet(Process::start_at_fixed_addresses("peer", |command| {
            command.envs([RECEIVER]).env(SEED, seed.to_string());
            command.env(PORT, port.unwrap_or("0"));
        }))
    }

    fn meet(mut process: Process) -> Self {
        let endpoint = process.hear().leak();
        let address = process.hear().parse().expect("an address");
        Self {
            process,
            endpoint,
            address,
        }
    }

    /// Its answer to a command of [`be_a_peer`].
    pub fn ask(&mut self, command: &str) -> String {
        self.process.tell(command);
        self.process.hear()
    }

    /// The first place of its memory that is not as `seed` fills it; "None" for
    /// none.
    pub fn differs(&mut self, seed: u8) -> String {
        self.ask(&format!("differs {seed}"))
    }

    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Ends without a word, as when power fails.
    pub fn kill(&mut self) {
        self.process.child.kill().expect("it is a child");
        self.process.child.wait().expect("it is a child");
    }
}

/// Ends them at once, and expects each to end well.
pub fn end_all<const N: usize>(mut neighbours: [Neighbour; N]) {
    for neighbour in &mut neighbours {
        neighbour.process.hang_up();
    }
    for neighbour in neighbours {
        neighbour.process.end();
    }
}

/// A process that is stopped and not dead, until this is dropped: nobody else
/// would let it go on if a test fails.
pub struct Stopped(u32);

impl Stopped {
    /// Kills it instead of letting it go on.
    pub fn kill(self) {
        signal(self.0, "KILL");
        // It would signal a process that does not exist.
        std::mem::forget(self);
    }

    pub fn new(pid: u32) -> Self {
        signal(pid, "STOP");
        let stopped = Self(pid);
        until("it stops", || all_threads_are_stopped(pid));
        stopped
    }
}

/// Memory of its own pages, which can be given back to the system: a late write to
/// it then ends the process.
pub struct Mapped {
    area: usize,
    memory: Memory,
}

/// More than the library widens a range by, on either side.
const AREA: usize = 4 * LENGTH;

unsafe extern "C" {
    fn mmap(at: *mut u8, length: usize, access: i32, flags: i32, file: i32, from: i64) -> *mut u8;
    fn munmap(at: *mut u8, length: usize) -> i32;
}

impl Mapped {
    pub fn new(seed: u8) -> Self {
        const READ_AND_WRITE: i32 = 3;
        const PRIVATE_AND_ANONYMOUS: i32 = 0x22;
        let nowhere = std::ptr::null_mut();
        // SAFETY: new pages, at a place that the system chooses.
        let area = unsafe { mmap(nowhere, AREA, READ_AND_WRITE, PRIVATE_AND_ANONYMOUS, -1, 0) };
        assert_ne!(area.addr(), usize::MAX, "no memory");
        let begin = area.wrapping_add(area.align_offset(LENGTH) + LENGTH);
        // SAFETY: within the pages, which hold zeros and stay until `unmap`, after
        // which there is no `memory`; nobody uses them but as atomics.
        let bytes = unsafe { std::slice::from_raw_parts(begin.cast(), LENGTH) };
        let memory = Memory(bytes);
        memory.fill(seed);
        Self {
            area: area.expose_provenance(),
            memory,
        }
    }

    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Gives it back.
    ///
    /// # Safety
    ///
    /// What [`Self::memory`] gave is not used any more.
    pub unsafe fn unmap(self) {
        let area = std::ptr::with_exposed_provenance_mut(self.area);
        // SAFETY: pages of ours; the caller's word.
        let code = unsafe { munmap(area, AREA) };
        assert_eq!(code, 0, "they are mapped");
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, "CONT");
    }
}

fn signal(pid: u32, signal: &str) {
    let script = format!("kill -{signal} {pid}");
    let status = Command::new("sh").args(["-c", &script]).status();
    assert!(status.expect("a shell").success(), "{script}");
}

fn all_threads_are_stopped(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it is a child");
    let mut states = threads.map(|thread| {
        let stat = thread.expect("a thread").path().join("stat");
        let stat = fs::read_to_string(stat).unwrap_or_default();
        // Behind the name, which is in brackets.
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('T'))
    });
    states.all(|stopped| stopped)
}

/// This process's threads that make the library's blocking calls.
pub fn copy_threads() -> usize {
    let threads = fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "memfabric-copy").count()
}

/// A peer's life: it does what its parent asks and answers with a line.
pub fn be_a_peer() {
    let variable = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u16>());
    let port = variable(PORT).map_or(0, |port| port.expect("a port"));
    let seed = variable(SEED).map_or(0, |seed| seed.expect("a seed")) as u8;
    let mut config = config(&[]);
    config.v1.as_mut().expect("MF_ABI is set").port = port;
    let transport = Transport::new();
    transport.install(&config).expect("installed");
    let mut memory = Memory::new(seed);
    transport
        .vouched_register(&[memory.region()])
        .expect("registered");
    let mut stray = None;
    say(&transport.endpoint().expect("installed"));
    say(&memory.address().to_string());
    while let Some(line) = listen() {
        let mut words = line.split(' ');
        let command = words.next().unwrap_or_default();
        let rest: Vec<&str> = words.collect();
        let number = |index: usize| -> usize { rest[index].parse().expect("a number") };
        let answer = match command {
            "fill" => {
                memory.fill(number(0) as u8);
                "filled".to_owned()
            }
            "differs" => format!("{:?}", memory.differs(number(0) as u8)),
            // From here on it is about this memory.
            "register" => {
                let fresh = Memory::new(number(0) as u8);
                match transport.vouched_register(&[fresh.region()]) {
                    Ok(()) => {
                        memory = fresh;
                        memory.address().to_string()
                    }
                    Err(error) => error.to_string(),
                }
            }
            // Memory that is not registered.
            "stray" => {
                let memory = *stray.get_or_insert_with(|| Memory::apart(seed));
                memory.address().to_string()
            }
            "stray_differs" => format!("{:?}", stray.map(|memory| memory.differs(seed))),
            "prepare" => {
                Plan::new(number(0)).prepare_theirs(memory);
                "prepared".to_owned()
            }
            "mismatch" => format!("{:?}", Plan::new(number(0)).mismatch_of_theirs(memory)),
            // The number of a plan, an endpoint, an address.
            "initiate" => {
                let plan = Plan::new(number(0));
                plan.prepare_ours(memory);
                let requests = plan.requests(0, memory, number(2));
                transfer(&transport, &[rest[1]], &requests);
                format!("{:?}", plan.mismatch_of_ours(memory))
            }
            unknown => panic!("no command {unknown}"),
        };
        say(&answer);
    }
    transport.uninstall().expect("nothing is outstanding");
}
