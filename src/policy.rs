//! Decides how much memory a pool keeps. The functions take numbers and return a decision; they read no clock, log nothing and
//! take no lock.
//!
//! This file contains these rules of `docs/policy.md`: the check, the raise and the lowering of policy-R4, the default limit of
//! policy-R8, the size up to which policy-R3 keeps every buffer, and the time after which an idle buffer expires (policy-R9).
//! [`Preset`] and [`PinnedBy`] are here because the statistics name them, and a lower layer cannot import `config` or `backend`.

use std::time::Duration;

use pinpool_os::host::GRANULE_BYTES;

/// The policy of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Preset {
    /// An arena behind the idle buffers: most misses are carved from pinned memory, held bytes are limited, and idle memory is
    /// released.
    #[default]
    Adaptive,
    /// Reproduces TensorFlow's `PoolAllocator`, including its counters and log lines: each miss is a separate allocation.
    TensorFlow,
}

/// The component that pins memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum PinnedBy {
    /// The CUDA driver: `cuMemHostRegister`, `cuMemHostAlloc` or virtual memory.
    Driver,
    /// The kernel: `mlock`. CUDA copies such memory as pageable memory.
    Kernel,
}

impl PinnedBy {
    /// Returns its name in statistics, log lines and JSON: `driver` or `kernel`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Kernel => "kernel",
        }
    }
}

/// Evictions between two checks (`kCheckInterval`).
pub(crate) const CHECK_EVERY_EVICTIONS: u64 = 1000;
/// The limit rises only if both rates are strictly above this rate (`kTolerable`).
const TOLERABLE_RATE: f64 = 2e-3;
/// The lowest result of a raise: any limit below this number rises to this number in one step.
pub(crate) const RAISED_LIMIT_MIN: u64 = 100;
/// A raise adds the limit divided by this number, rounded down. This equals TensorFlow's factor of 1.1 in whole numbers.
const RAISE_DIVISOR: u64 = 10;
/// With the limit `auto`, a pool pins at most the memory that the process may use, divided by this number (policy-R8).
const LIMIT_DIVISOR: u64 = 4;

/// Buffers up to this size, an eighth of a 2 MiB granule, stay idle in their class even while sizes vary (policy-R3). They are so
/// small that merging them would not save a granule.
const KEPT_ALWAYS_BYTES: usize = 256 << 10;

/// Returns whether a returned buffer of `bytes` goes to the arena instead of staying idle (policy-R3). Calls `sizes_vary` only if
/// the size alone does not decide.
#[inline(always)]
pub(crate) fn goes_to_arena(bytes: usize, sizes_vary: impl FnOnce() -> bool) -> bool {
    bytes > KEPT_ALWAYS_BYTES && sizes_vary()
}

/// Longest time that a buffer is idle before it returns to the arena (policy-R9). In the replay of 25 workloads, driver time and
/// held memory are a sixteenth worse without this rule.
pub(crate) const BUFFER_IDLE_US_MAX: u64 = 10_000_000;
/// Returns the idle time after which a buffer returns to the arena: [`BUFFER_IDLE_US_MAX`], or `idle_timeout` if it is shorter
/// (policy-R9).
pub(crate) fn max_buffer_idle_us(idle_timeout: Option<Duration>) -> u64 {
    let timeout_us = idle_timeout.and_then(|timeout| u64::try_from(timeout.as_micros()).ok());
    timeout_us.map_or(BUFFER_IDLE_US_MAX, |timeout_us| timeout_us.min(BUFFER_IDLE_US_MAX))
}

/// Time without a miss after which the limit is lowered.
const QUIET_US: u64 = 300_000_000;

/// The four counters since the last raise or clear.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RateWindow {
    /// Requests served from the pool.
    pub get_from_pool: u64,
    /// Buffers returned.
    pub put: u64,
    /// Requests that went to the underlying allocator.
    pub allocated: u64,
    /// Buffers evicted because of the limit on idle buffers.
    pub evicted: u64,
}

impl RateWindow {
    /// Returns the counts since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            get_from_pool: self.get_from_pool - earlier.get_from_pool,
            put: self.put - earlier.put,
            allocated: self.allocated - earlier.allocated,
            evicted: self.evicted - earlier.evicted,
        }
    }

    /// Returns the number of requests in the window.
    pub fn requests(&self) -> u64 {
        self.get_from_pool + self.allocated
    }

    /// Returns the evictions per return; 0 without returns.
    pub fn eviction_rate(&self) -> f64 {
        rate(self.evicted, self.put)
    }

    /// Returns the share of the requests that missed; 0 without requests.
    pub fn unsatisfied_rate(&self) -> f64 {
        rate(self.allocated, self.requests())
    }
}

