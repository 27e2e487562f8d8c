// SPDX-License-Identifier: Apache-2.0
//! The emulator as its users have it: a shared library, opened at run time.
#![allow(unsafe_code)] // calls the library's functions
#![allow(dead_code)] // each test program uses a part of this

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libloading::Library;
use mf_smem::abi::{BatchParams, OPCODE_READ, OPCODE_WRITE, SM_NEED_RETRY, SM_OK, TransConfig};

pub type PeerDown = unsafe extern "C" fn(*const c_char, *mut c_void);

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// The exported functions.
        pub struct Functions { $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $answer)?),* }
        impl Functions {
            fn load(library: &'static Library) -> Self {
                // SAFETY: the signatures are the exports'; the library stays open.
                Self { $($name: unsafe { *library.get(stringify!($name).as_bytes()).expect(stringify!($name)) }),* }
            }
        }
    };
}

functions! {
    smem_trans_init: fn(u32, u32) -> i32;
    smem_trans_uninit: fn(u32);
    smem_trans_config_init: fn(*mut TransConfig) -> i32;
    smem_trans_create: fn(*const TransConfig, u32) -> *mut c_void;
    smem_trans_destroy: fn(*mut c_void, u32);
    smem_trans_get_rpc_port: fn(*mut c_void, *mut u16) -> i32;
    smem_trans_register_mem: fn(*mut c_void, *mut c_void, usize, u32) -> i32;
    smem_trans_batch_register_mem: fn(*mut c_void, *mut *mut c_void, *mut usize, u32, u32) -> i32;
    smem_trans_deregister_mem: fn(*mut c_void, *mut c_void) -> i32;
    smem_trans_batch_copy: fn(*mut c_void, *mut BatchParams, *mut u64) -> i32;
    smem_trans_batch_status_query: fn(*mut c_void, u64, *mut i32, u32) -> i32;
    smem_trans_set_peer_down_callback: fn(*mut c_void, Option<PeerDown>, *mut c_void) -> i32;
    smem_set_log_level: fn(c_int) -> i32;
    mf_emu_script: fn(*const c_char) -> c_int;
    mf_emu_last_error: fn() -> *const c_char;
    mf_emu_count: fn(*const c_char) -> u64;
    mf_emu_violation: fn(u64, *mut c_char, usize) -> usize;
    mf_emu_call: fn(u64, *mut c_char, usize) -> usize;
    mf_emu_release: fn();
    mf_emu_reset: fn();
    mf_emu_peer_down: fn(*const c_char) -> u64;
    mf_emu_version: fn() -> *const c_char;
}

/// The library built with this test program.
pub fn library_path() -> std::path::PathBuf {
    let exe = std::env::current_exe().expect("a path of this program");
    let path = exe.with_file_name("libmf_smem.so");
    assert!(path.exists(), "{} is built with the tests", path.display());
    path
}

pub fn functions() -> &'static Functions {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    FUNCTIONS.get_or_init(|| {
        // SAFETY: the emulator runs no code when it is opened.
        let library = unsafe { Library::new(library_path()) }.expect("the emulator opens");
        Functions::load(Box::leak(Box::new(library)))
    })
}

fn c(text: &str) -> CString {
    CString::new(text).expect("no NUL")
}

pub fn script(rules: &str) {
    assert_eq!(try_script(rules), 0, "{rules}: {}", last_error());
}

pub fn try_script(rules: &str) -> i32 {
    // SAFETY: a terminated string.
    unsafe { (functions().mf_emu_script)(c(rules).as_ptr()) }
}

