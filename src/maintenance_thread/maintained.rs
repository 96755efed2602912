//! What the maintenance thread checks, and how often: pools, and reminders of tasks. Wakers and conditions are user code, so
//! they are called and dropped outside every lock.

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use pinpool_os::sync::plain::Mutex;

/// Shortest pause between two polls of copies. With the timer slack of Linux it takes up to 0.1 ms.
const SHORTEST_COPY_PAUSE: Duration = Duration::from_micros(40);
const LONGEST_COPY_PAUSE: Duration = Duration::from_millis(20);

/// A pool or a reminder, as the thread sees it.
pub(crate) trait Maintained: Send + Sync {
    /// Does what is due. May make slow calls.
    fn maintain(&self);

    /// How soon it must be checked again. Cheap.
    fn pace(&self) -> Pace;

    /// When it must be checked at the latest. Cheap.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// How soon a pool must be checked again. Larger is sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u32)]
pub(crate) enum Pace {
    /// Nothing is held.
    #[default]
    Never,
    /// All memory is in use, and a return without copies notifies nobody; or none is in use, and idle memory only ages.
    Quiet,
    /// Copies are in flight, or some memory is idle and some in use.
    Active,
    /// A waker waits for a copy.
    Copies,
    /// A request will need a hole that does not exist yet.
    Hole,
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

/// A pending wake-up of a task. Dropping it cancels the wake-up.
pub(crate) type Reminder = Arc<dyn Any + Send + Sync>;

/// Returns true once the awaited event has happened.
pub(crate) type Condition = Box<dyn Fn() -> bool + Send + Sync>;

/// Wakes a task at a deadline or when a condition holds, whichever is earlier.
pub(super) struct Reminded {
    pub(super) deadline: Option<Instant>,
    pub(super) is_over: Option<Condition>,
    /// `None` once it was woken.
    pub(super) waker: Mutex<Option<Waker>>,
}

impl Reminded {
    fn is_pending(&self) -> bool {
        self.waker.lock().is_some()
    }
}

impl Maintained for Reminded {
    fn maintain(&self) {
        let is_late = || self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let is_over = || self.is_over.as_ref().is_some_and(|is_over| is_over());
        if self.is_pending() && (is_late() || is_over()) {
            let waker = self.waker.lock().take();
            waker.into_iter().for_each(Waker::wake);
        }
    }

    fn pace(&self) -> Pace {
        if self.is_over.is_some() && self.is_pending() { Pace::Copies } else { Pace::Never }
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.is_pending())
    }
}
