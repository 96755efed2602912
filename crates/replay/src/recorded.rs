//! The settings under which a recording was made, and whether a replay of these gives what was recorded.

use super::report::ReplayOutcome;
use super::workload::Workload;
use pinpool_observe::judge::words::counted;
use pinpool_observe::record::{PoolDescription, SET_IN_CODE};

const CEILING: &str = "PINPOOL_MAX_BYTES";
/// Each of both implies the other.
const RULES: [&str; 2] = ["PINPOOL_PRESET", "PINPOOL_ROUNDING"];
/// A replay of the recorded settings may end earlier or later than the recording by one part in this many.
const DOUBTFUL_PART: u64 = 5;

#[derive(Debug, Clone, Default)]
pub(super) struct RecordedSettings {
    /// Each variable with the value that held, and the ceiling that there was last.
    values: Vec<(String, String)>,
    /// Variables that set nothing there, since the program's code did.
    in_code: Vec<String>,
}

impl RecordedSettings {
    /// The ceiling is `bytes` from now on, `u64::MAX` without one.
    pub(super) fn set_ceiling(&mut self, bytes: u64) {
        let ceiling = if bytes == u64::MAX { "none".to_owned() } else { bytes.to_string() };
        self.values.retain(|(name, _)| name != CEILING);
        self.values.push((CEILING.to_owned(), ceiling));
    }

    pub(super) fn add(&mut self, pool: &PoolDescription) {
        let in_code = pool.fact(SET_IN_CODE).unwrap_or_default();
        self.in_code.extend(in_code.split_whitespace().map(str::to_owned));
        let values = pool.facts.iter().filter(|(name, _)| name.starts_with("PINPOOL_") && name != CEILING);
        self.values.extend(values.cloned());
    }

    pub(super) fn values(&self) -> &[(String, String)] {
        &self.values
    }

    pub(super) fn is_in_code(&self, name: &str) -> bool {
        let is_set = |name: &str| self.in_code.iter().any(|set| set == name);
        is_set(name) || RULES.contains(&name) && RULES.into_iter().any(is_set)
    }
}

impl Workload {
    /// Why a recording cannot be replayed faithfully, by its replay under the settings that it was made with; `None` if it can be.
    pub fn doubt(&self, as_recorded: &ReplayOutcome) -> Option<String> {
        let (recorded_us, replayed_us) = (self.ended_us, as_recorded.ended_us);
        let late = as_recorded.report.fallbacks.saturating_sub(self.failed_gets());
        let why = if self.is_closed() && late > 0 {
            let late = counted(late, "request");
            format!("with its own settings {late} of the replay time out, which did not when it was recorded")
        } else if self.is_closed() && recorded_us.abs_diff(replayed_us) > recorded_us / DOUBTFUL_PART {
            let seconds = |us: u64| us as f64 / 1e6;
            let (replayed, recorded) = (seconds(replayed_us), seconds(recorded_us));
            format!("with its own settings the replay ends after {replayed:.1} s instead of {recorded:.1} s")
        } else {
            return None;
        };
        Some(format!("this recording cannot be replayed faithfully: {why}, so nothing is promised"))
    }
}