pub fn last_error() -> String {
    // SAFETY: takes nothing.
    let text = unsafe { (functions().mf_emu_last_error)() };
    // SAFETY: never NULL, and copied before this thread's next call.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

pub fn count(name: &str) -> u64 {
    // SAFETY: a terminated string.
    let count = unsafe { (functions().mf_emu_count)(c(name).as_ptr()) };
    assert_ne!(count, u64::MAX, "there is a counter {name}");
    count
}

fn text(get: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize, index: u64) -> Option<String> {
    let mut buffer = vec![0_u8; 1 << 20];
    // SAFETY: the buffer has the length given with it.
    let length = unsafe { get(index, buffer.as_mut_ptr().cast(), buffer.len()) };
    buffer.truncate(length);
    (length != 0).then(|| String::from_utf8(buffer).expect("UTF-8"))
}

pub fn violations() -> Vec<String> {
    (0..)
        .map_while(|index| text(functions().mf_emu_violation, index))
        .collect()
}

pub fn calls() -> Vec<String> {
    (0..)
        .map_while(|index| text(functions().mf_emu_call, index))
        .collect()
}

pub fn release() {
    // SAFETY: takes nothing.
    unsafe { (functions().mf_emu_release)() }
}

pub fn reset() {
    // SAFETY: takes nothing.
    unsafe { (functions().mf_emu_reset)() }
}

pub fn init() -> i32 {
    // SAFETY: plain numbers.
    unsafe { (functions().smem_trans_init)(3, 0) }
}

pub fn uninit() {
    // SAFETY: plain numbers.
    unsafe { (functions().smem_trans_uninit)(0) }
}

/// A good configuration for `url`.
pub fn config(url: &str) -> TransConfig {
    let mut config = std::mem::MaybeUninit::<TransConfig>::uninit();
    // SAFETY: room for one configuration.
    let code = unsafe { (functions().smem_trans_config_init)(config.as_mut_ptr()) };
    assert_eq!(code, SM_OK, "{}", last_error());
    // SAFETY: `config_init` fills all of it.
    let mut config = unsafe { config.assume_init() };
    config.role = 3;
    config.data_op_type = 1 << 1;
    config.device_id = 3;
    for (to, from) in config.url.iter_mut().zip(url.bytes()) {
        *to = from as c_char;
    }
    config
}

/// A handle, as a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(pub usize);

impl Handle {
    pub fn pointer(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0)
    }

    /// On a free port of 127.0.0.1.
    pub fn create() -> Self {
        let handle = Self::try_create(&config("127.0.0.1:0"));
        assert_ne!(handle.0, 0, "{}", last_error());
        handle
    }

    pub fn try_create(config: &TransConfig) -> Self {
        // SAFETY: a live configuration.
        Self(unsafe { (functions().smem_trans_create)(config, 0) }.addr())
    }

    pub fn destroy(self) {
        // SAFETY: a token, good or bad.
        unsafe { (functions().smem_trans_destroy)(self.pointer(), 0) }
    }

    pub fn port(self) -> (i32, u16) {
        let mut port = 0;
        // SAFETY: `port` is live.
        let code = unsafe { (functions().smem_trans_get_rpc_port)(self.pointer(), &mut port) };
        (code, port)
    }

    pub fn url(self) -> String {
        let (code, port) = self.port();
        assert_eq!(code, SM_OK);
        format!("127.0.0.1:{port}")
    }

    pub fn register(self, address: usize, length: usize) -> i32 {
        let address = std::ptr::without_provenance_mut(address);
        // SAFETY: the tests register memory that outlives the handle.
        unsafe { (functions().smem_trans_register_mem)(self.pointer(), address, length, 0) }
    }

    pub fn batch_register(self, ranges: &[(usize, usize)]) -> i32 {
        let mut addresses: Vec<*mut c_void> = ranges
            .iter()
            .map(|it| std::ptr::without_provenance_mut(it.0))
            .collect();
        let mut sizes: Vec<usize> = ranges.iter().map(|it| it.1).collect();
        let (addresses, sizes) = (addresses.as_mut_ptr(), sizes.as_mut_ptr());
        let register = functions().smem_trans_batch_register_mem;
        // SAFETY: two lists of that length.
        unsafe { register(self.pointer(), addresses, sizes, ranges.len() as u32, 0) }
    }

    pub fn deregister(self, address: usize) -> i32 {
        let address = std::ptr::without_provenance_mut(address);
        // SAFETY: plain values.
        unsafe { (functions().smem_trans_deregister_mem)(self.pointer(), address) }
    }

    /// Submits `(local, remote, length)` blocks; the arguments live on.
    pub fn submit(self, url: &str, opcode: u32, blocks: &[Block]) -> Result<u64, i32> {
        let arguments = Box::leak(Box::new(Arguments::new(url, opcode, blocks)));
        self.submit_arguments(arguments)
    }

    pub fn submit_arguments(self, arguments: &mut Arguments) -> Result<u64, i32> {
        let mut params = arguments.params();
        self.submit_params(&mut params)
    }

    pub fn submit_params(self, params: &mut BatchParams) -> Result<u64, i32> {
        let mut id = u64::MAX;
        // SAFETY: the caller keeps the arguments.
        match unsafe { (functions().smem_trans_batch_copy)(self.pointer(), params, &mut id) } {
            SM_OK => Ok(id),
            code => Err(code),
        }
    }

    pub fn write(self, url: &str, blocks: &[Block]) -> Result<u64, i32> {
        self.submit(url, OPCODE_WRITE, blocks)
    }

    pub fn read(self, url: &str, blocks: &[Block]) -> Result<u64, i32> {
        self.submit(url, OPCODE_READ, blocks)
    }

    /// One query: its code, and the result slot, which held [`UNWRITTEN`].
    pub fn query(self, id: u64) -> (i32, i32) {
        let mut result = UNWRITTEN;
        let query = functions().smem_trans_batch_status_query;
        // SAFETY: `result` is live.
        let code = unsafe { query(self.pointer(), id, &mut result, 0) };
        (code, result)
    }

    /// Queries until there is a result.
    pub fn result(self, id: u64) -> i32 {
        let mut answer = (SM_NEED_RETRY, 0);
        wait_for("a result", || {
            answer = self.query(id);
            answer.0 != SM_NEED_RETRY
        });
        assert_eq!(answer.0, SM_OK, "{}", last_error());
        answer.1
    }

    pub fn set_callback(self, callback: Option<PeerDown>, user: *mut c_void) -> i32 {
        let set = functions().smem_trans_set_peer_down_callback;
        // SAFETY: the tests' callbacks run anywhere.
        unsafe { set(self.pointer(), callback, user) }
    }
}

