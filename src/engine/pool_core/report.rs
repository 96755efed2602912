//! Reports of a pool: statistics, the dump of its holders, the diagnosis, and all of these on a socket. No hit calls this
//! module.
//!
//! These functions take only short locks, and none that a thread holds during a driver call. In a forked child they take none,
//! because a lock may be held by a thread that does not exist there.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::PoolCore;
#[cfg(feature = "observe")]
use crate::config::StatsSocket;
use crate::copy;
use crate::engine::meter;
use crate::engine::meter::holders::{Tag, UNTAGGED};
use crate::policy::RateWindow;
use crate::quota::LimitLevel;
use crate::report::{Dump, FailedRequest, Holder, held_now};
use crate::size_class::{Class, plain_eighths_index};
use crate::stats::{CallStats, ClassStats, MemoryStats, Stats};
use pinpool_observe::diagnosis::{Cause, LikelyCause, Monitor, Snapshot, TagUse, WindowDiagnosis};
#[cfg(feature = "observe")]
use pinpool_observe::stats_socket;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU64, Mutex, Ordering};

/// The diagnosis, and its input in addition to the statistics. All atomic accesses are Relaxed: the values are statistics.
#[derive(Debug, Default)]
pub(super) struct DiagnosisState {
    monitor: Mutex<Monitor>,
    /// Requests that found no memory at their first attempt.
    short_requests: AtomicU64,
    /// Requests in `short_requests` of threads that had just returned a buffer to this pool while requests waited.
    own_waits: AtomicU64,
    /// Whether the source, and not a limit, made the last refusal.
    pub(super) is_by_source: AtomicBool,
    /// Time that waiting requests spent in searches, which may call the source. It does not count as waiting.
    pub(super) calls_while_waiting_ns: AtomicU64,
    /// The cause of the last failed request since the last diagnosis.
    pub(super) failure: Mutex<Option<(Cause, LikelyCause)>>,
    /// The largest sum, since the last diagnosis, of the bytes in use, the bytes of waiting requests and the bytes of a request
    /// that found no memory.
    needed_bytes: AtomicU64,
}

thread_local! {
    /// Number of the pool to which this thread last returned a buffer while requests waited, since the thread's last request
    /// that found no memory.
    static RETURNED_TO: Cell<Option<u64>> = const { Cell::new(None) };
}

impl PoolCore {
    /// Returns the tag with this name, or `None` if the name is empty.
    pub(crate) fn tag(&self, name: &str) -> Option<Arc<Tag>> {
        self.holders.tag(name)
    }

    /// Returns the memory of the pool, by holder.
    pub(crate) fn dump(&self) -> Dump {
        self.dump_of(&self.stats(), None)
    }

    /// Logs the totals and the buffers that users still hold.
    pub(super) fn report_end(&self) {
        let stats = self.stats();
        self.log.pool_ended(&stats);
        if stats.memory.in_use > 0 {
            self.log.buffers_still_out((&stats, &self.holders.buffers(self.time.now_us())));
        }
    }

    pub(super) fn dump_of(&self, stats: &Stats, request: Option<FailedRequest>) -> Dump {
        let source = self.memory.source();
        // In a forked child, further locks may be held by threads that do not exist there.
        let forked = self.is_forked();
        let arena = self.memory.arena().filter(|_| !forked);
        // `None` if no window has ended, or another thread is evaluating the diagnosis now.
        let latest = || self.diagnosis.monitor.try_lock()?.latest().cloned();
        Dump {
            device: if source.needs_gpu() { format!("GPU {}", self.config.device) } else { "host".to_owned() },
            holders: self.holders_of(stats),
            stats: stats.clone(),
            longest_free_bytes: arena.map_or(0, |arena| arena.longest_free_bytes()),
            host: if forked { None } else { self.host_limit.memory(self.time.to_process_us(self.time.coarse_us())) },
            request,
            diagnosis: if forked { None } else { latest() },
            limit: if forked { "PINPOOL_MAX_BYTES" } else { self.memory.limit_name(LimitLevel::Pool) },
        }
    }

