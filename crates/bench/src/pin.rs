//! `pinpool-bench pin`: the speed of pinning by backend.
//!
//! ```text
//!   warm-up, not measured:  every backend
//!   round 1..R:             touch, then every backend with 1 thread, with 8 ...    drift affects all of them
//! ```
//!
//! In a virtual machine the first touch of memory is several times slower, and so are huge pages made of freed small pages.
//! Therefore, before each measurement, the same amount of memory is allocated in huge pages and freed again.

use std::time::{Duration, Instant};

use clap::Args;
use pinpool::Backend;
use pinpool::unstable::config::text::format_bytes;
use serde_json::{Value, json};

use super::Measured;
use super::requested::{self, pool_builder};
use super::statistics::{gb_per_s, median, rounded};

const PAGE_BYTES: u64 = 4096;
/// Default numbers of threads below the number of cores.
const RESERVE_THREADS: [usize; 3] = [1, 8, 16];
const DEFAULT_BYTES: u64 = 1 << 30;

/// Measure how fast a pool pins a reserve, in GB/s by backend and number of threads
///
/// Each reserve belongs to a new pool. `touch` is ordinary memory, mapped and touched by one thread. `cuda` (cuMemHostAlloc, as
/// in TensorFlow and PyTorch) pins in one driver call, so the number of threads has no effect. `first_ms` is the time until a
/// program has filled the first buffer of a pool that pins its reserve in the background (PINPOOL_RESERVE_WAIT=0).
#[derive(Debug, Args)]
pub(super) struct PinArgs {
    /// Bytes of each reserve [default: 1GiB, or the default limit of a pool on this machine if that is less]
    #[arg(long, value_name = "SIZE", value_parser = requested::at_least(PAGE_BYTES))]
    bytes: Option<u64>,

    /// Threads that touch a reserve; repeatable [default: 1, 8, 16, up to the number of cores, which is the last]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,

    /// Number of rounds; the report contains the median and the best
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Only this backend; repeatable
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,
}

impl PinArgs {
    pub(super) fn measure(&self) -> Measured<Value> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads(cores);
        let most_bytes = requested::default_limit_bytes()?;
        let bytes = self.bytes.unwrap_or(DEFAULT_BYTES.min(most_bytes));
        requested::fits(format!("--bytes {}", format_bytes(bytes)), "each reserve", bytes, "give fewer")?;
        let warm_up = || reserve(bytes, cores, Backend::Heap);
        warm_up()?;
        let (backends, missing) = requested::backends(&self.backend, bytes)?;

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
        let backend_rates = |(backend, rates): (&Backend, Vec<Vec<f64>>)| {
            let reserve = threads.iter().zip(rates).map(|(threads, rates)| {
                let mut reserve = rate(rates);
                reserve["threads"] = json!(threads);
                reserve
            });
            let reserve: Vec<_> = reserve.collect();
            Measured::Ok(
                json!({ "backend": backend.name(), "first_ms": first_ms(bytes, backend)?, "reserve": reserve }),
            )
        };
        let backends: Vec<_> = backends.iter().zip(reserves).map(backend_rates).collect::<Measured<_>>()?;
        Ok(json!({
            "bytes": bytes,
            "most_bytes": most_bytes,
            "cores": cores,
            "rounds": self.rounds,
            "touch": rate(touches),
            "backends": backends,
            "missing": missing,
        }))
    }

    fn threads(&self, cores: usize) -> Vec<usize> {
        if !self.threads.is_empty() {
            return self.threads.iter().copied().map(usize::from).collect();
        }
        RESERVE_THREADS.into_iter().filter(|&threads| threads < cores).chain([cores]).collect()
    }
}

/// Measures the cost of the memory itself: this thread writes to every page of a new allocation.
pub(super) fn touch(bytes: u64) -> Duration {
    let begun = Instant::now();
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0)];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
    begun.elapsed()
}

fn reserve(bytes: u64, threads: usize, backend: Backend) -> Measured<Duration> {
    let pool = pool_builder(backend).unstable_settings(|only| only.pin_threads = Some(threads)).build()?;
    let begun = Instant::now();
    pool.reserve(bytes)?;
    Ok(begun.elapsed())
}

/// Measures the time to the first filled buffer of a pool that pins its reserve in the background.
fn first_ms(bytes: u64, backend: &Backend) -> Measured<f64> {
    let builder = pool_builder(backend.clone()).reserve(bytes).reserve_wait(false);
    let begun = Instant::now();
    let pool = builder.max_bytes(bytes.saturating_mul(2)).build()?;
    pool.get(4096)?.wait_slice_mut()?.fill(1);
    Ok(rounded(begun.elapsed().as_secs_f64() * 1e3))
}

/// Returns the median and the best rate of all rounds.
fn rate(rates: Vec<f64>) -> Value {
    let best_gb_per_s = rates.iter().copied().fold(0.0, f64::max);
    json!({ "gb_per_s": median(rates), "best_gb_per_s": best_gb_per_s })
}
