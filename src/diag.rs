//! Every log line, one method each; the only user of the crate `log` in the library.
//!
//! The README has a table of them: when each comes and what to do about it.
//!
//! All lines but TensorFlow's first two begin with the pool's name in brackets, if it has one.
//!
//! Takes plain values, never a pool. Its only decision is which checks are printed: one in ten over the whole process,
//! as in TensorFlow.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use crate::backend::{PageTiers, SourceError};
use crate::config::BadVariable;
use crate::dump::{Dump, HeldBuffer};
use crate::error::{Error, UsageReport};
use crate::finding::{Finding, Level};
use crate::ledger::{LedgerNews, LedgerReport};
use crate::policy::Check;
use crate::record::Recorded;
use crate::stats::Stats;
use crate::verdict::Verdict;

/// In this file `log::warn!` and its siblings are the macros of this module.
mod log;
mod texts;

pub(crate) use log::defer;
use texts::StillOut;
pub(crate) use texts::{Growth, Start};

/// Counts the checks of one or many pools and picks those that are printed.
///
/// All pools of a process share [`LogSampler::process`], as in TensorFlow, unless
/// [`PoolBuilder::log_sampler`](crate::PoolBuilder::log_sampler) sets another.
#[derive(Debug, Clone)]
pub struct LogSampler(Checks);

/// Where checks are counted.
#[derive(Debug, Clone)]
enum Checks {
    OfProcess,
    Own(Arc<AtomicU64>),
}

/// No lazy cell: a child forked while another thread fills it in would never see it filled.
static CHECKS_OF_PROCESS: AtomicU64 = AtomicU64::new(0);

impl LogSampler {
    /// The sampler that pools share by default.
    pub fn process() -> Self {
        Self(Checks::OfProcess)
    }

    /// A new sampler, which picks the first check that it counts.
    #[allow(clippy::new_without_default)] // `LogSampler::process()` is what a default would have to be.
    pub fn new() -> Self {
        Self(Checks::Own(Arc::new(AtomicU64::new(0))))
    }

    fn next_is_printed(&self, every: u64) -> bool {
        let checks = match &self.0 {
            Checks::OfProcess => &CHECKS_OF_PROCESS,
            Checks::Own(checks) => checks,
        };
        // Relaxed: checks are only counted.
        checks.fetch_add(1, Ordering::Relaxed).is_multiple_of(every.max(1))
    }
}

/// A check of the rates, as a listener gets it ([`PoolBuilder::on_check`](crate::PoolBuilder::on_check)).
///
/// Displays as TensorFlow's lines: the counters, and below them the raise if there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckReport {
    /// The counters and the decision.
    pub check: Check,
    /// Whether it is printed.
    pub printed: bool,
}

/// Letter for letter TensorFlow's line of counters.
struct After<'a>(&'a Check);

/// Letter for letter TensorFlow's line of a raise.
struct Raising {
    from: u64,
    to: u64,
}

impl fmt::Display for After<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let window = &self.0.window;
        write!(
            f,
            "PoolAllocator: After {} get requests, put_count={} evicted_count={} eviction_rate={} and unsatisfied \
             allocation rate={}",
            window.gets(),
            window.put,
            window.evicted,
            SixDigits(window.eviction_rate()),
            SixDigits(window.unsatisfied_rate()),
        )
    }
}

impl fmt::Display for Raising {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Raising pool_size_limit_ from {} to {}", self.from, self.to)
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        After(&self.check).fmt(f)?;
        match self.check.raised_to {
            Some(to) => write!(f, "\n{}", Raising { from: self.check.limit, to }),
            None => Ok(()),
        }
    }
}

/// Called after every check, printed or not.
pub(crate) type Listener = Arc<dyn Fn(&CheckReport) + Send + Sync>;

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

