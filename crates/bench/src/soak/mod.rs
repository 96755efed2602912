//! `pinpool-bench soak`: a long run of random operations on a pool, with every byte and every count checked.
//!
//! | file | owns |
//! | --- | --- |
//! | `args.rs` | the options |
//! | `worker.rs` | the operations of one thread |
//! | `content.rs` | the content of a buffer and its check |
//! | `report.rs` | the report and its failures |
//!
//! - **soak-I1**: after the warm-up, resident memory exceeds the larger of two values by at most 16 MiB. The values are the
//!   memory after the warm-up, and the memory at the start plus the peak of the pool.

mod args;
mod content;
mod report;
mod worker;

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;
use pinpool::{Pool, Stats};
use pinpool_loader::{Destination, SinkDestination, StopFlag};
use serde_json::Value;

pub(crate) use self::args::SoakArgs;
use self::report::{Resident, SoakRun};
use self::worker::{Counts, Shared, Worker};
use crate::Measured;
use crate::threads::{Started, spawn_all};
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Number of operations without `--ops` and `--seconds`.
const DEFAULT_OPS: u64 = 1_000_000_000;
/// Maximum number of buffers in the hand-over queue, for each thread.
const HAND_OVER_LEN: usize = 8;
/// Length of the run, in operations or in time, divided by the length of the warm-up.
const WARM_UP_DIVISOR: u32 = 10;
/// Time within which the maintenance thread returns all buffers with completed copies.
const RETURN_TIME_MAX: Duration = Duration::from_secs(60);
/// Time between two samples of the process.
const SAMPLE_EVERY: Duration = Duration::from_millis(50);

/// Installs a handler: the first Ctrl-C ends the run, which then prints its report.
fn stop_at_interrupt(terminal: &Terminal) -> StopFlag {
    let stop = StopFlag::new();
    let flag = stop.clone();
    if let Err(error) = ctrlc::set_handler(move || _ = flag.raise()) {
        terminal.message(format_args!("Ctrl-C will end the run without its report: {error}"));
    }
    stop
}

pub(crate) fn run(args: &SoakArgs, json: bool, terminal: &Terminal) -> Result<(), ExitError> {
    let stop = stop_at_interrupt(terminal);
    let start_bytes = resident_bytes();
    let builder = args.backend.iter().fold(Pool::builder(), |builder, backend| builder.backend(backend.clone()));
    let pool = builder.setting("trace", "none").build().map_err(|error| terminal.refuse(&error))?;
    let (report, failures) = args.soak(&pool, start_bytes, &stop).map_err(|error| error.refused(terminal))?;
    crate::print(&report, json, terminal)?;
    failures.iter().for_each(|failure| terminal.message(failure));
    if !failures.is_empty() {
        return Err(ExitError::Failure);
    }
    if stop.is_raised() {
        terminal.message("interrupted; the report covers the run so far");
        return Err(ExitError::Interrupted);
    }
    Ok(())
}

impl SoakArgs {
    fn soak(&self, pool: &Pool, start_bytes: u64, stop: &StopFlag) -> Measured<(Value, Vec<String>)> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.map_or(cores, usize::from);
        let ops = self.ops.unwrap_or(if self.seconds.is_some() { u64::MAX } else { DEFAULT_OPS });
        let shared = Shared {
            pool,
            stop,
            over: AtomicBool::new(false),
            given: ArrayQueue::new(HAND_OVER_LEN * threads),
            done: (0..threads).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
            most_ops: ops.div_ceil(threads as u64),
        };
        let work = |number: usize| {
            let destination = destination(pool)?;
            let seed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64 + 1) << 1;
            let (counts, result) = Worker::new(&shared, seed, destination).run(number);
            Ok::<_, pinpool::Error>((counts, result))
        };
        let begun = Instant::now();
        let (warm_bytes, most_bytes, results) = thread::scope(|scope| {
            let workers = spawn_all(scope, threads, &work)?;
            let (warm, most) = self.watch(&shared, ops, begun, &workers);
            Measured::Ok((warm, most, workers.into_iter().map(Started::join).collect::<Vec<_>>()))
        })?;
        let took = begun.elapsed();

        let (mut counts, mut failures) = (Counts::default(), Vec::new());
        for result in results {
            match result.ok().flatten() {
                Some(Ok((of_thread, ended))) => {
                    counts.add(&of_thread);
                    failures.extend(ended.err().map(|error: pinpool::Error| error.to_string()));
                }
                Some(Err(error)) => failures.push(error.to_string()),
                None => failures.push("a thread panicked".to_owned()),
            }
        }
        while let Some(filled) = shared.given.pop() {
            counts.taken += 1;
            failures.extend(counts.put(filled).err().map(|error| error.to_string()));
        }
        let stats = stats_at_rest(pool);
        let end_bytes = resident_bytes();
        let warm_bytes = warm_bytes.unwrap_or(end_bytes);
        let most_bytes = most_bytes.max(end_bytes);
        let resident = Resident { start_bytes, warm_bytes, end_bytes, most_bytes, ..Resident::default() };
        let mut run = SoakRun { seed: self.seed, threads, counts, resident, failures };
        Ok((run.check(took, &stats), run.failures))
    }

    /// Samples the process until every worker has ended. Returns its resident bytes after the warm-up, and the peak after that.
    fn watch<T>(
        &self,
        shared: &Shared<'_>,
        ops: u64,
        begun: Instant,
        workers: &[Started<'_, T>],
    ) -> (Option<u64>, u64) {
        let (mut warm_bytes, mut most_bytes) = (None, 0);
        while !workers.iter().all(Started::is_finished) {
            thread::sleep(SAMPLE_EVERY.min(self.seconds.unwrap_or(SAMPLE_EVERY)));
            // Relaxed: each counter is read for its own value.
            let done: u64 = shared.done.iter().map(|done| done.load(Ordering::Relaxed)).sum();
            let now_bytes = resident_bytes();
            let is_warm = done >= ops / u64::from(WARM_UP_DIVISOR)
                || self.seconds.is_some_and(|seconds| begun.elapsed() >= seconds / WARM_UP_DIVISOR);
            if is_warm {
                warm_bytes.get_or_insert(now_bytes);
                most_bytes = now_bytes.max(most_bytes);
            }
            if self.seconds.is_some_and(|seconds| begun.elapsed() >= seconds) {
                shared.over.store(true, Ordering::Relaxed);
            }
        }
        (warm_bytes, most_bytes)
    }
}

/// Returns the resident memory of this process, 0 if it is unreadable.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0_u64) * 1024
}

/// Returns the statistics once all buffers are returned, or after [`RETURN_TIME_MAX`]. The maintenance thread may still return
/// some buffers.
fn stats_at_rest(pool: &Pool) -> Stats {
    let begun = Instant::now();
    loop {
        pool.maintain();
        let stats = pool.stats();
        let is_at_rest = stats.memory.in_use + stats.copies.in_flight == 0 && stats.unstable_validate().is_ok();
        if is_at_rest || begun.elapsed() > RETURN_TIME_MAX {
            return stats;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Opens the GPU, or the host sink if there is no GPU, with one stream.
fn destination(pool: &Pool) -> Result<Box<dyn Destination>, pinpool::Error> {
    pinpool_cli::gpu::open(pool.unstable_config().device, 1).or_else(|_| Ok(Box::new(SinkDestination::new(1)?)))
}
