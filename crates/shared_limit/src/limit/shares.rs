//! Decides which members release memory while the members together want more than the limit. The functions only compute numbers.
//!
//! The *even level* divides the limit by max-min fairness: a member that holds and wants less than an even part gets all that it
//! wants, and the other members share the rest. A member above the level releases the memory that is returned to it if another
//! member has less, and claims nothing that an earlier want needs. A member below the level releases only idle memory, and claims
//! free memory. So if all members want more, each ends within one buffer of the level, and memory does not move back and forth.
//!
//! A request that needs more than the level would never be served while the other members use their parts. If such a request has
//! waited longest, the level of the other members is computed from the rest of the limit, so such requests are served in turn.

/// The bytes that a member holds and wants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    pub held_bytes: u64,
    pub wanted_bytes: u64,
    /// All bytes that the waiting request needs.
    pub needed_bytes: u64,
    /// The number of the event at which the member began to want memory, and the number of its slot, which decides between members
    /// with the same event.
    pub since: (u64, usize),
}

impl Demand {
    /// Returns the member's position in the order of waiting. A member that does not wait comes last.
    fn turn(&self) -> (u64, usize) {
        if self.wanted_bytes > 0 { self.since } else { (u64::MAX, usize::MAX) }
    }

    fn bytes(&self) -> u64 {
        self.held_bytes.saturating_add(self.wanted_bytes)
    }

    /// Records that a request or reserve of this member now wants `bytes` instead of `before_bytes`. If the member wanted nothing
    /// before, it waits since `now`.
    pub fn change_want(&mut self, before_bytes: u64, bytes: u64, needed_bytes: u64, now: (u64, usize)) {
        if self.wanted_bytes == 0 {
            self.since = now;
        }
        self.wanted_bytes = self.wanted_bytes.saturating_sub(before_bytes).saturating_add(bytes);
        self.needed_bytes = if bytes > 0 { needed_bytes } else { self.needed_bytes.min(self.wanted_bytes) };
    }
}

/// Returns how much of `room_bytes` the member `own` may use for a claim of `bytes` while `others` want memory.
pub fn claimable_bytes(own: &Demand, others: &[Demand], max_bytes: u64, room_bytes: u64, bytes: u64) -> u64 {
    let is_before = |other: &&Demand| other.turn() < own.turn();
    let before_bytes = others.iter().filter(is_before).map(|other| other.wanted_bytes).fold(0, u64::saturating_add);
    if before_bytes == 0 {
        return room_bytes;
    }
    let own = Demand { wanted_bytes: own.wanted_bytes.max(bytes), since: own.turn(), ..*own };
    let to_level_bytes = level(&own, others, max_bytes).0.saturating_sub(own.held_bytes);
    room_bytes.min(to_level_bytes).max(room_bytes.saturating_sub(before_bytes))
}

/// Returns whether the member `own` must release the memory that is returned to it while `others` lack room.
pub fn owes(own: &Demand, others: &[Demand], max_bytes: u64) -> bool {
    let (level_bytes, is_turn) = level(own, others, max_bytes);
    let has_less = |other: &Demand| other.wanted_bytes > 0 && other.bytes() < own.held_bytes;
    own.held_bytes > level_bytes && (is_turn || others.iter().any(has_less))
}

/// Returns the most that the member `own` may hold while the others want memory, and whether this level leaves room for a request
/// that needs more than the even level and is served next.
fn level(own: &Demand, others: &[Demand], max_bytes: u64) -> (u64, bool) {
    let even_bytes = even_level(own, others, max_bytes);
    let first = others.iter().min_by_key(|other| other.turn()).filter(|first| first.turn() < own.turn());
    let Some(first) = first.filter(|first| first.needed_bytes > even_bytes) else { return (even_bytes, false) };
    let rest: Vec<_> = others.iter().filter(|other| other.turn() != first.turn()).copied().collect();
    (even_level(own, &rest, max_bytes.saturating_sub(first.needed_bytes)), true)
}

