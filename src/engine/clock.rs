//! The pool's time: microseconds since it was made, and a coarse copy of them that costs a load.
//!
//! A hit reads no clock. Misses, [`Pool::poll`](crate::Pool::poll) and now and then a hit refresh the coarse copy, which
//! is exact enough for rules that count in seconds.

use std::sync::Arc;
use std::time::Instant;

use crate::sync::process::{AtomicU64, Ordering};

/// Where a pool's time comes from.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    /// The system's monotonic clock.
    #[default]
    System,
    /// Whatever a replay or a test sets.
    Manual(ManualClock),
}

/// A clock that stands still until it is moved. Clones are the same clock.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Moves it on.
    pub fn advance_us(&self, micros: u64) {
        // Relaxed: time guards no memory.
        self.0.fetch_add(micros, Ordering::Relaxed);
    }

    /// Microseconds since it was made.
    pub fn now_us(&self) -> u64 {
        // Relaxed, as above.
        self.0.load(Ordering::Relaxed)
    }
}

/// A running clock with its coarse copy.
#[derive(Debug)]
pub(crate) struct Timekeeper {
    clock: Clock,
    begun: Instant,
    coarse_us: AtomicU64,
}

impl Timekeeper {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { clock, begun: Instant::now(), coarse_us: AtomicU64::new(0) }
    }

    /// The same time for another pool: what shares memory must agree on how long it is idle.
    pub(crate) fn shared(&self) -> Self {
        Self { clock: self.clock.clone(), begun: self.begun, coarse_us: AtomicU64::new(self.coarse_us()) }
    }

    /// Reads the clock and refreshes the coarse copy.
    pub(crate) fn now_us(&self) -> u64 {
        let now_us = match &self.clock {
            Clock::System => u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            Clock::Manual(clock) => clock.now_us(),
        };
        // Relaxed: time guards no memory. A maximum, so that it never runs backwards between threads.
        self.coarse_us.fetch_max(now_us, Ordering::Relaxed);
        now_us
    }

    /// Somebody else read it at `now_us`.
    pub(crate) fn told(&self, now_us: u64) {
        // Relaxed, as above.
        self.coarse_us.fetch_max(now_us, Ordering::Relaxed);
    }

    /// The time as somebody last read it.
    #[inline]
    pub(crate) fn coarse_us(&self) -> u64 {
        // Relaxed, as above.
        self.coarse_us.load(Ordering::Relaxed)
    }
}
