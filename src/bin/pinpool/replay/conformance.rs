//! `pinpool replay --format conformance`: plays a trace on pools under TensorFlow's rules and records every outcome.
//!
//! Owns the text that a conforming pool produces: diagnostics, figures and digests of two streams of outcomes. Reads nothing
//! inside the pool: a get that reached the source was a miss, a region released during a put was an eviction, and the id of
//! a buffer says which one it was. The checks come from the pools' listeners.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pinpool::backend::{Backend, PageTiers, Region, SimSource, Source, SourceError, VirtualMemory};
use pinpool::trace::{TraceError, TraceHeader, TraceOp, TraceReader};
use pinpool::{CheckReport, Error, LogSampler, PinnedBuf, Pool, Preset};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Plays `trace` and returns the whole text.
///
/// # Errors
///
/// If the pools of its header cannot be built, or as [`Player::play`].
pub(super) fn report(trace: &mut TraceReader) -> Result<String, TraceError> {
    // A line of a stream is a few bytes; a digest takes 64 at a time.
    let buffered = || BufWriter::with_capacity(1 << 16, HashWriter::default());
    let mut player = Player::new(trace.header(), OutcomeStreams { outcome: buffered(), buffers: buffered() })
        .map_err(|error| TraceError::Io(io::Error::other(error)))?;
    player.play(trace)?;
    let mut text = String::new();
    for line in &*lock(&player.diagnostics) {
        let _ = writeln!(text, "{line}"); // Writing to a string does not fail.
    }
    for pool in &player.pools {
        let _ = writeln!(text, "{}", figures(pool));
    }
    let OutcomeStreams { outcome, buffers } = player.streams;
    for (name, stream) in [("outcome", outcome), ("buffers", buffers)] {
        let digest = stream.into_inner().map_err(io::IntoInnerError::into_error)?.0.finalize();
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = writeln!(text, "{name} sha256 {hex}");
    }
    Ok(text)
}

/// A digest as a writer.
#[derive(Default)]
struct HashWriter(Sha256);

impl Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The two streams of outcomes.
struct OutcomeStreams<W> {
    /// A line for each get, put and clear: what happened.
    outcome: W,
    /// The buffers to which it happened.
    buffers: W,
}

/// The pools of a trace and the buffers that it holds.
struct Player<W> {
    pools: Vec<Pool>,
    /// Whether the pools keep no idle buffer: a release is then no eviction.
    unpooled: bool,
    current: usize,
    held: HashMap<u64, PinnedBuf>,
    source: Arc<RecordingSource>,
    diagnostics: Arc<Mutex<Vec<String>>>,
    streams: OutcomeStreams<W>,
}

/// A `sim` source that records the calls that reach it.
#[derive(Debug)]
struct RecordingSource {
    sim: SimSource,
    calls: Mutex<SourceCalls>,
}

#[derive(Debug, Default)]
struct SourceCalls {
    acquired: bool,
    /// Id and class of each region released.
    released: Vec<(u64, usize)>,
}

