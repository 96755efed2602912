//! What this machine has for page-locked memory, what a pool would take of it, and what to do about the rest.
//!
//! ```text
//!   settings ──┐
//!   machine ───┼──▶ findings (check, level, what was found, remedy) ──▶ Diagnosis
//!   memory ────┘    each back-end pins a little and gives it back
//! ```
//!
//! The data behind `pinpool doctor`, for programs that want to look before they start. A pool prints the warnings among
//! these findings itself when it is built.
//!
//! Changes nothing and logs nothing. Under a CUDA back-end the device's primary context is created, as by the first get.

use self::probe::Asker;
use crate::config::{Config, Settings, env};
use crate::finding::{Finding, Level};

mod machine;
mod memory;
mod probe;
mod unmet;

pub use self::memory::ReservePlan;
pub use self::unmet::unmet;

/// What is asked of [`examine`]; a field that is `None` has the value of its variable.
#[derive(Debug, Clone, Default)]
pub struct Examination {
    /// Ordinal of the GPU that memory is to be pinned for.
    pub device: Option<u32>,
    /// Bytes of a reserve to plan.
    pub reserve_bytes: Option<u64>,
}

/// What [`examine`] found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Ordinal of the GPU that was asked for.
    pub device: u32,
    /// The back-end that a pool takes; `None` if none can be had.
    pub backend: Option<&'static str>,
    /// Whether its memory is page-locked.
    pub is_pinned: bool,
    /// Whether pinned memory for the GPU can be had, and was: the back-end took some and gave it back.
    pub serves_gpu: bool,
    /// The ceiling of a pool.
    pub max_bytes: Option<u64>,
    /// What a reserve would take, if one was asked for and a back-end can be had.
    pub reserve: Option<ReservePlan>,
    /// Everything that was looked at, in the order of the report.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// Whether pinned memory for the GPU can be had, the reserve with it, and nothing else is an error.
    pub fn is_ready(&self) -> bool {
        self.serves_gpu && self.findings.iter().all(|finding| finding.level < Level::Error)
    }

    /// Whether no pool is built because of the settings.
    pub fn has_bad_settings(&self) -> bool {
        self.findings.iter().any(|finding| finding.check == SETTINGS && finding.level == Level::Error)
    }
}

const SETTINGS: &str = "settings";

/// Looks at the settings of the environment, at the machine and at each back-end.
pub fn examine(examination: &Examination) -> Diagnosis {
    examine_by(examination, Asker(None))
}

/// As [`examine`], with each question to the driver asked by `apart` first, which is given its name: it calls [`probe`] in
/// a process of its own and returns the text, or says how that process ended (`was ended by signal 6`). What a process did
/// not survive is an error among the findings, and is not asked in this one.
pub fn examine_apart(examination: &Examination, apart: &dyn Fn(&str) -> Result<String, String>) -> Diagnosis {
    examine_by(examination, Asker(Some(apart)))
}

/// Asks the driver one question, and returns the answer as text for [`examine_apart`]: whether there is a device (`gpu`),
/// or what one of the back-ends `vmm`, `register` and `cuda` does with a little memory. `None` for any other name. A driver
/// may end the process: call it in one that does nothing else.
pub fn probe(name: &str, examination: &Examination) -> Option<String> {
    probe::answer(name, &settings(examination).0)
}

fn examine_by(examination: &Examination, asker: Asker<'_>) -> Diagnosis {
    let (config, mut findings) = settings(examination);
    let answer = asker.gpu(config.device);
    let gpu = answer.finding.clone();
    findings.push(gpu.clone());
    let tried = memory::try_all(&config, &answer, asker);
    findings.extend(tried.findings);
    findings.extend(machine::examine(&config, tried.chosen.as_ref(), tried.max_bytes));
    let mut reserve = None;
    if let Some(chosen) = &tried.chosen {
        let asked_bytes = examination.reserve_bytes.unwrap_or(config.reserve_bytes);
        let plan = memory::plan_reserve(&**chosen, &config, tried.max_bytes, asked_bytes);
        findings.extend(plan.findings);
        reserve = plan.reserve;
    }
    let source = tried.chosen.as_deref();
    let serves_gpu = tried.works && source.is_some_and(|source| source.is_pinned() && source.needs_gpu());
    findings.push(memory::verdict(config.device, &gpu, source, tried.works));
    Diagnosis {
        device: config.device,
        backend: source.map(|source| source.name()),
        is_pinned: source.is_some_and(|source| source.is_pinned()),
        serves_gpu,
        max_bytes: tried.max_bytes,
        reserve,
        findings,
    }
}

/// The settings that hold, and what is wrong with the variables.
fn settings(examination: &Examination) -> (Config, Vec<Finding>) {
    let (of_env, bad) = env::read_process(env::PREFIX);
    let asked = Settings {
        device: examination.device,
        // Planned apart from the other settings: one that does not fit is a finding, not a contradiction.
        reserve_bytes: examination.reserve_bytes.map(|_| 0),
        ..Settings::default()
    };
    let mut findings: Vec<_> = bad
        .iter()
        .map(|bad| {
            let level = if bad.is_error() { Level::Error } else { Level::Warning };
            Finding::new(SETTINGS, level, bad.to_string()).remedy("correct the variable or leave it out")
        })
        .collect();
    let (config, problems) = asked.or(of_env).examine();
    findings.extend(problems.iter().map(|problem| Finding::error(SETTINGS, problem.to_string())));
    if findings.is_empty() {
        let set = env::set_in_process();
        let found = if set.is_empty() { "all default".to_owned() } else { set.join(" ") };
        findings.push(Finding::ok(SETTINGS, found));
    }
    (config, findings)
}
