// SPDX-License-Identifier: Apache-2.0
//! `memfabric replay` with the emulator: two processes, real bytes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::NamedTempFile;

/// Longer than anything here takes; running into it is a failure.
const FOREVER: Duration = Duration::from_secs(60);

/// Small enough for a debug build.
const SMALL: [(&str, &str); 2] = [("--block-bytes", "4KiB"), ("--pool-bytes", "8MiB")];

/// `memfabric replay`, in an environment without its variables.
fn replay(options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfabric"));
    let given = |name: &str| options.iter().any(|option| option.starts_with(name));
    let small = SMALL.iter().filter(|(name, _)| !given(name));
    let small = small.map(|(name, value)| format!("{name}={value}"));
    command.arg("replay").args(small).args(options);
    for variable in ["MF_PROTOCOL", "MF_TRANSFER_TIMEOUT", "MF_EMULATOR"] {
        command.env_remove(variable);
    }
    command
}

fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("the command starts");
    let process = child.id();
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = receiver.recv_timeout(FOREVER) else {
        kill(process, "KILL");
        panic!("it does not end: {command:?}");
    };
    output.expect("its pipes can be read")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A JSON report and the exit status that goes with it.
fn report(command: &mut Command, status: i32) -> Value {
    let output = output(command.arg("--json"));
    let text = format!("{}{}", stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(status), "{text}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

/// A trace with these requests.
fn trace(requests: &[&[u64]]) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a temporary file");
    for (index, hash_ids) in requests.iter().enumerate() {
        let line = serde_json::json!({
            "timestamp": 3000 * index,
            "input_length": 512 * hash_ids.len(),
            "output_length": 1,
            "hash_ids": hash_ids,
        });
        writeln!(file, "{line}").expect("room for it");
    }
    file
}

fn option(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

#[test]
fn every_block_of_a_trace_arrives_and_is_accounted_for() {
    let long: Vec<u64> = (100..200).collect();
    let trace = trace(&[&[1, 2, 3], &[1, 2, 4, 4], &[], &long, &[u64::MAX, 1]]);
    let report = report(&mut replay(&[&option("trace", trace.path())]), 0);
    let transport = &report["transport"];
    assert_eq!(transport["requests"], 5);
    assert_eq!(transport["sub_batches"], 4, "nothing is sent for no blocks");
    assert_eq!(transport["blocks_written"], 3 + 1 + 100 + 1);
    assert_eq!(transport["blocks_read"], 2 + 1);
    assert_eq!(transport["duplicates"], 1, "a request moves a block once");
    assert_eq!(transport["bytes_written"], 105 * 4096);
    assert_eq!(transport["bytes_read"], 3 * 4096);
    assert_eq!(transport["hit_rate"], 3.0 / 108.0);
    // WRITE for each, READ for the second and the last.
    assert_eq!(transport["vendor_calls"]["smem_trans_batch_copy"], 6);
    assert_eq!(transport["vendor_calls"]["counted_by"], "emulator");
    assert!(number(&transport["vendor_calls"]["smem_trans_batch_status_query"]) >= 6);
    assert_eq!(transport["mismatches"], 0);
    assert_eq!(transport["failed_tasks"], 0);
    assert_eq!(report["in_place"]["blocks"], 105);
    assert_eq!(report["in_place"]["mismatches"], 0);
    assert_eq!(report["violations"], serde_json::json!([]));
    assert_eq!(report["ok"], true);
}

#[test]
fn the_first_line_names_the_emulator_and_the_table_says_that_all_is_well() {
    let output = output(&mut replay(&["--requests=30"]));
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    let first = text.lines().next().unwrap_or_default();
    assert!(first.contains("emulator"), "{first}");
    assert!(first.contains("protocol host_rdma"), "{first}");
    assert!(text.contains("blocks written"), "{text}");
    assert!(text.contains(" 0 mismatches"), "{text}");
    assert!(text.contains("violations: 0"), "{text}");
    assert_eq!(stderr(&output), "", "an orderly run has nothing to warn of");
}

#[test]
fn sizes_that_fit_nothing_well_work_too() {
    // Blocks of no whole words, a pool that a request does not fit into, and
    // hardly any hits.
    let mut command = replay(&["--block-bytes=1001", "--pool-bytes=9010", "--requests=20"]);
    let report = report(&mut command, 0);
    let transport = &report["transport"];
    assert_eq!(report["sizes"]["pool_blocks"], 9);
    assert!(number(&transport["sub_batches"]) > 20, "requests are split");
    assert_eq!(report["in_place"]["blocks"], 9);
    let blocks = number(&transport["blocks_written"]) + number(&transport["blocks_read"]);
    let bytes = number(&transport["bytes_written"]) + number(&transport["bytes_read"]);
    assert_eq!(bytes, 1001 * blocks);
}

#[test]
fn a_block_is_read_only_once_its_write_is_done() {
    let same: &[u64] = &[7, 8];
    let trace = trace(&[same; 6]);
    let mut command = replay(&[&option("trace", trace.path()), "--in-flight=6"]);
    // Whatever is submitted behind the write would overtake it.
    let report = report(command.env("MF_EMULATOR", "delay=100ms@1"), 0);
    assert_eq!(report["transport"]["blocks_written"], 2);
    assert_eq!(report["transport"]["blocks_read"], 10);
    assert_eq!(report["transport"]["mismatches"], 0);
}

#[test]
fn a_failed_batch_is_told_and_what_it_should_have_written_is_written_again() {
    let trace = trace(&[&[1, 2, 3], &[1, 2, 3], &[1, 2, 3]]);
    let mut command = replay(&[&option("trace", trace.path()), "--in-flight=1", "--json"]);
    let output = output(command.env("MF_EMULATOR", "result=SM_ERROR@1"));
    let warned = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{warned}");
    assert!(warned.contains("SM_ERROR (-1)"), "{warned}");
    assert!(
        warned.contains("memfabric replay: failed tasks: 3\n"),
        "{warned}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON all the same");
    assert_eq!(report["transport"]["failed_tasks"], 3);
    assert_eq!(report["transport"]["blocks_written"], 3);
    assert_eq!(report["transport"]["blocks_read"], 3);
    assert_eq!(report["transport"]["mismatches"], 0);
    assert_eq!(report["ok"], false);
}

#[test]
fn a_refused_submission_is_told() {
    let mut command = replay(&["--requests=5"]);
    let output = output(command.env("MF_EMULATOR", "submit=SM_INNER_BUSY@2"));
    let warned = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{warned}");
    assert!(warned.contains("SM_INNER_BUSY (-2013)"), "{warned}");
    assert!(
        warned.contains("memfabric replay: failed tasks: "),
        "{warned}"
    );
}

#[test]
fn bytes_that_did_not_arrive_are_found_on_either_side() {
    // The library says that it wrote, and did not.
    let trace = trace(&[&[1, 2], &[1]]);
    let option = option("trace", trace.path());
    let script = "partial=0@1; result=SM_OK@1";
    let found = report(replay(&[&option]).env("MF_EMULATOR", script), 1);
    let misread = &found["transport"]["first_mismatches"][0];
    assert_eq!(found["transport"]["mismatches"], 1);
    assert_eq!(misread["block"], 1);
    assert_eq!(misread["offset"], 0);
    assert_ne!(misread["expected"], misread["got"]);
    assert_eq!(found["in_place"]["mismatches"], 2);

    let told = output(replay(&[&option]).env("MF_EMULATOR", script));
    let text = stdout(&told);
    assert!(
        text.contains("\n  read: block 1 in slot 0: byte 0 is 0x"),
        "{text}"
    );
    assert!(
        text.contains("\n  in the pool: block 2 in slot 1: byte 0 is 0xdd"),
        "{text}"
    );
    let told = stderr(&told);
    assert!(
        told.contains("mismatches in what was read: 1; mismatches in the pool: 2"),
        "{told}"
    );

    // It says that it read, and did not, while the memory to read to still holds
    // what was written from there.
    let script = "partial=0@2; result=SM_OK@2";
    let mut command = replay(&[&option, "--in-flight=1"]);
    let found = report(command.env("MF_EMULATOR", script), 1);
    assert_eq!(found["transport"]["mismatches"], 1);
    assert_eq!(found["in_place"]["mismatches"], 0);
}

#[test]
fn a_batch_that_never_ends_is_given_up_after_the_timeout() {
    let mut command = replay(&["--requests=20"]);
    command.env("MF_EMULATOR", "hang@3");
    command.env("MF_TRANSFER_TIMEOUT", "200");
    let output = output(&mut command);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("MF_TRANSFER_TIMEOUT"), "{told}");
    assert!(told.contains("their memory must not be freed"), "{told}");
}

#[test]
fn bad_input_is_one_line_that_says_what_and_where() {
    let good = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#;
    let file = |text: String| {
        let mut file = NamedTempFile::new().expect("a temporary file");
        file.write_all(text.as_bytes()).expect("room for it");
        file
    };
    let not_json = file(format!("{good}\n{good}\n{{hash_ids}}\n"));
    let no_ids = file(format!("{good}\n{}\n", good.replace("hash_ids", "hashes")));
    let negative = file(format!("{good}\n\n{}\n", good.replace("[0]", "[0, -4]")));
    let empty = file(String::new());
    let at = |file: &NamedTempFile, rest: &str| format!("{}{rest}", file.path().display());
    let of = |file: &NamedTempFile| option("trace", file.path());

    let cases = [
        (
            "--trace=/nonexistent/t".to_owned(),
            "trace /nonexistent/t: No such file".to_owned(),
        ),
        (of(&not_json), at(&not_json, ":3: is not JSON: ")),
        (of(&no_ids), at(&no_ids, ":2: missing field `hash_ids`")),
        (
            of(&negative),
            at(&negative, ":3: hash_ids[1]: invalid value: integer `-4`"),
        ),
        (of(&empty), at(&empty, ": has no block to move")),
        (
            "--block-bytes=0".to_owned(),
            "--block-bytes is 0".to_owned(),
        ),
        (
            "--block-bytes=9MiB".to_owned(),
            "--block-bytes is 9437184, must not be larger than --pool-bytes, 8388608".to_owned(),
        ),
        (
            "--pool-bytes=4PiB".to_owned(),
            "--pool-bytes 4503599627370496".to_owned(),
        ),
        ("--in-flight=0".to_owned(), "--in-flight is 0".to_owned()),
        ("--requests=0".to_owned(), "--requests is 0".to_owned()),
        (
            "--library=/nonexistent/l.so".to_owned(),
            "/nonexistent/l.so unavailable: /nonexistent/l.so: cannot open shared object"
                .to_owned(),
        ),
        (
            option("library", not_json.path()),
            ": invalid ELF header".to_owned(),
        ),
        (
            "--library=libc.so.6".to_owned(),
            "libc.so.6 is incompatible, not MemFabric's library: missing smem_trans_init, "
                .to_owned(),
        ),
    ];
    for (bad, message) in cases {
        let output = output(&mut replay(&[&bad]));
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{bad}: {told}");
        assert!(told.starts_with("memfabric replay: "), "{bad}: {told}");
        assert!(told.contains(&message), "{bad}: {told}");
        assert_eq!(told.lines().count(), 1, "{bad}: {told}");
        assert_eq!(stdout(&output), "", "{bad}");
    }
}

#[test]
fn a_bad_line_behind_the_requests_that_are_asked_for_does_not_matter() {
    let trace = trace(&[&[1], &[2]]);
    let mut text = fs::read_to_string(trace.path()).expect("just written");
    text.push_str("no JSON\n");
    fs::write(trace.path(), text).expect("room for it");
    let mut command = replay(&[&option("trace", trace.path()), "--requests=2"]);
    assert_eq!(report(&mut command, 0)["transport"]["requests"], 2);
}

#[test]
fn an_unknown_protocol_is_refused_also_with_the_emulator() {
    let output = output(replay(&["--requests=1"]).env("MF_PROTOCOL", "rdma"));
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("MF_PROTOCOL is 'rdma', must be one of device_sdma"),
        "{told}"
    );
}

