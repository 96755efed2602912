//! Recently requested lengths.

use std::collections::HashSet;

/// Number of lengths in one generation. Two generations are remembered.
const GENERATION: usize = 1024;

/// Remembers at least the last thousand different lengths.
#[derive(Debug, Default)]
pub struct RecentLengths {
    now: HashSet<u64>,
    before: HashSet<u64>,
    last: Option<u64>,
}

impl RecentLengths {
    /// Remembers `len`. Returns whether it is new, which means that it was not requested recently.
    pub fn is_new(&mut self, len: u64) -> bool {
        // Most requests have the length of the previous request, which needs no hash.
        if self.last.replace(len) == Some(len) {
            return false;
        }
        if self.now.len() >= GENERATION {
            self.before = std::mem::take(&mut self.now);
        }
        self.now.insert(len) && !self.before.contains(&len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternating_lengths_are_known_and_others_are_new() {
        let mut recent = RecentLengths::default();
        let mut new = |lengths: &mut dyn Iterator<Item = u64>| lengths.filter(|&len| recent.is_new(len)).count();
        assert_eq!(new(&mut (0..1000).flat_map(|_| 1..=16)), 16);
        assert_eq!(new(&mut (100..10_100)), 10_000);
        assert_eq!(new(&mut (0..5).flat_map(|_| 20_000..21_000)), 1000);
        assert_eq!(new(&mut (1..=16)), 16, "requested long ago");
    }
}
