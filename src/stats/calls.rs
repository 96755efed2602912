//! Counts, bytes and durations of a backend's calls.

use std::time::Duration;

use super::CallStats;

impl CallStats {
    pub(crate) fn record(&mut self, bytes: u64, took: Duration, has_succeeded: bool) {
        self.time.record(took);
        if has_succeeded {
            self.count += 1;
            self.bytes += bytes;
        } else {
            self.failures += 1;
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.failures += other.failures;
        self.bytes += other.bytes;
        self.time.add(&other.time);
    }
}

/// All calls of a source.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SourceCalls {
    pub(crate) pin: CallStats,
    pub(crate) unpin: CallStats,
    pub(crate) remap: CallStats,
}

impl SourceCalls {
    /// Adds the calls of `other`.
    pub(crate) fn add(&mut self, other: &Self) {
        self.pin.add(&other.pin);
        self.unpin.add(&other.unpin);
        self.remap.add(&other.remap);
    }

    /// Returns the total duration of all calls.
    pub(crate) fn time(&self) -> Duration {
        self.pin.time.total() + self.unpin.time.total() + self.remap.time.total()
    }
}
