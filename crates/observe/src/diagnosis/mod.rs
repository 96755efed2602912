//! Diagnoses a pool: the cause of lost time, with evidence, advice and the seconds lost. The module turns numbers into text. It
//! has no access to pools and reads no clock.
//!
//! ```text
//!   snapshots of a pool, every ten seconds ──▶ Monitor ──▶ WindowDiagnosis      log, `top`, `why`, `report`, metrics
//!   a request that found no memory ──▶ shortage::likely_cause           its error report, `dump`
//! ```
//!
//! The first rule that applies in a window of at least 10 s and 20 requests decides. "Requests waited" means more than 2 of
//! 1000, and at least 3 requests or a hundredth of the time:
//!
//! | cause | rule |
//! | --- | --- |
//! | `stuck_copy` | a copy has been in flight for 30 s |
//! | `leak` | over three windows one tag holds more and more buffers, none is returned, and requests come no faster |
//! | | if these are the first three windows: the tag holds most memory, and most other buffers return |
//! | `idle_hoard` | requests waited, and the backend refuses while most held memory is unused |
//! | `memory_refused` | requests waited, and the backend refuses otherwise |
//! | `other_process` | requests waited for memory of other processes |
//! | | if this pool holds more and keeps most of it for the whole window, the cause is `limit_too_small` |
//! | `limit_too_small` | requests waited: some failed, no buffer returned, threads wait for each other, or a few wait long |
//! | `slow_consumer` | requests waited, but need at most a quarter more memory, and buffers stay in use for long |
//! | `pool_full` | requests waited otherwise |
//! | `sizes_never_recur` | under `tensorflow`, most requests missed with lengths not requested recently, each with a pin call |
//! | `thrashing` | under `tensorflow`, more than 2 of 1000 requests missed and returns evicted |
//! | | or in two windows as much memory was pinned and unpinned as is held |
//! | | or over minutes memory is unpinned and pinned again for a fiftieth of the time |
//! | `sizes_never_recur` | most requests missed with lengths not requested recently |
//! | `thrashing` | most requests missed, and a twentieth of the time was spent in remaps, or near the limit in pin calls |
//! | `warming_up` | over a sixteenth more is held than in any earlier window, and more than a fiftieth of the requests missed |
//! | | until the held memory has not grown for 10 s, even if too few requests come to end a window |
//! | `not_pinned` | copies use pageable memory |
//! | `healthy` | none of these |
//!
//! | file | contents |
//! | --- | --- |
//! | `window_diagnosis.rs` | causes, and what is reported with one |
//! | `snapshot.rs` | the state of a pool at one moment |
//! | `window.rs` | the rules over one window |
//! | `churn.rs` | the rule over minutes: memory that is pinned again |
//! | `leak.rs` | the rule over several windows: buffers that are never returned |
//! | `lengths.rs` | recently requested lengths |
//! | `log_filter.rs` | which diagnoses are logged |
//! | `shortage.rs` | the cause of one request that found no memory |
//! | `series.rs` | the snapshots of a recording |
//! | `words.rs` | how sizes, times and counts are written |

mod churn;
mod leak;
mod lengths;
mod log_filter;
#[cfg(feature = "io")]
mod series;
pub mod shortage;
mod snapshot;
mod window;
mod window_diagnosis;
pub mod words;

pub use lengths::RecentLengths;
use log_filter::{LogFilter, summary};
#[cfg(feature = "io")]
pub use series::{PoolDiagnosis, diagnose_recording};
pub use snapshot::{AGED, STUCK_AFTER, Snapshot, TagUse};
use window::Window;
pub use window_diagnosis::{Cause, LikelyCause, Lost, WindowDiagnosis};

/// Minimum length of a window.
const WINDOW_US: u64 = 10_000_000;
/// Time for which windows are remembered, since a burst may end before a user asks.
const PAST_US: u64 = 300_000_000;
/// Minimum number of requests in a window, because fewer show no rate. Waiting requests or a stuck copy end a window with
/// fewer.
const REQUESTS_MIN: u64 = 20;

/// A completed window: the differences of its counters, and its diagnosis.
#[derive(Debug)]
struct Past {
    at_us: u64,
    delta: Snapshot,
    diagnosis: WindowDiagnosis,
}

