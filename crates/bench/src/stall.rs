//! `pinpool-bench stall`: the delay of another thread's copies while the pool grows and shrinks.
//!
//! ```text
//!   copying thread:   enqueue 1 MiB, timed ─▶ enqueue ─▶ ...  always with copies in flight    waits for all ─▶ clears
//!   resizing thread:  rest ──▶ grow ──▶ rest ──▶ shrink ──▶ rest ──────────────────────────▶ pause
//! ```
//!
//! At rest, the resizing thread touches pageable memory, which is the load of growth without driver calls. A rest lasts until
//! as many enqueues were timed at rest as during growth and shrinking, because the maximum of more samples would be larger by
//! chance. The pause is not measured. On `register` and `cuda` a shrink waits for the device, and so do the enqueues of other
//! threads.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::unstable::config::text::format_bytes;
use pinpool::{Backend, Completion, Error, PinnedBuf, Pool};
use serde_json::{Value, json};

use super::Measured;
use super::destination::BenchTarget;
use super::pin::touch;
use super::requested::{self, pool_builder};
use super::statistics::{micros, per_mille, rounded};
use crate::threads::{Started, spawn_all};

const COPY_BYTES: usize = 1 << 20;
/// Copies in flight at once.
const DEPTH: usize = 16;
/// Bytes of one request of the resizing thread.
const GET_BYTES: usize = 4 << 20;
/// Minimum duration of a rest.
const REST: Duration = Duration::from_millis(20);

const PHASES: [&str; 3] = ["rest", "grow", "shrink"];
const REST_PHASE: usize = 0;
const GROW_PHASE: usize = 1;
const SHRINK_PHASE: usize = 2;
/// The phase of each stage of a round; growth and shrinking are the odd stages, the last stage is the pause.
const STAGES: [usize; 6] = [REST_PHASE, GROW_PHASE, REST_PHASE, SHRINK_PHASE, REST_PHASE, REST_PHASE];
const PAUSE_STAGE: usize = 5;

/// Measure the delay of another thread's 1 MiB copies while the pool grows and shrinks
///
/// The report contains the duration of the calls that enqueue copies. The baseline is the same loop while a thread touches
/// pageable memory. A call that overlaps growth or shrinking counts for it.
#[derive(Debug, Args)]
pub(super) struct StallArgs {
    /// Seconds for each backend
    #[arg(long, value_name = "S", default_value = "4", value_parser = requested::seconds)]
    seconds: Duration,

    /// Bytes by which the pool grows and shrinks each time
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = requested::at_least(GET_BYTES as u64))]
    step: u64,

    /// Only this backend; repeatable
    #[arg(long, value_name = "NAME")]
    backend: Vec<Backend>,
}

/// Work that the resizing thread has performed.
#[derive(Debug, Default)]
struct Resizing {
    rounds: u64,
    grown_bytes: u64,
    /// Number of calls that released memory during shrinking.
    releases: u64,
}

impl StallArgs {
    pub(super) fn measure(&self) -> Measured<Value> {
        let copies_bytes = (DEPTH * COPY_BYTES) as u64;
        // At rest after growth, the thread touches as much memory again as one step.
        let needed_bytes = self.step.saturating_mul(2).saturating_add(copies_bytes);
        let argument = format!("--step {}", format_bytes(self.step));
        requested::fits(argument, "growth and the touched memory", needed_bytes, "give a smaller one")?;
        let mut destination = BenchTarget::open(COPY_BYTES)?;
        let (backends, missing) = requested::backends(&self.backend, self.step + copies_bytes)?;
        let backends = backends.into_iter().map(|backend| self.measure_backend(backend, &mut destination));
        let backends = backends.collect::<Measured<Vec<_>>>()?;
        let to = destination.describe();
        Ok(json!({ "to": to, "step_bytes": self.step, "backends": backends, "missing": missing }))
    }

    fn measure_backend(&self, backend: Backend, destination: &mut BenchTarget) -> Measured<Value> {
        let name = backend.name();
        let pool = pool_builder(backend).build()?;
        let run = StallRun { pool: &pool, stage: 0.into(), over: false.into(), enqueues: Default::default() };
        let resize = |_| run.end_with(|| run.resize(self.step, self.seconds));
        let (resizing, times) = std::thread::scope(|scope| {
            let resizing = spawn_all(scope, 1, &resize)?;
            let times = run.end_with(|| run.copy(destination));
            Measured::Ok((resizing.into_iter().next().map(Started::join), times))
        })?;
        let panicked = || Error::device_failed("the thread that grows the pool panicked");
        let resizing = resizing.and_then(Result::ok).flatten().ok_or_else(panicked)??;
        let mut times = times?;
        times.iter_mut().for_each(|times| times.sort_unstable());
        let max_us = |phase: usize| micros(per_mille(&times[phase], 1000));
        let phase_times = |phase: usize| {
            json!({
                "phase": PHASES[phase],
                "enqueues": times[phase].len(),
                "p50_us": micros(per_mille(&times[phase], 500)),
                "p99_us": micros(per_mille(&times[phase], 990)),
                "max_us": max_us(phase),
            })
        };
        // The longest enqueue of the phase minus the longest enqueue at rest.
        let beyond_rest = |phase: usize| rounded((max_us(phase) - max_us(REST_PHASE)).max(0.0));
        Ok(json!({
            "backend": name,
            "phases": (0..PHASES.len()).map(phase_times).collect::<Vec<_>>(),
            "grow_stall_us": beyond_rest(GROW_PHASE),
            "shrink_stall_us": (resizing.releases > 0).then(|| beyond_rest(SHRINK_PHASE)),
            "rounds": resizing.rounds,
            "grown_bytes": resizing.grown_bytes,
            "releases": resizing.releases,
        }))
    }
}

