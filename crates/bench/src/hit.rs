//! `pinpool-bench hit`: a request and its return while a buffer is idle.
//!
//! The pool and the baselines alternate, so that a slow moment of the machine affects all of them. Each number is the median of
//! its rounds.

use std::time::Duration;

use clap::Args;
use pinpool::{Backend, Pool};
use serde_json::{Value, json};

use super::baselines::{ArrayQueues, Baseline, Malloc};
use super::patterns::{self, Pattern};
use super::statistics::median;
use super::{BenchError, Measured};

const ROUNDS: usize = 9;
/// Approximate time of each baseline in each round.
const ROUND_TIME: Duration = Duration::from_millis(50);
/// Number of requests and returns for an estimate of the speed.
const ESTIMATE_PAIRS: u64 = 20_000;

/// Time a request and its return when a buffer is idle, in nanoseconds, next to other allocators
///
/// `ns_per_pair` is the mean time of a request and its return on the slowest thread (in `cross`, on the slowest pair of threads).
#[derive(Debug, Args)]
pub(super) struct HitArgs {
    /// Number of threads; `cross` uses them in pairs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,

    /// Which threads request and return
    #[arg(long, value_enum, default_value_t = Pattern::Same)]
    pattern: Pattern,

    /// Backend of the pool: heap, mlock, vmm, register, cuda
    #[arg(long, value_name = "NAME", default_value = "heap")]
    backend: Backend,
}

impl HitArgs {
    pub(super) fn measure(&self) -> Measured<Value> {
        let (threads, pattern) = (usize::from(self.threads), self.pattern);
        if pattern == Pattern::Cross && !threads.is_multiple_of(2) {
            let why = format!("--threads {threads}: cross takes threads in pairs; give an even number");
            return Err(BenchError::Setting(why));
        }
        let pool = Pool::builder().setting("trace", "none").backend(self.backend.clone()).build()?;
        let queues = ArrayQueues::default();
        let mut series = [
            Series::new(&pool, pattern, threads)?,
            Series::new(&queues, pattern, threads)?,
            Series::new(&Malloc, pattern, threads)?,
        ];
        for _ in 0..ROUNDS {
            series.iter_mut().try_for_each(Series::round)?;
        }
        let stats = pool.stats();
        if stats.requests.failed > 0 || stats.requests.pageable > 0 {
            let (failed, pageable) = (stats.requests.failed, stats.requests.pageable);
            let why = format!("{failed} requests failed and {pageable} got pageable memory: the numbers are invalid");
            return Err(BenchError::Failure(why));
        }
        let [ns_per_pair, array_queue, malloc] =
            series.map(|series| (median(series.ns_per_pair) * 100.0).round() / 100.0);
        Ok(json!({
            "pattern": format!("{pattern:?}").to_lowercase(),
            "threads": threads,
            "cores": std::thread::available_parallelism().map_or(1, usize::from),
            "backend": stats.backend,
            "preset": stats.preset,
            "ns_per_pair": ns_per_pair,
            "baselines": { "array_queue": array_queue, "malloc": malloc },
        }))
    }
}

/// All rounds of one baseline.
struct Series<'a> {
    run: Box<dyn Fn(u64) -> Measured<Duration> + 'a>,
    pairs: u64,
    ns_per_pair: Vec<f64>,
}

impl<'a> Series<'a> {
    fn new(baseline: &'a impl Baseline, pattern: Pattern, threads: usize) -> Measured<Self> {
        let run = Box::new(move |pairs| patterns::run(baseline, pattern, threads, pairs));
        let estimate = run(ESTIMATE_PAIRS)?.max(Duration::from_micros(1));
        let pairs = u128::from(ESTIMATE_PAIRS) * ROUND_TIME.as_nanos() / estimate.as_nanos();
        Ok(Self { run, pairs: u64::try_from(pairs).unwrap_or(u64::MAX).max(1), ns_per_pair: Vec::new() })
    }

    fn round(&mut self) -> Measured<()> {
        let took = (self.run)(self.pairs)?;
        self.ns_per_pair.push(took.as_nanos() as f64 / self.pairs as f64);
        Ok(())
    }
}
