//! Granules of several sizes: what moves, what is decommitted instead, and that nothing is lost.

use crate::arena::*;

const SMALL: u64 = 4096;
const LIMITS: GrowthLimits = GrowthLimits { step_bytes: 0, ..GrowthLimits::UNLIMITED };

/// Eight granules of 4 KiB, eight of 16 KiB, and one of 64 KiB behind the other.
fn arena() -> Arena {
    let mut arena = Arena::new(GrowthMode::Granules(SMALL), Retention::default());
    arena.sizes = GranuleSizes::short(SMALL, 8, 16 * SMALL);
    arena.add_virtual_range(SMALL * (8 + 8 * 4 + 8 * 16)).unwrap();
    arena
}

fn at(small_granules: u64) -> ArenaPtr {
    ArenaPtr::new(0, small_granules * SMALL)
}

fn extent(first: u64, count: u64) -> Extent {
    Extent::new(at(first), count * SMALL)
}

/// Takes N small granules, from holes or by a plan.
fn take(arena: &mut Arena, small_granules: u64, limits: GrowthLimits) -> Result<(ArenaPtr, Vec<Step>), NoSpace> {
    let bytes = small_granules * SMALL;
    if let Some(ptr) = arena.carve(bytes, SMALL) {
        return Ok((ptr, Vec::new()));
    }
    let plan = arena.grow(bytes, SMALL, limits)?;
    let (ptr, steps) = (plan.ptr().unwrap(), plan.steps().to_vec());
    assert!(arena.finish_plan(plan, PlanOutcome::Done, 0));
    arena.validate().unwrap();
    Ok((ptr, steps))
}

#[test]
fn a_buffer_across_two_sizes_is_one_commit_of_whole_granules() {
    let mut arena = arena();
    let (ptr, steps) = take(&mut arena, 10, LIMITS).unwrap();
    // Eight of 4 KiB and one of 16 KiB.
    assert_eq!((ptr, steps), (at(0), vec![Step::Commit { extent: extent(0, 12) }]));
    assert_eq!((arena.stats().committed_bytes, arena.stats().mappings), (12 * SMALL, 9));
    assert_eq!(take(&mut arena, 2, LIMITS).unwrap(), (at(10), vec![]), "the rest of the last granule");
    arena.free(at(0), 12 * SMALL, 0);
    let plan = arena.release_idle(SMALL).unwrap();
    assert_eq!(plan.steps(), [Step::Decommit { extent: extent(0, 1) }]);
    arena.finish_releases(&plan, &[], 0);
    assert_eq!((arena.stats().committed_bytes, arena.stats().mappings), (11 * SMALL, 8));
    arena.validate().unwrap();
}

#[test]
fn a_granule_moves_to_its_like_and_makes_room_for_others_by_a_decommit() {
    let mut arena = arena();
    // All small granules and two of the next size.
    let whole = take(&mut arena, 16, LIMITS).unwrap().0;
    assert_eq!(whole, at(0));
    let limit = GrowthLimits { commit_bytes: 0, ..LIMITS };
    // The small ones are free, the other two in use.
    arena.free(at(0), 8 * SMALL, 0);
    // Nine do not fit in eight: three granules of 16 KiB, and only 32 KiB are free.
    assert_eq!(take(&mut arena, 9, limit).unwrap_err().missing_bytes, 4 * SMALL);
    let (ptr, steps) = take(&mut arena, 9, GrowthLimits { commit_bytes: 4 * SMALL, ..LIMITS }).unwrap();
    assert_eq!(ptr, at(16));
    assert_eq!(steps, [Step::Decommit { extent: extent(0, 8) }, Step::Commit { extent: extent(16, 12) }]);
    assert_eq!(arena.stats().committed_bytes, 20 * SMALL, "no more than before and 16 KiB");
    // The small ones are in use again. Two granules of 16 KiB are free and move to where they are missing; nothing is committed.
    assert_eq!(take(&mut arena, 8, LIMITS).unwrap().0, at(0));
    arena.free(at(8), 8 * SMALL, 0);
    let (ptr, steps) = take(&mut arena, 11, limit).unwrap();
    assert_eq!(ptr, at(25), "with the rest of the last granule");
    assert_eq!(steps, [Step::Remap { from: extent(8, 8), to: extent(28, 8) }]);
}

