//! Scripted failures and gates of driver calls.
//!
//! Owns a plan and a count for each function. `count_call` runs before the call takes the enqueue lock, `wait_at_gate` after it: a
//! held call of kind `Enqueue` blocks the enqueues of all threads, as a slow call of the real driver does.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, Once};

use crate::code::Code;
use crate::sync::{lock, wait};

/// A driver function and its number of calls.
pub(crate) struct Site {
    name: &'static str,
    calls: AtomicU64,
    listed: Once,
}

impl Site {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, calls: AtomicU64::new(0), listed: Once::new() }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }
}

#[derive(Default)]
struct Plan {
    failures: Vec<Failure>,
    held: bool,
    waiting: u64,
}

/// Calls number `first..last` fail.
struct Failure {
    first: u64,
    last: u64,
    code: Code,
}

/// Functions called at least once.
static SITES: Mutex<Vec<&'static Site>> = Mutex::new(Vec::new());
static PLANS: Mutex<BTreeMap<String, Plan>> = Mutex::new(BTreeMap::new());
static RELEASED: Condvar = Condvar::new();
/// Set if there has been a plan since the last reset.
static SCRIPTED: AtomicBool = AtomicBool::new(false);

fn with<R>(name: &str, change: impl FnOnce(&mut Plan) -> R) -> R {
    let mut plans = lock(&PLANS);
    // Relaxed: a call that starts concurrently may miss the plan; a test orders later calls after this one.
    SCRIPTED.store(true, Ordering::Relaxed);
    change(plans.entry(name.to_owned()).or_default())
}

fn is_scripted() -> bool {
    SCRIPTED.load(Ordering::Relaxed)
}

/// Counts a call; returns the code that it must fail with, if any.
pub(crate) fn count_call(site: &'static Site) -> Option<Code> {
    site.listed.call_once(|| lock(&SITES).push(site));
    // Relaxed: a count that publishes nothing.
    let number = site.calls.fetch_add(1, Ordering::Relaxed);
    if !is_scripted() {
        return None;
    }
    let plans = lock(&PLANS);
    let failures = &plans.get(site.name)?.failures;
    failures.iter().find(|failure| (failure.first..failure.last).contains(&number)).map(|failure| failure.code)
}

/// Waits at the gate of this call while it is closed.
pub(crate) fn wait_at_gate(site: &'static Site) {
    if !is_scripted() {
        return;
    }
    let mut plans = lock(&PLANS);
    let mut counted = false;
    while let Some(plan) = plans.get_mut(site.name) {
        if !plan.held {
            plan.waiting -= u64::from(counted);
            return;
        }
        plan.waiting += u64::from(!counted);
        counted = true;
        RELEASED.notify_all(); // A test may wait for this arrival.
        plans = wait(&RELEASED, plans);
    }
}

/// Fails the `nth` call from now (1 is the next) and the `times - 1` after it.
pub(crate) fn fail(name: &str, nth: u64, times: u64, code: Code) {
    let calls = calls(name);
    with(name, |plan| {
        let first = calls + nth.max(1) - 1;
        plan.failures.push(Failure { first, last: first.saturating_add(times), code });
    });
}

/// Closes or opens the gate of a call.
pub(crate) fn hold(name: &str, held: bool) {
    with(name, |plan| plan.held = held);
    RELEASED.notify_all();
}

/// Returns once `count` calls wait at the gate.
pub(crate) fn wait_for_held(name: &str, count: u64) {
    let mut plans = lock(&PLANS);
    while plans.get(name).is_none_or(|plan| plan.waiting < count) {
        plans = wait(&RELEASED, plans);
    }
}

/// Calls since the last reset.
pub(crate) fn calls(name: &str) -> u64 {
    let sites = lock(&SITES);
    sites.iter().filter(|site| site.name == name).map(|site| site.calls.load(Ordering::Relaxed)).sum()
}

/// The functions called since the last reset, with their number of calls, by name.
pub(crate) fn all_calls() -> Vec<(String, u64)> {
    let count = |site: &&'static Site| (site.name.to_owned(), site.calls.load(Ordering::Relaxed));
    let mut calls: Vec<_> = lock(&SITES).iter().map(count).filter(|&(_, calls)| calls > 0).collect();
    calls.sort_unstable();
    calls
}

/// Removes every script and count and opens every gate.
pub(crate) fn reset() {
    lock(&SITES).iter().for_each(|site| site.calls.store(0, Ordering::Relaxed));
    let mut plans = lock(&PLANS);
    for plan in plans.values_mut() {
        let waiting = plan.waiting;
        *plan = Plan { waiting, ..Plan::default() };
    }
    SCRIPTED.store(false, Ordering::Relaxed);
    RELEASED.notify_all();
}
