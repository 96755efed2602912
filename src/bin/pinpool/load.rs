//! `pinpool load`: files through the pool to a device, and the figures at the end.
//!
//! Owns the flags, the choice of a destination, and what a failure sounds like. All the work is the library's
//! [`loader`](pinpool::loader).

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pinpool::config::text::{ParseError, parse_bytes, parse_duration};
use pinpool::loader::destination::SinkDestination;
use pinpool::loader::plan::Cut;
use pinpool::loader::{Catalog, Destination, Ended, Failure, Landed, Loader, Observer, Options, Outcome, Stop};
use pinpool::{Backend, Ceiling, OnFull, Pool, Preset, Rounding};

use crate::ExitError;
use crate::load_report::LoadReport;
use crate::terminal::Terminal;

/// Files of the synthetic data set: about 1.1 GB.
const SYNTHETIC_FILES: u64 = 10_000;
/// A batch where no bound is given.
const BATCH_BYTES: NonZeroU64 = NonZeroU64::new(16 << 20).unwrap();
/// Signals so close together are one wish to stop; nobody presses keys faster.
const SAME_WISH: Duration = Duration::from_millis(150);
/// How often an idle pool is looked after.
const POLL_EVERY: Duration = Duration::from_millis(100);

/// Load files through the pool onto the GPU, or into a host sink where there is none
///
/// Reads every regular file under the PATHs; without one, a synthetic data set with the sizes of photographs. A .tar
/// (WebDataset shard) or .safetensors file that is named as a PATH is opened, and its samples are loaded one by one.
/// Exits with 0 only if everything arrived, 1 if something failed, 130 after Ctrl-C.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Files and directories to load
    paths: Vec<PathBuf>,

    /// Open .tar and .safetensors files under directories too
    #[arg(long)]
    containers: bool,

    /// Files in the synthetic data set [default: 10000]
    #[arg(long, value_name = "N", conflicts_with = "paths", value_parser = clap::value_parser!(u64).range(..=1 << 24))]
    synthetic: Option<u64>,

    /// Seed of the synthetic data set
    #[arg(long, value_name = "SEED", default_value_t = 0, conflicts_with = "paths")]
    seed: u64,

    /// Threads that read [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    workers: Option<u64>,

    /// Batches read ahead of the copies [default: two for each worker]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    prefetch: Option<u64>,

    /// Streams, each with a copy of its own under way
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    streams: u64,

    /// Files (or samples of a container) in a batch at most
    #[arg(long, value_name = "N")]
    batch_files: Option<NonZeroU64>,

    /// Bytes in a batch at most; a file that is larger has a batch of its own [default: 16MiB, or none with --batch-files]
    #[arg(long, value_name = "SIZE", value_parser = batch_bytes)]
    batch_bytes: Option<NonZeroU64>,

    /// Passes over the files
    #[arg(long, value_name = "N", default_value = "1")]
    epochs: NonZeroU64,

    /// Shuffle each epoch, reproducibly from this seed
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,

    /// Compare checksums taken while the files were read with those of the destination's own bytes
    #[arg(long)]
    verify: bool,

    /// Stop at the first failure
    #[arg(long)]
    strict: bool,

    /// Look after the idle pool for so long after the last batch, and show what it still holds; Ctrl-C ends it early
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = parse_duration)]
    idle: Duration,

    /// Print the figures as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    pool: PoolArgs,
}

/// Settings of the pool; each goes before its `PINPOOL_*` variable.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Pool (each goes before its PINPOOL_ variable)")]
struct PoolArgs {
    /// Where memory comes from: auto, cuda, mlock, heap, sim or sim:SIZE
    #[arg(long, value_name = "NAME")]
    backend: Option<Backend>,

    /// Rules that the pool follows: adaptive or tensorflow
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,

    /// Most idle buffers kept at the start; 0 keeps none
    #[arg(long, value_name = "N")]
    pool_size_limit: Option<u64>,

