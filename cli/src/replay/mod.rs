// SPDX-License-Identifier: Apache-2.0
//! `memfabric replay`: a KV-cache trace between two processes, every byte
//! checked.

mod content;
mod emulator;
mod interrupt;
mod lane;
mod log;
mod memory;
mod message;
mod pool;
mod problem;
mod remote;
mod report;
mod session;
mod settings;
mod side;
mod status;
mod synthetic;
pub mod target;
mod trace;

use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use interrupt::Interrupt;
use log::{Log, Verbosity};
use problem::Problem;
use report::Report;
use session::Session;
use settings::Chosen;
use side::Sizes;
use trace::{Extent, Source};

/// Requests of the synthetic trace, unless told otherwise.
const SYNTHETIC_REQUESTS: u64 = 1000;

const EXIT_STATUS: &str = "\
Exit status:
  0    every block arrived
  1    a failed task, a mismatch, a violation, or a replay that could not end
  2    an option, the trace, the library or the environment cannot be used
  130  interrupted";

/// Play a KV-cache trace between two processes and check every byte
///
/// A second process, the target, owns a pool of blocks. For each request of the
/// trace, blocks that are in the pool are read from it and the others written
/// to it, in one sub-batch; the pool evicts the least recently used. Contents
/// follow from the block's id: what is read is compared, and at the end the
/// target compares what is in its pool.
///
/// Requests are replayed as fast as they go: timestamps are not looked at.
///
/// The library is the emulator that this command contains, unless --library names
/// another. MF_PROTOCOL, MF_TRANSFER_TIMEOUT count as usual;
/// with the emulator, MF_PROTOCOL may be unset and is then host_rdma.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct Args {
    /// JSON lines with timestamp, input_length, output_length and hash_ids; the
    /// default is a built-in synthetic trace
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Replay the first N requests [default: all; 1000 of the synthetic trace]
    #[arg(long, value_name = "N")]
    requests: Option<u64>,

    /// Bytes of a block
    #[arg(long, value_name = "SIZE", value_parser = settings::size, default_value = "64KiB")]
    block_bytes: usize,

    /// Bytes of the target's pool; --raw takes two of them
    #[arg(long, value_name = "SIZE", value_parser = settings::size, default_value = "512MiB")]
    pool_bytes: usize,

    /// Sub-batches in flight
    #[arg(long, value_name = "N", default_value_t = 4)]
    in_flight: usize,

    /// The libmf_smem.so to use: a file, or a name for the dynamic linker to look
    /// up
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,

    /// Replay each part of the trace once more straight through the library's
    /// calls, with no transport between, and compare the throughputs
    #[arg(long)]
    raw: bool,

    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    verbosity: Verbosity,
}

/// Runs the subcommand.
pub fn run(args: Args) -> ExitCode {
    let log = Log::start(args.verbosity);
    let status = match replay(&args, &log) {
        Ok(status) => status,
        Err(problem) => {
            eprintln!("memfabric replay: {problem}");
            problem.exit_status()
        }
    };
    ExitCode::from(status)
}

fn replay(args: &Args, log: &Log) -> Result<u8, Problem> {
    let interrupt = Interrupt::listen()?;
    let sides = if args.raw { 2 } else { 1 };
    let sizes = settings::sizes(args, sides)?;
    let (source, requests) = trace(args, &interrupt)?;
    let chosen = settings::choose(args)?;
    if !args.json {
        print(&chosen.describe());
    }
    let arguments = target_arguments(args, &chosen, sizes, sides);
    let mut session = Session::open(&chosen, sizes, sides, &arguments, &interrupt)?;
    show(log.bar(), requests * sides as u64);
    let played = session.play(&source, requests, &interrupt, log.bar());
    log.bar().finish_and_clear();
    let (report, status) = end(session, &chosen, played, |session| {
        let totals = session.totals();
        let emulated = chosen.emulated;
        let (resident_bytes, peak_bytes) = status::resident_and_peak_bytes();
        let mut sides = totals
            .iter()
            .map(|totals| report::Side::of(totals, emulated));
        Report {
            library: report::Library {
                path: chosen.path.display().to_string(),
                emulator: chosen.emulated.then(|| emulator::VERSION.to_owned()),
                protocol: chosen.config.protocol.name(),
            },
            trace: report::Trace {
                file: args.trace.as_ref().map(|path| path.display().to_string()),
                requests,
            },
            sizes: report::ReportedSizes::of(sizes),
            transport: sides.next().expect("a session has a transport's side"),
            raw: sides.next(),
            transport_over_raw: session.ratio().map(|median| report::Ratio {
                median,
                slices: session.slices(),
            }),
            in_place: None,
            memory: report::Memory {
                resident_bytes,
                peak_bytes,
            },
            violations: None,
            interrupted: interrupt.requested(),
            problems: Vec::new(),
            ok: false,
        }
    });
    if args.json {
        let json = serde_json::to_string_pretty(&report)
            .map_err(|error| Problem::BadInput(format!("cannot write JSON: {error}")))?;
        print(&json);
    } else {
        print(&report.table());
    }
    let faults = report.faults();
    if !faults.is_empty() {
        eprintln!("memfabric replay: {}", faults.join("; "));
    }
    Ok(status)
}

