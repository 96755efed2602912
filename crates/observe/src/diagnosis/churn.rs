//! Memory that is unpinned and pinned again over minutes: a program with idle periods pays for the calls each time.

/// Less than 1/50 of the time does not count.
const COSTLY_PART: u64 = 50;
/// A single cycle may be a change of the program.
const TIMES_MIN: u64 = 2;

/// Bytes that a window pinned and unpinned, and the duration of the calls.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Calls {
    pub(super) pinned_bytes: u64,
    pub(super) unpinned_bytes: u64,
    pub(super) ns: u64,
}

/// Memory that is pinned again each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Repinned {
    pub(super) bytes: u64,
    pub(super) each_ns: u64,
    pub(super) times: u64,
    pub(super) of_us: u64,
}

/// The memory that one of these windows unpinned and a later one pinned again, if this cost enough of `of_us`.
pub(super) fn repinned(windows: impl Iterator<Item = Calls>, of_us: u64) -> Option<Repinned> {
    let (mut released, mut again, mut times, mut was_again) = (0_u64, 0_u64, 0, false);
    let mut all = Calls::default();
    for Calls { pinned_bytes, unpinned_bytes, ns } in windows {
        let bytes = pinned_bytes.min(released);
        times += u64::from(bytes > 0 && !was_again);
        was_again = bytes > 0;
        again += bytes;
        released = released - bytes + unpinned_bytes;
        all.pinned_bytes += pinned_bytes;
        all.unpinned_bytes += unpinned_bytes;
        all.ns += ns;
    }
    // Each such pin call comes with the release before it.
    let called = u128::from(all.pinned_bytes.saturating_add(all.unpinned_bytes)).max(1);
    let cost_ns = u128::from(all.ns) * u128::from(again.saturating_mul(2)).min(called) / called;
    let cost_ns = u64::try_from(cost_ns).unwrap_or(u64::MAX);
    (times >= TIMES_MIN && cost_ns / 1000 >= of_us / COSTLY_PART).then(|| Repinned {
        bytes: again / times,
        each_ns: cost_ns / times,
        times,
        of_us,
    })
}