/// State of both threads. Every access is relaxed: each variable is read for its own value, and orders no other memory.
struct StallRun<'a> {
    pool: &'a Pool,
    /// Number of stages so far. The resizing thread advances it, except that the copying thread ends the pause.
    stage: AtomicUsize,
    over: AtomicBool,
    /// Timed enqueues by phase.
    enqueues: [AtomicU64; PHASES.len()],
}

impl StallRun<'_> {
    /// Runs `work`, and then makes the other thread end, even after an error.
    fn end_with<T>(&self, work: impl FnOnce() -> Measured<T>) -> Measured<T> {
        let result = work();
        self.over.store(true, Ordering::Relaxed);
        result
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn next_stage(&self) {
        self.stage.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs the resizing thread.
    fn resize(&self, step: u64, seconds: Duration) -> Measured<Resizing> {
        let gets = usize::try_from(step / GET_BYTES as u64).unwrap_or(1).max(1);
        let begun = Instant::now();
        let mut resizing = Resizing::default();
        while begun.elapsed() < seconds && !self.is_over() {
            self.rest(step);
            let before = self.pool.stats().memory;
            self.next_stage();
            let buffers = (0..gets).map(|_| self.pool.get(GET_BYTES)).collect::<Result<Vec<_>, _>>()?;
            self.next_stage();
            let grown = self.pool.stats().memory;
            self.rest(step);
            self.next_stage();
            drop(buffers);
            self.pool.clear();
            self.next_stage();
            let stats = self.pool.stats();
            resizing.rounds += 1;
            resizing.grown_bytes += grown.pin.bytes - before.pin.bytes;
            resizing.releases += stats.memory.unpin.count - grown.unpin.count;
            self.rest(step);
            self.next_stage();
            while self.stage.load(Ordering::Relaxed) % STAGES.len() == PAUSE_STAGE && !self.is_over() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(resizing)
    }

    /// Produces the load of growth without driver calls, for at least [`REST`], and until as many enqueues were timed at rest
    /// as during growth and shrinking.
    fn rest(&self, step: u64) {
        let begun = Instant::now();
        let enqueues = |phase: usize| self.enqueues[phase].load(Ordering::Relaxed);
        let is_short = || enqueues(REST_PHASE) < enqueues(GROW_PHASE) + enqueues(SHRINK_PHASE);
        while (begun.elapsed() < REST || is_short()) && !self.is_over() {
            touch(step);
        }
    }

    /// Runs the copying thread. Returns the nanoseconds of its enqueues, by phase.
    fn copy(&self, destination: &mut BenchTarget) -> Measured<[Vec<u64>; PHASES.len()]> {
        let mut idle = (0..=DEPTH).map(|_| self.pool.get(COPY_BYTES)).collect::<Result<Vec<_>, _>>()?;
        let mut in_flight = VecDeque::<(Completion, PinnedBuf)>::new();
        let mut times = <[Vec<u64>; PHASES.len()]>::default();
        while !self.is_over() {
            let before = self.stage.load(Ordering::Relaxed);
            let is_pause = before % STAGES.len() == PAUSE_STAGE;
            while in_flight.len() == DEPTH || is_pause && !in_flight.is_empty() {
                let Some((copy, mut buf)) = in_flight.pop_front() else { break };
                copy.wait()?;
                // Access to the bytes completes the copy in the pool as well. A program that refills a batch does the same.
                buf.wait_slice_mut()?;
                idle.push(buf);
            }
            if is_pause {
                self.pool.clear();
                self.next_stage();
                continue;
            }
            let Some(mut buf) = idle.pop() else { break };
            let begun = Instant::now();
            let copy = destination.copy(&mut buf, COPY_BYTES)?;
            let took = begun.elapsed();
            let after = self.stage.load(Ordering::Relaxed);
            // An enqueue that overlaps two stages belongs to the odd stage, which is growth or shrinking.
            let phase = STAGES[if before == after { before } else { before | 1 } % STAGES.len()];
            times[phase].push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            self.enqueues[phase].fetch_add(1, Ordering::Relaxed);
            in_flight.push_back((copy, buf));
        }
        in_flight.iter().try_for_each(|(copy, _)| copy.wait())?;
        Ok(times)
    }
}