    /// Returns the holders, largest first: tags, and untagged buffers as one holder. Empty in a forked child.
    pub(super) fn holders_of(&self, stats: &Stats) -> Vec<Holder> {
        if self.is_forked() {
            return Vec::new();
        }
        let mut holders = self.holders.sums(self.time.coarse_us());
        let (buffers, bytes) = holders.iter().fold((0, 0), |sum, held| (sum.0 + held.buffers, sum.1 + held.bytes));
        // Saturating: buffers come and go between the two readings.
        holders.extend(Holder::untagged(
            UNTAGGED,
            (stats.memory.in_use + stats.copies.in_flight).saturating_sub(buffers),
            (stats.memory.in_use_bytes + stats.copies.in_flight_bytes).saturating_sub(bytes),
        ));
        holders.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| one.tag.cmp(&other.tag)));
        holders
    }

    /// Returns the statistics of each class that this pool has had buffers of, smallest first. Empty in a forked child.
    pub(crate) fn class_stats(&self) -> Vec<ClassStats> {
        if self.is_forked() {
            return Vec::new();
        }
        let mut in_flight = BTreeMap::<usize, u64>::new();
        self.in_flight.for_each(|block| {
            *in_flight.entry(block.class_bytes()).or_default() += u64::from(block.memory().is_from_source());
        });
        let counted = self.classes.rows().into_iter();
        let row = |counted: ClassStats| {
            let bytes = usize::try_from(counted.class_bytes).unwrap_or(usize::MAX);
            let in_flight = in_flight.remove(&bytes).unwrap_or(0);
            let idle = self.idle.count_of(Class { bytes, index: plain_eighths_index(bytes) });
            // Saturating: buffers come and go between the readings.
            let buffers = counted.buffers.saturating_sub(counted.quarantined);
            ClassStats { buffers, in_flight, idle, in_use: buffers.saturating_sub(in_flight + idle), ..counted }
        };
        counted.map(row).collect()
    }

    /// Returns the statistics of a pool or partition that has counted nothing.
    pub(super) fn empty_stats(&self, name: Option<String>, number: u64) -> Stats {
        let (preset, source) = (self.config.preset, self.memory.source());
        let (backend, pinned_by) = (source.name(), source.pinned_by());
        Stats { name, number, preset, backend, pinned_by, ..Stats::default() }
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.empty_stats(self.name().map(str::to_owned), self.log.number);
        if self.is_forked() {
            return stats;
        }
        (stats.requests.waits, stats.requests.waiting) = self.waiters.counts();
        stats.limits.shared = self.shared_limit_stats();
        self.memory.fill_stats(&mut stats);
        // The order matters: `counters.fill` derives the bytes in use from the values that the other calls filled in.
        self.idle.fill(&mut stats);
        self.classes.fill(&mut stats);
        self.lifetime.fill(&mut stats);
        self.in_flight.fill(&mut stats);
        self.counters.fill(&mut stats, self.memory.own_bytes());
        stats.copies.timeline_bytes = copy::timeline_bytes();
        let oldest = self.in_flight.oldest(self.time.now_us());
        stats.copies.oldest_age = oldest.map(|pending| pending.age);
        stats.copies.oldest_stream_id = oldest.and_then(|pending| pending.stream);
        stats
    }

    /// Returns TensorFlow's counters since the limit was last raised or the pool was last cleared.
    pub(crate) fn window(&self) -> RateWindow {
        self.idle.window()
    }

    /// Records that this thread returns a buffer while requests wait.
    pub(super) fn mark_return_during_wait(&self) {
        // Fails only while the thread exits. Such a thread makes no request.
        let _ = RETURNED_TO.try_with(|pool| pool.set(Some(self.log.number)));
    }

    /// Records that a request of `class` found no memory at its first attempt.
    pub(super) fn count_short_request(&self, class: Class) {
        let own_bytes = self.memory.own_bytes().saturating_sub(self.idle.bytes());
        let waiting_bytes: u64 = self.waiters.waiting_bytes().iter().sum();
        self.diagnosis.short_requests.fetch_add(1, Ordering::Relaxed);
        if RETURNED_TO.try_with(Cell::take).ok().flatten() == Some(self.log.number) {
            self.diagnosis.own_waits.fetch_add(1, Ordering::Relaxed);
        }
        self.diagnosis.needed_bytes.fetch_max(own_bytes + waiting_bytes + class.bytes as u64, Ordering::Relaxed);
    }

    /// Evaluates the diagnosis if that is due, and logs it if it has changed.
    pub(super) fn report_diagnosis(&self, now_us: u64) {
        // A pool that is configured to keep nothing releases all that it pins, which needs no diagnosis.
        if self.config.pool_size_limit == 0 && self.memory.arena().is_none() {
            return;
        }
        // One thread at a time is enough.
        let Some(is_due) = self.diagnosis.monitor.try_lock().map(|monitor| monitor.is_due(now_us)) else { return };
        let is_recorded = self.recorder().is_some_and(|recorder| recorder.wants_snapshot(now_us));
        if !is_due && !is_recorded {
            return;
        }
        // Without a lock: the snapshot may read files, to name the places of requests.
        let snapshot = self.snapshot();
        let Some(mut monitor) = self.diagnosis.monitor.try_lock() else { return };
        let has_ended = monitor.add(now_us, snapshot.clone()).is_some();
        if let Some(recorder) = self.recorder().filter(|_| has_ended || is_recorded) {
            recorder.snapshot(now_us, snapshot);
        }
        if !has_ended {
            return;
        }
        self.diagnosis.failure.lock().take();
        // A request that still waits needs as much as when it began to wait.
        if !self.has_waiters() {
            self.diagnosis.needed_bytes.store(0, Ordering::Relaxed);
        }
        let news = if monitor.should_log(now_us) { monitor.latest().cloned() } else { None };
        drop(monitor);
        if let Some(diagnosis) = news {
            let level = if diagnosis.is_alarm { log::Level::Warn } else { log::Level::Info };
            self.log.diagnosis(level, &diagnosis);
        }
    }

    /// Returns the diagnosis of the windows that are remembered, or of the time so far if no window has ended.
    pub(crate) fn diagnose(&self) -> WindowDiagnosis {
        let (now_us, snapshot) = (self.time.coarse_us(), self.snapshot());
        // In a forked child, the lock may be held by a thread that does not exist there.
        let monitor = if self.is_forked() { None } else { self.diagnosis.monitor.try_lock() };
        monitor.as_deref().unwrap_or(&Monitor::default()).why(now_us, &snapshot)
    }

    /// Returns the input of the diagnosis.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let (stats, direct) = (self.stats(), self.memory.arena().is_none());
        let needed_bytes = self.diagnosis.needed_bytes.load(Ordering::Relaxed);
        // A wait counts while it lasts, not in the window in which it ends.
        let current_waits = if self.is_forked() { Duration::ZERO } else { self.waiters.total_waited(Instant::now()) };
        let waited = stats.requests.wait_time.total() + current_waits;
        let copies = stats.copies.time.count() + stats.copies.in_flight;
        let limit = self.memory.limit_name(LimitLevel::Pool);
        let limited = limit != "PINPOOL_MAX_BYTES" || stats.limits.max_bytes.is_some() || stats.limits.shared.is_some();
        let nanos = |calls: &CallStats| meter::nanos(calls.time.total());
        let MemoryStats { pin, unpin, remap, .. } = &stats.memory;
        let place = |tag: &str| if self.config.code_only.call_stacks > 0 { self.holders.place(tag) } else { None };
        let tag_use = |holder: &Holder| TagUse { place: place(&holder.tag), ..holder.tag_use() };
        let classes = if direct { self.class_stats() } else { Vec::new() };
        Snapshot {
            requests: stats.requests.served + stats.requests.failed,
            misses: stats.requests.misses,
            // Under `tensorflow` a miss after an eviction shows that too few buffers are kept, and not that the lengths vary.
            new_lengths: if direct { stats.requests.miss_reasons.first_of_size } else { self.counters.new_lengths() },
            returns: stats.requests.returned,
            evicted: stats.memory.evictions.over_limit,
            delayed_requests: self.diagnosis.short_requests.load(Ordering::Relaxed),
            own_waits: self.diagnosis.own_waits.load(Ordering::Relaxed),
            failed_requests: stats.requests.failed,
            is_by_source: self.diagnosis.is_by_source.load(Ordering::Relaxed),
            waiting: stats.requests.waiting,
            waiting_ns: meter::nanos(waited)
                .saturating_sub(self.diagnosis.calls_while_waiting_ns.load(Ordering::Relaxed)),
            pin_calls: pin.count,
            pinned_bytes: stats.memory.pin.bytes,
            unpinned_bytes: stats.memory.unpin.bytes,
            pinning_ns: nanos(pin) + nanos(unpin),
            moving_ns: nanos(remap),
            needed_bytes,
            set_in_code: self.config.code_only.set_in_code.join(" "),
            limit: limited.then_some(limit.into()),
            others_bytes: stats.limits.shared.as_ref().map(|shared| shared.held_bytes.saturating_sub(shared.own_bytes)),
            // Under `adaptive` an eviction returns memory to the arena and makes no driver call.
            pool_size_limit: direct.then_some(stats.limits.pool_size_limit),
            recurring: classes.iter().filter(|class| class.misses > 1).map(|class| class.peak_buffers).sum(),
            copies,
            is_pinned: stats.pinned_by.is_some(),
            #[cfg(feature = "cuda")]
            has_driver: copies > 0 && stats.pinned_by.is_none() && crate::driver::is_mapped(),
            #[cfg(not(feature = "cuda"))]
            has_driver: false,
            failure: if self.is_forked() { None } else { self.diagnosis.failure.lock().clone() },
            holders: self.holders_of(&stats).iter().map(tag_use).collect(),
            ..held_now(&stats)
        }
    }
}

