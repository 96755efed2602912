//! What this machine has for page-locked memory, what a pool would take of it, and what to do about the rest.
//!
//! ```text
//!   settings ──┐
//!   machine ───┼──▶ findings (check, level, what was found, remedy) ──▶ Diagnosis
//!   memory ────┘    each back-end pins a little and gives it back
//! ```
//!
//! Each question to the driver is asked in a process of its own. Changes nothing and logs nothing. Under a CUDA back-end the
//! device's primary context is created, as by the first get.

use std::ffi::OsString;

use pinpool::unstable::config::{Config, env};
use pinpool::unstable::{Finding, Level};

use super::machine;
use super::memory::{self, ReservePlan, SETTINGS};
use super::probe::{self, Apart, Asker};
use pinpool_cli::exit::ExitError;

/// What is asked of [`examine`]; a field that is `None` has the value of its variable.
#[derive(Debug, Clone, Default)]
pub(super) struct Examination {
    /// Ordinal of the GPU that memory is to be pinned for.
    pub(super) device: Option<u32>,
    /// Bytes of a reserve to plan.
    pub(super) reserve_bytes: Option<u64>,
}

/// What [`examine`] found.
#[derive(Debug, Clone)]
pub(super) struct Diagnosis {
    /// Ordinal of the GPU that was asked for.
    pub(super) device: u32,
    /// The back-end that a pool takes; `None` if none can be had.
    pub(super) backend: Option<&'static str>,
    /// Whether its memory is page-locked.
    pub(super) is_pinned: bool,
    /// Whether pinned memory for the GPU can be had, and was: the back-end took some and gave it back.
    pub(super) serves_gpu: bool,
    /// The ceiling of a pool.
    pub(super) max_bytes: Option<u64>,
    /// What a reserve would take, if one was asked for and a back-end can be had.
    pub(super) reserve: Option<ReservePlan>,
    /// Everything that was looked at, in the order of the report; the verdict is the last.
    pub(super) findings: Vec<Finding>,
    /// What the verdict says, as an exit status.
    pub(super) status: Result<(), ExitError>,
}

/// Looks at the settings of the environment, at the machine and at each back-end. `apart` asks the driver the question of the
/// name that it is given: it calls [`probe`] in a process of its own and returns the text, or says how that process ended (`was
/// ended by signal 6`). What a process did not survive is an error among the findings, and is not asked in this one.
pub(super) fn examine(examination: &Examination, apart: Apart<'_>) -> Diagnosis {
    let asker = Asker(apart);
    let (config, mut findings) = settings(examination);
    let answer = asker.gpu();
    let gpu = answer.finding.clone();
    findings.push(gpu.clone());
    let tried = memory::try_all(&config, &answer, asker);
    findings.extend(tried.findings);
    findings.extend(machine::examine(&config, tried.chosen.as_deref(), tried.max_bytes));
    let mut reserve = None;
    if let Some(chosen) = &tried.chosen {
        let asked_bytes = examination.reserve_bytes.unwrap_or(config.reserve_bytes);
        let plan = memory::plan_reserve(&**chosen, &config, tried.max_bytes, asked_bytes);
        findings.extend(plan.findings);
        reserve = plan.reserve;
    }
    let source = tried.chosen.as_deref();
    let serves_gpu = tried.works && source.is_some_and(|source| source.is_pinned() && source.needs_gpu());
    let (status, verdict) = conclude(&findings, memory::verdict(config.device, &gpu, source, tried.works));
    findings.push(verdict);
    Diagnosis {
        device: config.device,
        backend: source.map(|source| source.name()),
        is_pinned: source.is_some_and(|source| source.is_pinned()),
        serves_gpu,
        max_bytes: tried.max_bytes,
        reserve,
        findings,
        status,
    }
}

/// The status and the verdict: what `of_gpu` says, unless one of `findings` is an error.
fn conclude(findings: &[Finding], of_gpu: Finding) -> (Result<(), ExitError>, Finding) {
    let errors = || findings.iter().filter(|finding| finding.level == Level::Error);
    if errors().any(|error| error.check == SETTINGS) {
        let refused = Finding::error(of_gpu.check, "no pool is built with these settings");
        return (Err(ExitError::Settings), refused.remedy("correct the settings named above"));
    }
    match errors().next() {
        Some(error) if of_gpu.level == Level::Ok => {
            let failed = Finding::error(of_gpu.check, format!("{}, but {} failed", of_gpu.found, error.check));
            (Err(ExitError::Failure), failed.remedy(format!("see {} above", error.check)))
        }
        _ if of_gpu.level == Level::Ok => (Ok(()), of_gpu),
        _ => (Err(ExitError::Failure), of_gpu),
    }
}

/// Asks the driver one question, and returns the answer as text for [`examine`]: whether there is a device (`gpu`), or what one
/// of the back-ends `vmm`, `register` and `cuda` does with a little memory. `None` for any other name. A driver may end the
/// process: call it in one that does nothing else.
pub(super) fn probe(name: &str, examination: &Examination) -> Option<String> {
    probe::answer(name, &settings(examination).0)
}

/// The settings that hold, and what is wrong with the variables.
fn settings(examination: &Examination) -> (Config, Vec<Finding>) {
    let asked = [
        ("PINPOOL_DEVICE", examination.device.map(|device| device.to_string())),
        // Planned apart from the other settings: one that does not fit is a finding, not a contradiction.
        ("PINPOOL_RESERVE", examination.reserve_bytes.map(|_| "0".to_owned())),
    ];
    let set = set_in_process();
    let is_asked = |name: &str| asked.iter().any(|(variable, value)| *variable == name && value.is_some());
    let mut pairs: Vec<_> = set.iter().filter(|(name, _)| !is_asked(name)).cloned().collect();
    pairs.extend(asked.iter().filter_map(|(name, value)| Some(((*name).to_owned(), value.clone()?))));
    let report = env::report_of(&pairs);
    let errors = report.errors.iter().map(|error| Finding::error(SETTINGS, error.to_string()));
    let warnings = report.warnings.iter().map(|warning| Finding::warning(SETTINGS, warning.clone()));
    let remedy = "correct the variable or leave it out";
    let mut findings: Vec<_> = warnings.chain(errors).map(|finding| finding.remedy(remedy)).collect();
    if findings.is_empty() {
        let set: Vec<_> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let found = if set.is_empty() { "all default".to_owned() } else { set.join(" ") };
        findings.push(Finding::ok(SETTINGS, found));
    }
    (report.config, findings)
}

/// The variables of pinpool that are set in this process, sorted.
fn set_in_process() -> Vec<(String, String)> {
    let as_text = |(name, value): (OsString, OsString)| [name, value].map(|text| text.to_string_lossy().into_owned());
    let ours = |(name, value): &(String, String)| name.starts_with(env::PREFIX) && !value.trim().is_empty();
    let mut set: Vec<_> = std::env::vars_os().map(as_text).map(|[name, value]| (name, value)).filter(ours).collect();
    set.sort();
    set
}