/// One file is enough, wherever it is.
#[test]
fn the_command_alone_in_a_folder_replays() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let moved = folder.path().join("memfabric");
    // A copy would be busy while another thread starts a process.
    fs::hard_link(env!("CARGO_BIN_EXE_memfabric"), &moved).expect("on one file system");
    let mut command = Command::new(moved);
    command.current_dir(&folder).env_clear().arg("replay");
    let options = SMALL.map(|(name, value)| format!("{name}={value}"));
    let output = output(command.args(options).arg("--requests=20"));
    let told = format!("{}{}", stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains(" verified, 0 mismatches"), "{told}");
}

#[test]
fn the_published_library_has_no_emulator() {
    let output = output(replay(&[]).env("MF_ABI", "v1"));
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("name its libmf_smem.so with --library"),
        "{told}"
    );
}

#[test]
fn a_misspelt_command_suggests_no_hidden_one() {
    let output = output(Command::new(env!("CARGO_BIN_EXE_memfabric")).arg("replya"));
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("'replay'") && !told.contains("target"),
        "{told}"
    );
}

#[test]
fn raw_moves_the_same_blocks_and_tells_the_ratio() {
    let found = report(&mut replay(&["--requests=120", "--raw"]), 0);
    let (transport, raw) = (&found["transport"], &found["raw"]);
    for key in ["requests", "sub_batches", "blocks_written", "blocks_read"] {
        assert_eq!(transport[key], raw[key], "{key}");
    }
    assert_eq!(raw["mismatches"], 0);
    let copies = |side: &Value| number(&side["vendor_calls"]["smem_trans_batch_copy"]);
    assert_eq!(copies(transport), copies(raw), "both sides group alike");
    // Both pools are compared.
    let resident = number(&found["in_place"]["blocks"]);
    assert_eq!(resident, 2 * number(&found["transport"]["blocks_written"]));
    assert_eq!(found["transport_over_raw"]["slices"], 6);
    let ratio = found["transport_over_raw"]["median"].as_f64();
    assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{ratio:?}");

    let output = output(&mut replay(&["--requests=60", "--raw"]));
    let text = stdout(&output);
    assert!(text.contains("transport / raw: "), "{text}");
}

