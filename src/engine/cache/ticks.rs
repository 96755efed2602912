//! The ticks of a thread cache: which of its buffers were returned long ago.

use std::collections::VecDeque;

/// Ticks are at least this far apart.
pub(super) const TICK_US: u64 = 10_000;

/// The number of the current tick, and the times of the ticks before it.
///
/// A return on the fast path reads no clock. It belongs to the tick that began last, so all that is known of its time is that
/// the next tick began later. So a buffer is old enough only if the tick *after* its own is.
#[derive(Debug, Default)]
pub(super) struct Ticks {
    current: u64,
    /// When the current tick began, in units of [`TICK_US`].
    since: u64,
    /// Oldest first: a time in units of [`TICK_US`], and the tick before which all buffers were returned by that time.
    put_by: VecDeque<(u64, u64)>,
    /// The buffers of ticks before this one are old.
    old: u64,
}

impl Ticks {
    /// Begins a tick at `now_us`, unless the current tick began at that time or later; all buffers of the current tick were returned by
    /// `put_by_us`. `begin` gets the number of the tick and returns the one that has begun, which may be later.
    pub(super) fn begin(&mut self, now_us: u64, put_by_us: u64, begin: impl FnOnce(u64) -> u64) {
        let now = now_us / TICK_US;
        if self.current == 0 || now > self.since {
            self.since = now;
            self.current = begin(self.current + 1);
            self.put_by.push_back((put_by_us / TICK_US, self.current));
        }
    }

    /// The tick before which all buffers were returned at `us` or earlier.
    pub(super) fn all_put_by(&mut self, us: u64) -> u64 {
        while let Some(&(_, tick)) = self.put_by.front().filter(|(put_by, _)| *put_by <= us / TICK_US) {
            self.old = tick;
            self.put_by.pop_front();
        }
        self.old
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    /// Begins a tick; returns its number.
    fn begin(ticks: &mut Ticks, now_us: u64) -> Option<u64> {
        let mut begun = None;
        ticks.begin(now_us, now_us, |tick| *begun.insert(tick));
        begun
    }

    #[test]
    fn a_tick_ages_only_what_the_next_tick_proves_to_be_old() {
        let mut ticks = Ticks::default();
        assert_eq!(begin(&mut ticks, 0), Some(1));
        assert_eq!(ticks.all_put_by(0), 1, "buffers of tick 0 were put by then");
        // Puts of tick 1 may have come at any time up to the next reading of the clock.
        assert_eq!(begin(&mut ticks, 60_000_000), Some(2));
        assert_eq!(ticks.all_put_by(50_000_000), 1);
        assert_eq!(ticks.all_put_by(60_000_000), 2);
    }

    #[test]
    fn ticks_are_some_time_apart_and_a_late_reading_begins_none() {
        let mut ticks = Ticks::default();
        assert_eq!([70, 80, 2 * TICK_US, TICK_US].map(|now| begin(&mut ticks, now)), [Some(1), None, Some(2), None]);
        assert_eq!((ticks.all_put_by(TICK_US), ticks.all_put_by(u64::MAX)), (1, 2));
    }
}
