//! Selects the diagnoses that are logged, and summarizes several windows.
//!
//! A new cause is logged, and an alarm with a recommended size that is 1/8 larger. The end of an alarm is logged after a minute
//! without it, and after twice as long each time that the alarm has returned, so that an alternating pool does not fill the log.

use std::collections::BTreeMap;

use super::window_diagnosis::{Cause, WindowDiagnosis};

/// A need that grows by 1/8 is reported again.
const RAISE_PART: u64 = 8;
/// An alarm has ended after this long without it.
const CALM_US: u64 = 60_000_000;
/// An alarm counts if at least 1/10 of the windows show it, or if it lost 1/100 of the time.
const ALARM_PART: usize = 10;
const LOST_PART: u64 = 100;
/// Maximum number of doublings of that time.
const RETURNS_MAX: u32 = 12;

/// The last report.
#[derive(Debug, Default)]
pub(super) struct LogFilter {
    reported: Option<(Cause, bool, u64)>,
    known: Vec<Cause>,
    /// Time of the last window with this cause.
    seen_us: u64,
    /// Times that a cause returned.
    returns: u32,
}

impl LogFilter {
    pub(super) fn should_log(&mut self, now_us: u64, seen: &WindowDiagnosis) -> bool {
        let Some((cause, was_alarm, size)) = self.reported else { return self.report(now_us, seen) };
        if cause == seen.cause {
            self.seen_us = now_us;
            let is_larger = seen.is_alarm && seen.size > size.saturating_add(size / RAISE_PART);
            let is_worse = seen.is_alarm && !was_alarm;
            return (is_larger || is_worse) && self.report(now_us, seen);
        }
        let for_us = now_us.saturating_sub(self.seen_us);
        let is_known = self.known.contains(&seen.cause);
        let is_new_alarm = seen.is_alarm && !was_alarm;
        let is_news = seen.is_alarm == was_alarm && !is_known;
        let patience_us = if is_new_alarm || is_news { 0 } else { CALM_US << self.returns };
        if for_us < patience_us {
            return false;
        }
        self.returns = (self.returns + u32::from(is_known)).min(RETURNS_MAX);
        self.report(now_us, seen)
    }

    fn report(&mut self, now_us: u64, seen: &WindowDiagnosis) -> bool {
        self.reported = Some((seen.cause, seen.is_alarm, seen.size));
        self.seen_us = now_us;
        if !self.known.contains(&seen.cause) {
            self.known.push(seen.cause);
        }
        true
    }
}

/// The diagnosis of several windows: a leak or stuck copy that is there at the end; else the alarm that lost most time, unless its
/// windows are few and lost little; else what was found most often, except a warm-up that has ended.
pub(super) fn summary(windows: &[&WindowDiagnosis]) -> Option<WindowDiagnosis> {
    let last = *windows.last()?;
    let ends = |cause| matches!(cause, Cause::Leak | Cause::StuckCopy);
    if ends(last.cause) {
        return Some(last.clone());
    }
    // Of each cause: windows, time lost, and the diagnosis with the largest need.
    let mut sums: BTreeMap<(bool, Cause), (usize, u64, &WindowDiagnosis)> = BTreeMap::new();
    for window in windows {
        let (times, lost_ns, most) = sums.entry((window.is_alarm, window.cause)).or_insert((0, 0, window));
        (*times, *lost_ns) = (*times + 1, *lost_ns + window.lost.total_ns());
        if window.size >= most.size {
            *most = window;
        }
    }
    let window_us: u64 = windows.iter().map(|window| window.lost.window_us).sum();
    let matters =
        |times: usize, lost_ns: u64| times * ALARM_PART >= windows.len() || lost_ns / 1000 >= window_us / LOST_PART;
    let alarms = sums
        .iter()
        .filter(|((is_alarm, cause), (times, lost_ns, _))| *is_alarm && !ends(*cause) && matters(*times, *lost_ns));
    let worst = alarms.max_by_key(|(_, (times, lost_ns, _))| (*lost_ns, *times));
    let usual = || {
        let is_past = |cause| cause == Cause::WarmingUp && last.cause != cause;
        let quiet = sums.iter().filter(|((is_alarm, _), _)| !is_alarm);
        quiet.max_by_key(|((_, cause), (times, ..))| (!is_past(*cause), *times))
    };
    let ((_, cause), (times, _, found)) = worst.or_else(usual)?;
    let mut diagnosis = (*found).clone();
    if diagnosis.is_alarm && *cause != last.cause {
        let (all, now) = (windows.len(), last.cause.name());
        diagnosis.found = format!("in {times} of the last {all} windows (now {now}): {}", diagnosis.found);
    }
    Some(diagnosis)
}
