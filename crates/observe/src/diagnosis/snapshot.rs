//! The state of a pool at one moment.

use std::borrow::Cow;
use std::time::Duration;

use super::window_diagnosis::{Cause, LikelyCause, Lost};

/// Age from which a buffer counts as aged: bursts have ended by then.
pub const AGED: Duration = Duration::from_secs(60);
/// Age from which a copy counts as stuck: no working copy takes this long.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

/// Buffers in use under one tag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct TagUse {
    pub tag: String,
    pub buffers: u64,
    pub bytes: u64,
    /// Age of the oldest buffer; `None` if unknown.
    pub oldest_age: Option<Duration>,
    /// Buffers older than a minute; 0 if ages are unknown.
    pub aged: u64,
    /// The place that allocated most of the sampled bytes; `None` without samples.
    pub place: Option<String>,
}

/// Counters of a pool since it was built, and the memory that it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Snapshot {
    /// Requests that were served or failed.
    pub requests: u64,
    pub misses: u64,
    /// Misses with a length that was not requested recently. Under `tensorflow`: misses of a size that never had a buffer.
    pub new_lengths: u64,
    pub returns: u64,
    pub evicted: u64,
    /// Requests that were not served immediately.
    pub delayed_requests: u64,
    /// Delayed requests from threads that had just returned a buffer. Such threads wait for each other.
    pub own_waits: u64,
    /// Requests that failed.
    pub failed_requests: u64,
    /// Whether the backend, and not a limit, made the last refusal.
    pub is_by_source: bool,
    /// Requests that are waiting now.
    pub waiting: u64,
    pub waiting_ns: u64,
    /// Pin calls of this pool. Their number, bytes and times are 0 for a partition, because its pool counts them.
    pub pin_calls: u64,
    pub pinned_bytes: u64,
    pub unpinned_bytes: u64,
    pub pinning_ns: u64,
    pub moving_ns: u64,
    pub held_bytes: u64,
    pub most_held_bytes: u64,
    /// Bytes in use or in flight.
    pub used_bytes: u64,
    pub used: u64,
    pub in_flight_bytes: u64,
    /// Bytes in idle buffers.
    pub idle_bytes: u64,
    /// Held bytes that belong to no buffer.
    pub free_bytes: u64,
    /// Bytes of unpinned memory that serves requests beyond the limit.
    pub pageable_bytes: u64,
    /// The peak of the bytes in use and requested, measured since the last window whenever a request found no memory.
    pub needed_bytes: u64,
    /// Variables that the program sets in its code, separated by spaces. A recording contains them as a fact of the pool
    /// instead.
    #[cfg_attr(feature = "io", serde(skip))]
    pub set_in_code: String,
    /// The name of the limit to raise for more bytes; `None` without a limit.
    pub limit: Option<Cow<'static, str>>,
    pub max_bytes: Option<u64>,
    /// Bytes that other processes hold, if the limit is shared with them.
    pub others_bytes: Option<u64>,
    /// Maximum number of idle buffers under `tensorflow`, which releases the memory of evicted buffers.
    pub pool_size_limit: Option<u64>,
    /// Under `tensorflow`: the sum of the peak numbers of buffers of all sizes that missed more than once.
    pub recurring: u64,
    pub oldest_copy: Option<Duration>,
    /// The stream of the oldest copy, if known.
    pub oldest_copy_stream: Option<u64>,
    /// Copies that were started; 0 if copies are not counted.
    pub copies: u64,
    pub is_pinned: bool,
    /// Whether the process has loaded a GPU driver. Checked only if unpinned memory was copied.
    pub has_driver: bool,
    /// The likely cause of the last request that failed since the last window.
    pub failure: Option<(Cause, LikelyCause)>,
    pub holders: Vec<TagUse>,
}

impl Snapshot {
    /// Returns the buffers in use under `tag`.
    pub(super) fn holder(&self, tag: &str) -> Option<&TagUse> {
        self.holders.iter().find(|holder| holder.tag == tag)
    }

    pub(super) fn unused_bytes(&self) -> u64 {
        self.idle_bytes.saturating_add(self.free_bytes)
    }

    pub(super) fn is_mostly_unused(&self) -> bool {
        self.unused_bytes() > self.held_bytes / 2
    }

    /// Returns the time that the counters show as lost.
    pub fn lost(&self, window_us: u64) -> Lost {
        Lost { window_us, waiting_ns: self.waiting_ns, pinning_ns: self.pinning_ns, moving_ns: self.moving_ns }
    }

    /// Returns the differences between these counters and the counters of `before`.
    pub fn since(&self, before: &Self) -> Self {
        macro_rules! counted {
            ($($counter:ident)*) => {
                Self { $($counter: self.$counter.saturating_sub(before.$counter),)* ..Self::default() }
            };
        }
        counted!(
            requests misses new_lengths returns evicted delayed_requests own_waits failed_requests waiting_ns pin_calls
            pinned_bytes unpinned_bytes pinning_ns moving_ns most_held_bytes)
    }
}
