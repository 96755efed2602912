//! Plays a trace through public pools on `sim` and writes down all that TensorFlow's pool would have done.
//!
//! Nothing inside the pool is asked: a get that reached the source was a miss, a region released during a put was an
//! eviction, a buffer's id says which one it is. The checks come from the pools' listeners.

use std::collections::HashMap;
use std::io::{self, Write};
use std::ptr::NonNull;
use std::sync::Arc;

use serde::Serialize;

use super::format::{Header, Operation, Reader, TraceError};
use crate::backend::SimSource;
use crate::backend::{Backend, PageTiers, Region, Source, SourceError, VirtualMemory};
use crate::size_class::DEFAULT_ALIGN;
use crate::sync::plain::Mutex;
use crate::{CheckReport, Error, LogSampler, PinnedBuf, Pool, Preset};

/// Where the two streams of outcomes go.
#[derive(Debug)]
pub struct Streams<O, B> {
    /// One line for each get, put and clear: what happened.
    pub outcome: O,
    /// Which buffers it happened to.
    pub buffers: B,
}

/// Pools under a trace.
#[derive(Debug)]
pub struct Conformance<O, B> {
    lanes: Vec<Lane>,
    current: usize,
    held: HashMap<u64, (PinnedBuf, usize)>,
    heard: Arc<Heard>,
    diagnostics: Arc<Mutex<Vec<String>>>,
    streams: Streams<O, B>,
}

#[derive(Debug)]
struct Lane {
    pool: Pool,
    unpooled: bool,
}

/// Figures of one pool, in the order in which they are printed.
#[derive(Debug, Serialize)]
#[allow(missing_docs)] // The names are those of the format.
pub struct Figures {
    pub get_from_pool: u64,
    pub put: u64,
    pub allocated: u64,
    pub evicted: u64,
    pub pool_size_limit: u64,
    pub buffers_in_pool: u64,
    pub in_flight: u64,
    pub underlying_allocs: u64,
    pub underlying_frees: u64,
    pub underlying_alloc_bytes: u64,
    pub underlying_free_bytes: u64,
    pub underlying_peak_bytes: u64,
}

/// A source that remembers which calls reached it since it was last asked.
#[derive(Debug)]
struct Heard {
    sim: SimSource,
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    acquired: bool,
    /// Id and class of each region released.
    released: Vec<(u64, usize)>,
}

// SAFETY: every call is passed on to `sim`.
#[allow(unsafe_code)]
#[deny(clippy::missing_trait_methods)]
unsafe impl Source for Heard {
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
        self.calls.lock().acquired = true;
        self.sim.acquire(len_bytes)
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        self.calls.lock().released.push((region.id(), region.len_bytes()));
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
        // Each get and each eviction must reach this source as a call of its own.
        None
    }
}

impl Heard {
    fn take(&self) -> Calls {
        std::mem::take(&mut *self.calls.lock())
    }
}

impl<O: Write, B: Write> Conformance<O, B> {
    /// Pools as `header` asks for, with a count of checks of their own.
    ///
    /// # Errors
    ///
    /// As [`PoolBuilder::build`](crate::PoolBuilder::build): a limit of 0 with auto-resize, for one.
    pub fn new(header: &Header, streams: Streams<O, B>) -> Result<Self, Error> {
        let heard = Arc::new(Heard { sim: SimSource::new(SimSource::DEFAULT_TOTAL_BYTES), calls: Mutex::default() });
        let diagnostics: Arc<Mutex<Vec<String>>> = Arc::default();
        let log_sampler = LogSampler::new();
        let lane = |_| {
            let printed = diagnostics.clone();
            let listener = move |report: &CheckReport| {
                if report.printed {
                    printed.lock().extend(report.to_string().lines().map(str::to_owned));
                }
            };
            let pool = Pool::builder()
                .without_env()
                .preset(Preset::Tensorflow)
                .backend(Backend::Source(heard.clone()))
                .pool_size_limit(header.limit)
                .auto_resize(header.auto_resize)
                .rounding(header.rounding)
                .log_sampler(log_sampler.clone())
                .on_check(listener)
                .build()?;
            Ok(Lane { pool, unpooled: header.limit == 0 })
        };
        let lanes = (0..header.pools).map(lane).collect::<Result<_, Error>>()?;
        Ok(Self { lanes, current: 0, held: HashMap::new(), heard, diagnostics, streams })
    }

