//! Idle buffers of the preset `adaptive`: the thread cache, with TensorFlow's check of its rates and the rules of time.
//!
//! Owns the limit, which a check raises and a quiet time lowers, and the counts of both. Reads no clock: times are
//! arguments.

use super::thread_cache::{self, Entry, Shard, ThreadCache};
use super::{LoweredLimit, PutOutcome, fill_totals};
use crate::policy::{self, Check, Window};
use crate::size_class::{Class, EIGHTHS_CLASSES};
use crate::stats::Stats;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};
use std::collections::VecDeque;

/// Ticks are at least this far apart.
const TICK_US: u64 = 10_000;

/// Idle buffers, each thread's own first.
#[derive(Debug)]
pub(in crate::engine) struct AdaptiveIdle<T> {
    cache: ThreadCache<T>,
    auto_resize: bool,
    start_limit: u64,
    /// A buffer idle for so long returns to the arena.
    idle_us: u64,
    /// One check or lowering at a time.
    resizing: Mutex<()>,
    last_miss_us: AtomicU64,
    checks: AtomicU64,
    raises: AtomicU64,
    lowers: AtomicU64,
    /// Puts that the thread cache does not count: those after the seal, and of buffers that went to the arena (policy-R3).
    other_puts: AtomicU64,
    /// The part of `other_puts` that came before the window.
    other_puts_before: AtomicU64,
    ticks: Mutex<Ticks>,
}

/// The number of the current tick, and how old those before it are.
///
/// A put that takes the short path reads no clock. It belongs to the tick that began last, so all that is known of its time
/// is that the next tick began later. So a buffer is old enough only if the tick *after* its own is.
#[derive(Debug, Default)]
struct Ticks {
    current: u64,
    /// When the current tick began, in units of [`TICK_US`].
    since: u64,
    /// Oldest first: a time in units of [`TICK_US`], and the tick before which all buffers were put by that time.
    put_by: VecDeque<(u64, u64)>,
    /// The buffers of ticks before this one are old.
    old: u64,
}

impl Ticks {
    /// Begins a tick at `now_us`, unless the current one is as late; all buffers of the current one were put by `put_by_us`.
    fn begin(&mut self, now_us: u64, put_by_us: u64) -> Option<u64> {
        let now = now_us / TICK_US;
        if self.current > 0 && now <= self.since {
            return None;
        }
        (self.current, self.since) = (self.current + 1, now);
        self.put_by.push_back((put_by_us / TICK_US, self.current));
        Some(self.current)
    }

    /// The current tick is the one after `tick`: puts that belong to `tick` were made before it began.
    fn skip_past(&mut self, tick: u64) -> u64 {
        self.current = tick + 1;
        if let Some((_, before)) = self.put_by.back_mut() {
            *before = self.current;
        }
        self.current
    }

    /// The tick before which all buffers were put at `us` or earlier.
    fn all_put_by(&mut self, us: u64) -> u64 {
        while let Some(&(_, tick)) = self.put_by.front().filter(|(put_by, _)| *put_by <= us / TICK_US) {
            self.old = tick;
            self.put_by.pop_front();
        }
        self.old
    }
}

impl<T> AdaptiveIdle<T> {
    pub(super) fn new(limit: u64, auto_resize: bool, idle_us: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(8, usize::from);
        Self {
            cache: ThreadCache::new(EIGHTHS_CLASSES, as_count(limit), 2 * cores),
            auto_resize,
            start_limit: limit,
            idle_us,
            resizing: Mutex::new(()),
            last_miss_us: AtomicU64::new(0),
            checks: AtomicU64::new(0),
            raises: AtomicU64::new(0),
            lowers: AtomicU64::new(0),
            other_puts: AtomicU64::new(0),
            other_puts_before: AtomicU64::new(0),
            ticks: Mutex::new(Ticks::default()),
        }
    }

    /// The calling thread's shard, for its short path.
    pub(super) fn own_shard(&self) -> &Shard<T> {
        self.cache.own_shard()
    }

