//! The pseudorandom numbers of a seed, and the seeds of a run.

/// splitmix64: neighboring seeds give unrelated numbers.
#[derive(Debug, Clone)]
pub struct Draw(u64);

impl Draw {
    /// The numbers of this seed.
    pub fn of(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// The next number.
    #[allow(clippy::should_implement_trait)] // The numbers never end.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `end - 1`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// From `low` to `high`, both inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap()]
    }

    /// A random index into `weights`, with a probability proportional to its weight.
    pub fn weighted(&mut self, weights: &[u64]) -> usize {
        let mut left = self.below(weights.iter().sum());
        weights.iter().position(|&weight| left.checked_sub(weight).map(|rest| left = rest).is_none()).unwrap()
    }
}

/// The number in an environment variable, such as the first seed; `default` if it is unset.
pub fn number_from(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .map_or(default, |text| text.parse().unwrap_or_else(|error| panic!("{variable}={text}: {error}")))
}
