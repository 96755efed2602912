//! The order of attempts of a get that missed, as a function of what was seen.
//!
//! ```text
//!  own idle blocks and holes would do ─▶ release the oldest of the pool                                  (policy-R6)
//!  a plan ─▶ carry it out ─refused─▶ once more: for this one buffer, or out of what is committed
//!  granules in transit ─▶ wait for their plan
//!  no room ─▶ sweep copies ─▶ release the oldest ─▶ release regions ─▶ refuse (policy-R8)
//! ```
//!
//! Knows no memory, and calls nothing. After every rung but the last the get looks at the memory again.
//!
//! - ladder-I1: no more blocks are released than were idle when the climb began, or when copies were swept for the first time.
//!   So a climb ends, whatever other threads put back meanwhile.
//! - ladder-I2: a get is refused for lack of room only after a sweep, and with no idle block left that would help.

/// What a round of a climb saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// Neither a hole nor an idle block of the size. Whether idle blocks of the pool and the holes together make one up.
    NoHole { is_covered: bool },
    /// The ceilings leave no room for a plan, or the addresses. Whether memory is in transit.
    NoPlan { in_transit: bool },
    /// Copies were swept. Whether the idle blocks make up what is lacking, and whether regions are free whose
    /// release waits for the device.
    Swept { idle_blocks: u64, is_enough: bool, has_regions: bool },
    /// The source refused a plan. Whether that was for more than this buffer.
    Refused { was_larger: bool },
}

/// The next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rung {
    /// Release the block of the pool that has been idle longest, and look again.
    ReleaseOwn,
    /// Commit or move memory by a plan.
    Plan,
    /// Wait until a plan of another thread is settled, and look again.
    Wait,
    /// Put back blocks whose copies are over.
    Sweep,
    /// Release the block that has been idle longest, whatever its size, and look again.
    ReleaseAny,
    /// From now on a plan may release regions, which waits for the device.
    ReleaseRegions,
    /// Look again.
    Retry,
    /// There is no memory.
    Refuse,
}

/// A climb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ladder {
    /// Idle blocks that may still be released.
    to_release: u64,
    has_swept: bool,
    may_release_regions: bool,
    /// The source has refused more than this one buffer.
    is_one_buffer: bool,
    /// The source has refused this one buffer: only committed memory can help.
    is_refused: bool,
}

impl Ladder {
    /// With `is_refused` only committed memory is used, as after a refusal by the source.
    pub(super) fn new(idle_blocks: u64, is_refused: bool) -> Self {
        Self { to_release: idle_blocks, has_swept: false, may_release_regions: false, is_one_buffer: false, is_refused }
    }

    /// Whether a plan is to be for this one buffer alone.
    pub(super) fn is_one_buffer(&self) -> bool {
        self.is_one_buffer
    }

    /// Whether a plan may commit memory.
    pub(super) fn may_commit(&self) -> bool {
        !self.is_refused
    }

    /// Whether a plan may release regions where that waits for the device: nothing else has served the get.
    pub(super) fn may_release_regions(&self) -> bool {
        self.may_release_regions || self.is_refused
    }

