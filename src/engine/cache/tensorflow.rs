//! The parts of pools that follow TensorFlow's
//! [`PoolAllocator`](https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/pool_allocator.h).
//! Both presets use `CountLimit`, the limit on idle buffers with the counts that its checks compare (policy-R4). Only the
//! preset `tensorflow` uses `OrderedStore`: each class reuses its oldest buffer first, and the oldest buffer of all is evicted
//! first.

use std::collections::{BTreeMap, VecDeque};

use super::thread_cache::{Counts, Entry};
use crate::policy::{self, CHECK_EVERY_EVICTIONS, RateCheck, RateWindow};
use crate::stats::Stats;

/// Empty classes are removed once there are more classes than twice the idle buffers plus this number.
const LEFTOVERS: usize = 32;

/// The limit on the number of idle buffers, and the counts that raise and lower it.
#[derive(Debug, Default)]
pub(super) struct CountLimit {
    limit: u64,
    start_limit: u64,
    auto_resize: bool,
    /// Counts of all events except those that a thread cache counts.
    pub(super) counted: RateWindow,
    /// The total counts when the current window began.
    window_start: RateWindow,
    last_miss_us: u64,
    checks: u64,
    raises: u64,
    reductions: u64,
}

impl CountLimit {
    pub(super) fn new(limit: u64, auto_resize: bool) -> Self {
        Self { limit, start_limit: limit, auto_resize, ..Self::default() }
    }

    pub(super) fn get(&self) -> u64 {
        self.limit
    }

    fn total(&self, Counts { hits, puts, .. }: Counts) -> RateWindow {
        let RateWindow { get_from_pool, put, .. } = self.counted;
        RateWindow { get_from_pool: get_from_pool + hits, put: put + puts, ..self.counted }
    }

    /// Counts an eviction. Every thousandth eviction of a window checks the rates of the window and may raise the limit.
    pub(super) fn count_eviction(&mut self, counts: impl FnOnce() -> Counts) -> Option<RateCheck> {
        self.counted.evicted += 1;
        (self.counted.evicted - self.window_start.evicted).is_multiple_of(CHECK_EVERY_EVICTIONS).then(|| {
            let total = self.total(counts());
            let check = policy::check_rates(total.since(self.window_start), self.limit, self.auto_resize);
            self.checks += 1;
            if let Some(limit) = check.raised_to {
                self.limit = limit;
                self.raises += 1;
                self.window_start = total;
            }
            check
        })
    }

    pub(super) fn begin_window(&mut self, counts: Counts) {
        self.window_start = self.total(counts);
    }

    pub(super) fn count_allocated(&mut self, now_us: u64) {
        self.counted.allocated += 1;
        self.last_miss_us = self.last_miss_us.max(now_us);
    }

    /// Lowers the limit if no request has missed for a long time (policy-R4). Returns the previous limit if it was lowered.
    pub(super) fn lower(&mut self, now_us: u64) -> Option<u64> {
        let from = self.limit;
        self.limit = policy::lowered(from, self.start_limit, self.last_miss_us, now_us)?;
        // The next halving requires another full quiet period.
        self.last_miss_us = now_us;
        self.reductions += 1;
        Some(from)
    }

    /// Returns TensorFlow's counters since the last raise or clear.
    pub(super) fn window(&self, counts: Counts) -> RateWindow {
        self.total(counts).since(self.window_start)
    }

    pub(super) fn fill(&self, stats: &mut Stats, counts: Counts) {
        let total = self.total(counts);
        stats.requests.served += total.requests();
        stats.requests.hits += total.get_from_pool;
        stats.requests.misses += total.allocated;
        stats.requests.returned += total.put;
        stats.limits.pool_size_limit = self.limit;
        stats.limits.checks = self.checks;
        stats.limits.raises = self.raises;
        stats.limits.reductions = self.reductions;
    }
}

/// Idle buffers in the order of their returns.
#[derive(Debug)]
pub(super) struct OrderedStore<T> {
    /// Each buffer with its class, by the number of its return.
    entries: BTreeMap<u64, (usize, Box<Entry<T>>)>,
    /// The numbers of the returns of each class, the oldest first. Few classes without an idle buffer remain.
    classes: BTreeMap<usize, VecDeque<u64>>,
    puts: u64,
    bytes: u64,
}

impl<T> OrderedStore<T> {
    pub(super) fn new() -> Self {
        Self { entries: BTreeMap::new(), classes: BTreeMap::new(), puts: 0, bytes: 0 }
    }

