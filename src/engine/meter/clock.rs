//! The pool's time: microseconds since the pool was made, and a coarse copy that is read by one load.
//!
//! No hit reads a clock. Misses, returns with copies, the maintenance thread and [`Pool::maintain`](crate::Pool::maintain)
//! refresh the coarse copy, which is exact enough for rules that count in seconds.

use pinpool_os::clock::monotonic_ns;
use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

/// A clock that moves only when a test or a replay moves it. Clones share one clock.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(std::sync::Arc<ManualTime>);

#[derive(Debug, Default)]
struct ManualTime {
    now_us: AtomicU64,
    /// The time before the last move.
    before_us: AtomicU64,
}

impl ManualClock {
    /// Moves the clock forward, at most to `u64::MAX`.
    pub fn advance_us(&self, micros: u64) {
        // Relaxed, here and below: time guards no memory.
        let moved = |now_us: u64| Some(now_us.saturating_add(micros));
        if let Ok(before_us) = self.0.now_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, moved) {
            self.0.before_us.store(before_us, Ordering::Relaxed);
        }
    }

    /// Returns the microseconds since the clock was made.
    pub fn now_us(&self) -> u64 {
        self.0.now_us.load(Ordering::Relaxed)
    }
}

/// The system's monotonic clock, or the time that a replay or a test sets, with a coarse copy.
#[derive(Debug)]
pub(crate) struct Timekeeper {
    manual: Option<ManualClock>,
    begun_us: u64,
    coarse_us: AtomicU64,
}

impl Timekeeper {
    pub(crate) fn new(manual: Option<ManualClock>) -> Self {
        let begun_us = if manual.is_some() { 0 } else { monotonic_ns() / 1000 };
        Self { manual, begun_us, coarse_us: AtomicU64::new(0) }
    }

    /// Returns whether a test or a replay moves the time, and makes each step itself.
    pub(crate) fn is_manual(&self) -> bool {
        self.manual.is_some()
    }

    /// Converts a time of this pool to the time that all pools of the process share.
    pub(crate) fn to_process_us(&self, pool_us: u64) -> u64 {
        self.begun_us.saturating_add(pool_us)
    }

    /// Reads the clock without changing the coarse copy.
    pub(crate) fn read_us(&self) -> u64 {
        let system_us = || (monotonic_ns() / 1000).saturating_sub(self.begun_us);
        self.manual.as_ref().map_or_else(system_us, ManualClock::now_us)
    }

    /// Reads the clock and refreshes the coarse copy.
    pub(crate) fn now_us(&self) -> u64 {
        let now_us = self.read_us();
        // Relaxed: time guards no memory. A maximum, so that the copy never runs backwards if several threads write it.
        self.coarse_us.fetch_max(now_us, Ordering::Relaxed);
        now_us
    }

    /// Returns the latest possible time of a return before the reading `now_us`. For a manual clock this is the time before its
    /// last move, since nothing happens while the clock moves.
    pub(crate) fn latest_put_us(&self, now_us: u64) -> u64 {
        self.manual.as_ref().map_or(now_us, |clock| clock.0.before_us.load(Ordering::Relaxed))
    }

    /// Returns the time of the last reading by `now_us`.
    #[inline]
    pub(crate) fn coarse_us(&self) -> u64 {
        self.coarse_us.load(Ordering::Relaxed)
    }
}
