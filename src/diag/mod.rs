//! Every log line, one method each; the only user of the crate `log` in the library.
//!
//! A line has the shape `pool[NAME] event: short sentence key=value key=value`; unnamed pools carry their number. Its target is
//! `pinpool::` and the first argument of its macro. TensorFlow's two lines have TensorFlow's shape.
//!
//! The comment of each method says what the line means and what to do; a test makes docs/log-lines.md of it, with an example of
//! each line.
//!
//! Takes plain values, never a pool. Its only decision is which checks are printed: one in ten over the whole process,
//! as in TensorFlow.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::SourceError;
use crate::dump::{Dump, HeldBuffer};
use crate::error::{Error, UsageReport};
use crate::stats::{RequestStats, Stats};
use pinpool_observe::judge::Judgement;
use pinpool_observe::record::Recorded;
use pinpool_os::words::{Size, Time};

mod checks;
mod limits;
/// Here and in the files below `log::warn!` and its siblings are the macros of this module.
mod log;
mod memory;
#[cfg(test)]
#[path = "tests/page.rs"]
mod page;
mod reserve;
mod texts;
mod warnings;

pub(crate) use checks::Listener;
pub use checks::{CheckReport, LogSampler};
#[cfg(all(test, not(pinpool_loom)))]
pub(crate) use log::captured;
pub(crate) use log::defer;
pub(crate) use texts::{Growth, Start};
use texts::{Limit, StillOut, Usage};

/// The log of one pool: one method for each line.
///
/// Displays as the start of its lines: `pool[NAME] `.
#[derive(Clone)]
pub(crate) struct PoolLog {
    pub(crate) name: Option<String>,
    /// Among the pools of the process.
    pub(crate) number: u64,
    pub(crate) log_sampler: LogSampler,
    pub(crate) log_every: u64,
    pub(crate) listener: Option<Listener>,
}

impl PoolLog {
    pub(crate) fn new() -> Self {
        Self { name: None, number: 0, log_sampler: LogSampler::process(), log_every: 1, listener: None }
    }

    /// A number for the next pool or partition of the process.
    pub(crate) fn next_number() -> u64 {
        static POOLS: AtomicU64 = AtomicU64::new(0);
        // Relaxed: nothing else depends on it.
        POOLS.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Debug for PoolLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, number, log_every, .. } = self;
        let mut fields = f.debug_struct("PoolLog");
        fields.field("name", name).field("number", number).field("log_every", log_every).finish_non_exhaustive()
    }
}

impl fmt::Display for PoolLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "pool[{name}] "),
            None => write!(f, "pool[{}] ", self.number),
        }
    }
}

impl PoolLog {
    /// A pool was created. To do: nothing.
    pub(crate) fn started(&self, start: &Start<'_>) {
        log::info!(pool, "{self}created: {start}");
    }

    /// No request missed for five minutes; the limit can rise again. To do: nothing.
    pub(crate) fn limit_lowered(&self, from: u64, to: u64) {
        log::info!(pool_size_limit, "{self}lowered: no miss for five minutes pool_size_limit={from}->{to}");
    }

    /// A request joins the wait queue. To do: nothing.
    pub(crate) fn began_to_wait(&self, asked_bytes: u64, needed_bytes: u64) {
        log::trace!(wait, "{self}waiting: request={asked_bytes}B rounded={needed_bytes}B");
    }

    /// A request left the wait queue. To do: if there are many, raise `PINPOOL_MAX_BYTES` or hold less.
    pub(crate) fn waited(&self, asked_bytes: u64, waited: Duration, is_served: bool) {
        let served = if is_served { "yes" } else { "no" };
        log::debug!(wait, "{self}waited: request={asked_bytes}B time={} served={served}", Time(waited));
    }

    /// `waits`: until memory is returned. Else the request fails or gets unpinned memory.
    pub(crate) fn shortage_began(&self, asked_bytes: u64, waits: bool, why: &str, usage: &UsageReport) {
        if waits { self.full(asked_bytes, why, usage) } else { self.refused(asked_bytes, why, usage) }
    }

