//! Texts with several numbers, for log lines.

use pinpool_os::format::{Size, Time};

use crate::report::HeldBuffer;
use crate::report::dump::{by_state, limit_text};
use crate::stats::{RequestStats, Stats};

/// Returns the bytes of a pool by state, as keys and values.
pub(super) fn usage_by_state(stats: &Stats) -> String {
    let states = by_state(stats).map(|(state, bytes)| format!("{}={}", state.replace(' ', "_"), Size(bytes)));
    format!("{} max={}", states.collect::<Vec<_>>().join(" "), limit_text(stats.limits.max_bytes))
}

/// Returns the totals of a pool that ends.
pub(super) fn totals(Stats { requests, memory, .. }: &Stats) -> String {
    let RequestStats { served, hits, misses, failed, .. } = requests;
    let (evicted, pins, peak) = (memory.evictions.over_limit, memory.pin.count, Size(memory.peak_held_bytes));
    format!("requests={served} hits={hits} misses={misses} failed={failed} evicted={evicted} pins={pins} peak={peak}")
}

/// Maximum number of buffers that are listed one by one.
const LISTED: usize = 10;

/// Returns the list of the buffers that users still have when their pool ends: the first [`LISTED`] of `tagged`, which begins with
/// the oldest, and the sum of all other buffers.
pub(super) fn still_out((Stats { memory, copies, .. }, tagged): (&Stats, &[HeldBuffer])) -> String {
    let (buffers, bytes) = (memory.in_use + copies.in_flight, memory.in_use_bytes + copies.in_flight_bytes);
    let mut text = format!("buffers={buffers} bytes={}", Size(bytes));
    let listed = &tagged[..tagged.len().min(LISTED)];
    for HeldBuffer { tag, bytes, age, stack } in listed {
        let place = stack.as_ref().and_then(|stack| stack.place());
        let place = place.map_or_else(String::new, |place| format!(" at {place}"));
        text += &format!("\n  {} tag={tag} age={}{place}", Size(*bytes), Time(*age));
    }
    // The subtraction saturates, because buffers may be returned between the two snapshots.
    let buffers = buffers.saturating_sub(listed.len() as u64);
    let bytes = bytes.saturating_sub(listed.iter().map(|held| held.bytes).sum());
    let others = if listed.len() < tagged.len() { "more" } else { "without a tag (see tagged())" };
    if buffers > 0 {
        text += &format!("\n  {} in {buffers} buffers {others}", Size(bytes));
    }
    text
}
