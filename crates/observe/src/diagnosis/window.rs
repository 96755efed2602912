//! The rules that diagnose one window.

use std::time::Duration;

use super::leak::Leak;
use super::snapshot::{STUCK_AFTER, Snapshot, TagUse};
use super::window_diagnosis::{Cause, Lost, WindowDiagnosis};
use super::words::{RoundedUp, SYSTEM_REMEDY, Size, Time, counted, percent, seconds};

/// A rate above 1/500 is not tolerable. TensorFlow uses the same value, 0.002.
const TOLERABLE_PART: u64 = 500;
/// If fewer requests than this find no memory, only the time that they wait matters.
const SHORT_MIN: u64 = 3;
/// Waiting matters if it takes at least 1/100 of a window.
const WAITED_PART: u64 = 100;
/// Growth by at most 1/16 does not count.
const GROWTH_PART: u64 = 16;
/// A pool with a miss rate of at most 1/50 has the memory that it needs.
const WARM_PART: u64 = 50;
/// A queue in front of a slow consumer keeps a buffer at least this long.
const QUEUED_NS: u64 = 500_000_000;
/// If a consumer pauses, requests wait at least this long on average, and at most 1/10 of the requests wait.
const PAUSE_NS: u64 = 100_000_000;
const PAUSED_PART: u64 = 10;
/// If serving all requests would raise the use of memory by at most 1/4, memory is not the bottleneck.
const OVERHANG_PART: u64 = 4;
/// Number of consecutive windows in which memory is pinned and unpinned that count as thrashing.
const CHURNED: u32 = 2;
/// Names of limits that are settings.
const SETTINGS: [&str; 3] = ["PINPOOL_MAX_BYTES", "PINPOOL_RESERVE", "PINPOOL_POOL_SIZE_LIMIT"];
/// Misses are an alarm if the calls that they cause take more than this percentage of the time.
const COSTLY_PERCENT: u64 = 5;

/// The time between two snapshots.
pub(super) struct Window<'a> {
    before: &'a Snapshot,
    now: &'a Snapshot,
    /// Differences between the counters of the two snapshots.
    pub(super) delta: Snapshot,
    /// The most bytes held at the end of an earlier window.
    most_held_bytes: u64,
    lost: Lost,
}

pub(super) fn is_stuck(now: &Snapshot) -> bool {
    now.oldest_copy.is_some_and(|age| age >= STUCK_AFTER)
}

/// Returns the mean size of the buffers in use, 0 if there are none.
fn mean_bytes(snapshot: &Snapshot) -> u64 {
    snapshot.used_bytes / snapshot.used.max(1)
}

fn is_high(part: u64, whole: u64) -> bool {
    part > whole / TOLERABLE_PART
}

impl<'a> Window<'a> {
    pub(super) fn between(before: &'a Snapshot, now: &'a Snapshot, window_us: u64, most_held_bytes: u64) -> Self {
        let delta = now.since(before);
        Self { lost: delta.lost(window_us), before, now, delta, most_held_bytes }
    }

    /// Returns whether the window both pinned and unpinned at least as much memory as was held at either end.
    pub(super) fn is_churning(&self) -> bool {
        let held_bytes = self.cycled_bytes();
        held_bytes > 0 && self.delta.pinned_bytes >= held_bytes && self.delta.unpinned_bytes >= held_bytes
    }

    /// Returns the bytes that each cycle pins again.
    fn cycled_bytes(&self) -> u64 {
        let held_bytes = self.before.held_bytes.max(self.now.held_bytes);
        // At both ends of the window, all memory was released.
        if held_bytes == 0 { self.now.most_held_bytes } else { held_bytes }
    }

