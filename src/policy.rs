//! How much may be kept: numbers in, a decision out.
//!
//! TensorFlow's rule. At every 1000th eviction of a window the two rates are looked at; when both are above 0.002 the
//! limit rises by a tenth (to 100 at least) and a new window begins.
//!
//! The way down, in the `adaptive` preset: a limit that was raised halves toward its start after five minutes in which
//! every get was a hit; a buffer that nobody asked for leaves the front after ten seconds.
//!
//! Reads no clock, prints nothing, takes no lock.

/// Evictions between two checks (`kCheckInterval`).
pub(crate) const CHECK_EVERY_EVICTIONS: u64 = 1000;
/// Both rates must be above this, strictly, for the limit to rise (`kTolerable`).
const TOLERABLE_RATE: f64 = 2e-3;
/// A limit below this rises straight to it.
pub(crate) const LEAST_RAISED_LIMIT: u64 = 100;
/// A raise adds one part in this many, truncated: in whole numbers the same as TensorFlow's factor of 1.1.
const RAISE_DIVISOR: u64 = 10;

/// A buffer idle for this long goes from the front to the arena. Found by replaying 25 loaders: without it driver time
/// and memory held are a sixteenth worse.
pub(crate) const FRONT_AGE_US: u64 = 10_000_000;
/// So long must all gets have been hits before the limit comes down.
const QUIET_US: u64 = 300_000_000;

/// The four counters since the last raise or clear.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Window {
    /// Gets served from the pool.
    pub get_from_pool: u64,
    /// Buffers put back.
    pub put: u64,
    /// Gets that went to the underlying allocator.
    pub allocated: u64,
    /// Buffers evicted by puts.
    pub evicted: u64,
}

impl std::ops::Add for Window {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            get_from_pool: self.get_from_pool + other.get_from_pool,
            put: self.put + other.put,
            allocated: self.allocated + other.allocated,
            evicted: self.evicted + other.evicted,
        }
    }
}

impl Window {
    /// Gets of the window.
    pub fn gets(&self) -> u64 {
        self.get_from_pool + self.allocated
    }

    /// Evictions per put.
    pub fn eviction_rate(&self) -> f64 {
        rate(self.evicted, self.put)
    }

    /// Share of the gets that the pool could not serve; 0 if there were none.
    pub fn unsatisfied_rate(&self) -> f64 {
        rate(self.allocated, self.gets())
    }

    /// Is the eviction just counted one after which the rates are checked?
    pub(crate) fn check_is_due(&self) -> bool {
        self.evicted.is_multiple_of(CHECK_EVERY_EVICTIONS)
    }
}

#[allow(clippy::cast_precision_loss)] // TensorFlow divides the same counts as doubles.
fn rate(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// What a check found and decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// The figures it saw, before any reset.
    pub window: Window,
    /// The limit until now.
    pub limit: u64,
    /// The limit from now on, if it rises.
    pub raised_to: Option<u64>,
}

/// Looks at the rates of `window` under `limit`.
pub(crate) fn check(window: Window, limit: u64, auto_resize: bool) -> Check {
    let rates_are_high = window.eviction_rate() > TOLERABLE_RATE && window.unsatisfied_rate() > TOLERABLE_RATE;
    Check { window, limit, raised_to: (auto_resize && rates_are_high).then(|| raised(limit)) }
}

/// The limit after five quiet minutes: half, but not below where it started. `None`: it stays.
pub(crate) fn lowered(limit: u64, start_limit: u64, last_miss_us: u64, now_us: u64) -> Option<u64> {
    let quiet = now_us.saturating_sub(last_miss_us) >= QUIET_US;
    (quiet && limit > start_limit).then_some((limit / 2).max(start_limit))
}

fn raised(limit: u64) -> u64 {
    if limit < LEAST_RAISED_LIMIT { LEAST_RAISED_LIMIT } else { limit.saturating_add(limit / RAISE_DIVISOR) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Window = Window { get_from_pool: 62_421, put: 63_521, allocated: 1_100, evicted: 1_000 };

    #[test]
    fn the_chain_of_limits_is_the_one_of_the_public_logs() {
        let mut limit = 100;
        for next in [110, 121, 133, 146, 160, 176, 193, 212, 233, 256, 281] {
            limit = check(BUSY, limit, true).raised_to.unwrap();
            assert_eq!(limit, next);
        }
    }

    #[test]
    fn a_small_limit_rises_straight_to_a_hundred() {
        for limit in [1, 5, 99] {
            assert_eq!(check(BUSY, limit, true).raised_to, Some(100));
        }
    }

    #[test]
    fn a_rate_of_exactly_the_threshold_raises_nothing() {
        let evictions_tolerable = Window { get_from_pool: 0, put: 500_000, allocated: 500_000, evicted: 1_000 };
        let misses_tolerable = Window { get_from_pool: 499_000, put: 1_000, allocated: 1_000, evicted: 1_000 };
        let no_gets = Window { get_from_pool: 0, put: 1_000, allocated: 0, evicted: 1_000 };
        for window in [evictions_tolerable, misses_tolerable, no_gets] {
            assert_eq!(check(window, 100, true).raised_to, None);
        }
    }

    #[test]
    fn nothing_rises_without_auto_resize() {
        assert_eq!(check(BUSY, 100, false).raised_to, None);
    }

    #[test]
    fn after_five_minutes_of_hits_the_limit_halves_toward_its_start() {
        assert_eq!(lowered(281, 100, 7, 300_000_006), None, "not yet");
        assert_eq!(lowered(281, 100, 7, 300_000_007), Some(140));
        assert_eq!(lowered(140, 100, 0, u64::MAX), Some(100));
        assert_eq!(lowered(100, 100, 0, u64::MAX), None, "as low as it began");
        assert_eq!(lowered(281, 100, 9, 8), None, "a miss later than the clock read here");
    }

    #[test]
    fn the_limit_saturates() {
        assert_eq!(check(BUSY, u64::MAX, true).raised_to, Some(u64::MAX));
    }
}
