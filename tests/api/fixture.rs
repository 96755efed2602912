//! Sources, builders and buffers that several modules use.

#[cfg(feature = "observe")]
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pinpool::source::HeapSource;
use pinpool::source::Source;
use pinpool::unstable::{LogSampler, ManualClock};
use pinpool::{Backend, Error, GetFuture, Limit, Partition, PinnedBuf, Pool, PoolBuilder, Preset, Request, Rounding};
use pinpool_replay::SimSource;
use pinpool_testing::{FaultSource, SinkGate, SinkMemory, SinkStream};

use crate::until::until;
use crate::valid_stats::HasStats;

pub(crate) const MIB: usize = 1 << 20;

/// Longer than any test may take: a test that waits this long has failed.
pub(crate) const LONG: Duration = Duration::from_secs(3600);

/// A pool over the heap that reads no environment variables.
pub(crate) fn heap() -> PoolBuilder {
    Pool::builder().without_env().backend(Backend::Heap)
}

/// A pool with non-blocking requests and its own log; only the test's calls maintain it.
pub(crate) fn over(source: Arc<dyn Source>, max_bytes: impl Into<Limit>) -> PoolBuilder {
    Pool::builder()
        .without_env()
        .backend(Backend::Source(source))
        .max_bytes(max_bytes)
        .wait(Duration::ZERO)
        .unstable_settings(|only| only.pressure = Some("/dev/null".into()))
        .maintenance_thread(false)
        .unstable_log_sampler(LogSampler::new())
}

/// A pool with blocking requests over simulated memory.
pub(crate) fn over_sim(max_bytes: impl Into<Limit>) -> PoolBuilder {
    over(Arc::new(SimSource::new(1 << 40)), max_bytes).wait(LONG)
}

/// A pool over simulated memory under either preset, with buffers of exactly the requested size.
pub(crate) fn both_presets(max_bytes: u64) -> [PoolBuilder; 2] {
    // Each buffer also has TensorFlow's header.
    let tensorflow = over_sim(max_bytes + (16 << 10)).preset(Preset::TensorFlow).rounding(Rounding::Exact);
    [over_sim(max_bytes), tensorflow]
}

/// A pool or a partition, for tests of what they have in common.
pub(crate) trait Requests: HasStats + Clone + Send + Sync + 'static {
    fn as_pool(&self) -> &Pool;

    fn get(&self, len: usize) -> Result<PinnedBuf, Error> {
        self.as_pool().get(len)
    }

    fn get_async(&self, request: Request) -> GetFuture {
        self.as_pool().get_async(request)
    }

    fn try_get(&self, len: usize) -> Result<Option<PinnedBuf>, Error> {
        self.as_pool().try_get(len)
    }
}

impl Requests for Pool {
    fn as_pool(&self) -> &Pool {
        self
    }
}

impl Requests for Partition {
    fn as_pool(&self) -> &Pool {
        self.as_pool()
    }
}

/// Returns once this many requests have waited.
pub(crate) fn until_waits(pool: &impl Requests, waits: u64) {
    until("requests wait", || pool.stats().requests.waits >= waits);
}

pub(crate) fn poll(get: &mut GetFuture) -> Poll<Result<PinnedBuf, Error>> {
    Pin::new(get).poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs all tasks on the calling thread.
pub(crate) fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// A value from `/proc/self/status`, in KiB.
#[cfg(target_os = "linux")]
pub(crate) fn status_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
}

pub(crate) fn faulty(source: impl Source + 'static) -> Arc<FaultSource> {
    Arc::new(FaultSource::around(Arc::new(source)))
}

pub(crate) fn faulty_heap() -> Arc<FaultSource> {
    faulty(HeapSource::new())
}

/// Simulated memory with a virtual range.
pub(crate) fn faulty_sim() -> Arc<FaultSource> {
    faulty(SimSource::new(1 << 40))
}

/// Simulated memory of each kind, and the same memory with scripted failures and counted calls.
pub(crate) fn each_sim() -> [(Arc<SimSource>, Arc<FaultSource>); 2] {
    [SimSource::new(1 << 40), SimSource::separate_regions(1 << 40)].map(|sim| {
        let sim = Arc::new(sim);
        (sim.clone(), Arc::new(FaultSource::around(sim)))
    })
}

/// A pool over the heap that records to `path`.
#[cfg(feature = "observe")]
pub(crate) fn recorded(path: &Path) -> PoolBuilder {
    over(faulty_heap(), pinpool::Limit::Unlimited).trace(path.to_owned())
}

/// TensorFlow's rules with at most two idle buffers.
pub(crate) fn two_buffers(source: &Arc<FaultSource>) -> PoolBuilder {
    over(source.clone(), Limit::Auto).preset(Preset::TensorFlow).pool_size_limit(2).auto_resize(false)
}

pub(crate) fn with_manual_clock(builder: PoolBuilder) -> (Pool, ManualClock) {
    let clock = ManualClock::default();
    (builder.unstable_clock(clock.clone()).build().unwrap(), clock)
}

/// A stream that begins no copy until the gate is dropped, and memory to copy to.
pub(crate) fn held_sink(len: usize) -> (SinkStream, SinkMemory, SinkGate) {
    let stream = SinkStream::new().unwrap();
    let gate = stream.hold();
    (stream, SinkMemory::new(len), gate)
}

pub(crate) fn filled(pool: &Pool, len: usize, byte: u8) -> PinnedBuf {
    let mut buffer = pool.get(len).unwrap();
    buffer.wait_slice_mut().unwrap().fill(byte);
    buffer
}
