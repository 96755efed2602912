//! The counters of a replay under one set of settings, and whether they match the recording.

use std::time::Duration;

use pinpool::Preset;
use pinpool_observe::diagnosis::words::counted;
use pinpool_os::format::Time;
use serde::Serialize;

use super::cost::CallCost;
use super::sim::SourceKind;
use super::workload::Workload;

/// A replay under the recorded settings is doubtful if it ends more than 1/5 of the recorded time earlier or later.
const DOUBTFUL_PART: u64 = 5;

/// The cost of a workload; fields in the order in which they are printed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Policy of the pool.
    pub preset: Preset,
    /// Rounding of sizes to classes.
    pub rounding: String,
    /// Kind of memory.
    pub source: SourceKind,
    /// Pin calls.
    #[serde(rename = "page_locks")]
    pub pin_calls: u64,
    /// Pin calls after the first half of the requests.
    #[serde(rename = "late_page_locks")]
    pub late_pin_calls: u64,
    /// Bytes pinned by those calls.
    #[serde(rename = "bytes_locked")]
    pub pinned_bytes_total: u64,
    /// Peak of the bytes pinned.
    pub peak_pinned_bytes: u64,
    /// Peak of the bytes requested and not returned.
    pub peak_requested_bytes: u64,
    /// Mean of the pinned bytes over the time of the trace; for a trace without time, the bytes at its end.
    pub mean_pinned_bytes: u64,
    /// Bytes pinned a minute after the last return.
    pub pinned_after_60s_bytes: u64,
    /// Requests of more than zero bytes, served or not.
    pub gets: u64,
    /// Requests served by an idle buffer.
    #[serde(rename = "front_hits")]
    pub hits: u64,
    /// Idle buffers evicted by returns because of the limit on idle buffers.
    pub evicted: u64,
    /// Idle buffers reclaimed for a request at the limit or after the idle timeout.
    pub reclaimed: u64,
    /// How often the limit on idle buffers was raised.
    pub raises: u64,
    /// How often the limit on idle buffers was lowered.
    pub reductions: u64,
    /// Requests that waited at the limit.
    pub waits: u64,
    /// Requests that timed out.
    #[serde(rename = "fallbacks")]
    pub timeouts: u64,
    /// Limit on idle buffers at the end.
    pub pool_size_limit: u64,
    /// Limit in bytes.
    pub max_bytes: Option<u64>,
    /// Requests after the first second that pinned nothing, with remaps that would take over half a millisecond.
    #[serde(rename = "slow_gets")]
    pub slow_requests: u64,
    /// Time of the remaps of the slowest such request, in microseconds.
    pub worst_moves_us: u64,
    /// Bytes of the granules that requests remapped.
    pub moved_bytes: u64,
    /// Bytes of the granules that were remapped between requests, by compaction.
    pub prepared_bytes: u64,
    /// Calls that released memory.
    pub releases: u64,
    /// Bytes released by those calls.
    pub released_bytes: u64,
    /// Requested bytes at the peak of the pinned bytes; the difference is waste.
    pub asked_at_peak_bytes: u64,
    /// Time of all remaps, in nanoseconds.
    pub moving_ns: u64,
    /// Total time that requests waited, in microseconds.
    pub waited_us: u64,
    /// Time at which the last buffer was returned, in microseconds.
    pub ended_us: u64,
    /// Checks of TensorFlow's two rates; one in ten is printed.
    pub checks: u64,
    /// The log lines of the last check, as TensorFlow prints them.
    pub last_lines: Option<String>,
}

impl ReplayReport {
    /// Returns the seconds in the backend, if remaps take `move_scale` times as long as the replay assumes.
    pub fn driver_seconds(&self, pin: CallCost, unpin: CallCost, move_scale: f64) -> f64 {
        pin.seconds(self.pin_calls, self.pinned_bytes_total)
            + unpin.seconds(self.releases, self.released_bytes)
            + self.moving_ns as f64 / 1e9 * move_scale
    }
}

impl Workload {
    /// Returns the reason why a recording cannot be replayed faithfully, if a replay under the recorded settings shows one.
    pub fn doubt(&self, as_recorded: &ReplayReport) -> Option<String> {
        let (recorded_us, replayed_us) = (self.ended_us, as_recorded.ended_us);
        let late = as_recorded.timeouts.saturating_sub(self.failed_requests);
        let why = if self.is_closed && late > 0 {
            let late = counted(late, "request");
            format!("with the recorded settings {late} of the replay time out, but not in the recording")
        } else if self.is_closed && recorded_us.abs_diff(replayed_us) > recorded_us / DOUBTFUL_PART {
            let [replayed, recorded] = [replayed_us, recorded_us].map(|us| Time(Duration::from_micros(us)));
            format!("with the recorded settings the replay ends after {replayed} instead of {recorded}")
        } else {
            return None;
        };
        Some(format!("this recording cannot be replayed faithfully: {why}"))
    }
}
