//! The state of a pool at one moment.

use std::borrow::Cow;
use std::time::Duration;

use super::window_diagnosis::{Cause, LikelyCause, Lost};

/// A buffer this old counts as aged: bursts have ended by then.
pub const AGED: Duration = Duration::from_secs(60);
/// No working copy takes this long.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

/// Buffers in use under one tag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Holder {
    pub tag: String,
    pub buffers: u64,
    pub bytes: u64,
    /// Age of the oldest; `None` if unknown.
    pub oldest: Option<Duration>,
    /// Buffers older than a minute; 0 if ages are unknown.
    pub aged: u64,
    /// The place that allocated most of the sampled bytes; `None` without samples.
    pub place: Option<String>,
}

/// Counts of a pool since it was built, and what it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Snapshot {
    /// Served or failed.
    pub requests: u64,
    pub misses: u64,
    /// Misses of lengths that were not requested recently; if an eviction is a release, of sizes without any buffer.
    pub new_lengths: u64,
    pub returns: u64,
    pub evicted: u64,
    /// Requests that were not served immediately.
    pub delayed_requests: u64,
    /// Such requests of threads that had just returned a buffer, which therefore wait for each other.
    pub own_waits: u64,
    /// Requests that failed.
    pub failed_requests: u64,
    /// The backend refused the last refused request, and not a limit.
    pub is_by_source: bool,
    /// Requests that wait now.
    pub waiting: u64,
    pub waiting_ns: u64,
    /// Calls for this pool alone, and their duration; 0 for a partition, which does not know them.
    pub pin_calls: u64,
    pub pinned_bytes: u64,
    pub unpinned_bytes: u64,
    pub pinning_ns: u64,
    pub moving_ns: u64,
    pub held_bytes: u64,
    pub most_held_bytes: u64,
    /// In use or in flight.
    pub used_bytes: u64,
    pub used: u64,
    pub in_flight_bytes: u64,
    /// In idle buffers.
    pub idle_bytes: u64,
    /// Held and in no buffer.
    pub free_bytes: u64,
    /// Unpinned memory that serves requests beyond the limit.
    pub pageable_bytes: u64,
    /// The most bytes in use and requested at one time since the last window, while memory was short.
    pub needed_bytes: u64,
    /// Variables that the program sets in its code, separated by spaces. In a recording it is a fact of the pool.
    #[cfg_attr(feature = "io", serde(skip))]
    pub set_in_code: String,
    /// The name of the limit to raise for more bytes; `None` without a limit.
    pub limit: Option<Cow<'static, str>>,
    pub max_bytes: Option<u64>,
    /// Bytes that other processes hold, if the limit is shared with them.
    pub others_bytes: Option<u64>,
    /// Most idle buffers, if an eviction is a release.
    pub pool_size_limit: Option<u64>,
    /// The sum of the most buffers at once of each size that missed more than once, if an eviction is a release.
    pub recurring: u64,
    pub oldest_copy: Option<Duration>,
    /// The stream of that copy, if known.
    pub oldest_copy_stream: Option<u64>,
    /// Copies that were begun; 0 if they are not counted.
    pub copies: u64,
    pub is_pinned: bool,
    /// The process has loaded a GPU driver. Looked up only if memory that is not pinned was copied.
    pub has_driver: bool,
    /// The likely cause of the last request that failed since the last window.
    pub failure: Option<(Cause, LikelyCause)>,
    pub holders: Vec<Holder>,
}

impl Snapshot {
    /// The buffers of a tag.
    pub(super) fn holder(&self, tag: &str) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.tag == tag)
    }

    pub(super) fn unused_bytes(&self) -> u64 {
        self.idle_bytes.saturating_add(self.free_bytes)
    }

    pub(super) fn is_mostly_unused(&self) -> bool {
        self.unused_bytes() > self.held_bytes / 2
    }

    /// The time that its counters show as lost.
    pub fn lost(&self, window_us: u64) -> Lost {
        Lost { window_us, waiting_ns: self.waiting_ns, pinning_ns: self.pinning_ns, moving_ns: self.moving_ns }
    }

    /// The differences of its counters to `before`.
    pub fn since(&self, before: &Self) -> Self {
        macro_rules! counted {
            ($($counter:ident)*) => {
                Self { $($counter: self.$counter.saturating_sub(before.$counter),)* ..Self::default() }
            };
        }
        counted!(
            requests misses new_lengths returns evicted delayed_requests own_waits failed_requests waiting_ns pin_calls
            pinned_bytes unpinned_bytes pinning_ns moving_ns)
    }
}
