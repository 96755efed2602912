//! Keeps threads from calling a driver that does not return.
//!
//! A query usually takes a microsecond, but the driver may block a call for seconds while the device is being reset or
//! is lost. In that case the threads that are already in a call wait in the driver, and the other threads, which only
//! poll for completion, continue without an answer.

use pinpool_os::clock::monotonic_ns;
use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

/// A driver that has not returned from any query for this long counts as stuck. The time is longer than an ordinary preemption. If a
/// querying thread is throttled for longer, the driver counts as stuck by mistake, which only delays the answer to other threads.
const STUCK_AFTER_US: u64 = 20_000;

/// Queries in progress.
static RUNNING_QUERIES: AtomicU64 = AtomicU64::new(0);
/// The time at which the driver last returned from a query, or at which the first query after an idle period began.
static LAST_PROGRESS_US: AtomicU64 = AtomicU64::new(0);

/// Runs `query` and returns its result; `None`, without running it, if the driver is stuck in a query of another thread.
pub(crate) fn query<R>(query: impl FnOnce() -> R) -> Option<R> {
    let now_us = monotonic_ns() / 1000;
    // Acquire, with the Release below: this thread sees the start time that a querying thread has stored.
    match RUNNING_QUERIES.load(Ordering::Acquire) {
        0 => LAST_PROGRESS_US.store(now_us, Ordering::Relaxed),
        _ if now_us.saturating_sub(LAST_PROGRESS_US.load(Ordering::Relaxed)) > STUCK_AFTER_US => return None,
        _ => {}
    }
    RUNNING_QUERIES.fetch_add(1, Ordering::Release);
    let _running = RunningQuery;
    Some(query())
}

/// A query in progress, which ends when this is dropped, even if the query panics.
struct RunningQuery;

impl Drop for RunningQuery {
    fn drop(&mut self) {
        LAST_PROGRESS_US.store(monotonic_ns() / 1000, Ordering::Relaxed);
        RUNNING_QUERIES.fetch_sub(1, Ordering::Release);
    }
}