#[test]
fn a_failure_of_the_raw_side_counts_as_well() {
    let trace = trace(&[&[1, 2, 3]]);
    let mut command = replay(&[&option("trace", trace.path()), "--raw"]);
    // The transport is first, and its batch is the first one.
    let found = report(command.env("MF_EMULATOR", "result=SM_TIMEOUT@2"), 1);
    assert_eq!(found["transport"]["failed_tasks"], 0);
    assert_eq!(found["raw"]["failed_tasks"], 3);
}

#[test]
fn memory_does_not_grow_with_the_trace() {
    let resident = |requests: &str| {
        let found = report(&mut replay(&[requests, "--in-flight=2"]), 0);
        number(&found["memory"]["resident_bytes"])
    };
    let (short, long) = (resident("--requests=200"), resident("--requests=2000"));
    let growth = long.saturating_sub(short);
    assert!(growth < 1 << 20, "{short} bytes, then {long}");
}

/// A replay that has begun and would take for ever, and its target's id.
struct Running {
    child: Child,
    target: u32,
}

impl Running {
    /// Returns once blocks have arrived.
    fn start(options: &[&str]) -> Self {
        let mut command = replay(&["--requests=1000000000", "-vv"]);
        command.args(options).env("MF_EMULATOR", "delay=5ms");
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut seen = String::new();
        let mut completed = 0;
        let mut lines = lines.map_while(Result::ok);
        for line in &mut lines {
            completed += usize::from(line.contains("vendor batch completed"));
            seen.push_str(&line);
            seen.push('\n');
            if completed == 10 {
                break;
            }
        }
        assert_eq!(completed, 10, "{seen}");
        // Read on, lest the child blocks.
        std::thread::spawn(move || lines.for_each(drop));
        let children = format!("/proc/{0}/task/{0}/children", child.id());
        let children = fs::read_to_string(children).expect("it runs");
        let target = children.trim().parse().expect("one child, the target");
        Self { child, target }
    }

