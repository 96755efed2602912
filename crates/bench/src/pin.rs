//! `pinpool-bench pin`: how fast each back-end pins.
//!
//! ```text
//!   warm-up, not measured:  every back-end
//!   round 1..R:             touch, then every back-end with 1 thread, with 8 ...    drift affects all of them alike
//!   at the end:             growth of every back-end
//! ```
//!
//! The first touch of memory in a virtual machine is several times slower, and so is memory for huge pages that was freed in
//! small ones. Therefore as much memory is allocated in huge pages and freed again before each measurement.

use std::time::{Duration, Instant};

use clap::Args;
use pinpool::unstable::config::text::format_bytes;
use pinpool::{Backend, Error};
use serde::Serialize;

use super::requested::{self, pool_builder};
use super::statistics::{gb_per_s, median, mib, quotient, rounded};
use super::{BenchError, Measured, Report};
use crate::threads::{Started, spawn_all};

const PAGE_BYTES: u64 = 4096;
/// Default threads of a reserve, as far as the machine has cores.
const RESERVE_THREADS: [usize; 3] = [1, 8, 16];
const DEFAULT_BYTES: u64 = 1 << 30;
const DEFAULT_SIZES: [u64; 3] = [1 << 20, 8 << 20, 64 << 20];

/// Measure how fast memory is pinned: in one reserve at the start, and in growth by gets that find nothing idle
///
/// Each reserve belongs to a new pool. The baseline is `cuda` (cuMemHostAlloc, as TensorFlow and PyTorch pin) where there is
/// a driver, else `touch`: ordinary memory, mapped and touched by one thread. `cuda` pins in one call of the driver, whatever
/// the threads; its growth is measured only on request. Growth is the first `--bytes` of a pool, in gets of one size by
/// several threads at once that keep their buffers; threads beyond the number of buffers get none. `heap` neither pins nor
/// touches in growth: its figure is that of the mapping alone.
#[derive(Debug, Args)]
pub(super) struct PinArgs {
    /// Total bytes [default: 1GiB, or the default ceiling of a pool on this machine if that is less]
    #[arg(long, value_name = "SIZE", value_parser = requested::at_least(PAGE_BYTES))]
    bytes: Option<u64>,

    /// Threads that touch a reserve; repeatable [default: 1, 8, 16 and all cores, as far as there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,

    /// How often each reserve is made; the table shows the median and the best
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Bytes of one get in growth; repeatable [default: 1MiB, 8MiB and 64MiB, each limited to --bytes]
    #[arg(long = "size", value_name = "SIZE", value_parser = requested::at_least(PAGE_BYTES))]
    sizes: Vec<u64>,

    /// Threads that get at once in growth; repeatable
    #[arg(long, value_name = "N", default_values_t = [1, 4], value_parser = clap::value_parser!(u16).range(1..=1024))]
    getters: Vec<u16>,

    /// Only this back-end; repeatable
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,
}

#[derive(Debug, Serialize)]
pub(super) struct PinReport {
    bytes: u64,
    /// The default ceiling of a pool on this machine.
    most_bytes: u64,
    cores: usize,
    rounds: u16,
    /// What the other rates are compared with.
    baseline: &'static str,
    touch: PinRate,
    touch_over_baseline: f64,
    backends: Vec<BackendRates>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct BackendRates {
    backend: &'static str,
    reserve: Vec<ReserveRate>,
    growth: Vec<GrowthRate>,
}

#[derive(Debug, Serialize)]
struct ReserveRate {
    threads: usize,
    #[serde(flatten)]
    rate: PinRate,
    over_baseline: f64,
}

/// The rate over all rounds.
#[derive(Debug, Clone, Copy, Serialize)]
struct PinRate {
    gb_per_s: f64,
    best_gb_per_s: f64,
}

#[derive(Debug, Serialize)]
struct GrowthRate {
    size_bytes: u64,
    threads: usize,
    gets: usize,
    gb_per_s: f64,
    worst_get_us: f64,
}

impl PinArgs {
    pub(super) fn measure(&self) -> Measured<PinReport> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads(cores);
        let most_bytes = requested::default_ceiling_bytes()?;
        let bytes = self.bytes.unwrap_or(DEFAULT_BYTES.min(most_bytes));
        requested::fits(format!("--bytes {}", format_bytes(bytes)), "each reserve", bytes, "give fewer")?;
        let (sizes, getters) = (self.sizes(bytes)?, requested::distinct(&self.getters));
        let warm_up = || reserve(bytes, cores, Backend::Heap);
        warm_up()?;
        let (mut backends, missing) = requested::backends(&self.backend, bytes)?;
        let requested_count = backends.len();
        let is_cuda = |backend: &Backend| matches!(backend, Backend::Cuda);
        if !backends.iter().any(is_cuda) && requested::hold(&Backend::Cuda, bytes).is_ok() {
            backends.push(Backend::Cuda);
        }