/// Maximum number of holders that the statistics on a socket list.
#[cfg(feature = "observe")]
const HOLDERS_MAX: usize = 20;

#[cfg(feature = "observe")]
impl stats_socket::StatisticsSource for PoolCore {
    fn object(&self) -> serde_json::Value {
        let stats = self.stats();
        let holders = self.holders_of(&stats);
        let why = self.diagnose();
        let holder = |holder: &Holder| {
            let age_seconds = holder.oldest_age.map(|age| age.as_secs_f64());
            let Holder { tag, buffers, bytes, requested_bytes, .. } = holder;
            serde_json::json!({
                "tag": tag, "buffers": buffers, "bytes": bytes, "requested_bytes": requested_bytes, "oldest_age_seconds": age_seconds,
            })
        };
        let mut object = serde_json::json!(stats);
        object["why"] = serde_json::json!({
            "cause": why.cause.name(), "is_alarm": why.is_alarm, "lines": why.lines(), "lost_seconds": why.lost.total_ns() as f64 / 1e9,
            "window_seconds": why.lost.window_us as f64 / 1e6,
        });
        // For `pinpool top --once`: the same table as a program prints with the `Display` of `Stats`.
        object["table"] = stats.to_string().into();
        object["dump"] = self.dump_of(&stats, None).to_string().into();
        object["snapshot"] = serde_json::json!(self.snapshot());
        object["holders"] = holders.iter().take(HOLDERS_MAX).map(holder).collect();
        object
    }
}

#[cfg(feature = "observe")]
impl PoolCore {
    /// Serves the statistics on a socket until the pool ends, if `PINPOOL_SOCKET` is set.
    pub(crate) fn serve_statistics(self: &Arc<Self>) {
        let path = match &self.config.socket {
            None => return,
            Some(StatsSocket::Default) => stats_socket::path_of(self.process),
            Some(StatsSocket::Path(path)) => path.clone(),
        };
        match stats_socket::serve(&path, Arc::<Self>::downgrade(self)) {
            Ok(served_pool) => {
                self.log.socket_opened(&path);
                // Set once, when the pool is made.
                let _ = self.served_pool.set(served_pool);
            }
            Err(error) => self.log.socket_failed(&path, &error.to_string()),
        }
    }
}
