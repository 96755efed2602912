//! The loop of `pinpool bench loader`: producers that fill batches, and one thread that copies them.
//!
//! ```text
//!   P producers:  get (timed) ─▶ memcpy ─▶ ┐ queue, P long
//!                                          └─▶ one thread: copy, at most DEPTH under way ─▶ put
//! ```
//!
//! The same whether the batches come from a pool or from a ring, and whether anybody fills them. Its clock begins when
//! every producer is ready.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use pinpool::{Completion, Error, PinnedBuf, Pool, Underlying};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

use super::far::Far;
use super::figure::{Measured, gb_per_s};
use super::histogram::Histogram;

/// Copies under way at once.
const DEPTH: usize = 8;
/// A batch of 64 images of 224 x 224 x 3 bytes.
const FIXED_BYTES: usize = 64 * 224 * 224 * 3;
const LOGNORMAL_MEAN_BYTES: f64 = 4.0 * 1024.0 * 1024.0;
const LOGNORMAL_SIGMA: f64 = 0.75;
/// Cuts one lognormal batch in a thousand short.
pub(super) const LONGEST_BYTES: usize = 32 << 20;
/// What each producer copies from, again and again: more than a core's caches hold.
const SOURCE_BYTES: usize = 16 << 20;
const SEED: u64 = 7;
/// A loader's start is told apart from the rest.
pub(super) const FIRST: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Batches {
    /// 9.19 MiB
    Fixed,
    /// Lognormal, mean 4 MiB
    Lognormal,
}

impl Batches {
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Sizes of batches, the same for the same number.
struct Sizes {
    rng: ChaCha8Rng,
    lognormal: Option<LogNormal<f64>>,
}

impl Sizes {
    fn new(batches: Batches, number: u64) -> Sizes {
        let mu = LOGNORMAL_MEAN_BYTES.ln() - LOGNORMAL_SIGMA * LOGNORMAL_SIGMA / 2.0;
        let lognormal = (batches == Batches::Lognormal).then(|| LogNormal::new(mu, LOGNORMAL_SIGMA).ok()).flatten();
        Sizes { rng: ChaCha8Rng::seed_from_u64(SEED + number), lognormal }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Positive, and cut to the longest.
    fn next(&mut self) -> usize {
        match self.lognormal {
            None => FIXED_BYTES,
            Some(lognormal) => (lognormal.sample(&mut self.rng) as usize).clamp(1, LONGEST_BYTES),
        }
    }
}

/// What has been copied, by when.
#[derive(Debug, Default)]
pub(super) struct Progress {
    bytes: u64,
    first_second_bytes: u64,
    /// What the pool had asked for at the end of the first second.
    pub(super) first_second_calls: Option<Underlying>,
    took: Duration,
}

impl Progress {
    fn add(&mut self, len: usize, begun: Instant) {
        self.bytes += len as u64;
        self.took = begun.elapsed();
        if self.took <= FIRST {
            self.first_second_bytes = self.bytes;
        }
    }

    pub(super) fn first_second_gb_per_s(&self) -> f64 {
        gb_per_s(self.first_second_bytes, FIRST)
    }

    /// Without the first second.
    pub(super) fn settled_gb_per_s(&self) -> f64 {
        gb_per_s(self.bytes - self.first_second_bytes, self.took.saturating_sub(FIRST))
    }
}

/// Where batches come from and go back to. A ring serves one loop: what is under way at its end is gone from it.
pub(super) enum Buffers<'a> {
    Pool(&'a Pool),
    /// Never empty: there is one for every batch that can be anywhere.
    Ring(Mutex<Vec<PinnedBuf>>),
}

/// Some bytes at the front of a buffer.
struct Batch {
    buf: PinnedBuf,
    len: usize,
}

/// A copy on its way, with the buffer if that does not find back to its pool by itself.
struct UnderWay {
    copy: Completion,
    len: usize,
    of_ring: Option<PinnedBuf>,
}

/// Each producer has one in hand and one in the queue, the copying thread one in hand and the others under way.
pub(super) fn ring_len(producers: u16) -> usize {
    2 * usize::from(producers) + DEPTH + 1
}

fn longest_bytes(batches: Batches) -> usize {
    if batches == Batches::Fixed { FIXED_BYTES } else { LONGEST_BYTES }
}

pub(super) fn ring_bytes(producers: u16, batches: Batches) -> u64 {
    (ring_len(producers) * longest_bytes(batches)) as u64
}

impl<'a> Buffers<'a> {
    pub(super) fn ring(pool: &Pool, producers: u16, batches: Batches) -> Measured<Buffers<'a>> {
        let longest = longest_bytes(batches);
        let mut ring = (0..ring_len(producers)).map(|_| pool.get(longest)).collect::<Result<Vec<_>, _>>()?;
        ring.iter_mut().for_each(|buf| buf.as_mut_slice().fill(1));
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