/// What the result slot holds before a query.
pub const UNWRITTEN: i32 = i32::MIN;

/// Local address, remote address, length.
pub type Block = (usize, usize, usize);

/// The arguments of a batch, in memory of their own.
pub struct Arguments {
    pub url: CString,
    pub opcode: u32,
    pub local: Vec<*mut c_void>,
    pub remote: Vec<*mut c_void>,
    pub sizes: Vec<usize>,
}

impl Arguments {
    pub fn new(url: &str, opcode: u32, blocks: &[Block]) -> Self {
        let pointer = std::ptr::without_provenance_mut;
        Self {
            url: c(url),
            opcode,
            local: blocks.iter().map(|it| pointer(it.0)).collect(),
            remote: blocks.iter().map(|it| pointer(it.1)).collect(),
            sizes: blocks.iter().map(|it| it.2).collect(),
        }
    }

    pub fn params(&mut self) -> BatchParams {
        BatchParams {
            dest_url: self.url.as_ptr(),
            src_list: self.local.as_mut_ptr(),
            dest_list: self.remote.as_mut_ptr(),
            size_list: self.sizes.as_mut_ptr(),
            batch_size: self.sizes.len() as u32,
            opcode: self.opcode,
            stream: std::ptr::null_mut(),
            flags: 0,
        }
    }
}

/// Memory for a test, never freed, so that no peer can outlive it.
pub fn memory(length: usize, fill: u8) -> &'static mut [u8] {
    vec![fill; length].leak()
}

pub fn address(memory: &[u8]) -> usize {
    memory.as_ptr().addr()
}

/// Polls until `done`; failing is a hang.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

const ISOLATED: &str = "MF_EMULATOR_TEST";

/// Runs the body of the test `name` in a process of its own, as the library's
/// counters and script belong to a process.
pub fn isolated(name: &str, body: impl FnOnce()) {
    isolated_with(name, &[], body);
}

