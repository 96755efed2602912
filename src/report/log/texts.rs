//! Parts of lines that have several numbers.

use std::fmt;
use std::time::Duration;

use pinpool_os::words::{Size, Time};

use crate::report::HeldBuffer;
use crate::report::dump::by_state;
use crate::stats::{RequestStats, Stats};

/// A key with its value; nothing without a value.
pub(super) struct Pair<T>(pub(super) &'static str, pub(super) Option<T>);

impl<T: fmt::Display> fmt::Display for Pair<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.as_ref().map_or(Ok(()), |value| write!(f, " {}={value}", self.0))
    }
}

/// A limit in bytes, or `none`.
pub(super) struct LimitText(pub(super) Option<u64>);

impl fmt::Display for LimitText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => Size(bytes).fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// The bytes of a pool by state, as keys and values.
pub(super) struct Usage<'a>(pub(super) &'a Stats);

impl fmt::Display for Usage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (state, bytes) in by_state(self.0) {
            write!(f, "{}={} ", state.replace(' ', "_"), Size(bytes))?;
        }
        write!(f, "max={}", LimitText(self.0.limits.max_bytes))
    }
}

/// The totals of a pool that ends.
pub(super) struct Totals<'a>(pub(super) &'a Stats);

impl fmt::Display for Totals<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stats { requests, memory, .. } = self.0;
        let RequestStats { served, hits, misses, failed, .. } = requests;
        let (evicted, pins, peak) = (memory.evictions.over_limit, memory.pin.count, Size(memory.peak_held_bytes));
        write!(
            f,
            "requests={served} hits={hits} misses={misses} failed={failed} evicted={evicted} pins={pins} peak={peak}"
        )
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
            let (before, held, max) = (Size(before), Size(held), LimitText(max_bytes));
            write!(f, "held={before}->{held} max={max} pins={pins} time={time}")
        }
    }
}

/// Buffers that are listed one by one.
const LISTED: usize = 10;

/// Buffers that users hold when their pool ends: those under a tag, the oldest first, and the sum of the others.
#[derive(Debug)]
pub(crate) struct StillOut<'a> {
    pub(crate) buffers: u64,
    pub(crate) bytes: u64,
    pub(crate) tagged: &'a [HeldBuffer],
}

impl fmt::Display for StillOut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffers={} bytes={}", self.buffers, Size(self.bytes))?;
        let listed = &self.tagged[..self.tagged.len().min(LISTED)];
        for HeldBuffer { tag, bytes, age, stack } in listed {
            let place = stack.as_ref().and_then(|stack| stack.place());
            let place = place.map_or_else(String::new, |place| format!(" at {place}"));
            write!(f, "\n  {} tag={tag} age={}{place}", Size(*bytes), Time(*age))?;
        }
        // Saturating: buffers come back meanwhile.
        let buffers = self.buffers.saturating_sub(listed.len() as u64);
        let bytes = self.bytes.saturating_sub(listed.iter().map(|held| held.bytes).sum());
        let others = if listed.len() < self.tagged.len() { "more" } else { "without a tag (see tagged())" };
        if buffers > 0 { write!(f, "\n  {} in {buffers} buffers {others}", Size(bytes)) } else { Ok(()) }
    }
}
