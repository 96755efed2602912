//! Decides whether sizes vary, and how long a hole is wanted (policy-R12). Works on numbers only.
//!
//! ```text
//!   a buffer returns: its size joins the ghosts             [ 4 MiB, 7 MiB, 4 MiB, 9 MiB ]  at most the bytes of the holes
//!   a miss for 7 MiB: there is a ghost of 7 MiB             the size recurs: no hole is wanted
//!   a miss for 8 MiB: no ghost, although memory is free     a hole of 8 MiB is wanted, for half a minute or more
//!   three such misses or more                               sizes vary
//!   1,024 misses in a row that find a ghost                 sizes recur again
//! ```
//!
//! A ghost is the size of a returned buffer that would still be in one hole if no other buffer had been carved since. The ghosts
//! are the sizes of the newest returns, as many as fit in the bytes of all holes (as in the "ghost list" of ARC). If a miss finds
//! a ghost of its size, keeping the buffer would have made the miss a hit. If a miss finds no ghost although free and idle bytes
//! suffice, then keeping buffers of other sizes does not help, and merging them does.
//!
//! A plan that grows the arena commits more than its buffer needs. If this surplus would have served a later miss, the miss does
//! not count, because a program that is starting has not returned buffers of its sizes yet.
//!
//! The sizes of a program that changes from some fixed sizes to others can count as varied as well. Its large buffers are then
//! merged when they are returned, so each of its requests misses and finds a ghost. Many such misses in a row show that its sizes
//! recur.
//!
//! - **size-history-I1**: There are at most [`GHOSTS_MAX`] ghosts, and `ghost_bytes` is the sum of their sizes.

use std::collections::VecDeque;

const GHOSTS_MAX: usize = 128;

/// Sizes vary after at least this many misses without a ghost. Fewer are exceptions, such as the short batch at
/// the end of an epoch.
const WANTS_MIN: u64 = 3;

/// After this many misses in a row that found a ghost, sizes recur: each of these requests would have been a hit if its buffer
/// had been kept. Lower values make the replays of the 25 workloads worse.
const RECURRING_MISSES: u64 = 1024;

/// A size is remembered for at least this long, and at most twice as long.
const PERIOD_US: u64 = 30_000_000;

/// The most bytes that were committed are remembered for at least this long, and at most twice as long.
const HELD_PERIOD_US: u64 = 600_000_000;

/// The sizes of the buffers that returned to an arena, and the sizes of missed requests.
#[derive(Debug, Default)]
pub(crate) struct SizeHistory {
    /// Sizes of returned buffers, the newest last (the ghosts of the module documentation).
    ghosts: VecDeque<u64>,
    ghost_bytes: u64,
    /// Bytes that growths committed beyond what their buffers needed, less the bytes of later misses that were counted against
    /// them.
    surplus_bytes: u64,
    /// The largest size that missed without a ghost while memory was free in other sizes, and the number of these misses.
    wanted: RecentPeriods,
    wants: RecentPeriods,
    /// Number of misses that found a ghost since the last call of [`add_wanted`](Self::add_wanted).
    recurring: u64,
    /// The largest size that missed in the last 30 to 60 s.
    pub(crate) missed: RecentPeriods,
    /// The most bytes that were committed at a miss in the last 10 to 20 minutes.
    pub(crate) held: RecentPeriods<HELD_PERIOD_US>,
}

/// A number for the current period and one for the previous period. A period lasts `LONG_US` microseconds.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct RecentPeriods<const LONG_US: u64 = PERIOD_US> {
    period: u64,
    now: u64,
    before: u64,
}

impl<const LONG_US: u64> RecentPeriods<LONG_US> {
    fn at(mut self, now_us: u64) -> Self {
        // Another thread may already have passed a later time. The number then counts for the current period.
        let period = (now_us / LONG_US).max(self.period);
        if period > self.period {
            self = Self { period, now: 0, before: if period == self.period + 1 { self.now } else { 0 } };
        }
        self
    }

    fn record_largest(&mut self, number: u64, now_us: u64) {
        *self = self.at(now_us);
        self.now = self.now.max(number);
    }

    fn count(&mut self, now_us: u64) {
        *self = self.at(now_us);
        self.now += 1;
    }

