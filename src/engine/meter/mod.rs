//! Counters of a pool, in addition to the counters of its idle buffers and its memory. No hit calls this module.
//!
//! ```text
//!   in use = blocks - idle - in flight
//!   handles dropped ─▶ sealed ─▶ no block exists but in flight ─▶ ended, once
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | counters, the number of blocks and the end that it decides, shortages of memory |
//! | `clock.rs` | the time |
//! | `holders.rs` | who holds the buffers of each tag |
//!
//! While other threads run, the counters in a snapshot may be a few operations apart.
//!
//! - **lifetime-I1**: a sealed pool ends exactly once. Three kinds of events may permit the end: the seal, the removal of a
//!   block, and the start of a flight. The last of these events sees all the others, because each first changes its own word
//!   and then makes an AcqRel exchange on the count of blocks, and the exchanges on one word have a total order.

use std::time::Duration;

use crate::report::{PoolLog, is_power_of_ten};
use crate::stats::{Histogram, Stats};
use pinpool_observe::diagnosis::RecentLengths;
use pinpool_os::sync::atomic;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU64, Mutex, Ordering};

pub(super) mod clock;
pub(super) mod holders;

/// A shortage of memory ends when every request has found room immediately for this long. At the limit, successful and blocked
/// requests alternate, so ending at the first success would log two lines per request.
const CALM_US: u64 = 1_000_000;

/// A statistic. All accesses are Relaxed, because each number is independent.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `number`, and returns the sum.
    pub(crate) fn add(&self, number: u64) -> u64 {
        self.0.fetch_add(number, Ordering::Relaxed).wrapping_add(number)
    }

    pub(crate) fn subtract(&self, number: u64) {
        self.add(number.wrapping_neg());
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram of durations.
#[derive(Debug, Default)]
pub(crate) struct Times(Mutex<Histogram>);

impl Times {
    pub(crate) fn record(&self, took: Duration) {
        self.0.lock().record(took);
    }

    /// Records the time from `since_us` to `now_us`.
    pub(crate) fn record_us(&self, since_us: u64, now_us: u64) {
        self.record(Duration::from_micros(now_us.saturating_sub(since_us)));
    }

    pub(crate) fn get(&self) -> Histogram {
        *self.0.lock()
    }
}

/// Returns `time` in nanoseconds.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Counts of requests, and of buffers that are not idle.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) failed_requests: Counter,
    /// Requests that failed with a refusal. The first of them and each power of ten are logged.
    pub(crate) refused_requests: Counter,
    pub(crate) pageable: Counter,
    pub(crate) pageable_returns: Counter,
    /// Buffers over adopted memory that are in use, in flight or quarantined.
    pub(crate) adopted: Counter,
    /// Buffers that a return handed to a waiting request and that the request took. Each is a return and a hit. Counted when
    /// the request takes the buffer, since the request may time out before.
    pub(crate) handed_over: Counter,
    /// Returns that freed memory for a waiting request or for another member of the shared limit.
    pub(crate) made_room: Counter,
    pub(crate) quarantined_bytes: Counter,
    /// Buffers that were quarantined so far, and buffers that were leaked without a quarantine.
    pub(crate) quarantines: [Counter; 2],
    /// Bytes of user memory that are claimed under the limit of the pool.
    pub(crate) user_memory_bytes: Counter,
    pub(crate) timeouts: Counter,
    requested: Mutex<Requested>,
    /// How long requests waited.
    pub(crate) waits: Times,
    /// How long users had the buffers that a miss found.
    pub(crate) uses: Times,
    /// How long buffers were in flight.
    pub(crate) flights: Times,
}

/// The lengths of served requests that found no idle buffer at their first attempt.
#[derive(Debug, Default)]
struct Requested {
    bytes: u64,
    class_bytes: u64,
    recent_lengths: RecentLengths,
    /// Number of requests of a length that was not requested recently.
    new_lengths: u64,
}

impl Counters {
    /// Counts a served request for `len` bytes that found no idle buffer at its first attempt and received `class_bytes`.
    pub(crate) fn count_request(&self, len: usize, class_bytes: usize) {
        let mut requested = self.requested.lock();
        requested.bytes += len as u64;
        requested.class_bytes += class_bytes as u64;
        requested.new_lengths += u64::from(requested.recent_lengths.is_new(len as u64));
    }

    /// Returns the number of requests so far that found no idle buffer at their first attempt and had a length that was not
    /// requested recently.
    pub(crate) fn new_lengths(&self) -> u64 {
        self.requested.lock().new_lengths
    }