        let mut touches = Vec::new();
        let mut reserves = vec![vec![Vec::new(); threads.len()]; backends.len()];
        for _ in 0..self.rounds {
            warm_up()?;
            touches.push(gb_per_s(bytes, touch(bytes)));
            for (backend, by_threads) in backends.iter().zip(&mut reserves) {
                for (&threads, rates) in threads.iter().zip(by_threads) {
                    warm_up()?;
                    rates.push(gb_per_s(bytes, reserve(bytes, threads, backend.clone())?));
                }
            }
        }
        let touch = PinRate::of(touches);
        let reserves: Vec<Vec<_>> = reserves.into_iter().map(|by| by.into_iter().map(PinRate::of).collect()).collect();
        let cuda = backends.iter().position(is_cuda);
        // `cuda` ignores the number of threads; the last measurement stands for all.
        let baseline = cuda.and_then(|index| reserves[index].last()).copied().unwrap_or(touch);
        let over_baseline = |rate: PinRate| quotient(rate.gb_per_s, baseline.gb_per_s);

        let backend_rates = |(at, (backend, rates)): (usize, (Backend, Vec<PinRate>))| {
            let reserve = threads.iter().zip(rates);
            let reserve =
                reserve.map(|(&threads, rate)| ReserveRate { threads, rate, over_baseline: over_baseline(rate) });
            // A back-end that is only the baseline does not grow.
            let sizes = if at < requested_count { &sizes[..] } else { &[] };
            let runs = sizes.iter().flat_map(|&size| getters.iter().map(move |&threads| (size, threads)));
            let growth = runs.map(|(size_bytes, threads)| {
                warm_up()?;
                growth(bytes, size_bytes, usize::from(threads), backend.clone())
            });
            let growth = growth.collect::<Measured<_>>()?;
            Ok(BackendRates { backend: backend.name(), reserve: reserve.collect(), growth })
        };
        Ok(PinReport {
            bytes,
            most_bytes,
            cores,
            rounds: self.rounds,
            baseline: if cuda.is_some() { "cuda" } else { "touch" },
            touch,
            touch_over_baseline: over_baseline(touch),
            backends: backends.iter().cloned().zip(reserves).enumerate().map(backend_rates).collect::<Measured<_>>()?,
            missing,
        })
    }

    fn threads(&self, cores: usize) -> Vec<usize> {
        if !self.threads.is_empty() {
            return requested::distinct(&self.threads).into_iter().map(usize::from).collect();
        }
        let fewer = RESERVE_THREADS.into_iter().filter(|&threads| threads < cores);
        fewer.chain([cores]).collect()
    }

    /// Sizes of gets in growth by `bytes`.
    fn sizes(&self, bytes: u64) -> Measured<Vec<u64>> {
        if let Some(size) = self.sizes.iter().find(|&&size| size > bytes) {
            let [size, bytes] = [*size, bytes].map(format_bytes);
            let why = format!("--size {size}: more than all of --bytes, {bytes}; give a smaller one, or more bytes");
            return Err(BenchError::Setting(why));
        }
        let default = DEFAULT_SIZES.map(|size| size.min(bytes));
        Ok(requested::distinct(if self.sizes.is_empty() { &default } else { &self.sizes }))
    }
}