    /// How sizes become classes: eighths under adaptive, pow2 or exact under tensorflow
    #[arg(long, value_name = "NAME")]
    rounding: Option<Rounding>,

    /// Ceiling on all bytes held, in use and idle: a size, none, or auto
    #[arg(long, value_name = "SIZE")]
    max_bytes: Option<Ceiling>,

    /// Bytes pinned at the start and kept
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    reserve: Option<u64>,

    /// How long memory stays idle before it goes back to the system: a time, or none for ever
    #[arg(long, value_name = "TIME", value_parser = retain)]
    retain: Option<Retain>,

    /// Longest wait for room under the ceiling
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,

    /// What a batch without room gets after that: error, pageable or auto
    #[arg(long, value_name = "NAME")]
    on_full: Option<OnFull>,
}

/// A time, or for ever.
#[derive(Debug, Clone, Copy)]
struct Retain(Option<Duration>);

fn retain(text: &str) -> Result<Retain, ParseError> {
    if text.eq_ignore_ascii_case("none") {
        Ok(Retain(None))
    } else {
        parse_duration(text).map(|time| Retain(Some(time)))
    }
}

fn batch_bytes(text: &str) -> Result<NonZeroU64, ParseError> {
    NonZeroU64::new(parse_bytes(text)?).ok_or_else(|| ParseError::new(text, "less than 1B"))
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args, terminal: &Terminal) -> Result<(), ExitError> {
    let stop = stop_at_interrupt(terminal);
    let pool = args.pool.build().map_err(|error| {
        terminal.message(&error);
        ExitError::from(&error)
    })?;
    let mut destination = args.destination(&pool).map_err(|error| {
        terminal.message(error);
        ExitError::Failure
    })?;
    let listing = Instant::now();
    let catalog = args.catalog(&stop);
    let listing = listing.elapsed();
    for path in &catalog.loops {
        log::warn!("{} leads back to where the walk has been: not followed", path.display());
    }

    let options = args.options();
    let bar = terminal.bar(catalog.len_bytes().saturating_mul(options.epochs));
    let mut reporter = Reporter { terminal, bar, failed: 0 };
    let loader = Loader { pool, catalog: &catalog, options, stop };
    let outcome = loader.run(destination.as_mut(), &mut reporter);
    drop(reporter);

    let pinned_bytes = loader.pool.stats().pinned_bytes;
    fall_idle(&loader.pool, args.idle, &loader.stop);
    let (sink, stats) = (destination.describe(), loader.pool.stats());
    let report = LoadReport { outcome: &outcome, sink, verify: args.verify, listing, pinned_bytes, stats };
    let printed = if args.json { terminal.print(report.json()) } else { terminal.print(report.table().trim_end()) };
    verdict(&outcome, terminal).and(printed)
}

/// The first Ctrl-C ends the run cleanly, the second at once. Whoever stops a process and its group (`timeout`, a shell's
/// job control) sends one wish as two signals: what follows at once is the same one.
fn stop_at_interrupt(terminal: &Terminal) -> Stop {
    let stop = Stop::new();
    let raised = stop.clone();
    let mut first = None;
    let handler = ctrlc::set_handler(move || {
        let at = *first.get_or_insert_with(Instant::now);
        if raised.request() && at.elapsed() > SAME_WISH {
            std::process::exit(ExitError::Interrupted as i32);
        }
    });
    if let Err(error) = handler {
        terminal.message(format_args!("Ctrl-C will end the run without its figures: {error}"));
    }
    stop
}

/// Does nothing but poll, for as long as asked or until the run is to end.
fn fall_idle(pool: &Pool, idle: Duration, stop: &Stop) {
    let begun = Instant::now();
    while !stop.is_requested() {
        let left = idle.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(POLL_EVERY));
        pool.poll();
    }
}

