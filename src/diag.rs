//! Every log line, one method each; the only user of the crate `log` in the library.
//!
//! Those about memory, reserves, limits and checks are in their own files.
//!
//! The target of a line is `pinpool::` and the kind of its event, the first argument of its macro.
//!
//! The comment of each method has its lines, with their levels and what to do about them: docs/log-lines.md is made of these.
//!
//! All lines but TensorFlow's first two begin with the pool's name in brackets, if it has one.
//!
//! Takes plain values, never a pool. Its only decision is which checks are printed: one in ten over the whole process,
//! as in TensorFlow.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::backend::SourceError;
use crate::dump::{Dump, HeldBuffer};
use crate::error::{Error, UsageReport};
use crate::stats::{RequestStats, Stats};
use pinpool_observe::judge::Judgement;
use pinpool_observe::record::Recorded;

mod ceilings;
mod checks;
/// Here and in the files below `log::warn!` and its siblings are the macros of this module.
mod log;
mod memory;
mod reserve;
mod texts;
mod warnings;

pub(crate) use checks::Listener;
pub use checks::{CheckReport, LogSampler};
pub(crate) use log::defer;
use texts::StillOut;
pub(crate) use texts::{Growth, Start};

/// The log of one pool: one method for each line.
///
/// Displays as the start of its lines: the pool's name in brackets, nothing if it has none.
#[derive(Clone)]
pub(crate) struct PoolLog {
    pub(crate) name: Option<String>,
    pub(crate) log_sampler: LogSampler,
    pub(crate) log_every: u64,
    pub(crate) listener: Option<Listener>,
}

impl fmt::Debug for PoolLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, log_every, .. } = self;
        f.debug_struct("PoolLog").field("name", name).field("log_every", log_every).finish_non_exhaustive()
    }
}

impl fmt::Display for PoolLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.as_ref().map_or(Ok(()), |name| write!(f, "[{name}] "))
    }
}

impl PoolLog {
    /// `preset P, back-end B ...` (info): nothing: what the pool starts with: rules, source of memory and its granules,
    /// ceiling, GPU, memory node; what was set, by the `builder`, by a `variable`, or `implied` by another setting; version,
    /// process, why no better source.
    pub(crate) fn started(&self, start: &Start<'_>) {
        log::info!(pool, "{self}{start}");
    }

    /// `Lowering pool_size_limit_ from A to B` (info): nothing: no miss for five minutes; the limit can rise again.
    pub(crate) fn limit_lowered(&self, from: u64, to: u64) {
        log::info!(pool_size_limit, "{self}Lowering pool_size_limit_ from {from} to {to}");
    }

    /// A get joins the line.
    ///
    /// `wait: a get of N bytes ... joins the line` (trace): nothing: the next line says how it ended.
    pub(crate) fn began_to_wait(&self, asked_bytes: u64, needed_bytes: u64) {
        log::trace!(wait, "{self}wait: a get of {asked_bytes} bytes ({needed_bytes} with rounding) joins the line");
    }

    /// A get that waited in line has left it.
    ///
    /// `wait: a get of N bytes ... after T in line` (debug): if there are many: raise `PINPOOL_MAX_BYTES`, or hold
    /// less.
    pub(crate) fn waited(&self, asked_bytes: u64, waited: Duration, is_served: bool) {
        let end = if is_served { "was served" } else { "found no memory" };
        log::debug!(wait, "{self}wait: a get of {asked_bytes} bytes {end} after {waited:?} in line");
    }

    /// `shortage: no memory for N bytes ...` (info): nothing if the consumer is always busy: the pool is full, and the request waits
    /// for a return. Else raise the limit that the line names.
    ///
    /// `shortage: no memory for N bytes ...` (warn): the source refused, or the request does not wait: follow the line.
    pub(crate) fn shortage_began(&self, asked_bytes: u64, waits: bool, why: &str, usage: &UsageReport) {
        if waits {
            log::info!(shortage, "{self}shortage: no memory for {asked_bytes} bytes: {why}; {usage}");
        } else {
            log::warn!(shortage, "{self}shortage: no memory for {asked_bytes} bytes: {why}; {usage}");
        }
    }

    /// `shortage over ...` (info): nothing; the line says how long the shortage lasted and what it cost.
    pub(crate) fn shortage_ended(&self, after: Duration, gets: u64, waited: Duration, fallbacks: u64) {
        // Of a single get there is no time between the first and the last.
        let after = if after.is_zero() { String::new() } else { format!(" after {after:?}") };
        let subject = if gets == 1 { "1 get".to_owned() } else { format!("{gets} gets") };
        let waited = if waited.is_zero() { String::new() } else { format!(" and waited {waited:?} together") };
        log::info!(
            shortage,
            "{self}shortage over{after}: {subject} found no memory at once{waited}, {fallbacks} were given memory that is not pinned"
        );
    }

