//! Texts of several figures that lines are made of.

use std::fmt;
use std::time::Duration;

use crate::dump::HeldBuffer;

/// What a pool starts with.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub(crate) preset: &'a str,
    pub(crate) backend: &'a str,
    pub(crate) is_pinned: bool,
    /// The ceiling, with where it comes from.
    pub(crate) ceiling: &'a str,
    pub(crate) device: Option<u32>,
    pub(crate) numa_node: Option<u32>,
    /// The unit in which memory is taken, and the kernel's rule for transparent huge pages.
    pub(crate) granule_bytes: Option<u64>,
    pub(crate) huge_pages: Option<&'a str>,
    /// The limits and what was set, each with where it comes from.
    pub(crate) settings: &'a str,
    /// Better back-ends, and why each is not used.
    pub(crate) passed_over: &'a [(&'static str, String)],
}

impl fmt::Display for Start<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { preset, backend, ceiling, settings, .. } = self;
        let kind = if self.is_pinned { "page-locked" } else { "not page-locked" };
        write!(f, "preset {preset}, back-end {backend} ({kind}), ceiling {ceiling}")?;
        match self.granule_bytes {
            Some(bytes) => write!(f, "; granules of {bytes} bytes")?,
            None => write!(f, "; a region for each page-lock")?,
        }
        if let Some(rule) = self.huge_pages {
            write!(f, ", transparent huge pages: {rule}")?;
        }
        if let Some(device) = self.device {
            write!(f, "; GPU {device}")?;
        }
        if let Some(node) = self.numa_node {
            write!(f, "; memory node {node}")?;
        }
        write!(f, "; {settings}; pinpool {}, pid {}", env!("CARGO_PKG_VERSION"), std::process::id())?;
        // Back-ends of one driver are mostly passed over for one reason.
        for alike in self.passed_over.chunk_by(|(_, one), (_, next)| one == next) {
            let names: Vec<_> = alike.iter().map(|&(name, _)| name).collect();
            write!(f, "; not {}: {}", names.join(", "), alike[0].1)?;
        }
        Ok(())
    }
}

/// Memory that was taken from the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Growth {
    pub(crate) asked_bytes: u64,
    pub(crate) held_before_bytes: u64,
    pub(crate) held_bytes: u64,
    pub(crate) page_locks: u64,
    pub(crate) took: Duration,
    pub(crate) max_bytes: Option<u64>,
}

impl fmt::Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked_bytes, held_before_bytes, held_bytes, page_locks, took, max_bytes } = self;
        let calls = if *page_locks == 1 { "call" } else { "calls" };
        let ms = took.as_secs_f64() * 1e3;
        write!(
            f,
            "{asked_bytes} bytes asked in {page_locks} {calls}, held {held_before_bytes} -> {held_bytes} bytes, {ms:.1} ms"
        )?;
        max_bytes.map_or(Ok(()), |max_bytes| write!(f, ", ceiling {max_bytes} bytes"))
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
            write!(f, "\n  {bytes} bytes of {tag}, got {} s ago{place}", age.as_secs())?;
        }
        // Saturating: buffers come back meanwhile.
        let buffers = self.buffers.saturating_sub(listed.len() as u64);
        let bytes = self.bytes.saturating_sub(listed.iter().map(|held| held.bytes).sum());
        let others = if listed.len() < self.tagged.len() { "others" } else { "of no tag (Pool::tagged)" };
        if buffers > 0 { write!(f, "\n  {buffers} {others}, {bytes} bytes") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_says_what_the_pool_has_and_where_each_limit_comes_from() {
        let start = Start {
            preset: "adaptive",
            backend: "mlock",
            is_pinned: true,
            ceiling: "1024 bytes",
            device: None,
            numa_node: Some(1),
            granule_bytes: Some(2 << 20),
            huge_pages: Some("madvise"),
            settings: "PINPOOL_MAX_BYTES=1KiB (builder)",
            passed_over: &[("vmm", "no GPU".to_owned()), ("cuda", "no GPU".to_owned())],
        };
        let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
        assert_eq!(
            start.to_string(),
            format!(
                "preset adaptive, back-end mlock (page-locked), ceiling 1024 bytes; granules of 2097152 bytes, transparent \
                 huge pages: madvise; memory node 1; PINPOOL_MAX_BYTES=1KiB (builder); pinpool {version}, pid {pid}; not \
                 vmm, cuda: no GPU"
            )
        );
    }

    #[test]
    fn growth_has_bytes_asked_and_held_and_milliseconds() {
        let growth = Growth {
            asked_bytes: 3,
            held_before_bytes: 1,
            held_bytes: 4,
            page_locks: 2,
            took: Duration::from_micros(1_234),
            max_bytes: Some(9),
        };
        let text = "3 bytes asked in 2 calls, held 1 -> 4 bytes, 1.2 ms, ceiling 9 bytes";
        assert_eq!(growth.to_string(), text);
        assert_eq!(
            Growth { page_locks: 1, max_bytes: None, ..growth }.to_string(),
            "3 bytes asked in 1 call, held 1 -> 4 bytes, 1.2 ms"
        );
    }
}