#[cfg(test)]
impl PoolLog {
    /// Of a pool without a name.
    pub(crate) fn silent() -> Self {
        Self { name: None, log_sampler: LogSampler::new(), log_every: 1, listener: None }
    }
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

/// A line of a keeper, which has no pool.
pub(crate) fn keeper_is_short(path: &std::path::Path, error: &std::io::Error) {
    log::warn!(
        "keeper: no process can attach at {} for now, and the memory stays: {error} (raise `ulimit -n`, or end other programs)",
        path.display()
    );
}

impl PoolLog {
    /// The log of a partition, named after its parent: `parent/child`.
    pub(crate) fn partition(&self, child: &str) -> Self {
        let name = self.name.as_ref().map_or_else(|| child.to_owned(), |parent| format!("{parent}/{child}"));
        Self { name: Some(name), ..self.clone() }
    }

    /// Prints a check if the sampler picks it, and calls the listener. TensorFlow's lines carry no name.
    pub(crate) fn checked(&self, check: Check) {
        let report = CheckReport { check, printed: self.log_sampler.next_is_printed(self.log_every) };
        if report.printed {
            log::info!("{}", After(&check));
            if let Some(to) = check.raised_to {
                log::info!("{}", Raising { from: check.limit, to });
            }
        }
        if let Some(listener) = self.listener.clone() {
            log::call(move || listener(&report));
        }
    }

    pub(crate) fn started(&self, start: &Start<'_>) {
        log::info!("{self}{start}");
    }

    /// Prints what the user has to know of the machine: warnings and errors.
    pub(crate) fn found(&self, finding: &Finding) {
        match finding.level {
            Level::Ok | Level::Note => {}
            Level::Warning => log::warn!("{self}{finding}"),
            Level::Error => log::error!("{self}{finding}"),
        }
    }

    pub(crate) fn limit_lowered(&self, from: u64, to: u64) {
        log::info!("{self}Lowering pool_size_limit_ from {from} to {to}");
    }

    /// Pinned memory has doubled since the last such line.
    pub(crate) fn grown(&self, growth: &Growth) {
        log::info!("{self}growth: {growth}");
    }

    /// One call that took memory from the system.
    pub(crate) fn page_locked(&self, growth: &Growth) {
        log::debug!("{self}page-lock: {growth}");
    }

    /// A get joins the line.
    pub(crate) fn began_to_wait(&self, asked_bytes: u64, needed_bytes: u64) {
        log::trace!("{self}wait: a get of {asked_bytes} bytes ({needed_bytes} with rounding) joins the line");
    }

    /// A get that waited in line has left it.
    pub(crate) fn waited(&self, asked_bytes: u64, waited: Duration, is_served: bool) {
        let end = if is_served { "was served" } else { "found no memory" };
        log::debug!("{self}wait: a get of {asked_bytes} bytes {end} after {waited:?} in line");
    }

    /// `left`: the time for the rest, where it is known.
    pub(crate) fn reserving(&self, done_bytes: u64, of_bytes: u64, left: Option<Duration>) {
        let left = left.map_or_else(String::new, |left| format!(", {:.1} s to go", left.as_secs_f64()));
        log::info!("{self}reserve: {done_bytes} of {of_bytes} bytes pinned{left}");
    }

    /// A reserve that is not waited for has its first step.
    pub(crate) fn reserve_begun(&self, done_bytes: u64, of_bytes: u64) {
        log::info!(
            "{self}reserve: begun, {done_bytes} of {of_bytes} bytes are there, the rest is pinned beside the program"
        );
    }

    /// The rest is there.
    pub(crate) fn reserve_done(&self, bytes: u64, took: Duration, numa_node: Option<u32>) {
        let node = numa_node.map_or_else(String::new, |node| format!(", memory node {node}"));
        #[allow(clippy::cast_precision_loss)] // A rate.
        let rate = bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9;
        log::info!("{self}reserve: all is there, {bytes} bytes in {took:?} ({rate:.1} GB/s){node}");
    }

    /// The ceiling leaves no room for the rest now.
    pub(crate) fn reserve_waits(&self, done_bytes: u64, of_bytes: u64, max_bytes: Option<u64>) {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        log::warn!(
            "{self}reserve: waits for room, {done_bytes} of {of_bytes} bytes pinned under a ceiling of {max_bytes}: the rest \
             comes when there is some; raise PINPOOL_MAX_BYTES, or lower PINPOOL_RESERVE"
        );
    }