    /// The pool is full, and a request waits for a return. To do: nothing if the consumer is always busy; else raise the limit.
    fn full(&self, asked_bytes: u64, why: &str, usage: &UsageReport) {
        let (request, usage) = (Size(asked_bytes), Usage(usage));
        log::info!(shortage, "{self}full: request={request} {usage}; waiting for a return: {why}");
    }

    /// A request found no memory and does not wait. To do: what the line says.
    fn refused(&self, asked_bytes: u64, why: &str, usage: &UsageReport) {
        log::warn!(shortage, "{self}refused: request={} {}; {why}", Size(asked_bytes), Usage(usage));
    }

    /// No request has waited for a second. To do: nothing.
    pub(crate) fn shortage_ended(&self, after: Duration, gets: u64, waited: Duration, fallbacks: u64) {
        let (after, waited) = (Time(after), Time(waited));
        log::info!(shortage, "{self}recovered: lasted={after} requests={gets} waited={waited} unpinned={fallbacks}");
    }

    /// A warning if the diagnosis is an alarm.
    pub(crate) fn judged(&self, judgement: &Judgement) {
        if judgement.is_alarm { self.alarmed(judgement) } else { self.diagnosed(judgement) }
    }

    /// The diagnosis changed; evaluated every 10 s. To do: nothing.
    fn diagnosed(&self, judgement: &Judgement) {
        log::info!(diagnosis, "{self}diagnosis: {judgement}");
    }

    /// Something costs time, with the seconds lost. To do: what the line says; for a `leak`, find who holds the tag's buffers.
    fn alarmed(&self, judgement: &Judgement) {
        log::warn!(diagnosis, "{self}diagnosis: {judgement}");
    }

    /// A request failed (the first, 10th, 100th); the largest holders follow. To do: what the last line of the block says.
    pub(crate) fn out_of_memory(&self, dump: &Dump) {
        log::warn!(shortage, "{self}{dump}");
    }

    /// A request got unpinned memory (the first, 10th, 100th). To do: raise the limit, or set `PINPOOL_ON_FULL=error`.
    pub(crate) fn fell_back(&self, asked_bytes: u64, nth: u64, fallback_bytes: u64, max_bytes: Option<u64>) {
        let (request, held, max) = (Size(asked_bytes), Size(fallback_bytes), Limit(max_bytes));
        log::warn!(
            shortage,
            "{self}unpinned: copies from this memory are slow and block their caller request={request} count={nth} \
             unpinned={held} max_unpinned={max}"
        );
    }

    /// `PINPOOL_SOCKET` is set. To do: nothing.
    #[cfg(feature = "observe")]
    pub(crate) fn serving(&self, path: &Path) {
        log::info!(socket, "{self}socket: serving statistics path={}", path.display());
    }

    /// The statistics socket cannot be opened. To do: choose another path.
    #[cfg(feature = "observe")]
    pub(crate) fn not_serving(&self, path: &Path, why: &str) {
        log::warn!(socket, "{self}socket: no statistics path={}: {why}", path.display());
    }

    /// `PINPOOL_TRACE` is set. To do: nothing.
    #[cfg(feature = "observe")]
    pub(crate) fn recording(&self, path: &Path) {
        log::info!(trace, "{self}trace: recording path={}", path.display());
    }

    /// The file of the recording existed and was renamed. To do: put `%p` into the name to keep all.
    #[cfg(feature = "observe")]
    pub(crate) fn earlier_recording(&self, path: &Path, earlier: &Path) {
        let (path, earlier) = (path.display(), earlier.display());
        log::warn!(
            trace,
            "{self}trace: renamed the previous recording path={path} renamed={earlier}; the next one replaces it; put %p (the \
             process id) into the name to keep all"
        );
    }

    /// Another process or thread has the file. To do: what the line says.
    #[cfg(feature = "observe")]
    pub(crate) fn not_recording(&self, path: &Path, why: &str) {
        log::warn!(trace, "{self}trace: not recording path={}: {why}", path.display());
    }

    /// The end of a recording.
    pub(crate) fn recorded(&self, path: &Path, recorded: &Recorded) {
        match recorded {
            Recorded { failure: Some(why), .. } => self.recording_failed(path, recorded, why),
            Recorded { lost: 0, records, .. } => self.recorded_all(path, *records),
            Recorded { .. } => self.records_lost(path, recorded),
        }
    }

