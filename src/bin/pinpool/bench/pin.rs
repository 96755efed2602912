//! `pinpool bench pin`: how fast each back-end pins.
//!
//! ```text
//!   once, not measured:  every back-end
//!   round 1..R:          touch, every back-end with 1 thread, with 8 ...         so that what drifts drifts under all
//!   at the end:          growth of every back-end
//! ```
//!
//! Memory that a virtual machine never touched is several times slower the first time, and so is memory for huge pages that
//! came back in small ones. So before each of these as much is made ready: taken in huge pages, and given back.

use std::time::{Duration, Instant};

use clap::Args;
use pinpool::config::quantity::format_bytes;
use pinpool::{Backend, Error};
use serde::Serialize;

use super::asked;
use super::figure::{Measured, NotMeasured, gb_per_s, median, mib, quotient, rounded};
use super::sources;
use crate::ExitError;
use crate::terminal::Terminal;

/// Below a page nothing is pinned for its own sake.
const PAGE_BYTES: u64 = 4096;
/// Threads that touch a reserve, on a machine that has as many cores.
const RESERVE_THREADS: [usize; 3] = [1, 8, 16];

/// How fast memory is pinned: one reserve at the start, and growth in gets that find nothing idle
///
/// Each reserve is a new pool's. The baseline is `cuda` (cuMemHostAlloc, as TensorFlow and PyTorch pin) where there is a
/// driver, else `touch`: ordinary memory, mapped and touched by one thread. `cuda` is one call of the driver, whatever the
/// threads; where it is not asked for, its growth is not measured. Each growth is a pool's first `--bytes`, got in pieces of
/// one size by so many threads at once and kept; threads for which there is no piece get nothing. `heap` pins and touches
/// nothing in growth: that is the mapping alone.
#[derive(Debug, Args)]
pub(crate) struct PinArgs {
    /// Bytes in all [default: 1GiB, or what a pool would hold at most on this machine if that is less]
    #[arg(long, value_name = "SIZE", value_parser = asked::at_least(PAGE_BYTES))]
    bytes: Option<u64>,

    /// Threads that touch a reserve; may be given several times [default: 1, 8, 16 and all cores, as far as there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,

    /// How often each reserve is made; the median and the best are shown
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Bytes of one get in growth; may be given several times [default: 1MiB, 8MiB and 64MiB, each cut to --bytes]
    #[arg(long = "size", value_name = "SIZE", value_parser = asked::at_least(PAGE_BYTES))]
    sizes: Vec<u64>,

    /// Threads that get at once in growth; may be given several times
    #[arg(long, value_name = "N", default_values_t = [1, 4], value_parser = clap::value_parser!(u16).range(1..=1024))]
    getters: Vec<u16>,

    /// Only this back-end; may be given several times
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What each pool is asked for when nothing is said.
const DEFAULT_BYTES: u64 = 1 << 30;
const DEFAULT_SIZES: [u64; 3] = [1 << 20, 8 << 20, 64 << 20];

/// One run; its fields are the JSON object's.
#[derive(Debug, Serialize)]
struct Figures {
    bytes: u64,
    /// What a pool holds at most on this machine unless told otherwise.
    most_bytes: u64,
    cores: usize,
    rounds: u16,
    /// Whose rate the others are compared with.
    baseline: &'static str,
    touch: Rate,
    touch_over_baseline: f64,
    backends: Vec<OfBackend>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct OfBackend {
    backend: &'static str,
    reserve: Vec<Reserve>,
    growth: Vec<Growth>,
}

#[derive(Debug, Serialize)]
struct Reserve {
    threads: usize,
    #[serde(flatten)]
    rate: Rate,
    over_baseline: f64,
}

/// Of several rounds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Rate {
    gb_per_s: f64,
    best_gb_per_s: f64,
}

#[derive(Debug, Serialize)]
struct Growth {
    size_bytes: u64,
    threads: usize,
    gets: usize,
    gb_per_s: f64,
    worst_get_us: f64,
}

pub(crate) fn run(args: &PinArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let figures = measure(args).map_err(|error| super::failed(&error, terminal))?;
    if args.json { terminal.print(serde_json::json!(figures)) } else { terminal.print(figures.table()) }
}

fn measure(args: &PinArgs) -> Measured<Figures> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if args.threads.is_empty() {
        let mut threads: Vec<_> = RESERVE_THREADS.into_iter().filter(|&threads| threads <= cores).collect();
        if !threads.contains(&cores) {
            threads.push(cores);
        }
        threads
    } else {
        asked::once(&args.threads).into_iter().map(usize::from).collect()
    };
    let most_bytes = sources::most_bytes()?;
    let bytes = args.bytes.unwrap_or(DEFAULT_BYTES.min(most_bytes));
    asked::fits(format!("--bytes {}", format_bytes(bytes)), "each reserve", bytes, "give fewer")?;
    let sizes = args.sizes(bytes)?;
    let getters = asked::once(&args.getters);
    let make_ready = || reserve(bytes, cores, Backend::Heap);
    make_ready()?;
    let (mut backends, missing) = asked::backends(&args.backend, bytes)?;
    let asked_for = backends.len();
    let is_cuda = |backend: &Backend| matches!(backend, Backend::Cuda);
    if !backends.iter().any(is_cuda) && sources::hold(&Backend::Cuda, bytes).is_ok() {
        backends.push(Backend::Cuda);
    }

