//! Percentiles of many short times: a count for each range of nanoseconds, exact to one part in 32.
//!
//! ```text
//!   ns     0 1 2 ... 31 | 32 33 ... 63 | 64-65 66-67 ... 126-127 | 128-131 ...
//! ```

/// Ranges in each doubling.
const STEPS: u64 = 32;
const RANGES: usize = 60 * 32;

/// How often times of each range were seen.
#[derive(Debug)]
pub(super) struct Histogram {
    counts: Box<[u64]>,
    total: u64,
    max_ns: u64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { counts: vec![0; RANGES].into(), total: 0, max_ns: 0 }
    }

    pub(super) fn add(&mut self, ns: u64) {
        if let Some(count) = self.counts.get_mut(range(ns)) {
            *count += 1;
        }
        self.total += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(here, there)| *here += there);
        self.total += other.total;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The longest time of the shortest `per_mille` of the total.
    pub(super) fn per_mille(&self, per_mille: u64) -> u64 {
        let wanted = (u128::from(self.total) * u128::from(per_mille)).div_ceil(1000);
        let mut seen = 0;
        let found = self.counts.iter().position(|&count| {
            seen += u128::from(count);
            seen >= wanted
        });
        found.map_or(self.max_ns, |range| longest(range).min(self.max_ns))
    }

    pub(super) fn max_ns(&self) -> u64 {
        self.max_ns
    }
}

fn range(ns: u64) -> usize {
    let doubling = (ns / STEPS).checked_ilog2().unwrap_or(0);
    usize::try_from(STEPS * u64::from(doubling) + (ns >> doubling)).unwrap_or(usize::MAX)
}

fn longest(range: usize) -> u64 {
    let range = range as u64;
    let doubling = (range / STEPS).saturating_sub(1);
    ((range - STEPS * doubling + 1) << doubling) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_falls_into_a_range_that_is_no_wider_than_a_32nd() {
        for ns in (0..100_000).chain([1 << 30, (1 << 40) + 12_345, u64::MAX / 2]) {
            let end = longest(range(ns));
            assert!(end >= ns && (end - ns) * STEPS <= ns, "{ns} in a range up to {end}");
            assert_eq!(range(end), range(ns));
            assert_eq!(range(end + 1), range(ns) + 1);
        }
        assert!(range(u64::MAX) < RANGES);
    }

    #[test]
    fn percentiles_of_a_known_row() {
        let (mut odd, mut all) = (Histogram::new(), Histogram::new());
        for ns in 1..=1000 {
            if ns % 2 == 1 { odd.add(ns) } else { all.add(ns) }
        }
        all.merge(&odd);
        assert!((500..=515).contains(&all.per_mille(500)), "{}", all.per_mille(500));
        assert!((990..=1000).contains(&all.per_mille(990)), "{}", all.per_mille(990));
        assert_eq!((all.per_mille(1000), all.max_ns()), (1000, 1000));
        assert_eq!(all.per_mille(1), 1);
    }
}
