//! `pinpool bench loader`: what a loader gets out of the pool.
//!
//! ```text
//!   P producers:  get (timed) ─▶ memcpy ─▶ ┐ queue
//!                                          └─▶ one thread: copy_to, at most DEPTH under way
//!   raw:          the same thread, the same sizes, buffers made beforehand, nobody fills them
//! ```

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use pinpool::{Backend, Completion, PinnedBuf, Pool, Preset};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};
use serde::Serialize;

use super::far::Far;
use super::figure::{Measured, gb_per_s, mib, micros, rounded};
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
const LONGEST_BYTES: usize = 64 << 20;
/// What each producer copies from, again and again: more than a core's caches hold.
const SOURCE_BYTES: usize = 16 << 20;
const SEED: u64 = 7;

/// Producers fill variable batches and one thread copies them: GB/s against the same copies without producers
#[derive(Debug, Args)]
pub(crate) struct LoaderArgs {
    /// Threads that fill
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    producers: u16,

    /// Bytes of a batch
    #[arg(long, value_enum, default_value_t = Batches::Fixed)]
    batches: Batches,

    /// Seconds, after a first one
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
    batches: String,
    producers: u16,
    raw_gb_per_s: f64,
    gb_per_s: f64,
    of_raw: f64,
    first_second_gb_per_s: f64,
    first_second_of_raw: f64,
    acquire_p50_us: f64,
    acquire_p99_us: f64,
    acquire_worst_us: f64,
    acquire_worst_first_second_us: f64,
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
    took: Duration,
}

impl Progress {
    fn add(&mut self, len: usize, begun: Instant) {
        self.bytes += len as u64;
        self.took = begun.elapsed();
        if self.took <= Duration::from_secs(1) {
            self.first_second_bytes = self.bytes;
        }
    }

    /// Without the first second.
    fn settled_gb_per_s(&self) -> f64 {
        gb_per_s(self.bytes - self.first_second_bytes, self.took.saturating_sub(Duration::from_secs(1)))
    }
}

fn measure(args: &LoaderArgs) -> Measured<Figures> {
    let mut far = Far::open(LONGEST_BYTES)?;
    let time = Duration::from_secs(1) + Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::from_secs(4));
    let raw = raw(args, &mut far, time)?;
    let pool = sources::builder(args.backend.clone()).preset(args.preset).build()?;
    let run = Run { pool: &pool, over: AtomicBool::new(false), requested: AtomicU64::new(0), peak: AtomicU64::new(0) };
    let (progress, seen) = run.run(args, &mut far, time)?;
    let stats = pool.stats();
    let (settled, first) = (progress.settled_gb_per_s(), gb_per_s(progress.first_second_bytes, Duration::from_secs(1)));
    let of_raw = |rate: f64| rounded(rate / raw.max(1e-9));
    let (requested_peak_bytes, pinned_peak_bytes) = (run.peak.into_inner(), stats.peak_pinned_bytes);
    #[allow(clippy::cast_precision_loss)] // A quotient for people.
    let pinned_over_requested = rounded(pinned_peak_bytes as f64 / requested_peak_bytes.max(1) as f64);
    Ok(Figures {
        to: far.describe(),
        backend: stats.backend,
        preset: stats.preset,
        batches: format!("{:?}", args.batches).to_lowercase(),
        producers: args.producers,
        raw_gb_per_s: raw,
        gb_per_s: settled,
        of_raw: of_raw(settled),
        first_second_gb_per_s: first,
        first_second_of_raw: of_raw(first),
        acquire_p50_us: micros(seen.settled.per_mille(500)),
        acquire_p99_us: micros(seen.settled.per_mille(990)),
        acquire_worst_us: micros(seen.settled.max_ns()),
        acquire_worst_first_second_us: micros(seen.first.max_ns()),
        requested_peak_bytes,
        pinned_peak_bytes,
        pinned_over_requested,
    })
}

/// The copies alone: buffers made beforehand, as many as may be under way.
fn raw(args: &LoaderArgs, far: &mut Far, time: Duration) -> Measured<f64> {
    let pool = sources::builder(args.backend.clone()).build()?;
    let longest = if args.batches == Batches::Fixed { FIXED_BYTES } else { LONGEST_BYTES };
    let mut ring = (0..DEPTH).map(|_| pool.get(longest)).collect::<Result<Vec<_>, _>>()?;
    ring.iter_mut().for_each(|buf| buf.as_mut_slice().fill(1));
    let (mut sizes, mut under_way) = (Sizes::new(args.batches, 0), VecDeque::<(Completion, usize)>::new());
    let (begun, mut progress) = (Instant::now(), Progress::default());
    while begun.elapsed() < time {
        for buf in &mut ring {
            if under_way.len() == DEPTH
                && let Some((copy, len)) = under_way.pop_front()
            {
                copy.wait()?;
                progress.add(len, begun);
            }
            let len = sizes.next();
            under_way.push_back((far.copy(buf, len)?, len));
        }
    }
    under_way.iter().try_for_each(|(copy, _)| copy.wait())?;
    Ok(progress.settled_gb_per_s())
}