    /// Plays all of `reader`.
    ///
    /// # Errors
    ///
    /// If the trace cannot be read, names a buffer or a pool that is not there, or asks for what a pool refuses.
    pub fn play(&mut self, reader: &mut Reader) -> Result<(), TraceError> {
        while let Some(operation) = reader.next() {
            let operation = operation?;
            self.perform(operation).map_err(|failure| match failure {
                Failure::Io(error) => TraceError::Io(error),
                Failure::Why(why) => reader.blame(why),
            })?;
        }
        self.streams.outcome.flush()?;
        self.streams.buffers.flush()?;
        Ok(())
    }

    fn perform(&mut self, operation: Operation) -> Result<(), Failure> {
        match operation {
            Operation::Get { id, bytes, align } => {
                if self.held.contains_key(&id) {
                    return Err(Failure::Why(format!("buffer {id} is held already")));
                }
                let buffer = self.get(bytes, align)?;
                self.held.insert(id, (buffer, self.current));
            }
            Operation::Put { id } => {
                let (buffer, lane) =
                    self.held.remove(&id).ok_or_else(|| Failure::Why(format!("no buffer {id} is held")))?;
                self.put(buffer, lane)?;
            }
            Operation::Steps { count, bytes, step } => {
                let mut bytes = Some(bytes);
                for _ in 0..count {
                    let len = bytes.ok_or_else(|| Failure::Why("the sizes pass 2^64".to_owned()))?;
                    let buffer = self.get(len, DEFAULT_ALIGN)?;
                    self.put(buffer, self.current)?;
                    bytes = len.checked_add(step);
                }
            }
            Operation::Clear => {
                self.lanes[self.current].pool.clear();
                let freed = self.heard.take().released.len();
                writeln!(self.streams.outcome, "c {freed}")?;
            }
            Operation::Pool { index } if index < self.lanes.len() => self.current = index,
            Operation::Pool { index } => {
                return Err(Failure::Why(format!("there is no pool {index}, `# pools {}`", self.lanes.len())));
            }
            // This pool's rules know no time.
            Operation::Advance { .. } => {}
        }
        Ok(())
    }

    fn get(&mut self, bytes: usize, align: usize) -> Result<PinnedBuf, Failure> {
        let buffer =
            self.lanes[self.current].pool.get_aligned(bytes, align).map_err(|e| Failure::Why(e.to_string()))?;
        let missed = self.heard.take().acquired;
        let Streams { outcome, buffers } = &mut self.streams;
        match buffer.id() {
            None => {
                writeln!(outcome, "z")?;
                writeln!(buffers, "g -")?;
            }
            Some(number) => {
                writeln!(outcome, "{}", if missed { 'm' } else { 'h' })?;
                writeln!(buffers, "g {number}")?;
            }
        }
        Ok(buffer)
    }

    fn put(&mut self, buffer: PinnedBuf, lane: usize) -> Result<(), Failure> {
        let Streams { outcome, buffers } = &mut self.streams;
        if buffer.is_empty() {
            return Ok(writeln!(outcome, "z")?);
        }
        drop(buffer);
        let mark = if self.lanes[lane].unpooled { 'd' } else { 'e' };
        write!(outcome, "p")?;
        for (number, class_bytes) in self.heard.take().released {
            write!(outcome, " {mark}:{class_bytes}")?;
            writeln!(buffers, "{mark} {number}")?;
        }
        Ok(writeln!(outcome)?)
    }

    /// The lines that were printed so far.
    pub fn diagnostics(&self) -> Vec<String> {
        self.diagnostics.lock().clone()
    }

    /// The figures of each pool now.
    pub fn figures(&self) -> Vec<Figures> {
        let figures = |lane: &Lane| {
            let stats = lane.pool.stats();
            Figures {
                get_from_pool: stats.window.get_from_pool,
                put: stats.window.put,
                allocated: stats.window.allocated,
                evicted: stats.window.evicted,
                pool_size_limit: stats.pool_size_limit,
                buffers_in_pool: stats.buffers_in_pool,
                in_flight: stats.in_use + stats.in_flight,
                underlying_allocs: stats.underlying.allocs,
                underlying_frees: stats.underlying.frees,
                underlying_alloc_bytes: stats.underlying.alloc_bytes,
                underlying_free_bytes: stats.underlying.free_bytes,
                underlying_peak_bytes: stats.underlying.peak_bytes,
            }
        };
        self.lanes.iter().map(figures).collect()
    }

    /// What was written to.
    pub fn into_streams(self) -> Streams<O, B> {
        self.streams
    }
}

/// Why an operation could not be played.
#[derive(Debug)]
enum Failure {
    Io(io::Error),
    Why(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
