//! One waiting get: what it waits for, what it was handed, and how it is woken.

use std::task::Waker;
use std::time::Instant;

use crate::size_class::Class;
use pinpool_os::sync::{Condvar, Mutex};
use pinpool_os::unwind::caught;

/// One waiting get.
#[derive(Debug)]
pub(super) struct Waiter<T> {
    /// Its number in the order of arrival, from 1.
    pub(super) number: u64,
    pub(super) class: Class,
    pub(super) deadline: Instant,
    pub(super) begun: Instant,
    state: Mutex<WaiterState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct WaiterState<T> {
    is_woken: bool,
    /// When it joined or was last woken.
    since: Instant,
    /// Handed over by a put. Then this is in the line no more.
    handed: Option<T>,
    /// A task waits here, not a thread.
    is_task: bool,
    /// The waker of the task, until it is woken.
    waker: Option<Waker>,
}

impl<T> Waiter<T> {
    pub(super) fn new(number: u64, class: Class, deadline: Instant) -> Self {
        let begun = Instant::now();
        let state = WaiterState { is_woken: false, since: begun, handed: None, is_task: false, waker: None };
        Self { number, class, deadline, begun, state: Mutex::new(state), changed: Condvar::default() }
    }

    /// Only under the lock of the line: one that leaves the line finds what it was handed before.
    pub(super) fn hand(&self, item: T) {
        self.state.lock().handed = Some(item);
    }

    pub(super) fn take_handed(&self) -> Option<T> {
        self.state.lock().handed.take()
    }

    /// Lets it look again. Calls a waker, so call it outside of every lock.
    pub(super) fn wake(&self) {
        let waker = {
            let mut state = self.state.lock();
            (state.is_woken, state.since) = (true, Instant::now());
            state.waker.take()
        };
        self.changed.notify_one();
        if let Some(waker) = waker {
            caught(|| waker.wake());
        }
    }

    /// Returns when woken, at once if that happened since the last sleep, or at `until`.
    pub(super) fn sleep(&self, until: Instant) {
        let mut state = self.state.lock();
        while !state.is_woken && Instant::now() < until {
            (state, _) = self.changed.wait_until(state, until);
        }
        state.is_woken = false;
    }

    /// When it joined or was last woken.
    pub(super) fn since(&self) -> Instant {
        self.state.lock().since
    }

    /// Wakes this waker from now on. Clones and drops wakers, which is code of the user, outside of the lock.
    pub(super) fn register(&self, waker: &Waker) {
        let before = self.state.lock().waker.take();
        let same = before.filter(|before| before.will_wake(waker));
        let waker = same.unwrap_or_else(|| waker.clone());
        let mut state = self.state.lock();
        state.is_task = true;
        state.waker = Some(waker);
    }

    /// Whether a task waits here, not a thread.
    pub(super) fn is_task(&self) -> bool {
        self.state.lock().is_task
    }
}
