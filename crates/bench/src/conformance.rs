//! `pinpool-bench conformance`: plays traces on pools with TensorFlow's policy and records every outcome.
//!
//! The output contains the log lines, the counters and the digests of two streams of outcomes. Outcomes are observed at the
//! source: a request that reached it was a miss, a region released during a return was an eviction, and an id identifies a
//! buffer.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use parking_lot::Mutex;
use pinpool::unstable::{LogSampler, RateCheckReport};
use pinpool::{Backend, Error, PinnedBuf, Pool, Preset, Request};
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;
use pinpool_replay::{Event, SimSource, Trace, TraceError, TraceHeader};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Play traces on pools with TensorFlow's policy, and print log lines, counters and digests of the outcomes
#[derive(Debug, Args)]
pub(super) struct ConformanceArgs {
    /// Traces, plain or compressed by gzip; `-` is stdin
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
}

impl ConformanceArgs {
    pub(super) fn run(&self, terminal: &Terminal) -> Result<(), ExitError> {
        for path in &self.traces {
            let text = Trace::open(path).and_then(|trace| report(&trace)).map_err(|error| {
                terminal.message(format_args!("{}: {error}", path.display()));
                ExitError::Failure
            })?;
            terminal.print(text.trim_end())?;
        }
        Ok(())
    }
}

fn report(trace: &Trace) -> Result<String, TraceError> {
    let mut player = Player::new(&trace.header).map_err(|error| TraceError::Io(io::Error::other(error)))?;
    for (record, (line, align)) in trace.records.iter().zip(&trace.lines) {
        let pool = usize::try_from(record.pool).unwrap_or(usize::MAX);
        let refused = |error: Error| TraceError::Io(io::Error::other(format!("line {line}: {}", error.report())));
        player.perform(pool, record.event, *align).map_err(refused)?;
    }
    let mut lines = mem::take(&mut *player.diagnostics.lock());
    lines.extend(player.pools.iter().map(|pool| counters(pool).to_string()));
    for (name, stream) in [("outcome", player.outcome), ("buffers", player.buffers)] {
        let hex: String = stream.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        lines.push(format!("{name} sha256 {hex}"));
    }
    Ok(lines.join("\n") + "\n")
}

/// Adds a line to a stream. Only the digest of the stream is kept.
fn add_line(stream: &mut Sha256, text: impl Display) {
    stream.update(format!("{text}\n"));
}

/// The pools of a trace, and the buffers that the trace holds.
struct Player {
    pools: Vec<Pool>,
    /// Whether the pools keep no idle buffers. If so, no release is an eviction.
    is_unpooled: bool,
    held: HashMap<u64, PinnedBuf>,
    source: Arc<SimSource>,
    diagnostics: Arc<Mutex<Vec<String>>>,
    /// Digest of the outcomes of all requests, returns and clears.
    outcome: Sha256,
    /// Digest of the buffers in these outcomes.
    buffers: Sha256,
}

impl Player {
    /// Builds the pools of `header`, which share a counter of checks.
    ///
    /// # Errors
    ///
    /// Fails like [`PoolBuilder::build`](pinpool::PoolBuilder::build), for instance for a limit of 0 with auto-resize.
    fn new(header: &TraceHeader) -> Result<Self, Error> {
        // The source gets one call for each miss and each eviction. All pools share the source, so their buffers have different
        // ids.
        let source = Arc::new(SimSource::separate_regions(SimSource::DEFAULT_TOTAL_BYTES).exact());
        let diagnostics: Arc<Mutex<Vec<String>>> = Arc::default();
        let log_sampler = LogSampler::new();
        let pool = |_| {
            let printed = diagnostics.clone();
            let listener = move |report: &RateCheckReport| {
                if report.printed {
                    printed.lock().extend(report.to_string().lines().map(str::to_owned));
                }
            };
            Pool::builder()
                .without_env()
                .preset(Preset::TensorFlow)
                .backend(Backend::Source(source.clone()))
                .pool_size_limit(header.limit)
                .auto_resize(header.auto_resize)
                .setting("rounding", header.rounding)
                .unstable_log_sampler(log_sampler.clone())
                .unstable_on_check(listener)
                .build()
        };
        let pools = (0..header.pools).map(pool).collect::<Result<_, Error>>()?;
        Ok(Self {
            pools,
            is_unpooled: header.limit == 0,
            held: HashMap::new(),
            source,
            diagnostics,
            outcome: Sha256::default(),
            buffers: Sha256::default(),
        })
    }

    /// Plays one event of the trace.
    fn perform(&mut self, pool: usize, event: Event, align: usize) -> Result<(), Error> {
        let pool = &self.pools[pool];
        match event {
            Event::Get { id, bytes, .. } => {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                let buffer = pool.get_with(Request::new(bytes).align(align))?;
                let missed = self.source.take_calls().pins > 0;
                match buffer.unstable_id() {
                    None => {
                        add_line(&mut self.outcome, 'z');
                        add_line(&mut self.buffers, "g -");
                    }
                    Some(id) => {
                        add_line(&mut self.outcome, if missed { 'm' } else { 'h' });
                        add_line(&mut self.buffers, format_args!("g {id}"));
                    }
                }
                self.held.insert(id, buffer);
            }
            Event::Put { id, .. } => {
                if let Some(buffer) = self.held.remove(&id) {
                    self.put(buffer);
                }
            }
            Event::Cleared => {
                pool.clear();
                add_line(&mut self.outcome, format_args!("c {}", self.source.take_calls().released.len()));
            }
            // A text trace contains no other events. TensorFlow's policy does not depend on time.
            _ => {}
        }
        Ok(())
    }

    fn put(&mut self, buffer: PinnedBuf) {
        if buffer.is_empty() {
            return add_line(&mut self.outcome, 'z');
        }
        drop(buffer);
        let mark = if self.is_unpooled { 'd' } else { 'e' };
        let mut outcome = "p".to_owned();
        for (id, class_bytes) in self.source.take_calls().released {
            outcome += &format!(" {mark}:{class_bytes}");
            add_line(&mut self.buffers, format_args!("{mark} {id}"));
        }
        add_line(&mut self.outcome, outcome);
    }
}

/// Returns the counters of `pool` with the names and in the order of the format.
fn counters(pool: &Pool) -> Value {
    let (stats, window) = (pool.stats(), pinpool::unstable::rate_window(pool));
    json!({
        "get_from_pool": window.get_from_pool,
        "put": window.put,
        "allocated": window.allocated,
        "evicted": window.evicted,
        "pool_size_limit": stats.limits.pool_size_limit,
        "buffers_in_pool": stats.memory.idle,
        "in_flight": stats.memory.in_use + stats.copies.in_flight,
        "underlying_allocs": stats.memory.pin.count,
        "underlying_frees": stats.memory.unpin.count,
        "underlying_alloc_bytes": stats.memory.pin.bytes,
        "underlying_free_bytes": stats.memory.unpin.bytes,
        "underlying_peak_bytes": stats.memory.peak_held_bytes,
    })
}
