//! Random changes to seeds, the same in every run.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Numbers at the limits of arithmetic, and words that parsers search for.
const TOKENS: [&[u8]; 20] = [
    b"0",
    b"-1",
    b"4096",
    b"4294967295",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"max",
    b"\n",
    b" ",
    b"=",
    b":",
    b"-",
    b",",
    b"/",
    b"\\040",
    b"#",
    b"\xFF",
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"KiB",
];

pub(crate) struct Changes {
    seeds: Vec<Vec<u8>>,
    most_bytes: usize,
    random: ChaCha8Rng,
}

impl Changes {
    pub(crate) fn new(seeds: Vec<Vec<u8>>, most_bytes: usize) -> Self {
        Self { seeds, most_bytes, random: ChaCha8Rng::seed_from_u64(1) }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.random_range(0..end.max(1))
    }

    fn seed(&mut self) -> Vec<u8> {
        let at = self.below(self.seeds.len());
        self.seeds[at].clone()
    }

    /// A part of `bytes`.
    fn part(&mut self, bytes: &[u8], longest: usize) -> std::ops::Range<usize> {
        let from = self.below(bytes.len() + 1);
        from..(from + self.below(longest + 1)).min(bytes.len())
    }

    /// A seed with one to eight changes.
    pub(crate) fn next_input(&mut self) -> Vec<u8> {
        let mut input = self.seed();
        for _ in 0..=self.below(8) {
            let at = self.below(input.len() + 1);
            match self.below(7) {
                0 if at < input.len() => input[at] ^= 1 << self.below(8),
                1 if at < input.len() => input[at] = self.random.next_u32().to_le_bytes()[0],
                2 => {
                    let part = self.part(&input, 16);
                    input.drain(part);
                }
                3 => {
                    let part = self.part(&input, 64);
                    let copy = input[part].to_vec();
                    input.splice(at..at, copy);
                }
                4 => {
                    let part = self.part(&input, 4);
                    input.splice(part, TOKENS[self.below(TOKENS.len())].iter().copied());
                }
                5 => {
                    let other = self.seed();
                    let part = self.part(&other, 256);
                    input.splice(at..at, other[part].iter().copied());
                }
                _ => input.truncate(input.len() - self.below(input.len() / 4 + 1)),
            }
        }
        input.truncate(self.most_bytes);
        input
    }
}
