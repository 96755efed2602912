//! Derives the likely cause of a request that finds no memory, and the remedy, from numbers.

use std::fmt;

use super::snapshot::Snapshot;
use super::window::is_stuck;
use super::window_diagnosis::{Cause, LikelyCause, WindowDiagnosis};
use super::words::{RoundedUp, SYSTEM_REMEDY, Size, Time};
use pinpool_os::host::{HostMemory, LimitOrigin};

/// Driver errors (`CUresult`) caused by earlier work. Once a process has such an error, later calls return it too.
const STICKY_CUDA_ERRORS: [i64; 13] = [226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];
/// The limit or source that refused a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedBy {
    /// The limit of the pool or a partition. `could_fit` is whether the request fits if everything else is returned.
    Limit { could_fit: bool },
    /// Earlier requests are waiting, and the first of them needs `first_bytes`.
    Queue { first_bytes: u64 },
    /// A limit shared with other pools. `by_others` is whether other processes hold most of its memory.
    Shared { by_others: bool },
    /// The driver or the kernel, with its error number.
    Source { code: Option<i64> },
}

/// A refused request, as the error, the log lines, the dump and the diagnosis print it.
#[derive(Debug, Clone)]
pub struct ExplainedRefusal {
    pub by: RefusedBy,
    /// Requested bytes after rounding. For a request that can never fit, the bytes that the limit would have to allow for it.
    pub needed_bytes: u64,
    pub found: String,
    /// Empty if no remedy is known.
    pub remedy: String,
}

impl ExplainedRefusal {
    /// Formats the size of a request, and adds the rounded size if the two texts differ.
    pub fn rounded(&self, asked_bytes: u64) -> String {
        let [asked, needed] = [asked_bytes, self.needed_bytes].map(|bytes| Size(bytes).to_string());
        if asked == needed { asked } else { format!("{asked} (rounded to {needed})") }
    }

    /// Returns the cause that the diagnosis reports for this refusal.
    pub fn cause(&self) -> Cause {
        match self.by {
            RefusedBy::Source { .. } => Cause::MemoryRefused,
            RefusedBy::Shared { by_others: true } => Cause::OtherProcess,
            RefusedBy::Shared { .. } | RefusedBy::Limit { .. } | RefusedBy::Queue { .. } => Cause::LimitTooSmall,
        }
    }
}

impl fmt::Display for ExplainedRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, remedy, .. } = self;
        if remedy.is_empty() { f.write_str(found) } else { write!(f, "{found}: {remedy}") }
    }
}

/// The state of a pool's memory, and the refused request, if any.
#[derive(Debug, Clone)]
pub struct Shortage<'a> {
    /// Memory that the pool holds. The counters are not set.
    pub now: Snapshot,
    /// Length of the longest contiguous piece of free memory, which belongs to no buffer.
    pub longest_free_bytes: u64,
    pub host: Option<&'a HostMemory>,
    /// `None` if nothing was requested.
    pub refused: Option<&'a ExplainedRefusal>,
    /// Whether the request was for a reserve.
    pub is_reserve: bool,
    /// Name of the limit to raise for more memory.
    pub limit: &'static str,
    /// The pool's last diagnosis.
    pub diagnosis: Option<&'a WindowDiagnosis>,
}

/// Returns the first case that matches. Without a request, returns the cause that a request beyond the limit would meet, or
/// `None` if the pool is not near its limit.
pub fn likely_cause(shortage: &Shortage<'_>) -> Option<LikelyCause> {
    match shortage.refused {
        Some(refused) => Some(of_refusal(shortage, refused)),
        None => is_short(shortage).then(|| of_usage(shortage, 0)),
    }
}

/// Returns whether little memory is left: pageable buffers exist, the system is full, a copy is stuck, or at least 9/10 of the
/// limit are in use.
fn is_short(shortage: &Shortage<'_>) -> bool {
    let now = &shortage.now;
    now.pageable_bytes > 0
        || shortage.host.is_some_and(|host| host.available_bytes == 0)
        || is_stuck(now)
        || now.max_bytes.is_some_and(|max_bytes| now.used_bytes >= max_bytes - max_bytes / 10)
}