    /// Why the pool is as fast as it is has changed. `pinpool why` says it at any time, with evidence.
    ///
    /// `verdict: healthy ...` (info): nothing. Looked at each 10 s, printed when it changes.
    ///
    /// `verdict: warming up ...` (info): nothing, if `healthy` follows; else look at what holds the buffers.
    ///
    /// `verdict: pool full ...` (info): nothing if the consumer is always busy, as before a device; else raise the limit.
    ///
    /// `verdict: sizes never recur ...` (info, warn): nothing if it is info; a warning says what to change and what it costs.
    ///
    /// `verdict: leak ...` (warn): look at what holds the buffers of the tag in the line. It names where most of them were got that were
    /// sampled (`call_stacks`).
    ///
    /// `verdict: CAUSE ...` (warn): what the line says: what was seen, what to set or to change, and the seconds lost.
    pub(crate) fn judged(&self, judgement: &Judgement) {
        if judgement.is_alarm {
            log::warn!(diagnosis, "{self}verdict: {judgement}");
        } else {
            log::info!(diagnosis, "{self}verdict: {judgement}");
        }
    }

    /// The first get of the pool that failed, and then each power of ten.
    ///
    /// `out of memory: N bytes asked by ...` (warn): a get has failed: the last two lines of the block say the likely
    /// cause and what to change; above them are the largest owners (`Pool::tagged`) and what is held.
    pub(crate) fn out_of_memory(&self, dump: &Dump) {
        log::warn!(shortage, "{self}{dump}");
    }

    /// The first such get of the pool, and then each power of ten.
    ///
    /// `fallback: memory for N bytes is not pinned ...` (warn): what the line of the shortage says. Logged for the first such
    /// get of the pool, and then for each power of ten. Such memory is limited to as much as the pool.
    pub(crate) fn fell_back(&self, asked_bytes: u64, nth: u64, fallback_bytes: u64, max_bytes: Option<u64>) {
        let limit = max_bytes.map_or_else(String::new, |max_bytes| format!(" of at most {max_bytes}"));
        let so_far = if nth == 1 { String::new() } else { format!(", as for {nth} gets so far") };
        log::warn!(
            shortage,
            "{self}fallback: memory for {asked_bytes} bytes is not pinned{so_far}, so a copy from it is slow and holds up its \
             caller; {fallback_bytes} bytes{limit} are such memory now (PINPOOL_ON_FULL=error refuses instead)"
        );
    }

    /// `socket: statistics at PATH ...` (info): nothing: `pinpool top PATH` shows them.
    #[cfg(feature = "observe")]
    pub(crate) fn serving(&self, path: &std::path::Path) {
        log::info!(socket, "{self}socket: statistics at {}: `pinpool top` shows them", path.display());
    }

    /// `socket: no statistics at PATH ...` (warn): what the line says: another path, or the feature `observe`.
    #[cfg(feature = "observe")]
    pub(crate) fn not_serving(&self, path: &std::path::Path, why: &str) {
        log::warn!(socket, "{self}socket: no statistics at {}: {why}", path.display());
    }

    /// `trace: recording to F`, `trace: N records are in F` (info): nothing: `PINPOOL_TRACE` is set.
    #[cfg(feature = "observe")]
    pub(crate) fn recording(&self, path: &Path) {
        log::info!(trace, "{self}trace: recording to {}", path.display());
    }

    /// The file was there, and would have been written over.
    ///
    /// `trace: the earlier recording in F ...` (warn): nothing: it is kept as `F.old`, until the next recording takes
    /// its place there. Put `%p` into the name to keep all.
    #[cfg(feature = "observe")]
    pub(crate) fn earlier_recording(&self, path: &Path, earlier: &Path) {
        log::warn!(
            trace,
            "{self}trace: the earlier recording in {} is {} now, until the next one takes its place there; put %p, the number of the \
             process, into the name to keep all",
            path.display(),
            earlier.display()
        );
    }

    /// `trace: nothing is recorded ...` (warn): the line says why: another process has the file, or the feature `observe`
    /// is missing.
    #[cfg(feature = "observe")]
    pub(crate) fn not_recording(&self, path: &Path, why: &str) {
        log::warn!(trace, "{self}trace: nothing is recorded to {}: {why}", path.display());
    }

