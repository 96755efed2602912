//! Why a pool is as fast as it is.

use std::fmt;
use std::time::Duration;

use pinpool_observe::judge::{Cause, Judgement};

/// The cause of what a pool costs, with evidence and a cure ([`Pool::why`](crate::Pool::why)).
///
/// Displays as several lines: the cause and what was seen, the evidence, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why(pub(crate) Judgement);

impl Why {
    /// All causes: `healthy`, `warming_up`, `not_pinned`, `pool_full`, `sizes_never_recur`, `thrashing`, `idle_hoard`, `memory_refused`,
    /// `limit_too_small`, `slow_consumer`, `other_process`, `leak` and `stuck_copy`.
    pub const CAUSES: [&'static str; Cause::ALL.len()] = Cause::NAMES;

    /// One of [`CAUSES`](Why::CAUSES).
    pub fn cause(&self) -> &'static str {
        self.0.cause.name()
    }

    /// Whether something is wrong that [`cure`](Why::cure) mends.
    pub fn is_alarm(&self) -> bool {
        self.0.is_alarm
    }

    /// What was seen.
    pub fn found(&self) -> &str {
        &self.0.found
    }

    /// More of it, a sentence each.
    pub fn evidence(&self) -> &[String] {
        &self.0.evidence
    }

    /// What to do; `None` where nothing is to be done.
    pub fn cure(&self) -> Option<&str> {
        self.0.cure.as_deref()
    }

    /// What all threads together spent waiting, page-locking and moving memory, in the time that was looked at.
    pub fn lost(&self) -> Duration {
        Duration::from_nanos(self.0.lost.total_ns())
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.lines().join("\n"))
    }
}