    /// Adds these counters to `stats`, which must already contain the counters of the cache, the memory and the copies in
    /// flight. `own_bytes` are the bytes in blocks of this pool.
    pub(crate) fn fill(&self, stats: &mut Stats, own_bytes: u64) {
        let (pageable, pageable_returns) = (self.pageable.get(), self.pageable_returns.get());
        let handed_over = self.handed_over.get();
        let quarantined_bytes = self.quarantined_bytes.get();
        stats.requests.served += pageable + handed_over;
        stats.requests.hits += handed_over;
        stats.requests.misses += pageable;
        stats.requests.returned += pageable_returns + handed_over + self.made_room.get();
        let Requested { bytes, class_bytes, .. } = *self.requested.lock();
        stats.requests.requested_bytes = bytes;
        stats.requests.granted_bytes = class_bytes;
        stats.requests.failed = self.failed_requests.get();
        stats.requests.timeouts = self.timeouts.get();
        stats.requests.wait_time = self.waits.get();
        stats.requests.use_time = self.uses.get();
        stats.copies.time = self.flights.get();
        stats.requests.pageable = pageable;
        stats.memory.pageable = pageable.saturating_sub(pageable_returns);
        stats.requests.adopted = self.adopted.get();
        stats.memory.quarantined_bytes += quarantined_bytes;
        stats.memory.user_memory_bytes = self.user_memory_bytes.get();
        // Saturating: copies complete between the readings while other threads run. Exact while no other thread runs.
        stats.memory.in_use = stats.memory.buffers.saturating_sub(stats.memory.idle + stats.copies.in_flight);
        stats.memory.in_use_bytes =
            own_bytes.saturating_sub(stats.memory.idle_bytes + stats.copies.in_flight_bytes + quarantined_bytes);
    }
}

/// The number of blocks of a pool, and whether the pool has ended.
#[derive(Debug, Default)]
pub(crate) struct Lifetime {
    /// Blocks that exist: idle, in use or in flight.
    blocks: atomic::AtomicU64,
    is_sealed: atomic::AtomicBool,
    is_torn_down: atomic::AtomicBool,
}

