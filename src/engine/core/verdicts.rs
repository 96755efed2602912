//! What the diagnosis of a pool sees. Evaluated in ticks, never in a hit.

use std::cell::Cell;
use std::time::{Duration, Instant};

use pinpool_observe::judge::{Cause, Holder, Judge, Judgement, LikelyCause, Snapshot};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};

use super::Core;
use crate::dump::Owner;
use crate::quota::Level;
use crate::size_class::Class;
use crate::stats::{Calls, MemoryStats};

/// The diagnosis, and the bytes that requests without memory needed. Relaxed: statistics.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    judge: Mutex<Judge>,
    short_gets: AtomicU64,
    /// Events of threads that had just returned a buffer.
    own_waits: AtomicU64,
    /// Whether the source refused the last attempt that was refused.
    pub(super) is_by_source: AtomicBool,
    /// Time of waiting requests in calls of the source, which counts as such.
    pub(super) calls_in_line_ns: AtomicU64,
    /// The last request that failed since the last diagnosis, and why.
    pub(super) failure: Mutex<Option<(Cause, LikelyCause)>>,
    /// The most bytes in use and requested at one time, since the last diagnosis.
    needed_bytes: AtomicU64,
}

thread_local! {
    /// The pool that this thread returned a buffer to, while requests waited, since its last request.
    static RETURNED_TO: Cell<Option<u64>> = const { Cell::new(None) };
}

impl Core {
    /// This thread returns a buffer while requests wait.
    pub(super) fn record_return(&self) {
        // A thread that is ending requests nothing.
        let _ = RETURNED_TO.try_with(|pool| pool.set(Some(self.log.number)));
    }

    /// A request of `class` found no memory at once.
    pub(super) fn record_need(&self, class: Class) {
        let own_bytes = self.memory().own_bytes().saturating_sub(self.stock.idle().bytes());
        let waiting_bytes: u64 = self.waiters.waiting_bytes().iter().sum();
        self.verdicts.short_gets.fetch_add(1, Ordering::Relaxed);
        if RETURNED_TO.try_with(Cell::take).ok().flatten() == Some(self.log.number) {
            self.verdicts.own_waits.fetch_add(1, Ordering::Relaxed);
        }
        self.verdicts.needed_bytes.fetch_max(own_bytes + waiting_bytes + class.bytes as u64, Ordering::Relaxed);
    }

    /// Logs why the pool is as fast as it is, if that has changed.
    pub(super) fn report_verdict(&self, now_us: u64) {
        // A pool that keeps nothing releases what it pins.
        if self.config.pool_size_limit == 0 && !self.memory().has_arena() {
            return;
        }
        // One thread at a time is enough.
        let Some(is_due) = self.verdicts.judge.try_lock().map(|judge| judge.is_due(now_us)) else { return };
        let is_recorded = self.recorder().is_some_and(|recorder| recorder.wants_snapshot(now_us));
        if !is_due && !is_recorded {
            return;
        }
        // Under no lock: it may read files, to name the places of requests.
        let snapshot = self.snapshot();
        let Some(mut judge) = self.verdicts.judge.try_lock() else { return };
        let has_ended = judge.look(now_us, snapshot.clone()).is_some();
        if let Some(recorder) = self.recorder().filter(|_| has_ended || is_recorded) {
            recorder.snapshot(now_us, snapshot);
        }
        if !has_ended {
            return;
        }
        self.verdicts.failure.lock().take();
        // A request that continues to wait needs what it needed when it began.
        if !self.has_waiters() {
            self.verdicts.needed_bytes.store(0, Ordering::Relaxed);
        }
        let news = if judge.is_news(now_us) { judge.latest().cloned() } else { None };
        drop(judge);
        if let Some(judgement) = news {
            if judgement.is_alarm { self.log.alarmed(&judgement) } else { self.log.diagnosed(&judgement) }
        }
    }

    /// Records the state of a pool that ends.
    pub(super) fn record_last_snapshot(&self) {
        if let Some(recorder) = self.recorder() {
            recorder.snapshot(self.time.now_us(), self.snapshot());
        }
    }

    /// The diagnosis of the last window, or of the time so far.
    pub(crate) fn why(&self) -> Judgement {
        let (now_us, snapshot) = (self.time.coarse_us(), self.snapshot());
        // In a child of `fork` a thread that does not exist here may hold the lock.
        let judge = if self.is_forked() { None } else { self.verdicts.judge.try_lock() };
        judge.as_deref().unwrap_or(&Judge::default()).why(now_us, &snapshot)
    }

