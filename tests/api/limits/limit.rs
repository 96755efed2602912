//! Many threads over a source that fails at random: the bytes that the source holds never exceed the limit, at any instant.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use pinpool::{OnFull, PinnedBuf, Pool};
use pinpool_replay::SimSource;
use pinpool_testing::{FaultSource, SourceCall};

use crate::draw::{Draw, number_from};
use crate::fixture::{Requests, each_sim, over};
use crate::until::until;
use crate::valid_stats::valid_stats;

const THREADS: u64 = 8;
/// Requests per thread; `LIMIT_GETS` overrides this number.
const GETS: u64 = 1_500;

const CALLS: [SourceCall; 3] = [SourceCall::Acquire, SourceCall::Release, SourceCall::Remap];

/// The indices of the calls that fail, by kind.
#[derive(Default)]
struct Failing([HashSet<u64>; 3]);

impl Failing {
    /// How many of these calls fail.
    fn count(&self, call: SourceCall, calls: Range<u64>) -> usize {
        calls.filter(|index| self.0[call as usize].contains(index)).count()
    }
}

/// Fails one call in 44 of each kind, and makes as many remaps fail halfway.
fn fail_some(source: &FaultSource, seed: u64) -> Failing {
    let (mut failing, mut draw) = (Failing::default(), Draw::of(seed));
    for index in 0..200_000 {
        let kind = usize::try_from(draw.below(44)).unwrap();
        match kind {
            0..3 => source.fail(CALLS[kind], index),
            3 => source.lose_remap(index),
            _ => continue,
        }
        failing.0[CALLS[kind.min(2)] as usize].insert(index);
    }
    failing
}

fn work(pool: &Pool, requests: &impl Requests, seed: u64, gets: u64) -> u64 {
    let mut draw = Draw::of(seed);
    let mut held: VecDeque<PinnedBuf> = VecDeque::new();
    let mut failed = 0;
    for _ in 0..gets {
        // From a page to 3 MiB, small ones more often.
        let len = (1 + draw.below(3 << 20)) >> draw.below(12);
        match requests.get(usize::try_from(len.max(1)).unwrap()) {
            Ok(buffer) => held.push_back(buffer),
            Err(_) => failed += 1,
        }
        while held.len() as u64 > draw.below(12) {
            held.pop_front();
        }
        match draw.below(500) {
            0 => pool.trim(draw.below(16 << 20)),
            1 => pool.clear(),
            2 => drop(pool.stats()),
            _ => {}
        }
    }
    failed
}

fn stays_under_the_limit(
    (sim, source): (Arc<SimSource>, Arc<FaultSource>),
    (max_bytes, reserve, limit, on_full): (u64, u64, u64, OnFull),
) {
    let failing = fail_some(&source, max_bytes ^ limit);
    let held = || sim.sums.lock().pinned_bytes;
    let pool = over(source.clone(), max_bytes)
        .pool_size_limit(limit)
        .auto_resize(limit > 0)
        .idle_timeout(Duration::ZERO)
        .wait(Duration::from_micros(200))
        .on_full(on_full)
        .maintenance_thread(true)
        .build()
        .unwrap();
    if reserve > 0 {
        // The first attempts may be scripted to fail.
        while pool.reserve(reserve).is_err() {}
    }
    let eval = pool.open_partition("eval", max_bytes / 2).unwrap();
    let barrier = Barrier::new(usize::try_from(THREADS).unwrap());
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (pool, eval, barrier) = (&pool, &eval, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let seed = 0x9E37_79B9_7F4A_7C15 ^ (number + 1);
                let gets = number_from("LIMIT_GETS", GETS);
                let failed = if number % 4 == 3 { work(pool, eval, seed, gets) } else { work(pool, pool, seed, gets) };
                assert!(failed < gets, "no get succeeded");
            });
        }
    });
    let (mut all, part) = (valid_stats(&pool), valid_stats(&eval));
    // The maintenance thread may be releasing memory.
    until("the pool and the source count the same bytes", || {
        all = valid_stats(&pool);
        [all.memory.held_bytes, all.memory.pin.bytes - all.memory.unpin.bytes] == [held(); 2]
    });
    let peak_bytes = sim.sums.lock().peak_bytes;
    assert!(peak_bytes <= max_bytes, "{peak_bytes} B held, limit {max_bytes}");
    assert!(all.memory.peak_held_bytes <= max_bytes && part.memory.peak_held_bytes <= max_bytes / 2);
    assert!(all.memory.pin.count > 0, "{:?}", all.memory);
    let failures: usize = CALLS.into_iter().map(|call| failing.count(call, 0..source.calls(call))).sum();
    let counted = all.memory.pin.failures + all.memory.unpin.failures + all.memory.remap.failures;
    assert_eq!(counted > 0, failures > 0, "{failures} calls failed: {:?}", all.memory);
    let before = source.calls(SourceCall::Release);
    drop((pool, eval));
    // The end of the pool leaves only memory that it failed to release.
    let failed = failing.count(SourceCall::Release, before..source.calls(SourceCall::Release));
    assert!(held() == 0 || failed > 0, "{} B left, no release failed", held());
    assert_eq!(source.calls(SourceCall::Reserve), source.calls(SourceCall::Unreserve));
}

#[test]
fn the_limit_holds_over_virtual_memory_and_over_separate_regions() {
    for case in [
        (8 << 20, 0, 100, OnFull::Error),
        (20 << 20, 4 << 20, 3, OnFull::Error),
        (999_999, 0, 0, OnFull::Error),
        (8 << 20, 0, 10, OnFull::Pageable),
    ] {
        each_sim().into_iter().for_each(|memory| stays_under_the_limit(memory, case));
    }
}
