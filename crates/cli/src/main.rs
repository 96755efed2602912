//! The `pinpool` command-line tool.

mod advise;
mod diagnosis;
mod doctor;
mod files;
mod input;
mod interrupt;
mod load;
mod pages;
mod report;
#[cfg(target_os = "linux")]
mod run;
mod series;
mod served;
mod set;
mod top;
mod trace;
mod why;

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::{Terminal, Verbosity, write_stdout};

/// The commands by purpose, each with an example.
const HELP: &str = "\
{about}

Usage: pinpool [OPTIONS] <COMMAND>

Before the first run:
  doctor   Check GPU, driver and limits      pinpool doctor --reserve 8G
  load     Load files onto the GPU           pinpool load --verify DIR
  run      Run a program with pooled memory  pinpool run -- ./train

A process (PINPOOL_SOCKET=1), a recording (PINPOOL_TRACE=t.gz) or a log:
  why      Explain what a pool costs         pinpool why 4711
  top      Show pools live                   pinpool top 4711
  report   Draw a page of charts             pinpool report t.gz -o page.html
  metrics  Print Prometheus metrics          pinpool metrics --all

A recording:
  advise   Recommend settings                pinpool advise t.gz
  trace    Print or convert a recording      pinpool trace t.gz

Options:
{options}

`pinpool COMMAND --help` lists the options of a command;
`pinpool man COMMAND | man -l -` describes it in full.
";

/// Former commands, and the commands with flags that replace them.
const RENAMED: [(&str, &[&str]); 7] = [
    ("bench", &["doctor", "--bench"]),
    ("diff", &["why"]),
    ("dump", &["top", "--once"]),
    ("env", &["doctor", "--settings"]),
    ("inspect", &["why", "--lines"]),
    ("replay", &["advise", "--replay"]),
    ("stats", &["top", "--once"]),
];
/// Former commands, and what to do instead.
const REMOVED: [(&str, &str); 2] = [
    ("keep", "reserve memory at the start of each process (PINPOOL_RESERVE)"),
    ("ledger", "`pinpool top --all` shows the shared limits and their members"),
];

/// A pool of pinned host memory for CUDA transfers
#[derive(Debug, Parser)]
#[command(name = "pinpool", version, arg_required_else_help = true, help_template = HELP)]
#[command(disable_help_flag = true, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Print results and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = 100)]
    quiet: bool,

    /// Print more messages, and the log at level debug
    #[arg(short, long, global = true, display_order = 100)]
    verbose: bool,

    /// Print help
    #[arg(short, long, global = true, action = ArgAction::HelpShort, display_order = 100)]
    help: Option<bool>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Load(load::LoadArgs),
    #[cfg(target_os = "linux")]
    Run(run::RunArgs),
    Doctor(doctor::DoctorArgs),
    #[command(name = "doctor-probe", hide = true)]
    DoctorProbe(doctor::ProbeArgs),
    Top(top::TopArgs),
    Metrics(served::metrics::MetricsArgs),
    Why(why::WhyArgs),
    Report(report::ReportArgs),
    Advise(advise::AdviseArgs),
    Trace(trace::TraceArgs),
    #[command(hide = true)]
    Completions(pages::CompletionsArgs),
    #[command(hide = true)]
    Man(pages::ManArgs),
}

/// Returns the arguments, with a former command replaced by its successor. Fails for a removed command.
fn arguments() -> Result<Vec<OsString>, Box<dyn Error>> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let at = arguments.iter().skip(1).position(|argument| !argument.to_string_lossy().starts_with('-'));
    let Some(at) = at.map(|at| at + 1) else { return Ok(arguments) };
    if let Some((name, instead)) = REMOVED.iter().find(|(name, _)| arguments[at] == *name) {
        return Err(ExitError::Settings.because(format_args!("`pinpool {name}` was removed: {instead}")));
    }
    if let Some((_, new)) = RENAMED.iter().find(|(name, _)| arguments[at] == *name) {
        arguments.splice(at..=at, new.iter().map(OsString::from));
    }
    Ok(arguments)
}

fn main() -> ExitCode {
    let terminal = Terminal::default();
    match terminal.report(run_command(&terminal)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(error as u8),
    }
}

fn run_command(terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let cli = match Cli::try_parse_from(arguments()?) {
        // `exit` would ignore a failed write to stdout.
        Err(help) if !help.use_stderr() => return Ok(write_stdout(|_| help.print())?),
        parsed => parsed.unwrap_or_else(|error| error.exit()),
    };
    let (verbosity, default_filter) = match (cli.quiet, cli.verbose, &cli.command) {
        (true, ..) => (Verbosity::Quiet, "error"),
        (_, true, _) => (Verbosity::Verbose, "debug"),
        (.., Command::Load(_)) => (Verbosity::Normal, "warn,pinpool=info"),
        // `advise` and `doctor` print these warnings themselves.
        _ => (Verbosity::Normal, "error"),
    };
    pinpool_cli::logger::init(terminal, default_filter);
    let result = match cli.command {
        Command::Load(args) => load::run(&args, verbosity, terminal),
        #[cfg(target_os = "linux")]
        Command::Run(args) => run::run(&args, terminal),
        Command::Doctor(args) => doctor::run(&args, terminal),
        Command::DoctorProbe(args) => doctor::run_probe(&args, terminal),
        Command::Top(args) => top::run(&args, terminal),
        Command::Metrics(args) => served::metrics::run(&args, terminal),
        Command::Why(args) => why::run(&args, terminal),
        Command::Report(args) => report::run(&args, terminal),
        Command::Advise(args) => advise::run(&args, verbosity, terminal),
        Command::Trace(args) => trace::run(&args),
        Command::Completions(args) => pages::completions(&args, Cli::command()),
        Command::Man(args) => pages::man(&args, Cli::command()),
    };
    // The pools have been dropped, so their recordings are complete.
    match pinpool_observe::record::FAILED_RECORDINGS.load(Ordering::Relaxed) {
        0 => result,
        _ => {
            let printed = terminal.report(result);
            terminal.message("the requested recording is missing or incomplete; the log says why");
            Ok(printed.and(Err(ExitError::Failure))?)
        }
    }
}
