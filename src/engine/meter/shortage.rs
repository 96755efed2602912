//! A shortage of memory, logged once when it begins and once when it ends: the first of a pool, the tenth, the hundredth, so
//! that a pool that runs short often does not repeat itself.
//!
//! It ends when every request has found room at once for a second. At the limit, successful and blocked requests alternate, so
//! ending at the first success would log two lines per request.
//!
//! Owns the counts of one shortage. Decides nothing about memory.

use std::time::Duration;

use crate::diag::{PoolLog, is_power_of_ten};
use crate::error::UsageReport;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Every request must find room at once for this long.
const CALM_US: u64 = 1_000_000;

/// The current shortage, if any.
#[derive(Debug, Default)]
pub(crate) struct Shortage {
    /// Lets a miss that finds room skip the lock.
    is_on: AtomicBool,
    counts: Mutex<Option<ShortageCounts>>,
    /// Shortages so far.
    shortages: AtomicU64,
}

#[derive(Debug, Default)]
struct ShortageCounts {
    is_logged: bool,
    begun_us: u64,
    last_us: u64,
    gets: u64,
    /// Total time that requests waited.
    waited: Duration,
    fallbacks: u64,
}

impl Shortage {
    /// A request for `len_bytes` found no room at `now_us`. `why` is called for the first of a shortage that is logged, and
    /// also returns whether the request just waits for room under a limit.
    pub(crate) fn count_get(
        &self,
        log: &PoolLog,
        len_bytes: u64,
        now_us: u64,
        why: impl FnOnce() -> (bool, String, UsageReport),
    ) {
        let mut counts = self.counts.lock();
        if let Some(counts) = &mut *counts {
            counts.gets += 1;
            counts.last_us = counts.last_us.max(now_us);
            return;
        }
        // Relaxed: counted under the lock.
        let is_logged = is_power_of_ten(self.shortages.fetch_add(1, Ordering::Relaxed) + 1);
        *counts =
            Some(ShortageCounts { is_logged, begun_us: now_us, last_us: now_us, gets: 1, ..ShortageCounts::default() });
        // Relaxed, here and below: a hint; the lock decides.
        self.is_on.store(true, Ordering::Relaxed);
        drop(counts);
        if is_logged {
            let (waits, why, usage) = why();
            if waits { log.full(len_bytes, &why, &usage) } else { log.refused(len_bytes, &why, &usage) }
        }
    }

    /// A request has waited until now: memory was short.
    pub(crate) fn count_wait(&self, now_us: u64, waited: Duration) {
        if let Some(counts) = &mut *self.counts.lock() {
            counts.last_us = counts.last_us.max(now_us);
            counts.waited += waited;
        }
    }

    /// A request received pageable memory.
    pub(crate) fn count_fallback(&self) {
        self.counts.lock().iter_mut().for_each(|counts| counts.fallbacks += 1);
    }

    /// Ends it if every request has found room for a while.
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
            log.shortage_ended(after, ended.gets, ended.waited, ended.fallbacks);
        }
    }
}
