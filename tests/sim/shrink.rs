//! Removes steps from a failing run as long as it still fails.

use crate::scenario::{Scenario, Step};

/// A part of `scenario` that still fails, but would not if any step were removed.
pub(crate) fn shrink(scenario: &Scenario, fails: impl Fn(&Scenario) -> bool) -> Scenario {
    let mut smallest = scenario.clone();
    let mut chunk = smallest.steps.len().div_ceil(2).max(1);
    loop {
        let before = smallest.steps.len();
        let mut at = 0;
        while at < smallest.steps.len() {
            let end = (at + chunk).min(smallest.steps.len());
            let steps: Vec<Step> = [&smallest.steps[..at], &smallest.steps[end..]].concat();
            let part = Scenario { steps, ..smallest };
            if fails(&part) {
                smallest = part;
            } else {
                at = end;
            }
        }
        if chunk > 1 {
            chunk = chunk.div_ceil(2);
        } else if smallest.steps.len() == before {
            return simplified(smallest, fails);
        }
    }
}

/// Makes steps happen immediately if they need not happen inside a call.
fn simplified(mut smallest: Scenario, fails: impl Fn(&Scenario) -> bool) -> Scenario {
    for at in 0..smallest.steps.len() {
        let mut simpler = smallest.clone();
        simpler.steps[at].during = None;
        if simpler != smallest && fails(&simpler) {
            smallest = simpler;
        }
    }
    smallest
}
