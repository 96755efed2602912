//! Walled regions (rule 11): how large the next one is. Arithmetic only.

use super::plan::Step;

/// Buffers up to this size keep to regions of their own.
pub(super) const SMALL_BYTES_MAX: u64 = 1 << 20;

const REGION_BYTES_MIN: u64 = 2 << 20;
const REGION_BYTES_MAX: u64 = 64 << 20;

/// One in so many bytes held is what the next region adds.
const GROWTH_SHARE: u64 = 8;

/// The bytes of the next region for buffers of `class_bytes`, where the arena holds `held_bytes`, `replaced_bytes` of
/// it in empty regions that this one replaces, and may grow by `room_bytes`. `None`: not even one buffer has room.
pub(super) fn region_bytes(held_bytes: u64, class_bytes: u64, replaced_bytes: u64, room_bytes: u64) -> Option<u64> {
    let most = REGION_BYTES_MAX.max(class_bytes);
    let least = REGION_BYTES_MIN.max(class_bytes);
    let wanted = (held_bytes / GROWTH_SHARE).clamp(least, most).max(replaced_bytes);
    let allowed = wanted.min(room_bytes.saturating_add(replaced_bytes));
    let whole_buffers = allowed / class_bytes * class_bytes;
    (whole_buffers > 0).then_some(whole_buffers)
}

/// Bytes that `steps` release.
pub(super) fn released_bytes(steps: &[Step]) -> u64 {
    steps.iter().map(|step| if let Step::Release { span, .. } = step { span.bytes() } else { 0 }).sum()
}
