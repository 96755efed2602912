//! Memory that is unpinned and pinned again over minutes: a program with idle periods pays for the calls each time.

use super::snapshot::Snapshot;
use super::words::{Size, seconds};

/// Repeated pin calls count if they take at least 1/50 of the time.
const COSTLY_PART: u64 = 50;
/// Minimum number of cycles: a single cycle may be a change in the program's behavior.
const TIMES_MIN: u64 = 2;

/// Returns the finding, and the bytes that one of these windows unpinned and a later window pinned again. Returns `None` if
/// there are too few cycles or their pin calls took too little of `window_us`.
pub(super) fn repinned<'a>(windows: impl Iterator<Item = &'a Snapshot>, window_us: u64) -> Option<(String, u64)> {
    let (mut released, mut most_released, mut again, mut was_again) = (0_u64, 0, 0_u64, false);
    let (mut times, mut cost_ns) = (0, 0_u64);
    for Snapshot { pinned_bytes, unpinned_bytes, pinning_ns, most_held_bytes: grown_bytes, .. } in windows {
        // Bytes pinned beyond the growth of the peak had been pinned before, possibly in the same window.
        let bytes = pinned_bytes.saturating_sub(*grown_bytes).min(released + unpinned_bytes);
        // Two windows may share a cycle unless the second also unpinned some of the bytes.
        times += u64::from(bytes > 0 && (!was_again || bytes > released));
        (was_again, again) = (bytes > 0, again + bytes);
        // A window that pins mostly memory that was not pinned before is growth.
        cost_ns += if bytes > pinned_bytes / 2 { *pinning_ns } else { 0 };
        most_released = most_released.max(released + unpinned_bytes);
        released = released + unpinned_bytes - bytes;
    }
    // If a cycle is shorter than a window, each window pins memory again, so the bytes show the number of cycles.
    times = times.max(again / most_released.max(1));
    (times >= TIMES_MIN && cost_ns / 1000 >= window_us / COSTLY_PART).then(|| {
        // Cycles in consecutive windows may count as one, so the mean is limited to the most bytes that were unpinned at one
        // time.
        let bytes = most_released.min(again / times);
        let (each, of) = (seconds(cost_ns / times), seconds(window_us.saturating_mul(1000)));
        (format!("{} unpinned and pinned again {times} times in {of}, at {each} each time", Size(bytes)), bytes)
    })
}
