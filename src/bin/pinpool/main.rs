//! The `pinpool` command-line tool.

mod bench;
mod env;
mod load;
mod load_report;
mod logger;
mod replay;
mod table;
mod terminal;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::terminal::Terminal;

/// A pool of page-locked host memory for loaders that feed GPUs.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Load(load::Args),
    Replay(replay::ReplayArgs),
    Bench(bench::BenchArgs),
    Env(env::EnvArgs),
}

/// Exit status of a subcommand that did not succeed. clap itself exits with 2 for a wrong command line.
#[derive(Debug, Clone, Copy)]
enum ExitError {
    Failure = 1,
    /// Settings contradict each other or cannot be met.
    Settings = 2,
    /// Ctrl-C, by the shells' convention: 128 plus the signal's number.
    Interrupted = 130,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let terminal = Terminal::new();
    // `replay` prints the pool's diagnostics as part of its result, and `env` prints the warnings itself.
    let default_filter = if matches!(cli.command, Command::Load(_)) { "warn,pinpool=info" } else { "error" };
    logger::init(&terminal, default_filter);
    let result = match cli.command {
        Command::Load(args) => load::run(&args, &terminal),
        Command::Replay(args) => terminal.report(replay::run(&args)),
        Command::Bench(args) => bench::run(&args, &terminal),
        Command::Env(args) => env::run(&args, &terminal),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(error as u8),
    }
}