#[test]
fn under_a_lowered_limit_a_decommit_makes_up_for_the_excess_first() {
    let mut arena = arena();
    take(&mut arena, 16, LIMITS).unwrap();
    arena.free(at(0), 8 * SMALL, 0);
    let over = |bytes| GrowthLimits { commit_bytes: 0, over_bytes: bytes, ..LIMITS };
    // At least a granule of 16 KiB is missing, so four of the eight small ones go, or all with 16 KiB over.
    let blocker = take(&mut arena, 8, LIMITS).unwrap().0;
    assert_eq!(blocker, at(0));
    arena.free(at(0), 7 * SMALL, 0);
    assert!(take(&mut arena, 12, over(0)).is_err(), "28 KiB for 48");
    let (_, steps) = take(&mut arena, 1, over(0)).unwrap();
    assert_eq!(steps, [], "carved");
    assert!(take(&mut arena, 8, over(0)).is_err());
}

#[test]
fn a_share_of_the_due_granules_is_whole_granules_of_each_size() {
    let mut arena = arena();
    take(&mut arena, 16, LIMITS).unwrap();
    arena.free(at(4), 12 * SMALL, 0);
    // A fifth of twelve small granules: three small ones, the lowest of equal age.
    let plan = arena.release_due(60_000_000).unwrap();
    assert_eq!(plan.steps(), [Step::Decommit { extent: extent(4, 3) }]);
    arena.finish_releases(&plan, &[], 0);
    let plan = arena.release_due(61_000_000).unwrap();
    // A fifth of nine is two: the last small one, and a whole one of the next size.
    assert_eq!(plan.steps(), [Step::Decommit { extent: extent(7, 5) }]);
    arena.finish_releases(&plan, &[], 0);
    arena.validate().unwrap();
}

/// Drawn buffers, frees, limits and failures: the indices stay right, moves keep to their size, and no plan holds more
/// than its limit.
#[test]
fn drawn_sizes_and_failures_keep_every_invariant() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let (mut decommits, mut moves) = (0, 0);
    for _ in 0..60 {
        let mut arena = arena();
        let limit = SMALL * (8 + draw(120));
        let mut live: Vec<(ArenaPtr, u64)> = Vec::new();
        for now_us in 0..120 {
            if !live.is_empty() && draw(5) < 2 {
                let (ptr, bytes) = live.swap_remove(usize::try_from(draw(live.len() as u64)).unwrap());
                arena.free(ptr, bytes, now_us);
            }
            let most = 1 << draw(6);
            let bytes = SMALL * (1 + draw(most));
            if let Some(ptr) = arena.carve(bytes, SMALL) {
                live.push((ptr, bytes));
                continue;
            }
            let limits = GrowthLimits { commit_bytes: limit - arena.stats().claimed_bytes, ..LIMITS };
            let Ok(plan) = arena.grow(bytes, SMALL, limits) else { continue };
            arena.validate().unwrap();
            assert!(arena.stats().claimed_bytes <= limit, "{plan:?}");
            for step in plan.steps() {
                let size = |of: Extent| arena.sizes.zone_at(of.offset());
                match *step {
                    Step::Decommit { .. } => decommits += 1,
                    Step::Commit { .. } => {}
                    Step::Remap { from, to } => {
                        moves += 1;
                        assert_eq!(size(from), size(to), "{step:?}");
                        assert!(from.offset() + from.bytes() <= size(from).end, "{step:?}");
                    }
                }
            }
            let ptr = plan.ptr().unwrap();
            let done = usize::try_from(draw(6)).unwrap();
            let is_done = done >= plan.steps().len();
            let outcome = if is_done { PlanOutcome::Done } else { PlanOutcome::Failed { done } };
            assert_eq!(arena.finish_plan(plan, outcome, now_us), is_done);
            if is_done {
                live.push((ptr, bytes));
            }
            arena.validate().unwrap();
            assert!(arena.stats().committed_bytes <= limit);
        }
        live.into_iter().for_each(|(ptr, bytes)| arena.free(ptr, bytes, 1000));
        let plan = arena.release_down_to(0);
        plan.into_iter().for_each(|plan| arena.finish_releases(&plan, &[], 1000));
        assert_eq!((arena.stats().committed_bytes, arena.stats().mappings), (0, 0));
        arena.validate().unwrap();
    }
    assert!(decommits > 20 && moves > 20, "{decommits} decommits, {moves} moves");
}
