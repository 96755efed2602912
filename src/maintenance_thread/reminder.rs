//! A task that the maintenance thread wakes.
//!
//! Owns the waker, and whether it is still needed. Wakers and conditions are user code, so they are called and dropped outside
//! every lock.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use pinpool_os::sync::plain::Mutex;

/// Wakes a task at a deadline or when a condition holds, whichever is earlier. Dropping it cancels the wake-up.
#[derive(Debug)]
pub(crate) struct Reminder(pub(super) Arc<Reminded>);

/// Returns true once the awaited event has happened.
pub(crate) type Condition = Box<dyn Fn() -> bool + Send + Sync>;

pub(super) struct Reminded {
    pub(super) deadline: Option<Instant>,
    is_over: Option<Condition>,
    /// `None` once it was woken or cancelled.
    waker: Mutex<Option<Waker>>,
}

impl fmt::Debug for Reminded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reminded").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl Reminder {
    /// Replaces the waker. Returns false if the earlier one was woken already.
    pub(crate) fn set_waker(&self, waker: &Waker) -> bool {
        // Cloned and dropped outside the lock: wakers are user code.
        let mut waker = Some(waker.clone());
        let mut kept = self.0.waker.lock();
        let is_pending = kept.is_some();
        if is_pending {
            std::mem::swap(&mut *kept, &mut waker);
        }
        drop(kept);
        is_pending
    }
}

impl Drop for Reminder {
    fn drop(&mut self) {
        // Dropped outside the lock: wakers are user code.
        let waker = self.0.waker.lock().take();
        drop(waker);
    }
}

impl Reminded {
    pub(super) fn new(deadline: Option<Instant>, is_over: Option<Condition>, waker: &Waker) -> Arc<Self> {
        Arc::new(Self { deadline, is_over, waker: Mutex::new(Some(waker.clone())) })
    }

    /// Whether the wake-up is still pending.
    pub(super) fn is_wanted(&self) -> bool {
        self.waker.lock().is_some()
    }

    /// Whether its condition must be polled.
    pub(super) fn is_asked(&self) -> bool {
        self.is_over.is_some() && self.is_wanted()
    }

    pub(super) fn wake_if_due(&self, now: Instant) {
        let is_wanted = self.is_wanted();
        let is_due = |condition: &Condition| condition();
        if is_wanted && (self.deadline.is_some_and(|due| due <= now) || self.is_over.as_ref().is_some_and(is_due)) {
            let waker = self.waker.lock().take();
            waker.into_iter().for_each(Waker::wake);
        }
    }
}
