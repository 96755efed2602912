//! Every state that a small arena reaches, by all sequences of operations: each step from each state is checked against
//! the model, and no state is visited twice. There are finitely many, so sequences of every length are covered.

use std::collections::HashSet;

use super::*;

/// What an operation may choose from.
struct Setup {
    growth: GrowthMode,
    span_granules: usize,
    reserve_pages: usize,
    /// Sizes of buffers, in pages.
    sizes: &'static [usize],
    /// Binary logarithms, in pages.
    alignments: &'static [u32],
    /// The arena claims no more than this.
    limit_bytes: u64,
    /// Unfinished at a time.
    plans: usize,
    /// Granules of the compaction target; 0: none.
    compact_granules: usize,
}

impl World {
    fn copied(&self) -> Self {
        let arena = &self.arena;
        Self {
            arena: Arena {
                growth: arena.growth,
                sizes: arena.sizes,
                region_cost: RegionCost(Box::new(|bytes| bytes)),
                ranges: arena.ranges.clone(),
                next_range: arena.next_range,
                holes: arena.holes.clone(),
                uncommitted: arena.uncommitted.clone(),
                idle: arena.idle.clone(),
                retention: arena.retention,
                next_release_us: arena.next_release_us,
                stats: arena.stats,
                committing_bytes: arena.committing_bytes,
                kept_bytes: arena.kept_bytes,
            },
            ranges: self.ranges.clone(),
            live: self.live.clone(),
            outstanding: self.outstanding.iter().map(Outstanding::copied).collect(),
            now_us: self.now_us,
            next_release_us: self.next_release_us,
        }
    }

    /// What decides the steps that follow: ranges by their order, ages by their order and whether they are due.
    fn key(&self) -> Vec<u64> {
        let rank_of = |range: u32| self.ranges.range(..range).count() as u64;
        let of_extent = |extent: Extent| [rank_of(extent.range()), extent.offset() / PAGE, extent.bytes() / PAGE];
        let mut ages: Vec<u64> = self.idle().into_iter().map(|(since_us, ..)| since_us).collect();
        ages.extend(self.outstanding.iter().flat_map(|it| it.idle_before.iter().map(|&(since_us, ..)| since_us)));
        ages.sort_unstable();
        ages.dedup();
        let of_age = |since_us: u64| {
            let order = ages.partition_point(|&age| age < since_us) as u64;
            [order, u64::from(since_us + 40 <= self.now_us)]
        };
        let mut key = vec![self.next_release_us.saturating_sub(self.now_us)];
        for range in self.ranges.values() {
            key.push(range.pages.len() as u64);
            key.extend([range.kind as u64, range.set as u64]);
            key.extend(range.pages.iter().map(|&page| page as u64));
            let ages = range.idle_since.iter().flat_map(|since| since.map_or([u64::MAX; 2], of_age));
            key.extend(ages);
        }
        let mut live: Vec<_> = self.live.iter().map(|&extent| of_extent(extent)).collect();
        live.sort_unstable();
        key.push(live.len() as u64);
        key.extend(live.into_iter().flatten());
        let mut plans: Vec<Vec<u64>> = self
            .outstanding
            .iter()
            .map(|it| {
                let mut plan: Vec<u64> = Vec::new();
                if let Some((buffer, before)) = &it.buffer {
                    plan.extend(of_extent(*buffer));
                    plan.extend(before.iter().map(|&page| page as u64));
                }
                for (source, target) in it.plan.steps().iter().map(source_and_target) {
                    plan.extend(source.map_or([u64::MAX; 3], of_extent));
                    plan.extend(target.map_or([u64::MAX; 3], of_extent));
                }
                for &(since_us, range, granule) in &it.idle_before {
                    plan.extend([rank_of(range), granule as u64]);
                    plan.extend(of_age(since_us));
                }
                plan
            })
            .collect();
        plans.sort_unstable();
        plans.into_iter().for_each(|plan| {
            key.push(plan.len() as u64);
            key.extend(plan);
        });
        key
    }

