//! `pinpool-bench reserve`: how soon a pool with a large reserve provides its first buffer.
//!
//! ```text
//!   waited for:  build ───────────── all is pinned ─────────────▶ get, fill        first buffer
//!   meanwhile:   build ─ one step ─▶ get, fill        first buffer
//!                        a get of new memory each few milliseconds, kept ─▶ all is pinned      worst get
//! ```
//!
//! A round is one pool of each kind. Requests during the pinning need unused memory, so each pins granules ahead of the reserve or
//! carves memory that the reserve has pinned.

use std::time::{Duration, Instant};

use clap::Args;
use pinpool::Backend;
use pinpool::unstable::config::text::format_bytes;
use serde::Serialize;

use super::requested::{self, pool_builder};
use super::statistics::{gb_per_s, median, rounded};
use super::{BenchError, Measured};

const PAGE_BYTES: u64 = 4096;
const DEFAULT_SIZES: [u64; 3] = [256 << 20, 1 << 30, 4 << 30];
/// Between two requests during the pinning.
const PAUSE: Duration = Duration::from_millis(1);
/// Their buffers take at most one part in this many of the reserve.
const KEPT_SHARE: u64 = 4;
/// A reserve that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(600);

/// Measure how soon a pool with a large reserve provides its first buffer
///
/// For each backend and size: the time from the start of the build until the first buffer is filled, with the whole reserve
/// (PINPOOL_RESERVE_WAIT=1) and with its first step (=0); then the longest of requests of one size, one each millisecond, while
/// the rest is pinned, and the time until all of it is pinned.
#[derive(Debug, Args)]
pub(super) struct ReserveArgs {
    /// Bytes of the reserve; repeatable [default: 256MiB, 1GiB and 4GiB, as far as the default limit allows]
    #[arg(long, value_name = "SIZE", value_parser = requested::at_least(PAGE_BYTES))]
    bytes: Vec<u64>,

    /// Bytes of one request
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = requested::at_least(1))]
    size: u64,

    /// Number of rounds; the table shows medians, and the worst request of all
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Only this backend; repeatable
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,
}

#[derive(Debug, Serialize)]
pub(super) struct ReserveReport {
    rounds: u16,
    size_bytes: u64,
    reserves: Vec<Reserve>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Reserve {
    backend: &'static str,
    bytes: u64,
    /// Time from the start of the build to the first filled buffer, if the build waits for the whole reserve.
    first_waited_ms: f64,
    /// The same if the build waits only for the first step of the reserve.
    first_ms: f64,
    /// Requests during the pinning.
    gets: usize,
    median_get_us: f64,
    worst_get_us: f64,
    /// Time from the start of the build until the reserve is complete.
    all_ms: f64,
    gb_per_s: f64,
}

/// One pool that pins its reserve during the requests.
struct Background {
    first: Duration,
    gets: Vec<Duration>,
    all: Duration,
}

impl ReserveArgs {
    pub(super) fn measure(&self) -> Measured<ReserveReport> {
        let most_bytes = requested::default_limit_bytes()?;
        let fitting = || DEFAULT_SIZES.into_iter().filter(|&bytes| bytes <= most_bytes).collect::<Vec<_>>();
        let sizes = if self.bytes.is_empty() { fitting() } else { requested::distinct(&self.bytes) };
        let Some(&largest) = sizes.iter().max() else {
            return Err(BenchError::Setting(format!(
                "the default limit of {} is too small for the default sizes: give --bytes",
                format_bytes(most_bytes)
            )));
        };
        requested::fits(format!("--bytes {}", format_bytes(largest)), "each reserve", largest, "give fewer")?;
        let asked = if self.backend.is_empty() {
            vec![Backend::Vmm, Backend::Register, Backend::Mlock]
        } else {
            self.backend.clone()
        };
        let (backends, missing) = requested::backends(&asked, largest)?;
        let mut reserves = Vec::new();
        for backend in backends {
            for &bytes in &sizes {
                reserves.push(self.reserve(&backend, bytes)?);
            }
        }
        Ok(ReserveReport { rounds: self.rounds, size_bytes: self.size, reserves, missing })
    }

    fn reserve(&self, backend: &Backend, bytes: u64) -> Measured<Reserve> {
        let (mut waited, mut first, mut gets, mut all) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            waited.push(millis(self.first_of(backend, bytes, true)?.0));
            let background = self.in_background(backend, bytes)?;
            first.push(millis(background.first));
            gets.extend(background.gets.iter().map(|get| get.as_secs_f64() * 1e6));
            all.push(millis(background.all));
        }
        let all_ms = median(all);
        let rate = gb_per_s(bytes, Duration::from_secs_f64(all_ms / 1e3));
        Ok(Reserve {
            backend: backend.name(),
            bytes,
            first_waited_ms: rounded(median(waited)),
            first_ms: rounded(median(first)),
            gets: gets.len(),
            worst_get_us: rounded(gets.iter().copied().fold(0.0, f64::max)),
            median_get_us: rounded(median(gets)),
            all_ms: rounded(all_ms),
            gb_per_s: rate,
        })
    }

    /// The time to the first filled buffer, and the pool.
    fn first_of(&self, backend: &Backend, bytes: u64, waits: bool) -> Measured<(Duration, pinpool::Pool, Instant)> {
        let builder = pool_builder(backend.clone()).reserve_bytes(bytes).setting("reserve_wait", waits);
        let begun = Instant::now();
        let pool = builder.max_bytes(bytes.saturating_mul(2)).build()?;
        let mut buf = pool.get(self.len())?;
        buf.wait_slice_mut()?.fill(1);
        Ok((begun.elapsed(), pool, begun))
    }

    fn in_background(&self, backend: &Backend, bytes: u64) -> Measured<Background> {
        let (first, pool, begun) = self.first_of(backend, bytes, false)?;
        let (mut gets, mut kept) = (Vec::new(), Vec::new());
        let most = usize::try_from(bytes / KEPT_SHARE / self.size.max(1)).unwrap_or(usize::MAX);
        while pool.stats().memory.reserve_fraction() < 1.0 && begun.elapsed() < PATIENCE && kept.len() < most {
            let asked = Instant::now();
            let buf = pool.get(self.len())?;
            gets.push(asked.elapsed());
            kept.push(buf);
            std::thread::sleep(PAUSE);
        }
        if !pool.wait_reserved(PATIENCE)? {
            return Err(BenchError::Failure(format!(
                "a reserve of {} is incomplete after {PATIENCE:?}",
                format_bytes(bytes)
            )));
        }
        Ok(Background { first, gets, all: begun.elapsed() })
    }

    fn len(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