    /// Returns the diagnosis of the first rule that applies.
    pub(super) fn diagnose(&self, leak: Option<Leak>, churned: u32, again: Option<(String, u64)>) -> WindowDiagnosis {
        self.stuck_copy()
            .or_else(|| leak.map(|leak| self.leak(&leak)))
            .or_else(|| self.shortage())
            .or_else(|| self.thrashing(churned, again))
            .unwrap_or_else(|| self.quiet())
    }

    fn diagnosis(&self, cause: Cause, found: String) -> WindowDiagnosis {
        let Self { now, delta, lost, .. } = self;
        let [pinned, unpinned] = [delta.pinned_bytes, delta.unpinned_bytes].map(Size);
        let [used, in_flight, idle, free] =
            [now.used_bytes, now.in_flight_bytes, now.idle_bytes, now.free_bytes].map(Size);
        let (requests, calls) = (counted(delta.requests, "request"), counted(delta.pin_calls, "call"));
        let max = now.max_bytes.map_or_else(String::new, |bytes| format!(" of {}", Size(bytes)));
        let (held, buffers, missed) = (Size(now.held_bytes), counted(now.used, "buffer"), delta.misses);
        let evidence = vec![
            format!("this window: {requests}, {missed} missed; {calls} pinned {pinned} and unpinned {unpinned}"),
            format!(
                "at its end: {held} held{max}: {used} in {buffers} ({in_flight} in flight), {idle} idle, {free} free"
            ),
        ];
        let (remedy, setting, is_in_code) = (None, None, false);
        WindowDiagnosis { cause, is_alarm: false, found, evidence, remedy, setting, is_in_code, lost: *lost, size: 0 }
    }

    fn alarm(&self, cause: Cause, found: String, remedy: impl Into<String>) -> WindowDiagnosis {
        WindowDiagnosis { is_alarm: true, remedy: Some(remedy.into()), ..self.diagnosis(cause, found) }
    }

    /// Returns an alarm that a setting with this value ends.
    fn alarm_for(&self, cause: Cause, found: String, remedy: String, (name, size): (&str, u64)) -> WindowDiagnosis {
        let setting = SETTINGS.into_iter().find(|known| *known == name).map(|name| (name, size));
        let is_in_code = self.now.set_in_code.split(' ').any(|set| set == name);
        WindowDiagnosis { setting, is_in_code, size, ..self.alarm(cause, found, remedy) }
    }

    /// Returns the holder of the most bytes.
    fn largest_holder(&self) -> Option<&TagUse> {
        self.now.holders.iter().max_by_key(|holder| holder.bytes)
    }

    fn stuck_copy(&self) -> Option<WindowDiagnosis> {
        let age = self.now.oldest_copy.filter(|_| is_stuck(self.now))?;
        let stream = self.now.oldest_copy_stream.map_or_else(String::new, |stream| format!(" on stream_id={stream}"));
        let copying = self.now.holders.iter().max_by_key(|holder| holder.oldest_age);
        let tag = copying.map_or_else(String::new, |holder| format!(" (tag {} has the oldest buffer)", holder.tag));
        let found = format!("a copy{stream} has been in flight for {}{tag}", Time(age));
        Some(self.alarm(Cause::StuckCopy, found, "find what blocks the stream; no pool setting helps"))
    }

