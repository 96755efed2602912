//! Idle buffers of the preset `adaptive`: the thread cache, with TensorFlow's check of its rates and the rules of time.
//!
//! Owns the limit, which a check raises and a quiet time lowers, and the counts of both. Reads no clock: times are
//! arguments.

use super::thread_cache::{self, Entry, ThreadCache};
use super::{IdleStats, LoweredLimit, PutOutcome};
use crate::policy::{self, Check, Window};
use crate::size_class::{Class, EIGHTHS_CLASSES};
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Unit of the coarse time that a put leaves on its buffer: 10 ms, so that 32 bits last for over a year.
const COARSE_UNIT_US: u64 = 10_000;

/// Idle buffers, each thread's own first.
#[derive(Debug)]
pub(in crate::engine) struct AdaptiveIdle<T> {
    cache: ThreadCache<T>,
    auto_resize: bool,
    start_limit: u64,
    /// One check or lowering at a time.
    resizing: Mutex<()>,
    last_miss_us: AtomicU64,
    reclaimed: AtomicU64,
    aged: AtomicU64,
    checks: AtomicU64,
    raises: AtomicU64,
    lowers: AtomicU64,
    /// Puts after the seal, which the thread cache does not count.
    rejected_puts: AtomicU64,
    sealed: AtomicBool,
}

impl<T> AdaptiveIdle<T> {
    pub(super) fn new(limit: u64, auto_resize: bool) -> Self {
        let cores = std::thread::available_parallelism().map_or(8, usize::from);
        Self {
            cache: ThreadCache::new(EIGHTHS_CLASSES, as_count(limit), 2 * cores),
            auto_resize,
            start_limit: limit,
            resizing: Mutex::new(()),
            last_miss_us: AtomicU64::new(0),
            reclaimed: AtomicU64::new(0),
            aged: AtomicU64::new(0),
            checks: AtomicU64::new(0),
            raises: AtomicU64::new(0),
            lowers: AtomicU64::new(0),
            rejected_puts: AtomicU64::new(0),
            sealed: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        self.cache.take(class.index)
    }

    #[inline]
    pub(super) fn put(&self, entry: Box<Entry<T>>, now_us: u64) -> PutOutcome<T> {
        let thread_cache::Put { handed_back, victim, check_due } = self.cache.put(entry, coarse(now_us));
        if handed_back.is_some() {
            // Relaxed, like the thread cache's own counts; the thread that closes the pool adds a fence.
            self.rejected_puts.fetch_add(1, Ordering::Relaxed);
        }
        PutOutcome { victim, rejected: handed_back, check: if check_due { self.check() } else { None } }
    }

    pub(super) fn count_allocated(&self) {
        self.cache.count_allocated();
    }

    pub(super) fn note_miss(&self, now_us: u64) {
        // Relaxed: time guards no memory.
        self.last_miss_us.fetch_max(now_us, Ordering::Relaxed);
    }

    pub(super) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        let entry = self.cache.evict_oldest()?;
        // Relaxed, here and below: independent counts.
        self.reclaimed.fetch_add(1, Ordering::Relaxed);
        Some(entry)
    }

    pub(super) fn expire(&self, now_us: u64) -> Vec<Box<Entry<T>>> {
        let Some(oldest_us) = now_us.checked_sub(policy::IDLE_BUFFER_US) else { return Vec::new() };
        let mut expired = Vec::new();
        self.cache.drain_older_than(coarse(oldest_us).saturating_add(1), |entry| expired.push(entry));
        self.aged.fetch_add(expired.len() as u64, Ordering::Relaxed);
        expired
    }

    pub(super) fn lower_limit(&self, now_us: u64) -> Option<LoweredLimit<T>> {
        let _one_at_a_time = self.resizing.try_lock()?;
        let from = self.limit();
        let to = policy::lowered(from, self.start_limit, self.last_miss_us.load(Ordering::Relaxed), now_us)?;
        // The next halving is a full quiet time away.
        self.last_miss_us.store(now_us, Ordering::Relaxed);
        self.lowers.fetch_add(1, Ordering::Relaxed);
        let mut victims = Vec::new();
        self.cache.set_limit(as_count(to), |entry| victims.push(entry));
        Some(LoweredLimit { from, to, victims })
    }

    fn check(&self) -> Option<Check> {
        // If another thread's check is running, its window is this one.
        let _one_at_a_time = self.resizing.try_lock()?;
        let check = policy::check(self.cache.window(), self.limit(), self.auto_resize);
        self.checks.fetch_add(1, Ordering::Relaxed);
        if let Some(limit) = check.raised_to {
            self.raises.fetch_add(1, Ordering::Relaxed);
            self.cache.reset_window();
            // A higher limit evicts nothing.
            self.cache.set_limit(as_count(limit), drop);
        }
        Some(check)
    }

    fn limit(&self) -> u64 {
        self.cache.limit() as u64
    }

    fn drain(&self) -> Vec<Box<Entry<T>>> {
        let mut entries = Vec::new();
        self.cache.drain_all(|entry| entries.push(entry));
        entries
    }

    pub(super) fn clear(&self) -> Vec<Box<Entry<T>>> {
        self.cache.reset_window();
        self.drain()
    }

    pub(super) fn seal(&self) -> Vec<Box<Entry<T>>> {
        self.cache.seal();
        // Release, with the Acquire in `is_sealed`: a thread that sees the seal sees the sealed cache.
        self.sealed.store(true, Ordering::Release);
        self.drain()
    }

    #[inline]
    pub(super) fn is_sealed(&self) -> bool {
        // Acquire: see `seal`.
        self.sealed.load(Ordering::Acquire)
    }

    /// See [`ThreadCache::order_with_puts`].
    pub(super) fn order_with_puts(&self) {
        self.cache.order_with_puts();
    }

    pub(super) fn bytes(&self) -> u64 {
        self.cache.idle_bytes() as u64
    }

    pub(super) fn stats(&self) -> IdleStats {
        let total = self.cache.totals();
        IdleStats {
            window: self.cache.window(),
            total: Window { put: total.put + self.rejected_puts.load(Ordering::Relaxed), ..total },
            limit: self.limit(),
            buffers: self.cache.idle_count() as u64,
            bytes: self.bytes(),
            reclaimed: self.reclaimed.load(Ordering::Relaxed),
            aged: self.aged.load(Ordering::Relaxed),
            checks: self.checks.load(Ordering::Relaxed),
            raises: self.raises.load(Ordering::Relaxed),
            lowers: self.lowers.load(Ordering::Relaxed),
        }
    }
}

fn coarse(now_us: u64) -> u32 {
    u32::try_from(now_us / COARSE_UNIT_US).unwrap_or(u32::MAX)
}

fn as_count(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}
