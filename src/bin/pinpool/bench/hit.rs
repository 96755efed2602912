//! `pinpool bench hit`: a get and its put when the buffer is idle.
//!
//! The pool and each baseline run in turn, round after round, so that a slow moment of the machine meets them all; the
//! figure of each is the median of its rounds. Percentiles are of single operations, each between two readings of the
//! clock, so they contain what such a reading costs: `empty` says how much.

use std::time::{Duration, Instant};

use clap::Args;
use pinpool::{Backend, Pool};
use serde::Serialize;

use super::histogram::Histogram;
use super::keepers::{ArrayQueues, Empty, Keeper, Malloc, MutexHashMap};
use super::patterns::{self, Blind, Pattern, Watch};
use crate::ExitError;
use crate::terminal::Terminal;

const ROUNDS: usize = 9;
/// So long each keeper runs in each round, about.
const TURN: Duration = Duration::from_millis(50);
/// Pairs by which the speed is estimated first.
const ESTIMATED_BY: u64 = 20_000;

/// A get and its put when the buffer is idle, in nanoseconds, beside what else one could use
///
/// `ns_per_pair` is the time of the slowest thread for each of its pairs (in `cross`, of the pair of threads). The
/// percentiles are of single operations: a get with its put, or under `cross` a get or a put.
#[derive(Debug, Args)]
pub(crate) struct HitArgs {
    /// Threads at once; `cross` takes them in pairs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,

    /// Who gets and who puts
    #[arg(long, value_enum, default_value_t = Pattern::Same)]
    pattern: Pattern,

    /// What is behind the pool: heap, sim, mlock, cuda
    #[arg(long, value_name = "NAME", default_value = "heap")]
    backend: Backend,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One run; its fields are the JSON object's.
#[derive(Debug, Serialize)]
struct Figures {
    pattern: String,
    threads: usize,
    cores: usize,
    backend: &'static str,
    preset: &'static str,
    ns_per_pair: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    max_ns: u64,
    empty: Percentiles,
    baselines: Baselines,
}

/// Of the clock alone.
#[derive(Debug, Serialize)]
struct Percentiles {
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    max_ns: u64,
}

/// Nanoseconds a pair.
#[derive(Debug, Serialize)]
struct Baselines {
    mutex_hashmap: f64,
    array_queue: f64,
    malloc: f64,
    empty: f64,
}

pub(crate) fn run(args: &HitArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let threads = usize::from(args.threads);
    if args.pattern == Pattern::Cross && !threads.is_multiple_of(2) {
        terminal.message(format!("--threads {threads}: cross takes threads in pairs; give an even number"));
        return Err(ExitError::Settings);
    }
    let pool = Pool::builder().backend(args.backend.clone()).build().map_err(|error| {
        terminal.message(&error);
        ExitError::from(&error)
    })?;
    let figures = measure(&pool, args.pattern, threads);
    let stats = pool.stats();
    if stats.failed_gets > 0 || stats.fallbacks > 0 {
        let (failed, fallbacks) = (stats.failed_gets, stats.fallbacks);
        terminal.message(format!(
            "{failed} gets failed and {fallbacks} were served from elsewhere: the figures mean nothing"
        ));
        return Err(ExitError::Failure);
    }
    if args.json {
        return terminal.print(serde_json::json!(figures));
    }
    terminal.print(figures.table())
}

fn measure(pool: &Pool, pattern: Pattern, threads: usize) -> Figures {
    let (map, queues) = (MutexHashMap::default(), ArrayQueues::default());
    let mut courses = [
        Course::over(pool, pattern, threads),
        Course::over(&map, pattern, threads),
        Course::over(&queues, pattern, threads),
        Course::over(&Malloc, pattern, threads),
        Course::over(&Empty, pattern, threads),
    ];
    let (mut singly, mut clock) = (Histogram::new(), Histogram::new());
    for _ in 0..ROUNDS {
        courses.iter_mut().for_each(Course::round);
        singles(pool, pattern, threads, courses[0].pairs / 4, &mut singly);
        singles(&Empty, pattern, threads, courses[0].pairs / 4, &mut clock);
    }
    let [ns_per_pair, mutex_hashmap, array_queue, malloc, empty] = courses.map(|course| course.median_ns());
    let stats = pool.stats();
    Figures {
        pattern: format!("{pattern:?}").to_lowercase(),
        threads,
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        backend: stats.backend,
        preset: stats.preset,
        ns_per_pair,
        p50_ns: singly.per_mille(500),
        p99_ns: singly.per_mille(990),
        p999_ns: singly.per_mille(999),
        max_ns: singly.max_ns(),
        empty: Percentiles {
            p50_ns: clock.per_mille(500),
            p99_ns: clock.per_mille(990),
            p999_ns: clock.per_mille(999),
            max_ns: clock.max_ns(),
        },
        baselines: Baselines { mutex_hashmap, array_queue, malloc, empty },
    }
}

/// One keeper's part in all rounds.
struct Course<'a> {
    take_turn: Box<dyn Fn(u64) -> Duration + 'a>,
    pairs: u64,
    ns_per_pair: Vec<f64>,
}