    let mut touches = Vec::new();
    let mut reserves = vec![vec![Vec::new(); threads.len()]; backends.len()];
    for _ in 0..args.rounds {
        make_ready()?;
        touches.push(gb_per_s(bytes, touch(bytes)));
        for (backend, by_threads) in backends.iter().zip(&mut reserves) {
            for (&threads, rates) in threads.iter().zip(by_threads) {
                make_ready()?;
                rates.push(gb_per_s(bytes, reserve(bytes, threads, backend.clone())?));
            }
        }
    }
    let touch = Rate::of(touches);
    let reserves: Vec<Vec<_>> = reserves.into_iter().map(|of| of.into_iter().map(Rate::of).collect()).collect();
    let driver = backends.iter().position(is_cuda);
    // The one with the most threads, of which it takes no notice.
    let baseline = driver.and_then(|index| reserves[index].last()).copied().unwrap_or(touch);

    let of_backend = |(at, (backend, rates)): (usize, (Backend, Vec<Rate>))| {
        let over_baseline = |rate: Rate| quotient(rate.gb_per_s, baseline.gb_per_s);
        let reserve = threads.iter().zip(rates);
        let reserve = reserve.map(|(&threads, rate)| Reserve { threads, rate, over_baseline: over_baseline(rate) });
        // The baseline alone does not grow.
        let sizes = if at < asked_for { &sizes[..] } else { &[] };
        let runs = sizes.iter().flat_map(|&size| getters.iter().map(move |&threads| (size, threads)));
        let growth = runs.map(|(size_bytes, threads)| {
            make_ready().and_then(|_| growth(bytes, size_bytes, usize::from(threads), backend.clone()))
        });
        Ok(OfBackend { backend: backend.name(), reserve: reserve.collect(), growth: growth.collect::<Measured<_>>()? })
    };
    Ok(Figures {
        bytes,
        most_bytes,
        cores,
        rounds: args.rounds,
        baseline: if driver.is_some() { "cuda" } else { "touch" },
        touch,
        touch_over_baseline: quotient(touch.gb_per_s, baseline.gb_per_s),
        backends: backends.iter().cloned().zip(reserves).enumerate().map(of_backend).collect::<Measured<_>>()?,
        missing,
    })
}

impl PinArgs {
    /// Sizes of gets in growth by `bytes`.
    fn sizes(&self, bytes: u64) -> Measured<Vec<u64>> {
        if let Some(size) = self.sizes.iter().find(|&&size| size > bytes) {
            let [size, bytes] = [*size, bytes].map(format_bytes);
            let why = format!("--size {size}: more than all of --bytes, {bytes}; give a smaller one, or more bytes");
            return Err(NotMeasured::Setting(why));
        }
        let default = DEFAULT_SIZES.map(|size| size.min(bytes));
        Ok(asked::once(if self.sizes.is_empty() { &default } else { &self.sizes }))
    }
}

