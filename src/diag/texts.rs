//! Parts of lines that have several numbers.

use std::fmt;
use std::time::Duration;

use pinpool_os::words::{Size, Time};

use crate::dump::HeldBuffer;
use crate::error::UsageReport;

/// The properties of a new pool.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub(crate) preset: &'a str,
    pub(crate) backend: &'a str,
    pub(crate) is_pinned: bool,
    /// The limit, with its origin.
    pub(crate) limit: &'a str,
    pub(crate) device: Option<u32>,
    pub(crate) numa_node: Option<u32>,
    /// The unit of growth, and the kernel's rule for transparent huge pages.
    pub(crate) granule_bytes: Option<u64>,
    pub(crate) huge_pages: Option<&'a str>,
    /// What was set, each with its origin.
    pub(crate) settings: &'a str,
    /// Better backends, and why each is skipped.
    pub(crate) passed_over: &'a [(&'static str, String)],
}

impl fmt::Display for Start<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { preset, backend, limit, settings, .. } = self;
        let pinned = if self.is_pinned { "yes" } else { "no" };
        write!(f, "preset={preset} backend={backend} pinned={pinned} max={limit}")?;
        if let Some(bytes) = self.granule_bytes {
            write!(f, " granule={}", Size(bytes))?;
        }
        if let Some(rule) = self.huge_pages {
            write!(f, " thp={rule}")?;
        }
        if let Some(device) = self.device {
            write!(f, " gpu={device}")?;
        }
        write!(f, "{}", Node(self.numa_node))?;
        write!(f, " version={} pid={}", env!("CARGO_PKG_VERSION"), std::process::id())?;
        if !settings.is_empty() {
            write!(f, "; {settings}")?;
        }
        // The backends of one driver are mostly skipped for one reason.
        for alike in self.passed_over.chunk_by(|(_, one), (_, next)| one == next) {
            let names: Vec<_> = alike.iter().map(|&(name, _)| name).collect();
            write!(f, " (skipped {}: {})", names.join(", "), alike[0].1)?;
        }
        Ok(())
    }
}

/// A NUMA node, if there is one.
pub(super) struct Node(pub(super) Option<u32>);

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |node| write!(f, " numa_node={node}"))
    }
}

/// A limit in bytes, or `none`.
pub(super) struct Limit(pub(super) Option<u64>);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => Size(bytes).fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// What a pool holds, as keys and values.
pub(super) struct Usage<'a>(pub(super) &'a UsageReport);

impl fmt::Display for Usage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = self.0;
        let [held, in_use, idle, in_flight] =
            [of.held_bytes, of.in_use_bytes, of.idle_bytes, of.in_flight_bytes].map(Size);
        write!(f, "held={held} in_use={in_use} idle={idle}")?;
        let more = [("free", of.free_bytes), ("quarantined", of.quarantined_bytes), ("outside", of.outside_bytes)];
        for (key, bytes) in more.into_iter().chain([("unpinned", of.fallback_bytes)]).filter(|(_, bytes)| *bytes > 0) {
            write!(f, " {key}={}", Size(bytes))?;
        }
        write!(f, " in_flight={in_flight} max={}", Limit(of.max_bytes))
    }
}

/// Memory that was taken from the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Growth {
    pub(crate) asked_bytes: u64,
    pub(crate) held_before_bytes: u64,
    pub(crate) held_bytes: u64,
    pub(crate) pin_calls: u64,
    pub(crate) took: Duration,
    pub(crate) max_bytes: Option<u64>,
}

/// Alternate: with raw bytes.
impl fmt::Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked_bytes, held_before_bytes: before, held_bytes: held, pin_calls: pins, took, max_bytes } = *self;
        let time = Time(took);
        if f.alternate() {
            write!(f, "request={asked_bytes}B held={before}B->{held}B pins={pins} time={time}")
        } else {
            let (before, held, max) = (Size(before), Size(held), Limit(max_bytes));
            write!(f, "held={before}->{held} max={max} pins={pins} time={time}")
        }
    }
}

/// Buffers that are listed one by one.
const LISTED: usize = 10;

/// Buffers that users hold when their pool ends: those under a tag, the oldest first, and the sum of the others.
#[derive(Debug)]
pub(super) struct StillOut<'a> {
    pub(super) buffers: u64,
    pub(super) bytes: u64,
    pub(super) tagged: &'a [HeldBuffer],
}

impl fmt::Display for StillOut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = &self.tagged[..self.tagged.len().min(LISTED)];
        for HeldBuffer { tag, bytes, age, stack } in listed {
            let place = stack.as_ref().and_then(|stack| stack.place());
            let place = place.map_or_else(String::new, |place| format!(" at {place}"));
            write!(f, "\n  {} tag={tag} age={}{place}", Size(*bytes), Time(*age))?;
        }
        // Saturating: buffers come back meanwhile.
        let buffers = self.buffers.saturating_sub(listed.len() as u64);
        let bytes = self.bytes.saturating_sub(listed.iter().map(|held| held.bytes).sum());
        let others = if listed.len() < self.tagged.len() { "more" } else { "without a tag (see Pool::tagged)" };
        if buffers > 0 { write!(f, "\n  {} in {buffers} buffers {others}", Size(bytes)) } else { Ok(()) }
    }
}