    /// All operations in this state.
    fn choices(&self, setup: &Setup) -> Vec<Op> {
        let mut ops: Vec<Op> = (0..self.live.len()).map(Op::Free).collect();
        for (which, outstanding) in self.outstanding.iter().enumerate() {
            ops.push(Op::Finish { which, failed_at: None, lost: false });
            for (at, step) in outstanding.plan.steps().iter().enumerate() {
                ops.push(Op::Finish { which, failed_at: Some(at), lost: false });
                if matches!(step, Step::Remap { .. }) {
                    ops.push(Op::Finish { which, failed_at: Some(at), lost: true });
                }
            }
        }
        let claimed_bytes = self.arena.stats().claimed_bytes;
        let commit_bytes = setup.limit_bytes - claimed_bytes;
        for &pages in setup.sizes {
            for &align_log in setup.alignments {
                for may_decommit_regions in if self.has_regions() { &[true, false][..] } else { &[true] } {
                    let limits = GrowthLimits {
                        commit_bytes,
                        over_bytes: 0,
                        may_decommit_regions: *may_decommit_regions,
                        ..GrowthLimits::UNLIMITED
                    };
                    ops.push(Op::Place { pages, align_log, limits });
                }
            }
        }
        let idle = self.idle();
        if setup.compact_granules > 0 {
            ops.push(Op::Compact { pages: setup.compact_granules * GRANULE_PAGES });
        }
        if idle.iter().any(|(since_us, ..)| since_us + 40 > self.now_us) {
            ops.push(Op::Advance(40));
        }
        ops.push(Op::ReleaseDue);
        let staying = usize::try_from(claimed_bytes / PAGE).unwrap();
        ops.extend([0, staying.saturating_sub(1)].map(Op::ReleaseDownTo));
        ops
    }
}

impl Outstanding {
    fn copied(&self) -> Self {
        let Plan { buffer, ref steps, ref idle_before, claim_bytes, surplus_bytes } = self.plan;
        let plan = Plan { buffer, steps: steps.clone(), idle_before: idle_before.clone(), claim_bytes, surplus_bytes };
        Self { plan, buffer: self.buffer.clone(), idle_before: self.idle_before.clone() }
    }
}

/// Checks every step from every state.
#[allow(clippy::print_stdout)] // How much that was.
fn visit(setup: &Setup) {
    let first = World::with(setup.growth, setup.span_granules, setup.reserve_pages);
    let mut seen = HashSet::from([first.key()]);
    let mut left = vec![first];
    let mut steps = 0;
    while let Some(world) = left.pop() {
        for op in world.choices(setup) {
            let mut after = world.copied();
            after.apply(&op);
            after.compare();
            let claimed_bytes = after.arena.stats().claimed_bytes;
            assert!(claimed_bytes <= setup.limit_bytes, "{op:?} claims {claimed_bytes}");
            steps += 1;
            if after.outstanding.len() <= setup.plans && seen.insert(after.key()) {
                left.push(after);
            }
        }
    }
    println!("{} states, {steps} steps", seen.len());
}

/// The larger setups are for release builds.
fn check(setups: &[Setup]) {
    let few = if cfg!(miri) { 0 } else { 1 };
    for setup in setups.iter().take(if cfg!(debug_assertions) { few } else { usize::MAX }) {
        visit(setup);
    }
}

#[test]
fn all_states_of_an_arena_of_a_few_granules_equal_the_model() {
    const SMALL: Setup = Setup {
        growth: GrowthMode::Granules(GRANULE),
        span_granules: 3,
        reserve_pages: 0,
        sizes: &[4, 8, 12],
        alignments: &[0, 3],
        limit_bytes: 2 * GRANULE,
        plans: 2,
        compact_granules: 0,
    };
    let with_reserve = Setup { reserve_pages: 4, limit_bytes: 2 * GRANULE + 4 * PAGE, plans: 1, ..SMALL };
    let longer = Setup { span_granules: 4, limit_bytes: 3 * GRANULE, plans: 1, ..SMALL };
    check(&[SMALL, with_reserve, longer]);
}

#[test]
fn all_states_of_an_arena_with_a_standing_hole_equal_the_model() {
    const SMALL: Setup = Setup {
        growth: GrowthMode::Granules(GRANULE),
        span_granules: 8,
        reserve_pages: 0,
        sizes: &[GRANULE_PAGES],
        alignments: &[3],
        limit_bytes: 5 * GRANULE,
        plans: 1,
        compact_granules: 3,
    };
    // A hole that is worth a step takes more granules than a debug build has the time for.
    if !cfg!(debug_assertions) {
        visit(&SMALL);
    }
}

#[test]
fn all_states_of_an_arena_of_a_few_regions_equal_the_model() {
    const SMALL: Setup = Setup {
        growth: GrowthMode::Regions,
        span_granules: 0,
        reserve_pages: 0,
        sizes: &[4, 12],
        alignments: &[0],
        limit_bytes: 20 * PAGE,
        plans: 1,
        compact_granules: 0,
    };
    check(&[SMALL, Setup { sizes: &[4, 8, 12], ..SMALL }]);
}
