//! Growth statistics that the model does not compare.

use crate::arena::*;

const GRANULE: u64 = 2 << 20;
const LIMITS: GrowthLimits = GrowthLimits::UNLIMITED;

#[test]
fn a_refusal_says_what_is_missing_beyond_the_idle_granules() {
    let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
    arena.add_virtual_range(4 * GRANULE).unwrap();
    let plan = arena.grow(2 * GRANULE, GRANULE, LIMITS).unwrap();
    assert!(arena.finish_plan(plan, PlanOutcome::Done, 0));
    arena.free(ArenaPtr::new(0, 0), GRANULE, 0);
    // Two granules are missing, and the idle one can be remapped to one of them.
    let refusal = arena.grow(2 * GRANULE, GRANULE, GrowthLimits { commit_bytes: 0, ..LIMITS }).unwrap_err();
    assert_eq!(refusal, NoSpace { missing_bytes: GRANULE, transit_bytes: 0 });
}

#[test]
fn a_region_grows_with_the_regions_of_its_own_set() {
    const MIB: u64 = 1 << 20;
    let mut arena = Arena::new(GrowthMode::Regions, Retention::default());
    let mut region_bytes = |bytes: u64| {
        let plan = arena.grow(bytes, 4096, LIMITS).unwrap();
        let region_bytes = bytes + plan.surplus_bytes();
        assert!(arena.finish_plan(plan, PlanOutcome::Done, 0));
        region_bytes
    };
    let regions = [200 * MIB, 2 * MIB, 4096].map(&mut region_bytes);
    assert_eq!(regions, [200 * MIB, 24 * MIB, MIB]);
}
