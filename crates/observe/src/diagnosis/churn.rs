//! Memory that is unpinned and pinned again over minutes: a program with idle periods pays for the calls each time.

use super::snapshot::Snapshot;

/// Less than 1/50 of the time does not count.
const COSTLY_PART: u64 = 50;
/// A single cycle may be a change of the program.
const TIMES_MIN: u64 = 2;

/// Memory that is pinned again each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Repinned {
    pub(super) bytes: u64,
    pub(super) each_ns: u64,
    pub(super) times: u64,
    pub(super) window_us: u64,
}

/// The memory that one of these windows unpinned and a later one pinned again, if this cost enough of `window_us`.
pub(super) fn repinned<'a>(windows: impl Iterator<Item = &'a Snapshot>, window_us: u64) -> Option<Repinned> {
    let (mut released, mut most_released, mut again, mut times, mut was_again) = (0_u64, 0, 0_u64, 0, false);
    let (mut called_bytes, mut all_ns) = (0, 0);
    for Snapshot { pinned_bytes, unpinned_bytes, pinning_ns, .. } in windows {
        let bytes = released.min(*pinned_bytes);
        times += u64::from(bytes > 0 && !was_again);
        was_again = bytes > 0;
        again += bytes;
        released = released - bytes + unpinned_bytes;
        most_released = most_released.max(released);
        called_bytes += u128::from(*pinned_bytes) + u128::from(*unpinned_bytes);
        all_ns += u128::from(*pinning_ns);
    }
    // Of cycles shorter than a window, each window pins memory again.
    times = times.max(again / most_released.max(1));
    // Each such pin call comes with the release before it.
    let cost_ns = all_ns * called_bytes.min(u128::from(again) * 2) / called_bytes.max(1);
    let cost_ns = u64::try_from(cost_ns).unwrap_or(u64::MAX);
    (times >= TIMES_MIN && cost_ns / 1000 >= window_us / COSTLY_PART).then(|| Repinned {
        bytes: again / times,
        each_ns: cost_ns / times,
        times,
        window_us,
    })
}
