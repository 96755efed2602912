//! `pinpool-bench hit`: a get and its put when a buffer is idle.
//!
//! The pool and each baseline run in turn, round after round, so that a slow moment of the machine affects all of them; each
//! figure is the median of its rounds. A percentile is of single operations between two readings of the clock and contains
//! the cost of such a reading, which `empty` shows.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::{Backend, Pool};
use serde::Serialize;

use super::baselines::{ArrayQueues, Baseline, Empty, Malloc, MutexHashMap};
use super::patterns::{self, Pattern, Probe};
use super::statistics::{Histogram, median};
use super::{BenchError, Measured, Report};

const ROUNDS: usize = 9;
/// Approximate time of each baseline in each round.
const TURN: Duration = Duration::from_millis(50);
/// Pairs to estimate the speed with.
const ESTIMATE_PAIRS: u64 = 20_000;

/// Time a get and its put when a buffer is idle, beside alternatives to the pool, in nanoseconds
///
/// `ns_per_pair` is the time of the slowest thread for each of its pairs (in `cross`, of the pair of threads). The
/// percentiles are of single operations: a get with its put, or in `cross` a get or a put.
#[derive(Debug, Args)]
pub(super) struct HitArgs {
    /// Threads at once; `cross` takes them in pairs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,

    /// Which thread gets and which puts
    #[arg(long, value_enum, default_value_t = Pattern::Same)]
    pattern: Pattern,

    /// Back-end of the pool: heap, sim, mlock, vmm, register, cuda
    #[arg(long, value_name = "NAME", default_value = "heap")]
    backend: Backend,

