//! How often the maintenance thread looks at a pool.

use std::time::{Duration, Instant};

/// Shortest pause between two looks at copies. With the timer slack of Linux it takes up to 0.1 ms.
const SHORTEST_COPY_PAUSE: Duration = Duration::from_micros(40);
const LONGEST_COPY_PAUSE: Duration = Duration::from_millis(20);

/// How soon a pool is to be looked at again. The smaller, the sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(crate) enum Pace {
    /// A get will want a hole that is not there.
    Hole,
    /// A waker waits for a copy.
    Copies,
    /// Copies are in flight, or some memory is idle and some in use.
    Active,
    /// All memory is in use, and a put without copies tells nobody; or none is, and what is idle only grows older.
    Quiet,
    /// Nothing is held.
    Never,
}

impl Pace {
    /// Between two rounds, if the thread was last woken at `since`.
    pub(super) fn period(self, since: Instant) -> Option<Duration> {
        match self {
            Self::Hole => Some(Duration::from_micros(200)),
            Self::Copies => Some(pause_for_copies(since)),
            Self::Active => Some(Duration::from_millis(100)),
            Self::Quiet => Some(Duration::from_secs(1)),
            Self::Never => None,
        }
    }
}

/// Between two looks at copies, the last of which began at `since`: longer for a copy that has been running for long.
pub(crate) fn pause_for_copies(since: Instant) -> Duration {
    (since.elapsed() / 128).clamp(SHORTEST_COPY_PAUSE, LONGEST_COPY_PAUSE)
}
