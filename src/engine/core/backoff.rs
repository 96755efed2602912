//! How soon a waiting request asks the source again after a refusal.
//!
//! Room that a return makes is found at each look. A refused call is repeated at once, then after ever longer pauses, and never
//! if the same call cannot succeed: some calls cost milliseconds of CPU time before the driver refuses them.

use std::time::{Duration, Instant};

use super::super::memory::Refusal;
use crate::error::Retry;
use pinpool_os::sync::plain::Mutex;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// When the source may be asked again, and the pause until then.
#[derive(Debug, Default)]
pub(super) struct Backoff(Mutex<Option<(Instant, Duration)>>);

impl Backoff {
    /// Memory went back to the source.
    pub(super) fn end(&self) {
        *self.0.lock() = None;
    }

    pub(super) fn refused(&self) {
        let (mut last, now) = (self.0.lock(), Instant::now());
        let pause = match *last {
            Some((until, _)) if now < until => return,
            Some((until, pause)) if now < until + LONGEST_PAUSE => (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE),
            // One call may fail by chance.
            _ => Duration::ZERO,
        };
        *last = Some((now + pause, pause));
    }

    /// Whether it is too early to repeat a call that was refused for this reason.
    pub(super) fn is_early(&self, refused: &Refusal) -> bool {
        let Refusal::Source(error) = refused else { return false };
        match error.retry {
            Retry::Soon => false,
            Retry::Later => self.0.lock().is_some_and(|(until, _)| Instant::now() < until),
            Retry::Never => true,
        }
    }
}