fn even_level(own: &Demand, others: &[Demand], max_bytes: u64) -> u64 {
    let mut level_bytes = 0;
    // Each round finds the members at or below the level. The bytes that they leave raise the level of the other members.
    loop {
        let (mut above, mut rest_bytes) = (0_u64, max_bytes);
        for bytes in others.iter().chain([own]).map(Demand::bytes) {
            if bytes <= level_bytes {
                rest_bytes = rest_bytes.saturating_sub(bytes);
            } else {
                above += 1;
            }
        }
        match rest_bytes.checked_div(above) {
            None => return u64::MAX,
            Some(next_bytes) if next_bytes <= level_bytes => return level_bytes,
            Some(next_bytes) => level_bytes = next_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(held_bytes: u64) -> Demand {
        Demand { held_bytes, ..Demand::default() }
    }

    fn wants(held_bytes: u64, wanted_bytes: u64, since: u64) -> Demand {
        let slot = usize::try_from(since).unwrap();
        Demand { held_bytes, wanted_bytes, needed_bytes: wanted_bytes, since: (since, slot) }
    }

    #[test]
    fn who_wants_little_has_it_and_the_others_share_the_rest_evenly() {
        let level = |own: u64, others: &[u64]| {
            even_level(&holds(own), &others.iter().copied().map(holds).collect::<Vec<_>>(), 60)
        };
        assert_eq!(level(20, &[20, 20]), u64::MAX, "there is room for all");
        assert_eq!((level(56, &[14]), level(56, &[56]), level(56, &[56, 56])), (46, 30, 20));
        assert_eq!((level(10, &[40, 40]), level(10, &[5, 50]), level(50, &[0, 0, 0])), (25, 45, u64::MAX));
        assert_eq!(level(61, &[]), 60);
    }

    #[test]
    fn an_owner_above_the_level_gives_and_does_not_claim_it_back() {
        let other = [wants(0, 14, 1)];
        assert!(owes(&holds(56), &other, 64));
        assert_eq!(claimable_bytes(&holds(42), &other, 64, 22, 14), 8, "room beyond the want of the other");
        assert_eq!(claimable_bytes(&other[0], &[wants(42, 14, 2)], 64, 22, 14), 22);
        // After the other member was served:
        assert_eq!(claimable_bytes(&holds(42), &[holds(14)], 64, 8, 14), 8);
        assert!(!owes(&holds(42), &[holds(14)], 64));
    }

    #[test]
    fn members_at_the_level_keep_what_they_have() {
        let (own, other) = (wants(28, 14, 1), wants(28, 14, 2));
        assert!(!owes(&own, &[other], 64) && !owes(&other, &[own], 64));
        // The member that came first may claim a little more.
        assert_eq!((claimable_bytes(&own, &[other], 64, 8, 14), claimable_bytes(&other, &[own], 64, 8, 14)), (8, 4));
    }

    #[test]
    fn members_do_not_change_places() {
        let others = [wants(22, 7, 1), wants(16, 6, 2)];
        assert!(!owes(&wants(22, 7, 3), &others, 64), "the other member would have as much as this one");
        assert!(owes(&wants(30, 7, 3), &others, 64));
        // Four members have one buffer each, and there is no room for a fifth: they take turns.
        assert!(owes(&holds(14), &[holds(14); 3].into_iter().chain([wants(0, 14, 1)]).collect::<Vec<_>>(), 64));
    }

    #[test]
    fn two_members_that_exceed_the_limit_are_served_in_turn() {
        let other = wants(0, 50, 1);
        assert!(owes(&holds(50), &[other], 64));
        let own = wants(0, 50, 2);
        let claimable = |own: &Demand, other: Demand| claimable_bytes(own, &[other], 64, 64, 50);
        assert_eq!((claimable(&own, other), claimable(&other, own)), (14, 64));
        assert_eq!(claimable(&holds(0), other), 14, "a member that has not waited comes last");
        assert!(owes(&holds(50), &[own], 64) && owes(&holds(20), &[own], 64) && !owes(&holds(14), &[own], 64));
    }

    #[test]
    fn one_that_is_first_is_never_held_up_by_those_behind_it() {
        for held in [0, 10, 40] {
            let own = wants(held, 30, 1);
            assert_eq!(claimable_bytes(&own, &[wants(20, 50, 2), wants(0, 64, 3)], 64, 30, 30), 30);
        }
    }
}