    /// The diagnosis of the last window, if there was one and no other thread evaluates it now.
    pub(super) fn judged(&self) -> Option<Judgement> {
        if self.is_forked() { None } else { self.verdicts.judge.try_lock()?.latest().cloned() }
    }

    /// What the diagnosis sees now.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let (stats, is_direct) = (self.stats(), !self.memory().has_arena());
        let needed_bytes = self.verdicts.needed_bytes.load(Ordering::Relaxed);
        // A wait counts while it lasts, not in the window that it ends in.
        let in_line = if self.is_forked() { Duration::ZERO } else { self.waiters.waiting_for(Instant::now()) };
        let waited = stats.requests.wait_time.total() + in_line;
        let limit = self.memory().limit_name(Level::Pool);
        let has_limit =
            limit != "PINPOOL_MAX_BYTES" || stats.limits.max_bytes.is_some() || stats.limits.shared.is_some();
        let nanos = |calls: &Calls| nanos(calls.time.total());
        let MemoryStats { pin, unpin, remap, .. } = &stats.memory;
        let place = |tag: &str| if self.config.code.call_stacks > 0 { self.owners.place(tag) } else { None };
        let holder = |owner: &Owner| Holder { place: place(&owner.tag), ..owner.holder() };
        let classes = if is_direct { self.class_stats() } else { Vec::new() };
        Snapshot {
            gets: stats.requests.served + stats.requests.failed,
            misses: stats.requests.misses,
            // Under `tensorflow` a buffer that was evicted earlier is one too few, not one of another size.
            new_lengths: if is_direct {
                stats.requests.miss_reasons.first_of_size
            } else {
                self.counters.new_lengths()
            },
            puts: stats.requests.returned,
            evicted: stats.memory.evictions.over_limit,
            short_gets: self.verdicts.short_gets.load(Ordering::Relaxed),
            own_waits: self.verdicts.own_waits.load(Ordering::Relaxed),
            failed_gets: stats.requests.failed,
            is_by_source: self.verdicts.is_by_source.load(Ordering::Relaxed),
            waiting: stats.requests.waiting,
            waiting_ns: self::nanos(waited).saturating_sub(self.verdicts.calls_in_line_ns.load(Ordering::Relaxed)),
            pin_calls: pin.count,
            pinned_bytes: stats.memory.pin.bytes,
            unpinned_bytes: stats.memory.unpin.bytes,
            pinning_ns: nanos(pin) + nanos(unpin),
            moving_ns: nanos(remap),
            held_bytes: stats.memory.held_bytes,
            most_held_bytes: stats.memory.peak_held_bytes,
            used_bytes: stats.memory.in_use_bytes + stats.copies.in_flight_bytes,
            used: stats.memory.in_use + stats.copies.in_flight,
            in_flight_bytes: stats.copies.in_flight_bytes,
            idle_bytes: stats.memory.idle_bytes,
            free_bytes: stats.memory.free_bytes + stats.memory.transit_bytes + stats.memory.overhead_bytes,
            fallback_bytes: stats.memory.fallback_bytes,
            needed_bytes,
            limit: has_limit.then_some(limit.into()),
            max_bytes: stats.limits.max_bytes,
            others_bytes: stats.limits.shared.as_ref().map(|shared| shared.held_bytes.saturating_sub(shared.own_bytes)),
            // Under `adaptive` an eviction gives memory to the arena, and costs no driver call.
            pool_size_limit: is_direct.then_some(stats.limits.max_idle_buffers),
            recurring: classes.iter().filter(|class| class.misses > 1).map(|class| class.peak_buffers).sum(),
            oldest_copy: stats.copies.oldest_age,
            oldest_copy_stream: stats.copies.oldest_stream,
            copies: stats.copies.time.count() + stats.copies.in_flight,
            is_pinned: stats.is_pinned,
            #[cfg(feature = "cuda")]
            has_driver: crate::driver::is_loaded(),
            #[cfg(not(feature = "cuda"))]
            has_driver: false,
            failure: if self.is_forked() { None } else { self.verdicts.failure.lock().clone() },
            holders: self.owners_of(&stats).iter().map(holder).collect(),
        }
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
