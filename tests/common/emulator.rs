// SPDX-License-Identifier: Apache-2.0
//! The emulated libraries, as tests load, script and observe them.
#![allow(unsafe_code)] // calls functions of shared objects

use std::ffi::{CStr, CString, c_char, c_int};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use libloading::Library;
use memfabric_transport::config::TentSettings;
use memfabric_transport::{Config, LogLevel};
use parking_lot::{Mutex, MutexGuard};
use tempfile::TempDir;

/// A library that cargo built beside the test programs.
pub fn built(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("the running program has a path");
    let path = program.parent().expect("it is in a folder").join(name);
    assert!(
        path.exists(),
        "{} is built as a dependency of the tests",
        path.display()
    );
    path
}

/// `host_rdma` on the loopback, over the emulator.
pub fn config() -> Config {
    config_with(&[("MF_PROTOCOL", "host_rdma")])
}

pub fn config_with(variables: &[(&str, &str)]) -> Config {
    let tent = TentSettings {
        rpc_server_addr: "127.0.0.1:0".to_owned(),
        log_level: LogLevel::Warning,
        ..TentSettings::default()
    };
    let lookup = |name: &str| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let mut config = Config::resolve(lookup, &tent).expect("valid settings");
    config.library = built("libmf_smem.so");
    config
}

/// The emulator of this process. Its script and counters are the process's, so
/// the tests that hold one run one after the other.
pub struct Emulator {
    library: Library,
    path: PathBuf,
    _copy: Option<TempDir>,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Emulator {
    pub fn start() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock();
        let emulator = Self::open(built("libmf_smem.so"), None, Some(turn));
        emulator.release();
        emulator.call("mf_emu_reset");
        emulator
    }

    /// A library of its own, which nobody has initialised: the one that all share
    /// is initialised once in a process.
    pub fn fresh() -> Self {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        let path = folder.path().join("libmf_smem.so");
        std::fs::copy(built("libmf_smem.so"), &path).expect("there is room for a copy");
        Self::open(path, Some(folder), None)
    }

    fn open(path: PathBuf, copy: Option<TempDir>, turn: Option<MutexGuard<'static, ()>>) -> Self {
        // SAFETY: the emulator is ours and has no initialiser of its own.
        let library = unsafe { Library::new(&path) }.expect("it loads");
        Self {
            library,
            path,
            _copy: copy,
            _turn: turn,
        }
    }

    /// [`config`] over this library.
    pub fn config(&self) -> Config {
        Config {
            library: self.path.clone(),
            ..config()
        }
    }

    /// A function of the library's.
    ///
    /// # Safety
    ///
    /// `F` must be its type.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller's word.
        let function = unsafe { self.library.get::<F>(name) };
        *function.expect("the emulator exports it")
    }

    fn call(&self, name: &str) {
        // SAFETY: functions of this shape are documented by the emulator.
        let function = unsafe { self.library.get::<unsafe extern "C" fn()>(name) };
        let function = function.expect("the emulator exports it");
        // SAFETY: takes nothing.
        unsafe { function() };
    }

    /// Lets go of every blocked call and every held batch.
    pub fn release(&self) {
        self.call("mf_emu_release");
    }

    /// Replaces the script; a leading + adds to it.
    pub fn script(&self, rules: &str) {
        let rules = CString::new(rules).expect("no NUL");
        // SAFETY: as documented by the emulator.
        let script = unsafe {
            self.library
                .get::<unsafe extern "C" fn(*const c_char) -> c_int>("mf_emu_script")
        };
        let script = script.expect("the emulator exports it");
        // SAFETY: a NUL-terminated string that lives across the call.
        let code = unsafe { script(rules.as_ptr()) };
        assert_eq!(code, 0, "bad script {rules:?}: {}", self.last_error());
    }

    fn last_error(&self) -> String {
        // SAFETY: as documented by the emulator.
        let text = unsafe {
            self.library
                .get::<unsafe extern "C" fn() -> *const c_char>("mf_emu_last_error")
        };
        let text = text.expect("the emulator exports it");
        // SAFETY: takes nothing.
        let text = unsafe { text() };
        // SAFETY: never NULL, valid until the next call of this thread.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }

    pub fn count(&self, name: &str) -> u64 {
        let name = CString::new(name).expect("no NUL");
        // SAFETY: as documented by the emulator.
        let count = unsafe {
            self.library
                .get::<unsafe extern "C" fn(*const c_char) -> u64>("mf_emu_count")
        };
        let count = count.expect("the emulator exports it");
        // SAFETY: a NUL-terminated string that lives across the call.
        let value = unsafe { count(name.as_ptr()) };
        assert_ne!(value, u64::MAX, "no counter {name:?}");
        value
    }

    /// Line `index` of the call log.
    pub fn logged(&self, index: u64) -> Option<String> {
        self.text("mf_emu_call", index)
    }

    /// Calls `peer`'s loss into every handle's callback, from another thread.
    pub fn peer_down(&self, peer: &str) -> u64 {
        let peer = CString::new(peer).expect("no NUL");
        // SAFETY: as documented by the emulator.
        let call = unsafe {
            self.library
                .get::<unsafe extern "C" fn(*const c_char) -> u64>("mf_emu_peer_down")
        };
        let call = call.expect("the emulator exports it");
        // SAFETY: a NUL-terminated string that lives across the call.
        unsafe { call(peer.as_ptr()) }
    }

    fn text(&self, name: &str, index: u64) -> Option<String> {
        // SAFETY: as documented by the emulator.
        let function = unsafe {
            self.library
                .get::<unsafe extern "C" fn(u64, *mut c_char, usize) -> usize>(name)
        };
        let function = function.expect("the emulator exports it");
        let mut buffer = vec![0u8; 1 << 16];
        // SAFETY: at most the buffer's length is written.
        let length = unsafe { function(index, buffer.as_mut_ptr().cast(), buffer.len()) };
        (length > 0).then(|| {
            let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(length);
            String::from_utf8_lossy(&buffer[..end]).into_owned()
        })
    }

    /// Fails the test if the emulator saw the contract broken.
    pub fn assert_no_violation(&self) {
        if self.count("violations") > 0 {
            panic!(
                "violation: {}",
                self.text("mf_emu_violation", 0).unwrap_or_default()
            );
        }
    }
}

