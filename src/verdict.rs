//! Whether a pool has found its size: steady, growing or thrashing. Numbers in, a word out; reads no clock.
//!
//! | verdict | in a window of 10 s and 20 gets or more |
//! | --- | --- |
//! | thrashing, for lack of bytes | more than 2 of 1000 gets found no memory under the ceiling at once |
//! | thrashing, by time | as much memory was pinned and as much released as is held |
//! | thrashing, for lack of buffers | under `tensorflow`, more than 2 of 1000 gets missed and of puts evicted |
//! | growing | more is held, by a sixteenth, than in any window before |
//! | steady | none of these |
//!
//! Thrashing ends after a minute without it, and twice as long each time that it has come back: a pool that goes back and forth
//! does not repeat itself.

use std::fmt;

/// Length of a window, at least.
const WINDOW_US: u64 = 10_000_000;
/// Gets of a window, at least: fewer show no rate.
const GETS_MIN: u64 = 20;
/// More than one part in this many is not tolerable: TensorFlow's rate of 0.002.
const TOLERABLE_PART: u64 = 500;
/// Growth by less than one part in this many is none.
const GROWTH_PART: u64 = 16;
/// A need that is larger by one part in this many is reported again.
const RAISE_PART: u64 = 8;
/// Thrashing is over after this long without it.
const CALM_US: u64 = 60_000_000;
/// Doublings of that time at most.
const RETURNS_MAX: u32 = 12;

/// Counts of a pool since it was made, and what it holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) gets: u64,
    pub(crate) misses: u64,
    pub(crate) puts: u64,
    pub(crate) evicted: u64,
    /// Gets that found no memory at once.
    pub(crate) short_gets: u64,
    /// What was pinned and released for this pool alone; 0 for a partition, of which that is not known.
    pub(crate) pinned_bytes: u64,
    pub(crate) unpinned_bytes: u64,
    pub(crate) held_bytes: u64,
    /// Idle buffers that it may keep, where an eviction is a release.
    pub(crate) pool_size_limit: Option<u64>,
    /// The most that was in use and asked for at one time, since the last window, while memory was short.
    pub(crate) needed_bytes: u64,
}

/// A word for what a pool does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Steady { gets: u64, misses: u64, held_bytes: u64 },
    Growing { from_bytes: u64, to_bytes: u64 },
    Thrashing(Lack),
}

/// What thrashing lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// Room under the ceiling, by the name of its setting.
    Bytes { limit: &'static str, needed_bytes: u64, short_gets: u64, gets: u64 },
    /// Memory of the system, where no ceiling makes idle memory go back for gets.
    Memory { short_gets: u64, gets: u64 },
    /// Time before idle memory goes back.
    Time { pinned_bytes: u64, held_bytes: u64 },
    /// Idle buffers that may be kept.
    Buffers { needed: u64, misses: u64, gets: u64 },
}

/// The verdict so far.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    last_us: u64,
    last: Sample,
    most_held_bytes: u64,
    verdict: Option<Verdict>,
    thrashed_us: u64,
    /// Times that thrashing came back.
    returns: u32,
}

