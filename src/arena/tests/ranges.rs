//! How ranges are numbered, how long they may be, and which buffers share a region.

use crate::arena::*;

const GRANULE: u64 = 2 << 20;
const LIMITS: GrowthLimits = GrowthLimits::UNLIMITED;

#[test]
fn a_range_has_a_byte_at_least_and_at_most_the_longest_length() {
    let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
    assert_eq!(arena.add_virtual_range(GRANULE - 1), None, "no whole granule");
    assert_eq!(arena.add_reserve(0), None);
    assert_eq!(arena.add_virtual_range(RANGE_BYTES_MAX), Some(0));
    assert_eq!(arena.add_virtual_range(RANGE_BYTES_MAX + GRANULE), None);
    assert_eq!(arena.add_reserve(RANGE_BYTES_MAX + 1), None);
    arena.validate().unwrap();
}

#[test]
fn ranges_are_numbered_in_order_of_creation() {
    let mut arena = Arena::new(GrowthMode::Regions, Retention::default());
    let region = |arena: &mut Arena| {
        let plan = arena.plan_growth(4096, LIMITS).unwrap();
        let buffer = plan.buffer().unwrap();
        assert!(arena.finish_succeeded(plan, 0));
        buffer
    };
    for number in [0, 1, 2] {
        let buffer = region(&mut arena);
        assert_eq!(buffer.range(), number);
        arena.free(buffer, 0);
        let plan = arena.release_down_to(0).unwrap();
        assert!(arena.finish_succeeded(plan, 0));
    }
    arena.next_range = RANGES_MAX - 1;
    assert_eq!([region(&mut arena).range(), region(&mut arena).range()], [RANGES_MAX - 1, 0]);
    arena.next_range = RANGES_MAX - 1;
    assert_eq!(region(&mut arena).range(), 1, "the first that is free");
    arena.validate().unwrap();
}

#[test]
fn buffers_up_to_a_mebibyte_have_regions_of_their_own() {
    let regions = Arena::new(GrowthMode::Regions, Retention::default());
    let sets = [4096, 1 << 20, (1 << 20) + 1, 1 << 30].map(|bytes| regions.own_set(bytes));
    assert_eq!(sets, [HoleSet::Small, HoleSet::Small, HoleSet::Large, HoleSet::Large]);
    let granules = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
    assert_eq!([4096, 1 << 30].map(|bytes| granules.own_set(bytes)), [HoleSet::Shared; 2]);
}