    /// `trace: N records are in F, and M were lost ...` (warn): nothing if few: figures from the trace lack them; a
    /// disk that is faster, or a name without `.gz`, loses fewer.
    ///
    /// `trace: F is not complete, N records are in it and M were lost ...` (error): read the reason in the line: the
    /// disk is full, or too slow.
    pub(crate) fn recorded(&self, path: &Path, recorded: &Recorded) {
        let Recorded { records, lost, failure } = recorded;
        let path = path.display();
        match failure {
            Some(why) => log::error!(
                trace,
                "{self}trace: {path} is not complete, {records} records are in it and {lost} were lost: {why}"
            ),
            None if *lost > 0 => log::warn!(
                trace,
                "{self}trace: {records} records are in {path}, and {lost} were lost: threads recorded faster than they could \
                 be written"
            ),
            None => log::info!(trace, "{self}trace: {records} records are in {path}"),
        }
    }

    /// Logs why there is no maintenance thread, if there is none.
    pub(crate) fn no_thread(&self, started: std::io::Result<()>) {
        if let Err(error) = started {
            self.no_thread_for(&error);
        }
    }

    /// `no thread for maintenance ...` (warn): raise the limit on threads (`ulimit -u`), or call `Pool::maintain` when the
    /// program is idle.
    #[cold]
    pub(crate) fn no_thread_for(&self, error: &std::io::Error) {
        log::warn!(
            maintenance,
            "{self}no thread for maintenance: idle memory is given back only while the pool is used; call \
             Pool::maintain when the program is idle, or raise the limit on threads (`ulimit -u`, pids.max): {error}"
        );
    }

    /// To standard error, once, if the program has no logger: what its user set does not hold, and nothing else says so.
    ///
    /// `PINPOOL_X=V: ...` (warn): the line says what to change: an unknown name, a retired one with what replaces it, a value
    /// that the program replaces in code, or a setting without effect under the others. Also on standard error if the program has
    /// no logger.
    pub(crate) fn unused_variables(&self, unused: &[String]) {
        // A `Once` that is under way in a parent would hold its child of `fork` for ever.
        static IS_TOLD: AtomicBool = AtomicBool::new(false);
        for unused in unused {
            log::warn!(settings, "{self}{unused}");
        }
        let has_no_logger = ::log::max_level() == ::log::LevelFilter::Off;
        if has_no_logger && !unused.is_empty() && !IS_TOLD.swap(true, Ordering::Relaxed) {
            // What cannot be written there has nowhere else to go.
            unused.iter().for_each(|unused| drop(writeln!(io::stderr(), "pinpool: {self}{unused}")));
        }
    }

    /// `release failed ...` (error): read the driver's reason in the line; memory stays pinned, for now or until the
    /// process ends, as the line says.
    pub(crate) fn release_failed(&self, held_bytes: u64, error: &SourceError) {
        log::error!(release, "{self}release failed: {held_bytes} bytes stay allocated until the process ends: {error}");
    }

    /// `the memory of this pool is gone ...` (error): build a new pool after a reset of the device; the line says what took it.
    pub(crate) fn memory_gone(&self, why: &SourceError) {
        log::error!(release, "{self}the memory of this pool is gone, and no get is served any more: {why}");
    }

    /// Logs why the arena could not give memory back, if it could not.
    pub(crate) fn release_error(&self, released: Result<(), SourceError>) {
        if let Err(error) = released {
            log::error!(
                release,
                "{self}release failed: idle memory stays pinned and is released later; further failures are not logged \
                 until a release succeeds: {error}"
            );
        }
    }

    /// Idle memory is due and stays.
    ///
    /// `idle memory stays pinned ...` (info): nothing, unless the host needs the memory: `trim()` releases it and
    /// waits for the device. Under `vmm` idle memory is released by time.
    pub(crate) fn idle_memory_stays(&self, bytes: u64, backend: &str) {
        log::info!(
            release,
            "{self}idle memory stays pinned: {bytes} bytes, because a release by {backend} would wait for the device; trim() \
             releases them (logged once)"
        );
    }

