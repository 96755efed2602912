//! `pinpool bench stall`: what growth and give-back of the pool do to copies of another thread.
//!
//! ```text
//!   thread A:  enqueue 1 MiB, timed ─▶ enqueue ─▶ ...  never without a copy in flight      waits for all ─▶ clears
//!   thread B:  rest ──▶ grow ──▶ rest ──▶ shrink ──▶ rest ───────────────────────────────▶ pause
//! ```
//!
//! At rest thread B touches ordinary memory, so that the load is that of growth without the driver, and it rests until as
//! many enqueues were seen as in all of its work: a worst of many is no worse than a worst of few by chance alone. In the
//! pause, which nobody measures, goes back what could not go beside copies.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::config::quantity::format_bytes;
use pinpool::{Backend, Completion, PinnedBuf, Pool};
use serde::Serialize;

use super::asked;
use super::far::Far;
use super::figure::{Measured, mib, micros, rounded};
use super::histogram::Histogram;
use super::pin::touch;
use super::sources;
use crate::ExitError;
use crate::terminal::Terminal;

const COPY_BYTES: usize = 1 << 20;
/// Copies in flight at once.
const DEPTH: usize = 16;
/// What thread B gets at once.
const PIECE_BYTES: usize = 4 << 20;
/// The shortest rest before each step.
const REST: Duration = Duration::from_millis(20);
const PHASES: [&str; 3] = ["rest", "grow", "shrink"];
const RESTING: usize = 0;
const GROWING: usize = 1;
const SHRINKING: usize = 2;

/// A round in epochs: rest, grow, rest, shrink, rest, pause.
const ROUND: [usize; 6] = [RESTING, GROWING, RESTING, SHRINKING, RESTING, RESTING];
const PAUSE: usize = 5;

/// How long another thread's enqueues of 1 MiB copies are held up while the pool grows and shrinks
///
/// The baseline is the same loop beside a thread that touches ordinary memory. An enqueue counts as growth or shrink if any
/// of it fell into that time.
#[derive(Debug, Args)]
pub(crate) struct StallArgs {
    /// Seconds for each back-end
    #[arg(long, value_name = "S", default_value = "4", value_parser = asked::seconds)]
    seconds: Duration,

    /// Bytes by which the pool grows and shrinks each time
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = asked::at_least(PIECE_BYTES as u64))]
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
    phases: Vec<Phase>,
    /// Worst enqueue beyond the worst one at rest.
    grow_stall_us: f64,
    /// Would a release wait for the copies? Then there is none until they are over.
    release_waits: bool,
    /// As of growth; none where nothing goes back beside copies.
    shrink_stall_us: Option<f64>,
    #[serde(flatten)]
    churn: Churn,
}

#[derive(Debug, Serialize)]
struct Phase {
    phase: &'static str,
    enqueues: u64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

/// What thread B did.
#[derive(Debug, Default, Serialize)]
struct Churn {
    rounds: u64,
    grown_bytes: u64,
    /// Calls that gave memory back in a shrink.
    releases: u64,
    /// Most bytes that waited for the copies to end.
    held_back_bytes: u64,
}

pub(crate) fn run(args: &StallArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let figures = measure(args).map_err(|error| super::failed(&error, terminal))?;
    if args.json { terminal.print(serde_json::json!(figures)) } else { terminal.print(figures.table()) }
}

fn measure(args: &StallArgs) -> Measured<Figures> {
    let copies_bytes = (DEPTH * COPY_BYTES) as u64;
    // At rest after growth, what has grown lies beside what is touched.
    let taken_bytes = args.step.saturating_mul(2).saturating_add(copies_bytes);
    let argument = format!("--step {}", format_bytes(args.step));
    asked::fits(argument, "growth beside memory that is touched", taken_bytes, "give a smaller one")?;
    let mut far = Far::open(COPY_BYTES)?;
    let (backends, missing) = asked::backends(&args.backend, args.step + copies_bytes)?;
    let backends = backends.into_iter().map(|backend| of_backend(backend, args.step, args.seconds, &mut far));
    let backends = backends.collect::<Result<_, _>>()?;
    Ok(Figures { to: far.describe(), step_bytes: args.step, backends, missing })
}

fn of_backend(backend: Backend, step: u64, seconds: Duration, far: &mut Far) -> Measured<OfBackend> {
    let name = backend.name();
    let pool = sources::builder(backend).build()?;
    let road =
        Road { pool: &pool, epoch: AtomicUsize::new(0), over: AtomicBool::new(false), enqueues: Default::default() };
    let (churn, seen) = std::thread::scope(|scope| {
        let churn = scope.spawn(|| road.ends(|| road.churn(step, seconds)));
        let seen = road.ends(|| road.copies(far));
        (churn.join(), seen)
    });
    let churn = churn.map_err(|_| pinpool::Error::device("the thread that grows the pool panicked"))??;
    let seen = seen?;
    let of_phase = |phase: usize| Phase {
        phase: PHASES[phase],
        // Relaxed: both threads have ended.
        enqueues: road.enqueues[phase].load(Ordering::Relaxed),
        p50_us: micros(seen[phase].per_mille(500)),
        p99_us: micros(seen[phase].per_mille(990)),
        max_us: micros(seen[phase].max_ns()),
    };
    let phases: Vec<_> = (0..PHASES.len()).map(of_phase).collect();
    let beyond_rest = |phase: usize| rounded((phases[phase].max_us - phases[RESTING].max_us).max(0.0));
    let grow_stall_us = beyond_rest(GROWING);
    let release_waits = matches!(pool.stats().backend, "register" | "cuda");
    let shrink_stall_us = (!release_waits && churn.releases > 0).then(|| beyond_rest(SHRINKING));
    Ok(OfBackend { backend: name, phases, grow_stall_us, release_waits, shrink_stall_us, churn })
}

/// What the two threads share.
struct Road<'a> {
    pool: &'a Pool,
    /// Counted on by thread B, but for a pause, which thread A ends.
    epoch: AtomicUsize,
    over: AtomicBool,
    /// Seen so far, by phase.
    enqueues: [AtomicU64; PHASES.len()],
}

