//! Detects forks. A child of a process that recorded a context serves no memory, since pins, contexts and threads are not inherited.

use std::sync::atomic::{AtomicU32, Ordering};

/// The process in which the first context was recorded; 0 while there is none.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns whether this process may be served: no context was recorded before this process was forked. A child of a process
/// that has not used CUDA is served.
pub(crate) fn may_be_served() -> bool {
    // Relaxed: a child begins with one thread, which sees the value that its parent stored.
    matches!(OWNER.load(Ordering::Relaxed), 0) || is_owner()
}

/// Returns whether this process recorded the first context, and not its parent before a fork.
pub(crate) fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

/// Records that this process is about to use contexts. Called only if the process may be served.
pub(crate) fn record_owner() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
}
