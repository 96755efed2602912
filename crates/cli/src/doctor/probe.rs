//! Driver queries, each run in a separate process of this program, which prints the answer.
//!
//! If the driver crashes that process or hangs, this is a finding, and this process does not use the driver.

use std::error::Error;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use clap::Args;
use pinpool::source::Source;
use pinpool::source::SourceError;
use pinpool::unstable::backend::{self, Trial};
use pinpool::unstable::{Finding, Severity};
use pinpool_os::format::{Size, Time};
use serde_json::{Value, json};

use super::settings;
use pinpool_cli::terminal::Terminal;

/// The query for a device.
pub(super) const GPU: &str = "gpu";
/// The backends of the driver, best first.
pub(super) const BACKENDS: [&str; 3] = ["vmm", "register", "cuda"];

/// Run one driver query of `doctor`
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// gpu, vmm, register or cuda
    name: String,

    #[arg(long)]
    device: Option<u32>,
}

/// The answer to a query.
pub(super) struct Answer {
    pub(super) finding: Finding,
    /// Whether the process that ran the query crashed or hung.
    pub(super) has_crashed: bool,
}

/// Runs a query in its own process, for at most `timeout`.
pub(super) fn ask(name: &'static str, device: Option<u32>, timeout: Duration) -> Answer {
    let how = match run_in_child(name, device, timeout).map(|text| decode(name, &text)) {
        Ok(Some(finding)) => return Answer { finding, has_crashed: false },
        Ok(None) => "gave no answer".to_owned(),
        Err(how) => how,
    };
    let finding = Finding::error(name, format!("the process that tried it {how}"));
    Answer { finding: finding.remedy("update the driver"), has_crashed: true }
}

/// Returns the output of the process, or describes how it ended.
fn run_in_child(name: &str, device: Option<u32>, timeout: Duration) -> Result<String, String> {
    let not_started = |error: io::Error| format!("could not be started: {error}");
    let mut command = Command::new(env::current_exe().map_err(not_started)?);
    command.args(["--quiet", "doctor-probe", name]);
    command.args(device.map(|device| format!("--device={device}")));
    // A driver may write to stderr, which is not part of the answer.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(not_started)?;
    let begun = Instant::now();
    // The answer is shorter than the buffer of a pipe, so the child never waits for this process.
    while child.try_wait().map_err(not_started)?.is_none() {
        if begun.elapsed() >= timeout {
            let _ended = child.kill();
            let _ended = child.wait();
            return Err(format!("did not end within {}", Time(timeout)));
        }
        thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().map_err(not_started)?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("was ended by {}", output.status)),
    }
}

/// Runs a query in this process and prints the answer. The driver may end the process.
pub(crate) fn run_probe(args: &ProbeArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let config = settings::checked(args.device, None).0;
    let finding = match BACKENDS.into_iter().find(|backend| *backend == args.name) {
        Some(name) => match config.driver_source(name) {
            Ok(source) => tried(name, &*source, config.device, Severity::Warning),
            Err(finding) => finding,
        },
        None if args.name == GPU => backend::gpu_finding(config.device),
        None => return Err(format!("doctor-probe {}: no such query", args.name).into()),
    };
    Ok(terminal.print(encode(&finding))?)
}

/// Tries `source` and returns the finding, with this severity if the trial fails.
pub(super) fn tried(name: &'static str, source: &dyn Source, device: u32, severity: Severity) -> Finding {
    match backend::try_out(source, device) {
        // The pages of unpinned memory are allocated at the first access, so the time says nothing.
        Ok(Some(Trial { bytes, .. })) if source.pinned_by().is_none() => {
            Finding::ok(name, format!("allocated and released {}", Size(bytes as u64)))
        }
        Ok(Some(Trial { untested: Some(error), .. })) => Finding::note(name, format!("no test copy was made: {error}")),
        Ok(Some(Trial { bytes, took, .. })) => {
            Finding::ok(name, format!("pinned and released {} in {}", Size(bytes as u64), Time(took)))
        }
        Ok(None) => Finding::note(name, "not tried: a stream is capturing a graph"),
        Err(error) => failed(name, severity, error),
    }
}

pub(super) fn failed(check: &'static str, severity: Severity, error: SourceError) -> Finding {
    let (found, remedy) = error.unstable_split();
    remedy.into_iter().fold(Finding::new(check, severity, found), Finding::remedy)
}

/// Encodes the finding as a JSON object.
pub(super) fn encode(Finding { check, severity, found, remedy, .. }: &Finding) -> Value {
    json!({ "check": check, "level": severity.name(), "found": found, "remedy": remedy })
}

fn decode(check: &'static str, text: &str) -> Option<Finding> {
    let object: Value = serde_json::from_str(text).ok()?;
    let levels = [Severity::Ok, Severity::Note, Severity::Warning, Severity::Error];
    let severity = levels.into_iter().find(|severity| object["level"] == severity.name())?;
    let finding = Finding::new(check, severity, object["found"].as_str()?);
    Some(object["remedy"].as_str().into_iter().fold(finding, Finding::remedy))
}
