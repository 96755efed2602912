//! When periodic work is due: ticks of the pool's clock, reports of growth.
//!
//! One thread at a time runs a tick; a thread that finds another thread running one continues without waiting. So the lock held
//! during a tick, slow calls included, makes no thread wait.
//!
//! Who runs it: the [maintenance thread](crate::maintenance_thread) of the process. Without one, misses and returns with copies; with one, these
//! only if it is late by seconds, because it could not be started or is in a call of another pool. A hit never does.
//!
//! Owns times and thresholds; the work itself is the core's.

use crate::diag::Growth;
use crate::stats::SourceCalls;
use pinpool_os::sync::plain::{Mutex, MutexGuard};
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Between two ticks: much shorter than any time in the rules, long against the cost of a tick.
pub(crate) const TICK_EVERY_US: u64 = 10_000;
/// Between two queries of fences that failed.
const QUERY_FAILED_EVERY_US: u64 = 100_000;
/// Growth is reported each time that pinned memory has doubled since the last report, from here on.
const FIRST_REPORT_BYTES: u64 = 64 << 20;
/// A tick that the maintenance thread has not run for this long is run by the next miss or return with a copy.
pub(crate) const LATE_US: u64 = 3_000_000;

/// When the next tick is due.
#[derive(Debug, Default)]
pub(crate) struct Maintenance {
    next_tick_us: AtomicU64,
    watch: Mutex<Watch>,
}

#[derive(Debug, Default)]
struct Watch {
    next_query_us: u64,
    /// At the last growth report.
    held_bytes: u64,
    calls: SourceCalls,
}

/// A tick in progress.
#[derive(Debug)]
pub(crate) struct Tick<'a> {
    watch: MutexGuard<'a, Watch>,
    /// How long it was due.
    pub(crate) late_us: u64,
}

impl Maintenance {
    /// Whether a tick is due.
    pub(crate) fn is_tick_due(&self, now_us: u64) -> bool {
        // Relaxed: a hint.
        now_us >= self.next_tick_us.load(Ordering::Relaxed)
    }

    /// Begins a tick if one has been due for `patience_us` and no other thread runs one.
    pub(crate) fn begin_tick(&self, now_us: u64, patience_us: u64) -> Option<Tick<'_>> {
        // Relaxed: a thread that sees an old value finds the lock taken, or repeats a tick that has nothing to do.
        let due_us = self.next_tick_us.load(Ordering::Relaxed);
        if now_us < due_us.saturating_add(patience_us) {
            return None;
        }
        let watch = self.watch.try_lock()?;
        self.next_tick_us.store(now_us.saturating_add(TICK_EVERY_US), Ordering::Relaxed);
        Some(Tick { watch, late_us: now_us - due_us })
    }
}

impl Tick<'_> {
    /// Whether fences that failed may be queried again now. At most ten times a second.
    pub(crate) fn may_query_failed(&mut self, now_us: u64) -> bool {
        let may_query = now_us >= self.watch.next_query_us;
        if may_query {
            self.watch.next_query_us = now_us.saturating_add(QUERY_FAILED_EVERY_US);
        }
        may_query
    }

    /// The growth since the last report, if `held_bytes` are twice what was held then; it counts as reported.
    pub(crate) fn growth_to_report(
        &mut self,
        held_bytes: u64,
        calls: SourceCalls,
        max_bytes: Option<u64>,
    ) -> Option<Growth> {
        if held_bytes < self.watch.held_bytes.saturating_mul(2).max(FIRST_REPORT_BYTES) {
            return None;
        }
        let held_before_bytes = std::mem::replace(&mut self.watch.held_bytes, held_bytes);
        let before = std::mem::replace(&mut self.watch.calls, calls);
        Some(Growth {
            asked_bytes: calls.pin.bytes.saturating_sub(before.pin.bytes),
            held_before_bytes,
            held_bytes,
            pin_calls: calls.pin.count.saturating_sub(before.pin.count),
            took: calls.time().saturating_sub(before.time()),
            max_bytes,
        })
    }
}
