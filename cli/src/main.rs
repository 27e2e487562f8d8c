//! The `memfabric` command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use memfabric::{doctor, integrate, replay};

/// MemFabric transport for Mooncake TENT
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(replay::Args),
    Integrate(integrate::Args),
    Doctor(doctor::Args),
    /// The other process of a replay
    #[command(hide = true)]
    ReplayTarget(replay::target::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Replay(args) => replay::run(args),
        Command::ReplayTarget(args) => replay::target::run(args),
        Command::Integrate(args) => integrate::run(args),
        Command::Doctor(args) => doctor::run(args),
    }
}