    /// Also time a pool that records what it does, beside the one that does not
    #[arg(long)]
    record: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct HitReport {
    pattern: String,
    threads: usize,
    cores: usize,
    backend: &'static str,
    preset: &'static str,
    ns_per_pair: f64,
    #[serde(flatten)]
    pool: Percentiles,
    /// Times of the clock alone.
    empty: Percentiles,
    baselines: NsPerPair,
    #[serde(skip_serializing_if = "Option::is_none")]
    recording: Option<Recorded>,
}

/// The pool that records.
#[derive(Debug, Serialize)]
struct Recorded {
    ns_per_pair: f64,
    /// Above those of the pool that does not record.
    more_ns_per_pair: f64,
}

#[derive(Debug, Serialize)]
struct Percentiles {
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    max_ns: u64,
}

/// Times of the baselines.
#[derive(Debug, Serialize)]
struct NsPerPair {
    mutex_hashmap: f64,
    array_queue: f64,
    malloc: f64,
    empty: f64,
}

impl HitArgs {
    pub(super) fn measure(&self) -> Measured<HitReport> {
        let (threads, pattern) = (usize::from(self.threads), self.pattern);
        if pattern == Pattern::Cross && !threads.is_multiple_of(2) {
            let why = format!("--threads {threads}: cross takes threads in pairs; give an even number");
            return Err(BenchError::Setting(why));
        }
        let pool = Pool::builder().backend(self.backend.clone()).build()?;
        let folder = self.record.then(RecordFolder::new).transpose()?;
        let recording_pool = folder.as_ref().map(|folder| folder.pool(self)).transpose()?;
        let (map, queues) = (MutexHashMap::default(), ArrayQueues::default());
        let mut series = [
            Series::new(&pool, pattern, threads)?,
            Series::new(&map, pattern, threads)?,
            Series::new(&queues, pattern, threads)?,
            Series::new(&Malloc, pattern, threads)?,
            Series::new(&Empty, pattern, threads)?,
        ];
        let mut recorded = recording_pool.as_ref().map(|pool| Series::new(pool, pattern, threads)).transpose()?;
        let (mut of_pool, mut of_clock) = <(Histogram, Histogram)>::default();
        for _ in 0..ROUNDS {
            series.iter_mut().chain(recorded.as_mut()).try_for_each(Series::round)?;
            let pairs = series[0].pairs / 4;
            time_operations(&pool, pattern, threads, pairs, &mut of_pool)?;
            time_operations(&Empty, pattern, threads, pairs, &mut of_clock)?;
        }
        let stats = pool.stats();
        if stats.failed_gets > 0 || stats.fallbacks > 0 {
            let (failed, fallbacks) = (stats.failed_gets, stats.fallbacks);
            let why =
                format!("{failed} gets failed and {fallbacks} fell back to unpinned memory: the figures are invalid");
            return Err(BenchError::Failure(why));
        }
        let [ns_per_pair, mutex_hashmap, array_queue, malloc, empty] = series.map(Series::median_ns);
        let recording = recorded.map(|series| {
            let with = series.median_ns();
            Recorded { ns_per_pair: with, more_ns_per_pair: ((with - ns_per_pair) * 100.0).round() / 100.0 }
        });
        Ok(HitReport {
            pattern: format!("{pattern:?}").to_lowercase(),
            threads,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            backend: stats.backend,
            preset: stats.preset,
            ns_per_pair,
            pool: Percentiles::of(&of_pool),
            empty: Percentiles::of(&of_clock),
            baselines: NsPerPair { mutex_hashmap, array_queue, malloc, empty },
            recording,
        })
    }
}

/// A folder for a recording, removed in the end.
struct RecordFolder(PathBuf);

impl RecordFolder {
    fn new() -> Measured<Self> {
        let path = std::env::temp_dir().join(format!("pinpool-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| BenchError::Failure(format!("{}: {error}", path.display())))?;
        Ok(Self(path))
    }

    fn pool(&self, args: &HitArgs) -> Measured<Pool> {
        Ok(Pool::builder().backend(args.backend.clone()).trace(self.0.join("hit.trace")).build()?)
    }
}

impl Drop for RecordFolder {
    fn drop(&mut self) {
        // What is left lies in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
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
        let run = Box::new(move |pairs| Ok(patterns::run(baseline, pattern, threads, pairs, || ())?.0));
        let estimate = run(ESTIMATE_PAIRS)?.max(Duration::from_micros(1));
        let pairs = u128::from(ESTIMATE_PAIRS) * TURN.as_nanos() / estimate.as_nanos();
        Ok(Self { run, pairs: u64::try_from(pairs).unwrap_or(u64::MAX).max(1), ns_per_pair: Vec::new() })
    }

    fn round(&mut self) -> Measured<()> {
        let took = (self.run)(self.pairs)?;
        self.ns_per_pair.push(took.as_nanos() as f64 / self.pairs as f64);
        Ok(())
    }

    fn median_ns(self) -> f64 {
        (median(self.ns_per_pair) * 100.0).round() / 100.0
    }
}

fn time_operations(
    baseline: &impl Baseline,
    pattern: Pattern,
    threads: usize,
    pairs: u64,
    all: &mut Histogram,
) -> Measured<()> {
    let (_, histograms) = patterns::run(baseline, pattern, threads, pairs, Histogram::default)?;
    histograms.iter().for_each(|histogram| all.merge(histogram));
    Ok(())
}

impl Probe for Histogram {
    #[inline]
    fn operation<R>(&mut self, operation: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let result = operation();
        let took = begun.elapsed();
        self.add(took);
        result
    }
}

impl Percentiles {
    fn of(times: &Histogram) -> Self {
        let [p50_ns, p99_ns, p999_ns] = [500, 990, 999].map(|per_mille| times.per_mille(per_mille));
        Self { p50_ns, p99_ns, p999_ns, max_ns: times.max_ns() }
    }

    fn row(&self, name: &str) -> String {
        let Self { p50_ns, p99_ns, p999_ns, max_ns } = self;
        format!("  {name:<18} {p50_ns:>8} {p99_ns:>8} {p999_ns:>8} {max_ns:>10}")
    }
}

impl Report for HitReport {
    fn table(&self) -> (Vec<String>, &[String]) {
        let Self { pattern, threads, cores, backend, preset, ns_per_pair, .. } = self;
        let NsPerPair { mutex_hashmap, array_queue, malloc, empty } = self.baselines;
        let title =
            format!("{pattern}, {threads} threads on {cores} cores, {preset} over {backend}: ns for a get and its put");
        let pairs = [
            ("pool", *ns_per_pair),
            ("mutex_hashmap", mutex_hashmap),
            ("array_queue", array_queue),
            ("malloc", malloc),
            ("empty", empty),
        ];
        let mut lines = vec![title];
        lines.extend(pairs.map(|(name, ns)| format!("  {name:<13}  {ns:>10.1}")));
        if let Some(Recorded { ns_per_pair, more_ns_per_pair }) = self.recording {
            lines.push(format!("  {:<13}  {ns_per_pair:>10.1}  ({more_ns_per_pair:+.1} by recording)", "recording"));
        }
        lines.push("single operations, ns     p50      p99    p99.9        max".to_owned());
        lines.extend([self.pool.row("pool"), self.empty.row("the clock alone")]);
        (lines, &[])
    }
}
