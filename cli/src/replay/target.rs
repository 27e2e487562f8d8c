// SPDX-License-Identifier: Apache-2.0
//! The process that owns the pools. Its CPU has no part in the transfers.
#![allow(unsafe_code)] // names memory to the library by number

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use memfabric_transport::{Config, Transport};

use super::content::Content;
use super::emulator;
use super::log::{Log, Verbosity};
use super::memory::Memory;
use super::message::{Answer, Order, Verified};
use super::settings::{self, Own};
use super::side::MISMATCHES_TOLD;
use super::status;

/// The first argument of a process that is a target. Not one of the command's own,
/// which it would suggest to a user.
pub const ROLE: &str = "--replay-target";

/// How the initiator starts its target.
#[derive(clap::Parser)]
pub struct Args {
    /// The emulator if there is none.
    #[arg(long)]
    library: Option<PathBuf>,
    #[arg(long)]
    protocol: String,
    #[arg(long)]
    store: String,
    #[arg(long)]
    block_bytes: usize,
    #[arg(long)]
    slots: usize,
    #[arg(long)]
    pools: usize,
    #[command(flatten)]
    verbosity: Verbosity,
}

/// Serves until told to leave, or until the initiator is gone.
pub fn run(args: Args) -> ExitCode {
    let log = Log::start(args.verbosity);
    match serve(&args, &log) {
        Ok(()) => ExitCode::SUCCESS,
        // The initiator tells the user, if there still is one.
        Err(text) => match answer(&Answer::Refused(text)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
    }
}

fn serve(args: &Args, log: &Log) -> Result<(), String> {
    let own = Own {
        protocol: Some(&args.protocol),
        store: &args.store,
        initiator: false,
    };
    let config = settings::config(args.library.as_deref(), own, args.verbosity)
        .map_err(|error| error.to_string())?;
    let pools = (0..args.pools)
        .map(|_| Memory::new(args.slots, args.block_bytes))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("no memory for the pool: {error}"))?;
    // Whatever becomes of the transport, an initiator may still write there.
    let pools: &[Memory] = pools.leak();
    let transport = up(&config, pools).map_err(|error| error.to_string())?;
    let ready = Answer::Ready {
        endpoint: transport.endpoint().unwrap_or_default(),
        pools: pools.iter().map(|pool| pool.address(0)).collect(),
    };
    // An output that nobody reads and an input that ends mean that the initiator
    // is gone, and so there is nothing left to do.
    if answer(&ready).is_err() {
        return Ok(());
    }
    let content = Content::of(args.block_bytes);
    let mut verified = Verified::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let order = serde_json::from_str(&line).map_err(|error| format!("bad order: {error}"))?;
        match order {
            Order::Verify { pool, blocks } => {
                let pool = pools.get(pool).ok_or("bad order: no such pool")?;
                verify(pool, content, &blocks, &mut verified)?;
            }
            Order::Sum => {
                // Its leaving is no news.
                log.errors_only();
                (verified.resident_bytes, _) = status::resident_and_peak_bytes();
                if answer(&Answer::Verified(verified.clone())).is_err() {
                    break;
                }
            }
            Order::Leave => {
                transport.uninstall().map_err(|error| error.to_string())?;
                let violations = match args.library {
                    Some(_) => Vec::new(),
                    None => emulator::violations(),
                };
                let _ = answer(&Answer::Left { violations });
                break;
            }
        }
    }
    Ok(())
}

fn up(config: &Config, pools: &'static [Memory]) -> Result<Transport, memfabric_transport::Error> {
    let transport = Transport::new();
    transport.install(config)?;
    let regions: Vec<_> = pools.iter().map(Memory::region).collect();
    // SAFETY: the pools stay until the process ends.
    unsafe { transport.register(&regions) }?;
    Ok(transport)
}

fn verify(
    pool: &Memory,
    content: Content,
    blocks: &[(u64, usize)],
    verified: &mut Verified,
) -> Result<(), String> {
    for (block, slot) in blocks {
        if *slot >= pool.len() {
            return Err(format!("bad order: no slot {slot}"));
        }
        verified.blocks += 1;
        if let Err(mismatch) = content.check(pool.block(*slot), *block, *slot) {
            verified.mismatches += 1;
            if verified.first_mismatches.len() < MISMATCHES_TOLD {
                verified.first_mismatches.push(mismatch);
            }
        }
    }
    Ok(())
}

fn answer(answer: &Answer) -> std::io::Result<()> {
    let mut line = serde_json::to_string(answer)?;
    line.push('\n');
    let mut output = std::io::stdout().lock();
    output.write_all(line.as_bytes())?;
    output.flush()
}