    /// What to do about what was `seen`.
    pub(super) fn next(&mut self, seen: Seen) -> Rung {
        match seen {
            Seen::NoHole { is_covered: true } if self.to_release > 0 => {
                self.to_release -= 1;
                Rung::ReleaseOwn
            }
            Seen::NoHole { .. } => Rung::Plan,
            Seen::NoPlan { in_transit: true } => Rung::Wait,
            Seen::NoPlan { in_transit: false } => Rung::Sweep,
            Seen::Swept { idle_blocks, is_enough, has_regions } => {
                if !std::mem::replace(&mut self.has_swept, true) {
                    self.to_release = idle_blocks;
                }
                if self.to_release > 0 && is_enough {
                    self.to_release -= 1;
                    Rung::ReleaseAny
                } else if has_regions && !std::mem::replace(&mut self.may_release_regions, true) {
                    Rung::ReleaseRegions
                } else {
                    Rung::Refuse
                }
            }
            // Two attempts are enough: what other threads put back meanwhile is found by waiting in line.
            Seen::Refused { .. } if self.is_refused => Rung::Refuse,
            Seen::Refused { was_larger: true } if !self.is_one_buffer => {
                self.is_one_buffer = true;
                Rung::Retry
            }
            Seen::Refused { .. } => {
                self.is_refused = true;
                Rung::Retry
            }
        }
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every climb of every length over every answer, from up to two idle blocks.
    fn sweep(ladder: Ladder, visit: &mut impl FnMut(Ladder, Seen, Rung, Ladder)) {
        let (mut known, mut next) = (BTreeSet::new(), vec![ladder]);
        while let Some(ladder) = next.pop() {
            if !known.insert(format!("{ladder:?}")) {
                continue;
            }
            for seen in all_seen() {
                let mut after = ladder;
                let rung = after.next(seen);
                visit(ladder, seen, rung, after);
                if rung != Rung::Refuse {
                    next.push(after);
                }
            }
        }
    }

    fn all_seen() -> Vec<Seen> {
        let flags = [false, true];
        let mut seen = flags.map(|is_covered| Seen::NoHole { is_covered }).to_vec();
        seen.extend(flags.map(|in_transit| Seen::NoPlan { in_transit }));
        seen.extend(flags.map(|was_larger| Seen::Refused { was_larger }));
        for idle_blocks in 0..3 {
            for is_enough in flags {
                seen.extend(flags.map(|has_regions| Seen::Swept { idle_blocks, is_enough, has_regions }));
            }
        }
        seen
    }

    /// What a climb has left before it ends: each part only falls, but for the blocks that a first sweep finds.
    fn left(ladder: &Ladder) -> (bool, bool, u64, bool, bool) {
        let &Ladder { to_release, has_swept, may_release_regions, is_one_buffer, is_refused } = ladder;
        (!may_release_regions, !has_swept, to_release, !is_one_buffer, !is_refused)
    }

    #[test]
    fn every_rung_but_a_plan_and_a_wait_uses_something_up() {
        for idle_blocks in 0..3 {
            sweep(Ladder::new(idle_blocks, false), &mut |before, seen, rung, after| {
                let is_free = matches!(rung, Rung::Plan | Rung::Wait | Rung::Sweep | Rung::Refuse);
                assert!(is_free || left(&after) < left(&before), "{before:?} {seen:?} {rung:?} {after:?}");
            });
        }
    }

    #[test]
    fn what_is_given_back_is_never_more_than_was_idle() {
        sweep(Ladder::new(2, false), &mut |before, seen, rung, after| match rung {
            Rung::ReleaseOwn => assert_eq!(after.to_release + 1, before.to_release, "{seen:?}"),
            Rung::ReleaseAny => {
                let Seen::Swept { idle_blocks, is_enough, .. } = seen else { panic!("{seen:?}") };
                let had = if before.has_swept { before.to_release } else { idle_blocks };
                assert_eq!((after.to_release + 1, is_enough), (had, true));
            }
            _ => {}
        });
    }

    #[test]
    fn a_get_is_refused_for_lack_of_room_when_nothing_else_is_left() {
        let mut refusals = 0;
        sweep(Ladder::new(1, false), &mut |before, seen, rung, after| {
            if rung != Rung::Refuse {
                return;
            }
            refusals += 1;
            match seen {
                Seen::Swept { is_enough, has_regions, .. } => {
                    assert!(!is_enough || after.to_release == 0, "{before:?}");
                    assert!(!has_regions || before.may_release_regions, "{before:?}");
                }
                Seen::Refused { .. } => assert!(before.is_refused),
                _ => panic!("{seen:?}"),
            }
        });
        assert!(refusals > 4);
    }

    #[test]
    fn own_blocks_come_before_a_plan_and_those_of_others_after_a_sweep() {
        let mut ladder = Ladder::new(1, false);
        assert_eq!(ladder.next(Seen::NoHole { is_covered: true }), Rung::ReleaseOwn);
        assert_eq!(ladder.next(Seen::NoHole { is_covered: true }), Rung::Plan);
        assert_eq!(ladder.next(Seen::NoPlan { in_transit: false }), Rung::Sweep);
        let swept = |idle_blocks, is_enough| Seen::Swept { idle_blocks, is_enough, has_regions: true };
        assert_eq!(ladder.next(swept(1, true)), Rung::ReleaseAny);
        assert!(!ladder.may_release_regions());
        assert_eq!(ladder.next(swept(1, true)), Rung::ReleaseRegions);
        assert!(ladder.may_release_regions());
        assert_eq!(ladder.next(swept(0, true)), Rung::Refuse);
    }

    #[test]
    fn a_refusal_of_more_than_a_buffer_leaves_two_attempts() {
        let mut ladder = Ladder::new(0, false);
        assert!(!ladder.is_one_buffer() && ladder.may_commit());
        assert_eq!(ladder.next(Seen::Refused { was_larger: true }), Rung::Retry);
        assert!(ladder.is_one_buffer() && ladder.may_commit());
        assert_eq!(ladder.next(Seen::Refused { was_larger: false }), Rung::Retry);
        assert!(!ladder.may_commit());
        assert_eq!(ladder.next(Seen::Refused { was_larger: false }), Rung::Refuse);
    }
}