    /// The rest was refused.
    pub(crate) fn reserve_stopped(&self, done_bytes: u64, of_bytes: u64, error: &SourceError) {
        log::warn!(
            "{self}reserve: stopped at {done_bytes} of {of_bytes} bytes, the pool goes on with these: {error}; then \
             Pool::prewarm pins the rest, or lower PINPOOL_RESERVE"
        );
    }

    /// Calls `tiers`, which asks the kernel, only if the line is logged.
    pub(crate) fn reserved(&self, bytes: u64, tiers: impl Fn() -> PageTiers, numa_node: Option<u32>) {
        let node = numa_node.map_or_else(String::new, |node| format!(", memory node {node}"));
        log::info!("{self}reserve: {bytes} bytes are in {}{node}", tiers());
    }

    /// The huge pages that were asked for do not suffice.
    pub(crate) fn few_huge_pages(&self, lack: &SourceError) {
        log::warn!("{self}too few huge pages, other pages are taken: {lack}");
    }

    pub(crate) fn partitioned(&self, max_bytes: u64) {
        log::info!("{self}partition, ceiling {max_bytes} bytes, shares the memory of its parent pool");
    }

    pub(crate) fn shortage_began(&self, asked_bytes: u64, why: &str, usage: &UsageReport) {
        log::warn!("{self}shortage: no memory for {asked_bytes} bytes: {why}; {usage}");
    }

    pub(crate) fn shortage_ended(&self, after: Duration, gets: u64, fallbacks: u64) {
        // Of a single get there is no time between the first and the last.
        let after = if after.is_zero() { String::new() } else { format!(" after {after:?}") };
        let subject = if gets == 1 { "1 get".to_owned() } else { format!("{gets} gets") };
        log::warn!(
            "{self}shortage over{after}: {subject} found no memory at once, {fallbacks} were given memory that is not pinned"
        );
    }

    /// The verdict has changed.
    pub(crate) fn judged(&self, verdict: &Verdict) {
        if let Verdict::Thrashing(_) = verdict {
            log::warn!("{self}verdict: {verdict}");
        } else {
            log::info!("{self}verdict: {verdict}");
        }
    }

    /// The first get of the pool that failed, and then each power of ten.
    pub(crate) fn out_of_memory(&self, dump: &Dump) {
        log::warn!("{self}{dump}");
    }

    /// The first such get of the pool, and then each power of ten.
    pub(crate) fn fell_back(&self, asked_bytes: u64, nth: u64, fallback_bytes: u64, max_bytes: Option<u64>) {
        let limit = max_bytes.map_or_else(String::new, |max_bytes| format!(" of at most {max_bytes}"));
        let so_far = if nth == 1 { String::new() } else { format!(", as for {nth} gets so far") };
        log::warn!(
            "{self}fallback: memory for {asked_bytes} bytes is not pinned{so_far}, so a copy from it is slow and holds up its \
             caller; {fallback_bytes} bytes{limit} are such memory now (PINPOOL_MAX_FALLBACK_BYTES sets the limit, \
             PINPOOL_ON_FULL=error refuses instead)"
        );
    }

    #[cfg(feature = "serve")]
    pub(crate) fn serving(&self, path: &std::path::Path) {
        log::info!("{self}socket: statistics at {}: `pinpool top` shows them", path.display());
    }

    #[cfg(feature = "serve")]
    pub(crate) fn not_serving(&self, path: &std::path::Path, why: &str) {
        log::warn!("{self}socket: no statistics at {}: {why}", path.display());
    }

    pub(crate) fn ceiling_changed(&self, from: Option<u64>, to: Option<u64>, why: &str) {
        let bytes = |ceiling: Option<u64>| ceiling.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
        log::info!("{self}ceiling changed from {} to {}: {why}", bytes(from), bytes(to));
    }