    fn leak(&self, leak: &Leak) -> WindowDiagnosis {
        let Leak { holder, more_buffers, is_aged, over_us } = leak;
        let (tag, buffers, size) = (&holder.tag, counted(holder.buffers, "buffer"), Size(holder.bytes));
        let age = holder.oldest_age.map_or_else(String::new, |age| format!(", the oldest for {}", Time(age)));
        let ago = seconds(over_us.saturating_mul(1000));
        let place = holder.place.as_ref().map(|place| format!(" (most were allocated at {place})")).unwrap_or_default();
        let (was, end) = if *is_aged { ("", " are over 60s old") } else { ("it held ", ", and none was returned") };
        let found =
            format!("tag {tag} holds {buffers} ({size}){age}, {more_buffers} more than {was}{ago} ago{end}{place}");
        let over_ms = (over_us / 1000).max(1);
        let more_bytes = holder.bytes / holder.buffers.max(1) * more_buffers;
        let forecast = match self.now.max_bytes.map(|bytes| bytes.saturating_sub(self.now.used_bytes)) {
            Some(left_bytes) => {
                let left_s = left_bytes.saturating_mul(over_ms) / more_bytes.max(1) / 1000;
                format!("the limit is reached in {}", seconds(left_s.saturating_mul(1_000_000_000)))
            }
            None => "the machine runs out of memory".to_owned(),
        };
        let hint = if place.is_empty() { "; finer tags or call_stacks(100) (Rust, C) show where" } else { "" };
        let remedy = format!("return these buffers or drop their owner; a higher limit only delays the failure{hint}");
        let mut diagnosis = self.alarm(Cause::Leak, found, remedy);
        let per_minute = counted(more_buffers.saturating_mul(60_000) / over_ms, "buffer");
        diagnosis.evidence.insert(0, format!("{per_minute} more per minute; at this rate {forecast}"));
        // The leak is logged again each time that the number of buffers doubles.
        diagnosis.size = holder.buffers.next_power_of_two();
        diagnosis
    }

    /// Diagnoses requests that found no memory immediately.
    fn shortage(&self) -> Option<WindowDiagnosis> {
        let Self { now, delta: Snapshot { delayed_requests, failed_requests, .. }, .. } = self;
        // The number of requests does not include requests that still wait; the number of delayed requests does.
        let requests = self.delta.requests.max(*delayed_requests);
        let is_short = is_high(*delayed_requests, requests)
            && (*delayed_requests >= SHORT_MIN || self.lost.waiting_ns / 1000 >= self.lost.window_us / WAITED_PART);
        if !is_short && (now.waiting == 0 || self.delta.returns > 0) {
            return None;
        }
        let short = match delayed_requests {
            0 => format!("{} waiting, none served", counted(now.waiting, "request")),
            _ if *failed_requests > 0 => format!("{delayed_requests} of {requests} requests waited or failed"),
            _ => format!("{delayed_requests} of {requests} requests waited"),
        };
        let Some(limit) = now.limit.as_deref().filter(|_| !now.is_by_source) else { return Some(self.refused(short)) };
        if let Some(others_bytes) = self.missing_at_others() {
            let (own, others) = (Size(now.held_bytes), Size(others_bytes));
            let found = format!("{short}: this pool holds {own} of the shared limit, other processes {others}");
            let (cause, what) = match self.hoarded().filter(|_| now.held_bytes > others_bytes) {
                Some(holder) => (Cause::LimitTooSmall, format!("return the buffers of {holder} sooner")),
                None => (Cause::OtherProcess, "reduce what they hold (`pinpool top --all` lists it)".to_owned()),
            };
            return Some(self.alarm(cause, found, format!("{what}, or raise {limit} for all processes")));
        }
        // If threads return the buffers that they requested, the waiting threads are also the users of the buffers. They wait
        // only for memory, and not for a consumer.
        if self.delta.own_waits <= delayed_requests / 2 && *failed_requests == 0 && self.delta.returns > 0 {
            let of_consumer = self.pause(&short, limit).or_else(|| self.slow_consumer(&short));
            return Some(of_consumer.unwrap_or_else(|| self.full(&short, limit)));
        }
        // The needed bytes do not include gaps and overhead: a limit that refused is too small even if it exceeds them.
        let refused_bytes = now.max_bytes.filter(|&max_bytes| now.needed_bytes <= max_bytes);
        let needed_bytes = refused_bytes.map_or(now.needed_bytes, |bytes| bytes + bytes / OVERHANG_PART);
        Some(self.too_small(short, limit, needed_bytes, ""))
    }

