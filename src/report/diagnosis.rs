//! The diagnosis of a pool.

use std::fmt;
use std::time::Duration;

pub use pinpool_observe::diagnosis::Cause;
use pinpool_observe::diagnosis::WindowDiagnosis;

/// The main cause of lost time, and a recommendation ([`Pool::diagnose`](crate::Pool::diagnose)).
///
/// Displays as several lines: the cause and what was measured, the evidence, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Diagnosis {
    /// The cause that costs most.
    pub cause: Cause,
    /// True if the cause is a problem; `remedy` says what to do.
    pub is_alarm: bool,
    /// The measurement, in one sentence.
    pub found: String,
    /// What to change, if there is something.
    pub remedy: Option<String>,
    /// A setting that helps.
    pub setting: Option<SuggestedSetting>,
    /// Time that all threads together spent waiting, pinning, unpinning and remapping during [`observed`](Diagnosis::observed).
    pub lost: Duration,
    /// Length of the window that was evaluated.
    pub observed: Duration,
    text: String,
}

/// A variable and the value to give it. [`PoolBuilder::setting`](crate::PoolBuilder::setting) takes both.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SuggestedSetting {
    /// The variable, such as `PINPOOL_MAX_BYTES`.
    pub variable: &'static str,
    /// The value as text.
    pub value: String,
}

impl From<WindowDiagnosis> for Diagnosis {
    fn from(window: WindowDiagnosis) -> Self {
        let text = window.lines().join("\n");
        let WindowDiagnosis { cause, is_alarm, found, remedy, setting, lost, .. } = window;
        let setting = setting.map(|(variable, value)| SuggestedSetting { variable, value: value.to_string() });
        let (lost, observed) = (Duration::from_nanos(lost.total_ns()), Duration::from_micros(lost.window_us));
        Self { cause, is_alarm, found, remedy, setting, lost, observed, text }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
