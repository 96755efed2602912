//! Statistics, and what a pool holds and for whom: for failed requests and for [`Pool::dump`](crate::Pool::dump).
//!
//! Takes only short locks, and none that a thread holds during a driver call.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::super::memory::Refusal;
use super::super::meter::counters::usage_report;
use super::super::meter::owners::{TagAccount, UNTAGGED};
use super::{BlockRequest, Core};
use crate::copy;
use crate::diag::{StillOut, is_power_of_ten};
use crate::dump::{Dump, Host, Owner, Request};
use crate::error::{Error, ErrorKind, NoMemory};
use crate::policy::Window;
use crate::quota::{Level, QuotaExceeded};
use crate::size_class::{Class, plain_eighths_index};
use crate::stats::{ClassStats, Stats};
use pinpool_os::host::{self, LimitOrigin};
use pinpool_os::sync::plain::Mutex;

/// Interval between two readings of the system's memory, which are kernel files.
const READ_EVERY_US: u64 = 1_000_000;

/// The system's memory at the last reading.
#[derive(Debug, Default)]
pub(super) struct SystemMemory(Mutex<Option<(u64, Option<Host>)>>);

impl SystemMemory {
    /// At `now_us`, or up to a second before. The files below `root` are read under no lock.
    fn at(&self, root: &Path, now_us: u64) -> Option<Host> {
        let last = self.0.lock().clone();
        if let Some((_, host)) = last.filter(|(read_us, _)| now_us.saturating_sub(*read_us) < READ_EVERY_US) {
            return host;
        }
        let memory = host::memory(root);
        let host = memory.map(|memory| Host {
            total_bytes: memory.total_bytes,
            available_bytes: memory.available_bytes,
            is_group: matches!(memory.origin, LimitOrigin::Cgroup(_)),
            origin: memory.origin.to_string(),
        });
        *self.0.lock() = Some((now_us, host.clone()));
        host
    }
}

impl Core {
    /// The account of `tag`; `None` for an empty tag.
    pub(crate) fn tag_account(&self, tag: &str) -> Option<Arc<TagAccount>> {
        self.owners.account(tag)
    }

    /// What is held and for whom.
    pub(crate) fn dump(&self) -> Dump {
        self.dump_of(&self.stats(), None)
    }

    /// The error of a failed request: the `nth` of the pool, 0 for a reserve. Logs the first and each power of ten.
    pub(super) fn refused(&self, wanted: &BlockRequest, refusal: Refusal, nth: u64) -> Error {
        if self.is_closed() {
            return ErrorKind::Closed.into();
        }
        let is_by_account =
            matches!(&refusal, Refusal::QuotaExceeded { over: QuotaExceeded { level: Level::Account, .. }, .. });
        let account = wanted.account.as_ref().filter(|_| is_by_account);
        let stats = account.map_or_else(|| self.stats(), |account| account.stats());
        let asked_bytes = wanted.len as u64;
        let refused = self.memory().explain(&refusal, wanted.class);
        let tag = wanted.tag.as_ref().map(|account| account.tag().to_owned());
        let request = Request { asked_bytes, tag, is_reserve: nth == 0, refused: refused.clone() };
        let mut dump = self.dump_of(&stats, Some(request));
        if is_by_account {
            dump.limit = self.memory().limit_name(Level::Account);
        }
        if nth > 0 {
            *self.verdicts.failure.lock() = dump.likely_cause().map(|likely| (refused.cause(), likely));
        }
        if is_power_of_ten(nth) {
            self.log.out_of_memory(&dump);
        }
        let no_memory = NoMemory { asked_bytes, refused, usage: usage_report(&stats), report: dump.body() };
        let is_by_source = matches!(refusal, Refusal::Source(_));
        if is_by_source { ErrorKind::Backend(no_memory) } else { ErrorKind::Limit(no_memory) }.into()
    }

    /// Logs the totals and the buffers that users still hold.
    pub(super) fn report_end(&self) {
        let stats = self.stats();
        self.log.ended(&stats);
        if stats.memory.in_use > 0 {
            let known = self.owners.buffers(self.time.now_us());
            self.log.still_out(&StillOut {
                buffers: stats.memory.in_use + stats.copies.in_flight,
                bytes: stats.memory.in_use_bytes + stats.copies.in_flight_bytes,
                tagged: &known,
            });
        }
    }