/// The same with environment variables.
pub fn isolated_with(name: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var(ISOLATED).is_ok_and(|running| running == name) {
        return body();
    }
    let mut command = test_process(name);
    command
        .env(ISOLATED, name)
        .envs(environment.iter().copied());
    let output = command.output().expect("the test program runs");
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && out.contains("1 passed"),
        "{name}: {}\n{out}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

fn test_process(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path of this program"));
    command.args([
        name,
        "--exact",
        "--include-ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env_remove("MF_EMULATOR");
    command
}

/// Another process with a handle and one registered pool of memory, told what to
/// do by lines.
pub struct PeerProcess {
    pub child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub url: String,
    pub pool: usize,
}

/// The length of a peer's pool; all its bytes are [`POOL_FILL`] at first.
pub const POOL: usize = 1 << 20;
pub const POOL_FILL: u8 = 0x11;
/// The environment variable with another length.
pub const POOL_VARIABLE: &str = "PEER_POOL";

impl PeerProcess {
    /// Starts one. The test program must have an ignored test `peer_process`
    /// that calls [`serve_peer`].
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(environment: &[(&str, &str)]) -> Self {
        let mut command = test_process("peer_process");
        command.envs(environment.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the peer starts");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut peer = Self {
            child,
            input,
            output,
            url: String::new(),
            pool: 0,
        };
        let ready = peer.answer();
        let (url, pool) = ready.split_once(' ').expect("url and pool");
        (peer.url, peer.pool) = (url.to_owned(), pool.parse().expect("an address"));
        peer
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let length = self.output.read_line(&mut line).expect("the peer answers");
            assert_ne!(length, 0, "the peer is gone");
            if let Some((_, answer)) = line.trim().split_once("peer> ") {
                return answer.to_owned();
            }
        }
    }

    pub fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("the peer listens");
        self.answer()
    }

    /// The peer's bytes at an offset of its pool.
    pub fn bytes(&mut self, offset: usize, length: usize) -> Vec<u8> {
        let hex = self.ask(&format!("bytes {offset} {length}"));
        let digit = |i: usize| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex");
        (0..length).map(digit).collect()
    }

    /// Sends a signal, such as SIGSTOP.
    pub fn signal(&self, signal: c_int) {
        // SAFETY: plain numbers; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as _, signal) }, 0);
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("the peer can be killed");
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other side of [`PeerProcess`].
pub fn serve_peer() {
    assert_eq!(init(), SM_OK, "{}", last_error());
    let handle = Handle::create();
    assert_eq!(
        handle.set_callback(Some(ignore_down), std::ptr::null_mut()),
        SM_OK
    );
    let length = std::env::var(POOL_VARIABLE).map_or(POOL, |text| text.parse().expect("a length"));
    let pool = memory(length, POOL_FILL);
    assert_eq!(handle.register(address(pool), length), SM_OK);
    println!("\npeer> {} {}", handle.url(), address(pool));
    for line in std::io::stdin().lines() {
        let line = line.expect("commands are text");
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<usize>().expect("a number");
        let answer = match words[0] {
            "bytes" => {
                let part = &pool[number(1)..number(1) + number(2)];
                // SAFETY of the meaning: peers write it; a volatile look at each.
                part.iter()
                    .map(|byte| format!("{:02x}", volatile(byte)))
                    .collect::<String>()
            }
            "deregister" => handle.deregister(address(pool)).to_string(),
            "register" => handle.register(address(pool), length).to_string(),
            "write" => {
                let block = [(address(pool) + number(3), number(2), number(4))];
                match handle.write(words[1], &block) {
                    Ok(id) => handle.result(id).to_string(),
                    Err(code) => code.to_string(),
                }
            }
            "destroy" => {
                handle.destroy();
                "destroyed".to_owned()
            }
            "count" => count(words[1]).to_string(),
            "cpu_us" => cpu_us().to_string(),
            "violations" => format!("{:?}", violations()),
            other => panic!("unknown command {other}"),
        };
        println!("peer> {answer}");
    }
}

/// What is told is counted by the library.
extern "C" fn ignore_down(_: *const c_char, _: *mut c_void) {}

fn volatile(byte: &u8) -> u8 {
    // SAFETY: a live byte; others write it, so the compiler must look.
    unsafe { std::ptr::read_volatile(byte) }
}

/// The CPU time of this process in microseconds.
pub fn cpu_us() -> u64 {
    used_cpu_us(libc::RUSAGE_SELF)
}

/// The CPU time of this thread in microseconds.
pub fn thread_cpu_us() -> u64 {
    used_cpu_us(libc::RUSAGE_THREAD)
}

fn used_cpu_us(who: c_int) -> u64 {
    // SAFETY: all zeros are a `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is live.
    unsafe { libc::getrusage(who, &mut usage) };
    let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    us(usage.ru_utime) + us(usage.ru_stime)
}
