//! `pinpool doctor --bench`: the cost of pinning, hits and copies on this machine, compared with malloc and the driver.

use std::hint::black_box;
use std::time::{Duration, Instant};

use pinpool::{Backend, Completion, Error, Limit, Pool, Preset};
use pinpool_loader::{Destination, LoadedBatch, SinkDestination};
use pinpool_os::format::Size;
use serde_json::{Value, json};

use pinpool_cli::table::columns_left;
use pinpool_cli::terminal::Terminal;

/// Each number is the median of this many rounds, in which all measurements alternate.
const ROUNDS: usize = 5;
/// Number of requests and releases in a round.
const PAIRS: u32 = 100_000;
/// Duration of a round of copies.
const COPYING: Duration = Duration::from_millis(300);
/// Concurrent copies.
const LANES: usize = 2;

type Result<T> = std::result::Result<T, Error>;

/// Measures a pool with the settings of the environment, for `bytes` pinned at once and buffers of `size`.
pub(super) fn run(
    bytes: u64,
    size: u64,
    is_json: bool,
    terminal: &Terminal,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let measured = measure(bytes, size)?;
    Ok(terminal.print(if is_json { measured.to_string() } else { table(&measured).trim_end().to_owned() })?)
}

/// Returns the measurements. Rates are in bytes per nanosecond, which is GB/s. Without a GPU, copies go to a host sink.
fn measure(bytes: u64, size: u64) -> Result<Value> {
    let [pinned_len, len] = [bytes, size].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let pool = Pool::builder().setting("trace", "none").build()?;
    let ordinary = Pool::builder().without_env().backend(Backend::Heap).build()?;
    let mut to: Box<dyn Destination> = match pinpool_cli::gpu::open(pool.unstable_config().device, LANES) {
        Ok(device) => device,
        Err(_) => Box::new(SinkDestination::new(LANES)?),
    };
    let rate = |bytes: u64, took: Duration| bytes as f64 / took.as_nanos().max(1) as f64;
    let per_pair = |took: Duration| took.as_nanos() as f64 / f64::from(PAIRS);
    let [pin, driver, touch] = medians([
        &mut || pin_once(bytes).map(|took| rate(bytes, took)),
        &mut || Ok(pin_by_driver(pinned_len).map_or(0.0, |took| rate(bytes, took))),
        &mut || Ok(rate(bytes, timed(|| drop(black_box(vec![1_u8; pinned_len]))))),
    ])?;
    drop(pool.get(len)?);
    let [hit, malloc] = medians([
        &mut || {
            let begun = Instant::now();
            (0..PAIRS).try_for_each(|_| pool.get(len).map(|buf| drop(black_box(buf))))?;
            Ok(per_pair(begun.elapsed()))
        },
        &mut || Ok(per_pair(timed(|| (0..PAIRS).for_each(|_| drop(black_box(Vec::<u8>::with_capacity(len))))))),
    ])?;
    let mut copy = |pool: &Pool| medians([&mut || copies(pool, len, &mut *to)]);
    let ([copy_pinned], [copy_ordinary]) = (copy(&pool)?, copy(&ordinary)?);
    let stats = pool.stats();
    Ok(json!({
        "backend": stats.backend, "pinned_by": stats.pinned_by, "device": to.name(), "bytes": bytes, "size": size,
        "pin_gb_s": pin, "driver_gb_s": (driver > 0.0).then_some(driver), "ordinary_gb_s": touch,
        "hit_ns": hit, "malloc_ns": malloc, "copy_gb_s": copy_pinned, "ordinary_copy_gb_s": copy_ordinary,
    }))
}

fn table(measured: &Value) -> String {
    let number = |name: &str, unit: &str| {
        measured[name].as_f64().map_or("none".to_owned(), |number| format!("{number:.1} {unit}"))
    };
    let [bytes, size] = ["bytes", "size"].map(|name| Size(measured[name].as_u64().unwrap_or(0)));
    let [backend, device] = ["backend", "device"].map(|name| measured[name].as_str().unwrap_or_default());
    let rates = ["pin_gb_s", "driver_gb_s", "ordinary_gb_s", "copy_gb_s", "ordinary_copy_gb_s"];
    let [pin, driver, touch, copy, ordinary_copy] = rates.map(|name| number(name, "GB/s"));
    let [hit, malloc] = ["hit_ns", "malloc_ns"].map(|name| number(name, "ns"));
    let pinned = if measured["pinned_by"].is_null() { ", not pinned" } else { "" };
    let rows = [
        [String::new(), format!("pool on {backend}{pinned}"), "without the pool".to_owned()],
        [format!("pin {bytes}"), pin, format!("driver {driver}, pageable memory {touch}")],
        [format!("request and release {size}"), hit, format!("malloc and free {malloc}")],
        [format!("copy {size} to {device}"), copy, format!("from pageable memory {ordinary_copy}")],
    ];
    columns_left(&rows.map(Vec::from))
}

/// Returns the median of each measurement over all rounds.
fn medians<const N: usize>(mut measures: [&mut dyn FnMut() -> Result<f64>; N]) -> Result<[f64; N]> {
    let mut all: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (measure, all) in measures.iter_mut().zip(&mut all) {
            all.push(measure()?);
        }
    }
    Ok(all.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[ROUNDS / 2]
    }))
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn pin_once(bytes: u64) -> Result<Duration> {
    let builder = Pool::builder().preset(Preset::Adaptive).reserve(0).reserve_wait(true);
    let pool = builder.setting("rounding", "eighths").growth(true).setting("trace", "none").build()?;
    let begun = Instant::now();
    pool.reserve(bytes)?;
    Ok(begun.elapsed())
}

/// Times one `cuMemHostAlloc` call; `None` without a driver.
fn pin_by_driver(len: usize) -> Option<Duration> {
    let builder = Pool::builder().without_env().backend(Backend::Cuda).preset(Preset::TensorFlow);
    let pool = builder.max_bytes(Limit::Unlimited).build().ok()?;
    let begun = Instant::now();
    let _buf = pool.get(len).ok()?;
    Some(begun.elapsed())
}

/// Returns the rate of copies in bytes per nanosecond.
fn copies(pool: &Pool, len: usize, to: &mut dyn Destination) -> Result<f64> {
    let mut running: [Option<Completion>; LANES] = std::array::from_fn(|_| None);
    let (begun, mut copied) = (Instant::now(), 0_u64);
    while begun.elapsed() < COPYING {
        for (lane, running) in running.iter_mut().enumerate() {
            running.take().as_ref().map_or(Ok(()), Completion::wait)?;
            *running = Some(to.send(lane, &LoadedBatch::default(), pool.get(len)?)?);
            copied += len as u64;
        }
    }
    running.iter().flatten().try_for_each(Completion::wait)?;
    Ok(copied as f64 / begun.elapsed().as_nanos() as f64)
}