    fn signal(&self, signal: &str) {
        kill(self.child.id(), signal);
    }

    /// Waits for its end, and gives what it printed.
    fn end(&mut self) -> (ExitStatus, String) {
        let mut pipe = self.child.stdout.take().expect("piped");
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).map(|_| text)
        });
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                break status;
            }
            assert!(begun.elapsed() < FOREVER, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = reader.join().expect("no panic").expect("UTF-8");
        (status, text)
    }

    /// Whether the target runs; a process that only waits to be reaped does not.
    fn target_runs(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.target));
        status.is_ok_and(|status| !status.contains("State:\tZ"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The shell's own `kill`, for the standard library sends SIGKILL alone.
fn kill(process: u32, signal: &str) {
    let script = format!("kill -{signal} {process}");
    let status = Command::new("sh").args(["-c", &script]).status();
    assert!(status.expect("a shell").success(), "{script}");
}

#[test]
fn ctrl_c_quiesces_tells_what_was_done_and_leaves_no_process() {
    let mut running = Running::start(&[]);
    running.signal("INT");
    let (status, text) = running.end();
    assert_eq!(status.code(), Some(130), "{text}");
    assert!(text.contains("\ninterrupted: "), "{text}");
    assert!(text.contains("blocks written"), "{text}");
    assert!(text.contains(" 0 mismatches"), "{text}");
    assert!(text.contains("violations: 0"), "{text}");
    assert!(!running.target_runs(), "the target outlives the replay");

    let mut running = Running::start(&["--json"]);
    running.signal("TERM");
    let (status, text) = running.end();
    assert_eq!(status.code(), Some(130), "{text}");
    let found: Value = serde_json::from_str(&text).expect("one JSON object");
    assert_eq!(found["interrupted"], true);
    assert_eq!(found["ok"], false);
    assert_eq!(found["transport"]["failed_tasks"], 0);
    assert!(number(&found["transport"]["sub_batches"]) > 0);
    assert_eq!(found["in_place"]["mismatches"], 0);
    assert!(!running.target_runs(), "the target outlives the replay");
}

#[test]
fn a_target_whose_initiator_is_killed_exits() {
    let mut running = Running::start(&[]);
    assert!(running.target_runs(), "the test looks at the wrong process");
    running.signal("KILL");
    running.end();
    let begun = Instant::now();
    while running.target_runs() {
        assert!(begun.elapsed() < FOREVER, "the target stays");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_target_that_dies_ends_the_replay_with_its_exit_status() {
    let mut running = Running::start(&["--json"]);
    kill(running.target, "KILL");
    let (status, text) = running.end();
    assert_eq!(status.code(), Some(1), "{text}");
    let found: Value = serde_json::from_str(&text).expect("one JSON object");
    assert_eq!(
        found["problems"],
        serde_json::json!(["target process ended early: signal: 9 (SIGKILL)"])
    );
    assert!(number(&found["transport"]["failed_tasks"]) > 0);
    assert_eq!(found["in_place"], Value::Null);
    assert_eq!(found["transport"]["mismatches"], 0);
}
