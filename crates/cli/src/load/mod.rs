//! `pinpool load`: files through the pool to a device, and the statistics at the end.
//!
//! This module owns the flags, the destination, the interrupt and the exit status. [`pinpool_loader`] does the work.
//!
//! | file | owns |
//! | --- | --- |
//! | `notes.rs` | notes about the files before they are loaded |
//! | `failures.rs` | progress, and failures counted by cause |
//! | `report.rs` | the statistics at the end |

mod failures;
mod notes;
mod report;

use std::error::Error;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pinpool::unstable::config::text::{ParseError, parse_bytes, parse_duration};
use pinpool::{PinnedBy, Pool};
use pinpool_loader::{
    Catalog, Destination, ListOptions, LoadError, LoadOptions, LoadOutcome, LoadSummary, Loader, SinkDestination,
    StopFlag,
};
use serde_json::json;

use self::failures::Reporter;
use crate::interrupt::stop_at_interrupt;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::{Terminal, Verbosity};

/// Number of files in the synthetic data set: about 1.1 GB.
const SYNTHETIC_FILES: u64 = 10_000;
/// Time between two checks for an interrupt.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// Load files onto the GPU, or into a host sink if there is none
///
/// Reads every regular file under the PATHs, or without a PATH a synthetic data set with the sizes of photographs. An archive is
/// a .tar (WebDataset shard; also .tar.gz, .tgz, .tar.zst, .tzst) or .safetensors file. An archive that is a PATH, or is in a
/// directory of only archives, is opened, and its samples are loaded one by one. Any other .gz or .zst file is decompressed if
/// it is a PATH, or with --archives. A file larger than --batch-bytes is read in parts, and at most --read-ahead + --streams
/// batches are in memory. With --batch-files, --batch-bytes has no default. Exits with 0 only if everything arrived, 1 if
/// something failed, 2 for invalid settings, 3 if --require-gpu is not met, 4 if there was no file to load, 130 after Ctrl-C.
/// The variable PINPOOL_TRACE is ignored. An incomplete recording is a failure.
#[derive(Debug, clap::Args)]
#[command(help_template = "{about-with-newline}\n{usage-heading} {usage}\n\n{options}{after-help}")]
#[command(after_help = "Example: pinpool load --verify --record t.gz /data/images")]
pub(crate) struct LoadArgs {
    /// Files and directories; without one, a synthetic data set
    paths: Vec<PathBuf>,

    /// Open archives in directories with other files
    #[arg(long)]
    archives: bool,

    /// Synthetic files, without PATHS [default: 10000]
    #[arg(long, value_name = "N", conflicts_with = "paths", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    synthetic: Option<u64>,

    /// Reader threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,

    /// Batches read ahead [default: two for each thread]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    read_ahead: Option<u64>,

    /// Streams, each with one copy in flight
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    streams: u64,

    /// Maximum files or archive samples in a batch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    batch_files: Option<u64>,

    /// Maximum bytes in a batch [default: 16MiB]
    #[arg(long, value_name = "SIZE", value_parser = batch_bytes)]
    batch_bytes: Option<NonZeroU64>,

    /// Passes over the files
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,

    /// Shuffle each epoch, reproducibly from this seed
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,

    /// Compare checksums with the destination
    #[arg(long)]
    verify: bool,

    /// Stop at the first failure
    #[arg(long)]
    strict: bool,

    /// Fail without a GPU or memory pinned for it
    #[arg(long)]
    require_gpu: bool,

    /// Wait between the last batch and the report
    ///
    /// Meanwhile the pool releases memory that stays idle, which the statistics of the report show.
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_duration, hide_short_help = true)]
    idle: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Record what the pool does; .gz compresses it
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Keep the call stack of one request in N
    ///
    /// The statistics page and `pinpool trace` show which code holds memory. 0 keeps none.
    #[arg(long, value_name = "N", default_value_t = 0, hide_short_help = true)]
    call_stacks: u64,

    /// Set a pool variable (MAX_BYTES=2GiB); repeatable
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,
}

fn batch_bytes(text: &str) -> Result<NonZeroU64, ParseError> {
    NonZeroU64::new(parse_bytes(text)?).ok_or_else(|| ParseError::new(text, "less than 1B"))
}