/// Ends the session, whatever its replay came to, and tells the exit status.
fn end(
    mut session: Session,
    chosen: &Chosen,
    played: Result<(), Problem>,
    report: impl FnOnce(&Session) -> Report,
) -> (Report, u8) {
    let mut problems: Vec<Problem> = played.err().into_iter().collect();
    let quiesced = session.quiesce();
    let mut report = report(&session);
    let mut violations = Vec::new();
    match quiesced {
        Ok(()) => {
            match session.verify() {
                Ok(verified) => report.in_place = Some(verified),
                Err(problem) => problems.push(problem),
            }
            match session.close() {
                Ok(of_target) => violations = of_target,
                Err(problem) => problems.push(problem),
            }
        }
        // The library may still use the memory, which the session then leaks; its
        // target is ended all the same.
        Err(error) => {
            problems.push(error.into());
            drop(session);
        }
    }
    if chosen.emulated {
        violations.splice(0..0, emulator::violations());
        report.violations = Some(violations);
    }
    // Interrupted is told apart, and a target that is gone is told once.
    for problem in &problems {
        let text = problem.to_string();
        if !matches!(problem, Problem::Interrupted) && !report.problems.contains(&text) {
            report.problems.push(text);
        }
    }
    report.interrupted |= matches!(problems.first(), Some(Problem::Interrupted));
    report.ok = report.faults().is_empty() && !report.interrupted;
    let status = match problems.first() {
        Some(problem) => problem.exit_status(),
        None => u8::from(!report.ok),
    };
    (report, status)
}

/// What is replayed, and how many requests of it.
fn trace(args: &Args, interrupt: &Interrupt) -> Result<(Source, u64), Problem> {
    match &args.trace {
        None => Ok((
            Source::Synthetic,
            args.requests.unwrap_or(SYNTHETIC_REQUESTS),
        )),
        Some(path) => {
            let source = Source::File(path.clone());
            let limit = args.requests.unwrap_or(u64::MAX);
            let Extent { requests, .. } = source.measure(limit, interrupt)?;
            Ok((source, requests))
        }
    }
}

/// How [`target::Args`] are written.
fn target_arguments(args: &Args, chosen: &Chosen, sizes: Sizes, pools: usize) -> Vec<OsString> {
    let mut arguments = vec![target::ROLE.into()];
    if !chosen.emulated {
        let mut library = OsString::from("--library=");
        library.push(&chosen.config.library);
        arguments.push(library);
    }
    let options = [
        format!("--protocol={}", chosen.config.protocol),
        format!("--store={}", chosen.store),
        format!("--block-bytes={}", sizes.block_bytes),
        format!("--slots={}", sizes.slots),
        format!("--pools={pools}"),
    ];
    arguments.extend(options.map(OsString::from));
    arguments.extend((0..args.verbosity.level).map(|_| "-v".into()));
    arguments
}

/// Draws the bar if somebody looks.
fn show(bar: &ProgressBar, requests: u64) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    let style = ProgressStyle::with_template(
        "{bar:40} {human_pos} of {human_len} requests, {elapsed} (left: {eta})",
    );
    bar.set_style(style.expect("the template is a constant"));
    bar.set_length(requests);
    bar.reset_elapsed();
    bar.set_draw_target(ProgressDrawTarget::stderr());
}

/// Writes to standard output; a reader that has left is no error.
fn print(text: &str) {
    if let Err(error) = writeln!(std::io::stdout(), "{text}")
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("memfabric replay: cannot write to standard output: {error}");
    }
}