    fn too_small(&self, short: String, limit: &str, needed_bytes: u64, purpose: &str) -> WindowDiagnosis {
        let remedy = format!("raise {limit} to {}{purpose}", RoundedUp(needed_bytes));
        self.alarm_for(Cause::LimitTooSmall, short, remedy, (limit, needed_bytes))
    }

    /// Detects a consumer that keeps up but pauses now and then: a few requests wait long, while most find memory immediately.
    /// A limit with room for the buffers that producers would fill during the pause bridges the pause.
    fn pause(&self, short: &str, limit: &str) -> Option<WindowDiagnosis> {
        let Self { now, delta, lost, .. } = self;
        let waits = delta.delayed_requests.max(now.waiting);
        let wait_ns = lost.waiting_ns.checked_div(waits)?;
        if wait_ns < PAUSE_NS || waits > delta.requests / PAUSED_PART {
            return None;
        }
        let running_us = lost.window_us.saturating_sub(wait_ns / 1000).max(lost.window_us / PAUSED_PART).max(1);
        let missed_requests = u128::from(delta.requests) * u128::from(wait_ns / 1000) / u128::from(running_us);
        let more_bytes = u64::try_from(missed_requests * u128::from(mean_bytes(now))).unwrap_or(u64::MAX);
        let needed_bytes = now.max_bytes?.saturating_add(more_bytes).max(now.needed_bytes);
        let found = format!("{short}, {} each, because the consumer pauses", seconds(wait_ns));
        Some(self.too_small(found, limit, needed_bytes, " to bridge such a pause"))
    }

    /// Reports a full pool. This is normal if the consumer is always busy, which is possible without signs of another cause.
    fn full(&self, short: &str, limit: &str) -> WindowDiagnosis {
        let found = format!("{short}, and {} buffers are returned per second", self.returns_per_second());
        let remedy = format!(
            "if the consumer is always busy, do nothing; if it waits for buffers, raise {limit} (`pinpool advise`)"
        );
        let lost = Lost { waiting_ns: 0, ..self.lost };
        WindowDiagnosis { remedy: Some(remedy), lost, ..self.diagnosis(Cause::PoolFull, found) }
    }

    fn returns_per_second(&self) -> String {
        format!("{:.1}", self.delta.returns as f64 * 1e6 / self.lost.window_us.max(1) as f64)
    }

    /// Returns the bytes that other processes hold, if the pool's own limit has room. The snapshot before counts as well,
    /// because these processes may have ended since.
    fn missing_at_others(&self) -> Option<u64> {
        let Snapshot { needed_bytes, max_bytes, others_bytes, .. } = self.now;
        let is_theirs = *needed_bytes > 0 && max_bytes.is_none_or(|own| *needed_bytes <= own);
        (*others_bytes).max(self.before.others_bytes).filter(|&bytes| bytes > 0 && is_theirs)
    }

    /// Returns the largest holder, if it holds most of the pool and has kept buffers for the whole window.
    fn hoarded(&self) -> Option<String> {
        let largest = self.largest_holder()?;
        let window = Duration::from_micros(self.lost.window_us);
        let is_kept = largest.oldest_age.map_or(self.delta.returns < self.now.used, |age| age >= window);
        let is_most = largest.bytes > self.now.held_bytes / 2;
        (is_kept && is_most).then(|| format!("tag {} ({})", largest.tag, Size(largest.bytes)))
    }

    fn refused(&self, short: String) -> WindowDiagnosis {
        if self.now.is_mostly_unused() {
            let (unused, held) = (Size(self.now.unused_bytes()), Size(self.now.held_bytes));
            let remedy = "lower PINPOOL_MAX_BYTES, so that requests release idle memory, or set PINPOOL_PRESET=adaptive without PINPOOL_ROUNDING";
            let found = format!("{short} although {unused} of {held} held are idle or free");
            return self.alarm(Cause::IdleHoard, found, remedy);
        }
        self.alarm(Cause::MemoryRefused, format!("{short}: the backend refused memory"), SYSTEM_REMEDY)
    }

