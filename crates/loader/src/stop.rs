//! A flag that stops a run, and a waker that unparks a thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::thread::Thread;

/// A flag, shared by its clones, that any thread may raise to end a listing or a run early.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Creates a flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag. Returns whether it was raised before.
    pub fn raise(&self) -> bool {
        // Relaxed: the flag publishes no other data.
        self.0.swap(true, Ordering::Relaxed)
    }

    /// Returns whether the flag is raised.
    pub fn is_raised(&self) -> bool {
        // Relaxed: a thread that sees the flag late reads one more chunk.
        self.0.load(Ordering::Relaxed)
    }
}

/// Unparks a thread that waits for a buffer.
pub(super) struct Unpark(pub(super) Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
