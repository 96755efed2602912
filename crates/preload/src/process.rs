//! Detects forks. A child of a process that recorded a context serves no memory, since pins, contexts and threads are not inherited.

use std::sync::atomic::{AtomicU64, Ordering};

use pinpool_os::fork::{self, ForkGeneration};

/// The process in which the first context was recorded; 0 while there is none.
static SERVED_PROCESS: AtomicU64 = AtomicU64::new(0);

/// Returns the process ID and the fork generation. The ID alone may recur in another PID namespace, and the generation alone
/// misses children of a bare `clone`.
fn this_process() -> u64 {
    u64::from(fork::current()) << 32 | u64::from(std::process::id())
}

/// Returns whether this process may be served: no context was recorded before this process was forked. A child of a process
/// that has not used CUDA is served.
pub(crate) fn may_be_served() -> bool {
    // Relaxed: a child begins with one thread, which sees the value that its parent stored.
    SERVED_PROCESS.load(Ordering::Relaxed) == 0 || is_served_process()
}

/// Returns whether this process recorded the first context, and not its parent before a fork.
pub(crate) fn is_served_process() -> bool {
    SERVED_PROCESS.load(Ordering::Relaxed) == this_process()
}

/// Records that this process is about to use contexts. Called only if the process may be served.
pub(crate) fn record_served_process() {
    // Registers the handler that counts forks.
    ForkGeneration::now();
    SERVED_PROCESS.store(this_process(), Ordering::Relaxed);
}
