//! A clock that costs a caller little, and what its ticks mean.
//!
//! On x86-64 with a counter that runs at one rate on all cores (the kernel's `constant_tsc` and `nonstop_tsc`) a tick is one of
//! that counter, elsewhere a nanosecond of the system's clock. The writer reads both clocks now and then and computes times
//! between two such readings.

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

/// The times of ticks: a line through the last two readings of both clocks.
#[derive(Debug)]
pub(super) struct Timeline {
    ticks: Ticks,
    /// Ticks and nanoseconds.
    before: (u64, u64),
    now: (u64, u64),
}

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
        let now = both(&ticks);
        Self { ticks, before: now, now }
    }

    /// Reads both clocks.
    pub(super) fn read(&mut self) {
        let now = both(&self.ticks);
        // A short line would be a steep one by chance.
        if now.1.saturating_sub(self.now.1) >= 1_000_000 {
            self.before = self.now;
            self.now = now;
        }
    }

    /// The time of a tick, in nanoseconds.
    pub(super) fn time_ns(&self, tick: u64) -> u64 {
        let ((tick0, ns0), (tick1, ns1)) = (self.before, self.now);
        if !self.ticks.is_counter {
            return tick;
        }
        let (ticks, ns) = (i128::from(tick1) - i128::from(tick0), i128::from(ns1) - i128::from(ns0));
        if ticks <= 0 {
            return ns1;
        }
        let time = i128::from(ns0) + (i128::from(tick) - i128::from(tick0)) * ns / ticks;
        u64::try_from(time.max(0)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_lies_on_the_line_through_two_readings() {
        let ticks = Ticks { begun: Instant::now(), is_counter: true };
        let line = Timeline { ticks, before: (1_000, 500), now: (3_000, 1_500) };
        assert_eq!([1_000, 2_000, 3_000, 5_000, 0].map(|tick| line.time_ns(tick)), [500, 1_000, 1_500, 2_500, 0]);
        let line = Timeline { ticks, before: (7, 9), now: (7, 9) };
        assert_eq!(line.time_ns(1), 9);
    }
}