/// Diagnoses a pool from its snapshots.
#[derive(Debug, Default)]
pub struct Monitor {
    last_us: u64,
    last: Snapshot,
    most_held_bytes: u64,
    /// The most bytes held in any snapshot, and the time of the first snapshot that held as many.
    grown: (u64, u64),
    /// Number of consecutive windows that pinned and unpinned at least as much memory as the pool held.
    churned: u32,
    growth: leak::Growth,
    /// Windows of the last five minutes, and always the last one; all windows if `remembers_all`.
    past: Vec<Past>,
    /// Whether all windows are remembered.
    remembers_all: bool,
    log_filter: LogFilter,
}

impl Monitor {
    /// Returns whether enough time has passed for a window to end.
    pub fn is_due(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.last_us) >= WINDOW_US
    }

    /// Returns the diagnosis of the last window.
    pub fn latest(&self) -> Option<&WindowDiagnosis> {
        self.past.last().map(|past| &past.diagnosis)
    }

    /// Returns the diagnosis of the remembered windows, or of the time so far if no window has ended. If no known alarm
    /// explains the last failed request, returns the likely cause of its failure instead. The rule is the same for a running
    /// process and for a recording.
    pub fn why(&self, now_us: u64, now: &Snapshot) -> WindowDiagnosis {
        let window_us = now_us.saturating_sub(self.last_us);
        let window = |most_held_bytes| Window::between(&self.last, now, window_us, most_held_bytes);
        let recent = self.past.iter().filter(|past| self.remembers_all || past.at_us + PAST_US > now_us);
        let seen = summary(&recent.map(|past| &past.diagnosis).collect::<Vec<_>>()).or_else(|| self.latest().cloned());
        let mut diagnosis = seen.unwrap_or_else(|| window(self.most_held_bytes).diagnose(None, 0, None));
        // A window with few requests does not end, but a pool with memory that has stopped growing is no longer warming up.
        let (grown_bytes, grown_us) = self.grown;
        let is_settled = now.held_bytes <= grown_bytes && now_us >= grown_us.saturating_add(WINDOW_US);
        if diagnosis.cause == Cause::WarmingUp && is_settled {
            diagnosis = window(now.held_bytes).quiet();
        }
        let is_known =
            |cause| self.latest().is_some_and(|last| last.is_alarm || diagnosis.is_alarm && diagnosis.cause == cause);
        match now.failure.clone() {
            Some((cause, LikelyCause { found, remedy })) if !is_known(cause) => {
                WindowDiagnosis { cause, is_alarm: true, found, remedy: Some(remedy), setting: None, ..diagnosis }
            }
            _ => diagnosis,
        }
    }

    /// Adds a snapshot. Returns the diagnosis of the window that the snapshot ends, if any.
    pub fn add(&mut self, now_us: u64, now: Snapshot) -> Option<&WindowDiagnosis> {
        if now.held_bytes > self.grown.0 {
            self.grown = (now.held_bytes, now_us);
        }
        let requests = now.requests.saturating_sub(self.last.requests);
        if !self.is_due(now_us) || (requests < REQUESTS_MIN && now.waiting == 0 && !window::is_stuck(&now)) {
            return None;
        }
        let leak = self.growth.add(now_us, &now);
        let window = Window::between(&self.last, &now, now_us.saturating_sub(self.last_us), self.most_held_bytes);
        self.churned = if window.is_churning() { self.churned + 1 } else { 0 };
        let minutes = self.past.iter().filter(|past| past.at_us + PAST_US > now_us);
        let window_us = now_us - minutes.clone().next().map_or(self.last_us, |first| first.at_us);
        let again = churn::repinned(minutes.map(|past| &past.delta).chain([&window.delta]), window_us);
        let (diagnosis, delta) = (window.diagnose(leak, self.churned, again), window.delta);
        self.most_held_bytes = self.most_held_bytes.max(now.held_bytes);
        (self.last_us, self.last) = (now_us, now);
        let remembers_all = self.remembers_all;
        self.past.retain(|past| remembers_all || past.at_us + PAST_US > now_us);
        self.past.push(Past { at_us: now_us, delta, diagnosis });
        self.latest()
    }

    /// Returns whether the diagnosis at `now_us` must be logged.
    pub fn should_log(&mut self, now_us: u64) -> bool {
        self.past.last().is_some_and(|past| self.log_filter.should_log(now_us, &past.diagnosis))
    }
}

#[cfg(test)]
mod tests;
