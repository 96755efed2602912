//! `pinpool doctor --bench`: what pinning, hits and copies cost on this machine, next to malloc and the driver.

use std::hint::black_box;
use std::time::{Duration, Instant};

use pinpool::{Backend, Completion, Error, Limit, Pool, Preset};
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns_left, format_about};
use pinpool_cli::terminal::Terminal;
use pinpool_loader::{Destination, SinkDestination};
use serde::Serialize;

/// Each figure is the median of so many rounds, in which what stands beside it takes its turn.
const ROUNDS: usize = 5;
/// Gets and puts of a round.
const PAIRS: u32 = 100_000;
/// Time that a round of copies takes.
const COPYING: Duration = Duration::from_millis(300);
/// Copies at once.
const LANES: usize = 2;

/// What is measured: the pool of the settings, the driver's own call and ordinary memory. Without a GPU copies go to a host sink.
pub(super) struct Bench {
    /// Bytes to pin at once.
    pub(super) bytes: u64,
    /// Bytes of a buffer.
    pub(super) size: u64,
}

/// What was measured: rates in bytes for each nanosecond, which are GB/s.
#[derive(Debug, Serialize)]
struct Figures {
    backend: &'static str,
    is_pinned: bool,
    device: String,
    bytes: u64,
    size: u64,
    pin_gb_s: f64,
    /// The rate of the driver's own call; `None` if there is no driver.
    driver_gb_s: Option<f64>,
    ordinary_gb_s: f64,
    hit_ns: f64,
    malloc_ns: f64,
    copy_gb_s: f64,
    ordinary_copy_gb_s: f64,
}

impl Bench {
    pub(super) fn run(&self, is_json: bool, terminal: &Terminal) -> Result<(), ExitError> {
        let figures = self.measure().map_err(|error| terminal.refuse(&error))?;
        terminal.print(if is_json { serde_json::json!(figures).to_string() } else { figures.table() })
    }

    fn measure(&self) -> Result<Figures, Error> {
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (pool, ordinary) = (Pool::builder().build()?, ordinary()?);
        let mut to = destination(&pool)?;
        let [pin, driver, touched] = rounds([
            &mut || pin_once(self.bytes),
            &mut || Ok(pin_by_driver(len(self.bytes)).unwrap_or(Duration::ZERO)),
            &mut || Ok(touch(len(self.bytes))),
        ])?;
        let [hit, malloc] = rounds([&mut || hits(&pool, len(self.size)), &mut || Ok(mallocs(len(self.size)))])?;
        let rate = |of: Duration| self.bytes as f64 / of.as_nanos() as f64;
        let mut copy = |pool: &Pool| copies(pool, len(self.size), &mut *to);
        let mut copy_gb_s = Vec::new();
        for pool in [&pool, &ordinary] {
            let of_pool = (0..ROUNDS).map(|_| copy(pool)).collect::<Result<Vec<_>, _>>()?;
            copy_gb_s.push(median(of_pool));
        }
        let stats = pool.stats();
        Ok(Figures {
            backend: stats.backend,
            is_pinned: stats.is_pinned,
            device: to.describe(),
            bytes: self.bytes,
            size: self.size,
            pin_gb_s: rate(pin),
            driver_gb_s: (!driver.is_zero()).then(|| rate(driver)),
            ordinary_gb_s: rate(touched),
            hit_ns: hit.as_nanos() as f64 / f64::from(PAIRS),
            malloc_ns: malloc.as_nanos() as f64 / f64::from(PAIRS),
            copy_gb_s: copy_gb_s[0],
            ordinary_copy_gb_s: copy_gb_s[1],
        })
    }
}