// SAFETY: every call is passed on to `sim`, which keeps the contract.
#[allow(unsafe_code)]
#[deny(clippy::missing_trait_methods)]
unsafe impl Source for RecordingSource {
    fn name(&self) -> &'static str {
        self.sim.name()
    }

    fn is_pinned(&self) -> bool {
        self.sim.is_pinned()
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        self.sim.held_bytes(len_bytes)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        lock(&self.calls).acquired = true;
        self.sim.acquire(len_bytes)
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        lock(&self.calls).released.push((region.id(), region.len_bytes()));
        // SAFETY: the caller's promise, passed on: all regions of this source are `sim`'s.
        unsafe { self.sim.release(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, _: usize, _: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.acquire(len_bytes)
    }

    fn needs_gpu(&self) -> bool {
        self.sim.needs_gpu()
    }

    fn release_waits(&self) -> bool {
        self.sim.release_waits()
    }

    fn numa_node(&self) -> Option<u32> {
        self.sim.numa_node()
    }

    fn page_tiers(&self, start: NonNull<u8>, len_bytes: usize) -> PageTiers {
        self.sim.page_tiers(start, len_bytes)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        // Each miss and each eviction must reach this source as a call of its own.
        None
    }
}

impl RecordingSource {
    /// The calls since the last time this was called.
    fn take_calls(&self) -> SourceCalls {
        std::mem::take(&mut *lock(&self.calls))
    }
}

impl<W: Write> Player<W> {
    /// The pools of `header`, which share a counter of checks apart from the process's.
    ///
    /// # Errors
    ///
    /// As [`PoolBuilder::build`](pinpool::PoolBuilder::build): for a limit of 0 with auto-resize, for instance.
    fn new(header: &TraceHeader, streams: OutcomeStreams<W>) -> Result<Self, Error> {
        let source =
            Arc::new(RecordingSource { sim: SimSource::new(SimSource::DEFAULT_TOTAL_BYTES), calls: Mutex::default() });
        let diagnostics: Arc<Mutex<Vec<String>>> = Arc::default();
        let log_sampler = LogSampler::new();
        let pool = |_| {
            let printed = diagnostics.clone();
            let listener = move |report: &CheckReport| {
                if report.printed {
                    lock(&printed).extend(report.to_string().lines().map(str::to_owned));
                }
            };
            Pool::builder()
                .without_env()
                .preset(Preset::Tensorflow)
                .backend(Backend::Source(source.clone()))
                .pool_size_limit(header.limit)
                .auto_resize(header.auto_resize)
                .rounding(header.rounding)
                .log_sampler(log_sampler.clone())
                .on_check(listener)
                .build()
        };
        let pools = (0..header.pools).map(pool).collect::<Result<_, Error>>()?;
        Ok(Self { pools, unpooled: header.limit == 0, current: 0, held: HashMap::new(), source, diagnostics, streams })
    }

    /// Plays all of `trace`.
    ///
    /// # Errors
    ///
    /// If the trace cannot be read, names a buffer or a pool that does not exist, or requests what a pool refuses.
    fn play(&mut self, trace: &mut TraceReader) -> Result<(), TraceError> {
        while let Some(operation) = trace.next() {
            self.perform(operation?).map_err(|failure| match failure {
                OpFailure::Stream(error) => TraceError::Io(error),
                OpFailure::Trace(why) => trace.error_here(why),
            })?;
        }
        self.streams.outcome.flush()?;
        self.streams.buffers.flush()?;
        Ok(())
    }

    fn perform(&mut self, operation: TraceOp) -> Result<(), OpFailure> {
        match operation {
            TraceOp::Get { id, .. } if self.held.contains_key(&id) => {
                return Err(OpFailure::Trace(format!("buffer {id} is held already")));
            }
            TraceOp::Get { id, bytes, align } => {
                let buffer = self.pools[self.current].get_aligned(bytes, align);
                let buffer = self.record_get(buffer)?;
                self.held.insert(id, buffer);
            }
            TraceOp::Put { id } => {
                let buffer =
                    self.held.remove(&id).ok_or_else(|| OpFailure::Trace(format!("no buffer {id} is held")))?;
                self.put(buffer)?;
            }
            TraceOp::Steps { count, bytes, step } => {
                let mut bytes = Some(bytes);
                for _ in 0..count {
                    let len = bytes.ok_or_else(|| OpFailure::Trace("the sizes pass 2^64".to_owned()))?;
                    let buffer = self.pools[self.current].get(len);
                    let buffer = self.record_get(buffer)?;
                    self.put(buffer)?;
                    bytes = len.checked_add(step);
                }
            }
            TraceOp::Clear => {
                self.pools[self.current].clear();
                let released = self.source.take_calls().released.len();
                writeln!(self.streams.outcome, "c {released}")?;
            }
            TraceOp::Pool { index } if index < self.pools.len() => self.current = index,
            TraceOp::Pool { index } => {
                return Err(OpFailure::Trace(format!("there is no pool {index}, `# pools {}`", self.pools.len())));
            }
            // TensorFlow's rules do not depend on time.
            TraceOp::Advance { .. } => {}
        }
        Ok(())
    }

    fn record_get(&mut self, buffer: Result<PinnedBuf, Error>) -> Result<PinnedBuf, OpFailure> {
        let buffer = buffer.map_err(|error| OpFailure::Trace(error.to_string()))?;
        let missed = self.source.take_calls().acquired;
        let OutcomeStreams { outcome, buffers } = &mut self.streams;
        match buffer.id() {
            None => {
                writeln!(outcome, "z")?;
                writeln!(buffers, "g -")?;
            }
            Some(id) => {
                writeln!(outcome, "{}", if missed { 'm' } else { 'h' })?;
                writeln!(buffers, "g {id}")?;
            }
        }
        Ok(buffer)
    }

    fn put(&mut self, buffer: PinnedBuf) -> Result<(), OpFailure> {
        let OutcomeStreams { outcome, buffers } = &mut self.streams;
        if buffer.is_empty() {
            return Ok(writeln!(outcome, "z")?);
        }
        drop(buffer);
        let mark = if self.unpooled { 'd' } else { 'e' };
        write!(outcome, "p")?;
        for (id, class_bytes) in self.source.take_calls().released {
            write!(outcome, " {mark}:{class_bytes}")?;
            writeln!(buffers, "{mark} {id}")?;
        }
        Ok(writeln!(outcome)?)
    }
}

/// The figures of `pool` under the names and in the order of the format.
fn figures(pool: &Pool) -> Value {
    let stats = pool.stats();
    json!({
        "get_from_pool": stats.window.get_from_pool,
        "put": stats.window.put,
        "allocated": stats.window.allocated,
        "evicted": stats.window.evicted,
        "pool_size_limit": stats.pool_size_limit,
        "buffers_in_pool": stats.buffers_in_pool,
        "in_flight": stats.in_use + stats.in_flight,
        "underlying_allocs": stats.underlying.allocs,
        "underlying_frees": stats.underlying.frees,
        "underlying_alloc_bytes": stats.underlying.alloc_bytes,
        "underlying_free_bytes": stats.underlying.free_bytes,
        "underlying_peak_bytes": stats.underlying.peak_bytes,
    })
}

/// Why an operation could not be played.
enum OpFailure {
    /// An outcome could not be written.
    Stream(io::Error),
    /// The trace has an error at this operation.
    Trace(String),
}

impl From<io::Error> for OpFailure {
    fn from(error: io::Error) -> Self {
        Self::Stream(error)
    }
}

/// The value behind `mutex`; a thread that panicked while it held the lock left it valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn small_traces_give_the_expected_streams_line_by_line() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance");
        let mut compared = 0;
        for outcome in fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().path()) {
            if outcome.extension().is_none_or(|extension| extension != "outcome") {
                continue;
            }
            let mut trace = TraceReader::open(&outcome.with_extension("trace")).unwrap();
            let streams = OutcomeStreams { outcome: Vec::new(), buffers: Vec::new() };
            let mut player = Player::new(trace.header(), streams).unwrap();
            player.play(&mut trace).unwrap();
            let OutcomeStreams { outcome: happened, buffers } = player.streams;
            for (stream, path) in [(happened, outcome.clone()), (buffers, outcome.with_extension("buffers"))] {
                let expected = fs::read_to_string(&path).unwrap();
                assert_eq!(String::from_utf8(stream).unwrap(), expected, "{}", path.display());
            }
            compared += 1;
        }
        assert_eq!(compared, 5);
    }

    #[test]
    fn a_trace_with_an_error_is_refused_with_its_line() {
        for (text, why) in [
            ("# limit 0\na 1 5\n", "PINPOOL_POOL_SIZE_LIMIT=0"),
            ("a 1 5\na 1 5\n", "held already"),
            ("f 3\n", "no buffer 3"),
            ("p 1\n", "no pool 1"),
            ("a 1 5 3\n", "power of two"),
            ("## first\n\nf 7\n", "line 3: `f 7`: no buffer 7"),
            ("s 3 18446744073709551615 1\n", "at most"),
        ] {
            let error = TraceReader::new(text.as_bytes()).and_then(|mut trace| report(&mut trace)).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