impl LikelyCause {
    fn new(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { found: found.into(), remedy: remedy.into() }
    }
}

impl Shortage<'_> {
    /// Returns a limit that suffices for `more_bytes`. It exceeds the present limit, because only a higher limit helps.
    fn raised_for(&self, more_bytes: u64) -> RoundedUp {
        // The value of PINPOOL_RESERVE is unknown here.
        let max_bytes = self.now.max_bytes.filter(|_| self.limit != "PINPOOL_RESERVE").unwrap_or(0);
        let enough_bytes = self.now.used_bytes.saturating_add(more_bytes);
        RoundedUp(if enough_bytes > max_bytes { enough_bytes } else { max_bytes.saturating_add(more_bytes) })
    }
}

/// Returns the cause that follows from what refused the request.
fn of_refusal(shortage: &Shortage<'_>, refused: &ExplainedRefusal) -> LikelyCause {
    let Shortage { ref now, longest_free_bytes, limit, host, .. } = *shortage;
    let ExplainedRefusal { by, needed_bytes, ref found, ref remedy } = *refused;
    let (held, unused) = (Size(now.held_bytes), Size(now.unused_bytes()));
    let less = if shortage.is_reserve { "lower PINPOOL_RESERVE" } else { "request a smaller buffer" };
    match by {
        RefusedBy::Source { code: Some(code) } if STICKY_CUDA_ERRORS.contains(&code) => LikelyCause::new(
            format!("the context has failed: the driver returns an error from earlier work (code {code})"),
            "find the first CUDA error of the process; no pool setting helps",
        ),
        RefusedBy::Limit { could_fit: false } => LikelyCause::new(
            format!("the request alone exceeds {limit}"),
            format!("request a smaller buffer, or raise {limit} to {}", shortage.raised_for(needed_bytes)),
        ),
        RefusedBy::Limit { .. } if now.free_bytes >= needed_bytes && longest_free_bytes < needed_bytes => {
            LikelyCause::new(
                format!("{} free, but the largest free piece is {}", Size(now.free_bytes), Size(longest_free_bytes)),
                format!("raise {limit} to {}, or use fewer sizes", shortage.raised_for(needed_bytes)),
            )
        }
        RefusedBy::Limit { .. } => of_usage(shortage, needed_bytes),
        RefusedBy::Queue { first_bytes } => {
            let (first, enough) = (Size(first_bytes), shortage.raised_for(first_bytes.saturating_add(needed_bytes)));
            LikelyCause::new(
                format!("an earlier request for {first} has priority, and free memory is reserved for it"),
                format!("wait longer (PINPOOL_WAIT), request a smaller buffer, or raise {limit} to {enough}"),
            )
        }
        RefusedBy::Source { .. } if now.is_mostly_unused() && now.unused_bytes() >= needed_bytes => LikelyCause::new(
            format!("{unused} of {held} held are idle or free, but in other sizes or pieces"),
            format!(
                "set PINPOOL_MAX_BYTES below {held}, so that requests release idle memory; or batch to fewer sizes"
            ),
        ),
        RefusedBy::Shared { .. } => LikelyCause::new(found, remedy),
        RefusedBy::Source { .. } if !remedy.is_empty() => {
            LikelyCause::new("the driver or kernel refused, see above", format!("{remedy}; or {less}"))
        }
        RefusedBy::Source { .. } => {
            if let Some(host) = host.filter(|host| host.available_bytes <= needed_bytes) {
                return of_full_memory(host, needed_bytes);
            }
            let although = host.map(|host| format!(" although the machine has {} free", Size(host.available_bytes)));
            let found = format!("the backend refused{}", although.unwrap_or_default());
            LikelyCause::new(found, format!("{less}; or {SYSTEM_REMEDY}"))
        }
    }
}