    /// The pool has a place in the host ledger.
    pub(crate) fn joined_ledger(&self, report: &LedgerReport) {
        let LedgerReport { name, max_bytes, held_bytes, owners } = report;
        let ceiling = max_bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
        let others = owners.len().saturating_sub(1);
        log::info!(
            "{self}ledger: the ceiling of {name} holds for this pool and {others} others: {ceiling}, of which {held_bytes} are \
             held"
        );
    }

    pub(crate) fn ledger_has_other_ceiling(&self, name: &str, max_bytes: Option<u64>, asked_bytes: u64) {
        let ceiling = max_bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
        log::warn!(
            "{self}ledger: the ceiling of {name} stays {ceiling}, as its first owner has set it, not {asked_bytes} bytes; give all \
             its processes the same PINPOOL_MAX_BYTES"
        );
    }

    pub(crate) fn no_ledger(&self, why: &str) {
        log::warn!("{self}ledger: none is used, and the pool has its own ceiling alone: {why}");
    }

    /// A get waited for room that other owners made.
    pub(crate) fn ledger_had_room(&self, name: &str, asked_bytes: u64, waited: Duration) {
        log::debug!("{self}ledger: {name} had room for {asked_bytes} bytes after {waited:?}");
    }

    /// A get waited for room that other owners did not make.
    pub(crate) fn ledger_had_no_room(&self, name: &str, asked_bytes: u64, waited: Duration, others: &str) {
        log::info!("{self}ledger: {name} had no room for {asked_bytes} bytes in {waited:?}: {others}");
    }

    /// Idle memory was released because other owners lack it.
    pub(crate) fn ledger_was_given(&self, name: &str, bytes: u64) {
        log::debug!("{self}ledger: {name} was given {bytes} bytes of idle memory, which other owners want");
    }

    /// What became of the pool's place in a ledger, if anything did.
    pub(crate) fn ledger_news(&self, name: &str, news: Option<LedgerNews>) {
        match news {
            None => {}
            Some(LedgerNews::Closed) => log::error!(
                "{self}ledger: the place in {name} is lost, as this process has closed its descriptor: what is held counts there \
                 no more, and nothing more is pinned; close only descriptors of your own, and start this process again"
            ),
            Some(LedgerNews::Taken) => log::error!(
                "{self}ledger: the place in {name} is lost, as another owner has written to it: what is held counts there no more, \
                 and nothing more is pinned; start this process again"
            ),
            Some(LedgerNews::Moved { what }) => log::error!(
                "{self}ledger: the file of {name} was {what} while it was used: this pool has moved to the one that has the name \
                 now, with all that it holds; keep others from removing it (RemoveIPC=no in logind.conf, cleaners of /dev/shm)"
            ),
            Some(LedgerNews::NotMoved { what, why }) => log::error!(
                "{self}ledger: the file of {name} was {what} while it was used, and there is no other: nothing more is pinned \
                 until there is one: {why}"
            ),
        }
    }

    #[cfg(feature = "trace")]
    pub(crate) fn recording(&self, path: &Path) {
        log::info!("{self}trace: recording to {}", path.display());
    }

    /// The file was there, and would have been written over.
    #[cfg(feature = "trace")]
    pub(crate) fn earlier_recording(&self, path: &Path, earlier: &Path) {
        log::warn!(
            "{self}trace: the earlier recording in {} is {} now, until the next one takes its place there; put %p, the number of the \
             process, into the name to keep all",
            path.display(),
            earlier.display()
        );
    }

    #[cfg(feature = "trace")]
    pub(crate) fn not_recording(&self, path: &Path, why: &str) {
        log::warn!("{self}trace: nothing is recorded to {}: {why}", path.display());
    }

    pub(crate) fn recorded(&self, path: &Path, recorded: &Recorded) {
        let Recorded { records, lost, failure } = recorded;
        let path = path.display();
        match failure {
            Some(why) => log::error!(
                "{self}trace: {path} is not complete, {records} records are in it and {lost} were lost: {why}"
            ),
            None if *lost > 0 => log::warn!(
                "{self}trace: {records} records are in {path}, and {lost} were lost: threads recorded faster than they could \
                 be written"
            ),
            None => log::info!("{self}trace: {records} records are in {path}"),
        }
    }