impl Judge {
    /// Whether a window may be over.
    pub(crate) fn is_due(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.last_us) >= WINDOW_US
    }

    /// Gets at the end of the last window.
    pub(crate) fn gets(&self) -> u64 {
        self.last.gets
    }

    /// Looks at the pool at `now_us`. The verdict, if it has changed; `limit` is what to raise for more bytes, if there is one.
    pub(crate) fn look(&mut self, now_us: u64, now: Sample, limit: Option<&'static str>) -> Option<Verdict> {
        if !self.is_due(now_us) || now.gets.saturating_sub(self.last.gets) < GETS_MIN {
            return None;
        }
        let seen = self.judge(now, limit);
        (self.last_us, self.last) = (now_us, now);
        self.most_held_bytes = self.most_held_bytes.max(now.held_bytes);
        if !self.is_news(now_us, seen) {
            return None;
        }
        self.verdict = Some(seen);
        Some(seen)
    }

    fn judge(&self, now: Sample, limit: Option<&'static str>) -> Verdict {
        let since = |of: fn(&Sample) -> u64| of(&now).saturating_sub(of(&self.last));
        let (gets, misses, short_gets) = (since(|of| of.gets), since(|of| of.misses), since(|of| of.short_gets));
        let is_high = |part: u64, whole: u64| part > whole / TOLERABLE_PART;
        if is_high(short_gets, gets) {
            return Verdict::Thrashing(match limit {
                Some(limit) => Lack::Bytes { limit, needed_bytes: now.needed_bytes, short_gets, gets },
                None => Lack::Memory { short_gets, gets },
            });
        }
        let (evicted, puts) = (since(|of| of.evicted), since(|of| of.puts));
        if let Some(size_limit) = now.pool_size_limit
            && is_high(misses, gets)
            && is_high(evicted, puts)
        {
            return Verdict::Thrashing(Lack::Buffers { needed: size_limit + misses.min(evicted), misses, gets });
        }
        let (pinned_bytes, unpinned_bytes) = (since(|of| of.pinned_bytes), since(|of| of.unpinned_bytes));
        let held_bytes = now.held_bytes;
        if held_bytes > 0 && pinned_bytes >= held_bytes && unpinned_bytes >= held_bytes {
            return Verdict::Thrashing(Lack::Time { pinned_bytes, held_bytes });
        }
        let most_bytes = self.most_held_bytes;
        if held_bytes > most_bytes.saturating_add(most_bytes / GROWTH_PART) {
            return Verdict::Growing { from_bytes: self.last.held_bytes, to_bytes: held_bytes };
        }
        Verdict::Steady { gets, misses, held_bytes }
    }

    /// Whether `seen` is to be reported, beside what was reported last.
    fn is_news(&mut self, now_us: u64, seen: Verdict) -> bool {
        let was_thrashing = matches!(self.verdict, Some(Verdict::Thrashing(_)));
        match (self.verdict, seen) {
            (Some(Verdict::Thrashing(before)), Verdict::Thrashing(lack)) => {
                self.thrashed_us = now_us;
                lack.is_larger_than(before)
            }
            (_, Verdict::Thrashing(_)) => {
                let came_back = self.thrashed_us > 0;
                self.returns = (self.returns + u32::from(came_back)).min(RETURNS_MAX);
                self.thrashed_us = now_us;
                true
            }
            _ if was_thrashing => now_us.saturating_sub(self.thrashed_us) >= CALM_US << self.returns,
            (Some(Verdict::Steady { .. }), Verdict::Steady { .. })
            | (Some(Verdict::Growing { .. }), Verdict::Growing { .. }) => false,
            _ => true,
        }
    }
}

impl Lack {
    /// Whether more is needed, by enough to tell it.
    fn is_larger_than(self, before: Self) -> bool {
        let is_larger = |now: u64, before: u64| now > before.saturating_add(before / RAISE_PART);
        match (self, before) {
            (Self::Bytes { needed_bytes: now, .. }, Self::Bytes { needed_bytes: before, .. })
            | (Self::Buffers { needed: now, .. }, Self::Buffers { needed: before, .. }) => is_larger(now, before),
            (Self::Bytes { .. }, _) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Steady { gets, misses, held_bytes } => {
                write!(f, "steady: {misses} of {gets} gets missed, {} held", RoundedUp(held_bytes))
            }
            Self::Growing { from_bytes, to_bytes } => {
                write!(f, "growing: held {} -> {}", RoundedUp(from_bytes), RoundedUp(to_bytes))
            }
            Self::Thrashing(Lack::Bytes { limit, needed_bytes, short_gets, gets }) => write!(
                f,
                "thrashing: raise {limit} above {}: {short_gets} of {gets} gets found no memory at once",
                RoundedUp(needed_bytes)
            ),
            Self::Thrashing(Lack::Memory { short_gets, gets }) => write!(
                f,
                "thrashing: set PINPOOL_MAX_BYTES, so that gets release what is idle: the back-end refused {short_gets} of {gets} gets"
            ),
            Self::Thrashing(Lack::Time { pinned_bytes, held_bytes }) => write!(
                f,
                "thrashing: raise PINPOOL_IDLE_TIMEOUT or PINPOOL_MAX_IDLE_BYTES: {} were pinned and released to hold {}",
                RoundedUp(pinned_bytes),
                RoundedUp(held_bytes)
            ),
            Self::Thrashing(Lack::Buffers { needed, misses, gets }) => write!(
                f,
                "thrashing: raise PINPOOL_POOL_SIZE_LIMIT above {needed}: {misses} of {gets} gets missed what was evicted"
            ),
        }
    }
}

/// Bytes in GiB or MiB with one digit, never less than they are: a limit of so much suffices.
struct RoundedUp(u64);

