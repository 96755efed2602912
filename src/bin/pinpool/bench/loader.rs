//! `pinpool bench loader`: what a loader gets out of the pool.
//!
//! ```text
//!   P producers:  get (timed) ─▶ memcpy ─▶ ┐ queue
//!                                          └─▶ one thread: copy, at most DEPTH under way ─▶ put
//!
//!   raw   buffers made beforehand, nobody fills them      what the device takes, before and after the others
//!   ring  buffers made beforehand                         the ideal: as many as can ever be in use
//!   pool  get and copy_to                                 begins with nothing
//! ```
//!
//! All three are the same loop. Its clock begins when every producer is ready.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use pinpool::{Backend, Completion, Error, PinnedBuf, Pool, Preset, Underlying};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};
use serde::Serialize;

use super::far::Far;
use super::figure::{Measured, gb_per_s, mib, micros, quotient, rounded};
use super::histogram::Histogram;
use super::sources;
use crate::Failed;
use crate::screen::Screen;

/// Copies under way at once.
const DEPTH: usize = 8;
/// A batch of 64 images of 224 x 224 x 3 bytes.
const FIXED_BYTES: usize = 64 * 224 * 224 * 3;
const LOGNORMAL_MEAN_BYTES: f64 = 4.0 * 1024.0 * 1024.0;
const LOGNORMAL_SIGMA: f64 = 0.75;
/// Cuts one lognormal batch in a thousand short.
const LONGEST_BYTES: usize = 32 << 20;
/// What each producer copies from, again and again: more than a core's caches hold.
const SOURCE_BYTES: usize = 16 << 20;
const SEED: u64 = 7;
const FIRST: Duration = Duration::from_secs(1);

/// Producers fill batches and one thread copies them: GB/s beside the same loop that fills nothing, and beside a ring
///
/// `raw` is the loop with buffers made beforehand that nobody fills, the mean of a run before and one after; `ring` the loop
/// with as many buffers made beforehand as can be in use at once, newest first.
#[derive(Debug, Args)]
pub(crate) struct LoaderArgs {
    /// Threads that fill
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    producers: u16,

    /// Bytes of a batch; may be given several times
    #[arg(long, value_enum, default_values_t = [Batches::Fixed, Batches::Lognormal])]
    batches: Vec<Batches>,

    /// Seconds of each loop, after a first one
    #[arg(long, value_name = "S", default_value_t = 4.0)]
    seconds: f64,

    /// What is behind the pool
    #[arg(long, value_name = "NAME", default_value = "auto")]
    backend: Backend,

