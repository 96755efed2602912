//! Walled regions (rule 11): how large the next one is. Arithmetic only.

/// Buffers up to this size keep to regions of their own.
pub(super) const SMALL_BYTES_MAX: u64 = 1 << 20;

const REGION_BYTES_MIN: u64 = 2 << 20;
const REGION_BYTES_MAX: u64 = 64 << 20;

/// One in so many bytes held is what the next region adds.
const GROWTH_SHARE: u64 = 8;

/// A region has room for so many buffers, as far as that takes no more than `CROWD_BYTES_MAX`.
const CROWD: u64 = 8;
const CROWD_BYTES_MAX: u64 = 16 << 20;

/// The bytes of the next region for buffers of `class_bytes`, cut to whole buffers, where other regions for such sizes
/// hold `held_bytes`, empty regions of `replaced_bytes` make way for it, and at most `room_bytes` may be locked, no more
/// than `step_bytes` at once unless a buffer needs it. `None`: not even one buffer has room.
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
    let wanted = (held_bytes / GROWTH_SHARE).clamp(least, most).max(replaced_bytes);
    let at_once = step_bytes.max(class_bytes).min(room_bytes);
    let whole_buffers = wanted.min(at_once) / class_bytes * class_bytes;
    (whole_buffers > 0).then_some(whole_buffers)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_region_holds_a_crowd_of_small_buffers() {
        assert_eq!(region_bytes(0, 4 * KIB, 0, u64::MAX, u64::MAX), Some(2 * MIB));
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
        assert_eq!(region_bytes(0, 24 * MIB, 100 * MIB, u64::MAX, u64::MAX), Some(96 * MIB));
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
        assert_eq!(region_bytes(0, 20 * MIB, 0, u64::MAX, 8 * MIB), Some(20 * MIB), "no buffer spans two");
        assert_eq!(region_bytes(0, 20 * MIB, 0, 19 * MIB, 8 * MIB), None);
    }
}