impl fmt::Display for RoundedUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = if self.0 >= 1 << 30 { (1u128 << 30, "GiB") } else { (1 << 20, "MiB") };
        let tenths = (u128::from(self.0) * 10).div_ceil(unit);
        write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const LIMIT: &str = "PINPOOL_MAX_BYTES";

    /// Looks once in ten seconds at samples to which each window adds.
    struct Run {
        judge: Judge,
        now_us: u64,
        sample: Sample,
        limit: Option<&'static str>,
    }

    impl Run {
        fn new() -> Self {
            Self { judge: Judge::default(), now_us: 0, sample: Sample::default(), limit: Some(LIMIT) }
        }

        fn window(&mut self, change: impl FnOnce(&mut Sample)) -> Option<String> {
            self.now_us += WINDOW_US;
            self.sample.gets += 1000;
            self.sample.puts += 1000;
            change(&mut self.sample);
            self.judge.look(self.now_us, self.sample, self.limit).map(|verdict| verdict.to_string())
        }
    }

    #[test]
    fn a_pool_grows_and_is_steady_then_and_says_each_once() {
        let mut run = Run::new();
        assert_eq!(run.window(|of| of.held_bytes = GIB).unwrap(), "growing: held 0.0 MiB -> 1.0 GiB");
        assert_eq!(run.window(|of| of.held_bytes = 2 * GIB), None, "growing still");
        assert_eq!(run.window(|of| of.misses += 1).unwrap(), "steady: 1 of 1000 gets missed, 2.0 GiB held");
        // Back and forth below what it had before is no growth.
        for n in 0..1000 {
            assert_eq!(run.window(|of| of.held_bytes = GIB + n % 2 * GIB), None);
        }
        assert_eq!(run.window(|of| of.held_bytes = 3 * GIB).unwrap(), "growing: held 2.0 GiB -> 3.0 GiB");
    }

    #[test]
    fn without_a_ceiling_the_system_lacks_memory_and_a_ceiling_helps() {
        let mut run = Run { limit: None, ..Run::new() };
        let expected = "thrashing: set PINPOOL_MAX_BYTES, so that gets release what is idle: the back-end refused 300 of 1000 gets";
        assert_eq!(run.window(|of| of.short_gets += 300).unwrap(), expected);
    }

    #[test]
    fn a_lack_of_bytes_names_what_was_needed_rounded_up() {
        let mut run = Run::new();
        let short = |of: &mut Sample| {
            of.short_gets += 3;
            of.needed_bytes = 3 * GIB + 200 * (1 << 20);
        };
        let expected = "thrashing: raise PINPOOL_MAX_BYTES above 3.2 GiB: 3 of 1000 gets found no memory at once";
        assert_eq!(run.window(short).unwrap(), expected);
        assert_eq!(run.window(short), None);
        assert!(
            run.window(|of| {
                of.short_gets += 3;
                of.needed_bytes = 4 * GIB
            })
            .unwrap()
            .contains("above 4.0 GiB")
        );
        assert_eq!(run.window(|of| of.short_gets += 2), None, "tolerable, and not yet calm");
    }

    #[test]
    fn going_back_and_forth_is_told_ever_more_seldom() {
        let mut run = Run::new();
        let mut told = 0;
        // A day in which every second minute is short.
        for n in 0..8640 {
            let is_short = n / 6 % 2 == 0;
            told += u64::from(run.window(|of| of.short_gets += if is_short { 500 } else { 0 }).is_some());
        }
        assert!(told <= 4, "{told}");
    }

    #[test]
    fn few_gets_show_no_rate() {
        let mut judge = Judge::default();
        let sample = Sample { gets: GETS_MIN - 1, short_gets: 10, ..Sample::default() };
        assert_eq!(judge.look(WINDOW_US, sample, Some(LIMIT)), None);
        assert_eq!(
            judge.look(WINDOW_US - 1, Sample { gets: 100, ..sample }, Some(LIMIT)),
            None,
            "the window is not over"
        );
        let seen = judge.look(2 * WINDOW_US, Sample { gets: GETS_MIN, ..sample }, Some(LIMIT));
        assert!(matches!(seen, Some(Verdict::Thrashing(Lack::Bytes { short_gets: 10, .. }))), "they count later");
    }

    #[test]
    fn memory_that_goes_back_and_forth_and_buffers_that_are_evicted_too_early_are_thrashing() {
        let mut run = Run::new();
        run.window(|of| of.held_bytes = GIB);
        let again = |of: &mut Sample| {
            of.pinned_bytes += 2 * GIB;
            of.unpinned_bytes += 2 * GIB;
        };
        let text = "thrashing: raise PINPOOL_IDLE_TIMEOUT or PINPOOL_MAX_IDLE_BYTES: 2.0 GiB were pinned and released to hold 1.0 GiB";
        assert_eq!(run.window(again).unwrap(), text);
        let mut run = Run::new();
        run.sample.pool_size_limit = Some(100);
        let evict = |of: &mut Sample| {
            of.misses += 300;
            of.evicted += 250;
        };
        let text = "thrashing: raise PINPOOL_POOL_SIZE_LIMIT above 350: 300 of 1000 gets missed what was evicted";
        assert_eq!(run.window(evict).unwrap(), text);
    }
}