impl Road<'_> {
    /// Nobody waits for a thread that has ended, however it did.
    fn ends<T>(&self, work: impl FnOnce() -> Measured<T>) -> Measured<T> {
        let done = work();
        // Relaxed, here and below: nothing but the word itself is told.
        self.over.store(true, Ordering::Relaxed);
        done
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Thread B.
    fn churn(&self, step: u64, seconds: Duration) -> Measured<Churn> {
        let pieces = usize::try_from(step / PIECE_BYTES as u64).unwrap_or(1).max(1);
        let begun = Instant::now();
        let mut churn = Churn::default();
        while begun.elapsed() < seconds && !self.is_over() {
            self.rest(step);
            let before = self.pool.stats().underlying;
            self.next_epoch();
            let grown = (0..pieces).map(|_| self.pool.get(PIECE_BYTES)).collect::<Result<Vec<_>, _>>()?;
            self.next_epoch();
            let grown_to = self.pool.stats().underlying;
            self.rest(step);
            self.next_epoch();
            drop(grown);
            self.pool.clear();
            self.next_epoch();
            let stats = self.pool.stats();
            churn.rounds += 1;
            churn.grown_bytes += grown_to.alloc_bytes - before.alloc_bytes;
            churn.releases += stats.underlying.frees - grown_to.frees;
            churn.held_back_bytes = churn.held_back_bytes.max(stats.awaiting_release_bytes);
            self.rest(step);
            self.next_epoch();
            while self.epoch.load(Ordering::Relaxed) % ROUND.len() == PAUSE && !self.is_over() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(churn)
    }

    /// The load of growth without its driver, for as many enqueues as all work so far.
    fn rest(&self, step: u64) {
        let begun = Instant::now();
        let seen = |phase: usize| self.enqueues[phase].load(Ordering::Relaxed);
        while (begun.elapsed() < REST || seen(RESTING) < seen(GROWING) + seen(SHRINKING)) && !self.is_over() {
            touch(step);
        }
    }

    /// Thread A: how long enqueues took, by phase.
    fn copies(&self, far: &mut Far) -> Measured<[Histogram; PHASES.len()]> {
        let mut idle = (0..=DEPTH).map(|_| self.pool.get(COPY_BYTES)).collect::<Result<Vec<_>, _>>()?;
        let mut under_way = VecDeque::<(Completion, PinnedBuf)>::new();
        let mut seen = std::array::from_fn(|_| Histogram::new());
        while !self.is_over() {
            let before = self.epoch.load(Ordering::Relaxed);
            let is_pause = before % ROUND.len() == PAUSE;
            while under_way.len() == DEPTH || is_pause && !under_way.is_empty() {
                let Some((copy, mut buf)) = under_way.pop_front() else { break };
                copy.wait()?;
                // Not aboard any more, as a loader's batch is not once it is filled again.
                buf.as_mut_slice();
                idle.push(buf);
            }
            if is_pause {
                self.pool.clear();
                self.next_epoch();
                continue;
            }
            let Some(mut buf) = idle.pop() else { break };
            let begun = Instant::now();
            let copy = far.copy(&mut buf, COPY_BYTES)?;
            let took = begun.elapsed();
            let after = self.epoch.load(Ordering::Relaxed);
            // Work has odd numbers: what began in the rest before it, or ended in the rest behind it, belongs to it.
            let phase = ROUND[if before == after { before } else { before | 1 } % ROUND.len()];
            seen[phase].add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            self.enqueues[phase].fetch_add(1, Ordering::Relaxed);
            under_way.push_back((copy, buf));
        }
        under_way.iter().try_for_each(|(copy, _)| copy.wait())?;
        Ok(seen)
    }
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
            let Churn { rounds, grown_bytes, releases, held_back_bytes } = of.churn;
            let shrink = match of.shrink_stall_us {
                Some(stall_us) => format!("shrink {stall_us} us, {releases} releases"),
                None if of.release_waits => {
                    format!("shrink: none while copies are in flight, {} held back", mib(held_back_bytes))
                }
                None => "shrink: no releases".to_owned(),
            };
            rows.push(format!(
                "  {:<10} worst beyond rest in {rounds} rounds ({} grown): growth {} us, {shrink}",
                "",
                mib(grown_bytes),
                of.grow_stall_us
            ));
        }
        rows.extend(self.missing.iter().map(|why| format!("  not here: {why}")));
        rows.join("\n")
    }
}
