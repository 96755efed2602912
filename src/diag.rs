//! Every log line, one function each; the only user of `log` in the library.
//!
//! | line | level | what to do about it |
//! | --- | --- | --- |
//! | `PoolAllocator: After G get requests, ...` | info | nothing while the two rates fall; see the README on reading it |
//! | `Raising pool_size_limit_ from A to B` | info | a long chain of them: sizes never repeat; round coarser or set the limit |
//! | `Lowering pool_size_limit_ from A to B` | info | nothing: five minutes without a miss; the way up is open |
//! | `preset P, back-end B ...` | info | says the rules, what holds the memory and why nothing better does, and the ceiling |
//! | `pinned N bytes ...` | info | nothing while it ends; each line is a doubling |
//! | `reserve: N of M bytes ...` | info | nothing: the start is pinning `PINPOOL_RESERVE` |
//! | `reserve: N bytes are in ...` | info | the pages really obtained; not huge ones: look at `transparent_hugepage` |
//! | `partition NAME ...` | info | nothing: a pool with a ceiling of its own was made |
//! | `no room for N bytes ...` | warn | raise `PINPOOL_MAX_BYTES`, lower the prefetch, or raise `PINPOOL_WAIT` |
//! | `room again after ...` | warn | says how long that lasted and what it cost |
//! | `memory is short ...` | info | idle memory goes back sooner; `PINPOOL_PRESSURE=off` ignores it |
//! | `locked memory is limited ...` | warn | raise `RLIMIT_MEMLOCK` or set `PINPOOL_MAX_BYTES` |
//! | `no thread for PINPOOL_POLL ...` | warn | call `Pool::poll` where the program falls silent |
//! | `PINPOOL_X=V ...` | warn | correct the variable; what is used instead is in the line |
//! | `release failed ...` | error | memory stays pinned, for now or until the process ends; the driver's words say why |
//! | `completion unknown ...` | error | the device failed, or nobody can follow a copy (the line says why); the buffer is never reused |
//! | `a buffer of N bytes is in flight ...`, `N buffers ...` | warn | a stream stands still: look at what was enqueued on it before the copy |
//! | `closing with N copies in flight ...` | error | a stream never finished; the memory is left alone |
//! | `closing: N bytes stay pinned ...` | error | the same on memory whose release waits for the device: all of it is left alone |
//!
//! Takes plain values, never a pool, and decides nothing but whether a check is printed: one in ten over the whole
//! process, as TensorFlow did.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::{PageTiers, SourceError};
use crate::config::Warning;
use crate::error::{Error, UsageReport};
use crate::policy::Check;

/// Counts the checks of one or many pools and says which are printed.
///
/// All pools of a process share [`LogSampler::process`] unless told otherwise, as in TensorFlow.
#[derive(Debug, Clone)]
pub struct LogSampler(Arc<AtomicU64>);

impl LogSampler {
    /// The one that pools share by default.
    pub fn process() -> Self {
        static PROCESS: std::sync::LazyLock<LogSampler> = std::sync::LazyLock::new(LogSampler::new);
        PROCESS.clone()
    }

    /// A count of its own, beginning with a check that is printed.
    #[allow(clippy::new_without_default)] // `LogSampler::process()` is what a default would have to be.
    pub fn new() -> Self {
        Self(Arc::new(AtomicU64::new(0)))
    }

    fn next_is_printed(&self, every: u64) -> bool {
        // Relaxed: checks are only counted.
        self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(every.max(1))
    }
}

/// A check of the rates, as told to a listener ([`PoolBuilder::on_check`](crate::PoolBuilder::on_check)).
///
/// Displays as TensorFlow's lines: the counters, and below them the raise if there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckReport {
    /// What was found and decided.
    pub check: Check,
    /// Is this one of those that are printed?
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

/// Hears of every check, printed or not.
pub(crate) type Listener = Arc<dyn Fn(&CheckReport) + Send + Sync>;

/// How a pool speaks of its checks.
#[derive(Clone)]
pub(crate) struct CheckReporter {
    pub(crate) log_sampler: LogSampler,
    pub(crate) log_every: u64,
    pub(crate) listener: Option<Listener>,
}

impl fmt::Debug for CheckReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckReporter").field("log_every", &self.log_every).finish_non_exhaustive()
    }
}

impl CheckReporter {
    /// Prints the check if it is its turn, and tells the listener.
    pub(crate) fn checked(&self, check: Check) {
        let report = CheckReport { check, printed: self.log_sampler.next_is_printed(self.log_every) };
        if report.printed {
            log::info!("{}", After(&check));
            if let Some(to) = check.raised_to {
                log::info!("{}", Raising { from: check.limit, to });
            }
        }
        if let Some(listener) = &self.listener {
            listener(&report);
        }
    }
}