    pub(crate) fn largest(self, now_us: u64) -> u64 {
        let Self { now, before, .. } = self.at(now_us);
        now.max(before)
    }

    fn counted(self, now_us: u64) -> u64 {
        let Self { now, before, .. } = self.at(now_us);
        now + before
    }
}

impl SizeHistory {
    /// Records that a buffer of `bytes` returned. `hole_bytes` is the size of all holes, including this buffer.
    pub(crate) fn add_return(&mut self, bytes: u64, hole_bytes: u64) {
        self.ghosts.push_back(bytes);
        self.ghost_bytes += bytes;
        while self.ghost_bytes > hole_bytes || self.ghosts.len() > GHOSTS_MAX {
            let Some(oldest) = self.ghosts.pop_front() else { break };
            self.ghost_bytes -= oldest;
        }
    }

    /// Records that a growth plan committed `bytes` beyond what its buffer needs. These bytes are for the next misses.
    pub(crate) fn add_growth(&mut self, bytes: u64) {
        self.surplus_bytes += bytes;
    }

    /// Records that a request for `bytes` missed while `held_bytes` were committed. Returns true if the miss is no sign
    /// of varied sizes: a buffer of this size has returned, or a growth committed the bytes in advance.
    pub(crate) fn add_miss(&mut self, bytes: u64, held_bytes: u64, now_us: u64) -> bool {
        self.missed.record_largest(bytes, now_us);
        self.held.record_largest(held_bytes, now_us);
        if let Some(newest) = self.ghosts.iter().rposition(|&ghost| ghost == bytes) {
            self.ghosts.remove(newest);
            self.ghost_bytes -= bytes;
            self.recurring += 1;
            if self.recurring >= RECURRING_MISSES {
                (self.wanted, self.wants) = (RecentPeriods::default(), RecentPeriods::default());
            }
            return true;
        }
        let grows = self.surplus_bytes >= bytes;
        self.surplus_bytes -= if grows { bytes } else { 0 };
        grows
    }

    /// Records a miss of a size that does not recur, although free and idle memory would have sufficed in one piece.
    pub(crate) fn add_wanted(&mut self, bytes: u64, now_us: u64) {
        self.wanted.record_largest(bytes, now_us);
        self.wants.count(now_us);
        self.recurring = 0;
    }

    /// Returns the largest size that was wanted in the last 30 to 60 s, or 0 if there were too few such misses.
    pub(crate) fn wanted_bytes(&self, now_us: u64) -> u64 {
        if self.wants.counted(now_us) < WANTS_MIN { 0 } else { self.wanted.largest(now_us) }
    }

