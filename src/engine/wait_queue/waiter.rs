//! A waiting request: what it waits for, the slot for what serves it, and how it is woken.

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::Server;
use crate::size_class::Class;
use pinpool_os::sync::{Condvar, Mutex};
use pinpool_os::unwind::caught;

/// Longest wait for room.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(1 << 30);

/// When a request that begins now has waited for `wait`.
pub(crate) fn deadline(wait: Duration) -> Instant {
    Instant::now() + wait.min(WAIT_MAX)
}

/// Keeps the pool open while a thread searches for memory for a task.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A request of a thread or a task that waits.
pub(crate) struct Waiter<S: Server> {
    pub(in crate::engine) request: S::Request,
    pub(in crate::engine) class: Class,
    /// The longest wait.
    pub(in crate::engine) wait: Duration,
    pub(in crate::engine) begun: Instant,
    pub(super) deadline: Instant,
    /// Of a task.
    keep_alive: Option<KeepAlive>,
    state: Mutex<WaiterState<S>>,
    changed: Condvar,
}

struct WaiterState<S: Server> {
    /// When it joined the queue.
    joined: Option<Instant>,
    /// When it began or was last woken: polls become rarer from then on.
    polls_since: Instant,
    is_woken: bool,
    /// It waits no more: it was served, gave up or was cancelled.
    has_ended: bool,
    item: Option<S::Item>,
    /// The item was handed over by a return.
    was_handed: bool,
    /// Why the last attempt failed.
    refusal: Option<S::Refusal>,
    /// The waker of the task, until it is woken.
    waker: Option<Waker>,
}

impl<S: Server> Waiter<S> {
    /// `wait` ends at `deadline`. A task has a `keep_alive`.
    pub(in crate::engine) fn new(
        request: S::Request,
        class: Class,
        (wait, deadline): (Duration, Instant),
        keep_alive: Option<KeepAlive>,
    ) -> Self {
        let begun = Instant::now();
        let state = WaiterState {
            joined: None,
            polls_since: begun,
            is_woken: false,
            has_ended: false,
            item: None,
            was_handed: false,
            refusal: None,
            waker: None,
        };
        Self {
            request,
            class,
            wait,
            begun,
            deadline,
            keep_alive,
            state: Mutex::new(state),
            changed: Condvar::default(),
        }
    }

    pub(super) fn is_task(&self) -> bool {
        self.keep_alive.is_some()
    }

    /// When it joined the queue; `None` while it is deferred.
    pub(super) fn joined_at(&self) -> Option<Instant> {
        self.state.lock().joined
    }

    /// Why the last attempt failed; `None` before the first has.
    pub(in crate::engine) fn refusal(&self) -> Option<S::Refusal> {
        self.state.lock().refusal.clone()
    }

    pub(super) fn set_refusal(&self, refusal: S::Refusal) {
        self.state.lock().refusal = Some(refusal);
    }

    /// It is in the queue from now on; false if it has ended. Only under the lock of the queue, like all changes of the slot.
    pub(super) fn join(&self) -> bool {
        let mut state = self.state.lock();
        state.joined = Some(Instant::now());
        !state.has_ended
    }

    /// A return hands `item` over.
    pub(super) fn hand(&self, item: S::Item) {
        let mut state = self.state.lock();
        (state.item, state.was_handed, state.has_ended) = (Some(item), true, true);
    }

    /// Ends the wait, with `item` or without. Returns what is not needed: `item` if the wait has ended before, or what was handed
    /// over, which is counted when it is taken, while what an attempt finds is counted then.
    pub(super) fn end(&self, item: Option<S::Item>) -> Option<S::Item> {
        let mut state = self.state.lock();
        let is_open = !std::mem::replace(&mut state.has_ended, true);
        if is_open || item.is_some() && state.item.is_some() {
            state.was_handed = false;
            return std::mem::replace(&mut state.item, item);
        }
        item
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// What serves it, and whether a return handed that over.
    pub(super) fn take(&self) -> (Option<S::Item>, bool) {
        let mut state = self.state.lock();
        (state.item.take(), state.was_handed)
    }

    /// Polls become frequent again.
    pub(super) fn restart_polls(&self) {
        self.state.lock().polls_since = Instant::now();
    }

    pub(super) fn polls_since(&self) -> Instant {
        self.state.lock().polls_since
    }

    /// Wakes its thread or task. Calls a waker, so never under a lock.
    pub(super) fn wake(&self) {
        let mut state = self.state.lock();
        state.is_woken = true;
        let waker = state.waker.take();
        drop(state);
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

    /// Wakes this waker from now on. Clones and drops wakers, which is user code, outside of the lock.
    pub(super) fn register(&self, waker: &Waker) {
        let before = self.state.lock().waker.take();
        let same = before.filter(|before| before.will_wake(waker));
        let waker = same.unwrap_or_else(|| waker.clone());
        self.state.lock().waker = Some(waker);
    }
}
