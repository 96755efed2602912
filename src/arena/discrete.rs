//! Walled regions (rule 11): where a buffer goes among them, and how large the next one is. Here is the arithmetic;
//! the holes by region are in `regions`.
//!
//! A region that one buffer lies in can neither be released nor replaced. So that regions run empty:
//! 1. The reserve comes first: it is kept anyway.
//! 2. A hole of exactly the size, wherever it is: it leaves no remainder.
//! 3. Else the *oldest* region in use that has room, and there the tightest hole. What is long-lived gathers in old
//!    regions, and the young ones run empty. The tightest hole of all would keep every region a little in use.
//! 4. Else the tightest empty region: only now is an empty one touched.
//! 5. Else a new region, of whole buffers. Empty ones that were too small make way, and it is as large as they were
//!    together, *not* cut: what is cut off would have to be locked again for the next buffer.
//!
//! Replay of 25 workloads as they are and with all sizes times 0.31, 0.56, 1.7, 3.1 and 7.3, peak pinned / requested
//! as a geometric mean, and the worst of pools above 16 MiB:
//!
//! | rule | as they are | worst | page-locks | scaled | worst | without room at 1.25 x the peak |
//! | --- | --- | --- | --- | --- | --- | --- |
//! | the tightest hole of all | 1.35 | 2.06 | 2334 | 1.34-1.44 | 3.53 | 87 |
//! | the oldest region, the tightest hole in it | 1.33 | 1.81 | 2361 | 1.30-1.40 | 1.94 | 36 |
//! | the same, and replaced regions uncut | 1.33 | 1.81 | 2146 | 1.30-1.44 | 2.03 | 54 |
//! | the same, exact holes first, empty regions last | 1.33 | 1.86 | 2183 | 1.31-1.44 | 1.95 | 55 |
//! | the same, from 1 MiB a region, the reserve first: **this** | 1.28 | 1.86 | 2150 | 1.34-1.39 | 1.91 | 49 |
//! | the fullest region that has room | 1.35 | 2.03 | 2336 | 1.32-1.44 | 3.51 | 81 |
//! | regions for each two doublings of size | 1.39 | 2.22 | 4492 | 1.35-1.57 | 2.30 | 4 |
//!
//! The second and third keep to fewer lines of the targets, for an empty old region is taken for a small buffer while
//! a younger one in use has room.

/// Buffers up to this size keep to regions of their own.
pub(super) const SMALL_BYTES_MAX: u64 = 1 << 20;

const REGION_BYTES_MIN: u64 = 1 << 20;
const REGION_BYTES_MAX: u64 = 64 << 20;

/// One in so many bytes held is what the next region adds.
const GROWTH_SHARE: u64 = 8;

/// A region has room for so many buffers, as far as that takes no more than `CROWD_BYTES_MAX`.
const CROWD: u64 = 8;
const CROWD_BYTES_MAX: u64 = 16 << 20;

/// The bytes of the next region for buffers of `class_bytes`, cut to whole buffers, where other regions for such sizes
/// hold `held_bytes` and at most `room_bytes` may be locked, no more than `step_bytes` at once unless a buffer needs it.
/// If empty regions of `replaced_bytes` make way for it, it is as large as they were together, to the byte. `None`: not
/// even one buffer has room.
pub(super) fn region_bytes(
    held_bytes: u64,
    class_bytes: u64,
    replaced_bytes: u64,
    room_bytes: u64,
    step_bytes: u64,
) -> Option<u64> {
    let crowd = class_bytes.saturating_mul(CROWD).min(CROWD_BYTES_MAX);
    let least = REGION_BYTES_MIN.max(crowd).max(class_bytes);
    let most = REGION_BYTES_MAX.max(class_bytes);
    let whole_buffers = |bytes: u64| bytes / class_bytes * class_bytes;
    let wanted = whole_buffers((held_bytes / GROWTH_SHARE).clamp(least, most)).max(replaced_bytes);
    let at_once = step_bytes.max(class_bytes).min(room_bytes);
    let bytes = if wanted <= at_once { wanted } else { whole_buffers(at_once) };
    (bytes > 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_region_holds_a_crowd_of_small_buffers() {
        assert_eq!(region_bytes(0, 4 * KIB, 0, u64::MAX, u64::MAX), Some(MIB));
        assert_eq!(region_bytes(0, 640 * KIB, 0, u64::MAX, u64::MAX), Some(5 * MIB));
        assert_eq!(region_bytes(0, 3 * MIB, 0, u64::MAX, u64::MAX), Some(15 * MIB), "16 MiB, cut to whole buffers");
        assert_eq!(region_bytes(0, 100 * MIB, 0, u64::MAX, u64::MAX), Some(100 * MIB));
    }

    #[test]
    fn regions_grow_with_what_is_held_up_to_a_bound() {
        assert_eq!(region_bytes(200 * MIB, MIB, 0, u64::MAX, u64::MAX), Some(25 * MIB));
        assert_eq!(region_bytes(2000 * MIB, MIB, 0, u64::MAX, u64::MAX), Some(64 * MIB));
    }

    #[test]
    fn empty_regions_make_way_for_one_of_their_sum() {
        assert_eq!(region_bytes(0, 24 * MIB, 100 * MIB, u64::MAX, u64::MAX), Some(100 * MIB), "uncut");
        assert_eq!(region_bytes(0, 24 * MIB, 20 * MIB, u64::MAX, u64::MAX), Some(24 * MIB));
    }

    #[test]
    fn the_room_bounds_a_region() {
        assert_eq!(region_bytes(0, 640 * KIB, 0, 2 * MIB, u64::MAX), Some(1920 * KIB));
        assert_eq!(region_bytes(0, 640 * KIB, 0, 639 * KIB, u64::MAX), None);
    }
    #[test]
    fn while_copies_run_a_region_is_a_short_step_or_one_buffer() {
        assert_eq!(region_bytes(2000 * MIB, MIB, 0, u64::MAX, 8 * MIB), Some(8 * MIB));
        assert_eq!(region_bytes(0, 3 * MIB, 0, u64::MAX, 8 * MIB), Some(6 * MIB));
        assert_eq!(region_bytes(0, 20 * MIB, 0, u64::MAX, 8 * MIB), Some(20 * MIB), "no buffer extents two");
        assert_eq!(region_bytes(0, 20 * MIB, 0, 19 * MIB, 8 * MIB), None);
    }
}
