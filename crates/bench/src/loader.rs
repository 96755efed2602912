//! `pinpool-bench loader`: the throughput of a loader on the pool.
//!
//! | figure | the loop of [`producers`] with |
//! | --- | --- |
//! | `raw` | buffers made beforehand, not filled: what the device takes; run before and after the others, to average drift |
//! | `ring` | buffers made beforehand, as many as can be in use at once: the ideal |
//! | pool | get and `copy_to`, starting with an empty pool |

use std::time::Duration;

use clap::Args;
use pinpool::{Backend, Pool, Preset};
use serde::Serialize;

use super::destination::BenchTarget;
use super::producers::{self, BatchPattern, Buffers, FIRST, LONGEST_BYTES};
use super::requested::{self, pool_builder};
use super::statistics::{mib, micros, quotient, rounded};
use super::{Measured, Report};

/// Measure producers that fill batches and one thread that copies them: GB/s beside the same loop without filling, and
/// beside a ring
///
/// `raw` is the loop with buffers made beforehand that are not filled, the mean of a run before and one after; `ring` is the
/// loop with as many buffers made beforehand as can be in use at once, newest first. Both use memory of `cuda` where the
/// pool's memory is pinned for a GPU.
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

    /// Do not fill batches: shows the cost of the pool where the cores fill less than the device can copy
    #[arg(long)]
    no_fill: bool,

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
    fills: bool,
    buffers: Option<u16>,
    loaders: Vec<LoaderFigures>,
}

/// With one kind of batches.
#[derive(Debug, Serialize)]
struct LoaderFigures {
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
    /// Calls that pinned memory and their bytes, in the first second and later: the reason for slow gets.
    pins_first_second: u64,
    pinned_first_second_bytes: u64,
    pins_later: u64,
    pinned_later_bytes: u64,
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
            fills: !self.no_fill,
            buffers: self.buffers,
        })
    }

    fn measure_batches(
        &self,
        batches: BatchPattern,
        destination: &mut BenchTarget,
        pool: &Pool,
    ) -> Measured<LoaderFigures> {
        let (producers, fills, time) = (self.producers, !self.no_fill, FIRST + self.seconds);
        let ring_backend = match pool.stats().backend {
            "vmm" | "register" => Backend::Cuda,
            _ => pool.config().backend.clone(),
        };
        let ring_pool = pool_builder(ring_backend).build()?;
        let mut run = |buffers, fills| producers::run(&buffers, (producers, batches, fills), destination, time);
        let new_ring = || Buffers::ring(&ring_pool, producers, batches);
        let raw_before = run(new_ring()?, false)?.later_gb_per_s();
        let ring = run(new_ring()?, fills)?.later_gb_per_s();
        let result = run(Buffers::Pool(pool), fills)?;
        let stats = pool.stats();
        let raw_after = run(new_ring()?, false)?.later_gb_per_s();

        let raw = f64::midpoint(raw_before, raw_after);
        let (later, first) = (result.later_gb_per_s(), result.first_second_gb_per_s());
        let (calls, requested_peak_bytes) = (stats.underlying, result.peak_requested_bytes);
        let early = result.first_second_calls.unwrap_or(calls);
        let pinned_over_requested = quotient(stats.peak_pinned_bytes as f64, requested_peak_bytes.max(1) as f64);
        Ok(LoaderFigures {
            batches: batches.name(),
            raw_gb_per_s: rounded(raw),
            raw_runs_gb_per_s: [raw_before, raw_after],
            ring_gb_per_s: ring,
            ring_of_raw: quotient(ring, raw),
            gb_per_s: later,
            of_raw: quotient(later, raw),
            of_ring: quotient(later, ring),
            first_second_gb_per_s: first,
            first_second_of_raw: quotient(first, raw),
            acquire_p50_us: micros(result.gets.later.per_mille(500)),
            acquire_p99_us: micros(result.gets.later.per_mille(990)),
            acquire_worst_us: micros(result.gets.later.max_ns()),
            acquire_worst_first_second_us: micros(result.gets.first.max_ns()),
            pins_first_second: early.allocs,
            pinned_first_second_bytes: early.alloc_bytes,
            pins_later: calls.allocs - early.allocs,
            pinned_later_bytes: calls.alloc_bytes - early.alloc_bytes,
            requested_peak_bytes,
            pinned_peak_bytes: stats.peak_pinned_bytes,
            pinned_over_requested,
        })
    }
}

impl Report for LoaderReport {
    fn table(&self) -> (Vec<String>, &[String]) {
        let Self { to, backend, preset, producers, fills, buffers, loaders } = self;
        let what = if *fills { "producers" } else { "producers that fill nothing" };
        let buffers = buffers.map_or_else(String::new, |buffers| format!(", at most {buffers} buffers"));
        let title = format!("{producers} {what}, {preset} over {backend}{buffers}, to {to}");
        ([title].into_iter().chain(loaders.iter().flat_map(LoaderFigures::lines)).collect(), &[])
    }
}

impl LoaderFigures {
    fn lines(&self) -> [String; 8] {
        let [before, after] = self.raw_runs_gb_per_s;
        let rate = |what: &str, rate: f64, rest: String| format!("  {what:<20} {rate:>10.3} GB/s{rest}");
        let of_raw = |of_raw: f64| format!(", {of_raw:.3} of raw");
        let pins = |pins: u64, bytes: u64| format!("{pins} of {}", mib(bytes));
        [
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
                "  pinned/requested     {:>10.3} ({} for {})",
                self.pinned_over_requested,
                mib(self.pinned_peak_bytes),
                mib(self.requested_peak_bytes)
            ),
        ]
    }
}
