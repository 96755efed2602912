//! How often the maintenance thread checks a pool.

use std::time::{Duration, Instant};

/// Shortest pause between two polls of copies. With the timer slack of Linux it takes up to 0.1 ms.
const SHORTEST_COPY_PAUSE: Duration = Duration::from_micros(40);
const LONGEST_COPY_PAUSE: Duration = Duration::from_millis(20);

/// How soon a pool must be checked again. Smaller is sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(crate) enum Pace {
    /// A request will need a hole that does not exist yet.
    Hole,
    /// A waker waits for a copy.
    Copies,
    /// Copies are in flight, or some memory is idle and some in use.
    Active,
    /// All memory is in use, and a return without copies notifies nobody; or none is in use, and idle memory only ages.
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

/// Pause between two polls of copies; the newest copy began at `since`. Longer for a long-running copy.
pub(crate) fn pause_for_copies(since: Instant) -> Duration {
    (since.elapsed() / 128).clamp(SHORTEST_COPY_PAUSE, LONGEST_COPY_PAUSE)
}
