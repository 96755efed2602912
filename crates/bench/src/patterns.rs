//! Which threads request and return buffers.
//!
//! ```text
//!   same    every thread: request and return size 3
//!   mix     every thread: sixteen sizes in rotation
//!   cross   pairs of threads: one requests, the other returns; up to eight buffers in between
//! ```
//!
//! Threads are not bound to cores. All start together after a warm-up; the slowest thread determines the time of a run.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::{Backoff, CachePadded};

use super::Measured;
use super::baselines::{Baseline, SIZES};
use crate::threads::spawn_all;

/// The size number of `same` and `cross`: 16 KiB.
const SIZE: usize = 3;
/// Number of requests and returns before the clock starts, enough to allocate every buffer.
const WARMUP_PAIRS: u64 = 1000;
/// Buffers between the two threads of a pair.
const QUEUE_LEN: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Pattern {
    /// Each thread requests and returns one size
    Same,
    /// Each thread requests and returns sixteen sizes in rotation
    Mix,
    /// One thread of each pair requests, the other returns
    Cross,
}

/// Runs `pairs` requests and returns on each thread (in `cross`, on each pair of threads). Returns the time of the slowest
/// thread.
pub(super) fn run<B: Baseline>(baseline: &B, pattern: Pattern, threads: usize, pairs: u64) -> Measured<Duration> {
    let queues: Vec<HandOver<B>> =
        (0..threads.div_ceil(2)).map(|_| CachePadded::new(ArrayQueue::new(QUEUE_LEN))).collect();
    let start = Barrier::new(threads);
    let one = |thread: usize| {
        let queue = &queues[thread / 2];
        work(baseline, pattern, thread, queue, WARMUP_PAIRS.min(pairs));
        start.wait();
        let begun = Instant::now();
        work(baseline, pattern, thread, queue, pairs);
        begun.elapsed()
    };
    std::thread::scope(|scope| {
        let running = spawn_all(scope, threads, &one)?;
        Ok(running.into_iter().filter_map(|thread| thread.join().ok().flatten()).max().unwrap_or_default())
    })
}

/// A queue from the requesting thread of a pair to the returning thread.
type HandOver<B> = CachePadded<ArrayQueue<<B as Baseline>::Buffer>>;

fn work<B: Baseline>(baseline: &B, pattern: Pattern, thread: usize, queue: &HandOver<B>, pairs: u64) {
    match pattern {
        Pattern::Same => {
            for _ in 0..pairs {
                baseline.put(baseline.get(SIZE));
            }
        }
        Pattern::Mix => {
            for (size, _) in (0..SIZES).cycle().zip(0..pairs) {
                baseline.put(baseline.get(size));
            }
        }
        Pattern::Cross if thread.is_multiple_of(2) => {
            for _ in 0..pairs {
                let mut buffer = baseline.get(SIZE);
                let backoff = Backoff::new();
                while let Err(refused) = queue.push(buffer) {
                    buffer = refused;
                    backoff.snooze();
                }
            }
        }
        Pattern::Cross => {
            for _ in 0..pairs {
                let backoff = Backoff::new();
                let buffer = loop {
                    match queue.pop() {
                        Some(buffer) => break buffer,
                        None => backoff.snooze(),
                    }
                };
                baseline.put(buffer);
            }
        }
    }
}
