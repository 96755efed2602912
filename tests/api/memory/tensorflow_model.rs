//! Random operations under TensorFlow's rules, compared with a naive model after each step.

use std::collections::VecDeque;

use crate::fixture::over_sim;
use crate::valid_stats::valid_stats;
use pinpool::unstable::rate_window;
use pinpool::{Limit, PinnedBuf, Preset, Request, Rounding};
use proptest::prelude::*;

/// TensorFlow's rules in their plainest form: one list and four counters.
#[derive(Debug, Default)]
struct Naive {
    limit: u64,
    auto_resize: bool,
    /// Class and id, oldest first.
    idle: VecDeque<(usize, u64)>,
    next_id: u64,
    get_from_pool: u64,
    put: u64,
    allocated: u64,
    evicted: u64,
    raises: u64,
}

impl Naive {
    fn get(&mut self, class: usize) -> u64 {
        if let Some(at) = self.idle.iter().position(|&(other, _)| other == class) {
            self.get_from_pool += u64::from(self.limit > 0);
            return self.idle.remove(at).unwrap().1;
        }
        self.allocated += u64::from(self.limit > 0);
        self.next_id += 1;
        self.next_id - 1
    }

    fn put(&mut self, class: usize, id: u64) {
        if self.limit == 0 {
            return;
        }
        self.put += 1;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        // Evicts and raises the limit as TensorFlow does.
        while self.idle.len() as u64 >= self.limit {
            self.idle.pop_front();
            self.evicted += 1;
            let gets = (self.allocated + self.get_from_pool) as f64;
            let rates =
                [self.evicted as f64 / self.put as f64, if gets > 0.0 { self.allocated as f64 / gets } else { 0.0 }];
            if self.evicted.is_multiple_of(1000) && self.auto_resize && rates.iter().all(|&rate| rate > 0.002) {
                self.limit = if self.limit < 100 { 100 } else { (self.limit as f64 * 1.1) as u64 };
                self.raises += 1;
                (self.get_from_pool, self.put, self.allocated, self.evicted) = (0, 0, 0, 0);
            }
        }
        self.idle.push_back((class, id));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Get {
        len: usize,
        align: usize,
    },
    Put(usize),
    /// Many sizes that never repeat, which cause hundreds of evictions.
    Churn(usize),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![0..5_usize, 40..60_usize, 4070..4100_usize];
    prop_oneof![
        8 => (len, prop::sample::select(vec![1, 4, 16, 32, 64, 4096, 16384]))
            .prop_map(|(len, align)| Step::Get { len, align }),
        8 => (0..64_usize).prop_map(Step::Put),
        1 => (1..700_usize).prop_map(Step::Churn),
        1 => Just(Step::Clear),
    ]
}

fn class_of(len: usize, align: usize, rounding: Rounding) -> usize {
    let sum = len + if align > 16 { align } else { 0 } + 16;
    if rounding == Rounding::Pow2 { sum.next_power_of_two() } else { sum }
}

fn put(naive: &mut Naive, buffer: PinnedBuf, class: usize) {
    if let Some(id) = buffer.unstable_id() {
        naive.put(class, id);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 64 }, failure_persistence: None, ..Default::default() })]
    #[test]
    fn the_pool_does_what_the_naive_model_does(
        limit in prop_oneof![Just(0_u64), 1..8_u64, 95..105_u64],
        auto_resize in any::<bool>(),
        pow2 in any::<bool>(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let rounding = if pow2 { Rounding::Pow2 } else { Rounding::Exact };
        let auto_resize = auto_resize && limit > 0;
        let builder = over_sim(Limit::Auto).preset(Preset::TensorFlow).pool_size_limit(limit);
        let pool = builder.auto_resize(auto_resize).setting("rounding", rounding).build().unwrap();
        let mut naive = Naive { limit, auto_resize, ..Naive::default() };
        let mut held: Vec<(PinnedBuf, usize)> = Vec::new();
        let mut fresh_len = 10_000;
        for step in steps {
            match step {
                Step::Get { len, align } => {
                    let buffer = pool.get_with(Request::new(len).align(align)).unwrap();
                    prop_assert_eq!(buffer.len(), len);
                    prop_assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(align.max(4096)));
                    let class = class_of(len, align, rounding);
                    if len == 0 {
                        prop_assert_eq!(buffer.unstable_id(), None);
                    } else {
                        prop_assert_eq!(buffer.unstable_id(), Some(naive.get(class)));
                        prop_assert!(buffer.capacity() >= len && buffer.capacity() <= class);
                    }
                    held.push((buffer, class));
                }
                Step::Put(at) if !held.is_empty() => {
                    let (buffer, class) = held.swap_remove(at % held.len());
                    put(&mut naive, buffer, class);
                }
                Step::Put(_) => {}
                Step::Churn(count) => for _ in 0..count {
                    fresh_len += 1;
                    let buffer = pool.get(fresh_len).unwrap();
                    let class = class_of(fresh_len, 4, rounding);
                    prop_assert_eq!(buffer.unstable_id(), Some(naive.get(class)));
                    put(&mut naive, buffer, class);
                },
                Step::Clear => {
                    pool.clear();
                    naive.idle.clear();
                    (naive.get_from_pool, naive.put, naive.allocated, naive.evicted) = (0, 0, 0, 0);
                }
            }
            let stats = valid_stats(&pool);
            let window = rate_window(&pool);
            prop_assert_eq!(
                (window.get_from_pool, window.put, window.allocated, window.evicted, stats.limits.pool_size_limit),
                (naive.get_from_pool, naive.put, naive.allocated, naive.evicted, naive.limit)
            );
            prop_assert_eq!((stats.memory.idle, stats.limits.raises), (naive.idle.len() as u64, naive.raises));
        }
        drop(held);
        pool.clear();
        let stats = pool.stats();
        prop_assert_eq!(stats.memory.held_bytes, 0);
        prop_assert_eq!(stats.memory.pin.count, stats.memory.unpin.count);
    }
}
