//! `pinpool-bench loader`: the throughput of a loader on the pool.
//!
//! The loop of [`producers`] runs over a ring of buffers made beforehand, as many as can be in use at once, and over the pool,
//! which starts empty.

use std::time::Duration;

use clap::Args;
use pinpool::{Backend, Pool, Preset};
use serde::Serialize;

use super::Measured;
use super::destination::BenchTarget;
use super::producers::{self, BatchPattern, Buffers, FIRST, LONGEST_BYTES};
use super::requested::{self, pool_builder};
use super::statistics::{micros, quotient};

/// Measure producers that fill batches and one thread that copies them: GB/s, compared with a ring of buffers
///
/// The ring has as many buffers as can be in use at once, newest first, in memory of `cuda` if the pool's memory is pinned for
/// a GPU. Rates are without the first second.
#[derive(Debug, Args)]
pub(super) struct LoaderArgs {
    /// Threads that fill
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    producers: u16,

    /// Bytes of a batch; repeatable
    #[arg(long, value_enum, default_values_t = [BatchPattern::Fixed, BatchPattern::Lognormal])]
    batches: Vec<BatchPattern>,

    /// Seconds of each loop, after a first one
    #[arg(long, value_name = "S", default_value = "4", value_parser = requested::seconds)]
    seconds: Duration,

    /// Back-end of the pool
    #[arg(long, value_name = "NAME", default_value = "auto")]
    backend: Backend,

    /// Buffers of the longest batch that the ceiling of the pool holds [default: no ceiling]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    buffers: Option<u16>,

    /// Rules of the pool
    #[arg(long, value_name = "NAME", default_value = "adaptive")]
    preset: Preset,
}

#[derive(Debug, Serialize)]
pub(super) struct LoaderReport {
    to: String,
    backend: &'static str,
    preset: &'static str,
    producers: u16,
    buffers: Option<u16>,
    loaders: Vec<LoaderFigures>,
}

/// With one kind of batches.
#[derive(Debug, Serialize)]
struct LoaderFigures {
    batches: String,
    ring_gb_per_s: f64,
    gb_per_s: f64,
    of_ring: f64,
    acquire_p50_us: f64,
    acquire_p99_us: f64,
    acquire_worst_us: f64,
    pins: u64,
    requested_peak_bytes: u64,
    pinned_peak_bytes: u64,
    pinned_over_requested: f64,
}

impl LoaderArgs {
    pub(super) fn measure(&self) -> Measured<LoaderReport> {
        let all_batches = requested::distinct(&self.batches);
        for &batches in &all_batches {
            let (argument, len) = (format!("--producers {}", self.producers), producers::ring_len(self.producers));
            let what = format!("a ring of {len} {} batches", batches.name());
            requested::fits(argument, what, producers::ring_bytes(self.producers, batches), "give fewer")?;
        }
        let mut destination = BenchTarget::open(LONGEST_BYTES)?;
        // Building a pool allocates nothing.
        let pool = |batches: BatchPattern| {
            // Classes are up to an eighth longer than what they hold.
            let max_bytes = self.buffers.map(|buffers| u64::from(buffers) * batches.longest_bytes() as u64 * 9 / 8);
            let pool = pool_builder(self.backend.clone()).preset(self.preset).max_bytes(max_bytes);
            pool.wait(Duration::from_secs(30)).build()
        };
        let names = pool(BatchPattern::Fixed)?.stats();
        let loaders =
            all_batches.iter().map(|&batches| self.measure_batches(batches, &mut destination, &pool(batches)?));
        Ok(LoaderReport {
            loaders: loaders.collect::<Measured<_>>()?,
            to: destination.describe(),
            backend: names.backend,
            preset: names.preset,
            producers: self.producers,
            buffers: self.buffers,
        })
    }

    fn measure_batches(
        &self,
        batches: BatchPattern,
        destination: &mut BenchTarget,
        pool: &Pool,
    ) -> Measured<LoaderFigures> {
        let (producers, time) = (self.producers, FIRST + self.seconds);
        let ring_backend = match pool.stats().backend {
            "vmm" | "register" => Backend::Cuda,
            _ => pool.config().backend.clone(),
        };
        let ring_pool = pool_builder(ring_backend).build()?;
        let mut run = |buffers| producers::run(&buffers, (producers, batches), destination, time);
        let ring = run(Buffers::ring(&ring_pool, producers, batches)?)?.gb_per_s();
        let result = run(Buffers::Pool(pool))?;
        let (stats, rate) = (pool.stats(), result.gb_per_s());
        let requested_peak_bytes = result.peak_requested_bytes;
        Ok(LoaderFigures {
            batches: batches.name(),
            ring_gb_per_s: ring,
            gb_per_s: rate,
            of_ring: quotient(rate, ring),
            acquire_p50_us: micros(result.gets.per_mille(500)),
            acquire_p99_us: micros(result.gets.per_mille(990)),
            acquire_worst_us: micros(result.gets.max_ns()),
            pins: stats.memory.pin.count,
            requested_peak_bytes,
            pinned_peak_bytes: stats.memory.peak_held_bytes,
            pinned_over_requested: quotient(stats.memory.peak_held_bytes as f64, requested_peak_bytes.max(1) as f64),
        })
    }
}
