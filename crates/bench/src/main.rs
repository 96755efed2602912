//! Benchmarks of the pool, a soak test and the conformance player, for machines without cargo.

mod baselines;
mod conformance;
mod copy;
mod destination;
mod hit;
mod patterns;
mod pin;
mod requested;
mod soak;
mod stall;
mod statistics;
mod threads;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pinpool_cli::logger;
use serde_json::Value;

use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Measure and test the pool on this machine
#[derive(Debug, Parser)]
#[command(name = "pinpool-bench", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,

    /// Print the report on one line
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Bench {
    Hit(hit::HitArgs),
    Pin(pin::PinArgs),
    Stall(stall::StallArgs),
    Copy(copy::CopyArgs),
    Soak(soak::SoakArgs),
    Conformance(conformance::ConformanceArgs),
}

type Measured<T> = Result<T, BenchError>;

#[derive(Debug, thiserror::Error)]
enum BenchError {
    /// Invalid arguments.
    #[error("{0}")]
    Setting(String),
    /// None of the requested backends is available, or the numbers are invalid.
    #[error("{0}")]
    Failure(String),
    /// The system cannot create the requested number of threads.
    #[error(
        "created {made} of {asked} threads ({error}): raise the limit on processes (`ulimit -u`, pids.max of the cgroup) or on \
         memory (`ulimit -v`), or request fewer threads"
    )]
    TooManyThreads { made: usize, asked: usize, error: io::Error },
    #[error(transparent)]
    Pool(#[from] pinpool::Error),
}

fn main() -> ExitCode {
    let Cli { bench, json } = Cli::parse();
    let terminal = Terminal::default();
    logger::init(&terminal, "error");
    let measured = match bench {
        Bench::Hit(args) => measured(args.measure(), json, &terminal),
        Bench::Pin(args) => measured(args.measure(), json, &terminal),
        Bench::Stall(args) => measured(args.measure(), json, &terminal),
        Bench::Copy(args) => measured(args.measure(), json, &terminal),
        Bench::Soak(args) => soak::run(&args, json, &terminal),
        Bench::Conformance(args) => args.run(&terminal),
    };
    measured.map_or_else(|error| ExitCode::from(error as u8), |()| ExitCode::SUCCESS)
}

fn measured(report: Measured<Value>, json: bool, terminal: &Terminal) -> Result<(), ExitError> {
    print(&report.map_err(|error| error.refused(terminal))?, json, terminal)
}

impl BenchError {
    /// Prints the error and returns the exit status.
    fn refused(self, terminal: &Terminal) -> ExitError {
        if let BenchError::Pool(error) = self {
            return terminal.refuse(&error);
        }
        terminal.message(&self);
        if matches!(self, BenchError::Setting(_)) { ExitError::Settings } else { ExitError::Failure }
    }
}

/// Prints the report as one JSON object.
fn print(report: &Value, json: bool, terminal: &Terminal) -> Result<(), ExitError> {
    if json { terminal.print(report) } else { terminal.print(format_args!("{report:#}")) }
}
