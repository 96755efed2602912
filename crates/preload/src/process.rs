//! Forks: a child of a process that served memory serves none, since pins, contexts and threads are not inherited.

use std::sync::atomic::{AtomicU32, Ordering};

/// The process in which the first context was recorded; 0 while there is none.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns whether this process may be served: no context was recorded before it was forked. A child of a process that has not
/// used CUDA is served.
pub(crate) fn may_be_served() -> bool {
    // Relaxed: a child has one thread, and sees what its parent stored.
    matches!(OWNER.load(Ordering::Relaxed), 0) || is_owner()
}

/// Returns whether this process creates its own contexts.
pub(crate) fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

/// Records that this process is about to use contexts. Called only if the process may be served.
pub(crate) fn own() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
}