    /// Takes the oldest buffer of `class`.
    pub(super) fn take(&mut self, class: usize) -> Option<Box<Entry<T>>> {
        let put = self.classes.get_mut(&class)?.pop_front()?;
        let (_, entry) = self.entries.remove(&put)?;
        self.bytes -= entry.bytes() as u64;
        Some(entry)
    }

    /// Keeps `entry` as the newest.
    pub(super) fn put(&mut self, class: usize, entry: Box<Entry<T>>) {
        self.puts += 1;
        self.bytes += entry.bytes() as u64;
        self.entries.insert(self.puts, (class, entry));
        self.classes.entry(class).or_default().push_back(self.puts);
        if self.classes.len() > 2 * self.entries.len() + LEFTOVERS {
            self.classes.retain(|_, puts| !puts.is_empty());
        }
    }

    /// Takes the oldest buffer of all classes.
    pub(super) fn evict(&mut self) -> Option<Box<Entry<T>>> {
        let (_, &(class, _)) = self.entries.first_key_value()?;
        // The oldest of all is the oldest of its class.
        self.take(class)
    }

    /// Takes all buffers, the oldest first.
    pub(super) fn drain(&mut self) -> Vec<Box<Entry<T>>> {
        std::iter::from_fn(|| self.evict()).collect()
    }

    pub(super) fn count_of(&self, class: usize) -> u64 {
        self.classes.get(&class).map_or(0, |puts| puts.len() as u64)
    }

    pub(super) fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn it_does_what_a_plain_vector_does(steps in prop::collection::vec((0..18, 0..6_usize), 1..if cfg!(miri) { 40 } else { 200 })) {
            let mut store = OrderedStore::new();
            let mut model: Vec<(usize, usize)> = Vec::new();
            for (number, (step, class)) in steps.into_iter().enumerate() {
                match step {
                    0..8 => {
                        store.put(class, Entry::new(0, 10, number));
                        model.push((class, number));
                    }
                    8..14 => {
                        let at = model.iter().position(|&(other, _)| other == class);
                        prop_assert_eq!(store.take(class).map(|entry| **entry), at.map(|at| model.remove(at).1));
                    }
                    14..17 => {
                        let oldest = (!model.is_empty()).then(|| model.remove(0).1);
                        prop_assert_eq!(store.evict().map(|entry| **entry), oldest);
                    }
                    _ => {
                        let drained: Vec<_> = store.drain().into_iter().map(|entry| **entry).collect();
                        prop_assert_eq!(drained, model.drain(..).map(|(_, item)| item).collect::<Vec<_>>());
                    }
                }
                let of_class = model.iter().filter(|&&(other, _)| other == class).count();
                prop_assert_eq!((store.count_of(class), store.len()), (of_class as u64, model.len() as u64));
                prop_assert_eq!(store.bytes(), 10 * store.len());
                prop_assert!(store.classes.len() <= 2 * model.len() + LEFTOVERS + 1);
            }
        }
    }

    #[test]
    fn every_thousandth_eviction_is_a_check() {
        let mut limit = CountLimit::new(5, true);
        let checks = |limit: &mut CountLimit, evictions, counts| {
            (0..evictions).filter_map(|_| limit.count_eviction(|| counts)).collect::<Vec<_>>()
        };
        let counts = Counts { hits: 9_000, puts: 10_000, ..Counts::default() };
        assert_eq!(checks(&mut limit, 999, counts), []);
        // No misses: the limit stays, and so does the window.
        let window = RateWindow { get_from_pool: 9_000, put: 10_000, allocated: 0, evicted: 1_000 };
        assert_eq!(checks(&mut limit, 1, counts), [RateCheck { window, limit: 5, raised_to: None }]);
        limit.counted.allocated += 500;
        let window = RateWindow { allocated: 500, evicted: 2_000, ..window };
        assert_eq!(checks(&mut limit, 1_999, counts), [RateCheck { window, limit: 5, raised_to: Some(100) }]);
        assert_eq!((limit.get(), limit.checks, limit.raises), (100, 2, 1));
        // A window of 999 evictions ends without a check.
        limit.begin_window(counts);
        assert_eq!(checks(&mut limit, 999, counts), []);
        assert_eq!(checks(&mut limit, 1, counts).len(), 1);
        let mut stats = Stats::default();
        limit.fill(&mut stats, counts);
        assert_eq!((stats.requests.served, stats.requests.returned), (9_500, 10_000));
        assert_eq!(limit.window(counts), RateWindow { evicted: 1_000, ..RateWindow::default() });
    }
}