    /// Detects buffers that wait in a queue: waiting requests need little compared with the limit, so more memory would only
    /// lengthen the queue.
    fn slow_consumer(&self, short: &str) -> Option<WindowDiagnosis> {
        let Self { now, delta, lost, .. } = self;
        let max_bytes = now.max_bytes.filter(|&bytes| bytes > 0)?;
        let overhang_bytes = now.needed_bytes.saturating_sub(max_bytes);
        // At the end of the window, the queue may be empty again.
        let is_full = now.used_bytes.max(now.needed_bytes) >= max_bytes - max_bytes / 8;
        let is_copying = now.in_flight_bytes > now.used_bytes / 8;
        // The mean time until a buffer is returned, by Little's law.
        let out_ns = now.used.saturating_mul(lost.window_us).saturating_mul(1000).checked_div(delta.returns)?;
        if !is_full || is_copying || overhang_bytes > max_bytes / OVERHANG_PART || out_ns < QUEUED_NS {
            return None;
        }
        let of = self.largest_holder().map_or_else(String::new, |holder| format!(" (mostly tag {})", holder.tag));
        let (rate, out) = (self.returns_per_second(), seconds(out_ns));
        let found = format!("{short}, and {rate} buffers are returned per second, each after {out}{of}");
        let remedy = "make the consumer faster, or queue fewer buffers; more memory lengthens the queue without raising throughput";
        let mut diagnosis = self.alarm(Cause::SlowConsumer, found, remedy);
        let more = percent(overhang_bytes, max_bytes);
        diagnosis.evidence.insert(0, format!("serving all waiting requests would use {more} more memory"));
        Some(diagnosis)
    }

    /// Detects memory that is repeatedly pinned and unpinned, or evicted and missed.
    fn thrashing(&self, churned: u32, again: Option<(String, u64)>) -> Option<WindowDiagnosis> {
        let Self { before, now, delta: Snapshot { misses, requests, new_lengths, evicted, returns, .. }, lost, .. } =
            self;
        let missed = format!("{misses} of {requests} requests missed");
        let varied = *new_lengths > requests / 2;
        if let Some(size_limit) = now.pool_size_limit
            && is_high(*misses, *requests)
            && is_high(*evicted, *returns)
        {
            // More idle buffers do not help if their sizes do not recur.
            if varied && *misses > requests / 10 * 8 {
                let found = format!("{missed}, each with a pin call, because no idle buffer had their size");
                let remedy = "set PINPOOL_PRESET=adaptive without PINPOOL_ROUNDING, or batch to fewer sizes";
                return Some(self.alarm(Cause::SizesNeverRecur, found, remedy));
            }
            let needed = now.recurring.max(size_limit + 1).min(size_limit + misses.min(evicted));
            let remedy = format!("raise PINPOOL_POOL_SIZE_LIMIT to {needed}");
            let setting = ("PINPOOL_POOL_SIZE_LIMIT", needed);
            return Some(self.alarm_for(Cause::Thrashing, format!("{missed} evicted buffers"), remedy, setting));
        }
        let limit = now.limit.as_ref().map_or_else(String::new, |limit| format!("raise {limit}, or "));
        let (fewer_sizes, has_arena) = (format!("{limit}batch to fewer sizes"), now.pool_size_limit.is_none());
        let by_limits = format!("{fewer_sizes}; if PINPOOL_MAX_IDLE_BYTES is set, raise it");
        if churned >= CHURNED {
            let found =
                format!("{} pinned and unpinned to hold {}", Size(self.delta.pinned_bytes), Size(self.cycled_bytes()));
            // Without an arena, no memory is released because of its age.
            let remedy = if has_arena { "raise PINPOOL_IDLE_TIMEOUT or PINPOOL_MAX_IDLE_BYTES" } else { &by_limits };
            return Some(self.alarm(Cause::Thrashing, found, remedy));
        }
        if let Some((found, bytes)) = again.filter(|_| has_arena) {
            // A longer idle timeout would not remove the first of these pin calls.
            let kept_bytes = now.most_held_bytes.max(bytes);
            let remedy = format!("set PINPOOL_RESERVE to {}, so that this memory stays pinned", RoundedUp(kept_bytes));
            return Some(self.alarm_for(Cause::Thrashing, found, remedy, ("PINPOOL_RESERVE", kept_bytes)));
        }
        if *misses <= requests / 2 || self.is_warming_up() {
            return None;
        }
        // Pin calls far below the limit are growth, or they pin memory that was idle and unpinned (see `churn.rs`).
        let is_near_limit = now.max_bytes.is_some_and(|bytes| self.cycled_bytes() >= bytes - bytes / 8);
        let calls_ns = lost.moving_ns.saturating_add(if is_near_limit { lost.pinning_ns } else { 0 });
        let has_grown = now.held_bytes > before.held_bytes + before.held_bytes / GROWTH_PART;
        let costly = !has_grown && calls_ns / 10 > lost.window_us.saturating_mul(COSTLY_PERCENT);
        if varied {
            let found = format!("{missed}: no idle buffer had their size, so they were carved from held memory");
            let remedy = costly.then(|| "batch to fewer sizes".to_owned());
            return Some(WindowDiagnosis { is_alarm: costly, remedy, ..self.diagnosis(Cause::SizesNeverRecur, found) });
        }
        costly.then(|| {
            let found = format!("{missed} with recurring sizes: buffers of other sizes took their memory");
            self.alarm(Cause::Thrashing, found, fewer_sizes)
        })
    }

