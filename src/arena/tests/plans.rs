//! What a plan says about its steps, and which of its remaps lost their source.

use crate::arena::*;

fn extent(granule: u64, granules: u64) -> Extent {
    Extent::new(ArenaPtr::new(0, granule * 4096), granules * 4096)
}

#[test]
fn a_plan_knows_its_surplus_and_whether_it_decommits() {
    let commits = [Step::Commit { extent: extent(0, 2) }, Step::Commit { extent: extent(4, 3) }];
    let others = [Step::Remap { from: extent(8, 5), to: extent(16, 5) }, Step::Decommit { extent: extent(30, 9) }];
    let plan =
        |steps: Vec<Step>| Plan { buffer: None, steps, idle_before: Vec::new(), claim_bytes: 0, surplus_bytes: 4096 };
    let figures = |plan: Plan| (plan.surplus_bytes(), plan.decommits());
    assert_eq!(figures(plan(commits.to_vec())), (4096, false));
    assert_eq!(figures(plan(others.to_vec())), (4096, true));
    assert_eq!(commits.iter().chain(&others).map(Step::remapped_bytes).collect::<Vec<_>>(), [0, 0, 5 * 4096, 0]);
}

#[test]
fn only_the_remaps_named_lost_their_source() {
    let lost = |outcome: PlanOutcome| (0..5).filter(|&step| outcome.has_lost(step)).collect::<Vec<_>>();
    assert_eq!(lost(PlanOutcome::Lost { done: 1, remaps: 2 }), [1, 2]);
    assert!(lost(PlanOutcome::Failed { done: 1 }).is_empty() && lost(PlanOutcome::Done).is_empty());
}

#[test]
fn an_extent_contains_what_lies_between_its_ends() {
    let whole = extent(4, 4);
    let inside = [(4, 4), (4, 1), (7, 1), (3, 2), (7, 2), (3, 6), (0, 2), (9, 1)];
    let contained = inside.map(|(granule, granules)| whole.contains(extent(granule, granules)));
    assert_eq!(contained, [true, true, true, false, false, false, false, false]);
}