    pub(crate) fn pressure_changed(&self, is_calm: bool) {
        if is_calm {
            log::info!("{self}memory is no longer short: idle memory is kept for PINPOOL_IDLE_TIMEOUT again");
        } else {
            log::info!("{self}memory is short: idle memory is given back sooner (PINPOOL_PRESSURE=off ignores this)");
        }
    }

    pub(crate) fn few_mappings(&self, used: u64, limit: u64, own: u64, granule_bytes: u64) {
        log::warn!(
            "{self}mappings: the process has {used} of the {limit} that the kernel allows (vm.max_map_count), {own} of them this \
             pool's; from now on it grows by {granule_bytes} bytes at least (raise the limit: sysctl vm.max_map_count)"
        );
    }

    pub(crate) fn lock_limited(&self, limit_bytes: u64) {
        log::warn!(
            "{self}locked memory is limited to {limit_bytes} bytes for this process (RLIMIT_MEMLOCK), and so is the \
             ceiling; raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK for more"
        );
    }

    /// Logs why there is no maintenance thread, if there is none.
    pub(crate) fn no_thread(&self, started: std::io::Result<()>) {
        if let Err(error) = started {
            self.no_thread_for(&error);
        }
    }

    #[cold]
    pub(crate) fn no_thread_for(&self, error: &std::io::Error) {
        log::warn!(
            "{self}no thread for maintenance (PINPOOL_POLL): idle memory is given back only while the pool is used; call \
             Pool::poll when the program is idle, or raise the limit on threads (`ulimit -u`, pids.max): {error}"
        );
    }

    /// To standard error, once, where the program has no logger: what its user set does not hold, and nothing else says so.
    pub(crate) fn bad_variables(&self, bad: &[BadVariable]) {
        static IS_TOLD: Once = Once::new();
        for bad in bad {
            log::warn!("{self}{bad}");
        }
        if ::log::max_level() == ::log::LevelFilter::Off && !bad.is_empty() {
            // What cannot be written there has nowhere else to go.
            IS_TOLD.call_once(|| bad.iter().for_each(|bad| drop(writeln!(io::stderr(), "pinpool: {self}{bad}"))));
        }
    }

    pub(crate) fn release_failed(&self, held_bytes: u64, error: &SourceError) {
        log::error!("{self}release failed: {held_bytes} bytes stay allocated until the process ends: {error}");
    }

    /// Logs why the arena could not give memory back, if it could not.
    pub(crate) fn release_error(&self, released: Result<(), SourceError>) {
        if let Err(error) = released {
            log::error!(
                "{self}release failed: idle memory stays pinned and is released later; further failures are not logged \
                 until a release succeeds: {error}"
            );
        }
    }

