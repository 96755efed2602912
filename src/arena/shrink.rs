//! Giving idle granules back: by time (rule 9), or now, for a trim, under pressure, at the ceiling.

use super::plan::{Plan, Step};
use super::retain::{IdleRun, Retain};
use super::span::Span;
use super::{Arena, Growth};

impl Arena {
    /// What is due at `now_us` (rule 9): once each step of time a share of the granules that have been empty for the
    /// retain time, longest empty first.
    pub fn release_due(&mut self, now_us: u64) -> Option<Plan> {
        if now_us < self.next_release_us {
            return None;
        }
        let going = self.retain.going(&self.idle, self.granule_bytes(), now_us);
        if going.is_empty() {
            return None;
        }
        self.next_release_us = now_us + self.retain.step_us;
        self.release(going)
    }

    /// Idle granules, longest empty first, until what stays locked is at most `to_bytes` or nothing is idle.
    pub fn release_down_to(&mut self, to_bytes: u64) -> Option<Plan> {
        let leaving = self.figures.transit_bytes - self.locking_bytes;
        let locked = self.figures.locked_bytes - leaving;
        let going = self.oldest_idle(locked.saturating_sub(to_bytes));
        self.release(going.into_iter().map(|run| run.span).collect())
    }

    /// Changes when granules go.
    pub fn set_retain(&mut self, retain: Retain) {
        self.retain = retain;
    }

    fn granule_bytes(&self) -> Option<u64> {
        match self.growth {
            Growth::Granules(granule_bytes) => Some(granule_bytes),
            Growth::Regions => None,
        }
    }

    fn release(&mut self, mut going: Vec<Span>) -> Option<Plan> {
        // By address, so that neighbours that fell idle at different times go in one call.
        going.sort_unstable();
        let mut steps = Vec::new();
        for span in going {
            let mut runs = Vec::new();
            self.idle.within(span).for_each(|run| runs.push(run));
            for run in runs {
                self.leave(run);
                steps.push(Step::Release { span: run.span, since_us: run.since_us });
            }
        }
        (!steps.is_empty()).then_some(Plan { buffer: None, steps, idle_before: Vec::new() })
    }

    /// The longest empty idle runs that make up `bytes` (whole granules), or all there are.
    pub(super) fn oldest_idle(&self, bytes: u64) -> Vec<IdleRun> {
        let mut missing = bytes;
        let mut found = Vec::new();
        for IdleRun { span, since_us } in self.idle.oldest_first() {
            if missing == 0 {
                break;
            }
            let granule_bytes = self.granule_bytes().unwrap_or(span.bytes());
            let bytes = span.bytes().min(missing.next_multiple_of(granule_bytes));
            missing = missing.saturating_sub(bytes);
            found.push(IdleRun { span: Span::new(span.place(), bytes), since_us });
        }
        found
    }

    /// Takes an idle run out of the holes: from now on it is in transit.
    pub(super) fn leave(&mut self, run: IdleRun) {
        let Some(range) = self.range_of(run.span.place()) else { return };
        if let Some(hole) = self.holes[range.shelf as usize].around(run.span) {
            self.take(range.shelf, hole, run.span, |_| ());
            self.figures.transit_bytes += run.span.bytes();
        } else {
            debug_assert!(false, "{run:?} is not in a hole");
        }
    }
}
