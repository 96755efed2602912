//! Counts, scripted failures and gates of driver calls, in one table by the name of the function.
//!
//! `count_call` runs before the call takes the enqueue lock, `wait_at_gate` after it: a held call of kind `Enqueue` blocks the enqueues
//! of all threads, as a slow call of the real driver does.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex};

use crate::code::Code;
use crate::sync::{lock, wait};

#[derive(Default)]
struct Function {
    /// Number of calls since the last reset.
    calls: u64,
    /// Calls with these numbers, from 0, fail with this code.
    failures: Vec<(Range<u64>, Code)>,
    held: bool,
    waiting: u64,
}

static FUNCTIONS: Mutex<BTreeMap<String, Function>> = Mutex::new(BTreeMap::new());
static RELEASED: Condvar = Condvar::new();

fn with<R>(name: &str, change: impl FnOnce(&mut Function) -> R) -> R {
    change(lock(&FUNCTIONS).entry(name.to_owned()).or_default())
}

/// Counts a call; returns the code that it must fail with, if any.
pub(crate) fn count_call(name: &str) -> Option<Code> {
    with(name, |function| {
        let number = function.calls;
        function.calls += 1;
        function.failures.iter().find(|(numbers, _)| numbers.contains(&number)).map(|&(_, code)| code)
    })
}

/// Waits at the gate of this function while it is closed.
pub(crate) fn wait_at_gate(name: &str) {
    let mut functions = lock(&FUNCTIONS);
    let mut counted = false;
    while let Some(function) = functions.get_mut(name) {
        if !function.held {
            function.waiting -= u64::from(counted);
            return;
        }
        function.waiting += u64::from(!counted);
        counted = true;
        RELEASED.notify_all(); // A test may wait for this arrival.
        functions = wait(&RELEASED, functions);
    }
}

/// Fails the `nth` call from now (1 is the next) and the `times - 1` after it.
pub(crate) fn fail(name: &str, nth: u64, times: u64, code: Code) {
    with(name, |function| {
        let first = function.calls + nth.max(1) - 1;
        function.failures.push((first..first.saturating_add(times), code));
    });
}

/// Closes or opens the gate of a function.
pub(crate) fn hold(name: &str, held: bool) {
    with(name, |function| function.held = held);
    RELEASED.notify_all();
}

/// Returns once `count` calls wait at the gate.
pub(crate) fn wait_for_held(name: &str, count: u64) {
    let mut functions = lock(&FUNCTIONS);
    while functions.get(name).is_none_or(|function| function.waiting < count) {
        functions = wait(&RELEASED, functions);
    }
}

/// Returns the number of calls since the last reset.
pub(crate) fn calls(name: &str) -> u64 {
    with(name, |function| function.calls)
}

/// Returns the functions called since the last reset, with their number of calls, by name.
pub(crate) fn all_calls() -> Vec<(String, u64)> {
    let functions = lock(&FUNCTIONS);
    let calls = functions.iter().map(|(name, function)| (name.clone(), function.calls));
    calls.filter(|&(_, calls)| calls > 0).collect()
}

/// Removes every script and count and opens every gate.
pub(crate) fn reset() {
    for function in lock(&FUNCTIONS).values_mut() {
        *function = Function { waiting: function.waiting, ..Function::default() };
    }
    RELEASED.notify_all();
}