/// Returns the cause that follows from the state of the memory.
fn of_usage(shortage: &Shortage<'_>, needed_bytes: u64) -> LikelyCause {
    let Shortage { now, limit, .. } = shortage;
    let in_use_bytes = now.used_bytes.saturating_sub(now.in_flight_bytes);
    let full = shortage.host.filter(|host| host.available_bytes <= needed_bytes);
    if let Some(host) = full.filter(|host| matches!(host.origin, LimitOrigin::Cgroup(_))) {
        return of_full_memory(host, needed_bytes);
    }
    if now.in_flight_bytes > 0 && now.in_flight_bytes >= now.held_bytes / 2 {
        let oldest = now.oldest_copy.zip(now.oldest_copy_stream);
        let oldest = oldest.map(|(age, stream)| format!(", the oldest for {} on stream_id={stream}", Time(age)));
        let found = "copies do not complete, or complete slowly: most memory is in flight";
        let remedy = match is_stuck(now) {
            true => "find what blocks the stream; no pool setting helps".to_owned(),
            false => format!("find what slows the stream, or raise {limit}"),
        };
        return LikelyCause::new(format!("{found}{}", oldest.unwrap_or_default()), remedy);
    }
    if now.unused_bytes() > in_use_bytes {
        return LikelyCause::new(
            "most memory is idle or free, but in other sizes or pieces",
            "call trim(), lower PINPOOL_IDLE_TIMEOUT or PINPOOL_MAX_IDLE_BYTES; or batch to fewer sizes",
        );
    }
    // A diagnosis over minutes is better than the state of one moment.
    if let Some(WindowDiagnosis { cause, found, remedy: Some(remedy), setting, .. }) = shortage.diagnosis {
        // The limit may have been raised since then.
        let is_due = setting.is_none_or(|(_, bytes)| Some(bytes) > now.max_bytes);
        let of_limit = matches!(cause, Cause::LimitTooSmall | Cause::OtherProcess) && shortage.refused.is_none();
        if of_limit && is_due || matches!(cause, Cause::Leak | Cause::SlowConsumer) {
            return LikelyCause::new(found, remedy);
        }
    }
    let oldest = now.holders.iter().filter_map(|holder| Some((holder.oldest_age?, &holder.tag))).max();
    let oldest = oldest.map_or_else(
        || "; request buffers through tagged() to see who holds them and for how long".to_owned(),
        |(age, tag)| format!("; the oldest is {} old (tag {tag})", Time(age)),
    );
    // Without a request, the needed bytes are unknown.
    let to = if needed_bytes > 0 { format!(" to {}", shortage.raised_for(needed_bytes)) } else { String::new() };
    LikelyCause::new(
        format!("too much memory is in use: buffers are returned late or never{oldest}"),
        format!("return buffers sooner, lower the prefetch, or raise {limit}{to}"),
    )
}

