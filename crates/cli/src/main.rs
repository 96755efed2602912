//! The `pinpool` command-line tool.

mod advise;
mod bench;
mod diff;
mod doctor;
mod env;
mod files;
mod input;
mod inspect;
mod interrupt;
mod ledger;
mod load;
mod pages;
mod replay;
mod report;
#[cfg(target_os = "linux")]
mod run;
mod served;
mod set;
mod top;
mod trace;
mod why;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::{Terminal, Verbosity};

/// A pool of page-locked host memory for loaders that feed GPUs.
#[derive(Debug, Parser)]
#[command(name = "pinpool", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Errors and results only: no progress bar, no warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,

    /// Every batch and every failure, and the log from `debug` on
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Load(load::Args),
    Replay(replay::ReplayArgs),
    Advise(advise::AdviseArgs),
    Trace(trace::TraceArgs),
    Bench(bench::BenchArgs),
    Diff(diff::DiffArgs),
    Doctor(doctor::DoctorArgs),
    Dump(served::stats::DumpArgs),
    #[command(name = "doctor-probe", hide = true)]
    DoctorProbe(doctor::ProbeArgs),
    Env(env::EnvArgs),
    Inspect(inspect::InspectArgs),
    Ledger(ledger::LedgerArgs),
    Metrics(served::metrics::MetricsArgs),
    Report(report::ReportArgs),
    #[cfg(target_os = "linux")]
    Run(run::RunArgs),
    Stats(served::stats::StatsArgs),
    Top(top::TopArgs),
    Why(why::WhyArgs),
    #[command(hide = true)]
    Keep(RetiredArgs),
    Completions(pages::CompletionsArgs),
    Man(pages::ManArgs),
}

/// The arguments of a command that was removed.
#[derive(Debug, clap::Args)]
struct RetiredArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _ignored: Vec<std::ffi::OsString>,
}

fn retired(terminal: &Terminal, command: &str, instead: &str) -> Result<(), ExitError> {
    terminal.message(format_args!("`pinpool {command}` was removed: {instead}"));
    Err(ExitError::Settings)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let terminal = Terminal::default();
    let verbosity = match (cli.quiet, cli.verbose) {
        (true, _) => Verbosity::Quiet,
        (false, true) => Verbosity::Verbose,
        (false, false) => Verbosity::Normal,
    };
    let default_filter = match (verbosity, &cli.command) {
        (Verbosity::Quiet, _) => "error",
        (Verbosity::Verbose, _) => "debug",
        (Verbosity::Normal, Command::Load(_)) => "warn,pinpool=info",
        // `replay` prints the pool's diagnostics as part of its result, and `env` prints the warnings itself.
        (Verbosity::Normal, _) => "error",
    };
    pinpool_cli::logger::init(&terminal, default_filter);
    let result = match cli.command {
        Command::Load(args) => load::run(&args, verbosity, &terminal),
        Command::Replay(args) => replay::run(&args, &terminal),
        Command::Advise(args) => advise::run(&args, verbosity, &terminal),
        Command::Trace(args) => trace::run(&args, &terminal),
        Command::Bench(args) => bench::run(&args, &terminal),
        Command::Diff(args) => diff::run(&args, &terminal),
        Command::Doctor(args) => doctor::run(&args, &terminal),
        Command::DoctorProbe(args) => doctor::run_probe(&args, &terminal),
        Command::Env(args) => env::run(&args, &terminal),
        Command::Inspect(args) => inspect::run(&args, &terminal),
        Command::Ledger(args) => ledger::run(&args, &terminal),
        Command::Report(args) => report::run(&args, &terminal),
        #[cfg(target_os = "linux")]
        Command::Run(args) => run::run(&args, &terminal),
        Command::Stats(args) => served::stats::run(&args, &terminal),
        Command::Dump(args) => served::stats::run_dump(&args, &terminal),
        Command::Metrics(args) => served::metrics::run(&args, &terminal),
        Command::Top(args) => top::run(&args, &terminal),
        Command::Why(args) => why::run(&args, &terminal),
        Command::Keep(_) => retired(&terminal, "keep", "reserve memory at the start of each process (PINPOOL_RESERVE)"),
        Command::Completions(args) => terminal.report(pages::completions(&args, Cli::command())),
        Command::Man(args) => terminal.report(pages::man(&args, Cli::command())),
    };
    // The pools are gone, and with them their recordings are complete.
    let result = match pinpool_replay::failed_recordings() {
        0 => result,
        _ => {
            terminal.message("the recording that was asked for is missing or not complete, as the log says");
            result.and(Err(ExitError::Failure))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(error as u8),
    }
}
