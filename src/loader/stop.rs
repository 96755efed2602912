//! The wish that a run should end early, which anyone may utter and every thread of the run looks at.

use std::sync::Arc;

use crate::sync::atomic::{AtomicBool, Ordering};

/// A flag shared by all its clones; a run that sees it raised ends cleanly with what it has so far.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A flag that is not raised.
    #[must_use]
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Raises the flag. Says whether it was raised before.
    pub fn request(&self) -> bool {
        // Relaxed: the flag carries nothing but itself.
        self.0.swap(true, Ordering::Relaxed)
    }

    /// Whether the flag is raised.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        // Relaxed: a thread that sees it late does one chunk more.
        self.0.load(Ordering::Relaxed)
    }
}
