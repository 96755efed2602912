//! Selects the diagnoses that are logged, and summarizes several windows.
//!
//! An alarm is logged if its cause is new, if it is the first alarm after another diagnosis, or if its recommended size has
//! grown by more than 1/8. If no alarm is reported, a diagnosis with a new cause is logged. Other changes are logged after a
//! minute without the reported cause. Each time that a known cause is logged again, this time doubles, so that a pool that
//! alternates between two causes does not fill the log.

use super::window_diagnosis::{Cause, WindowDiagnosis};

/// A recommended size is logged again if it has grown by more than 1/8.
const RAISE_PART: u64 = 8;
/// A reported cause has ended after this much time without it.
const CALM_US: u64 = 60_000_000;
/// An alarm matters in a summary if at least 1/10 of the windows show it, or if it lost at least 1/100 of the time.
const ALARM_PART: usize = 10;
const LOST_PART: u64 = 100;
/// Maximum number of times that [`CALM_US`] is doubled.
const RETURNS_MAX: u32 = 12;

/// Decides which diagnoses are logged, based on the last one that was logged.
#[derive(Debug, Default)]
pub(super) struct LogFilter {
    reported: Option<(Cause, bool, u64)>,
    known: Vec<Cause>,
    /// Time of the last window with the reported cause.
    seen_us: u64,
    /// Number of times that a known cause was reported again.
    returns: u32,
}

impl LogFilter {
    pub(super) fn should_log(&mut self, now_us: u64, seen: &WindowDiagnosis) -> bool {
        let is_known = self.known.contains(&seen.cause);
        let logged = match self.reported {
            None => true,
            Some((cause, was_alarm, size)) if cause == seen.cause => {
                self.seen_us = now_us;
                seen.is_alarm && (!was_alarm || seen.size > size.saturating_add(size / RAISE_PART))
            }
            Some((_, was_alarm, _)) => {
                let is_news = if seen.is_alarm { !was_alarm || !is_known } else { !was_alarm && !is_known };
                let is_due = is_news || now_us.saturating_sub(self.seen_us) >= CALM_US << self.returns;
                self.returns = (self.returns + u32::from(is_due && is_known)).min(RETURNS_MAX);
                is_due
            }
        };
        if logged {
            self.reported = Some((seen.cause, seen.is_alarm, seen.size));
            self.seen_us = now_us;
            self.known.extend((!is_known).then_some(seen.cause));
        }
        logged
    }
}

/// Summarizes several windows. If the last window has a leak or a stuck copy, returns its diagnosis. Otherwise returns the
/// alarm that lost the most time, unless few windows show it and it lost little. Without such an alarm, returns the most
/// frequent diagnosis, but a warm-up that has ended only if there is no other. Among windows with equal causes, the one with
/// the largest recommended size is returned.
pub(super) fn summary(windows: &[&WindowDiagnosis]) -> Option<WindowDiagnosis> {
    let last = *windows.last()?;
    let ends = |cause| matches!(cause, Cause::Leak | Cause::StuckCopy);
    if ends(last.cause) {
        return Some(last.clone());
    }
    // Returns the number of windows with the same result, and the time that they lost.
    let all_of = |of: &WindowDiagnosis| {
        let alike = windows.iter().filter(|one| (one.is_alarm, one.cause) == (of.is_alarm, of.cause));
        alike.fold((0, 0), |(times, lost_ns), one| (times + 1, lost_ns + one.lost.total_ns()))
    };
    let window_us: u64 = windows.iter().map(|window| window.lost.window_us).sum();
    let alarms = windows.iter().filter(|one| {
        let (times, lost_ns) = all_of(one);
        let matters = times * ALARM_PART >= windows.len() || lost_ns / 1000 >= window_us / LOST_PART;
        one.is_alarm && !ends(one.cause) && matters
    });
    let worst = alarms.max_by_key(|one| (all_of(one).1, all_of(one).0, one.size));
    let quiet = windows.iter().filter(|one| !one.is_alarm);
    let is_past = |cause| cause == Cause::WarmingUp && last.cause != cause;
    let found = worst.or_else(|| quiet.max_by_key(|one| (!is_past(one.cause), all_of(one).0, one.size)))?;
    let mut diagnosis = WindowDiagnosis::clone(found);
    if diagnosis.is_alarm && diagnosis.cause != last.cause {
        let (times, all, now) = (all_of(found).0, windows.len(), last.cause.name());
        diagnosis.found = format!("in {times} of the last {all} windows (now {now}): {}", diagnosis.found);
    }
    Some(diagnosis)
}