impl Lifetime {
    /// Counts a new block.
    pub(crate) fn add_block(&self) {
        // Relaxed: the caller has a handle of the pool, so the pool is not sealed.
        self.blocks.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a block that no longer exists.
    pub(crate) fn remove_block(&self) {
        // AcqRel: lifetime-I1.
        self.blocks.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn fill(&self, stats: &mut Stats) {
        // Relaxed: a statistic.
        stats.memory.buffers = self.blocks.load(Ordering::Relaxed);
    }

    /// Records that no handle of the pool is left.
    pub(crate) fn seal(&self) {
        // Relaxed: the exchange in `begin_tear_down`, which follows, releases this store.
        self.is_sealed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_sealed(&self) -> bool {
        // Relaxed: a hint.
        self.is_sealed.load(Ordering::Relaxed)
    }

    /// Returns whether the caller must end the pool, which is true once: when the pool is sealed and no block exists except
    /// those `in_flight`. Must be called after the seal, after each removal of a block and after each start of a flight.
    pub(crate) fn begin_tear_down(&self, in_flight: impl FnOnce() -> u64) -> bool {
        // An exchange that changes nothing, AcqRel: lifetime-I1.
        let blocks = self.blocks.fetch_add(0, Ordering::AcqRel);
        // Relaxed: if the seal came first, the exchange above has acquired it.
        self.is_sealed.load(Ordering::Relaxed)
            && blocks <= in_flight()
            // AcqRel: exactly one thread ends the pool, and it sees all earlier returns.
            && !self.is_torn_down.swap(true, Ordering::AcqRel)
    }
}

/// The current shortage of memory, if any. Only the first, tenth, hundredth shortage of a pool and so on are logged, when they
/// begin and when they end, so that a pool that often runs short does not repeat its log lines.
#[derive(Debug, Default)]
pub(crate) struct Shortage {
    /// Whether there is a shortage. Lets a miss that finds room skip the lock if there is none.
    is_on: AtomicBool,
    counts: Mutex<Option<ShortageCounts>>,
    /// Number of shortages so far.
    shortages: AtomicU64,
}

#[derive(Debug, Default)]
struct ShortageCounts {
    is_logged: bool,
    begun_us: u64,
    last_us: u64,
    requests: u64,
    /// Total time that requests waited.
    waited: Duration,
    pageable: u64,
}

impl Shortage {
    /// Counts a request for `len_bytes` that found no room at `now_us`. Calls `why` only if this request begins a shortage that
    /// is logged. `why` returns whether the request merely waits for room under a limit, the reason, and the statistics.
    pub(crate) fn count_refused(
        &self,
        log: &PoolLog,
        len_bytes: u64,
        now_us: u64,
        why: impl FnOnce() -> (bool, String, Stats),
    ) {
        let mut counts = self.counts.lock();
        if let Some(counts) = &mut *counts {
            counts.requests += 1;
            counts.last_us = counts.last_us.max(now_us);
            return;
        }
        // Relaxed: counted under the lock.
        let is_logged = is_power_of_ten(self.shortages.fetch_add(1, Ordering::Relaxed) + 1);
        *counts = Some(ShortageCounts {
            is_logged,
            begun_us: now_us,
            last_us: now_us,
            requests: 1,
            ..ShortageCounts::default()
        });
        // Relaxed, here and below: a hint; the lock decides.
        self.is_on.store(true, Ordering::Relaxed);
        drop(counts);
        if is_logged {
            let (waits, why, usage) = why();
            if waits { log.full(len_bytes, &why, &usage) } else { log.refused(len_bytes, &why, &usage) }
        }
    }

    /// Adds `waited`, the time that a request waited until `now_us`, to the current shortage, which lasts at least until then.
    pub(crate) fn count_wait(&self, now_us: u64, waited: Duration) {
        if let Some(counts) = &mut *self.counts.lock() {
            counts.last_us = counts.last_us.max(now_us);
            counts.waited += waited;
        }
    }

    /// Counts a request that received pageable memory in the current shortage, if there is one.
    pub(crate) fn count_pageable(&self) {
        self.counts.lock().iter_mut().for_each(|counts| counts.pageable += 1);
    }

    /// Ends the shortage if every request has found room for [`CALM_US`].
    pub(crate) fn end_if_calm(&self, log: &PoolLog, now_us: u64) {
        if !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        let mut counts = self.counts.lock();
        let is_calm = |counts: &mut ShortageCounts| now_us.saturating_sub(counts.last_us) >= CALM_US;
        let Some(ended) = counts.take_if(is_calm) else { return };
        self.is_on.store(false, Ordering::Relaxed);
        drop(counts);
        if ended.is_logged {
            let after = Duration::from_micros(ended.last_us - ended.begun_us);
            log.shortage_ended(after, ended.requests, ended.waited, ended.pageable);
        }
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use pinpool_os::sync::UnsafeCell;
    use pinpool_os::sync::atomic::AtomicU64;

    struct ModelPool {
        lifetime: Lifetime,
        /// The count of `in_flight`, which is Relaxed there, too.
        in_flight: AtomicU64,
        /// Memory that a release writes to before the end uses it.
        memory: [UnsafeCell<u32>; 2],
        ended: AtomicU64,
    }

    // SAFETY: loom checks the accesses to the cells.
    #[allow(unsafe_code)]
    unsafe impl Sync for ModelPool {}

    impl ModelPool {
        fn with_blocks(blocks: u64) -> Arc<Self> {
            let lifetime = Lifetime::default();
            (0..blocks).for_each(|_| lifetime.add_block());
            let memory = [(); 2].map(|()| UnsafeCell::new(0));
            Arc::new(Self { lifetime, in_flight: AtomicU64::new(0), memory, ended: AtomicU64::new(0) })
        }

        fn release(&self, block: usize) {
            self.memory[block].with_mut(|_| ());
            self.lifetime.remove_block();
            self.tear_down_if_unused();
        }

        fn begin_flight(&self) {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
            self.tear_down_if_unused();
        }

        fn seal(&self) {
            self.lifetime.seal();
            self.tear_down_if_unused();
        }

        fn tear_down_if_unused(&self) {
            if self.lifetime.begin_tear_down(|| self.in_flight.load(Ordering::Relaxed)) {
                self.ended.fetch_add(1, Ordering::Relaxed);
                self.memory.iter().for_each(|memory| memory.with_mut(|_| ()));
            }
        }
    }

    fn model(blocks: u64, acts: [fn(&ModelPool); 3]) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let pool = ModelPool::with_blocks(blocks);
            let [first, second, here] = acts;
            let others = [first, second].map(|act| {
                let pool = pool.clone();
                thread::spawn(move || act(&pool))
            });
            here(&pool);
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!(pool.ended.load(Ordering::Relaxed), 1, "the pool ends once");
        });
    }

    /// Fails if `begin_tear_down` reads the count by a load.
    #[test]
    fn loom_of_the_last_puts_and_the_seal_one_ends() {
        model(2, [|pool| pool.release(0), |pool| pool.release(1), ModelPool::seal]);
    }

    /// Fails if `begin_tear_down` reads the count by a load or checks the seal before the count, or if `remove_block` is Relaxed.
    #[test]
    fn loom_of_a_return_in_flight_a_return_and_the_seal_one_ends() {
        model(2, [|pool| pool.release(0), ModelPool::begin_flight, ModelPool::seal]);
    }
}
