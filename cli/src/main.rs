// SPDX-License-Identifier: Apache-2.0
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
}

fn main() -> ExitCode {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|role| role == replay::target::ROLE)
    {
        let args = std::env::args_os().skip(1);
        return replay::target::run(replay::target::Args::parse_from(args));
    }
    match Cli::parse().command {
        Command::Replay(args) => replay::run(args),
        Command::Integrate(args) => integrate::run(args),
        Command::Doctor(args) => doctor::run(args),
    }
}
