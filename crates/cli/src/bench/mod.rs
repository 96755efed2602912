//! `pinpool bench`: measurements of the pool on this machine, without cargo.

mod baselines;
mod copy;
mod destination;
mod hit;
#[cfg(target_os = "linux")]
mod keep;
mod loader;
mod patterns;
mod pin;
mod producers;
mod requested;
mod reserve;
mod stall;
mod statistics;

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::exit::ExitError;
use crate::terminal::Terminal;
use crate::threads::TooManyThreads;

/// Measure the pool on this machine
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
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
    #[cfg(target_os = "linux")]
    Keep(keep::KeepArgs),
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

pub(crate) fn run(args: &BenchArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let BenchArgs { bench, json } = args;
    match bench {
        Bench::Hit(args) => print(args.measure(), *json, terminal),
        Bench::Pin(args) => print(args.measure(), *json, terminal),
        Bench::Reserve(args) => print(args.measure(), *json, terminal),
        Bench::Stall(args) => print(args.measure(), *json, terminal),
        Bench::Copy(args) => print(args.measure(), *json, terminal),
        Bench::Loader(args) => print(args.measure(), *json, terminal),
        #[cfg(target_os = "linux")]
        Bench::Keep(args) => print(args.measure(), *json, terminal),
    }
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