pub(crate) fn started(
    preset: &str,
    source: &str,
    is_pinned: bool,
    passed_over: &[(&'static str, String)],
    ceiling: &str,
) {
    let nature = if is_pinned { "page-locked" } else { "not page-locked" };
    let why_not: String = passed_over.iter().map(|(name, why)| format!("; not {name}: {why}")).collect();
    log::info!("preset {preset}, back-end {source} ({nature}), ceiling {ceiling}{why_not}");
}

pub(crate) fn lowering(from: u64, to: u64) {
    log::info!("Lowering pool_size_limit_ from {from} to {to}");
}

pub(crate) fn grown(pinned_bytes: u64, page_locks: u64, max_bytes: Option<u64>) {
    let ceiling = max_bytes.map_or_else(String::new, |max_bytes| format!(", ceiling {max_bytes}"));
    log::info!("pinned {pinned_bytes} bytes in {page_locks} page-locks{ceiling}");
}

pub(crate) fn reserving(done_bytes: u64, of_bytes: u64) {
    log::info!("reserve: {done_bytes} of {of_bytes} bytes pinned");
}

pub(crate) fn reserved(bytes: u64, tiers: impl Fn() -> PageTiers, numa_node: Option<u32>) {
    let node = numa_node.map_or_else(String::new, |node| format!(", memory node {node}"));
    log::info!("reserve: {bytes} bytes are in {}{node}", tiers());
}

pub(crate) fn partitioned(name: &str, max_bytes: u64) {
    log::info!("partition {name}, ceiling {max_bytes} bytes, shares the memory of its pool");
}

pub(crate) fn no_room(asked_bytes: u64, why: &str, holdings: &UsageReport) {
    log::warn!("no room for {asked_bytes} bytes: {why}; {holdings}");
}

pub(crate) fn room_again(after: Duration, gets: u64, fallbacks: u64) {
    log::warn!(
        "room again after {after:?}: {gets} gets found none at once, {fallbacks} were given memory that is not pinned"
    );
}

pub(crate) fn pressure(is_over: bool) {
    if is_over {
        log::info!("memory is not short any more: idle memory stays as long as PINPOOL_IDLE_TIMEOUT says");
    } else {
        log::info!("memory is short: idle memory goes back sooner (PINPOOL_PRESSURE=off ignores it)");
    }
}

pub(crate) fn lock_limit(limit_bytes: u64) {
    log::warn!(
        "locked memory is limited to {limit_bytes} B for this process (RLIMIT_MEMLOCK); the ceiling is set to that; raise the \
         limit (`ulimit -l`) or grant CAP_IPC_LOCK for more"
    );
}

pub(crate) fn no_poller(error: &std::io::Error) {
    log::warn!("no thread for PINPOOL_POLL: idle memory goes back only while the pool is used or polled: {error}");
}

pub(crate) fn bad_setting(warning: &Warning) {
    log::warn!("{warning}");
}

pub(crate) fn release_failed(held_bytes: u64, error: &SourceError) {
    log::error!("release failed, {held_bytes} B stay held until the process ends: {error}");
}

pub(crate) fn not_released(error: &SourceError) {
    log::error!(
        "release failed: idle memory stays pinned for now and is tried again later, without another word until some goes: \
         {error}"
    );
}

/// One that fails takes many along: the first is told, the second, the fourth, the eighth.
pub(crate) fn completion_unknown(held_bytes: u64, lost: u64, keeps_all: bool, error: &Error) {
    if lost.is_power_of_two() {
        let all = if keeps_all { ", and nothing of the pool goes back, since a release would wait for it" } else { "" };
        log::error!("completion unknown, a buffer of {held_bytes} B is never reused ({lost} so far){all}: {error}");
    }
}

pub(crate) fn stuck(buffers: u64, bytes: u64, age: Duration, stream: u64) {
    let (what, are) = if buffers == 1 { ("a buffer".to_owned(), "is") } else { (format!("{buffers} buffers"), "are") };
    log::warn!(
        "{what} of {bytes} bytes {are} in flight since {age:?} on stream {stream:#x}: away until the copies end \
         (PINPOOL_STUCK_AFTER sets the time)"
    );
}

pub(crate) fn left_pinned(bytes: u64) {
    log::error!(
        "closing: {bytes} bytes stay pinned until the process ends: a copy was never seen to end, and a release would wait \
         for it"
    );
}

pub(crate) fn closed_in_flight(copies: u64, bytes: u64, waited: Duration) {
    log::error!(
        "closing with {copies} copies in flight after waiting {waited:?}: their {bytes} B are left alone, since a device may \
         still read them (PINPOOL_CLOSE_WAIT sets the wait)"
    );
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
    use crate::policy::Window;

    #[test]
    fn the_lines_are_the_ones_of_the_public_logs() {
        let window = Window { get_from_pool: 62_421, put: 63_521, allocated: 1_100, evicted: 1_000 };
        let report = CheckReport { check: Check { window, limit: 100, raised_to: Some(110) }, printed: true };
        assert_eq!(
            report.to_string(),
            "PoolAllocator: After 63521 get requests, put_count=63521 evicted_count=1000 eviction_rate=0.0157428 and \
             unsatisfied allocation rate=0.0173171\nRaising pool_size_limit_ from 100 to 110"
        );
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

    #[test]
    fn one_check_in_ten_is_printed_beginning_with_the_first() {
        let log_sampler = LogSampler::new();
        let printed: Vec<bool> = (0..21).map(|_| log_sampler.next_is_printed(10)).collect();
        let turns: Vec<usize> = printed.iter().enumerate().filter_map(|(n, &yes)| yes.then_some(n + 1)).collect();
        assert_eq!(turns, [1, 11, 21]);
    }
}
