//! The loop of `pinpool-bench loader`: producers that fill batches, and one thread that copies them.
//!
//! ```text
//!   P producers:  get (timed) ─▶ memcpy ─▶ ┐ queue, P long
//!                                          └─▶ one thread: copy, at most DEPTH in flight ─▶ put
//! ```
//!
//! The loop is the same for batches of a pool and of a ring. Its clock starts when every producer is ready.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use pinpool::{Completion, Error, PinnedBuf, Pool};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

use super::Measured;
use super::destination::BenchTarget;
use super::statistics::{Histogram, gb_per_s};
use crate::threads::spawn_all;

/// Copies in flight at once.
const DEPTH: usize = 8;
/// 64 images of 224 x 224 x 3 bytes.
const FIXED_BYTES: usize = 64 * 224 * 224 * 3;
const LOGNORMAL_MEAN_BYTES: f64 = 4.0 * 1024.0 * 1024.0;
const LOGNORMAL_SIGMA: f64 = 0.75;
/// Truncates one lognormal batch in a thousand.
pub(super) const LONGEST_BYTES: usize = 32 << 20;
/// The source of each producer, larger than the caches of a core.
const SOURCE_BYTES: usize = 16 << 20;
const SEED: u64 = 7;
/// The start of a loader, which no figure contains.
pub(super) const FIRST: Duration = Duration::from_secs(1);

/// Sizes of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BatchPattern {
    /// 9.19 MiB
    Fixed,
    /// Lognormal, mean 4 MiB
    Lognormal,
}

impl BatchPattern {
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    pub(super) fn longest_bytes(self) -> usize {
        if self == BatchPattern::Fixed { FIXED_BYTES } else { LONGEST_BYTES }
    }

    /// The sizes of one producer, the same in every run.
    fn sizes(self, producer: u64) -> impl Iterator<Item = usize> {
        let mu = LOGNORMAL_MEAN_BYTES.ln() - LOGNORMAL_SIGMA * LOGNORMAL_SIGMA / 2.0;
        let lognormal = (self == BatchPattern::Lognormal).then(|| LogNormal::new(mu, LOGNORMAL_SIGMA).ok()).flatten();
        let mut rng = ChaCha8Rng::seed_from_u64(SEED + producer);
        #[allow(clippy::cast_possible_truncation)] // Positive, and at most the longest.
        let next = move || match lognormal {
            None => FIXED_BYTES,
            Some(lognormal) => (lognormal.sample(&mut rng) as usize).clamp(1, LONGEST_BYTES),
        };
        std::iter::repeat_with(next)
    }
}

/// Where batches come from and go back to. A ring serves one loop, which takes what is in flight at its end.
pub(super) enum Buffers<'a> {
    Pool(&'a Pool),
    /// Never empty: it holds one buffer for every batch that can exist.
    Ring(Mutex<Vec<PinnedBuf>>),
}

/// The first `len` bytes of a buffer.
struct Batch {
    buf: PinnedBuf,
    len: usize,
}

struct CopyInFlight {
    copy: Completion,
    len: usize,
    /// A buffer of the ring. The pool takes its own back by itself.
    ring_buf: Option<PinnedBuf>,
}

/// Each producer has one batch in hand and one in the queue; the copying thread has one in hand and the others in flight.
pub(super) fn ring_len(producers: u16) -> usize {
    2 * usize::from(producers) + DEPTH + 1
}

pub(super) fn ring_bytes(producers: u16, batches: BatchPattern) -> u64 {
    (ring_len(producers) * batches.longest_bytes()) as u64
}

impl<'a> Buffers<'a> {
    pub(super) fn ring(pool: &Pool, producers: u16, batches: BatchPattern) -> Measured<Buffers<'a>> {
        let longest = batches.longest_bytes();
        let mut ring = (0..ring_len(producers)).map(|_| pool.get(longest)).collect::<Result<Vec<_>, _>>()?;
        ring.iter_mut().try_for_each(|buf| buf.wait_slice_mut().map(|bytes| bytes.fill(1)))?;
        Ok(Buffers::Ring(Mutex::new(ring)))
    }

    fn get(&self, len: usize) -> Measured<Batch> {
        let buf = match self {
            Buffers::Pool(pool) => pool.get(len)?,
            Buffers::Ring(ring) => {
                let newest = ring.lock().unwrap_or_else(PoisonError::into_inner).pop();
                newest.ok_or_else(|| Error::device("the ring ran out of buffers"))?
            }
        };
        Ok(Batch { buf, len })
    }

    fn copy(&self, destination: &mut BenchTarget, Batch { mut buf, len }: Batch) -> Measured<CopyInFlight> {
        Ok(match self {
            Buffers::Pool(_) => CopyInFlight { copy: destination.copy_all(buf)?, len, ring_buf: None },
            Buffers::Ring(_) => CopyInFlight { copy: destination.copy(&mut buf, len)?, len, ring_buf: Some(buf) },
        })
    }

    /// Waits for the copy.
    fn put(&self, in_flight: CopyInFlight) -> Measured<usize> {
        in_flight.copy.wait()?;
        if let (Buffers::Ring(ring), Some(buf)) = (self, in_flight.ring_buf) {
            ring.lock().unwrap_or_else(PoisonError::into_inner).push(buf);
        }
        Ok(in_flight.len)
    }
}

