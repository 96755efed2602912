//! Which region is the oldest that has room: the longest hole of each region, by age, under a tournament.
//!
//! ```text
//!  longest, as a binary tree      9
//!                             9       4
//!                           3   9   0   4
//!  ids, ascending           2   5   6   9     oldest with room for 4: 5, found from the root in O(log n)
//! ```
//!
//! Regions are numbered in the order in which they came, so the order of their numbers is that of their ages. A region
//! without a hole keeps its seat, at 0, until the seats run out: then those that have one move up.
//!
//! Invariants
//! - I1: `ids` ascend, and no more of them than seats (half of `longest`).
//! - I2: every inner node is the larger of its children; the leaf of a seat that is not taken is 0.

/// The longest hole of each region, by age.
#[derive(Clone, Default, Debug)]
pub(super) struct Elders {
    ids: Vec<u32>,
    /// Node 1 is the root, nodes 2n and 2n + 1 are the children of node n; the upper half are the leaves.
    longest: Vec<u64>,
}

impl Elders {
    /// The longest hole of region `id` is now of `bytes`; 0 if it has none.
    pub(super) fn set(&mut self, id: u32, bytes: u64) {
        match self.ids.binary_search(&id) {
            Ok(seat) => self.note(seat, bytes),
            Err(_) if bytes == 0 => {}
            Err(seat) if seat == self.ids.len() && seat < self.seats() => {
                self.ids.push(id);
                self.note(seat, bytes);
            }
            Err(_) => self.reseat(id, bytes),
        }
    }

    /// The oldest region that has a hole of `bytes` or more, and then the others, by age.
    pub(super) fn with_room(&self, bytes: u64) -> impl Iterator<Item = u32> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let seat = self.next_with(bytes, from)?;
            from = seat + 1;
            self.ids.get(seat).copied()
        })
    }

    fn seats(&self) -> usize {
        self.longest.len() / 2
    }

    fn note(&mut self, seat: usize, bytes: u64) {
        let mut node = self.seats() + seat;
        self.longest[node] = bytes;
        while node > 1 {
            node /= 2;
            self.longest[node] = self.longest[2 * node].max(self.longest[2 * node + 1]);
        }
    }

    /// The first seat from `from` on whose region has a hole of `bytes`: up until a subtree on the right has one, then
    /// down to its first leaf.
    fn next_with(&self, bytes: u64, from: usize) -> Option<usize> {
        if from >= self.seats() {
            return None;
        }
        let mut node = self.seats() + from;
        while self.longest[node] < bytes {
            // The last of its level: nothing lies on the right.
            if (node + 1).is_power_of_two() {
                return None;
            }
            node += 1;
            node >>= node.trailing_zeros();
        }
        while node < self.seats() {
            node = if self.longest[2 * node] >= bytes { 2 * node } else { 2 * node + 1 };
        }
        Some(node - self.seats())
    }

    /// Seats all regions that have a hole anew, and `id` among them. Half of the seats are free then, so it is rare.
    fn reseat(&mut self, id: u32, bytes: u64) {
        let leaves = self.longest.split_off(self.seats());
        let mut all: Vec<(u32, u64)> = self.ids.drain(..).zip(leaves).filter(|&(_, bytes)| bytes > 0).collect();
        let at = all.partition_point(|&(other, _)| other < id);
        all.insert(at, (id, bytes));
        let seats = (2 * all.len()).next_power_of_two();
        self.longest = vec![0; 2 * seats];
        for (seat, &(id, bytes)) in all.iter().enumerate() {
            self.ids.push(id);
            self.longest[seats + seat] = bytes;
        }
        for node in (1..seats).rev() {
            self.longest[node] = self.longest[2 * node].max(self.longest[2 * node + 1]);
        }
    }

    /// Recounts I1 and I2, and compares with `expected`: regions with a hole, and their longest.
    pub(super) fn validate(&self, expected: impl Iterator<Item = (u32, u64)>) -> Result<(), String> {
        let seats = self.seats();
        if self.ids.len() > seats || self.ids.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(format!("elders I1: {} seats for {:?}", seats, self.ids));
        }
        let is_larger = |node: usize| self.longest[node] == self.longest[2 * node].max(self.longest[2 * node + 1]);
        if !(1..seats).all(is_larger) || (self.ids.len()..seats).any(|seat| self.longest[seats + seat] != 0) {
            return Err(format!("elders I2: {:?}", self.longest));
        }
        let seated = self.ids.iter().enumerate().map(|(seat, &id)| (id, self.longest[seats + seat]));
        if !seated.filter(|&(_, bytes)| bytes > 0).eq(expected) {
            return Err("elders: the longest holes are others".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(elders: &Elders, bytes: u64) -> Vec<u32> {
        elders.with_room(bytes).collect()
    }

    #[test]
    fn the_oldest_with_room_comes_first() {
        let mut elders = Elders::default();
        assert_eq!(all(&elders, 1), [0_u32; 0]);
        for (id, bytes) in [(2, 3), (5, 9), (6, 2), (9, 4)] {
            elders.set(id, bytes);
        }
        assert_eq!(all(&elders, 4), [5, 9]);
        assert_eq!(all(&elders, 1), [2, 5, 6, 9]);
        assert_eq!(all(&elders, 10), [0_u32; 0]);
        elders.set(5, 0);
        assert_eq!(all(&elders, 3), [2, 9]);
        elders.validate([(2, 3), (6, 2), (9, 4)].into_iter()).unwrap();
    }

    #[test]
    fn regions_come_and_go_in_bounded_space() {
        let mut elders = Elders::default();
        for id in 0..10_000 {
            elders.set(id, 7);
            if id >= 3 {
                elders.set(id - 3, 0);
            }
        }
        assert_eq!(all(&elders, 7), [9997, 9998, 9999]);
        assert!(elders.seats() <= 16, "{}", elders.seats());
        elders.set(4, 8);
        assert_eq!(all(&elders, 7), [4, 9997, 9998, 9999], "a number that was used before");
        elders.validate([(4, 8), (9997, 7), (9998, 7), (9999, 7)].into_iter()).unwrap();
    }
}