    /// Rules of the pool
    #[arg(long, value_name = "NAME", default_value = "adaptive")]
    preset: Preset,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Batches {
    /// 9.19 MiB
    Fixed,
    /// Lognormal, mean 4 MiB
    Lognormal,
}

/// One run; its fields are the JSON object's.
#[derive(Debug, Serialize)]
struct Figures {
    to: String,
    backend: &'static str,
    preset: &'static str,
    producers: u16,
    loaders: Vec<Loader>,
}

/// With batches of one kind.
#[derive(Debug, Serialize)]
struct Loader {
    batches: String,
    raw_gb_per_s: f64,
    /// Before and after.
    raw_runs_gb_per_s: [f64; 2],
    ring_gb_per_s: f64,
    ring_of_raw: f64,
    gb_per_s: f64,
    of_raw: f64,
    of_ring: f64,
    first_second_gb_per_s: f64,
    first_second_of_raw: f64,
    acquire_p50_us: f64,
    acquire_p99_us: f64,
    acquire_worst_us: f64,
    acquire_worst_first_second_us: f64,
    /// Calls that pinned memory, and their bytes, in the first second and after it: what makes a get slow.
    pins_first_second: u64,
    pinned_first_second_bytes: u64,
    pins_later: u64,
    pinned_later_bytes: u64,
    requested_peak_bytes: u64,
    pinned_peak_bytes: u64,
    pinned_over_requested: f64,
}

pub(crate) fn run(args: &LoaderArgs, screen: &Screen) -> Result<(), Failed> {
    let figures = measure(args).map_err(|error| super::failed(&error, screen))?;
    if args.json { screen.print(serde_json::json!(figures)) } else { screen.print(figures.table()) }
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
struct Progress {
    bytes: u64,
    first_second_bytes: u64,
    /// What the pool had asked for at the end of the first second.
    first_second_calls: Option<Underlying>,
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

    fn first_second_gb_per_s(&self) -> f64 {
        gb_per_s(self.first_second_bytes, FIRST)
    }

    /// Without the first second.
    fn settled_gb_per_s(&self) -> f64 {
        gb_per_s(self.bytes - self.first_second_bytes, self.took.saturating_sub(FIRST))
    }
}

fn measure(args: &LoaderArgs) -> Measured<Figures> {
    let mut far = Far::open(LONGEST_BYTES)?;
    let time = FIRST + Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::from_secs(4));
    // Asks nothing of the back-end yet.
    let pool = || sources::builder(args.backend.clone()).preset(args.preset).build();
    let names = pool()?.stats();
    let loaders = args.batches.iter().map(|&batches| loader(args.producers, batches, time, &mut far, &pool()?));
    Ok(Figures {
        loaders: loaders.collect::<Measured<_>>()?,
        to: far.describe(),
        backend: names.backend,
        preset: names.preset,
        producers: args.producers,
    })
}

fn loader(producers: u16, batches: Batches, time: Duration, far: &mut Far, pool: &Pool) -> Measured<Loader> {
    let beforehand = sources::builder(pool.config().backend.clone()).build()?;
    let mut of_ring = |fills: bool| {
        let ring = Loop::new(Buffers::ring(&beforehand, producers, batches)?, fills);
        ring.run(producers, batches, far, time).map(|(progress, _)| progress.settled_gb_per_s())
    };
    let (raw_before, ring) = (of_ring(false)?, of_ring(true)?);
    let from_pool = Loop::new(Buffers::Pool(pool), true);
    let (progress, seen) = from_pool.run(producers, batches, far, time)?;
    let (stats, requested_peak_bytes) = (pool.stats(), from_pool.peak.into_inner());
    let raw_after = Loop::new(Buffers::ring(&beforehand, producers, batches)?, false);
    let raw_after = raw_after.run(producers, batches, far, time)?.0.settled_gb_per_s();

    let raw = f64::midpoint(raw_before, raw_after);
    let (settled, first) = (progress.settled_gb_per_s(), progress.first_second_gb_per_s());
    let (calls, pinned_peak_bytes) = (stats.underlying, stats.peak_pinned_bytes);
    let early = progress.first_second_calls.unwrap_or(calls);
    #[allow(clippy::cast_precision_loss)] // A quotient for people.
    let pinned_over_requested = quotient(pinned_peak_bytes as f64, requested_peak_bytes.max(1) as f64);
    Ok(Loader {
        batches: format!("{batches:?}").to_lowercase(),
        raw_gb_per_s: rounded(raw),
        raw_runs_gb_per_s: [raw_before, raw_after],
        ring_gb_per_s: ring,
        ring_of_raw: quotient(ring, raw),
        gb_per_s: settled,
        of_raw: quotient(settled, raw),
        of_ring: quotient(settled, ring),
        first_second_gb_per_s: first,
        first_second_of_raw: quotient(first, raw),
        acquire_p50_us: micros(seen.settled.per_mille(500)),
        acquire_p99_us: micros(seen.settled.per_mille(990)),
        acquire_worst_us: micros(seen.settled.max_ns()),
        acquire_worst_first_second_us: micros(seen.first.max_ns()),
        pins_first_second: early.allocs,
        pinned_first_second_bytes: early.alloc_bytes,
        pins_later: calls.allocs - early.allocs,
        pinned_later_bytes: calls.alloc_bytes - early.alloc_bytes,
        requested_peak_bytes,
        pinned_peak_bytes,
        pinned_over_requested,
    })
}

/// Where batches come from and go back to. A ring serves one loop: what is under way at its end is gone from it.
enum Buffers<'a> {
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

impl<'a> Buffers<'a> {
    /// Each producer has one in hand and one in the queue, the copying thread one in hand and the others under way.
    fn ring(pool: &Pool, producers: u16, batches: Batches) -> Measured<Buffers<'a>> {
        let longest = if batches == Batches::Fixed { FIXED_BYTES } else { LONGEST_BYTES };
        let mut ring =
            (0..2 * usize::from(producers) + DEPTH + 1).map(|_| pool.get(longest)).collect::<Result<Vec<_>, _>>()?;
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
struct Seen {
    first: Histogram,
    settled: Histogram,
}

struct Loop<'a> {
    buffers: Buffers<'a>,
    fills: bool,
    over: AtomicBool,
    /// Bytes asked for and not copied yet.
    requested: AtomicU64,
    peak: AtomicU64,
}

impl<'a> Loop<'a> {
    fn new(buffers: Buffers<'a>, fills: bool) -> Self {
        let (over, requested, peak) = Default::default();
        Self { buffers, fills, over, requested, peak }
    }

    fn run(&self, producers: u16, batches: Batches, far: &mut Far, time: Duration) -> Measured<(Progress, Seen)> {
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

impl Figures {
    fn table(&self) -> String {
        let Self { to, backend, preset, producers, loaders } = self;
        let mut rows = vec![format!("{producers} producers, {preset} over {backend}, to {to}")];
        rows.extend(loaders.iter().map(Loader::table));
        rows.join("\n")
    }
}

impl Loader {
    fn table(&self) -> String {
        let [before, after] = self.raw_runs_gb_per_s;
        let rate = |what: &str, rate: f64, rest: String| format!("  {what:<20} {rate:>10.3} GB/s{rest}");
        let of_raw = |of_raw: f64| format!(", {of_raw:.3} of raw");
        let pins = |pins: u64, bytes: u64| format!("{pins} of {}", mib(bytes));
        let rows = [
            format!("{} batches", self.batches),
            rate("raw copies", self.raw_gb_per_s, format!(" ({before:.3} before, {after:.3} after)")),
            rate("ring", self.ring_gb_per_s, of_raw(self.ring_of_raw)),
            rate("pool", self.gb_per_s, format!("{}, {:.3} of the ring", of_raw(self.of_raw), self.of_ring)),
            rate("  its first second", self.first_second_gb_per_s, of_raw(self.first_second_of_raw)),
            format!(
                "  acquire, us          p50 {}, p99 {}, worst {} ({} in the first second)",
                self.acquire_p50_us, self.acquire_p99_us, self.acquire_worst_us, self.acquire_worst_first_second_us
            ),
            format!(
                "  pinned in calls      {} ({} in the first second)",
                pins(self.pins_later, self.pinned_later_bytes),
                pins(self.pins_first_second, self.pinned_first_second_bytes)
            ),
            format!(
                "  pinned over asked    {:>10.3} ({} for {})",
                self.pinned_over_requested,
                mib(self.pinned_peak_bytes),
                mib(self.requested_peak_bytes)
            ),
        ];
        rows.join("\n")
    }
}