    /// The recording is complete. To do: nothing.
    fn recorded_all(&self, path: &Path, records: u64) {
        log::info!(trace, "{self}trace: complete path={} records={records}", path.display());
    }

    /// Threads recorded faster than the disk. To do: nothing if few; else a faster disk, or a name without `.gz`.
    fn records_lost(&self, path: &Path, Recorded { records, lost, .. }: &Recorded) {
        let path = path.display();
        log::warn!(trace, "{self}trace: records lost, the disk is too slow path={path} records={records} lost={lost}");
    }

    /// The recording is truncated. To do: the reason is in the line, such as a full disk.
    fn recording_failed(&self, path: &Path, Recorded { records, lost, .. }: &Recorded, why: &str) {
        log::error!(trace, "{self}trace: incomplete path={} records={records} lost={lost}: {why}", path.display());
    }

    /// Logs why there is no maintenance thread, if there is none.
    pub(crate) fn no_thread(&self, started: std::io::Result<()>) {
        if let Err(error) = started {
            self.no_thread_for(&error);
        }
    }

    /// There is no maintenance thread. To do: what the line says.
    #[cold]
    pub(crate) fn no_thread_for(&self, error: &std::io::Error) {
        log::warn!(
            maintenance,
            "{self}no_thread: idle memory is released only while the pool is used; call Pool::maintain when the program is idle, or \
             raise the limit on threads (`ulimit -u`, pids.max): {error}"
        );
    }

    /// A setting has no effect. To do: what the line says. Also on standard error if the program has no logger.
    fn unused_variable(&self, unused: &str) {
        log::warn!(settings, "{self}setting: {unused}");
    }

    /// To standard error, once, if the program has no logger.
    pub(crate) fn unused_variables(&self, unused: &[String]) {
        // A `Once` in progress in a parent would block its forked child forever.
        static IS_TOLD: AtomicBool = AtomicBool::new(false);
        unused.iter().for_each(|unused| self.unused_variable(unused));
        let has_no_logger = ::log::max_level() == ::log::LevelFilter::Off;
        if has_no_logger && !unused.is_empty() && !IS_TOLD.swap(true, Ordering::Relaxed) {
            // A failed write has nowhere else to go.
            unused.iter().for_each(|unused| drop(writeln!(io::stderr(), "pinpool: {self}setting: {unused}")));
        }
    }

    /// The driver did not release memory. To do: check the device.
    pub(crate) fn release_failed(&self, held_bytes: u64, error: &SourceError) {
        let bytes = Size(held_bytes);
        log::error!(
            release,
            "{self}release_failed: memory stays allocated until the process ends bytes={bytes}: {error}"
        );
    }

    /// The device was reset. To do: create a new pool.
    pub(crate) fn memory_gone(&self, why: &SourceError) {
        log::error!(release, "{self}device_lost: this pool can no longer allocate: {why}");
    }

    /// Logs why the arena could not release memory, if it could not.
    pub(crate) fn release_error(&self, released: Result<(), SourceError>) {
        if let Err(error) = released {
            self.release_delayed(&error);
        }
    }

    /// Idle memory could not be released; logged once until a release succeeds. To do: check the device.
    fn release_delayed(&self, error: &SourceError) {
        log::error!(release, "{self}release_failed: idle memory stays pinned and is released later: {error}");
    }

    /// Idle memory is due, but a release would wait for the device; logged once. To do: call `trim()` if the host needs the memory.
    pub(crate) fn idle_memory_stays(&self, bytes: u64, backend: &str) {
        let idle = Size(bytes);
        log::info!(release, "{self}idle_kept: a release would wait for the device idle={idle} backend={backend}");
    }

    /// Logs the first quarantined buffer, the second, the fourth, the eighth: one failed device affects many.
    pub(crate) fn completion_unknown(
        &self,
        held_bytes: u64,
        lost: u64,
        keeps_all: bool,
        is_asked_again: bool,
        error: &Error,
    ) {
        if lost.is_power_of_two() {
            if is_asked_again {
                self.quarantined(held_bytes, lost, keeps_all, error);
            } else {
                self.leaked(held_bytes, lost, keeps_all, error);
            }
        }
    }

