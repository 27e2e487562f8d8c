//! The `memfabric` command.

mod integrate;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// MemFabric transport for Mooncake TENT
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Integrate(integrate::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Integrate(args) => integrate::run(args),
    }
}
