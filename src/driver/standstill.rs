//! Whether the driver answers: while it stands still, one thread waits for its answer, and others do not ask.
//!
//! Questions take a microsecond. A driver whose device is being reset, or is lost, may keep one for seconds. Threads that ask
//! only to find out whether something is over go on without an answer then.

use std::sync::OnceLock;
use std::time::Instant;

use pinpool_os::sync::process::{AtomicU64, Ordering};

/// A driver that has answered nobody for so long, though it was asked, stands still. Longer than a thread that asks may lose its
/// processor.
const PATIENCE_US: u64 = 20_000;

static OPEN: AtomicU64 = AtomicU64::new(0);
/// When the driver answered last, or was first asked after that.
static MOVED_US: AtomicU64 = AtomicU64::new(0);

/// Asks, unless the driver stands still in a question of another thread: then `None`.
pub(crate) fn ask<R>(question: impl FnOnce() -> R) -> Option<R> {
    let now_us = now_us();
    // Acquire, with the Release below: what a thread that asks has stored as its begin.
    match OPEN.load(Ordering::Acquire) {
        0 => MOVED_US.store(now_us, Ordering::Relaxed),
        _ if now_us.saturating_sub(MOVED_US.load(Ordering::Relaxed)) > PATIENCE_US => return None,
        _ => {}
    }
    OPEN.fetch_add(1, Ordering::Release);
    let _open = Open;
    Some(question())
}

/// A question until it is answered, or a panic ends it.
struct Open;

impl Drop for Open {
    fn drop(&mut self) {
        MOVED_US.store(now_us(), Ordering::Relaxed);
        OPEN.fetch_sub(1, Ordering::Release);
    }
}

fn now_us() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGIN.get_or_init(Instant::now).elapsed().as_micros()).unwrap_or(u64::MAX)
}
