//! `pinpool-bench copy`: the throughput of copies to the device by backend, and the cost of tracking copies.
//!
//! Tracking is measured as the time of the copying thread for each copy:
//!
//! ```text
//!   bare      one pinned buffer, untracked:      the call alone      ┐ BURST times, timed; then all copies end
//!   copy_to   get ─▶ copy_to, which returns it   tracked by the pool ┘
//! ```
//!
//! The two methods alternate, so that drift affects both. A request includes the query for completed copies.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::unstable::config::text::format_bytes;
use pinpool::{Backend, Completion, Pool};
use serde_json::{Value, json};

use super::Measured;
use super::destination::BenchTarget;
use super::requested::{self, pool_builder};
use super::statistics::{gb_per_s, median, rounded};

/// Copies in flight at once.
const DEPTH: usize = 8;
const DEFAULT_SIZES: [u64; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// Sizes of tracked copies: a buffer of parameters, and a small batch.
const TRACKED_SIZES: [u64; 2] = [4 << 10, 64 << 10];
/// Number of copies between two waits, low enough for every queue.
const BURST: usize = 16;
/// Number of bursts of one method before the other method runs.
const BURSTS: usize = 32;
const ROUNDS_MIN: usize = 3;

/// Measure copies to the device in GB/s by size and backend, and the cost of tracking them
///
/// Copies are queued back to back. `pageable` is the baseline: the same copies from unpinned memory. Without a GPU the copies go
/// to a thread of this process, for which pinned memory makes no difference. `tracked` compares the time of a request and a copy
/// that returns the buffer (`ns`) with the bare call that enqueues a copy (`bare_ns`), on one thread with the best backend.
#[derive(Debug, Args)]
pub(super) struct CopyArgs {
    /// Size of a copy; repeatable [default: 64KiB, 256KiB, 1MiB, 4MiB, 16MiB, 64MiB, up to the limit of this machine]
    #[arg(long = "size", value_name = "SIZE", value_parser = requested::at_least(1))]
    sizes: Vec<u64>,

    /// Seconds for each size and backend
    #[arg(long, value_name = "S", default_value = "0.3", value_parser = requested::seconds)]
    seconds: Duration,

    /// Only this backend; repeatable
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,
}

/// Returns the bytes that one measurement needs: the copies in flight and their destination.
fn needed_bytes(size: u64) -> u64 {
    size.saturating_mul(DEPTH as u64 + 1)
}

impl CopyArgs {
    pub(super) fn measure(&self) -> Measured<Value> {
        let sizes = self.sizes()?;
        let largest = sizes.iter().chain(&TRACKED_SIZES).copied().max().unwrap_or(1);
        let mut destination = BenchTarget::open(usize::try_from(largest).unwrap_or(usize::MAX))?;
        let (available, missing) = requested::backends(&self.backend, largest.saturating_mul(DEPTH as u64))?;
        let best = available.first().cloned().unwrap_or(Backend::Heap);
        let tracked_over = best.name();
        let mut backends = Vec::new();
        let named = available.into_iter().map(|backend| (backend.name(), backend));
        for (backend, source) in [("pageable", Backend::Heap)].into_iter().chain(named) {
            let pool = pool_builder(source).build()?;
            let rates = sizes.iter().map(|&size| rate(&pool, &mut destination, size, self.seconds));
            backends.push(json!({ "backend": backend, "gb_per_s": rates.collect::<Measured<Vec<_>>>()? }));
        }
        let pool = pool_builder(best).build()?;
        let tracked = TRACKED_SIZES.iter().map(|&bytes| track(&pool, &mut destination, bytes, self.seconds));
        let tracked = tracked.collect::<Measured<Vec<_>>>()?;
        Ok(json!({
            "to": destination.describe(),
            "sizes": sizes,
            "backends": backends,
            "tracked_over": tracked_over,
            "tracked": tracked,
            "missing": missing,
        }))
    }

    fn sizes(&self) -> Measured<Vec<u64>> {
        if self.sizes.is_empty() {
            let most_bytes = requested::default_limit_bytes()?;
            return Ok(DEFAULT_SIZES.into_iter().filter(|&size| needed_bytes(size) <= most_bytes).collect());
        }
        for &size in &self.sizes {
            let (argument, what) = (format!("--size {}", format_bytes(size)), format!("{DEPTH} queued and one more"));
            requested::fits(argument, what, needed_bytes(size), "give a smaller one")?;
        }
        Ok(self.sizes.clone())
    }
}

fn rate(pool: &Pool, destination: &mut BenchTarget, size: u64, seconds: Duration) -> Measured<f64> {
    let len = usize::try_from(size).unwrap_or(usize::MAX);
    let mut bufs = (0..DEPTH).map(|_| pool.get(len)).collect::<Result<Vec<_>, _>>()?;
    bufs.iter_mut().try_for_each(|buf| buf.wait_slice_mut().map(|bytes| bytes.fill(1)))?;
    let mut in_flight = VecDeque::new();
    let (begun, mut bytes) = (Instant::now(), 0);
    while begun.elapsed() < seconds {
        for buf in &mut bufs {
            if in_flight.len() == DEPTH
                && let Some(oldest) = in_flight.pop_front()
            {
                Completion::wait(&oldest)?;
            }
            in_flight.push_back(destination.copy(buf, len)?);
            bytes += size;
        }
    }
    in_flight.iter().try_for_each(Completion::wait)?;
    let took = begun.elapsed();
    drop(bufs);
    // The next size needs the memory of this pool.
    pool.clear();
    Ok(gb_per_s(bytes, took))
}

/// Measures the nanoseconds for each copy of this size on one thread.
fn track(pool: &Pool, destination: &mut BenchTarget, bytes: u64, seconds: Duration) -> Measured<Value> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut bare_buf = pool.get(len)?;
    bare_buf.wait_slice_mut()?.fill(1);
    let (mut bare, mut tracked) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    while bare.len() < ROUNDS_MIN || begun.elapsed() < seconds {
        let (mut bare_took, mut tracked_took) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..BURSTS {
            let (buf, burst) = destination.time_untracked(bare_buf, BURST)?;
            bare_buf = buf;
            bare_took += burst;
        }
        for _ in 0..BURSTS {
            let begun = Instant::now();
            for _ in 0..BURST {
                destination.copy_raw(pool.get(len)?)?;
            }
            tracked_took += begun.elapsed();
            destination.synchronize()?;
        }
        bare.push(ns_each(bare_took));
        tracked.push(ns_each(tracked_took));
    }
    let (bare_ns, ns) = (median(bare), median(tracked));
    let beyond_bare_ns = rounded(ns - bare_ns);
    Ok(json!({ "bytes": bytes, "bare_ns": rounded(bare_ns), "ns": rounded(ns), "beyond_bare_ns": beyond_bare_ns }))
}

fn ns_each(took: Duration) -> f64 {
    took.as_secs_f64() * 1e9 / (BURST * BURSTS) as f64
}