    /// The device does not say whether a copy completed; polled every 100 ms. To do: check the device.
    fn quarantined(&self, bytes: u64, lost: u64, keeps_all: bool, error: &Error) {
        let (bytes, all) = (Size(bytes), if keeps_all { "; no memory is released until then" } else { "" });
        log::error!(
            copies,
            "{self}quarantined: not reused until the device responds bytes={bytes} quarantined={lost}{all}: {error}"
        );
    }

    /// The device will never say whether a copy completed. To do: check the device.
    fn leaked(&self, bytes: u64, lost: u64, keeps_all: bool, error: &Error) {
        let (bytes, all) = (Size(bytes), if keeps_all { "; no memory is released from now on" } else { "" });
        log::error!(
            copies,
            "{self}leaked: never reused, a device may still read it bytes={bytes} leaked={lost}{all}: {error}"
        );
    }

    /// The device responds again. To do: nothing.
    pub(crate) fn completion_known(&self, buffers: u64, bytes: u64) {
        log::info!(
            copies,
            "{self}responding: quarantined buffers are reusable buffers={buffers} bytes={}",
            Size(bytes)
        );
    }

    /// Copies do not complete. To do: find what blocks the stream.
    pub(crate) fn stuck(&self, buffers: u64, bytes: u64, age: Duration, stream: u64) {
        let (bytes, age) = (Size(bytes), Time(age));
        log::warn!(
            copies,
            "{self}stuck: copies do not complete; find what blocks stream={stream:#x} buffers={buffers} bytes={bytes} \
             in_flight_for={age}"
        );
    }

    /// The last handle of the pool was dropped. To do: nothing.
    pub(crate) fn ended(&self, stats: &Stats) {
        let Stats { requests, memory, .. } = stats;
        let RequestStats { served: gets, hits, misses, failed: failed_gets, .. } = requests;
        let (pins, peak, evicted) = (memory.pin.count, Size(memory.peak_held_bytes), memory.evictions.over_limit);
        log::info!(
            pool,
            "{self}closed: requests={gets} hits={hits} misses={misses} failed={failed_gets} evicted={evicted} pins={pins} \
             peak={peak}"
        );
    }

    /// The last handle was dropped, but buffers are still out; those with a tag or a sampled call stack are listed. To do: nothing if
    /// they are dropped soon; else find who holds them.
    pub(crate) fn still_out(&self, buffers: u64, bytes: u64, tagged: &[HeldBuffer]) {
        let list = StillOut { buffers, bytes, tagged };
        // No warning: a buffer that is a later field than its pool is dropped after it.
        log::info!(
            pool,
            "{self}still_out: memory stays allocated until these are dropped buffers={buffers} bytes={}{list}",
            Size(bytes)
        );
    }

    /// A copy never completed, so all memory stays pinned. To do: find the blocked stream.
    pub(crate) fn left_pinned(&self, bytes: u64) {
        let bytes = Size(bytes);
        log::error!(release, "{self}close_failed: memory stays pinned, a release would wait for a copy bytes={bytes}");
    }

    /// The driver did not release memory at the end of the pool. To do: check the device.
    pub(crate) fn left_by_refusal(&self, bytes: u64, error: &SourceError) {
        let bytes = Size(bytes);
        log::error!(release, "{self}close_failed: memory stays pinned until the process ends bytes={bytes}: {error}");
    }

    /// Copies were in flight when the pool ended. To do: find the blocked stream.
    pub(crate) fn closed_in_flight(&self, copies: u64, bytes: u64, waited: Duration) {
        let (bytes, waited) = (Size(bytes), Time(waited));
        log::error!(
            copies,
            "{self}close_failed: a device may still read this memory, it is never released copies={copies} bytes={bytes} \
             waited={waited}"
        );
    }
}

/// Whether the `nth` event of its kind is logged: the first, the tenth, the hundredth.
pub(crate) fn is_power_of_ten(nth: u64) -> bool {
    nth.checked_ilog10().is_some_and(|digits| nth == 10u64.pow(digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_ten_are_logged() {
        let logged: Vec<u64> =
            (0..=1_000).chain([10_000, 10_001, u64::MAX]).filter(|&nth| is_power_of_ten(nth)).collect();
        assert_eq!(logged, [1, 10, 100, 1_000, 10_000]);
    }
}
