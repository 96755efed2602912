//! The count limit of a pool, the counts that it is checked against, and what raises and lowers it (policy-R4).

use super::thread_cache::Counts;
use crate::policy::{self, CHECK_EVERY_EVICTIONS, Check, Window};
use crate::stats::Stats;

#[derive(Debug, Default)]
pub(super) struct CountLimit {
    limit: u64,
    start_limit: u64,
    auto_resize: bool,
    /// All events but those that a thread cache counts.
    pub(super) counted: Window,
    /// Everything counted when the window began.
    window_start: Window,
    last_miss_us: u64,
    checks: u64,
    raises: u64,
    lowers: u64,
}

impl CountLimit {
    pub(super) fn new(limit: u64, auto_resize: bool) -> Self {
        Self { limit, start_limit: limit, auto_resize, ..Self::default() }
    }

    pub(super) fn get(&self) -> u64 {
        self.limit
    }

    fn total(&self, Counts { hits, puts, .. }: Counts) -> Window {
        let Window { get_from_pool, put, .. } = self.counted;
        Window { get_from_pool: get_from_pool + hits, put: put + puts, ..self.counted }
    }

    /// Counts an eviction. Every thousandth of a window checks its rates and may raise the limit.
    pub(super) fn count_eviction(&mut self, counts: impl FnOnce() -> Counts) -> Option<Check> {
        self.counted.evicted += 1;
        let evicted = self.counted.evicted - self.window_start.evicted;
        evicted.is_multiple_of(CHECK_EVERY_EVICTIONS).then(|| {
            let total = self.total(counts());
            let check = policy::check(total.since(self.window_start), self.limit, self.auto_resize);
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

    /// Lowers the limit if no miss has needed it for long. Returns the limit before.
    pub(super) fn lower(&mut self, now_us: u64) -> Option<u64> {
        let from = self.limit;
        self.limit = policy::lowered(from, self.start_limit, self.last_miss_us, now_us)?;
        // The next halving is a full quiet time away.
        self.last_miss_us = now_us;
        self.lowers += 1;
        Some(from)
    }

    /// TensorFlow's counters since the last raise or clear.
    pub(super) fn window(&self, counts: Counts) -> Window {
        self.total(counts).since(self.window_start)
    }

    pub(super) fn fill(&self, stats: &mut Stats, counts: Counts) {
        let total = self.total(counts);
        stats.requests.served += total.gets();
        stats.requests.hits += total.get_from_pool;
        stats.requests.misses += total.allocated;
        stats.requests.returned += total.put;
        stats.limits.max_idle_buffers = self.limit;
        stats.limits.checks = self.checks;
        stats.limits.raises = self.raises;
        stats.limits.lowers = self.lowers;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thousandth_eviction_of_a_window_is_a_check_and_a_raise_begins_a_window() {
        let mut limit = CountLimit::new(5, true);
        let checks = |limit: &mut CountLimit, evictions, counts| {
            (0..evictions).filter_map(|_| limit.count_eviction(|| counts)).collect::<Vec<_>>()
        };
        let counts = Counts { hits: 9_000, puts: 10_000, ..Counts::default() };
        assert_eq!(checks(&mut limit, 999, counts), []);
        // No misses: the limit stays, and so does the window.
        let window = Window { get_from_pool: 9_000, put: 10_000, allocated: 0, evicted: 1_000 };
        assert_eq!(checks(&mut limit, 1, counts), [Check { window, limit: 5, raised_to: None }]);
        limit.counted.allocated += 500;
        let window = Window { allocated: 500, evicted: 2_000, ..window };
        assert_eq!(checks(&mut limit, 1_999, counts), [Check { window, limit: 5, raised_to: Some(100) }]);
        assert_eq!((limit.get(), limit.checks, limit.raises), (100, 2, 1));
        // A window of 999 evictions ends without a check.
        limit.begin_window(counts);
        assert_eq!(checks(&mut limit, 999, counts), []);
        assert_eq!(checks(&mut limit, 1, counts).len(), 1);
        let mut stats = Stats::default();
        limit.fill(&mut stats, counts);
        assert_eq!((stats.requests.served, stats.requests.returned), (9_500, 10_000));
        assert_eq!(limit.window(counts), Window { evicted: 1_000, ..Window::default() });
    }
}