impl Figures {
    fn table(&self) -> String {
        let row = |what: String, pool: String, beside: String| vec![what, pool, beside];
        let size = format_about(self.size);
        let driver =
            self.driver_gb_s.map_or_else(|| "no driver".to_owned(), |rate| format!("the driver {rate:.1} GB/s"));
        let pinned = if self.is_pinned { "" } else { ", not pinned" };
        columns_left(&[
            row(String::new(), format!("pool on {}{pinned}", self.backend), "beside it".to_owned()),
            row(
                format!("pin {}", format_about(self.bytes)),
                format!("{:.1} GB/s", self.pin_gb_s),
                format!("{driver}, ordinary memory {:.1} GB/s", self.ordinary_gb_s),
            ),
            row(
                format!("get and put {size}"),
                format!("{:.1} ns", self.hit_ns),
                format!("malloc and free {:.1} ns", self.malloc_ns),
            ),
            row(
                format!("copy {size} to {}", self.device),
                format!("{:.1} GB/s", self.copy_gb_s),
                format!("from ordinary memory {:.1} GB/s", self.ordinary_copy_gb_s),
            ),
        ])
        .trim_end()
        .to_owned()
    }
}

/// The middle one.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// The median of each, which take turns.
fn rounds<const N: usize>(mut of: [&mut dyn FnMut() -> Result<Duration, Error>; N]) -> Result<[Duration; N], Error> {
    let mut took: [Vec<Duration>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (measure, took) in of.iter_mut().zip(&mut took) {
            took.push(measure()?);
        }
    }
    Ok(took.map(|mut took| {
        took.sort();
        took[ROUNDS / 2]
    }))
}

/// A pool over memory that is not page-locked.
fn ordinary() -> Result<Pool, Error> {
    Pool::builder().without_env().backend(Backend::Heap).build()
}

/// The GPU if there is one, else a host sink.
fn destination(pool: &Pool) -> Result<Box<dyn Destination>, Error> {
    match pinpool_cli::gpu::open(pool.config().device, LANES) {
        Ok(device) => Ok(device),
        Err(_) => Ok(Box::new(SinkDestination::new(LANES)?)),
    }
}

fn pin_once(bytes: u64) -> Result<Duration, Error> {
    let pool = Pool::builder().preset(Preset::Adaptive).reserve_bytes(0).setting("reserve_wait", true).build()?;
    let begun = Instant::now();
    pool.prewarm(bytes)?;
    Ok(begun.elapsed())
}

/// One `cuMemHostAlloc`; `None` without a driver.
fn pin_by_driver(len: usize) -> Option<Duration> {
    let builder = Pool::builder().without_env().backend(Backend::Cuda).preset(Preset::TensorFlow);
    let pool = builder.max_bytes(Limit::Unlimited).build().ok()?;
    let begun = Instant::now();
    let buf = pool.get(len).ok()?;
    let took = begun.elapsed();
    drop(buf);
    Some(took)
}

/// Ordinary memory that is written to once.
fn touch(len: usize) -> Duration {
    let begun = Instant::now();
    black_box(vec![1_u8; len]);
    begun.elapsed()
}

fn hits(pool: &Pool, len: usize) -> Result<Duration, Error> {
    drop(pool.get(len)?);
    let begun = Instant::now();
    for _ in 0..PAIRS {
        drop(black_box(pool.get(len)?));
    }
    Ok(begun.elapsed())
}

fn mallocs(len: usize) -> Duration {
    drop(black_box(Vec::<u8>::with_capacity(len)));
    let begun = Instant::now();
    for _ in 0..PAIRS {
        drop(black_box(Vec::<u8>::with_capacity(len)));
    }
    begun.elapsed()
}

/// Bytes for each nanosecond.
fn copies(pool: &Pool, len: usize, to: &mut dyn Destination) -> Result<f64, Error> {
    let mut running: [Option<Completion>; LANES] = std::array::from_fn(|_| None);
    let (begun, mut copied) = (Instant::now(), 0_u64);
    while begun.elapsed() < COPYING {
        for (lane, running) in running.iter_mut().enumerate() {
            running.take().as_ref().map_or(Ok(()), Completion::wait)?;
            *running = Some(to.send(lane, pool.get(len)?)?);
            copied += len as u64;
        }
    }
    running.iter().flatten().try_for_each(Completion::wait)?;
    Ok(copied as f64 / begun.elapsed().as_nanos() as f64)
}
