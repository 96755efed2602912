//! `pinpool stats` and `pinpool dump`: what the pools of a process have counted, and who holds what, as their own text.

use std::error::Error;

use clap::Args;
use serde_json::Value;

use super::{name_of, pools, statistics_of};
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Print the statistics of the pools of a running process: gets, misses with their reasons, bytes by state, times of calls
///
/// The process must have been started with PINPOOL_SOCKET=1, or with a path there. `pinpool why` says what they mean.
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// Number of the process, or its socket
    #[arg(value_name = "PID|SOCKET")]
    target: String,

    /// Print the JSON object that the process sends
    #[arg(long)]
    json: bool,
}

/// Print what the pools of a running process hold and for whom, and what a get without memory would be told
///
/// The process must have been started with PINPOOL_SOCKET=1, or with a path there. Disturbs nothing in it.
#[derive(Debug, Args)]
pub(crate) struct DumpArgs {
    /// Number of the process, or its socket
    #[arg(value_name = "PID|SOCKET")]
    target: String,
}

pub(crate) fn run(args: &StatsArgs, terminal: &Terminal) -> Result<(), ExitError> {
    if args.json {
        let printed = statistics_of(&args.target).map(|object| terminal.print(object));
        return printed.unwrap_or_else(|error| terminal.report(Err(error)));
    }
    terminal.report(print(&args.target, "table", terminal))
}

pub(crate) fn run_dump(args: &DumpArgs, terminal: &Terminal) -> Result<(), ExitError> {
    terminal.report(print(&args.target, "dump", terminal))
}

/// The text that each pool has of itself under `field`.
fn print(target: &str, field: &str, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let object = statistics_of(target)?;
    let pools = pools(&object);
    if pools.is_empty() {
        return Err(format!("{target}: the process has no pool now").into());
    }
    for (at, pool) in pools.iter().enumerate() {
        let text =
            pool[field].as_str().ok_or("the process runs a pinpool that does not send this: start it with this one")?;
        let between = if at > 0 { "\n" } else { "" };
        terminal.print(format_args!("{between}{}", named(pool, text))).map_err(|_| "stdout: it is closed")?;
    }
    Ok(())
}

/// The lines of `text`, with the name of the pool where the text has none.
fn named(pool: &Value, text: &str) -> String {
    let lines: Vec<_> = text.lines().map(super::printable).collect();
    let name = name_of(pool);
    if lines.first().is_some_and(|line| line.contains(&name)) {
        lines.join("\n")
    } else {
        format!("{name}: {}", lines.join("\n"))
    }
}
