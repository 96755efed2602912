//! Each back-end tried for real, the one that a pool takes, and what a reserve would cost there.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pinpool::SourceError;
use pinpool::source::{PAGE_BYTES, Source};
use pinpool::unstable::backend::GRANULE_BYTES;
use pinpool::unstable::backend::{self, Chosen, HeapSource, lock_limit};
use pinpool::unstable::config::{Config, LedgerName, env};
use pinpool::unstable::{Finding, Level};
use pinpool::{Backend, Preset};
use pinpool_cli::table::format_about;
use pinpool_os::host::{self, HostMemory};

use super::probe::{Answer, Asker, BACKENDS, of_error, tried};

/// The check of everything that is wrong with the settings.
pub(super) const SETTINGS: &str = "settings";

/// Bytes that are page-locked to see how fast that is.
const SAMPLE_BYTES: usize = 64 << 20;
/// The sample is at most one part in this many of the memory that is available.
const SAMPLE_DIVISOR: u64 = 16;

/// What a reserve would take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ReservePlan {
    /// Bytes asked for.
    pub(super) bytes: u64,
    /// Whether they fit under the ceiling, into the memory that is available, and under the limit of locked memory.
    pub(super) fits: bool,
    /// The time that pinning them takes, from the speed of a sample; `None` if no sample could be pinned.
    pub(super) estimate: Option<Duration>,
}

/// The back-ends after their trial.
pub(super) struct Tried {
    pub(super) findings: Vec<Finding>,
    /// What a pool takes.
    pub(super) chosen: Option<Arc<dyn Source>>,
    /// Whether that one gave memory.
    pub(super) works: bool,
    pub(super) max_bytes: Option<u64>,
}

/// Pins a little with every back-end, and sees which one a pool takes.
pub(super) fn try_all(config: &Config, gpu: &Answer, asker: Asker<'_>) -> Tried {
    let (mut max_bytes, mut ceiling) = config.limit_on_host();
    let mut answers: Vec<_> = BACKENDS.into_iter().map(|name| asker.backend(name, gpu)).collect();
    let first_ok = answers.iter().map(|answer| &answer.finding).find(|finding| finding.level == Level::Ok);
    let first_ok = first_ok.map(|finding| finding.check);
    for Answer { finding, .. } in answers.iter_mut().filter(|answer| answer.is_deadly && !gpu.is_deadly) {
        let other = first_ok.unwrap_or("mlock");
        finding.remedy = Some(format!("set PINPOOL_BACKEND={other}: auto may try this one and end the process"));
    }
    let deadly = std::iter::once(gpu).chain(&answers).filter(|answer| answer.is_deadly);
    let not_here: Vec<_> = deadly.map(|answer| (answer.finding.check, answer.finding.found.clone())).collect();
    let mut findings: Vec<_> = answers.into_iter().map(|answer| answer.finding).collect();
    let without_mlock = if first_ok.is_some() { Level::Note } else { Level::Warning };
    findings.push(tried("mlock", &HeapSource::locked(), config.device, without_mlock));
    findings.push(tried("heap", &HeapSource::new(), config.device, Level::Error));

    let chosen = match config.choose_source(&not_here) {
        Ok(chosen) => {
            if let Some(limit_bytes) = chosen.lock_limit_bytes {
                (max_bytes, ceiling) = (Some(limit_bytes), "the limit of locked memory (ulimit -l)".to_owned());
            }
            findings.push(choice(config, &chosen));
            Some(chosen.source)
        }
        Err(error) => {
            let check = if error.is_setting() { SETTINGS } else { "choice" };
            findings.push(
                Finding::error(check, error.to_string())
                    .remedy("set PINPOOL_BACKEND=auto, or one of the backends that are ok above"),
            );
            None
        }
    };
    findings.push(of_limit(max_bytes, &ceiling, config));
    let works = chosen.as_ref().is_some_and(|source| backend::try_out(&**source, config.device).is_ok());
    Tried { findings, chosen, works, max_bytes }
}

/// The back-end that a pool takes, and why not a better one.
fn choice(config: &Config, chosen: &Chosen) -> Finding {
    let source = &chosen.source;
    let kind = match (source.is_pinned(), source.needs_gpu()) {
        (true, true) => "pinned for the GPU",
        (true, false) => "pinned for no GPU",
        _ => "not pinned",
    };
    if !matches!(config.backend, Backend::Auto) {
        let found = format!("PINPOOL_BACKEND={} is set: {kind}", source.name());
        return if source.needs_gpu() { Finding::ok("choice", found) } else { Finding::note("choice", found) };
    }
    let mut better: Vec<&str> = chosen.passed_over.iter().map(|(name, _)| *name).collect();
    // Without a GPU there is one reason against all three, and it stands above.
    better.retain(|name| *name != "mlock");
    let mut found = format!("auto takes {}: {kind}", source.name());
    let unlocked = chosen.findings.iter().find(|finding| finding.check == "pinning");
    match (unlocked, better.is_empty()) {
        (Some(unlocked), _) => {
            found = format!("{found}: {}", unlocked.found.trim_start_matches("memory is not pinned: "));
            let finding = Finding::warning("choice", found);
            unlocked.remedy.iter().fold(finding, |finding, remedy| finding.remedy(remedy))
        }
        (None, true) => Finding::ok("choice", found),
        (None, false) => {
            let reasons: Vec<_> = chosen.passed_over.iter().map(|(name, why)| format!("not {name}: {why}")).collect();
            if source.needs_gpu() {
                return Finding::note("choice", format!("{found}; {}", reasons.join("; ")));
            }
            Finding::note("choice", format!("{found}, since {} need a GPU and its driver", better.join(", ")))
        }
    }
}

