// SPDX-License-Identifier: Apache-2.0
//! The target process, as the initiator sees it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use memfabric_transport::Endpoint;

use super::interrupt::Interrupt;
use super::message::{Answer, BLOCKS_PER_ORDER, Order, Verified};
use super::problem::Problem;

/// How long the target may take to come up: the library itself may take 120 s.
const LONGEST_START: Duration = Duration::from_secs(150);
/// How long it may take to compare all of its pools, or to tear down.
const LONGEST_ANSWER: Duration = Duration::from_secs(120);
/// How long it may take to exit once its input has ended.
const LONGEST_EXIT: Duration = Duration::from_secs(5);
/// How often a wait looks around.
const LOOK: Duration = Duration::from_millis(20);

/// A running target. Dropping it ends the process, one way or another, and
/// leaves no zombie.
pub struct Target {
    child: Child,
    /// None once it was told to exit.
    orders: Option<BufWriter<ChildStdin>>,
    answers: Receiver<Answer>,
}

/// What a target has to offer.
#[derive(Debug)]
pub struct Offer {
    /// Its endpoint.
    pub endpoint: Endpoint,
    /// Where each of its pools begins.
    pub pools: Vec<usize>,
}

impl Target {
    /// Starts this program anew with `arguments`.
    pub fn start(arguments: &[OsString]) -> Result<Self, Problem> {
        let program = std::env::current_exe()
            .map_err(|error| Problem::Target(format!("cannot find this program: {error}")))?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C goes to a terminal's foreground group: this process decides
            // when the target leaves.
            .process_group(0)
            .spawn()
            .map_err(|error| Problem::Target(format!("cannot start: {error}")))?;
        let orders = child.stdin.take().map(BufWriter::new);
        let (sender, answers) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                for answer in read(output) {
                    if sender.send(answer).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self {
            child,
            orders,
            answers,
        })
    }

    /// Waits until the pools are registered.
    pub fn offer(&mut self, interrupt: &Interrupt) -> Result<Offer, Problem> {
        match self.answer(LONGEST_START, Some(interrupt))? {
            Answer::Ready { endpoint, pools } => {
                let endpoint = Endpoint::parse(&endpoint).map_err(|problem| {
                    Problem::Target(format!("its endpoint '{endpoint}' {problem}"))
                })?;
                Ok(Offer { endpoint, pools })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Has it compare these blocks of a pool.
    pub fn verify(
        &mut self,
        pool: usize,
        blocks: impl Iterator<Item = (u64, usize)>,
    ) -> Result<(), Problem> {
        let mut blocks = blocks.peekable();
        while blocks.peek().is_some() {
            let blocks = blocks.by_ref().take(BLOCKS_PER_ORDER).collect();
            self.order(&Order::Verify { pool, blocks })?;
        }
        Ok(())
    }

    /// What all comparisons came to.
    pub fn verified(&mut self) -> Result<Verified, Problem> {
        self.order(&Order::Sum)?;
        match self.answer(LONGEST_ANSWER, None)? {
            Answer::Verified(verified) => Ok(verified),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends it, and tells the violations that it counted.
    pub fn leave(mut self) -> Result<Vec<String>, Problem> {
        self.order(&Order::Leave)?;
        match self.answer(LONGEST_ANSWER, None)? {
            Answer::Left { violations } => {
                let status = self.end();
                match status {
                    Some(status) if status.success() => Ok(violations),
                    Some(status) => Err(Problem::TargetGone(status)),
                    None => Err(Problem::Target("did not exit, killed".to_owned())),
                }
            }
            other => Err(unexpected(&other)),
        }
    }

    /// An error if it is gone.
    pub fn check(&mut self) -> Result<(), Problem> {
        match self.child.try_wait() {
            Ok(Some(status)) => Err(Problem::TargetGone(status)),
            _ => Ok(()),
        }
    }

    fn order(&mut self, order: &Order) -> Result<(), Problem> {
        let mut line = serde_json::to_string(order)
            .map_err(|error| Problem::Target(format!("cannot write an order: {error}")))?;
        line.push('\n');
        let Some(orders) = &mut self.orders else {
            return Err(self.gone(|| "was told to exit".to_owned()));
        };
        let sent = orders
            .write_all(line.as_bytes())
            .and_then(|()| orders.flush());
        match sent {
            Ok(()) => Ok(()),
            Err(error) => Err(self.gone(|| format!("takes no orders: {error}"))),
        }
    }

    fn answer(
        &mut self,
        patience: Duration,
        interrupt: Option<&Interrupt>,
    ) -> Result<Answer, Problem> {
        let begun = Instant::now();
        loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.gone(|| "closed its output".to_owned()));
                }
                Err(RecvTimeoutError::Timeout) => {
                    interrupt.map_or(Ok(()), Interrupt::check)?;
                    if begun.elapsed() > patience {
                        let seconds = patience.as_secs();
                        return Err(Problem::Target(format!("no answer for {seconds} s")));
                    }
                }
            }
        }
    }

    /// Why it no longer speaks: how it exited, or `otherwise` if it did not.
    fn gone(&mut self, otherwise: impl FnOnce() -> String) -> Problem {
        match self.end() {
            Some(status) => Problem::TargetGone(status),
            None => Problem::Target(otherwise()),
        }
    }

    /// Closes its input and waits for it; None if it had to be killed.
    fn end(&mut self) -> Option<ExitStatus> {
        // Not flushed: what is left in a buffer is an order that it did not take.
        self.orders.take().map(|orders| orders.into_parts());
        let begun = Instant::now();
        while begun.elapsed() < LONGEST_EXIT {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) => std::thread::sleep(LOOK / 10),
                Err(_) => break,
            }
        }
        // Errors here mean that it is gone after all.
        let _ = self.child.kill();
        let _ = self.child.wait();
        None
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.end();
    }
}

/// The answers; what else a library prints there is passed on to the user.
fn read(output: ChildStdout) -> impl Iterator<Item = Answer> {
    let lines = BufReader::new(output).lines().map_while(Result::ok);
    lines.filter_map(|line| match serde_json::from_str(&line) {
        Ok(answer) => Some(answer),
        Err(_) => {
            eprintln!("{line}");
            None
        }
    })
}

fn unexpected(answer: &Answer) -> Problem {
    match answer {
        Answer::Refused(text) => Problem::Target(text.clone()),
        other => Problem::Target(format!("unexpected answer {other:?}")),
    }
}