pub(crate) fn run(args: &LoadArgs, verbosity: Verbosity, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let stop = stop_at_interrupt(terminal);
    let set = Set::all(&args.set)?;
    let builder = set.builder().call_stacks(args.call_stacks);
    // The file in the environment's PINPOOL_TRACE may be the recording of another program, so the variable is ignored.
    let builder = match &args.record {
        Some(path) => builder.trace(path.clone()),
        None if set.pairs.iter().any(|(name, _)| name == "PINPOOL_TRACE") => builder,
        None => builder.trace(None),
    };
    let pool = builder.build().map_err(|error| {
        let text = error.to_string();
        // The user gave the flag and not its variable, so the error must name the flag.
        let text = if args.record.is_some() { text.replacen("PINPOOL_TRACE=", "--record ", 1) } else { text };
        ExitError::of(&error).because(text)
    })?;
    let mut destination = args.destination(&pool)?;
    let listing = Instant::now();
    let catalog = args.catalog(&stop);
    let listing = listing.elapsed();
    for note in notes::notes(&catalog) {
        log::warn!("{note}");
    }

    let options = args.options();
    let mut reporter = Reporter::new(terminal, catalog.len_bytes().saturating_mul(options.epochs), verbosity);
    let summary = Loader::new(&pool, &catalog, options).with_stop_flag(&stop).run(destination.as_mut(), &mut reporter);
    let failures = reporter.end();

    let pinned_bytes = pool.stats().memory.held_bytes;
    stay_idle(args.idle, &stop);
    let stats = pool.stats();
    let pageable = stats.requests.pageable;
    let mut report = report::json(&summary, &stats);
    report["destination"] = destination.name().into();
    report["verify"] = args.verify.into();
    report["listing_seconds"] = listing.as_secs_f64().into();
    report["pinned_bytes"] = pinned_bytes.into();
    report["failures_by_cause"] = json!(failures);
    report["skipped_special_files"] = catalog.special_files().len().into();
    let printed = match args.json {
        true => terminal.print(&report),
        false => terminal.print(report::table(&report, &stats).trim_end()),
    };
    conclude(&summary, &stop)?;
    if catalog.files().is_empty() {
        return Err(ExitError::NothingToLoad.because("nothing to load: the paths contain no regular file"));
    }
    if args.require_gpu && pageable > 0 {
        let why = format!("--require-gpu: batches in pageable memory (PINPOOL_ON_FULL): {pageable}");
        return Err(ExitError::NoGpu.because(why));
    }
    Ok(printed?)
}

/// Waits for `idle`, or until `stop` is raised, while the pool releases memory in the background.
fn stay_idle(idle: Duration, stop: &StopFlag) {
    if idle > Duration::ZERO {
        log::info!("idle for {} s", idle.as_secs_f64());
    }
    let started = Instant::now();
    while !stop.is_raised() && started.elapsed() < idle {
        thread::sleep(idle.min(CHECK_EVERY));
    }
}

fn conclude(summary: &LoadSummary, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    match &summary.outcome {
        LoadOutcome::Failed(LoadError::StoppedAtFailure) => Err("stopped at the first failure (--strict)".into()),
        LoadOutcome::Failed(error) => Err(ExitError::Failure.because(format_args!("stopped: {error}"))),
        _ if stop.is_raised() => Err(ExitError::Interrupted.because("interrupted: the statistics are incomplete")),
        _ if summary.is_complete() => Ok(()),
        _ => Err(ExitError::Failure.into()),
    }
}

impl LoadArgs {
    fn catalog(&self, stop: &StopFlag) -> Catalog {
        if self.paths.is_empty() {
            Catalog::synthetic(self.synthetic.unwrap_or(SYNTHETIC_FILES), 0)
        } else {
            let mut options = ListOptions::default();
            (options.open_archives, options.stop) = (self.archives, stop.clone());
            options.from_paths(&self.paths)
        }
    }

    fn options(&self) -> LoadOptions {
        let given = |count: Option<u64>| count.and_then(|count| NonZeroUsize::new(usize::try_from(count).ok()?));
        let mut options = LoadOptions::default();
        options.threads = given(self.threads).unwrap_or(options.threads);
        options.read_ahead = given(self.read_ahead);
        options.batch_samples = self.batch_files.and_then(NonZeroU64::new);
        if self.batch_bytes.is_some() || self.batch_files.is_some() {
            options.batch_bytes = self.batch_bytes;
        }
        options.epochs = self.epochs;
        options.shuffle_seed = self.shuffle;
        options.verify = self.verify;
        options.stop_at_failure = self.strict;
        options
    }

    /// Opens the GPU if there is one, with any backend; otherwise the host sink, with the reason in the log.
    fn destination(&self, pool: &Pool) -> Result<Box<dyn Destination>, Box<dyn Error>> {
        let lanes = usize::try_from(self.streams).unwrap_or(1);
        let device = match pinpool_cli::gpu::open(pool.unstable_config().device, lanes) {
            Ok(device) => device,
            Err(why) if self.require_gpu => {
                return Err(ExitError::NoGpu.because(format_args!("--require-gpu: no GPU to copy to: {why}")));
            }
            Err(why) => {
                log::warn!("no GPU to copy to ({why}): copying to a host sink (--require-gpu makes this an error)");
                return Ok(Box::new(SinkDestination::new(lanes)?));
            }
        };
        let stats = pool.stats();
        if stats.pinned_by != Some(PinnedBy::Driver) {
            let why = format!("the backend {} does not pin memory for the GPU", stats.backend);
            if self.require_gpu {
                return Err(ExitError::NoGpu.because(format_args!("--require-gpu: {why}")));
            }
            log::warn!("{why}: copies are slow");
        }
        Ok(device)
    }
}
