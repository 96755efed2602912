//! `pinpool doctor`: what this machine has for pinned memory, and what to do about the rest.
//!
//! [`examine`] looks; this prints, and turns the verdict into an exit status. Each question to the driver is asked by this
//! program started again, so that a driver that ends the process is a row of the report.
//!
//! | file | owns |
//! | --- | --- |
//! | `examine` | what is looked at, in the order of the report |
//! | `machine` | the machine around the pool: nodes, limits, control groups, pressure |
//! | `memory` | each back-end tried, the one that a pool takes, what a reserve costs there |
//! | `probe` | one question to the driver, and its answer as text |
//! | `settings` | `--settings`: the variables, and what is wrong with them |
//! | `unmet` | what the settings ask for and this machine does not have |
//! | `bench` | `--bench`: what pinning, hits and copies cost here |

use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use clap::Args;
use pinpool::unstable::config::text::{parse_bytes, parse_duration};
use serde::Serialize;

use pinpool_cli::exit::ExitError;
use pinpool_cli::table::columns_left;
use pinpool_cli::terminal::Terminal;

mod bench;
mod examine;
mod machine;
mod memory;
mod probe;
mod settings;
mod unmet;

use bench::Bench;
use examine::{Diagnosis, Examination, examine, probe};

/// Check GPU, driver, backends, limits and settings
///
/// Each backend pins a little memory and releases it. Exits with 0 if pinned memory for the GPU is available and the reserve fits, with 1
/// if not, and with 2 if the settings are invalid. With --settings it lists the PINPOOL_ variables, and exits with 2 if they are invalid
/// or contradict each other and with 1 if this machine lacks something they require. With --bench it measures pinning, hits and copies
/// next to malloc and the driver.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool doctor --reserve 8G
  gpu      ok       NVIDIA H100 80GB HBM3, driver 580.95
  choice   ok       vmm: pinned memory for the GPU
  reserve  warning  8 GiB is over the limit of 4 GiB
                    -> lower PINPOOL_RESERVE or raise PINPOOL_MAX_BYTES")]
pub(crate) struct DoctorArgs {
    /// Ordinal of the GPU [default: PINPOOL_DEVICE]
    #[arg(long, value_name = "N")]
    device: Option<u32>,

    /// Plan a reserve of this size [default: PINPOOL_RESERVE]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    reserve: Option<u64>,

    /// Timeout of each driver query, which runs in its own process
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    probe_limit: Duration,

    /// List the variables that are set or commonly needed, and their problems
    #[arg(long, conflicts_with_all = ["bench", "device", "reserve", "json"])]
    settings: bool,

    /// With --settings, list every variable
    #[arg(long, requires = "settings")]
    all: bool,

    /// Measure what pinning, hits and copies cost on this machine
    #[arg(long, conflicts_with_all = ["device", "reserve"])]
    bench: bool,

    /// With --bench, bytes to pin at once
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_bytes, requires = "bench")]
    bytes: u64,

    /// With --bench, bytes of a buffer
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_bytes, requires = "bench")]
    size: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Asks the driver one question of `doctor`
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct ProbeArgs {
    /// gpu, vmm, register or cuda
    name: String,

    #[arg(long)]
    device: Option<u32>,
}

/// The name of that subcommand.
const PROBE: &str = "doctor-probe";

pub(crate) fn run(args: &DoctorArgs, terminal: &Terminal) -> Result<(), ExitError> {
    if args.settings {
        return settings::run(args.all, terminal);
    }
    if args.bench {
        return Bench { bytes: args.bytes, size: args.size }.run(args.json, terminal);
    }
    let examination = Examination { device: args.device, reserve_bytes: args.reserve };
    let diagnosis = examine(&examination, &|name| ask_apart(name, args.device, args.probe_limit));
    let text = if args.json { Report::of(&diagnosis).json() } else { table(&diagnosis) };
    let printed = terminal.print(text.trim_end());
    diagnosis.status.and(printed)
}

