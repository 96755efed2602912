//! `pinpool bench pin`: how fast each back-end pins.

use std::time::{Duration, Instant};

use clap::Args;
use pinpool::config::quantity::parse_bytes;
use pinpool::{Backend, Error};
use serde::Serialize;

use super::figure::{Measured, gb_per_s, mib, rounded};
use super::sources;
use crate::Failed;
use crate::screen::Screen;

/// How fast memory is pinned: one reserve at the start, and growth in gets that find nothing idle
///
/// The baseline is ordinary memory, mapped and touched by one thread. Each growth is a pool's first `--bytes`, got in
/// pieces of one size by so many threads at once and kept. `heap` pins and touches nothing: its growth is the mapping alone.
#[derive(Debug, Args)]
pub(crate) struct PinArgs {
    /// Bytes in all
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_bytes)]
    bytes: u64,

    /// Bytes of one get in growth; may be given several times
    #[arg(long = "size", value_name = "SIZE", value_parser = parse_bytes, default_values = ["1MiB", "8MiB", "64MiB"])]
    sizes: Vec<u64>,

    /// Threads that get at once in growth; may be given several times
    #[arg(long, value_name = "N", default_values_t = [1, 4])]
    threads: Vec<u16>,

    /// Only this back-end; may be given several times
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One run; its fields are the JSON object's.
#[derive(Debug, Serialize)]
struct Figures {
    bytes: u64,
    cores: usize,
    touch_gb_per_s: f64,
    backends: Vec<OfBackend>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct OfBackend {
    backend: &'static str,
    reserve_gb_per_s: f64,
    growth: Vec<Growth>,
}

#[derive(Debug, Serialize)]
struct Growth {
    size_bytes: u64,
    threads: usize,
    gb_per_s: f64,
    worst_get_us: f64,
}

pub(crate) fn run(args: &PinArgs, screen: &Screen) -> Result<(), Failed> {
    let figures = measure(args).map_err(|error| super::failed(&error, screen))?;
    if args.json { screen.print(serde_json::json!(figures)) } else { screen.print(figures.table()) }
}

fn measure(args: &PinArgs) -> Measured<Figures> {
    let (backends, missing) = sources::available(&args.backend);
    let touch = touch(args.bytes);
    let backends = backends.into_iter().map(|backend| of_backend(args, backend)).collect::<Result<_, _>>()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Figures { bytes: args.bytes, cores, touch_gb_per_s: gb_per_s(args.bytes, touch), backends, missing })
}

/// What the memory itself costs: fresh pages, written once.
fn touch(bytes: u64) -> Duration {
    let begun = Instant::now();
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0)];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
    begun.elapsed()
}

fn of_backend(args: &PinArgs, backend: Backend) -> Measured<OfBackend> {
    let name = backend.name();
    let pool = sources::builder(backend.clone()).build()?;
    let begun = Instant::now();
    pool.prewarm(args.bytes)?;
    let reserve_gb_per_s = gb_per_s(args.bytes, begun.elapsed());
    drop(pool);
    let mut growths = Vec::new();
    for &size_bytes in &args.sizes {
        for &threads in &args.threads {
            growths.push(growth(args.bytes, size_bytes, usize::from(threads.max(1)), backend.clone())?);
        }
    }
    Ok(OfBackend { backend: name, reserve_gb_per_s, growth: growths })
}

fn growth(bytes: u64, size_bytes: u64, threads: usize, backend: Backend) -> Measured<Growth> {
    let pool = sources::builder(backend).build()?;
    let len = usize::try_from(size_bytes.max(1)).unwrap_or(usize::MAX);
    let each = usize::try_from(bytes / size_bytes.max(1)).unwrap_or(0).div_ceil(threads).max(1);
    let get_all = || {
        let (mut kept, mut worst) = (Vec::with_capacity(each), Duration::ZERO);
        for _ in 0..each {
            let begun = Instant::now();
            kept.push(pool.get(len)?);
            worst = worst.max(begun.elapsed());
        }
        Ok::<_, Error>((kept, worst))
    };
    let begun = Instant::now();
    let done = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(get_all)).collect();
        all.into_iter().map(|one| one.join().map_err(|_| Error::device("a thread panicked"))?).collect::<Vec<_>>()
    });
    let took = begun.elapsed();
    let done = done.into_iter().collect::<Result<Vec<_>, _>>()?;
    let worst = done.iter().map(|(_, worst)| *worst).max().unwrap_or_default();
    let got = (each * threads) as u64 * size_bytes;
    Ok(Growth { size_bytes, threads, gb_per_s: gb_per_s(got, took), worst_get_us: rounded(worst.as_secs_f64() * 1e6) })
}

impl Figures {
    fn table(&self) -> String {
        let mut rows = vec![
            format!("{} pinned on {} cores, GB/s", mib(self.bytes), self.cores),
            format!("  {:<10} {:>10}", "touch", self.touch_gb_per_s),
            format!(
                "  {:<10} {:>10} {:>10} {:>8} {:>10} {:>14}",
                "", "reserve", "get", "threads", "growth", "worst get, us"
            ),
        ];
        for of in &self.backends {
            rows.push(format!("  {:<10} {:>10}", of.backend, of.reserve_gb_per_s));
            rows.extend(of.growth.iter().map(|growth| {
                let Growth { size_bytes, threads, gb_per_s, worst_get_us } = growth;
                format!(
                    "  {:<10} {:>10} {:>10} {threads:>8} {gb_per_s:>10} {worst_get_us:>14}",
                    "",
                    "",
                    mib(*size_bytes)
                )
            }));
        }
        rows.extend(self.missing.iter().map(|why| format!("  not here: {why}")));
        rows.join("\n")
    }
}