    pub(super) fn dump_of(&self, stats: &Stats, request: Option<Request>) -> Dump {
        let source = self.memory().source();
        // In a forked child other locks may be held by threads that do not exist here.
        let is_forked = self.is_forked();
        Dump {
            device: if source.needs_gpu() { format!("GPU {}", self.config.device) } else { "host".to_owned() },
            allocator: format!("{} ({})", stats.backend, stats.preset),
            owners: self.owners_of(stats),
            usage: usage_report(stats),
            longest_free_bytes: if is_forked { 0 } else { self.memory().longest_free_bytes() },
            peak_bytes: stats.memory.peak_held_bytes,
            oldest_copy: stats.copies.oldest_age.zip(stats.copies.oldest_stream),
            host: if is_forked { None } else { self.system.at(&self.limit.root, self.time.coarse_us()) },
            request,
            judged: self.judged(),
            limit: if is_forked { "PINPOOL_MAX_BYTES" } else { self.memory().limit_name(Level::Pool) },
        }
    }

    /// The holders, largest first: the tags, and what has no tag. None in a forked child.
    pub(super) fn owners_of(&self, stats: &Stats) -> Vec<Owner> {
        if self.is_forked() {
            return Vec::new();
        }
        let mut owners = self.owners.sums(self.time.coarse_us());
        let (buffers, bytes) = owners.iter().fold((0, 0), |sum, owner| (sum.0 + owner.buffers, sum.1 + owner.bytes));
        // Saturating: buffers come and go between the two readings.
        owners.extend(Owner::untagged(
            UNTAGGED,
            (stats.memory.in_use + stats.copies.in_flight).saturating_sub(buffers),
            (stats.memory.in_use_bytes + stats.copies.in_flight_bytes).saturating_sub(bytes),
        ));
        owners.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| one.tag.cmp(&other.tag)));
        owners
    }
}

impl Core {
    /// The classes that this pool had buffers of, the smallest first.
    pub(crate) fn class_stats(&self) -> Vec<ClassStats> {
        if self.is_forked() {
            return Vec::new();
        }
        let mut in_flight = BTreeMap::<usize, u64>::new();
        self.in_flight.for_each(|block| {
            *in_flight.entry(block.class_bytes()).or_default() += u64::from(block.adopted().is_none());
        });
        let counted = self.stock.classes().rows().into_iter();
        let row = |counted: ClassStats| {
            let bytes = usize::try_from(counted.class_bytes).unwrap_or(usize::MAX);
            let in_flight = in_flight.remove(&bytes).unwrap_or(0);
            let idle = self.stock.idle().count_of(Class { bytes, index: plain_eighths_index(bytes) });
            // Saturating: buffers come and go between the readings.
            let in_use = counted.buffers.saturating_sub(in_flight + idle);
            ClassStats { in_flight, idle, in_use, ..counted }
        };
        counted.map(row).collect()
    }

    pub(crate) fn stats(&self) -> Stats {
        let (preset, source) = (self.config.preset.name(), self.memory().source());
        let name = self.name().map(str::to_owned);
        let (number, backend, is_pinned) = (self.log.number, source.name(), source.is_pinned());
        let mut stats = Stats { name, number, preset, backend, is_pinned, ..Stats::default() };
        if self.is_forked() {
            return stats;
        }
        (stats.requests.waits, stats.requests.waiting) = (self.waiters.total.get(), self.waiters.waiting());
        stats.limits.shared = self.shared_limit_stats();
        self.stock.fill(&mut stats);
        self.in_flight.fill(&mut stats);
        self.counters.fill(&mut stats, self.memory().own_bytes());
        stats.copies.timeline_bytes = copy::timeline_bytes();
        let oldest = self.in_flight.oldest(self.time.now_us());
        (stats.copies.oldest_age, stats.copies.oldest_stream) =
            oldest.map(|pending| (pending.age, pending.stream)).unzip();
        stats
    }

    /// TensorFlow's counters since the last raise or clear.
    pub(crate) fn window(&self) -> Window {
        self.stock.idle().window()
    }
}
