//! A pool's memory and its holders as text: the report of a failed request and of [`Pool::dump`](crate::Pool::dump).
//!
//! ```text
//!   out_of_memory: the request, and why it failed
//!   usage on host, backend mlock (adaptive):
//!     12.0MiB TAG (...)                       the largest holders
//!     3.0MiB in N more buffers
//!   held, limit, driver, system
//!   likely cause, and what to do              pinpool_observe::diagnosis::shortage
//! ```
//!
//! This module turns numbers into text. It reads no pool and takes no lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::stats::{MemoryStats, Stats};

pub(crate) use pinpool_observe::diagnosis::shortage::{ExplainedRefusal, RefusedBy};
use pinpool_observe::diagnosis::shortage::{Shortage, likely_cause};
use pinpool_observe::diagnosis::{AGED, LikelyCause, Snapshot, TagUse, WindowDiagnosis};
use pinpool_os::call_stack::CallStack;
use pinpool_os::format::{Size, Time};
use pinpool_os::host::HostMemory;

/// Maximum number of holders that are listed one by one.
const LISTED: usize = 10;

/// The buffers of one tag ([`Pool::tagged`](crate::Pool::tagged)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The tag; `(untagged)` for untagged buffers.
    pub tag: String,
    /// Buffers in use or in flight.
    pub buffers: u64,
    /// Bytes of these buffers, rounded up to size classes.
    pub bytes: u64,
    /// Requested bytes of these buffers; 0 if untagged.
    pub requested_bytes: u64,
    /// Time since the oldest of these buffers was requested, to about a second; `None` if untagged.
    pub oldest_age: Option<Duration>,
    /// Buffers that are older than a minute.
    pub(crate) aged: u64,
}

/// A buffer with a tag, or with a request that was sampled for its call stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldBuffer {
    pub(crate) tag: String,
    pub(crate) bytes: u64,
    pub(crate) age: Duration,
    pub(crate) stack: Option<Arc<CallStack>>,
}

impl Holder {
    pub(crate) fn new(tag: &str) -> Self {
        Self { tag: tag.to_owned(), buffers: 0, bytes: 0, requested_bytes: 0, oldest_age: None, aged: 0 }
    }

    /// Returns the holder of the buffers without a tag, if there are any.
    pub(crate) fn untagged(name: &str, buffers: u64, bytes: u64) -> Option<Self> {
        (buffers > 0 || bytes > 0).then(|| Self { buffers, bytes, ..Self::new(name) })
    }

    pub(crate) fn tag_use(&self) -> TagUse {
        let Self { tag, buffers, bytes, oldest_age, aged, .. } = self.clone();
        TagUse { tag, buffers, bytes, oldest_age, aged, place: None }
    }

    pub(crate) fn add(&mut self, requested_bytes: u64, held_bytes: u64, age_us: u64) {
        self.buffers += 1;
        self.bytes += held_bytes;
        self.requested_bytes += requested_bytes;
        let age = Duration::from_micros(age_us);
        self.oldest_age = self.oldest_age.max(Some(age));
        self.aged += u64::from(age >= AGED);
    }
}

/// Returns the held bytes that are in no buffer.
fn in_no_buffer(memory: &MemoryStats) -> u64 {
    memory.free_bytes + memory.transit_bytes + memory.overhead_bytes
}

/// Returns a snapshot for the diagnosis that has only the memory of the pool, without counters and holders.
pub(crate) fn held_now(Stats { memory, copies, limits, .. }: &Stats) -> Snapshot {
    Snapshot {
        held_bytes: memory.held_bytes,
        most_held_bytes: memory.peak_held_bytes,
        used_bytes: memory.in_use_bytes + copies.in_flight_bytes,
        used: memory.in_use + copies.in_flight,
        in_flight_bytes: copies.in_flight_bytes,
        idle_bytes: memory.idle_bytes,
        free_bytes: in_no_buffer(memory),
        pageable_bytes: memory.pageable_bytes,
        max_bytes: limits.max_bytes,
        oldest_copy: copies.oldest_age,
        oldest_copy_stream: copies.oldest_stream_id,
        ..Snapshot::default()
    }
}