/// Another process of the running test program, inside its ignored test `role`.
pub struct Process {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// For `sh -c`: runs the command behind a limit and its value.
const LIMITED: &str = "ulimit \"$0\" \"$1\" && shift && exec \"$@\"";
/// For `sh -c`: runs `$0 $@`.
const AT_FIXED_ADDRESSES: &str =
    "setarch -R true && exec setarch -R \"$0\" \"$@\" || exec \"$0\" \"$@\"";
const TIED: [&str; 3] = ["setpriv", "--pdeathsig", "KILL"];

/// Where a process writes what its parent reads.
const MARK: &str = "<<";

impl Process {
    pub fn start(role: &str, variables: &[(&str, &str)]) -> Self {
        Self::start_with(role, |command| {
            command.envs(variables.iter().copied());
        })
    }

    pub fn start_with(role: &str, adjust: impl FnOnce(&mut Command)) -> Self {
        Self::start_under(&[], role, adjust)
    }

    /// A process with one of `ulimit`'s limits, `-n` for descriptors.
    pub fn start_limited(role: &str, limit: (&str, usize), variables: &[(&str, &str)]) -> Self {
        let limit = [limit.0, &limit.1.to_string()];
        let under = [&["sh", "-c", LIMITED], &limit[..]].concat();
        Self::start_under(&under, role, |command| {
            command.envs(variables.iter().copied());
        })
    }

    /// A process that does not outlive the thread that starts it, not even if
    /// that crashes.
    pub fn start_tied(role: &str, adjust: impl FnOnce(&mut Command)) -> Self {
        Self::start_under(&TIED, role, adjust)
    }

    /// As [`Self::start_tied`], with the same addresses each time, where the
    /// system allows that.
    pub fn start_at_fixed_addresses(role: &str, adjust: impl FnOnce(&mut Command)) -> Self {
        let under = [&["sh", "-c", AT_FIXED_ADDRESSES], &TIED[..]].concat();
        Self::start_under(&under, role, adjust)
    }

    /// `under` is a command that runs the one that its arguments end with.
    fn start_under(under: &[&str], role: &str, adjust: impl FnOnce(&mut Command)) -> Self {
        let program = std::env::current_exe().expect("the running program has a path");
        let mut command = match under {
            [] => Command::new(program),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
        };
        command
            .args(["--ignored", "--exact", "--nocapture", role])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        adjust(&mut command);
        let mut child = command.spawn().expect("the test program starts again");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        Self {
            child,
            input,
            output,
        }
    }

    /// The next line that the process said.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self
                .output
                .read_line(&mut line)
                .expect("its output is text");
            assert!(read > 0, "the process ended: {:?}", self.child.wait());
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }

    pub fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("it is piped");
        writeln!(input, "{line}").expect("the process reads");
    }

    /// Ends its input, so that it begins to end.
    pub fn hang_up(&mut self) {
        drop(self.input.take());
    }

    /// Ends its input, and expects it to end well.
    pub fn end(mut self) {
        self.hang_up();
        let status = self.child.wait().expect("it is a child");
        assert!(status.success(), "the process ended with {status}");
    }

    /// Ends its input; its exit status, None if a signal ended it, and the rest of
    /// what it said.
    pub fn ended(mut self) -> (Option<i32>, Vec<String>) {
        self.hang_up();
        let lines = self.output.by_ref().lines();
        let lines = lines.map(|line| line.expect("its output is text"));
        let said = lines.filter_map(|line| Some(line.split_once(MARK)?.1.to_owned()));
        let said = said.collect();
        (self.child.wait().expect("it is a child").code(), said)
    }

    pub fn kill(mut self) {
        self.child.kill().expect("it is a child");
        self.child.wait().expect("it is a child");
    }
}

/// Inside a process: says a line to the parent.
pub fn say(line: &str) {
    println!("{MARK}{line}");
}

/// Inside a process: the parent's next line, None when it ended the input.
pub fn listen() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin()
        .read_line(&mut line)
        .expect("the parent sends text");
    (read > 0).then(|| line.trim_end().to_owned())
}