/// The limit compared with the available memory, which the ranks of this host share.
fn of_limit(max_bytes: Option<u64>, ceiling: &str, config: &Config) -> Finding {
    const CHECK: &str = "ceiling";
    let memory = host::memory(Path::new("/"));
    let ranks = limits_on_host(config);
    match (max_bytes, memory.as_ref().and_then(|memory| too_much(ranks, max_bytes?, memory))) {
        (Some(_), Some(found)) => {
            let remedy = if ranks > 1 {
                "set PINPOOL_LEDGER=auto, so that all ranks share one limit, or lower PINPOOL_MAX_BYTES"
            } else {
                "lower PINPOOL_MAX_BYTES, or free memory: a pool that fills up is refused memory, or the process is killed"
            };
            Finding::warning(CHECK, found).remedy(remedy)
        }
        (Some(bytes), _) => Finding::ok(CHECK, format!("{}: {ceiling}", format_about(bytes))),
        (None, _) if config.preset == Preset::TensorFlow => Finding::note(CHECK, "none under the preset tensorflow")
            .remedy("set PINPOOL_MAX_BYTES to bound the memory held"),
        (None, _) => Finding::note(CHECK, ceiling).remedy("set PINPOOL_MAX_BYTES to bound the memory held"),
    }
}

/// Whether the processes of the host share one limit.
fn is_shared(config: &Config) -> bool {
    match config.ledger {
        LedgerName::Disabled => false,
        LedgerName::Auto => env::is_one_of_several(),
        _ => true,
    }
}

/// The ranks of this host that have a limit each.
pub(super) fn limits_on_host(config: &Config) -> u64 {
    if is_shared(config) { 1 } else { local_ranks() }
}

/// Ranks of torchrun on this host; 1 without torchrun.
fn local_ranks() -> u64 {
    let ranks = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.trim().parse().ok());
    ranks.unwrap_or(1).max(1)
}

/// That `bytes` in each of so many ranks are more than is available; `None` if they are not.
pub(super) fn too_much(ranks: u64, bytes: u64, memory: &HostMemory) -> Option<String> {
    let needed_bytes = ranks.saturating_mul(bytes);
    let [needed, total, available] = [needed_bytes, memory.total_bytes, memory.available_bytes].map(format_about);
    let found = match ranks {
        1 if needed_bytes > memory.total_bytes => format!("{needed} is over the {total} of this machine"),
        1 => format!("{needed} is over the {available} that are available"),
        _ if needed_bytes > memory.total_bytes => format!("{ranks} ranks need {needed} of {total}"),
        _ => format!("{ranks} ranks need {needed} of the {available} that are available"),
    };
    (needed_bytes > memory.available_bytes).then_some(found)
}

/// What a reserve takes, with its findings.
pub(super) struct Planned {
    pub(super) findings: Vec<Finding>,
    pub(super) reserve: Option<ReservePlan>,
}

/// Measures how fast `source` pins, and sees whether `bytes` fit.
pub(super) fn plan_reserve(source: &dyn Source, config: &Config, max_bytes: Option<u64>, bytes: u64) -> Planned {
    const CHECK: &str = "reserve";
    let memory = host::memory(Path::new("/"));
    let available = memory.as_ref().map_or(u64::MAX, |memory| memory.available_bytes);
    let sample = sample_bytes(max_bytes, available);
    let took = time_to_pin(source, sample, config);
    let estimate = took.as_ref().ok().map(|took| took.mul_f64((bytes as f64 / sample as f64).min(1e9)));
    let mut findings = vec![match took {
        Ok(took) => {
            let seconds = took.as_secs_f64().max(1e-9);
            let word = if source.is_pinned() { "pins" } else { "takes" };
            let (rate, millis) = (sample as f64 / seconds / 1e9, seconds * 1e3);
            let sample = format_about(sample as u64);
            let found = format!("{} {word} {rate:.1} GB/s ({sample} in {millis:.1} ms)", source.name());
            Finding::ok("speed", found)
        }
        Err(error) => of_error("speed", Level::Error, error),
    }];
    if bytes == 0 {
        findings.push(
            Finding::note(CHECK, "none: memory is pinned when it is first needed")
                .remedy("set PINPOOL_RESERVE to what a step holds at once, for full speed from the start"),
        );
        return Planned { findings, reserve: None };
    }
    let asked = format_about(bytes);
    let is_lock_limit = source.name() == "mlock" && max_bytes.is_some() && lock_limit() == max_bytes;
    let problem = reserve_problem(config, max_bytes, memory.as_ref(), bytes, is_lock_limit);
    let fits = problem.is_none() && estimate.is_some();
    findings.push(match (problem, estimate) {
        (Some((found, remedy)), _) => Finding::error(CHECK, found).remedy(remedy),
        (None, Some(estimate)) => {
            Finding::ok(CHECK, format!("{asked} fits and takes about {:.2} s", estimate.as_secs_f64()))
        }
        (None, None) => Finding::error(CHECK, format!("{asked} cannot be pinned by {}", source.name()))
            .remedy("see the backend above"),
    });
    Planned { findings, reserve: Some(ReservePlan { bytes, fits, estimate }) }
}

