//! Observes the pool during a replay, evenly over its time and its requests.

use super::workload::Workload;
use pinpool::Pool;

/// Observes the pool of a replay at regular intervals.
pub struct Watch<'a> {
    every_us: u64,
    every_gets: u64,
    next_us: u64,
    next_gets: u64,
    see: &'a mut dyn FnMut(u64, &Pool),
}

impl std::fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("every_us", &self.every_us).finish_non_exhaustive()
    }
}

impl<'a> Watch<'a> {
    /// Calls `see` with the time in microseconds and the pool: at the first request, `times` times over the duration of `workload`
    /// and `times` times over its requests, and at the end.
    pub fn new(workload: &Workload, times: u64, see: &'a mut dyn FnMut(u64, &Pool)) -> Self {
        let every = |all: u64| (all / times.max(1)).max(1);
        let (every_us, every_gets) = (every(workload.duration_us()), every(workload.gets()));
        Self { every_us, every_gets, next_us: every_us, next_gets: 1, see }
    }

    pub(super) fn show(&mut self, pool: &Pool, now_us: u64, gets: u64, is_last: bool) {
        if !is_last && now_us < self.next_us && gets < self.next_gets {
            return;
        }
        (self.next_us, self.next_gets) = (now_us + self.every_us, gets + self.every_gets);
        (self.see)(now_us, pool);
    }
}