    /// Recounts size-history-I1.
    ///
    /// # Errors
    ///
    /// A message with the numbers if the invariant is violated.
    #[cfg(test)]
    pub(crate) fn validate(&self) -> Result<(), String> {
        let bytes: u64 = self.ghosts.iter().sum();
        if bytes != self.ghost_bytes || self.ghosts.len() > GHOSTS_MAX {
            let count = self.ghosts.len();
            return Err(format!("size-history-I1: {count} ghosts of {bytes} bytes, {} are counted", self.ghost_bytes));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_size_recurs_once_for_each_buffer_of_it_that_came_back() {
        let mut history = SizeHistory::default();
        history.add_return(4 * MIB, 100 * MIB);
        history.add_return(7 * MIB, 100 * MIB);
        history.add_return(4 * MIB, 100 * MIB);
        let recurs = [4, 5, 4, 4, 7, 7].map(|mib| history.add_miss(mib * MIB, 0, 0));
        assert_eq!(recurs, [true, false, true, false, true, false]);
        assert_eq!((history.ghost_bytes, history.missed.largest(0)), (0, 7 * MIB));
    }

    #[test]
    fn ghosts_are_no_more_than_the_holes_could_hold() {
        let mut history = SizeHistory::default();
        (1..=4).for_each(|mib| history.add_return(mib * MIB, 7 * MIB));
        assert_eq!([1, 2, 3, 4].map(|mib| history.add_miss(mib * MIB, 0, 0)), [false, false, true, true]);
        // A buffer may be returned and carved again before it is counted, so it may be larger than all holes.
        history.add_return(9 * MIB, 8 * MIB);
        assert!(!history.add_miss(9 * MIB, 0, 0));
        (0..1000).for_each(|_| history.add_return(4096, u64::MAX));
        assert_eq!(history.ghosts.len(), GHOSTS_MAX);
        history.validate().unwrap();
    }

    #[test]
    fn what_is_wanted_is_forgotten_after_half_a_minute_to_a_minute() {
        let mut history = SizeHistory::default();
        let want = |history: &mut SizeHistory, mib: u64, now_us: u64| {
            (0..4).for_each(|_| history.add_wanted(mib * MIB, now_us))
        };
        want(&mut history, 8, 29_000_000);
        want(&mut history, 3, 31_000_000);
        assert_eq!([31, 59, 60, 89, 90].map(|second| history.wanted_bytes(second * 1_000_000) / MIB), [8, 8, 3, 3, 0]);
        // A late reading of the clock counts for the current half minute.
        want(&mut history, 5, 61_000_000);
        want(&mut history, 6, 20_000_000);
        assert_eq!(history.wanted_bytes(119_000_000), 6 * MIB);
        assert_eq!(history.wanted_bytes(u64::MAX), 0);
    }

    #[test]
    fn what_was_held_is_forgotten_after_ten_to_twenty_minutes() {
        let mut history = SizeHistory::default();
        history.add_miss(MIB, 900 * MIB, 599_000_000);
        history.add_miss(MIB, 300 * MIB, 601_000_000);
        let held = [601, 1199, 1200, 1799, 1800].map(|second| history.held.largest(second * 1_000_000) / MIB);
        assert_eq!(held, [900, 900, 300, 300, 0]);
    }

    #[test]
    fn few_wants_in_a_minute_are_exceptions() {
        let mut history = SizeHistory::default();
        (0..10).for_each(|minute| history.add_wanted(8 * MIB, minute * 60_000_000));
        assert_eq!(history.wanted_bytes(540_000_000), 0);
        (0..2).for_each(|_| history.add_wanted(8 * MIB, 541_000_000));
        assert_eq!([541, 599].map(|second| history.wanted_bytes(second * 1_000_000)), [8 * MIB, 8 * MIB]);
    }

    #[test]
    fn sizes_recur_again_after_many_misses_in_a_row_that_find_a_ghost() {
        let mut history = SizeHistory::default();
        let miss_and_return = |history: &mut SizeHistory, times: u64| {
            (0..times).for_each(|_| {
                history.add_return(MIB, 100 * MIB);
                assert!(history.add_miss(MIB, 0, 0));
            });
        };
        for _ in 0..2 {
            (0..WANTS_MIN).for_each(|_| history.add_wanted(8 * MIB, 0));
            miss_and_return(&mut history, RECURRING_MISSES - 1);
            history.add_wanted(8 * MIB, 0);
            miss_and_return(&mut history, RECURRING_MISSES - 1);
            assert_eq!(history.wanted_bytes(0), 8 * MIB, "a want restarts the count");
            miss_and_return(&mut history, 1);
            assert_eq!(history.wanted_bytes(0), 0);
        }
    }

    #[test]
    fn misses_that_a_growth_committed_for_do_not_count() {
        let mut history = SizeHistory::default();
        history.add_growth(10 * MIB);
        assert_eq!([4, 8, 4, 2, 1].map(|mib| history.add_miss(mib * MIB, 0, 0)), [true, false, true, true, false]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }) })]

        /// Compares the ghosts with a list that is searched and summed afresh at each step.
        #[test]
        fn ghosts_equal_a_plain_list(ops in prop::collection::vec((any::<bool>(), 1..6u64, 0..20u64), 0..400)) {
            let mut history = SizeHistory::default();
            let mut list = Vec::<u64>::new();
            for (is_given, bytes, hole_bytes) in ops {
                if is_given {
                    history.add_return(bytes, hole_bytes);
                    list.push(bytes);
                    while list.iter().sum::<u64>() > hole_bytes || list.len() > GHOSTS_MAX {
                        list.remove(0);
                    }
                } else {
                    let newest = list.iter().rposition(|&ghost| ghost == bytes);
                    prop_assert_eq!(history.add_miss(bytes, 0, 0), newest.is_some());
                    newest.map(|at| list.remove(at));
                }
                prop_assert_eq!(&history.ghosts, &list);
                prop_assert!(history.validate().is_ok());
            }
        }
    }
}