/// Returns the bytes of a pool by state: four states that are always shown, and other states if their bytes are not 0.
pub(super) fn by_state(Stats { memory, copies, .. }: &Stats) -> impl Iterator<Item = (&'static str, u64)> {
    let always = [
        ("held", memory.held_bytes),
        ("in use", memory.in_use_bytes),
        ("idle", memory.idle_bytes),
        ("in flight", copies.in_flight_bytes),
    ];
    let others = [
        ("free", in_no_buffer(memory)),
        ("quarantined", memory.quarantined_bytes),
        ("user memory", memory.user_memory_bytes),
        ("pageable", memory.pageable_bytes),
    ];
    always.into_iter().chain(others.into_iter().filter(|(_, bytes)| *bytes > 0))
}

/// Formats a limit in bytes; `none` if there is no limit.
pub(super) fn limit_text(max_bytes: Option<u64>) -> String {
    max_bytes.map_or_else(|| "none".to_owned(), |bytes| Size(bytes).to_string())
}

/// Returns the bytes of a pool by state, for the text of an error.
pub(crate) fn usage_text(stats: &Stats) -> String {
    by_state(stats).map(|(state, bytes)| format!("{state} {}", Size(bytes))).collect::<Vec<_>>().join(", ")
}

/// A request that found no memory.
#[derive(Debug, Clone)]
pub(crate) struct FailedRequest {
    pub(crate) requested_bytes: u64,
    pub(crate) tag: Option<String>,
    pub(crate) is_reserve: bool,
    pub(crate) refused: ExplainedRefusal,
}

/// A snapshot of a pool's memory and its holders, from [`Pool::dump`](crate::Pool::dump).
///
/// Displays as several lines: the failed request, if there is one, the largest holders, the bytes by state with their limits, and
/// what the system has left. If a request failed, or the next ones may fail, the likely cause and a remedy follow.
#[derive(Debug, Clone)]
pub struct Dump {
    pub(crate) device: String,
    pub(crate) stats: Stats,
    /// The holders that hold buffers, the largest first.
    pub(crate) holders: Vec<Holder>,
    pub(crate) longest_free_bytes: u64,
    pub(crate) host: Option<HostMemory>,
    pub(crate) request: Option<FailedRequest>,
    /// The variable of the limit to raise if the pool needs more memory.
    pub(crate) limit: &'static str,
    /// The pool's last diagnosis.
    pub(crate) diagnosis: Option<WindowDiagnosis>,
}

impl Dump {
    /// Returns the holders that hold buffers, the largest first.
    pub fn holders(&self) -> &[Holder] {
        &self.holders
    }

    /// Returns all lines but the first, which the text of an error replaces.
    pub(crate) fn body(&self) -> String {
        self.to_string().split_once('\n').map(|(_, body)| body.to_owned()).unwrap_or_default()
    }