    /// Logs the first buffer that is lost, the second, the fourth, the eighth: one failed device loses many.
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
                "{self}completion unknown: a buffer of {held_bytes} bytes is {reuse} ({lost} lost now){all}: {error}"
            );
        }
    }

    /// Buffers that were lost are used again.
    pub(crate) fn completion_known(&self, buffers: u64, bytes: u64) {
        let (subject, are) = if buffers == 1 { ("buffer", "is") } else { ("buffers", "are") };
        log::info!("{self}completion known: {buffers} lost {subject} of {bytes} bytes {are} used again");
    }

    /// A copy holds up the releases of a pool, since its fence failed.
    pub(crate) fn gate_waits_for_an_answer(&self, error: &Error, is_asked_again: bool) {
        let end = if is_asked_again {
            "until the device answers, which is asked again ten times a second"
        } else {
            "from now on"
        };
        log::error!(
            "{self}completion unknown: the pool releases no memory {end}, since a release would wait for a copy: {error}"
        );
    }

    pub(crate) fn stuck(&self, buffers: u64, bytes: u64, age: Duration, stream: u64) {
        let (subject, have) =
            if buffers == 1 { ("a buffer".to_owned(), "has") } else { (format!("{buffers} buffers"), "have") };
        log::warn!(
            "{self}{subject} of {bytes} bytes {have} been in flight for {age:?} on stream {stream:#x}, unavailable until \
             the copies complete; look for what blocks that stream (PINPOOL_STUCK_AFTER sets the time)"
        );
    }

    /// No handle of the pool is left.
    pub(crate) fn ended(&self, stats: &Stats) {
        let Stats { gets, hits, misses, failed_gets, fallbacks, puts, evicted, underlying, .. } = stats;
        let (page_locks, bytes, peak_bytes) = (underlying.allocs, underlying.alloc_bytes, stats.peak_pinned_bytes);
        let calls = if page_locks == 1 { "page-lock" } else { "page-locks" };
        log::info!(
            "{self}ended: {gets} gets ({hits} hits, {misses} misses, {failed_gets} failed, {fallbacks} not pinned), {puts} \
             puts, {evicted} evicted; {bytes} bytes in {page_locks} {calls}, at most {peak_bytes} bytes pinned"
        );
    }

    /// No handle of the pool is left, and users still hold `buffers`, of which those under a tag are `tagged`.
    pub(crate) fn still_out(&self, buffers: u64, bytes: u64, tagged: &[HeldBuffer]) {
        let noun = if buffers == 1 { "buffer" } else { "buffers" };
        let list = StillOut { buffers, bytes, tagged };
        log::warn!(
            "{self}ended with {buffers} {noun} still out, {bytes} bytes, which stay until they are dropped:{list}"
        );
    }

    pub(crate) fn left_pinned(&self, bytes: u64) {
        log::error!(
            "{self}closing: {bytes} bytes stay pinned until the process ends: a copy was never seen to complete, and a \
             release would wait for it"
        );
    }

    pub(crate) fn left_by_refusal(&self, bytes: u64, error: &SourceError) {
        log::error!(
            "{self}release failed: closing, and {bytes} bytes stay pinned, or addresses reserved, until the process ends: {error}"
        );
    }

    pub(crate) fn closed_in_flight(&self, copies: u64, bytes: u64, waited: Duration) {
        log::error!(
            "{self}closing with {copies} copies in flight after waiting {waited:?}: their {bytes} bytes are never released, \
             since a device may still read them (PINPOOL_CLOSE_WAIT sets the wait)"
        );
    }
}

/// Whether the `nth` event of its kind is logged: the first, the tenth, the hundredth.
pub(crate) fn is_power_of_ten(nth: u64) -> bool {
    nth.checked_ilog10().is_some_and(|digits| nth == 10u64.pow(digits))
}

/// A double as C's `%g` prints it: six significant digits, no trailing zeros, an exponent below 1e-4 and from 1e6 on.
struct SixDigits(f64);

impl fmt::Display for SixDigits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scientific = format!("{:.5e}", self.0);
        // `{:e}` always prints an `e`; a value without one (infinity, NaN) is printed as it is.
        let Some((mantissa, exponent)) = scientific.split_once('e') else { return f.write_str(&scientific) };
        let exponent: i32 = exponent.parse().map_err(|_| fmt::Error)?;
        if (-4..6).contains(&exponent) {
            let decimals = usize::try_from(5 - exponent).map_err(|_| fmt::Error)?;
            return f.write_str(without_trailing_zeros(&format!("{:.decimals$}", self.0)));
        }
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(f, "{}e{sign}{:02}", without_trailing_zeros(mantissa), exponent.unsigned_abs())
    }
}

fn without_trailing_zeros(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
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

    #[test]
    fn rates_print_as_c_does() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (0.002, "0.002"),
            (0.015_742_824_577_7, "0.0157428"),
            (0.000_12, "0.00012"),
            (0.000_1, "0.0001"),
            (0.000_099_999_96, "0.0001"),
            (9.910_8e-5, "9.9108e-05"),
            (5e-5, "5e-05"),
            (1e-10, "1e-10"),
            (0.999_999_96, "1"),
            (1.234_565e-5, "1.23456e-05"),
            (123_456.0, "123456"),
            (1_234_567.0, "1.23457e+06"),
            (1.5e100, "1.5e+100"),
        ];
        for (rate, text) in cases {
            assert_eq!(SixDigits(rate).to_string(), text);
        }
    }
}