    fn copy(&self, far: &mut Far, Batch { mut buf, len }: Batch) -> Measured<UnderWay> {
        match self {
            Buffers::Pool(_) => Ok(UnderWay { copy: far.take(buf)?, len, of_ring: None }),
            Buffers::Ring(_) => Ok(UnderWay { copy: far.copy(&mut buf, len)?, len, of_ring: Some(buf) }),
        }
    }

    /// Waits for the copy.
    fn put(&self, under_way: UnderWay) -> Measured<usize> {
        under_way.copy.wait()?;
        if let (Buffers::Ring(ring), Some(buf)) = (self, under_way.of_ring) {
            ring.lock().unwrap_or_else(PoisonError::into_inner).push(buf);
        }
        Ok(under_way.len)
    }

    fn calls(&self) -> Option<Underlying> {
        match self {
            Buffers::Pool(pool) => Some(pool.stats().underlying),
            Buffers::Ring(_) => None,
        }
    }
}

/// Times of gets, in the first second and after it.
pub(super) struct Seen {
    pub(super) first: Histogram,
    pub(super) settled: Histogram,
}

pub(super) struct Loop<'a> {
    buffers: Buffers<'a>,
    fills: bool,
    over: AtomicBool,
    /// Bytes asked for and not copied yet.
    requested: AtomicU64,
    pub(super) peak: AtomicU64,
}

impl<'a> Loop<'a> {
    pub(super) fn new(buffers: Buffers<'a>, fills: bool) -> Self {
        let (over, requested, peak) = Default::default();
        Self { buffers, fills, over, requested, peak }
    }

    pub(super) fn run(
        &self,
        producers: u16,
        batches: Batches,
        far: &mut Far,
        time: Duration,
    ) -> Measured<(Progress, Seen)> {
        // Producers run ahead by one batch each.
        let (queue, queued) = sync_channel(usize::from(producers));
        let start = Barrier::new(usize::from(producers) + 1);
        std::thread::scope(|scope| {
            let producing: Vec<_> = (0..u64::from(producers))
                .map(|number| {
                    let (queue, start) = (queue.clone(), &start);
                    scope.spawn(move || self.produce(Sizes::new(batches, number), &queue, start))
                })
                .collect();
            drop(queue);
            start.wait();
            let progress = self.copy(far, &queued, Instant::now(), time);
            // Relaxed: nothing but the word itself is told. Who waits for room in the queue finds it closed.
            self.over.store(true, Ordering::Relaxed);
            drop(queued);
            let mut all = Seen { first: Histogram::new(), settled: Histogram::new() };
            for producer in producing {
                let seen = producer.join().map_err(|_| Error::device("a producer panicked"))??;
                all.first.merge(&seen.first);
                all.settled.merge(&seen.settled);
            }
            Ok((progress?, all))
        })
    }

    fn produce(&self, mut sizes: Sizes, queue: &SyncSender<Batch>, start: &Barrier) -> Measured<Seen> {
        let source = vec![1_u8; SOURCE_BYTES];
        let mut seen = Seen { first: Histogram::new(), settled: Histogram::new() };
        start.wait();
        let begun = Instant::now();
        while !self.over.load(Ordering::Relaxed) {
            let len = sizes.next();
            // Relaxed: figures.
            let requested = self.requested.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
            self.peak.fetch_max(requested, Ordering::Relaxed);
            let asked = Instant::now();
            let mut batch = self.buffers.get(len)?;
            let took = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let is_first = begun.elapsed() <= FIRST;
            if is_first { &mut seen.first } else { &mut seen.settled }.add(took);
            let bytes = batch.buf.as_mut_slice().get_mut(..len).unwrap_or_default();
            if self.fills {
                let fill = |chunk: &mut [u8]| chunk.copy_from_slice(&source[..chunk.len()]);
                bytes.chunks_mut(SOURCE_BYTES).for_each(fill);
            }
            if queue.send(batch).is_err() {
                break;
            }
        }
        Ok(seen)
    }

    fn copy(&self, far: &mut Far, queued: &Receiver<Batch>, begun: Instant, time: Duration) -> Measured<Progress> {
        let (mut progress, mut under_way) = (Progress::default(), VecDeque::new());
        while begun.elapsed() < time {
            // A closed queue: all producers failed, which their own results say.
            let Ok(batch) = queued.recv() else { break };
            if under_way.len() == DEPTH
                && let Some(oldest) = under_way.pop_front()
            {
                let len = self.buffers.put(oldest)?;
                self.requested.fetch_sub(len as u64, Ordering::Relaxed);
                progress.add(len, begun);
                if progress.took > FIRST && progress.first_second_calls.is_none() {
                    progress.first_second_calls = self.buffers.calls();
                }
            }
            under_way.push_back(self.buffers.copy(far, batch)?);
        }
        under_way.into_iter().try_for_each(|last| self.buffers.put(last).map(drop))?;
        Ok(progress)
    }
}
