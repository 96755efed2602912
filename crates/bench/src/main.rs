//! Instruments: measurements of the pool, and its random use for long, on any machine without cargo.

mod baselines;
mod copy;
mod destination;
mod hit;
mod loader;
mod patterns;
mod pin;
mod producers;
mod requested;
mod reserve;
mod soak;
mod stall;
mod statistics;
mod threads;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pinpool_cli::logger;
use serde::Serialize;

use crate::threads::TooManyThreads;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Measures the pool on this machine, or uses it at random for long
#[derive(Debug, Parser)]
#[command(name = "pinpool-bench", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,

    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Bench {
    Hit(hit::HitArgs),
    Pin(pin::PinArgs),
    Reserve(reserve::ReserveArgs),
    Stall(stall::StallArgs),
    Copy(copy::CopyArgs),
    Loader(loader::LoaderArgs),
    Soak(soak::SoakArgs),
}

/// Result of a bench. Its fields are the keys of the JSON object.
trait Report: Serialize {
    /// Lines of text, and back-ends that could not be measured with the reason.
    fn table(&self) -> (Vec<String>, &[String]);
}

type Measured<T> = Result<T, BenchError>;

#[derive(Debug, thiserror::Error)]
enum BenchError {
    /// Arguments that cannot be met.
    #[error("{0}")]
    Setting(String),
    /// None of the requested back-ends is available, or the figures would be invalid.
    #[error("{0}")]
    Failure(String),
    #[error(transparent)]
    Threads(#[from] TooManyThreads),
    #[error(transparent)]
    Pool(#[from] pinpool::Error),
}

fn main() -> ExitCode {
    let Cli { bench, json } = Cli::parse();
    let terminal = Terminal::default();
    logger::init(&terminal, "error");
    let measured = match bench {
        Bench::Hit(args) => print(args.measure(), json, &terminal),
        Bench::Pin(args) => print(args.measure(), json, &terminal),
        Bench::Reserve(args) => print(args.measure(), json, &terminal),
        Bench::Stall(args) => print(args.measure(), json, &terminal),
        Bench::Copy(args) => print(args.measure(), json, &terminal),
        Bench::Loader(args) => print(args.measure(), json, &terminal),
        Bench::Soak(args) => soak::run(&args, json, &terminal),
    };
    measured.map_or_else(|error| ExitCode::from(error as u8), |()| ExitCode::SUCCESS)
}

fn print(report: Measured<impl Report>, json: bool, terminal: &Terminal) -> Result<(), ExitError> {
    let report = report.map_err(|error| {
        if let BenchError::Pool(error) = error {
            return terminal.refuse(&error);
        }
        terminal.message(&error);
        if matches!(error, BenchError::Setting(_)) { ExitError::Settings } else { ExitError::Failure }
    })?;
    if json {
        return terminal.print(serde_json::json!(report));
    }
    let (mut lines, missing) = report.table();
    lines.extend(missing.iter().map(|why| format!("  not here: {why}")));
    terminal.print(lines.join("\n"))
}
