//! Who gets and who puts.
//!
//! ```text
//!   same    every thread: get size 1, put, get size 1, put ...
//!   mix     every thread: the sixteen sizes in turn
//!   cross   threads in pairs: one gets and hands over, the other puts; at most eight buffers on the way
//! ```
//!
//! Threads are not bound to cores. All start together, warm; the time of a run is that of its slowest thread.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::{Backoff, CachePadded};

use super::keepers::{Keeper, SIZES};

/// Which size `same` and `cross` ask for: 16 KiB.
const SIZE: usize = 3;
/// Pairs before the clock starts: enough to bring every buffer into being.
const WARM: u64 = 1000;
/// Buffers on their way from one thread of a pair to the other.
const BETWEEN: usize = 8;

/// A way to use a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub(crate) enum Pattern {
    /// Each thread gets and puts one size
    Same,
    /// Each thread gets and puts sixteen sizes in turn
    Mix,
    /// One thread of each pair gets, the other puts
    Cross,
}

/// Looks at the single operations of a thread.
pub(crate) trait Watch {
    fn operation<R>(&mut self, operation: impl FnOnce() -> R) -> R;
}

/// Does not look.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blind;

impl Watch for Blind {
    #[inline(always)]
    fn operation<R>(&mut self, operation: impl FnOnce() -> R) -> R {
        operation()
    }
}

/// Runs `pairs` gets and as many puts for each thread (in `cross`, for each pair of threads); returns how long the
/// slowest thread took, and what was seen.
pub(crate) fn run<K: Keeper, W: Watch + Send>(
    keeper: &K,
    pattern: Pattern,
    threads: usize,
    pairs: u64,
    watch: impl Fn() -> W + Sync,
) -> (Duration, Vec<W>) {
    let between: Vec<Between<K>> =
        (0..threads.div_ceil(2)).map(|_| CachePadded::new(ArrayQueue::new(BETWEEN))).collect();
    let start = Barrier::new(threads);
    let one = |thread: usize| {
        let mut watch = watch();
        work(keeper, pattern, thread, &between, WARM.min(pairs), &mut Blind);
        start.wait();
        let begun = Instant::now();
        work(keeper, pattern, thread, &between, pairs, &mut watch);
        (begun.elapsed(), watch)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        let ended = running.into_iter().filter_map(|thread| thread.join().ok());
        let (times, watches): (Vec<_>, Vec<_>) = ended.unzip();
        (times.into_iter().max().unwrap_or_default(), watches)
    })
}

type Between<K> = CachePadded<ArrayQueue<<K as Keeper>::Item>>;

fn work<K: Keeper>(
    keeper: &K,
    pattern: Pattern,
    thread: usize,
    between: &[Between<K>],
    pairs: u64,
    watch: &mut impl Watch,
) {
    match pattern {
        Pattern::Same => {
            for _ in 0..pairs {
                watch.operation(|| keeper.put(keeper.get(SIZE)));
            }
        }
        Pattern::Mix => {
            for size in (0..SIZES).cycle().zip(0..pairs).map(|(size, _)| size) {
                watch.operation(|| keeper.put(keeper.get(size)));
            }
        }
        Pattern::Cross if thread.is_multiple_of(2) => {
            for _ in 0..pairs {
                let item = watch.operation(|| keeper.get(SIZE));
                let backoff = Backoff::new();
                let mut to_hand_over = item;
                while let Err(item) = between[thread / 2].push(to_hand_over) {
                    to_hand_over = item;
                    backoff.snooze();
                }
            }
        }
        Pattern::Cross => {
            for _ in 0..pairs {
                let backoff = Backoff::new();
                let item = loop {
                    match between[thread / 2].pop() {
                        Some(item) => break item,
                        None => backoff.snooze(),
                    }
                };
                watch.operation(|| keeper.put(item));
            }
        }
    }
}
