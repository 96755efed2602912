//! `Arena::validate` names the invariant that a changed figure breaks.

use crate::arena::*;

const GRANULE: u64 = 2 << 20;
const LIMITS: GrowthLimits = GrowthLimits::UNLIMITED;

/// Two of four granules are committed; a buffer has one page of them, a reserve is free.
fn granules() -> Arena {
    let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
    arena.add_virtual_range(4 * GRANULE).unwrap();
    let plan = arena.grow(2 * GRANULE, 4096, LIMITS).unwrap();
    assert!(arena.finish_plan(plan, PlanOutcome::Done, 0));
    arena.free(ArenaPtr::new(0, 4096), 2 * GRANULE - 4096, 0);
    arena.add_reserve(GRANULE).unwrap();
    arena.validate().unwrap();
    arena
}

/// One region with a buffer in it, for which the system holds a page more.
fn regions() -> Arena {
    let arena = Arena::new(GrowthMode::Regions, Retention::default());
    let mut arena = arena.with_region_cost(|bytes| bytes + 4096);
    let plan = arena.grow(4096, 4096, LIMITS).unwrap();
    assert!(arena.finish_plan(plan, PlanOutcome::Done, 0));
    arena.validate().unwrap();
    arena
}

#[test]
fn a_changed_figure_breaks_the_invariant_of_its_name() {
    type Change = (&'static str, fn(&mut Arena));
    let changes: [Change; 11] = [
        ("arena-I2: ", |arena| arena.stats.committed_bytes += 1),
        ("arena-I2: ", |arena| arena.committing_bytes += 1),
        ("tile ", |arena| arena.stats.live_bytes += 1),
        ("tile ", |arena| arena.stats.live_bytes -= 1),
        ("arena-I4: ", |arena| arena.stats.claimed_bytes -= 1),
        ("are counted", |arena| arena.stats.reserve_hole_bytes -= 1),
        ("tile ", |arena| {
            let _hole = arena.holes[0].add(Extent::new(ArenaPtr::new(0, 3 * GRANULE), GRANULE));
        }),
        ("bytes of it are indexed", |arena| {
            arena.idle.cut(Extent::new(ArenaPtr::new(0, GRANULE), GRANULE), |_| ());
        }),
        ("does not lie in", |arena| arena.holes.swap(0, 1)),
        ("arena-I2: ", |arena| {
            let _range = arena.ranges.remove(&0);
        }),
        ("uncommitted-I1: ", |arena| {
            let run = Extent::new(ArenaPtr::new(0, 2 * GRANULE), 2 * GRANULE);
            arena.uncommitted.cut(Extent::new(run.ptr(), 4096));
        }),
    ];
    for (label, change) in changes {
        let mut arena = granules();
        change(&mut arena);
        let text = arena.validate().unwrap_err();
        assert!(text.contains(label), "{label}: {text}");
    }
}

#[test]
fn less_claimed_than_the_system_holds_for_regions_breaks_the_claims() {
    let mut arena = regions();
    let stats = arena.stats();
    assert_eq!((stats.overhead_bytes, stats.claimed_bytes), (4096, stats.committed_bytes + 4096));
    arena.stats.claimed_bytes -= 1;
    assert!(arena.validate().unwrap_err().starts_with("arena-I4: "));
}
