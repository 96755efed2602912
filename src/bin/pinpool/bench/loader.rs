//! `pinpool bench loader`: what a loader gets out of the pool.
//!
//! | the same loop ([`feed`](super::feed)) with | is |
//! | --- | --- |
//! | buffers made beforehand that nobody fills | `raw`: what the device takes; before and after the others, for machines drift |
//! | buffers made beforehand | `ring`: the ideal, as many as can be in use at once |
//! | get and `copy_to` | the pool, which begins with nothing |

use std::time::Duration;

use clap::Args;
use pinpool::{Backend, Pool, Preset};
use serde::Serialize;

use super::asked;
use super::far::Far;
use super::feed::{self, Batches, Buffers, FIRST, LONGEST_BYTES, Loop};
use super::figure::{Measured, mib, micros, quotient, rounded};
use super::sources;
use crate::ExitError;
use crate::terminal::Terminal;

/// Producers fill batches and one thread copies them: GB/s beside the same loop that fills nothing, and beside a ring
///
/// `raw` is the loop with buffers made beforehand that nobody fills, the mean of a run before and one after; `ring` the loop
/// with as many buffers made beforehand as can be in use at once, newest first. Both are of memory that `cuda` gives, where
/// the pool's is a GPU's.
#[derive(Debug, Args)]
pub(crate) struct LoaderArgs {
    /// Threads that fill
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    producers: u16,

    /// Bytes of a batch; may be given several times
    #[arg(long, value_enum, default_values_t = [Batches::Fixed, Batches::Lognormal])]
    batches: Vec<Batches>,

    /// Seconds of each loop, after a first one
    #[arg(long, value_name = "S", default_value = "4", value_parser = asked::seconds)]
    seconds: Duration,

    /// Hand batches over as they are: what the pool itself costs where the cores fill less than the device can copy
    #[arg(long)]
    no_fill: bool,

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

/// One run; its fields are the JSON object's.
#[derive(Debug, Serialize)]
struct Figures {
    to: String,
    backend: &'static str,
    preset: &'static str,
    producers: u16,
    fills: bool,
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

pub(crate) fn run(args: &LoaderArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let figures = measure(args).map_err(|error| super::failed(&error, terminal))?;
    if args.json { terminal.print(serde_json::json!(figures)) } else { terminal.print(figures.table()) }
}

fn measure(args: &LoaderArgs) -> Measured<Figures> {
    let all_batches = asked::once(&args.batches);
    for &batches in &all_batches {
        let (argument, len) = (format!("--producers {}", args.producers), feed::ring_len(args.producers));
        let what = format!("a ring of {len} {} batches", batches.name());
        asked::fits(argument, what, feed::ring_bytes(args.producers, batches), "give fewer")?;
    }
    let mut far = Far::open(LONGEST_BYTES)?;
    let time = FIRST + args.seconds;
    // Asks nothing of the back-end yet.
    let pool = || sources::builder(args.backend.clone()).preset(args.preset).build();
    let names = pool()?.stats();
    let loaders = all_batches.iter().map(|&batches| loader(args, batches, time, &mut far, &pool()?));
    Ok(Figures {
        loaders: loaders.collect::<Measured<_>>()?,
        to: far.describe(),
        backend: names.backend,
        preset: names.preset,
        producers: args.producers,
        fills: !args.no_fill,
    })
}

fn loader(args: &LoaderArgs, batches: Batches, time: Duration, far: &mut Far, pool: &Pool) -> Measured<Loader> {
    let (producers, fills) = (args.producers, !args.no_fill);
    let beforehand = match pool.stats().backend {
        "vmm" | "register" => Backend::Cuda,
        _ => pool.config().backend.clone(),
    };
    let beforehand = sources::builder(beforehand).build()?;
    let mut of_ring = |fills: bool| {
        let ring = Loop::new(Buffers::ring(&beforehand, producers, batches)?, fills);
        ring.run(producers, batches, far, time).map(|(progress, _)| progress.settled_gb_per_s())
    };
    let (raw_before, ring) = (of_ring(false)?, of_ring(fills)?);
    let from_pool = Loop::new(Buffers::Pool(pool), fills);
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
        batches: batches.name(),
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

impl Figures {
    fn table(&self) -> String {
        let Self { to, backend, preset, producers, fills, loaders } = self;
        let what = if *fills { "producers" } else { "producers that fill nothing" };
        let mut rows = vec![format!("{producers} {what}, {preset} over {backend}, to {to}")];
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