/// The other side of [`ask_apart`].
pub(crate) fn run_probe(args: &ProbeArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let examination = Examination { device: args.device, ..Examination::default() };
    let answer = probe(&args.name, &examination).ok_or(ExitError::Settings)?;
    terminal.print(answer.trim_end_matches('\n'))
}

/// The answer of this program, started again, to one question; or how that process ended.
fn ask_apart(name: &str, device: Option<u32>, limit: Duration) -> Result<String, String> {
    let not_asked = |error: io::Error| format!("could not be started: {error}");
    let mut command = Command::new(env::current_exe().map_err(not_asked)?);
    command.args(["--quiet", PROBE, name]);
    if let Some(device) = device {
        command.args(["--device", &device.to_string()]);
    }
    // The report is all that is printed; a driver may write to stderr.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(not_asked)?;
    let begun = Instant::now();
    // The answer is shorter than what a pipe holds, so the child never waits for this process.
    while child.try_wait().map_err(not_asked)?.is_none() {
        if begun.elapsed() >= limit {
            let _ended = child.kill();
            let _ended = child.wait();
            return Err(format!("did not end within {limit:?}"));
        }
        thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().map_err(not_asked)?;
    if !output.status.success() {
        return Err(format!("was ended by {}", cause(output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What ended a process.
fn cause(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    let Some(signal) = status.signal() else { return status.to_string() };
    let name = [(4, "SIGILL"), (6, "SIGABRT"), (7, "SIGBUS"), (8, "SIGFPE"), (9, "SIGKILL"), (11, "SIGSEGV")];
    let name = name.iter().find(|(number, _)| *number == signal).map_or("", |(_, name)| name);
    format!("signal {signal} {name}").trim_end().to_owned()
}

/// A line for each finding, and below it what to do.
fn table(diagnosis: &Diagnosis) -> String {
    let mut rows = Vec::new();
    for finding in &diagnosis.findings {
        let found = terminal_safe(&finding.found);
        rows.push(vec![finding.check.to_owned(), finding.level.name().to_owned(), found]);
        let remedy = finding
            .remedy
            .iter()
            .map(|remedy| vec![String::new(), String::new(), format!("-> {}", terminal_safe(remedy))]);
        rows.extend(remedy);
    }
    columns_left(&rows)
}

/// Values of variables and paths are untrusted: nothing of them moves the cursor.
fn terminal_safe(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// The JSON object; docs/tool.md has its keys.
#[derive(Debug, Serialize)]
struct Report<'a> {
    status: u8,
    device: u32,
    backend: Option<&'a str>,
    pinned: bool,
    gpu: bool,
    max_bytes: Option<u64>,
    reserve: Option<Reserve>,
    findings: Vec<Row<'a>>,
}

#[derive(Debug, Serialize)]
struct Reserve {
    bytes: u64,
    fits: bool,
    seconds: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Row<'a> {
    check: &'a str,
    level: &'a str,
    found: &'a str,
    remedy: Option<&'a str>,
}

impl<'a> Report<'a> {
    fn of(diagnosis: &'a Diagnosis) -> Self {
        let reserve = diagnosis.reserve.map(|plan| Reserve {
            bytes: plan.bytes,
            fits: plan.fits,
            seconds: plan.estimate.map(|time| time.as_secs_f64()),
        });
        let row = |finding: &'a pinpool::unstable::Finding| Row {
            check: finding.check,
            level: finding.level.name(),
            found: &finding.found,
            remedy: finding.remedy.as_deref(),
        };
        Self {
            status: diagnosis.status.map_or_else(|error| error as u8, |()| 0),
            device: diagnosis.device,
            backend: diagnosis.backend,
            pinned: diagnosis.is_pinned,
            gpu: diagnosis.serves_gpu,
            max_bytes: diagnosis.max_bytes,
            reserve,
            findings: diagnosis.findings.iter().map(row).collect(),
        }
    }

    fn json(&self) -> String {
        // Numbers and texts alone: there is nothing in it that cannot be written.
        serde_json::to_string(self).unwrap_or_default()
    }
}
