//! Tries each backend, and finds the backend and limit that a pool would use, and the cost of a reserve.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pinpool::source::HeapSource;
use pinpool::source::{PAGE_BYTES, Source, SourceError};
use pinpool::unstable::backend::{self, BuiltInSource, ChosenSource, GRANULE_BYTES};
use pinpool::unstable::config::Config;
use pinpool::unstable::{Finding, Severity};
use pinpool::{Backend, Preset};
use pinpool_os::format::{Size, Time};
use pinpool_os::host::{self, HostMemory};
use serde_json::{Value, json};

use super::probe::{Answer, BACKENDS, failed, tried};
use super::settings;

/// Bytes that are pinned to measure the speed.
const SAMPLE_BYTES: usize = 64 << 20;
/// The sample is at most this part of the available memory.
const SAMPLE_DIVISOR: u64 = 16;

/// The results of trying the backends.
pub(super) struct Backends {
    pub(super) findings: Vec<Finding>,
    /// The backend that a pool would use.
    pub(super) chosen: Option<Arc<dyn Source>>,
    /// Whether the chosen backend provides memory.
    pub(super) works: bool,
    pub(super) max_bytes: Option<u64>,
    /// Whether `max_bytes` is RLIMIT_MEMLOCK.
    pub(super) is_lock_limited: bool,
}