/// Times of gets, in the first second and after it.
struct Seen {
    first: Histogram,
    settled: Histogram,
}

struct Run<'a> {
    pool: &'a Pool,
    over: AtomicBool,
    /// Bytes asked for and not copied yet.
    requested: AtomicU64,
    peak: AtomicU64,
}

impl Run<'_> {
    fn run(&self, args: &LoaderArgs, far: &mut Far, time: Duration) -> Measured<(Progress, Seen)> {
        let begun = Instant::now();
        // A rendezvous and a bit: producers run ahead by one batch each.
        let (queue, batches) = sync_channel(usize::from(args.producers));
        std::thread::scope(|scope| {
            let producers: Vec<_> = (0..u64::from(args.producers))
                .map(|number| {
                    let queue = queue.clone();
                    scope.spawn(move || self.produce(Sizes::new(args.batches, number), &queue, begun))
                })
                .collect();
            drop(queue);
            let progress = self.copy(far, &batches, begun, time);
            // Relaxed: nothing but the word itself is told. Who waits for room in the queue finds it closed.
            self.over.store(true, Ordering::Relaxed);
            drop(batches);
            let mut all = Seen { first: Histogram::new(), settled: Histogram::new() };
            for producer in producers {
                let seen = producer.join().map_err(|_| pinpool::Error::device("a producer panicked"))??;
                all.first.merge(&seen.first);
                all.settled.merge(&seen.settled);
            }
            Ok((progress?, all))
        })
    }

    fn produce(&self, mut sizes: Sizes, queue: &SyncSender<PinnedBuf>, begun: Instant) -> Measured<Seen> {
        let source = vec![1_u8; SOURCE_BYTES];
        let mut seen = Seen { first: Histogram::new(), settled: Histogram::new() };
        while !self.over.load(Ordering::Relaxed) {
            let len = sizes.next();
            // Relaxed: figures.
            let requested = self.requested.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
            self.peak.fetch_max(requested, Ordering::Relaxed);
            let asked = Instant::now();
            let mut buf = self.pool.get(len)?;
            let took = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let is_first = begun.elapsed() <= Duration::from_secs(1);
            if is_first { &mut seen.first } else { &mut seen.settled }.add(took);
            for chunk in buf.as_mut_slice().chunks_mut(SOURCE_BYTES) {
                chunk.copy_from_slice(&source[..chunk.len()]);
            }
            if queue.send(buf).is_err() {
                break;
            }
        }
        Ok(seen)
    }

    fn copy(&self, far: &mut Far, batches: &Receiver<PinnedBuf>, begun: Instant, time: Duration) -> Measured<Progress> {
        let (mut progress, mut under_way) = (Progress::default(), VecDeque::<(Completion, usize)>::new());
        while begun.elapsed() < time {
            // A closed queue: a producer failed, which its own result says.
            let Ok(buf) = batches.recv() else { break };
            if under_way.len() == DEPTH
                && let Some((copy, len)) = under_way.pop_front()
            {
                copy.wait()?;
                self.requested.fetch_sub(len as u64, Ordering::Relaxed);
                progress.add(len, begun);
            }
            let len = buf.len();
            under_way.push_back((far.take(buf)?, len));
        }
        under_way.iter().try_for_each(|(copy, _)| copy.wait())?;
        Ok(progress)
    }
}

impl Figures {
    fn table(&self) -> String {
        let Self { to, backend, preset, batches, producers, .. } = self;
        let rate = |rate: f64, of_raw: f64| format!("{rate:>10.3} GB/s, {of_raw:.3} of raw");
        let rows = [
            format!("{producers} producers, {batches} batches, {preset} over {backend}, to {to}"),
            format!("  raw copies           {:>10.3} GB/s", self.raw_gb_per_s),
            format!("  loader               {}", rate(self.gb_per_s, self.of_raw)),
            format!("  its first second     {}", rate(self.first_second_gb_per_s, self.first_second_of_raw)),
            format!(
                "  acquire, us          p50 {}, p99 {}, worst {} ({} in the first second)",
                self.acquire_p50_us, self.acquire_p99_us, self.acquire_worst_us, self.acquire_worst_first_second_us
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