    fn is_warming_up(&self) -> bool {
        let Snapshot { requests, misses, new_lengths, .. } = self.delta;
        let growing = self.now.held_bytes > self.most_held_bytes.saturating_add(self.most_held_bytes / GROWTH_PART);
        let is_first = self.most_held_bytes == 0 || new_lengths <= misses / 2;
        growing && is_first && !self.are_buffers_larger() && misses > requests / WARM_PART
    }

    /// Returns whether the pool holds more only because its buffers have become larger.
    fn are_buffers_larger(&self) -> bool {
        let [(before, held_before), (now, held)] =
            [self.before, self.now].map(|end| (mean_bytes(end) as f64, end.held_bytes as f64));
        before > 0.0 && now > before && held / held_before <= now / before * (1.0 + 1.0 / GROWTH_PART as f64)
    }

    /// Returns the diagnosis if no problem is known, or if copies use pageable memory.
    pub(super) fn quiet(&self) -> WindowDiagnosis {
        let now = self.now;
        if self.is_warming_up() {
            let [before, now] = [self.before, now].map(|snapshot| Size(snapshot.held_bytes));
            return self.diagnosis(Cause::WarmingUp, format!("held {before}->{now}"));
        }
        if !now.is_pinned && now.copies > 0 {
            let found = "copies use pageable memory, which the driver copies twice".to_owned();
            let remedy = "run `pinpool doctor` for the reason and the fix";
            // Without a GPU, pinned memory has no advantage.
            return WindowDiagnosis { is_alarm: now.has_driver, ..self.alarm(Cause::NotPinned, found, remedy) };
        }
        let Snapshot { requests, pin_calls, .. } = self.delta;
        let (most, bytes) = if now.held_bytes > 0 { ("", now.held_bytes) } else { ("at most ", now.most_held_bytes) };
        let (served, held) = (requests.saturating_sub(pin_calls), Size(bytes));
        let found = match requests {
            0 => format!("no requests, {} held", Size(now.held_bytes)),
            _ => format!("{served} of {requests} requests were served immediately, {most}{held} held"),
        };
        self.diagnosis(Cause::Healthy, found)
    }
}