/// Returns `part / whole`, and 0 if `whole` is 0, as TensorFlow computes its rates.
fn rate(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateCheck {
    /// The counters that the check read, before any reset.
    pub window: RateWindow,
    /// The limit before the check.
    pub limit: u64,
    /// The limit after the check, if it rises.
    pub raised_to: Option<u64>,
}

/// Checks the rates of `window` under `limit` (policy-R4).
pub(crate) fn check_rates(window: RateWindow, limit: u64, auto_resize: bool) -> RateCheck {
    let rates_are_high = window.eviction_rate() > TOLERABLE_RATE && window.unsatisfied_rate() > TOLERABLE_RATE;
    RateCheck { window, limit, raised_to: (auto_resize && rates_are_high).then(|| raised(limit)) }
}

/// Returns half of `limit`, but at least `start_limit`, if no request has missed for five minutes (policy-R4); `None` if the limit
/// stays.
pub(crate) fn lowered(limit: u64, start_limit: u64, last_miss_us: u64, now_us: u64) -> Option<u64> {
    let quiet = now_us.saturating_sub(last_miss_us) >= QUIET_US;
    (quiet && limit > start_limit).then_some((limit / 2).max(start_limit))
}

fn raised(limit: u64) -> u64 {
    if limit < RAISED_LIMIT_MIN { RAISED_LIMIT_MIN } else { limit.saturating_add(limit / RAISE_DIVISOR) }
}

/// Returns the default limit of a pool in bytes (policy-R8): a quarter of the total memory, but no more than is available, rounded
/// down to whole granules, and at least one granule.
pub(crate) fn default_limit(total_bytes: u64, available_bytes: u64) -> u64 {
    let granule_bytes = GRANULE_BYTES as u64;
    ((total_bytes / LIMIT_DIVISOR).min(available_bytes) / granule_bytes).max(1) * granule_bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BUSY: RateWindow = RateWindow { get_from_pool: 62_421, put: 63_521, allocated: 1_100, evicted: 1_000 };

    #[test]
    fn raised_limits_are_those_of_public_tensorflow_logs() {
        let mut limit = 100;
        for next in [110, 121, 133, 146, 160, 176, 193, 212, 233, 256, 281] {
            limit = check_rates(BUSY, limit, true).raised_to.unwrap();
            assert_eq!(limit, next);
        }
    }

    #[test]
    fn a_window_is_a_difference_and_its_rates_are_shares() {
        let other = RateWindow { get_from_pool: 1, put: 2, allocated: 3, evicted: 4 };
        let sum = RateWindow { get_from_pool: 62_422, put: 63_523, allocated: 1_103, evicted: 1_004 };
        assert_eq!((sum.since(other), sum.requests()), (BUSY, 63_525));
        assert_eq!((other.eviction_rate(), other.unsatisfied_rate()), (2.0, 0.75));
        assert_eq!((RateWindow::default().eviction_rate(), RateWindow::default().unsatisfied_rate()), (0.0, 0.0));
    }

    #[test]
    fn the_limit_rises_only_if_both_rates_pass_the_threshold() {
        let evictions_tolerable = RateWindow { get_from_pool: 0, put: 500_000, allocated: 500_000, evicted: 1_000 };
        let misses_tolerable = RateWindow { get_from_pool: 499_000, put: 1_000, allocated: 1_000, evicted: 1_000 };
        let no_gets = RateWindow { get_from_pool: 0, put: 1_000, allocated: 0, evicted: 1_000 };
        for (window, limit, auto_resize, raised_to) in [
            (BUSY, 1, true, Some(100)),
            (BUSY, 5, true, Some(100)),
            (BUSY, 99, true, Some(100)),
            (BUSY, u64::MAX, true, Some(u64::MAX)),
            (BUSY, 100, false, None),
            (evictions_tolerable, 100, true, None),
            (misses_tolerable, 100, true, None),
            (no_gets, 100, true, None),
        ] {
            assert_eq!(check_rates(window, limit, auto_resize).raised_to, raised_to, "{window:?} {limit}");
        }
    }

    #[test]
    fn after_five_minutes_of_hits_the_limit_halves_toward_its_start() {
        assert_eq!(lowered(281, 100, 7, 300_000_006), None, "not yet");
        assert_eq!(lowered(281, 100, 7, 300_000_007), Some(140));
        assert_eq!(lowered(140, 100, 0, u64::MAX), Some(100));
        assert_eq!(lowered(100, 100, 0, u64::MAX), None, "as low as its start");
        assert_eq!(lowered(281, 100, 9, 8), None, "a miss later than the clock read here");
    }

    #[test]
    fn the_default_limit_is_an_available_quarter_in_whole_granules() {
        const MIB: u64 = 1 << 20;
        for (total, available, limit) in [(1000, 800, 250), (1000, 101, 100), (1000, 0, 2), (0, 0, 2)] {
            assert_eq!(default_limit(total * MIB, available * MIB), limit * MIB, "{total} {available}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 128 }) })]

        #[test]
        fn the_default_limit_never_passes_its_bounds(total: u64, available: u64) {
            let (limit, granule) = (default_limit(total, available), GRANULE_BYTES as u64);
            prop_assert_eq!(limit % granule, 0);
            prop_assert!(limit == granule || limit <= (total / 4).min(available));
            prop_assert!(limit >= granule);
        }
    }
}
