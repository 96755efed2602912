//! A clock that costs a caller little, and what its ticks mean.
//!
//! On x86-64 with a counter that runs at one rate on all cores (the kernel's `constant_tsc` and `nonstop_tsc`) a tick is one of
//! that counter, elsewhere a nanosecond of the system's clock. The writer reads both clocks before each write and computes times
//! from these readings.
//!
//! By hand, since `quanta` takes half a millisecond to measure the rate of the counter when its first clock is made, and a recording
//! bends its times to the clock of the system anyway.

use std::collections::VecDeque;
use std::time::Instant;

/// Ticks, and how they were counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticks {
    begun: Instant,
    is_counter: bool,
}

impl Ticks {
    /// Begins at time 0 now.
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), is_counter: counter_is_steady() }
    }

    /// Now, in ticks.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        if self.is_counter { counter() } else { self.now_ns() }
    }

    /// Now, in nanoseconds.
    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[allow(unsafe_code)]
fn counter() -> u64 {
    // Without a fence, which would cost more than the rest of a record: a processor may read the counter some ten instructions
    // too early, and between the stamp of a put and the get of its buffer lie the rest of the record and two atomic exchanges.
    // SAFETY: every x86-64 has the instruction, and `counter_is_steady` found its rate in the kernel's list.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

/// Whether the counter can be taken for a clock.
fn counter_is_steady() -> bool {
    if !cfg!(target_arch = "x86_64") || cfg!(miri) {
        return false;
    }
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpus.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    ["constant_tsc", "nonstop_tsc"].iter().all(|needed| flags.split(' ').any(|flag| flag == *needed))
}

/// The times of ticks: a line that bends toward the system's clock each time that both clocks are read. It never falls and never
/// jumps, so records that lie in different writes, or were stamped by different threads, keep the order of their ticks.
#[derive(Debug)]
pub(super) struct Timeline {
    ticks: Ticks,
    /// Ticks and nanoseconds of the first reading: far from the last one, so that what a reading errs by counts for little.
    begun: (u64, u64),
    /// In their order. A time that was given stays: a bend lies behind the last tick that was asked for.
    bends: VecDeque<Bend>,
    /// The last tick that was asked for.
    asked: u64,
}

/// From this tick on, which is this time, so many nanoseconds pass in so many ticks.
#[derive(Debug, Clone, Copy)]
struct Bend {
    tick: u64,
    ns: u64,
    rise: (u64, u64),
}

/// Bends that are kept: a record is seldom taken much later than it was stamped.
const BENDS_MAX: usize = 256;
/// The line meets the clock so long after a reading.
const HORIZON_NS: u64 = 100_000_000;

/// Ticks and nanoseconds of one moment: of some readings the one whose two sides are nearest to each other, since the thread may
/// be stopped between two clocks.
fn both(ticks: &Ticks) -> (u64, u64) {
    let read = || {
        let (before, ns, after) = (ticks.now(), ticks.now_ns(), ticks.now());
        let width = after.saturating_sub(before);
        (width, (before + width / 2, ns))
    };
    let [one, two, three] = [read(), read(), read()];
    [two, three].into_iter().fold(one, |best, next| if next.0 < best.0 { next } else { best }).1
}

impl Timeline {
    pub(super) fn new(ticks: Ticks) -> Self {
        Self::begin(ticks, both(&ticks))
    }

    fn begin(ticks: Ticks, begun: (u64, u64)) -> Self {
        let first = Bend { tick: begun.0, ns: begun.1, rise: (1, 1) };
        Self { ticks, begun, bends: VecDeque::from([first]), asked: 0 }
    }

    /// Reads both clocks.
    pub(super) fn read(&mut self) {
        self.bend_to(both(&self.ticks));
    }

    /// Bends the line toward a reading of both clocks.
    fn bend_to(&mut self, now: (u64, u64)) {
        let (ticks, ns) = (now.0.saturating_sub(self.begun.0), now.1.saturating_sub(self.begun.1));
        if ticks == 0 || ns == 0 {
            return;
        }
        let ahead_ns = ns.min(HORIZON_NS);
        let aim = (now.0 + scaled(ahead_ns, ticks, ns), now.1 + ahead_ns);
        let last = self.bends[self.bends.len() - 1];
        let tick = self.asked.max(last.tick);
        let ns = last.time_ns(tick);
        if tick >= aim.0 {
            return;
        }
        self.bends.push_back(Bend { tick, ns, rise: (aim.0 - tick, aim.1.saturating_sub(ns).max(1)) });
        if self.bends.len() > BENDS_MAX {
            self.bends.pop_front();
        }
    }

    /// The time of a tick, in nanoseconds.
    pub(super) fn time_ns(&mut self, tick: u64) -> u64 {
        if !self.ticks.is_counter {
            return tick;
        }
        self.asked = self.asked.max(tick);
        let bend = self.bends.iter().rev().find(|bend| bend.tick <= tick).unwrap_or(&self.bends[0]);
        bend.time_ns(tick)
    }
}

impl Bend {
    fn time_ns(&self, tick: u64) -> u64 {
        let (ticks, ns) = self.rise;
        match tick.checked_sub(self.tick) {
            Some(after) => self.ns.saturating_add(scaled(after, ns, ticks)),
            None => self.ns.saturating_sub(scaled(self.tick - tick, ns, ticks)),
        }
    }
}

/// `value * numerator / denominator`.
fn scaled(value: u64, numerator: u64, denominator: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(numerator) / u128::from(denominator)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(begun: (u64, u64)) -> Timeline {
        Timeline::begin(Ticks { begun: Instant::now(), is_counter: true }, begun)
    }

    #[test]
    fn the_line_goes_through_exact_readings() {
        let mut line = timeline((1_000, 500));
        line.bend_to((3_000, 1_500));
        assert_eq!([1_000, 2_000, 3_000, 5_000, 0].map(|tick| line.time_ns(tick)), [500, 1_000, 1_500, 2_500, 0]);
        line.bend_to((5_000, 2_500));
        assert_eq!([5_000, 5_001, 7_000].map(|tick| line.time_ns(tick)), [2_500, 2_500, 3_500]);
    }

    #[test]
    fn a_line_of_one_reading_has_an_order() {
        let mut line = timeline((7, 9));
        line.bend_to((7, 9));
        assert_eq!([6, 7, 8, 20].map(|tick| line.time_ns(tick)), [8, 9, 10, 22]);
    }

    /// Readings err to both sides, and records are asked for late and out of order.
    #[test]
    fn no_reading_changes_the_order_of_ticks_nor_a_time_that_was_given() {
        let mut line = timeline((1 << 40, 77));
        let mut given = vec![(1 << 40, 77)];
        for (write, wrong_ns) in (1..400_u64).zip([40_000, 900, 3, 0].into_iter().cycle()) {
            let now = (1 << 40) + write * 3_000_000;
            line.bend_to((now, 77 + write * 1_000_000 + wrong_ns));
            // Ticks of the last write, of this one, and of one that comes while the queues are emptied.
            for tick in [now - 3_500_000, now - 1_000, now - 999, now - 10, now + 50_000, now + 20] {
                given.push((tick, line.time_ns(tick)));
            }
        }
        given.sort_unstable();
        assert!(given.is_sorted_by_key(|&(_, ns)| ns));
        for &(tick, ns) in &given[given.len() - 600..] {
            assert_eq!(line.time_ns(tick), ns);
        }
        let (tick, ns) = given[given.len() - 1];
        let true_ns = 77 + (tick - (1 << 40)) / 3;
        assert!(ns.abs_diff(true_ns) < 100_000, "{ns} of {true_ns}");
    }
}