    /// Logs the first buffer that is lost, the second, the fourth, the eighth: one failed device loses many.
    ///
    /// `completion unknown ...` (error): check the device: it failed, or a copy cannot be followed; the buffer is
    /// reused when the device answers, or never, as the line says.
    pub(crate) fn completion_unknown(
        &self,
        held_bytes: u64,
        lost: u64,
        keeps_all: bool,
        is_asked_again: bool,
        error: &Error,
    ) {
        if lost.is_power_of_two() {
            let (reuse, since) = if is_asked_again {
                ("not reused until the device answers, which is asked again ten times a second", "until then")
            } else {
                ("never reused", "from now on")
            };
            let all = if keeps_all {
                format!("; the pool releases no memory {since}, since a release would wait for that copy")
            } else {
                String::new()
            };
            log::error!(
                copies,
                "{self}completion unknown: a buffer of {held_bytes} bytes is {reuse} ({lost} lost now){all}: {error}"
            );
        }
    }

    /// Buffers that were lost are used again.
    ///
    /// `completion known ...` (info): nothing: the device answers again, and buffers that counted as lost are used
    /// again.
    pub(crate) fn completion_known(&self, buffers: u64, bytes: u64) {
        let (subject, are) = if buffers == 1 { ("buffer", "is") } else { ("buffers", "are") };
        log::info!(copies, "{self}completion known: {buffers} lost {subject} of {bytes} bytes {are} used again");
    }

    /// `a buffer of N bytes has ...`, `N buffers ...` (warn): a stream is blocked: look at what was enqueued on it
    /// before the copy.
    pub(crate) fn stuck(&self, buffers: u64, bytes: u64, age: Duration, stream: u64) {
        let (subject, have) =
            if buffers == 1 { ("a buffer".to_owned(), "has") } else { (format!("{buffers} buffers"), "have") };
        log::warn!(
            copies,
            "{self}{subject} of {bytes} bytes {have} been in flight for {age:?} on stream {stream:#x}, unavailable until \
             the copies complete; look for what blocks that stream"
        );
    }

    /// No handle of the pool is left.
    ///
    /// `ended: N gets ...` (info): nothing: the totals of a pool of which no handle is left, and the most that it had
    /// pinned.
    pub(crate) fn ended(&self, stats: &Stats) {
        let Stats { requests, memory, .. } = stats;
        let RequestStats { served: gets, hits, misses, failed: failed_gets, fallbacks, returned: puts, .. } = requests;
        let (page_locks, bytes, peak_bytes) = (memory.pin.count, memory.pin.bytes, memory.peak_held_bytes);
        let evicted = memory.evictions.over_limit;
        let calls = if page_locks == 1 { "call" } else { "calls" };
        log::info!(
            pool,
            "{self}ended: {gets} gets ({hits} hits, {misses} misses, {failed_gets} failed, {fallbacks} not pinned), {puts} \
             puts, {evicted} evicted; {bytes} bytes in {page_locks} {calls}, at most {peak_bytes} bytes pinned"
        );
    }

    /// No handle of the pool is left, and users still hold `buffers`, of which those under a tag are `tagged`.
    ///
    /// `ended with N buffers still out ...` (info): nothing, if they are dropped soon: until then the pool keeps their
    /// memory. Else look for who has them: those of `Pool::tagged` are listed with size, tag and age, those that were sampled
    /// (`call_stacks`) with the line that got them.
    pub(crate) fn still_out(&self, buffers: u64, bytes: u64, tagged: &[HeldBuffer]) {
        let noun = if buffers == 1 { "buffer" } else { "buffers" };
        let list = StillOut { buffers, bytes, tagged };
        // No warning: a buffer that is a later field than its pool is dropped after it.
        log::info!(
            pool,
            "{self}ended with {buffers} {noun} still out, {bytes} bytes, which stay until they are dropped:{list}"
        );
    }

    /// `closing: N bytes stay pinned ...` (error): look for the copy that does not end, on a stream that is blocked. A release
    /// would wait for the device, so all memory stays pinned.
    pub(crate) fn left_pinned(&self, bytes: u64) {
        log::error!(
            release,
            "{self}closing: {bytes} bytes stay pinned until the process ends: a copy was never seen to complete, and a \
             release would wait for it"
        );
    }

    pub(crate) fn left_by_refusal(&self, bytes: u64, error: &SourceError) {
        log::error!(
            release,
            "{self}release failed: closing, and {bytes} bytes stay pinned, or addresses reserved, until the process ends: {error}"
        );
    }

    /// `closing with N copies in flight ...` (error): look for the copy that does not end, on a stream that is blocked. The
    /// memory of these copies is never released.
    pub(crate) fn closed_in_flight(&self, copies: u64, bytes: u64, waited: Duration) {
        log::error!(
            copies,
            "{self}closing with {copies} copies in flight after waiting {waited:?}: their {bytes} bytes are never released, \
             since a device may still read them"
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
