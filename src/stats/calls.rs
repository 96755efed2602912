//! Calls of the source of the memory.

use std::time::Duration;

use super::Histogram;

/// Calls of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Calls {
    /// Calls that succeeded.
    pub count: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Bytes of the calls that succeeded, as they were requested.
    pub bytes: u64,
    /// How long each call took, failed ones and waiting for other threads' calls included.
    pub time: Histogram,
}

impl Calls {
    pub(crate) fn record(&mut self, bytes: u64, took: Duration, has_succeeded: bool) {
        self.time.record(took);
        if has_succeeded {
            self.count += 1;
            self.bytes += bytes;
        } else {
            self.failures += 1;
        }
    }

    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.failures += other.failures;
        self.bytes += other.bytes;
        self.time.add(&other.time);
    }
}

/// All calls of a source.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SourceCalls {
    pub(crate) pin: Calls,
    pub(crate) unpin: Calls,
    pub(crate) remap: Calls,
    peak_bytes: u64,
}

impl SourceCalls {
    /// Adds the calls of `other`, which released before they acquired or are one plan.
    pub(crate) fn add(&mut self, other: &Self) {
        self.pin.add(&other.pin);
        self.unpin.add(&other.unpin);
        self.remap.add(&other.remap);
        self.peak_bytes = self.peak_bytes.max(self.pin.bytes.saturating_sub(self.unpin.bytes));
    }

    /// An acquisition.
    pub(crate) fn pinned(&mut self, bytes: u64, took: Duration, has_succeeded: bool) {
        self.pin.record(bytes, took, has_succeeded);
        self.peak_bytes = self.peak_bytes.max(self.pin.bytes.saturating_sub(self.unpin.bytes));
    }

    /// A remap lost these bytes: they went back to the system by no call of their own.
    pub(crate) fn lost(&mut self, bytes: u64) {
        self.unpin.count += 1;
        self.unpin.bytes += bytes;
    }

    /// The sums of all.
    pub(crate) fn underlying(&self) -> Underlying {
        let Self { pin, unpin, remap, peak_bytes } = self;
        Underlying {
            allocs: pin.count,
            frees: unpin.count,
            alloc_bytes: pin.bytes,
            free_bytes: unpin.bytes,
            peak_bytes: *peak_bytes,
            time: pin.time.total() + unpin.time.total() + remap.time.total(),
            failures: pin.failures + unpin.failures + remap.failures,
        }
    }
}

/// Calls to the underlying allocator, in the bytes requested: the sums of [`Stats::pin`](crate::Stats::pin),
/// [`Stats::unpin`](crate::Stats::unpin) and [`Stats::remap`](crate::Stats::remap).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Underlying {
    /// Acquisitions that succeeded.
    pub allocs: u64,
    /// Releases that succeeded.
    pub frees: u64,
    /// Sum of the classes acquired.
    pub alloc_bytes: u64,
    /// Sum of the classes released.
    pub free_bytes: u64,
    /// Most bytes acquired and not released at any time.
    pub peak_bytes: u64,
    /// Time spent in calls, failed ones and moves of granules included.
    #[cfg_attr(feature = "serde", serde(rename = "time_seconds", serialize_with = "super::serial::seconds"))]
    pub time: Duration,
    /// Calls that failed.
    pub failures: u64,
}