/// What the memory itself costs: fresh pages, written once by this thread.
pub(super) fn touch(bytes: u64) -> Duration {
    let begun = Instant::now();
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0)];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
    begun.elapsed()
}

fn reserve(bytes: u64, threads: usize, backend: Backend) -> Measured<Duration> {
    let pool = sources::builder(backend).pin_threads(threads as u64).build()?;
    let begun = Instant::now();
    pool.prewarm(bytes)?;
    Ok(begun.elapsed())
}

fn growth(bytes: u64, size_bytes: u64, threads: usize, backend: Backend) -> Measured<Growth> {
    let pool = sources::builder(backend).build()?;
    let len = usize::try_from(size_bytes).unwrap_or(usize::MAX);
    let gets = usize::try_from(bytes / size_bytes).unwrap_or(0);
    let get_all = |number: usize| {
        let mine = gets / threads + usize::from(number < gets % threads);
        let (mut kept, mut worst) = (Vec::with_capacity(mine), Duration::ZERO);
        for _ in 0..mine {
            let begun = Instant::now();
            kept.push(pool.get(len)?);
            worst = worst.max(begun.elapsed());
        }
        Ok::<_, Error>((kept, worst))
    };
    let begun = Instant::now();
    let done = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|number| scope.spawn(move || get_all(number))).collect();
        all.into_iter().map(|one| one.join().map_err(|_| Error::device("a thread panicked"))?).collect::<Vec<_>>()
    });
    let took = begun.elapsed();
    let done = done.into_iter().collect::<Result<Vec<_>, _>>()?;
    let worst = done.iter().map(|(_, worst)| *worst).max().unwrap_or_default();
    let worst_get_us = rounded(worst.as_secs_f64() * 1e6);
    let gb_per_s = gb_per_s(gets as u64 * size_bytes, took);
    Ok(Growth { size_bytes, threads, gets: done.iter().map(|(kept, _)| kept.len()).sum(), gb_per_s, worst_get_us })
}

impl Rate {
    fn of(rates: Vec<f64>) -> Rate {
        let best_gb_per_s = rates.iter().copied().fold(0.0, f64::max);
        Rate { gb_per_s: median(rates), best_gb_per_s }
    }
}

impl Figures {
    fn table(&self) -> String {
        let Figures { bytes, most_bytes, cores, rounds, baseline, touch, .. } = self;
        let why =
            if bytes == most_bytes && *bytes < DEFAULT_BYTES { ", all that this machine gives a pool" } else { "" };
        let row = |name: &str, threads: usize, rate: Rate, over: f64| {
            format!("  {name:<10} {threads:>8} {:>10.3} {:>10.3} {over:>10.3}", rate.gb_per_s, rate.best_gb_per_s)
        };
        let mut rows = vec![
            format!("a reserve of {}{why}, on {cores} cores, GB/s of {rounds} rounds", mib(*bytes)),
            format!("  {:<10} {:>8} {:>10} {:>10} {:>10}", "", "threads", "median", "best", format!("/ {baseline}")),
        ];
        rows.push(row("touch", 1, *touch, self.touch_over_baseline));
        for of in &self.backends {
            let of_threads = |at: &Reserve| row(of.backend, at.threads, at.rate, at.over_baseline);
            rows.extend(of.reserve.iter().map(of_threads));
        }
        rows.push(format!(
            "growth by as much, in gets of one size, GB/s\n  {:<10} {:>8} {:>10} {:>10} {:>14}",
            "", "threads", "get", "growth", "worst get, us"
        ));
        for of in &self.backends {
            rows.extend(of.growth.iter().map(|Growth { size_bytes, threads, gb_per_s, worst_get_us, .. }| {
                let size = mib(*size_bytes);
                format!("  {:<10} {threads:>8} {size:>10} {gb_per_s:>10.3} {worst_get_us:>14.1}", of.backend)
            }));
        }
        rows.extend(self.missing.iter().map(|why| format!("  not here: {why}")));
        rows.join("\n")
    }
}
