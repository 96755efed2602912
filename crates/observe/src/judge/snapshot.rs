//! What a pool shows at one moment.

use std::borrow::Cow;
use std::time::Duration;

use super::judgement::{Cause, LikelyCause};

/// A buffer this old counts as aged: bursts have ended by then.
pub const AGED: Duration = Duration::from_secs(60);
/// No working copy takes this long.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

/// Buffers that are out under one tag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Holder {
    pub tag: String,
    pub buffers: u64,
    pub bytes: u64,
    /// Age of the oldest; `None` where it is not known.
    pub oldest: Option<Duration>,
    /// Buffers older than a minute; 0 where ages are not known.
    pub aged: u64,
    /// Where most of the bytes were got that were sampled; `None` where none were.
    pub place: Option<String>,
}

/// Counts of a pool since it was made, and what it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Snapshot {
    /// Served or failed.
    pub gets: u64,
    pub misses: u64,
    /// Gets that missed and asked for a length that was not asked for lately; where an eviction is a release, for a size that had no
    /// buffer.
    pub new_lengths: u64,
    pub puts: u64,
    pub evicted: u64,
    /// Gets that found no memory at once.
    pub short_gets: u64,
    /// Those of threads that had just returned a buffer: they wait for each other.
    pub own_waits: u64,
    /// Those that failed.
    pub failed_gets: u64,
    /// Whether the source refused the last attempt that was refused, not a limit.
    pub is_by_source: bool,
    /// Gets that wait now.
    pub waiting: u64,
    pub waiting_ns: u64,
    /// What was pinned and released for this pool alone, and how long the calls took; 0 for a partition, of which that is not known.
    pub page_locks: u64,
    pub pinned_bytes: u64,
    pub unpinned_bytes: u64,
    pub page_locking_ns: u64,
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
    pub fallback_bytes: u64,
    /// The most that was in use and asked for at one time, since the last window, while memory was short.
    pub needed_bytes: u64,
    /// The name of what is to be raised for more bytes; `None` where there is no limit.
    pub limit: Option<Cow<'static, str>>,
    pub max_bytes: Option<u64>,
    /// What other processes hold, if the limit is shared with them.
    pub others_bytes: Option<u64>,
    /// Idle buffers that it may keep, where an eviction is a release.
    pub pool_size_limit: Option<u64>,
    /// The most buffers at once of each size that missed more than once, summed up, where an eviction is a release.
    pub recurring: u64,
    pub oldest_copy: Option<Duration>,
    /// Its stream, where it is known.
    pub oldest_copy_stream: Option<u64>,
    /// Copies that were begun; 0 where nobody counts.
    pub copies: u64,
    pub is_pinned: bool,
    /// Whether the process has loaded a GPU driver.
    pub has_driver: bool,
    /// The last request that failed since the last window, and why.
    pub failure: Option<(Cause, LikelyCause)>,
    pub holders: Vec<Holder>,
}

impl Snapshot {
    /// What its counters have counted since `before`, and nothing else.
    pub(super) fn since(&self, before: &Self) -> Self {
        macro_rules! counted {
            ($($counter:ident)*) => {
                Self { $($counter: self.$counter.saturating_sub(before.$counter),)* ..Self::default() }
            };
        }
        counted! {
            gets misses new_lengths puts evicted short_gets own_waits failed_gets waiting_ns page_locks pinned_bytes unpinned_bytes
            page_locking_ns moving_ns
        }
    }
}