/// The time in which `source` gives `bytes` as a reserve.
#[allow(unsafe_code)] // Gives back what it takes.
fn time_to_pin(source: &dyn Source, bytes: usize, config: &Config) -> Result<Duration, SourceError> {
    let threads = config.pin_threads_on_host();
    let begun = Instant::now();
    let region = source.acquire_fast(bytes, threads, &|_| {})?;
    let took = begun.elapsed();
    // SAFETY: acquired above from this source; no reference into it was made.
    unsafe { source.release(region) }.map(|()| took)
}

/// Why a reserve of `bytes` does not fit, and what helps.
pub(super) fn reserve_problem(
    config: &Config,
    max_bytes: Option<u64>,
    memory: Option<&HostMemory>,
    bytes: u64,
    is_lock_limit: bool,
) -> Option<(String, &'static str)> {
    // A higher limit alone would end the process for want of memory.
    const SCARCE: &str = "lower the reserve, free memory, or raise the limit of the cgroup";
    const OVER: &str = "lower the reserve or raise PINPOOL_MAX_BYTES";
    let (asked, ranks) = (format_about(bytes), local_ranks());
    match (max_bytes, memory.and_then(|memory| too_much(ranks, bytes, memory))) {
        _ if bytes == 0 => None,
        _ if config.preset == Preset::TensorFlow => {
            Some(("the preset tensorflow has no reserve".to_owned(), "set PINPOOL_PRESET=adaptive"))
        }
        (_, Some(scarce)) if ranks > 1 => Some((scarce, "lower the reserve: each rank pins its own")),
        (Some(max_bytes), scarce) if bytes > max_bytes => {
            let remedy = match scarce {
                _ if is_lock_limit => "lower the reserve, or raise the limit of locked memory (`ulimit -l`)",
                Some(_) => SCARCE,
                None => OVER,
            };
            Some((format!("{asked} is over the ceiling of {}", format_about(max_bytes)), remedy))
        }
        (Some(max_bytes), _) if is_shared(config) && ranks.saturating_mul(bytes) > max_bytes => {
            let [all, limit] = [ranks.saturating_mul(bytes), max_bytes].map(format_about);
            Some((format!("{ranks} ranks need {all} under their shared limit of {limit}"), OVER))
        }
        (_, scarce) => scarce.map(|scarce| (scarce, SCARCE)),
    }
}

/// Whole pages: less where little is allowed or left.
fn sample_bytes(max_bytes: Option<u64>, available_bytes: u64) -> usize {
    let most = max_bytes.unwrap_or(u64::MAX).min(available_bytes / SAMPLE_DIVISOR);
    let most = usize::try_from(most).unwrap_or(usize::MAX).min(SAMPLE_BYTES);
    let unit = if most >= GRANULE_BYTES { GRANULE_BYTES } else { PAGE_BYTES };
    (most / unit * unit).max(PAGE_BYTES)
}

/// Whether pinned memory for the GPU can be had: what the exit status says.
pub(super) fn verdict(device: u32, gpu: &Finding, source: Option<&dyn Source>, works: bool) -> Finding {
    const CHECK: &str = "verdict";
    let no = |why: String| Finding::error(CHECK, format!("no pinned memory for GPU {device}: {why}"));
    let remedy = || {
        gpu.remedy.clone().unwrap_or_else(|| {
            "run on a machine with a GPU; without one there is no copy that pinned memory makes faster".to_owned()
        })
    };
    match source {
        None => no("no backend can be had".to_owned()).remedy("set PINPOOL_BACKEND=auto"),
        Some(source) if !works => no(format!("{} gives no memory", source.name())).remedy("see the backend above"),
        Some(source) if source.needs_gpu() => {
            Finding::ok(CHECK, format!("pinned memory for GPU {device}, by {}", source.name()))
        }
        Some(source) if gpu.level == Level::Ok => {
            no(format!("PINPOOL_BACKEND={} takes none of its driver", source.name())).remedy("set PINPOOL_BACKEND=auto")
        }
        Some(source) if source.is_pinned() => no(format!("{} pins for no GPU", source.name())).remedy(remedy()),
        Some(source) => no(format!("{} does not pin", source.name())).remedy(remedy()),
    }
}
