//! Scripted trouble: which call fails at which time, waits how long, or stands at a gate.
//!
//! Owns one plan per function name. Never knows what a call does. `arrive` comes first and counts; `linger` comes when
//! the call has its turn, so a held call of kind `Enqueue` holds everybody up, as a slow one in the real driver does.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::call::lock;
use crate::code::Code;

#[derive(Default)]
struct Plan {
    calls: u64,
    failures: Vec<Failure>,
    delay: Duration,
    held: bool,
    waiting: u64,
}

/// Calls number `first..last` fail.
struct Failure {
    first: u64,
    last: u64,
    code: Code,
}

static PLANS: Mutex<BTreeMap<String, Plan>> = Mutex::new(BTreeMap::new());
static RELEASED: Condvar = Condvar::new();

fn with<R>(name: &str, change: impl FnOnce(&mut Plan) -> R) -> R {
    let mut plans = lock(&PLANS);
    if !plans.contains_key(name) {
        plans.insert(name.to_owned(), Plan::default());
    }
    plans.get_mut(name).map(change).expect("a plan that was just made")
}

/// Counts a call; the code it is to fail with, if any.
pub(crate) fn arrive(name: &'static str) -> Option<Code> {
    with(name, |plan| {
        let number = plan.calls;
        plan.calls += 1;
        plan.failures.iter().find(|failure| (failure.first..failure.last).contains(&number)).map(|failure| failure.code)
    })
}

/// Stands at the gate of this call while it is closed, then sleeps its delay.
pub(crate) fn linger(name: &'static str) {
    let mut plans = lock(&PLANS);
    let mut counted = false;
    let delay = loop {
        let Some(plan) = plans.get_mut(name) else { break Duration::ZERO };
        if !plan.held {
            plan.waiting -= u64::from(counted);
            break plan.delay;
        }
        plan.waiting += u64::from(!counted);
        counted = true;
        RELEASED.notify_all(); // a test may wait for this arrival
        plans = RELEASED.wait(plans).unwrap_or_else(PoisonError::into_inner);
    };
    drop(plans);
    if !delay.is_zero() {
        thread::sleep(delay);
    }
}

/// The `nth` call from now (1 is the next) and the `times - 1` after it fail.
pub(crate) fn fail(name: &str, nth: u64, times: u64, code: Code) {
    with(name, |plan| {
        let first = plan.calls + nth.max(1) - 1;
        plan.failures.push(Failure { first, last: first.saturating_add(times), code });
    });
}

/// Every call sleeps this long when it has its turn.
pub(crate) fn delay(name: &str, by: Duration) {
    with(name, |plan| plan.delay = by);
}

/// Closes or opens the gate of a call.
pub(crate) fn hold(name: &str, held: bool) {
    with(name, |plan| plan.held = held);
    RELEASED.notify_all();
}

/// Returns once `count` calls stand at the gate.
pub(crate) fn wait_for_held(name: &str, count: u64) {
    let mut plans = lock(&PLANS);
    while plans.get(name).is_none_or(|plan| plan.waiting < count) {
        plans = RELEASED.wait(plans).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Calls since the last reset.
pub(crate) fn calls(name: &str) -> u64 {
    lock(&PLANS).get(name).map_or(0, |plan| plan.calls)
}

/// Forgets every script and count and opens every gate. Calls standing at one leave it.
pub(crate) fn reset() {
    for plan in lock(&PLANS).values_mut() {
        let waiting = plan.waiting;
        *plan = Plan { waiting, ..Plan::default() };
    }
    RELEASED.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_counts_from_the_moment_it_is_scripted() {
        assert_eq!(arrive("one"), None);
        fail("one", 2, 1, Code::OUT_OF_MEMORY);
        assert_eq!([arrive("one"), arrive("one"), arrive("one")], [None, Some(Code::OUT_OF_MEMORY), None]);
        fail("one", 1, u64::MAX, Code::UNKNOWN);
        assert_eq!([arrive("one"), arrive("one")], [Some(Code::UNKNOWN); 2]);
        assert_eq!(calls("one"), 6);
    }
}
