//! `pinpool doctor`: checks whether this machine can provide pinned memory, with a remedy for each problem.
//!
//! ```text
//!   settings ──┐
//!   machine ───┼──▶ findings (check, level, what was found, remedy) ──▶ table or JSON, exit status
//!   backends ──┘    each pins a little and releases it
//! ```
//!
//! | file | owns |
//! | --- | --- |
//! | `settings` | the variables, and their problems |
//! | `machine` | NUMA nodes, limits, cgroups, memory pressure, the shared limit |
//! | `memory` | a trial of each backend, the backend and limit of a pool, the reserve |
//! | `probe` | driver queries, each in its own process, so that a driver that crashes is a finding |
//! | `bench` | `--bench`: what pinning, hits and copies cost here |

mod bench;
mod machine;
mod memory;
mod probe;
mod settings;

use std::error::Error;
use std::time::Duration;

use clap::Args;
use pinpool::unstable::config::text::{parse_bytes, parse_duration};
use pinpool::unstable::{Finding, Severity};
use serde_json::json;

use pinpool_cli::exit::ExitError;
use pinpool_cli::table::columns_left;
use pinpool_cli::terminal::{Terminal, one_line};

pub(crate) use probe::{ProbeArgs, run_probe};

/// Check GPU, driver, backends, limits and settings
///
/// Each backend pins a little memory and releases it. Exits with 0 if pinned memory for the GPU is available and the reserve
/// fits, with 1 if not, and with 2 if the settings are invalid. With --settings it lists the PINPOOL_ variables, and exits with 2
/// if they are invalid or contradict each other. With --bench it measures pinning, hits and copies, compared with malloc and the
/// driver.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool doctor --reserve 8G
  gpu      ok     GPU 0 of 1, NVIDIA H100 80GB HBM3, CUDA 13.0, libcuda.so.1
  choice   ok     auto selects vmm: pinned for the GPU
  reserve  error  8.0GiB exceeds the limit of 4.0GiB
                  -> lower the reserve or raise PINPOOL_MAX_BYTES")]
pub(crate) struct DoctorArgs {
    /// Ordinal of the GPU [default: PINPOOL_DEVICE]
    #[arg(long, value_name = "N")]
    device: Option<u32>,

    /// Plan this reserve [default: PINPOOL_RESERVE]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    reserve: Option<u64>,

    /// Timeout of each driver query
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    timeout: Duration,

    /// List the PINPOOL_ variables and their problems
    #[arg(long, conflicts_with_all = ["bench", "device", "reserve", "json"])]
    settings: bool,

    /// With --settings, list every variable
    #[arg(long, requires = "settings")]
    all: bool,

    /// Measure pinning, hits and copies
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

pub(crate) fn run(args: &DoctorArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    if args.settings {
        return Ok(settings::run(args.all, terminal)?);
    }
    if args.bench {
        return bench::run(args.bytes, args.size, args.json, terminal);
    }
    let (config, mut findings) = settings::checked(args.device, args.reserve);
    let ask = |name| probe::ask(name, args.device, args.timeout);
    let gpu = ask(probe::GPU);
    findings.push(gpu.finding.clone());
    let mut backends = memory::try_backends(&config, &gpu, ask);
    findings.append(&mut backends.findings);
    let source = backends.chosen.as_deref();
    findings.extend(machine::examine(&config, source, backends.max_bytes));
    let planned = args.reserve.unwrap_or(config.reserve);
    let plan = source.map(|source| memory::plan_reserve(source, &config, &backends, planned));
    let (reserve, of_plan) = plan.unwrap_or_default();
    findings.extend(of_plan);
    let of_gpu = memory::result(config.device, &gpu.finding, source, backends.works);
    let (status, result) = conclude(&findings, of_gpu);
    findings.push(result);
    let printed = if args.json {
        terminal.print(json!({
            "status": status.map_or_else(|error| error as u8, |()| 0),
            "device": config.device,
            "backend": source.map(|source| source.name()),
            "pinned_by": source.and_then(|source| source.pinned_by()).map(pinpool::PinnedBy::name),
            "gpu": backends.works && source.is_some_and(|source| source.pinned_by().is_some() && source.needs_gpu()),
            "max_bytes": backends.max_bytes,
            "reserve": reserve,
            "findings": findings.iter().map(probe::encode).collect::<Vec<_>>(),
        }))
    } else {
        terminal.print(table(&findings).trim_end())
    };
    Ok(status.and(printed)?)
}

/// Returns the exit status and the last finding, which is `of_gpu` unless one of `findings` is an error.
fn conclude(findings: &[Finding], of_gpu: Finding) -> (Result<(), ExitError>, Finding) {
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error);
    let errors: Vec<_> = errors.map(|error| error.check).collect();
    match errors.first() {
        _ if errors.contains(&settings::CHECK) => {
            let refused = Finding::error(of_gpu.check, "no pool can be built with these settings");
            (Err(ExitError::Settings), refused.remedy("correct the settings named above"))
        }
        Some(check) if of_gpu.severity == Severity::Ok => {
            let failed = Finding::error(of_gpu.check, format!("{}, but {check} failed", of_gpu.found));
            (Err(ExitError::Failure), failed.remedy(format!("see {check} above")))
        }
        None if of_gpu.severity == Severity::Ok => (Ok(()), of_gpu),
        _ => (Err(ExitError::Failure), of_gpu),
    }
}

/// Returns a table with a line for each finding, and its remedy below.
fn table(findings: &[Finding]) -> String {
    let rows = findings.iter().flat_map(|Finding { check, severity, found, remedy, .. }| {
        let remedy = remedy.iter().map(|remedy| vec![String::new(), String::new(), format!("-> {}", one_line(remedy))]);
        std::iter::once(vec![(*check).to_owned(), severity.name().to_owned(), one_line(found)]).chain(remedy)
    });
    columns_left(&rows.collect::<Vec<_>>())
}