    /// Returns why the request failed, or why the next requests may fail.
    pub(crate) fn likely_cause(&self) -> Option<LikelyCause> {
        let holders = self.holders.iter().map(Holder::tag_use).collect();
        likely_cause(&Shortage {
            now: Snapshot { holders, ..held_now(&self.stats) },
            longest_free_bytes: self.longest_free_bytes,
            host: self.host.as_ref(),
            refused: self.request.as_ref().map(|request| &request.refused),
            is_reserve: self.request.as_ref().is_some_and(|request| request.is_reserve),
            limit: self.limit,
            diagnosis: self.diagnosis.as_ref(),
        })
    }
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.request {
            None => f.write_str("memory of the pool")?,
            Some(FailedRequest { requested_bytes, tag, refused, .. }) => {
                let tag = tag.as_deref().unwrap_or("(untagged)");
                write!(f, "cannot allocate {} for {tag}: {}", refused.rounded(*requested_bytes), refused.found)?;
            }
        }
        f.write_str("\n")?;
        let Stats { backend, preset, memory, limits, .. } = &self.stats;
        write!(f, "usage on {}, backend {backend} ({preset}):", self.device)?;
        let (listed, rest) = self.holders.split_at(self.holders.len().min(LISTED));
        for Holder { tag, buffers, bytes, oldest_age, .. } in listed {
            let noun = if *buffers == 1 { "buffer" } else { "buffers" };
            write!(f, "\n  {} {tag} ({buffers} {noun}", Size(*bytes))?;
            if let Some(age) = oldest_age {
                write!(f, ", the oldest {}", Time(*age))?;
            }
            f.write_str(")")?;
        }
        let (buffers, bytes) = rest.iter().fold((0, 0), |sum, holder| (sum.0 + holder.buffers, sum.1 + holder.bytes));
        if buffers > 0 {
            write!(f, "\n  {} in {buffers} more buffers", Size(bytes))?;
        }
        let (usage, max) = (usage_text(&self.stats), limit_text(limits.max_bytes));
        write!(f, "\n{usage}; limit {max}, peak {}", Size(memory.peak_held_bytes))?;
        let refused = self.request.as_ref().map(|request| &request.refused);
        if let Some(ExplainedRefusal { by: RefusedBy::Source { .. }, found, .. }) = refused {
            write!(f, "\ndriver: {found}")?;
        }
        if let Some(HostMemory { total_bytes, available_bytes, origin }) = &self.host {
            write!(f, "\nsystem: {} free of {} ({origin})", Size(*available_bytes), Size(*total_bytes))?;
        }
        let Some(cause) = self.likely_cause() else { return Ok(()) };
        write!(f, "\nlikely cause: {}\nto do: {}", cause.found, cause.remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(tag: &str, buffers: u64, mib: u64) -> Holder {
        Holder {
            tag: tag.to_owned(),
            buffers,
            bytes: mib << 20,
            requested_bytes: mib << 20,
            oldest_age: Some(Duration::from_secs(buffers)),
            aged: 0,
        }
    }

    #[test]
    fn the_largest_holders_are_listed_and_the_others_are_summed() {
        let holders = (0..13).map(|n| holder(&format!("tag{n}"), n + 1, 100 - n)).collect();
        let mut stats = Stats { backend: "heap", ..Default::default() };
        (stats.memory.held_bytes, stats.memory.peak_held_bytes) = (1 << 30, 1 << 30);
        (stats.memory.in_use_bytes, stats.limits.max_bytes) = (1 << 30, Some(1 << 30));
        let (by, found) = (RefusedBy::Limit { could_fit: true }, "the pool limit is reached".to_owned());
        let refused = ExplainedRefusal { by, needed_bytes: 8192, found, remedy: String::new() };
        let tag = Some("tag3".to_owned());
        let dump = Dump {
            device: "host".to_owned(),
            holders,
            stats,
            longest_free_bytes: 0,
            host: None,
            request: Some(FailedRequest { requested_bytes: 5000, tag, is_reserve: false, refused }),
            limit: "PINPOOL_MAX_BYTES",
            diagnosis: None,
        };
        let text = dump.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "cannot allocate 4.9KiB (rounded to 8.0KiB) for tag3: the pool limit is reached");
        assert_eq!(lines[1], "usage on host, backend heap (adaptive):");
        assert_eq!(lines[2], "  100.0MiB tag0 (1 buffer, the oldest 1.0s)");
        assert_eq!(lines[3], "  99.0MiB tag1 (2 buffers, the oldest 2.0s)");
        assert_eq!(lines[12], "  267.0MiB in 36 more buffers");
        assert_eq!(lines[13], "held 1.0GiB, in use 1.0GiB, idle 0B, in flight 0B; limit 1.0GiB, peak 1.0GiB");
        assert_eq!(Dump { request: None, ..dump }.to_string().lines().next(), Some("memory of the pool"));
    }
}
