//! Granules of several sizes: no plan loses memory or holds more than its limit.

use crate::arena::*;

const SMALL: u64 = 4096;
const LIMITS: GrowthLimits = GrowthLimits { step_bytes: 0, ..GrowthLimits::UNLIMITED };
/// Eight granules of 4 KiB, then eight of 16 KiB, then one of 64 KiB.
fn arena() -> Arena {
    let mut arena = Arena::new(GrowthMode::Granules(SMALL), Retention::default());
    arena.sizes = GranuleSizes::short(SMALL, 8, 16 * SMALL);
    arena.add_virtual_range(SMALL * (8 + 8 * 4 + 8 * 16)).unwrap();
    arena
}

/// Random buffers, frees, limits and failures: the indices stay correct, remaps stay within one size, and no plan holds
/// more than its limit.
#[test]
fn drawn_sizes_and_failures_keep_every_invariant() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let (mut decommits, mut moves) = (0, 0);
    let rounds = if cfg!(miri) { 3 } else { 60 };
    for _ in 0..rounds {
        let mut arena = arena();
        let limit = SMALL * (8 + draw(120));
        let mut live: Vec<Extent> = Vec::new();
        for now_us in 0..120 {
            if !live.is_empty() && draw(5) < 2 {
                arena.free(live.swap_remove(usize::try_from(draw(live.len() as u64)).unwrap()), now_us);
            }
            let most = 1 << draw(6);
            let bytes = SMALL * (1 + draw(most));
            if let Some(buffer) = arena.carve(bytes) {
                live.push(buffer);
                continue;
            }
            let limits = GrowthLimits { commit_bytes: limit - arena.stats().claimed_bytes, ..LIMITS };
            let Some(plan) = arena.plan_growth(bytes, limits) else { continue };
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
            let buffer = plan.buffer().unwrap();
            let done = usize::try_from(draw(6)).unwrap();
            let is_done = done >= plan.steps().len();
            let mut outcomes = vec![StepOutcome::Made; done.min(plan.steps().len())];
            outcomes.extend((!is_done).then_some(StepOutcome::Failed));
            assert_eq!(arena.finish_plan(plan, &outcomes, now_us), is_done);
            if is_done {
                live.push(buffer);
            }
            arena.validate().unwrap();
            assert!(arena.stats().committed_bytes <= limit);
        }
        live.into_iter().for_each(|buffer| arena.free(buffer, 1000));
        let plan = arena.release_down_to(0);
        plan.into_iter().for_each(|plan| assert!(arena.finish_succeeded(plan, 1000)));
        assert_eq!((arena.stats().committed_bytes, arena.stats().mappings), (0, 0));
        arena.validate().unwrap();
    }
    assert!(cfg!(miri) || decommits > 20 && moves > 20, "{decommits} decommits, {moves} moves");
}