fn of_full_memory(host: &HostMemory, needed_bytes: u64) -> LikelyCause {
    let HostMemory { total_bytes, available_bytes, origin } = host;
    let (total, available) = (Size(*total_bytes), Size(*available_bytes));
    match origin {
        _ if needed_bytes > *total_bytes => {
            LikelyCause::new(format!("the request exceeds all memory, {total} ({origin})"), "request a smaller buffer")
        }
        LimitOrigin::Cgroup(_) => LikelyCause::new(
            format!("the cgroup is full ({available} left of its {origin}); beyond it the kernel kills a process"),
            "raise memory.max (docker --memory), or lower PINPOOL_MAX_BYTES; pinned pages count as RssShmem",
        ),
        LimitOrigin::Machine => LikelyCause::new(
            format!("the machine has only {available} of memory left"),
            "lower PINPOOL_MAX_BYTES, or stop other programs",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::{Monitor, TagUse};
    use std::time::Duration;

    const GIB: u64 = 1 << 30;

    fn free_host() -> HostMemory {
        HostMemory { total_bytes: 64 * GIB, available_bytes: 32 * GIB, origin: LimitOrigin::Machine }
    }

    fn refused(by: RefusedBy, found: &str, remedy: &str) -> ExplainedRefusal {
        ExplainedRefusal { by, needed_bytes: GIB, found: found.to_owned(), remedy: remedy.to_owned() }
    }

    fn by_limit(could_fit: bool) -> ExplainedRefusal {
        refused(RefusedBy::Limit { could_fit }, "the pool limit is reached", "")
    }

    /// Returns a pool that holds 4 GiB, which is its limit.
    fn held(used_bytes: u64, idle_bytes: u64) -> Snapshot {
        Snapshot { held_bytes: 4 * GIB, used_bytes, idle_bytes, max_bytes: Some(4 * GIB), ..Snapshot::default() }
    }

    fn full<'a>(host: &'a HostMemory, refused: &'a ExplainedRefusal) -> Shortage<'a> {
        Shortage {
            now: held(4 * GIB, 0),
            longest_free_bytes: 0,
            host: Some(host),
            refused: Some(refused),
            is_reserve: false,
            limit: "PINPOOL_MAX_BYTES",
            diagnosis: None,
        }
    }

    #[track_caller]
    fn says(shortage: &Shortage<'_>, found: &str, remedy: &str) {
        let cause = likely_cause(shortage).unwrap();
        assert!(cause.found.contains(found) && cause.remedy.contains(remedy), "{cause:?}");
    }

    #[test]
    fn each_case_is_recognized_by_its_numbers() {
        let (host, ceiling) = (free_host(), by_limit(true));
        let of_source = |code| refused(RefusedBy::Source { code: Some(code) }, "cuMemCreate failed", "");
        let in_use = full(&host, &ceiling);
        says(
            &in_use,
            "in use: buffers are returned late or never; request buffers through tagged()",
            "PINPOOL_MAX_BYTES to 5.0GiB",
        );
        let holder = TagUse {
            tag: "a".to_owned(),
            buffers: 4,
            bytes: 4 * GIB,
            oldest_age: Some(Duration::from_secs(90)),
            aged: 0,
            place: None,
        };
        let tagged = Shortage { now: Snapshot { holders: vec![holder], ..held(4 * GIB, 0) }, ..in_use.clone() };
        says(&tagged, "the oldest is 90.0s old (tag a)", "PINPOOL_MAX_BYTES");

        let idle = Shortage { now: held(GIB, 3 * GIB), ..in_use.clone() };
        says(&idle, "most memory is idle or free", "PINPOOL_IDLE_TIMEOUT");
        let no_memory = of_source(2);
        let of_idle = Shortage { refused: Some(&no_memory), ..idle };
        says(&of_idle, "3.0GiB of 4.0GiB held are idle or free", "set PINPOOL_MAX_BYTES below");
        let copies = Shortage {
            now: Snapshot {
                in_flight_bytes: 3 * GIB,
                oldest_copy: Some(Duration::from_secs(45)),
                oldest_copy_stream: Some(16),
                ..held(4 * GIB, 0)
            },
            ..in_use.clone()
        };
        says(&copies, "in flight, the oldest for 45.0s on stream_id=16", "no pool setting helps");
        let by_source = Shortage { refused: Some(&no_memory), ..in_use.clone() };
        says(&by_source, "the backend refused although the machine has 32.0GiB free", "`pinpool doctor`");
        let of_host = |origin| HostMemory { total_bytes: 8 * GIB, available_bytes: 1 << 20, origin };
        let (group, machine) = (of_host(LimitOrigin::Cgroup("x".into())), of_host(LimitOrigin::Machine));
        says(&Shortage { host: Some(&group), ..in_use.clone() }, "the cgroup is full", "memory.max");
        let of_machine = Shortage { host: Some(&machine), ..by_source };
        says(
            &of_machine,
            "the machine has only 1.0MiB of memory left",
            "lower PINPOOL_MAX_BYTES, or stop other programs",
        );
        assert_eq!(of_full_memory(&machine, 9 * GIB).remedy, "request a smaller buffer");
        let says_why = refused(RefusedBy::Source { code: Some(12) }, "mmap failed", "raise vm.max_map_count");
        says(&full(&host, &says_why), "the driver or kernel refused, see above", "raise vm.max_map_count");
        says(&full(&host, &of_source(700)), "an error from earlier work (code 700)", "first CUDA error");
        let reset = refused(RefusedBy::Source { code: Some(709) }, "cuCtxGetId failed", "build a new pool");
        says(&full(&host, &reset), "the driver or kernel refused, see above", "build a new pool");
        let in_pieces = Shortage {
            now: Snapshot { free_bytes: 2 * GIB, ..held(2 * GIB, 0) },
            longest_free_bytes: 1 << 20,
            ..full(&host, &ceiling)
        };
        says(
            &in_pieces,
            "2.0GiB free, but the largest free piece is 1.0MiB",
            "PINPOOL_MAX_BYTES to 5.0GiB, or use fewer sizes",
        );
        let reserve = Shortage { is_reserve: true, ..full(&host, &no_memory) };
        says(&reserve, "the backend refused", "lower PINPOOL_RESERVE");
        assert!(!likely_cause(&reserve).unwrap().remedy.contains("RLIMIT_MEMLOCK"));
        let (too_large, full_host) = (by_limit(false), HostMemory { available_bytes: 0, ..free_host() });
        says(&full(&full_host, &ceiling), "too much memory is in use", "PINPOOL_MAX_BYTES");
        says(&full(&host, &too_large), "the request alone exceeds PINPOOL_MAX_BYTES", "request a smaller buffer");
    }

    #[test]
    fn a_diagnosis_over_minutes_takes_precedence_over_one_moment() {
        let (host, ceiling) = (free_host(), by_limit(true));
        let mut monitor = Monitor::default();
        for n in 1..=5 {
            let oldest_age = Some(Duration::from_secs(10 * n));
            let holder =
                TagUse { tag: "labels".to_owned(), buffers: 10 * n, bytes: n * GIB, oldest_age, aged: 0, place: None };
            let now = Snapshot { requests: 1000 * n, holders: vec![holder], ..Default::default() };
            monitor.add(10_000_000 * n, now);
        }
        let diagnosis = monitor.latest();
        says(&Shortage { diagnosis, ..full(&host, &ceiling) }, "tag labels holds 50 buffers", "return these buffers");
        // A diagnosis of earlier requests that waited explains a full pool, but not why this request was refused.
        let (requests, delayed_requests, limit) = (100, 100, Some("PINPOOL_MAX_BYTES".into()));
        let short = Snapshot { requests, delayed_requests, limit, needed_bytes: 6 * GIB, ..Default::default() };
        let mut monitor = Monitor::default();
        let diagnosis = monitor.add(10_000_000, short);
        let refused = Shortage { diagnosis, ..full(&host, &ceiling) };
        says(&refused, "too much memory is in use", "PINPOOL_MAX_BYTES to 5.0GiB");
        let more = Snapshot { max_bytes: Some(8 * GIB), ..held(8 * GIB, 0) };
        let raised = Shortage { refused: None, now: more, ..refused.clone() };
        says(&raised, "too much memory is in use", "or raise PINPOOL_MAX_BYTES");
        says(&Shortage { refused: None, ..refused }, "100 of 100 requests waited", "PINPOOL_MAX_BYTES to 6.0GiB");
    }

    #[test]
    fn a_dump_of_a_healthy_pool_has_no_cause() {
        let (host, ceiling) = (free_host(), by_limit(true));
        let at = |now| Shortage { refused: None, now, ..full(&host, &ceiling) };
        assert_eq!(likely_cause(&at(held(GIB, 3 * GIB))), None);
        assert_eq!(likely_cause(&at(Snapshot { in_flight_bytes: 3 * GIB, ..held(3 * GIB, GIB) })), None);
        says(&at(held(4 * GIB, 0)), "too much memory is in use", "or raise PINPOOL_MAX_BYTES");
        assert!(!likely_cause(&at(held(4 * GIB, 0))).unwrap().remedy.contains(" to "), "that limit is set already");
        assert!(likely_cause(&at(Snapshot { pageable_bytes: 1, ..held(GIB, 0) })).is_some());
        let copy = |seconds| at(Snapshot { oldest_copy: Some(Duration::from_secs(seconds)), ..held(GIB, 0) });
        assert!(likely_cause(&copy(29)).is_none() && likely_cause(&copy(30)).is_some());
    }
}
