//! `pinpool bench copy`: how fast buffers of each back-end go to the device.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::config::quantity::format_bytes;
use pinpool::{Backend, Pool};
use serde::Serialize;

use super::asked;
use super::far::Far;
use super::figure::{Measured, gb_per_s, mib};
use super::sources;
use super::tracked::{self, Tracked};
use crate::ExitError;
use crate::terminal::Terminal;

/// Copies on their way at once.
const DEPTH: usize = 8;

/// What is copied when nothing is said.
const DEFAULT_SIZES: [u64; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// Copies to the device, queued back to back: GB/s by size, for each back-end and for ordinary memory; and what tracking costs
///
/// `pageable` is the baseline of each size: the same copies from memory that is not pinned. Without a GPU the host sink
/// takes the copies, to which all memory is alike. After that, on one thread and with memory of the best back-end, the time
/// of a get and a copy that gives the buffer back, beside the bare call that enqueues a copy.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Bytes of a copy; may be given several times [default: 64KiB, 256KiB, 1MiB, 4MiB, 16MiB, 64MiB, as far as the machine
    /// has memory]
    #[arg(long = "size", value_name = "SIZE", value_parser = asked::at_least(1))]
    sizes: Vec<u64>,

    /// Seconds for each size and back-end
    #[arg(long, value_name = "S", default_value = "0.3", value_parser = asked::seconds)]
    seconds: Duration,

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
    sizes: Vec<u64>,
    backends: Vec<OfBackend>,
    tracked_over: &'static str,
    tracked: Vec<Tracked>,
    missing: Vec<String>,
}

/// A rate for each size.
#[derive(Debug, Serialize)]
struct OfBackend {
    backend: &'static str,
    gb_per_s: Vec<f64>,
}

pub(crate) fn run(args: &CopyArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let figures = measure(args).map_err(|error| super::failed(&error, terminal))?;
    if args.json { terminal.print(serde_json::json!(figures)) } else { terminal.print(figures.table()) }
}

fn measure(args: &CopyArgs) -> Measured<Figures> {
    let sizes = args.sizes()?;
    let largest = sizes.iter().copied().max().unwrap_or(1).max(tracked::LARGEST_BYTES);
    let mut far = Far::open(usize::try_from(largest).unwrap_or(usize::MAX))?;
    let (backends, missing) = asked::backends(&args.backend, largest.saturating_mul(DEPTH as u64))?;
    let best = backends.first().cloned().unwrap_or(Backend::Heap);
    let mut all = Vec::new();
    // The baseline first: the same road, memory that no driver knows.
    let named = backends.into_iter().map(|backend| (backend.name(), backend));
    for (name, backend) in [("pageable", Backend::Heap)].into_iter().chain(named) {
        let pool = sources::builder(backend).build()?;
        let rates = sizes.iter().map(|&size| rate(&pool, &mut far, size, args.seconds));
        all.push(OfBackend { backend: name, gb_per_s: rates.collect::<Result<_, _>>()? });
    }
    let tracked_over = best.name();
    let tracked = tracked::measure(&sources::builder(best).build()?, &mut far, args.seconds)?;
    Ok(Figures { to: far.describe(), sizes, backends: all, tracked_over, tracked, missing })
}

/// What copies of this size take at once, their far end included.
fn taken_bytes(size: u64) -> u64 {
    size.saturating_mul(DEPTH as u64 + 1)
}

impl CopyArgs {
    fn sizes(&self) -> Measured<Vec<u64>> {
        if self.sizes.is_empty() {
            let most_bytes = sources::most_bytes()?;
            return Ok(DEFAULT_SIZES.into_iter().filter(|&size| taken_bytes(size) <= most_bytes).collect());
        }
        for &size in &self.sizes {
            let (argument, what) = (format!("--size {}", format_bytes(size)), format!("{DEPTH} queued and one more"));
            asked::fits(argument, what, taken_bytes(size), "give a smaller one")?;
        }
        Ok(asked::once(&self.sizes))
    }
}

fn rate(pool: &Pool, far: &mut Far, size: u64, seconds: Duration) -> Measured<f64> {
    let len = usize::try_from(size).unwrap_or(usize::MAX);
    let mut bufs = (0..DEPTH).map(|_| pool.get(len)).collect::<Result<Vec<_>, _>>()?;
    bufs.iter_mut().for_each(|buf| buf.as_mut_slice().fill(1));
    let mut under_way = VecDeque::new();
    let (begun, mut bytes) = (Instant::now(), 0);
    while begun.elapsed() < seconds {
        for buf in &mut bufs {
            if under_way.len() == DEPTH
                && let Some(copy) = under_way.pop_front()
            {
                pinpool::Completion::wait(&copy)?;
            }
            under_way.push_back(far.copy(buf, len)?);
            bytes += size;
        }
    }
    under_way.iter().try_for_each(|copy| copy.wait())?;
    let took = begun.elapsed();
    drop(bufs);
    // The next size need not lie beside this one.
    pool.clear();
    Ok(gb_per_s(bytes, took))
}

impl Figures {
    fn table(&self) -> String {
        let row = |name: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!(" {cell:>9}")).collect();
            format!("  {name:<10}{cells}")
        };
        let mut rows = vec![
            format!("copies to {}, {DEPTH} queued, GB/s", self.to),
            row("", self.sizes.iter().map(|&size| mib(size)).collect()),
        ];
        let rates = |of: &OfBackend| of.gb_per_s.iter().map(|rate| format!("{rate:.3}")).collect();
        rows.extend(self.backends.iter().map(|of| row(of.backend, rates(of))));
        rows.push(format!(
            "one thread, a copy at a time, ns; {} memory\n  {:<25} {:>10} {:>12}",
            self.tracked_over, "", "each", "beyond bare"
        ));
        rows.extend(self.tracked.iter().flat_map(Tracked::rows));
        rows.extend(self.missing.iter().map(|why| format!("  not here: {why}")));
        rows.join("\n")
    }
}
