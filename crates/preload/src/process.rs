//! Whether the process is served. A forked child of a process that knew a context is not, since pins, contexts and threads are
//! not inherited. A process in which no event can cover all work is not served either.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pinpool_os::fork::{self, ForkGeneration};

/// The process in which the first context became known; 0 while there is none.
static SERVED_PROCESS: AtomicU64 = AtomicU64::new(0);

/// Set once a record failed because of a capture that no hook saw, or the program created a green context.
static HAS_STOPPED: AtomicBool = AtomicBool::new(false);

/// A capture exists that no hook saw.
pub(crate) const UNSEEN_CAPTURE: &str =
    "a stream captures a graph that pinpool did not see begin, and recording an event has invalidated that capture";

/// No event may cover the work of a green context, so no fence that is recorded from now on could be trusted. Earlier fences can:
/// they belong to memory that was freed before the program had the context.
pub(crate) const GREEN_CONTEXT: &str = "the program has created a green context; pinpool does not see work in it";

/// Returns the process ID and the fork generation. The ID alone may recur in another PID namespace, and the generation alone
/// misses children of a bare `clone`.
fn this_process() -> u64 {
    u64::from(fork::current()) << 32 | u64::from(std::process::id())
}

/// Returns whether this process may be served: no context was known before this process was forked. A child of a process
/// that has not used CUDA is served.
pub(crate) fn may_be_served() -> bool {
    // Relaxed: a child begins with one thread, which sees the value that its parent stored.
    SERVED_PROCESS.load(Ordering::Relaxed) == 0 || uses_contexts_here()
}

/// Returns whether this process recorded the first context, and not its parent before a fork.
pub(crate) fn uses_contexts_here() -> bool {
    SERVED_PROCESS.load(Ordering::Relaxed) == this_process()
}

/// Records that this process is about to use contexts. Called only if the process may be served.
pub(crate) fn set_uses_contexts() {
    // Registers the handler that counts forks.
    ForkGeneration::now();
    SERVED_PROCESS.store(this_process(), Ordering::Relaxed);
}

/// Returns whether the process is no longer served: no event may be recorded, and memory that is freed is not reused.
pub(crate) fn has_stopped_serving() -> bool {
    // Relaxed: the flag publishes no other data.
    HAS_STOPPED.load(Ordering::Relaxed)
}

/// Returns whether the process was served until now; the caller then logs the reason, [`UNSEEN_CAPTURE`] or
/// [`GREEN_CONTEXT`].
pub(crate) fn stop_serving() -> bool {
    !HAS_STOPPED.swap(true, Ordering::Relaxed)
}
