//! The one thread that runs host functions.
//!
//! The driver may serialise the host functions of all streams (its manual), so one that waits holds up those of other
//! streams. They run in the order in which the work before them ended.

use std::collections::VecDeque;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;

use crate::call::Outcome;
use crate::code::Code;
use crate::op::HostFunction;
use crate::sync::lock;

struct Job {
    function: HostFunction,
    argument: usize,
    done: Arc<(Mutex<bool>, Condvar)>,
}

static JOBS: Mutex<VecDeque<Job>> = Mutex::new(VecDeque::new());
static ARRIVED: Condvar = Condvar::new();

fn work() {
    loop {
        let mut jobs = lock(&JOBS);
        let job = loop {
            match jobs.pop_front() {
                Some(job) => break job,
                None => jobs = ARRIVED.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(jobs);
        (job.function)(ptr::with_exposed_provenance_mut(job.argument));
        *lock(&job.done.0) = true;
        job.done.1.notify_all();
    }
}

/// Runs a host function behind those that came before it, and waits until it has returned.
pub(crate) fn run(function: HostFunction, argument: usize) -> Outcome {
    static STARTED: OnceLock<bool> = OnceLock::new();
    let start = || thread::Builder::new().name("host functions".to_owned()).spawn(work).is_ok();
    if !STARTED.get_or_init(start) {
        return Err(Code::OUT_OF_MEMORY);
    }
    let done = Arc::new((Mutex::new(false), Condvar::new()));
    lock(&JOBS).push_back(Job { function, argument, done: done.clone() });
    ARRIVED.notify_one();
    let mut is_done = lock(&done.0);
    while !*is_done {
        is_done = done.1.wait(is_done).unwrap_or_else(PoisonError::into_inner);
    }
    Ok(())
}
