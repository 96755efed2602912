//! A time without room: said once when it begins and once when it is over, not at every get.
//!
//! It is over when every get has found room at once for a second: at the ceiling gets that do and gets that do not take
//! turns, and two lines for each turn would be two lines for each get.

use std::time::Duration;

use crate::diag::PoolLog;
use crate::error::UsageReport;
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicBool, Ordering};

/// So long must every get find room at once.
const CALM_US: u64 = 1_000_000;

/// Is there one, and what happened in it?
#[derive(Debug, Default)]
pub(super) struct Episode {
    /// Lets a miss that finds room pass without the lock.
    on: AtomicBool,
    tally: Mutex<Option<Tally>>,
}

#[derive(Debug)]
struct Tally {
    begun_us: u64,
    last_us: u64,
    gets: u64,
    fallbacks: u64,
}

impl Episode {
    /// A get of `len_bytes` found no room at `now_us`.
    pub(super) fn begun(
        &self,
        log: &PoolLog,
        len_bytes: u64,
        now_us: u64,
        why: impl FnOnce() -> (String, UsageReport),
    ) {
        let mut tally = self.tally.lock();
        if let Some(tally) = &mut *tally {
            tally.gets += 1;
            tally.last_us = tally.last_us.max(now_us);
            return;
        }
        *tally = Some(Tally { begun_us: now_us, last_us: now_us, gets: 1, fallbacks: 0 });
        // Relaxed: a hint; the lock decides.
        self.on.store(true, Ordering::Relaxed);
        drop(tally);
        let (why, holdings) = why();
        log.shortage_began(len_bytes, &why, &holdings);
    }

    /// A get was given memory that is not pinned.
    pub(super) fn fell_back(&self) {
        if let Some(tally) = &mut *self.tally.lock() {
            tally.fallbacks += 1;
        }
    }

    /// Ends it if no get has been without room for a while.
    pub(super) fn over(&self, log: &PoolLog, now_us: u64) {
        // Relaxed, as above.
        if !self.on.load(Ordering::Relaxed) {
            return;
        }
        let mut tally = self.tally.lock();
        let calm = |tally: &mut Tally| now_us.saturating_sub(tally.last_us) >= CALM_US;
        let Some(Tally { begun_us, last_us, gets, fallbacks }) = tally.take_if(calm) else { return };
        // Relaxed, as above.
        self.on.store(false, Ordering::Relaxed);
        drop(tally);
        log.shortage_ended(Duration::from_micros(last_us - begun_us), gets, fallbacks);
    }
}