impl<'a> Course<'a> {
    fn over(keeper: &'a impl Keeper, pattern: Pattern, threads: usize) -> Self {
        let take_turn = Box::new(move |pairs| patterns::run(keeper, pattern, threads, pairs, || Blind).0);
        let estimate = take_turn(ESTIMATED_BY).max(Duration::from_micros(1));
        let pairs = u128::from(ESTIMATED_BY) * TURN.as_nanos() / estimate.as_nanos();
        Self { take_turn, pairs: u64::try_from(pairs).unwrap_or(u64::MAX).max(1), ns_per_pair: Vec::new() }
    }

    #[allow(clippy::cast_precision_loss)] // A quotient for people.
    fn round(&mut self) {
        let took = (self.take_turn)(self.pairs);
        self.ns_per_pair.push(took.as_nanos() as f64 / self.pairs as f64);
    }

    fn median_ns(mut self) -> f64 {
        self.ns_per_pair.sort_by(f64::total_cmp);
        let median = self.ns_per_pair.get(self.ns_per_pair.len() / 2).copied().unwrap_or(0.0);
        (median * 100.0).round() / 100.0
    }
}

fn singles(keeper: &impl Keeper, pattern: Pattern, threads: usize, pairs: u64, all: &mut Histogram) {
    let (_, seen) = patterns::run(keeper, pattern, threads, pairs, Histogram::new);
    seen.iter().for_each(|histogram| all.merge(histogram));
}

impl Watch for Histogram {
    #[inline]
    fn operation<R>(&mut self, operation: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let result = operation();
        let took = begun.elapsed();
        self.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        result
    }
}

impl Figures {
    fn table(&self) -> String {
        let Self { pattern, threads, cores, backend, preset, ns_per_pair, p50_ns, p99_ns, p999_ns, max_ns, .. } = self;
        let Baselines { mutex_hashmap, array_queue, malloc, empty } = self.baselines;
        let clock = &self.empty;
        let rows = [
            format!("{pattern}, {threads} threads on {cores} cores, {preset} over {backend}: ns for a get and its put"),
            format!("  pool           {ns_per_pair:>10.1}"),
            format!("  mutex_hashmap  {mutex_hashmap:>10.1}"),
            format!("  array_queue    {array_queue:>10.1}"),
            format!("  malloc         {malloc:>10.1}"),
            format!("  empty          {empty:>10.1}"),
            "single operations, ns     p50      p99    p99.9        max".to_owned(),
            format!("  pool               {p50_ns:>8} {p99_ns:>8} {p999_ns:>8} {max_ns:>10}"),
            format!(
                "  the clock alone    {:>8} {:>8} {:>8} {:>10}",
                clock.p50_ns, clock.p99_ns, clock.p999_ns, clock.max_ns
            ),
        ];
        rows.join("\n")
    }
}