/// The result of a loop.
#[derive(Default)]
pub(super) struct LoopResult {
    bytes: u64,
    first_second_bytes: u64,
    took: Duration,
    /// Times of the gets after the first second.
    pub(super) gets: Histogram,
    pub(super) peak_requested_bytes: u64,
}

impl LoopResult {
    /// Without the first second.
    pub(super) fn gb_per_s(&self) -> f64 {
        gb_per_s(self.bytes - self.first_second_bytes, self.took.saturating_sub(FIRST))
    }
}

/// State of all threads. Every access is relaxed: each word is read for its own value, and orders no other memory.
struct Loop<'a> {
    buffers: &'a Buffers<'a>,
    over: AtomicBool,
    /// Bytes of batches that are not copied yet, and their peak.
    requested_bytes: AtomicU64,
    peak_requested_bytes: AtomicU64,
}

/// Runs the loop for `time`.
pub(super) fn run(
    buffers: &Buffers<'_>,
    (producers, batches): (u16, BatchPattern),
    destination: &mut BenchTarget,
    time: Duration,
) -> Measured<LoopResult> {
    let (over, requested_bytes, peak_requested_bytes) = Default::default();
    let shared = &Loop { buffers, over, requested_bytes, peak_requested_bytes };
    // Each producer can be one batch ahead.
    let (queue, queued) = sync_channel(usize::from(producers));
    let start = &Barrier::new(usize::from(producers) + 1);
    // The last producer that ends closes the queue.
    let queues: Vec<_> = (0..producers).map(|_| Mutex::new(Some(queue.clone()))).collect();
    drop(queue);
    let produce = |number: usize| {
        let queue = queues[number].lock().unwrap_or_else(PoisonError::into_inner).take();
        let queue = queue.ok_or_else(|| Error::device("a producer runs twice"))?;
        shared.produce(batches.sizes(number as u64), &queue, start)
    };
    let mut result = std::thread::scope(|scope| {
        let running = spawn_all(scope, usize::from(producers), &produce)?;
        start.wait();
        let result = shared.copy(destination, &queued, Instant::now(), time);
        shared.over.store(true, Ordering::Relaxed);
        // Wakes producers that wait for the queue.
        drop(queued);
        let mut gets = Histogram::default();
        for producer in running {
            let panicked = || Err(Error::device("a producer panicked").into());
            let times = producer.join().ok().flatten().unwrap_or_else(panicked)?;
            gets.merge(&times);
        }
        Measured::Ok(LoopResult { gets, ..result? })
    })?;
    result.peak_requested_bytes = shared.peak_requested_bytes.load(Ordering::Relaxed);
    Ok(result)
}

impl Loop<'_> {
    fn produce(
        &self,
        sizes: impl Iterator<Item = usize>,
        queue: &SyncSender<Batch>,
        start: &Barrier,
    ) -> Measured<Histogram> {
        let source = vec![1_u8; SOURCE_BYTES];
        let mut times = Histogram::default();
        start.wait();
        let begun = Instant::now();
        for len in sizes {
            if self.over.load(Ordering::Relaxed) {
                break;
            }
            let requested = self.requested_bytes.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
            self.peak_requested_bytes.fetch_max(requested, Ordering::Relaxed);
            let get_begun = Instant::now();
            let mut batch = self.buffers.get(len)?;
            let took = get_begun.elapsed();
            if begun.elapsed() > FIRST {
                times.add(took);
            }
            let bytes = batch.buf.wait_slice_mut()?.get_mut(..len).unwrap_or_default();
            let fill = |chunk: &mut [u8]| chunk.copy_from_slice(&source[..chunk.len()]);
            bytes.chunks_mut(SOURCE_BYTES).for_each(fill);
            if queue.send(batch).is_err() {
                break;
            }
        }
        Ok(times)
    }

    fn copy(
        &self,
        destination: &mut BenchTarget,
        queued: &Receiver<Batch>,
        begun: Instant,
        time: Duration,
    ) -> Measured<LoopResult> {
        let (mut result, mut in_flight) = (LoopResult::default(), VecDeque::new());
        while begun.elapsed() < time {
            // A closed queue means that every producer failed; their own results carry the errors.
            let Ok(batch) = queued.recv() else { break };
            if in_flight.len() == DEPTH
                && let Some(oldest) = in_flight.pop_front()
            {
                let len = self.buffers.put(oldest)? as u64;
                self.requested_bytes.fetch_sub(len, Ordering::Relaxed);
                result.bytes += len;
                result.took = begun.elapsed();
                if result.took <= FIRST {
                    result.first_second_bytes = result.bytes;
                }
            }
            in_flight.push_back(self.buffers.copy(destination, batch)?);
        }
        in_flight.into_iter().try_for_each(|last| self.buffers.put(last).map(drop))?;
        Ok(result)
    }
}
