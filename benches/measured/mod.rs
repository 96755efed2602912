//! What the benches of the public pool share: the pool, what stands beside it, and who uses them how.
//!
//! Keepers, patterns and back-ends are those of `pinpool bench`; only the keeper that page-locks for each use is added.
#![allow(dead_code, unreachable_pub)] // Each bench takes its part.

#[path = "../../src/bin/pinpool/bench/keepers.rs"]
pub mod keepers;
#[path = "../../src/bin/pinpool/bench/patterns.rs"]
pub mod patterns;
mod pin_per_use;
#[path = "../../src/bin/pinpool/bench/sources.rs"]
pub mod sources;

use std::time::Duration;

use criterion::Criterion;
use pinpool::{Backend, Pool};

use keepers::{ArrayQueues, Empty, Keeper, Malloc, MutexHashMap};
use patterns::{Blind, Pattern};
pub use pin_per_use::PinPerUse;

/// About a second for each figure.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .without_plots()
}

/// The pool in its default configuration over plain memory, so that only the pool is timed, and everything beside it.
pub struct Side {
    pool: Pool,
    mutex_hashmap: MutexHashMap,
    array_queue: ArrayQueues,
    pin_per_use: Option<PinPerUse>,
}

impl Side {
    pub fn by_side() -> Self {
        Self {
            pool: sources::builder(Backend::Heap).build().expect("plain memory"),
            mutex_hashmap: MutexHashMap::default(),
            array_queue: ArrayQueues::default(),
            pin_per_use: PinPerUse::where_allowed(),
        }
    }

    /// Times a get with its put for each, in a group named after the pattern.
    pub fn measure(&self, criterion: &mut Criterion, pattern: Pattern, threads: usize) {
        let group = format!("{pattern:?}").to_lowercase();
        let mut course = Course { criterion, group: &group, pattern, threads };
        course.over("pool", &self.pool);
        course.over("mutex_hashmap", &self.mutex_hashmap);
        course.over("array_queue", &self.array_queue);
        course.over("malloc", &Malloc);
        if let Some(pin_per_use) = &self.pin_per_use {
            course.over("pin_per_use", pin_per_use);
        }
        course.over("empty", &Empty);
    }
}

/// A get that failed would be fast, and its figure worthless.
impl Drop for Side {
    fn drop(&mut self) {
        let stats = self.pool.stats();
        assert_eq!(
            (stats.failed_gets, stats.fallbacks),
            (0, 0),
            "gets of the pool that failed or were served elsewhere"
        );
    }
}

struct Course<'a> {
    criterion: &'a mut Criterion,
    group: &'a str,
    pattern: Pattern,
    threads: usize,
}

impl Course<'_> {
    fn over(&mut self, name: &str, keeper: &impl Keeper) {
        let (pattern, threads) = (self.pattern, self.threads);
        self.criterion.benchmark_group(self.group).bench_function(format!("{threads}/{name}"), |bencher| {
            bencher.iter_custom(|pairs| patterns::run(keeper, pattern, threads, pairs, || Blind).0);
        });
    }
}
