//! `pinpool bench stall`: what growth and give-back of the pool do to copies of another thread.
//!
//! ```text
//!   thread A:  enqueue 1 MiB, timed ─▶ every 16th waits ─▶ ...        each enqueue belongs to the phase it began in
//!   thread B:  rest ──▶ grow ──▶ rest ──▶ shrink ──▶ ...              rest is the baseline of the same run
//! ```

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::config::quantity::parse_bytes;
use pinpool::{Backend, Pool};
use serde::Serialize;

use super::far::Far;
use super::figure::{Measured, mib, micros, rounded};
use super::histogram::Histogram;
use super::sources;
use crate::Failed;
use crate::screen::Screen;

const COPY_BYTES: usize = 1 << 20;
/// Copies between two waits of the copying thread.
const DEPTH: usize = 16;
/// How long nothing but copies happens before each step.
const REST: Duration = Duration::from_millis(20);
const PHASES: [&str; 3] = ["rest", "grow", "shrink"];
const RESTING: usize = 0;
const GROWING: usize = 1;
const SHRINKING: usize = 2;

/// How long another thread's enqueues of 1 MiB copies are held up while the pool grows and shrinks
#[derive(Debug, Args)]
pub(crate) struct StallArgs {
    /// Seconds for each back-end
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,

    /// Bytes by which the pool grows and shrinks each time
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_bytes)]
    step: u64,

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
    to: String,
    step_bytes: u64,
    backends: Vec<OfBackend>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct OfBackend {
    backend: &'static str,
    rounds: u64,
    phases: Vec<Phase>,
    /// Worst enqueue beyond the worst one at rest.
    grow_stall_us: f64,
    shrink_stall_us: f64,
}

#[derive(Debug, Serialize)]
struct Phase {
    phase: &'static str,
    enqueues: u64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

pub(crate) fn run(args: &StallArgs, screen: &Screen) -> Result<(), Failed> {
    let figures = measure(args).map_err(|error| super::failed(&error, screen))?;
    if args.json { screen.print(serde_json::json!(figures)) } else { screen.print(figures.table()) }
}

fn measure(args: &StallArgs) -> Measured<Figures> {
    let (backends, missing) = sources::available(&args.backend, 0);
    let mut far = Far::open(COPY_BYTES)?;
    let seconds = Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::from_secs(2));
    let backends = backends.into_iter().map(|backend| of_backend(backend, args.step, seconds, &mut far));
    let backends = backends.collect::<Result<_, _>>()?;
    Ok(Figures { to: far.describe(), step_bytes: args.step, backends, missing })
}

fn of_backend(backend: Backend, step: u64, seconds: Duration, far: &mut Far) -> Measured<OfBackend> {
    let name = backend.name();
    let pool = sources::builder(backend).build()?;
    let (phase, over) = (AtomicUsize::new(RESTING), AtomicBool::new(false));
    let (rounds, seen) = std::thread::scope(|scope| {
        let churn = scope.spawn(|| {
            let rounds = churn(&pool, step, seconds, &phase);
            // Relaxed, here and below: nothing but the word itself is told.
            over.store(true, Ordering::Relaxed);
            rounds
        });
        let seen = copies(&pool, far, &phase, &over);
        (churn.join(), seen)
    });
    let rounds = rounds.map_err(|_| pinpool::Error::device("the thread that grows the pool panicked"))??;
    let seen = seen?;
    let phases: Vec<_> = PHASES
        .into_iter()
        .zip(&seen)
        .map(|(phase, (enqueues, histogram))| Phase {
            phase,
            enqueues: *enqueues,
            p50_us: micros(histogram.per_mille(500)),
            p99_us: micros(histogram.per_mille(990)),
            max_us: micros(histogram.max_ns()),
        })
        .collect();
    let beyond_rest = |phase: usize| rounded((phases[phase].max_us - phases[RESTING].max_us).max(0.0));
    let (grow_stall_us, shrink_stall_us) = (beyond_rest(GROWING), beyond_rest(SHRINKING));
    Ok(OfBackend { backend: name, rounds, phases, grow_stall_us, shrink_stall_us })
}

/// Thread B.
fn churn(pool: &Pool, step: u64, seconds: Duration, phase: &AtomicUsize) -> Measured<u64> {
    let piece = 4 << 20;
    let pieces = usize::try_from(step / piece as u64).unwrap_or(1).max(1);
    let begun = Instant::now();
    let mut rounds = 0;
    while begun.elapsed() < seconds {
        std::thread::sleep(REST);
        phase.store(GROWING, Ordering::Relaxed);
        let grown = (0..pieces).map(|_| pool.get(piece)).collect::<Result<Vec<_>, _>>()?;
        phase.store(RESTING, Ordering::Relaxed);
        std::thread::sleep(REST);
        drop(grown);
        phase.store(SHRINKING, Ordering::Relaxed);
        pool.clear();
        phase.store(RESTING, Ordering::Relaxed);
        rounds += 1;
    }
    Ok(rounds)
}

/// Thread A: enqueues by phase.
fn copies(
    pool: &Pool,
    far: &mut Far,
    phase: &AtomicUsize,
    over: &AtomicBool,
) -> Measured<[(u64, Histogram); PHASES.len()]> {
    let mut buf = pool.get(COPY_BYTES)?;
    let mut seen = std::array::from_fn(|_| (0, Histogram::new()));
    while !over.load(Ordering::Relaxed) {
        let mut last = None;
        for _ in 0..DEPTH {
            let now = phase.load(Ordering::Relaxed);
            let begun = Instant::now();
            last = Some(far.copy(&mut buf, COPY_BYTES)?);
            let took = begun.elapsed();
            seen[now].0 += 1;
            seen[now].1.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        }
        last.map_or(Ok(()), |copy| copy.wait())?;
    }
    Ok(seen)
}

impl Figures {
    fn table(&self) -> String {
        let mut rows = vec![
            format!(
                "enqueues of 1 MiB copies to {}, us; the pool grows and shrinks by {}",
                self.to,
                mib(self.step_bytes)
            ),
            format!("  {:<10} {:<8} {:>10} {:>10} {:>10} {:>10}", "", "", "enqueues", "p50", "p99", "worst"),
        ];
        for of in &self.backends {
            rows.extend(of.phases.iter().map(|of_phase| {
                let Phase { phase, enqueues, p50_us, p99_us, max_us } = of_phase;
                format!("  {:<10} {phase:<8} {enqueues:>10} {p50_us:>10} {p99_us:>10} {max_us:>10}", of.backend)
            }));
            let OfBackend { rounds, grow_stall_us, shrink_stall_us, .. } = of;
            rows.push(format!(
                "  {:<10} beyond rest in {rounds} rounds: growth {grow_stall_us} us, shrink {shrink_stall_us} us",
                ""
            ));
        }
        rows.extend(self.missing.iter().map(|why| format!("  not here: {why}")));
        rows.join("\n")
    }
}