/// The cost of the memory itself: this thread writes to every page of a new allocation.
pub(super) fn touch(bytes: u64) -> Duration {
    let begun = Instant::now();
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0)];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
    begun.elapsed()
}

fn reserve(bytes: u64, threads: usize, backend: Backend) -> Measured<Duration> {
    let pool = pool_builder(backend).unstable_pin_threads(threads).build()?;
    let begun = Instant::now();
    pool.prewarm(bytes)?;
    Ok(begun.elapsed())
}

fn growth(bytes: u64, size_bytes: u64, threads: usize, backend: Backend) -> Measured<GrowthRate> {
    let pool = pool_builder(backend).build()?;
    let len = usize::try_from(size_bytes).unwrap_or(usize::MAX);
    let gets = usize::try_from(bytes / size_bytes).unwrap_or(0);
    let get_all = |thread: usize| {
        let count = gets / threads + usize::from(thread < gets % threads);
        let (mut buffers, mut worst) = (Vec::with_capacity(count), Duration::ZERO);
        for _ in 0..count {
            let begun = Instant::now();
            buffers.push(pool.get(len)?);
            worst = worst.max(begun.elapsed());
        }
        Ok::<_, Error>((buffers, worst))
    };
    let begun = Instant::now();
    let results = std::thread::scope(|scope| {
        let all = spawn_all(scope, threads, &get_all)?;
        let panicked = || Err(Error::device("a thread panicked"));
        let join = |one: Started<'_, _>| one.join().ok().flatten().unwrap_or_else(panicked);
        Measured::Ok(all.into_iter().map(join).collect::<Vec<_>>())
    })?;
    let took = begun.elapsed();
    let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    let worst = results.iter().map(|(_, worst)| *worst).max().unwrap_or_default();
    Ok(GrowthRate {
        size_bytes,
        threads,
        gets: results.iter().map(|(buffers, _)| buffers.len()).sum(),
        gb_per_s: gb_per_s(gets as u64 * size_bytes, took),
        worst_get_us: rounded(worst.as_secs_f64() * 1e6),
    })
}

impl PinRate {
    fn of(rates: Vec<f64>) -> PinRate {
        let best_gb_per_s = rates.iter().copied().fold(0.0, f64::max);
        PinRate { gb_per_s: median(rates), best_gb_per_s }
    }
}

impl Report for PinReport {
    fn table(&self) -> (Vec<String>, &[String]) {
        let PinReport { bytes, most_bytes, cores, rounds, baseline, touch, .. } = self;
        let limited =
            if bytes == most_bytes && *bytes < DEFAULT_BYTES { ", all that this machine gives a pool" } else { "" };
        let row = |name: &str, threads: usize, rate: PinRate, over: f64| {
            format!("  {name:<10} {threads:>8} {:>10.3} {:>10.3} {over:>10.3}", rate.gb_per_s, rate.best_gb_per_s)
        };
        let mut lines = vec![
            format!("a reserve of {}{limited}, on {cores} cores, GB/s of {rounds} rounds", mib(*bytes)),
            format!("  {:<10} {:>8} {:>10} {:>10} {:>10}", "", "threads", "median", "best", format!("/ {baseline}")),
            row("touch", 1, *touch, self.touch_over_baseline),
        ];
        for rates in &self.backends {
            let by_threads = |at: &ReserveRate| row(rates.backend, at.threads, at.rate, at.over_baseline);
            lines.extend(rates.reserve.iter().map(by_threads));
        }
        lines.push(format!(
            "growth by as much, in gets of one size, GB/s\n  {:<10} {:>8} {:>10} {:>10} {:>14}",
            "", "threads", "get", "growth", "worst get, us"
        ));
        for rates in &self.backends {
            lines.extend(rates.growth.iter().map(
                |GrowthRate { size_bytes, threads, gb_per_s, worst_get_us, .. }| {
                    let size = mib(*size_bytes);
                    format!("  {:<10} {threads:>8} {size:>10} {gb_per_s:>10.3} {worst_get_us:>14.1}", rates.backend)
                },
            ));
        }
        (lines, &self.missing)
    }
}
