//! Every log line of the library: `lines.rs` has one row for each; no other code uses the crate `log`.
//!
//! A line has the shape `pool[NAME] event: short sentence key=value key=value`; unnamed pools carry their number. TensorFlow's
//! two lines have TensorFlow's shape. A test makes docs/log-lines.md from the rows, with an example of each line.
//!
//! The methods take plain values, never a pool. They decide only which checks are printed (by default one in ten over the whole
//! process, as in TensorFlow), and which warnings go to standard error if the program has no logger.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::report::{Finding, Severity};
use pinpool_observe::record::Recorded;
use pinpool_os::fork::PerProcess;
use pinpool_os::sync::unmodeled;

mod checks;
mod emit;
mod lines;
#[cfg(test)]
#[path = "tests/page.rs"]
mod page;
mod texts;

pub(crate) use checks::Listener;
pub use checks::{LogSampler, RateCheckReport};
#[cfg(all(test, not(pinpool_loom)))]
pub(crate) use emit::captured;
pub(crate) use emit::defer;

/// The log of one pool. Displays as the start of its lines: `pool[NAME] `.
#[derive(Clone, Default)]
pub(crate) struct PoolLog {
    pub(crate) name: Option<String>,
    /// Number of the pool within the process.
    pub(crate) number: u64,
    /// The sampler of the pool; `None` means the sampler that all pools of the process share.
    pub(crate) log_sampler: Option<LogSampler>,
    /// One in this many checks is printed; 0 counts as 1.
    pub(crate) log_every: u64,
    pub(crate) listener: Option<Listener>,
}

impl PoolLog {
    /// Returns the number for the next pool or partition of the process.
    pub(crate) fn next_number() -> u64 {
        static LAST_POOL_NUMBER: AtomicU64 = AtomicU64::new(0);
        // Relaxed: nothing else depends on it.
        LAST_POOL_NUMBER.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Display for PoolLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "pool[{name}] "),
            None => write!(f, "pool[{}] ", self.number),
        }
    }
}

/// Methods that choose one of several lines by the outcome.
impl PoolLog {
    /// Logs that sizes have begun to vary (policy-R12), or that they recur again. Logs nothing for `None`.
    #[track_caller]
    pub(crate) fn sizes_changed(&self, vary: Option<bool>) {
        match vary {
            None => {}
            Some(true) => self.sizes_vary(),
            Some(false) => self.sizes_recur(),
        }
    }

    /// Logs the end of a recording.
    #[track_caller]
    pub(crate) fn recorded(&self, path: &Path, recorded: &Recorded) {
        match recorded {
            Recorded { failure: Some(why), records, lost } => self.trace_incomplete(path, *records, *lost, why),
            Recorded { lost: 0, records, .. } => self.trace_complete(path, *records),
            Recorded { lost, records, .. } => self.trace_records_lost(path, *records, *lost),
        }
    }

    /// Logs settings without effect, each text only for the first pool, because most settings come from the environment, which
    /// all pools share. If the program has no logger, writes them to standard error once.
    #[track_caller]
    pub(crate) fn ineffective_settings(&self, unused: &[String]) {
        for unused in unused.iter().filter(|unused| log::max_level() != log::LevelFilter::Off && is_first(unused)) {
            self.setting(unused);
        }
        self.print_once("setting", "setting", unused);
    }

    /// Logs a problem of the machine. If the program has no logger, writes it to standard error, once for each kind of problem.
    #[track_caller]
    pub(crate) fn found(&self, finding: &Finding) {
        match finding.severity {
            Severity::Ok | Severity::Note => return,
            Severity::Warning => self.machine(log::Level::Warn, finding),
            Severity::Error => self.machine(log::Level::Error, finding),
        }
        self.print_once(finding.check, "machine", &[finding]);
    }

    /// Writes lines to standard error, unless the program has a logger or lines of this kind have been written before.
    fn print_once(&self, kind: &str, event: &str, lines: &[impl fmt::Display]) {
        if lines.is_empty() || log::max_level() != log::LevelFilter::Off || !is_first(kind) {
            return;
        }
        for line in lines {
            // The error of a failed write cannot be reported anywhere.
            let _ = writeln!(io::stderr(), "pinpool: {self}{event}: {line}");
        }
    }
}

/// Returns whether no earlier call in this process had this text.
fn is_first(text: &str) -> bool {
    static SEEN: PerProcess<unmodeled::Mutex<BTreeSet<String>>> = PerProcess::new(unmodeled::Mutex::default);
    SEEN.get().lock().insert(text.to_owned())
}

/// Returns whether the `nth` event of a kind is logged: the first, the tenth, the hundredth and so on.
pub(crate) fn is_power_of_ten(nth: u64) -> bool {
    nth.checked_ilog10().is_some_and(|digits| nth == 10u64.pow(digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_ten_are_logged() {
        let logged: Vec<u64> =
            (0..=1_000).chain([10_000, 10_001, u64::MAX]).filter(|&nth| is_power_of_ten(nth)).collect();
        assert_eq!(logged, [1, 10, 100, 1_000, 10_000]);
    }
}
