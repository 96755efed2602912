//! Which judgements are worth a line of the log, and which one is that of a whole recording.
//!
//! A cause that is new is. An alarm that asks for more by an eighth is. The end of an alarm is after a minute without it, and twice
//! as long each time that it has come back: a pool that goes back and forth does not repeat itself.

#[cfg(feature = "io")]
use std::collections::HashMap;

use super::judgement::{Cause, Judgement};

/// A need that is larger by one part in this many is reported again.
const RAISE_PART: u64 = 8;
/// An alarm is over after this long without it.
const CALM_US: u64 = 60_000_000;
/// An alarm of fewer windows than one in this many is none of a recording.
#[cfg(feature = "io")]
const ALARM_PART: usize = 10;
/// Doublings of that time at most.
const RETURNS_MAX: u32 = 12;

/// What was reported last.
#[derive(Debug, Default)]
pub(super) struct News {
    reported: Option<(Cause, bool, u64)>,
    known: Vec<Cause>,
    /// When it was last as reported.
    seen_us: u64,
    /// Times that a cause came back.
    returns: u32,
}

impl News {
    pub(super) fn is_news(&mut self, now_us: u64, seen: &Judgement) -> bool {
        let Some((cause, was_alarm, size)) = self.reported else { return self.report(now_us, seen) };
        if cause == seen.cause {
            self.seen_us = now_us;
            let is_larger = seen.is_alarm && seen.size > size.saturating_add(size / RAISE_PART);
            let is_worse = seen.is_alarm && !was_alarm;
            return (is_larger || is_worse) && self.report(now_us, seen);
        }
        let for_us = now_us.saturating_sub(self.seen_us);
        let is_known = self.known.contains(&seen.cause);
        let patience_us = match (was_alarm, seen.is_alarm) {
            (false, true) => 0,
            (false, false) if !is_known => 0,
            (true, true) if !is_known => 0,
            _ => CALM_US << self.returns,
        };
        if for_us < patience_us {
            return false;
        }
        self.returns = (self.returns + u32::from(is_known)).min(RETURNS_MAX);
        self.report(now_us, seen)
    }

    fn report(&mut self, now_us: u64, seen: &Judgement) -> bool {
        self.reported = Some((seen.cause, seen.is_alarm, seen.size));
        self.seen_us = now_us;
        if !self.known.contains(&seen.cause) {
            self.known.push(seen.cause);
        }
        true
    }
}

/// A leak that was there at the end; else the alarm whose windows lost most, unless they are few; else what was seen most often, a
/// pool that warmed up and has ended that left out.
#[cfg(feature = "io")]
pub(super) fn worst(judgements: &[Judgement]) -> Option<&Judgement> {
    let last = judgements.last()?;
    if matches!(last.cause, Cause::Leak | Cause::StuckCopy) {
        return Some(last);
    }
    let mut sums: HashMap<Cause, (usize, u64, &Judgement)> = HashMap::new();
    for judgement in judgements {
        let sum = sums.entry(judgement.cause).or_insert((0, 0, judgement));
        let size = sum.2.size.max(judgement.size);
        *sum = (sum.0 + 1, sum.1 + judgement.lost.total_ns(), if judgement.size == size { judgement } else { sum.2 });
    }
    let alarms =
        sums.values().filter(|(windows, _, judgement)| judgement.is_alarm && windows * ALARM_PART >= judgements.len());
    let worst = alarms.max_by_key(|(windows, lost_ns, judgement)| (*lost_ns, *windows, judgement.cause));
    let usual = || {
        let is_past = |cause| cause == Cause::WarmingUp && last.cause != cause;
        let quiet = sums.values().filter(|(.., judgement)| !judgement.is_alarm);
        quiet.max_by_key(|(windows, _, judgement)| (!is_past(judgement.cause), *windows, judgement.cause))
    };
    worst.or_else(usual).map(|(.., judgement)| *judgement)
}
