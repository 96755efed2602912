//! Keeps threads from calling a driver that does not return.
//!
//! A query takes a microsecond. The driver may block a call for seconds while the device is being reset or is lost. Then one
//! thread waits in the driver, and others that only poll for completion continue without an answer.

use pinpool_os::clock::monotonic_us;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// A driver that has not returned from any query for this long is stuck. Longer than an ordinary preemption; a throttled thread only delays an
/// answer.
const PATIENCE_US: u64 = 20_000;

/// Queries in progress.
static OPEN: AtomicU64 = AtomicU64::new(0);
/// When the driver last returned, or was first called after that.
static MOVED_US: AtomicU64 = AtomicU64::new(0);

/// Runs the query; `None` if the driver is stuck in a query of another thread.
pub(crate) fn query<R>(query: impl FnOnce() -> R) -> Option<R> {
    let now_us = monotonic_us();
    // Acquire, with the Release below: the start that a querying thread has stored.
    match OPEN.load(Ordering::Acquire) {
        0 => MOVED_US.store(now_us, Ordering::Relaxed),
        _ if now_us.saturating_sub(MOVED_US.load(Ordering::Relaxed)) > PATIENCE_US => return None,
        _ => {}
    }
    OPEN.fetch_add(1, Ordering::Release);
    let _open = Open;
    Some(query())
}

/// A query in progress; it ends when this is dropped, also by a panic.
struct Open;

impl Drop for Open {
    fn drop(&mut self) {
        MOVED_US.store(monotonic_us(), Ordering::Relaxed);
        OPEN.fetch_sub(1, Ordering::Release);
    }
}