fn verdict(outcome: &Outcome, terminal: &Terminal) -> Result<(), ExitError> {
    match &outcome.ended {
        Ended::Stopped => {
            terminal.message("interrupted; the figures are those so far");
            return Err(ExitError::Interrupted);
        }
        Ended::Strict => terminal.message("stopped at the first failure (--strict)"),
        Ended::Broken(why) => terminal.message(format_args!("stopped: {why}")),
        _ => {}
    }
    if outcome.is_clean() { Ok(()) } else { Err(ExitError::Failure) }
}

impl Args {
    fn catalog(&self, stop: &Stop) -> Catalog {
        if self.paths.is_empty() {
            Catalog::synthetic(self.synthetic.unwrap_or(SYNTHETIC_FILES), self.seed)
        } else {
            Catalog::of_paths(&self.paths, self.containers, stop)
        }
    }

    fn options(&self) -> Options {
        let given = |count: Option<u64>| count.and_then(|count| NonZeroUsize::new(usize::try_from(count).ok()?));
        let cores = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let workers = given(self.workers).unwrap_or(cores);
        let two_each = workers.saturating_mul(NonZeroUsize::MIN.saturating_add(1));
        let max_bytes = self.batch_bytes.or(if self.batch_files.is_some() { None } else { Some(BATCH_BYTES) });
        Options {
            workers,
            prefetch: given(self.prefetch).unwrap_or(two_each),
            cut: Cut { max_samples: self.batch_files, max_bytes },
            epochs: self.epochs.get(),
            shuffle_seed: self.shuffle,
            verify: self.verify,
            strict: self.strict,
        }
    }

    /// The GPU if there is one, whatever the pool's memory; else the sink, and a word on why.
    fn destination(&self, pool: &Pool) -> Result<Box<dyn Destination>, pinpool::Error> {
        let lanes = usize::try_from(self.streams).unwrap_or(1);
        match device(pool, lanes) {
            Ok(device) => Ok(device),
            Err(why) => {
                log::info!("no GPU to copy to ({why}): a host sink stands for it");
                Ok(Box::new(SinkDestination::new(lanes)?))
            }
        }
    }
}

#[cfg(feature = "cuda")]
fn device(pool: &Pool, lanes: usize) -> Result<Box<dyn Destination>, pinpool::Error> {
    let device = pinpool::loader::destination::CudaDestination::new(pool.config().device, lanes)?;
    Ok(Box::new(device))
}

#[cfg(not(feature = "cuda"))]
fn device(_: &Pool, _: usize) -> Result<Box<dyn Destination>, &'static str> {
    Err("built without the `cuda` feature")
}

impl PoolArgs {
    fn build(&self) -> Result<Pool, pinpool::Error> {
        let mut builder = Pool::builder();
        if let Some(backend) = &self.backend {
            builder = builder.backend(backend.clone());
        }
        if let Some(preset) = self.preset {
            builder = builder.preset(preset);
        }
        if let Some(limit) = self.pool_size_limit {
            builder = builder.pool_size_limit(limit);
        }
        if let Some(rounding) = self.rounding {
            builder = builder.rounding(rounding);
        }
        if let Some(max_bytes) = self.max_bytes {
            builder = builder.max_bytes(max_bytes);
        }
        if let Some(bytes) = self.reserve {
            builder = builder.reserve_bytes(bytes);
        }
        if let Some(Retain(time)) = self.retain {
            builder = builder.idle_timeout(time);
        }
        if let Some(wait) = self.wait {
            builder = builder.wait(wait);
        }
        if let Some(on_full) = self.on_full {
            builder = builder.on_full(on_full);
        }
        builder.build()
    }
}

/// Moves the bar and names what fails.
struct Reporter<'a> {
    terminal: &'a Terminal,
    bar: indicatif::ProgressBar,
    failed: u64,
}

impl Observer for Reporter<'_> {
    fn landed(&mut self, landed: &Landed) {
        self.bar.inc(landed.bytes);
    }

    fn failed(&mut self, failure: &Failure) {
        self.failed += 1;
        self.terminal.message(failure);
        self.bar.set_message(format!("{} failed", self.failed));
    }
}
