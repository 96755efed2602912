//! The `pinpool` tool.
//!
//! | file | owns |
//! | --- | --- |
//! | `main` | the command line: which subcommand runs, and with which status the process ends |
//! | `load` | `pinpool load`: files through the pool to a device |
//! | `replay` | `pinpool replay`: traces through the pool on simulated memory |
//! | `replayed` | what replays cost, as a list or as rows |
//! | `comparison` | the same of all presets and sources beside each other, in Markdown |
//! | `bench` | `pinpool bench`: what the pool costs on this machine |
//! | `env` | `pinpool env`: every setting, its value and where that comes from |
//! | `logger` | the shape of a log line |
//! | `screen` | the terminal: the progress bar, and lines that do not tear it |
//! | `table` | the figures at the end, for people and as JSON |

mod bench;
mod comparison;
mod env;
mod load;
mod logger;
mod replay;
mod replayed;
mod screen;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::screen::Screen;

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

/// How the process ends, apart from `0` and what clap says of a wrong command line (`2`).
#[derive(Debug, Clone, Copy)]
enum Failed {
    /// Something could not be done.
    Work = 1,
    /// Settings contradict each other or cannot be met.
    Settings = 2,
    /// Ctrl-C, as shells count it: 128 and the signal's number.
    Interrupted = 130,
}

impl From<&pinpool::Error> for Failed {
    fn from(error: &pinpool::Error) -> Self {
        if error.is_setting() { Failed::Settings } else { Failed::Work }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let screen = Screen::new();
    // What pools say is part of a replay's result and goes to stdout there; a list of settings carries its warnings.
    let default_filter = if matches!(cli.command, Command::Load(_)) { "warn,pinpool=info" } else { "error" };
    logger::init(&screen, default_filter);
    let ended = match cli.command {
        Command::Load(args) => load::run(&args, &screen),
        Command::Replay(args) => screen.report(replay::run(&args)),
        Command::Bench(args) => bench::run(&args, &screen),
        Command::Env(args) => env::run(&args, &screen),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => ExitCode::from(failed as u8),
    }
}
