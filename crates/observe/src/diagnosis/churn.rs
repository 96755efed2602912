//! Memory that is unpinned and pinned again over minutes: a program with idle periods pays for the calls each time.

use super::snapshot::Snapshot;
use super::words::{Size, seconds};

/// Less than 1/50 of the time does not count.
const COSTLY_PART: u64 = 50;
/// A single cycle may be a change of the program.
const TIMES_MIN: u64 = 2;

/// The finding, and the bytes that one of these windows unpinned and a later one pinned again, if this cost enough of
/// `window_us`.
pub(super) fn repinned<'a>(windows: impl Iterator<Item = &'a Snapshot>, window_us: u64) -> Option<(String, u64)> {
    let (mut released, mut most_released, mut again, mut was_again) = (0_u64, 0, 0_u64, false);
    let (mut times, mut cost_ns) = (0, 0_u64);
    for Snapshot { pinned_bytes, unpinned_bytes, pinning_ns, .. } in windows {
        let bytes = released.min(*pinned_bytes);
        times += u64::from(bytes > 0 && !was_again);
        (was_again, again) = (bytes > 0, again + bytes);
        // Other memory is growth.
        cost_ns += if bytes > pinned_bytes / 2 { *pinning_ns } else { 0 };
        released = released - bytes + unpinned_bytes;
        most_released = most_released.max(released);
    }
    // Of cycles shorter than a window, each window pins memory again.
    times = times.max(again / most_released.max(1));
    (times >= TIMES_MIN && cost_ns / 1000 >= window_us / COSTLY_PART).then(|| {
        // A cycle that two windows share may count once.
        let bytes = most_released.min(again / times);
        let (each, of) = (seconds(cost_ns / times), seconds(window_us.saturating_mul(1000)));
        (format!("{} unpinned and pinned again {times} times in {of}, at {each} each time", Size(bytes)), bytes)
    })
}