/// Pins a little memory with every backend, and chooses one as a pool does.
pub(super) fn try_backends(config: &Config, gpu: &Answer, ask: impl Fn(&'static str) -> Answer) -> Backends {
    let ((mut max_bytes, mut limit), mut is_lock_limited) = (config.limit_on_host(), false);
    let answer = |name| match gpu.has_crashed {
        true => Answer { finding: Finding::note(name, "not tried: the driver query failed"), has_crashed: true },
        false => ask(name),
    };
    let mut answers = BACKENDS.map(answer);
    let first_ok =
        answers.iter().find(|answer| answer.finding.severity == Severity::Ok).map(|answer| answer.finding.check);
    for Answer { finding, .. } in answers.iter_mut().filter(|answer| answer.has_crashed && !gpu.has_crashed) {
        let other = first_ok.unwrap_or("mlock");
        finding.remedy = Some(format!("set PINPOOL_BACKEND={other}: auto may try this backend and end the process"));
    }
    let deadly = std::iter::once(gpu).chain(&answers).filter(|answer| answer.has_crashed);
    let without: Vec<_> = deadly.map(|answer| (answer.finding.check, answer.finding.found.clone())).collect();
    let mut findings: Vec<_> = answers.into_iter().map(|answer| answer.finding).collect();
    let without_mlock = if first_ok.is_some() { Severity::Note } else { Severity::Warning };
    findings.push(tried("mlock", &HeapSource::locked(), config.device, without_mlock));
    findings.push(tried("heap", &HeapSource::new(), config.device, Severity::Error));
    let chosen = match config.choose_source(&without) {
        Ok(chosen) => {
            if let Some(limit_bytes) = chosen.lock_limit_bytes {
                (max_bytes, limit) = (Some(limit_bytes), format!("{} (ulimit -l)", Size(limit_bytes)));
                is_lock_limited = true;
            }
            findings.push(choice(config, &chosen));
            Some(chosen.source)
        }
        Err(error) => {
            let check = if error.is_setting() { settings::CHECK } else { "choice" };
            let remedy = "set PINPOOL_BACKEND=auto, or a backend that is ok above";
            findings.push(Finding::error(check, error.to_string()).remedy(remedy));
            None
        }
    };
    findings.push(limit_finding(max_bytes, limit));
    let works = chosen.as_ref().is_some_and(|source| backend::try_out(&**source, config.device).is_ok());
    Backends { findings, chosen, works, max_bytes, is_lock_limited }
}

/// Reports the backend that a pool would use, and why better backends are not available.
fn choice(config: &Config, ChosenSource { source, passed_over, findings, .. }: &ChosenSource) -> Finding {
    const CHECK: &str = "choice";
    let kind = match (source.pinned_by().is_some(), source.needs_gpu()) {
        (true, true) => "pinned for the GPU",
        (true, false) => "pinned, but not for a GPU",
        _ => "not pinned",
    };
    if !matches!(config.backend, Backend::Auto) {
        let found = format!("PINPOOL_BACKEND={} is set: {kind}", source.name());
        return if source.needs_gpu() { Finding::ok(CHECK, found) } else { Finding::note(CHECK, found) };
    }
    let found = format!("auto selects {}: {kind}", source.name());
    if let Some(unpinned) = findings.iter().find(|finding| finding.check == "pinning") {
        let why = unpinned.found.trim_start_matches("memory is not pinned: ");
        let finding = Finding::warning(CHECK, format!("{found}: {why}"));
        return unpinned.remedy.iter().fold(finding, |finding, remedy| finding.remedy(remedy));
    }
    // A reason that all three driver backends share is in the findings above.
    let better: Vec<_> = passed_over.iter().filter(|(name, _)| *name != "mlock").collect();
    let reasons: Vec<_> = better.iter().map(|(name, why)| format!("not {name}: {why}")).collect();
    match (better.is_empty(), source.needs_gpu()) {
        (true, _) => Finding::ok(CHECK, found),
        (false, true) => Finding::note(CHECK, format!("{found}; {}", reasons.join("; "))),
        (false, false) => Finding::note(CHECK, format!("{found}; the other backends need a GPU and its driver")),
    }
}

/// Compares the limit with the available memory.
fn limit_finding(max_bytes: Option<u64>, limit: String) -> Finding {
    const CHECK: &str = "limit";
    const REMEDY: &str = "lower PINPOOL_MAX_BYTES or free memory: pinning fails, or the kernel kills the process, before the pool is full";
    let Some(bytes) = max_bytes else {
        return Finding::note(CHECK, limit).remedy("set PINPOOL_MAX_BYTES to limit the memory held");
    };
    match host::memory(Path::new("/")).and_then(|memory| too_much(bytes, &memory)) {
        Some(found) => Finding::warning(CHECK, found).remedy(REMEDY),
        None => Finding::ok(CHECK, limit),
    }
}

/// Describes the problem if `bytes` exceeds the available memory.
fn too_much(bytes: u64, memory: &HostMemory) -> Option<String> {
    let [needed, total, available] = [bytes, memory.total_bytes, memory.available_bytes].map(Size);
    (bytes > memory.available_bytes).then(|| format!("{needed} exceeds the available {available} (of {total})"))
}

/// Returns the reason that a reserve of `bytes` does not fit, and the remedy.
fn reserve_problem(
    config: &Config,
    backends: &Backends,
    memory: Option<&HostMemory>,
    bytes: u64,
) -> Option<(String, &'static str)> {
    if config.preset == Preset::TensorFlow {
        return Some(("the preset tensorflow has no reserve".to_owned(), "set PINPOOL_PRESET=adaptive"));
    }
    let scarce = memory.and_then(|memory| too_much(bytes, memory));
    let limited = backends.max_bytes.filter(|&max_bytes| bytes > max_bytes);
    let remedy = match (limited.is_some() && backends.is_lock_limited, &scarce) {
        (true, _) => "lower the reserve, or raise the limit of locked memory (`ulimit -l`)",
        // If only the limit were raised, the kernel would kill the process.
        (false, Some(_)) => "lower the reserve, free memory, or raise the cgroup's limit, if it has one",
        (false, None) => "lower the reserve or raise PINPOOL_MAX_BYTES",
    };
    let limited = limited.map(|limit| format!("{} exceeds the limit of {}", Size(bytes), Size(limit)));
    Some((limited.or(scarce)?, remedy))
}

/// Measures how fast `source` pins, and whether a reserve of `bytes` fits: for JSON, and as findings.
pub(super) fn plan_reserve(
    source: &dyn Source,
    config: &Config,
    backends: &Backends,
    bytes: u64,
) -> (Value, Vec<Finding>) {
    const CHECK: &str = "reserve";
    let memory = host::memory(Path::new("/"));
    let available = memory.as_ref().map_or(u64::MAX, |memory| memory.available_bytes);
    let sample = sample_bytes(backends.max_bytes, available);
    let took = time_to_pin(source, sample, config);
    let estimate = took.as_ref().ok().map(|took| took.mul_f64((bytes as f64 / sample as f64).min(1e9)));
    let mut findings = vec![match took {
        Ok(took) => {
            let rate = sample as f64 / took.as_secs_f64().max(1e-9) / 1e9;
            let verb = if source.pinned_by().is_some() { "pins" } else { "allocates" };
            let (name, sample) = (source.name(), Size(sample as u64));
            Finding::ok("speed", format!("{name} {verb} {rate:.1} GB/s ({sample} in {})", Time(took)))
        }
        Err(error) => failed("speed", Severity::Error, error),
    }];
    if bytes == 0 {
        let none = Finding::note(CHECK, "none: memory is pinned at the first request");
        findings.push(none.remedy("set PINPOOL_RESERVE to what a step holds at once, for full speed from the start"));
        return (Value::Null, findings);
    }
    let problem = reserve_problem(config, backends, memory.as_ref(), bytes);
    let fits = problem.is_none() && estimate.is_some();
    findings.push(match (problem, estimate) {
        (Some((found, remedy)), _) => Finding::error(CHECK, found).remedy(remedy),
        (None, Some(estimate)) => {
            Finding::ok(CHECK, format!("{} fits and is pinned in about {}", Size(bytes), Time(estimate)))
        }
        (None, None) => Finding::error(CHECK, format!("{} cannot be pinned by {}", Size(bytes), source.name()))
            .remedy("see the backend above"),
    });
    let seconds = estimate.map(|time| time.as_secs_f64());
    (json!({ "bytes": bytes, "fits": fits, "seconds": seconds }), findings)
}

/// Measures the time in which `source` provides `bytes` for a reserve.
#[allow(unsafe_code)] // Releases what it acquires.
fn time_to_pin(source: &dyn Source, bytes: usize, config: &Config) -> Result<Duration, SourceError> {
    let threads = config.pin_threads_on_host();
    let begun = Instant::now();
    let region = source.acquire_bulk(bytes, threads, &|_| {})?;
    let took = begun.elapsed();
    // SAFETY: `region` was acquired above from this source, and no reference into it was made.
    unsafe { source.release(&region) }.map(|()| took)
}

/// Returns the length of the sample: whole pages, and fewer if the limit or the available memory is small.
fn sample_bytes(max_bytes: Option<u64>, available_bytes: u64) -> usize {
    let most = max_bytes.unwrap_or(u64::MAX).min(available_bytes / SAMPLE_DIVISOR);
    let most = usize::try_from(most).unwrap_or(usize::MAX).min(SAMPLE_BYTES);
    let unit = if most >= GRANULE_BYTES { GRANULE_BYTES } else { PAGE_BYTES };
    (most / unit * unit).max(PAGE_BYTES)
}

/// Returns the last finding, which decides the exit status: whether pinned memory for the GPU is available.
pub(super) fn result(device: u32, gpu: &Finding, source: Option<&dyn Source>, works: bool) -> Finding {
    const CHECK: &str = "result";
    let (why, remedy) = match source {
        None => ("no backend works".to_owned(), "set PINPOOL_BACKEND=auto".to_owned()),
        Some(source) if !works => (format!("{} provides no memory", source.name()), "see the backend above".to_owned()),
        Some(source) if source.needs_gpu() => {
            return Finding::ok(CHECK, format!("pinned memory for GPU {device}, by {}", source.name()));
        }
        Some(source) if gpu.severity == Severity::Ok => (
            format!("PINPOOL_BACKEND={} does not use its driver", source.name()),
            "set PINPOOL_BACKEND=auto".to_owned(),
        ),
        Some(source) => {
            let other = || "run on a machine with a GPU; pinned memory only speeds up copies to a GPU".to_owned();
            (format!("{} does not pin for a GPU", source.name()), gpu.remedy.clone().unwrap_or_else(other))
        }
    };
    Finding::error(CHECK, format!("no pinned memory for GPU {device}: {why}")).remedy(remedy)
}