    pub(super) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        self.cache.take(class.index)
    }

    pub(super) fn put(&self, entry: Box<Entry<T>>) -> PutOutcome<T> {
        let thread_cache::Put { handed_back, victim, check_due } = self.cache.put(entry);
        if handed_back.is_some() {
            self.count_put();
        }
        PutOutcome { victim, rejected: handed_back, check: if check_due { self.check() } else { None } }
    }

    pub(super) fn put_remote(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        self.cache.put_remote(entry)
    }

    pub(super) fn count_allocated(&self) {
        self.cache.count_allocated();
    }

    pub(super) fn count_put(&self) {
        // Relaxed, like the thread cache's own counts.
        self.other_puts.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_miss(&self, now_us: u64) {
        // Relaxed: time guards no memory.
        self.last_miss_us.fetch_max(now_us, Ordering::Relaxed);
    }

    pub(super) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        self.cache.evict_oldest()
    }

    /// The time is `now_us`; what was put before was put by `put_by_us`.
    pub(super) fn tick(&self, now_us: u64, put_by_us: u64) {
        // While another thread begins a tick, this time belongs to that one.
        let Some(mut ticks) = self.ticks.try_lock() else { return };
        if let Some(tick) = ticks.begin(now_us, put_by_us) {
            let newest = self.cache.begin_tick(tick);
            if newest >= tick {
                // So many puts came since the last tick that they carried into this one.
                self.cache.begin_tick(ticks.skip_past(newest));
            }
        }
    }

    pub(super) fn set_attention(&self, attention: bool) {
        self.cache.set_attention(attention);
    }

    pub(super) fn expire(&self, now_us: u64) -> Vec<Box<Entry<T>>> {
        let Some(oldest_us) = now_us.checked_sub(self.idle_us) else { return Vec::new() };
        let tick = self.ticks.lock().all_put_by(oldest_us);
        let mut expired = Vec::new();
        self.cache.drain_older_than(tick, |entry| expired.push(entry));
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
        let check = policy::check(self.window(), self.limit(), self.auto_resize);
        self.checks.fetch_add(1, Ordering::Relaxed);
        if let Some(limit) = check.raised_to {
            self.raises.fetch_add(1, Ordering::Relaxed);
            self.reset_window();
            // A higher limit evicts nothing.
            self.cache.set_limit(as_count(limit), drop);
        }
        Some(check)
    }

    fn window(&self) -> Window {
        let window = self.cache.window();
        let other = self.other_puts.load(Ordering::Relaxed);
        Window { put: window.put + other.saturating_sub(self.other_puts_before.load(Ordering::Relaxed)), ..window }
    }

    fn reset_window(&self) {
        self.cache.reset_window();
        self.other_puts_before.store(self.other_puts.load(Ordering::Relaxed), Ordering::Relaxed);
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
        self.reset_window();
        self.drain()
    }

    pub(super) fn seal(&self) -> Vec<Box<Entry<T>>> {
        self.cache.seal();
        self.drain()
    }

    pub(super) fn count_of(&self, class: Class) -> u64 {
        self.cache.count_of(class.index)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.cache.idle_bytes() as u64
    }

    pub(super) fn count(&self) -> u64 {
        self.cache.idle_count() as u64
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        let total = self.cache.totals();
        fill_totals(stats, Window { put: total.put + self.other_puts.load(Ordering::Relaxed), ..total });
        stats.window = self.window();
        stats.pool_size_limit = self.limit();
        stats.buffers_in_pool = self.count();
        stats.idle_bytes = self.bytes();
        stats.checks = self.checks.load(Ordering::Relaxed);
        stats.raises = self.raises.load(Ordering::Relaxed);
        stats.lowers = self.lowers.load(Ordering::Relaxed);
    }
}

fn as_count(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_tick_ages_only_what_the_next_tick_proves_to_be_old() {
        let mut ticks = Ticks::default();
        assert_eq!(ticks.begin(0, 0), Some(1));
        assert_eq!(ticks.all_put_by(0), 1, "buffers of tick 0 were put by then");
        // Puts of tick 1 may have come at any time up to the next reading of the clock.
        assert_eq!(ticks.begin(60_000_000, 60_000_000), Some(2));
        assert_eq!(ticks.all_put_by(50_000_000), 1);
        assert_eq!(ticks.all_put_by(60_000_000), 2);
    }

    #[test]
    fn puts_that_carried_into_later_ticks_grow_old_like_others() {
        let idle = AdaptiveIdle::new(10, false, policy::IDLE_BUFFER_US);
        let second = 1_000_000;
        idle.tick(0, 0);
        // The cache reaches this tick as it does after 2^24 puts in each tick.
        idle.cache.begin_tick(50_000);
        let put = idle.put(Entry::new(0, 10, 7));
        assert!(put.victim.is_none() && put.rejected.is_none());
        idle.tick(second, second);
        assert!(idle.expire(second + policy::IDLE_BUFFER_US - TICK_US).is_empty());
        assert_eq!(idle.expire(second + policy::IDLE_BUFFER_US).len(), 1);
        // Later ones are younger.
        assert!(idle.put(Entry::new(0, 10, 8)).victim.is_none());
        idle.tick(60 * second, 60 * second);
        assert!(idle.expire(60 * second + policy::IDLE_BUFFER_US - TICK_US).is_empty());
        assert_eq!(idle.expire(60 * second + policy::IDLE_BUFFER_US).len(), 1);
    }

    #[test]
    fn ticks_are_some_time_apart_and_a_late_reading_begins_none() {
        let mut ticks = Ticks::default();
        assert_eq!((ticks.begin(70, 70), ticks.begin(80, 80)), (Some(1), None));
        assert_eq!(ticks.begin(2 * TICK_US, 2 * TICK_US), Some(2));
        assert_eq!(ticks.begin(TICK_US, TICK_US), None);
        assert_eq!((ticks.all_put_by(TICK_US), ticks.all_put_by(u64::MAX)), (1, 2));
    }
}
