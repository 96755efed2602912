//! A waiting request: its parameters, the slot for the item that serves it, and the wait of its thread or task.

use std::any::Any;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use super::Server;
use crate::error::Result;
use crate::maintenance_thread::{MaintenanceThread, Reminder};
use crate::size_class::Class;
use pinpool_os::sync::{Condvar, Mutex};
use pinpool_os::unwind::caught;

/// The longest wait for room.
const WAIT_MAX: Duration = Duration::from_secs(1 << 30);

/// The end of a wait of `wait` that began at `begun`.
pub(crate) fn deadline(begun: Instant, wait: Duration) -> Instant {
    begun + wait.min(WAIT_MAX)
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
    /// Present if a task waits: keeps its pool open.
    keep_alive: Option<KeepAlive>,
    pub(super) state: Mutex<WaiterState<S>>,
    changed: Condvar,
}

pub(super) struct WaiterState<S: Server> {
    /// When it joined the queue; `None` while it is deferred.
    pub(super) joined: Option<Instant>,
    /// When it began, joined or was last woken: polls become rarer from then on.
    pub(super) polls_since: Instant,
    is_woken: bool,
    /// The wait has ended: the request was served, failed or was cancelled.
    has_ended: bool,
    item: Option<S::Item>,
    /// The item was handed over by a return.
    was_handed: bool,
    /// Why the last attempt failed.
    pub(super) refusal: Option<S::Refusal>,
    /// The waker of the task, until it is woken.
    waker: Option<Waker>,
}

impl<S: Server> Waiter<S> {
    /// Began at `begun`, and waits at most `wait` for room. A task has a `keep_alive`, and waits for driver calls in any case.
    pub(in crate::engine) fn new(
        request: S::Request,
        class: Class,
        (begun, wait): (Instant, Duration),
        keep_alive: Option<KeepAlive>,
    ) -> Self {
        let needs_no_room = keep_alive.is_some() && wait.is_zero();
        let deadline = deadline(begun, if needs_no_room { WAIT_MAX } else { wait });
        let state = Mutex::new(WaiterState {
            joined: None,
            polls_since: begun,
            is_woken: false,
            has_ended: false,
            item: None,
            was_handed: false,
            refusal: None,
            waker: None,
        });
        Self { request, class, wait, begun, deadline, keep_alive, state, changed: Condvar::default() }
    }

    pub(super) fn is_task(&self) -> bool {
        self.keep_alive.is_some()
    }

    /// Why the last attempt failed; `None` before the first has.
    pub(in crate::engine) fn refusal(&self) -> Option<S::Refusal> {
        self.state.lock().refusal.clone()
    }

    /// Records that the request joins the queue. Returns false if it had joined or ended before. Called under the lock of the
    /// queue, like all changes of the slot.
    pub(super) fn join(&self) -> bool {
        let (now, mut state) = (Instant::now(), self.state.lock());
        let may_join = !state.has_ended && state.joined.is_none();
        (state.joined, state.polls_since) = (state.joined.or(may_join.then_some(now)), now);
        may_join
    }

    /// A return hands `item` over.
    pub(super) fn hand(&self, item: S::Item) {
        let mut state = self.state.lock();
        (state.item, state.was_handed, state.has_ended) = (Some(item), true, true);
    }

    /// Ends the wait, with `item` or without. Returns the item that is not needed: `item` if the wait has ended before, or an
    /// item that a return handed over while an attempt found `item`, which is counted already.
    pub(super) fn end(&self, item: Option<S::Item>) -> Option<S::Item> {
        let mut state = self.state.lock();
        let open = !std::mem::replace(&mut state.has_ended, true);
        if open || item.is_some() && state.item.is_some() {
            state.was_handed = false;
            return std::mem::replace(&mut state.item, item);
        }
        item
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// The item that serves it, and whether a return handed it over.
    pub(super) fn take(&self) -> (Option<S::Item>, bool) {
        let mut state = self.state.lock();
        (state.item.take(), state.was_handed)
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
        let waker = waker.clone();
        // In one step, so that every wake-up finds a waker.
        let _before = self.state.lock().waker.replace(waker);
    }
}

/// The outcome of the first attempt of a request.
#[derive(Debug)]
pub(crate) enum FirstAttempt<S: Server> {
    Served(S::Item),
    Waiting(WaitTicket<S>),
}

impl<S: Server> FirstAttempt<S> {
    /// Blocks the thread until the request is served or fails.
    pub(crate) fn wait(self) -> Result<S::Item> {
        match self {
            Self::Served(item) => Ok(item),
            Self::Waiting(ticket) => ticket.server.end_wait(&ticket, ticket.wait()),
        }
    }
}

/// A place in the queue. The drop leaves the queue, also while its thread unwinds, and passes on an item that it was handed.
pub(crate) struct WaitTicket<S: Server> {
    server: Arc<S>,
    pub(in crate::engine) waiter: Arc<Waiter<S>>,
    /// Has the task polled again.
    reminder: Option<Reminder>,
}

impl<S: Server> std::fmt::Debug for WaitTicket<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WaitTicket").field("waited", &self.waited()).finish_non_exhaustive()
    }
}

impl<S: Server> WaitTicket<S> {
    /// Joins the queue behind all others, refused for this reason; without one it is deferred.
    pub(in crate::engine) fn new(server: &Arc<S>, waiter: Waiter<S>, refusal: Option<S::Refusal>) -> Self {
        let (waiter, queue) = (Arc::new(waiter), server.queue());
        match refusal {
            Some(refusal) => {
                waiter.state.lock().refusal = Some(refusal);
                queue.join(&**server, &waiter);
            }
            None => queue.state.lock().deferred.push_back(waiter.clone()),
        }
        if waiter.is_task() {
            queue.wake_thread();
        }
        Self { server: server.clone(), waiter, reminder: None }
    }

    pub(crate) fn request(&self) -> &S::Request {
        &self.waiter.request
    }

    /// How long ago the request was made.
    pub(crate) fn age(&self) -> Duration {
        self.waiter.begun.elapsed()
    }

    /// How long it has been in the queue, if it was.
    pub(in crate::engine) fn waited(&self) -> Option<Duration> {
        self.waiter.state.lock().joined.map(|joined| joined.elapsed())
    }

    /// Blocks the thread until it is served, its deadline has passed, or waiting cannot help.
    pub(in crate::engine) fn wait(&self) -> Option<S::Item> {
        let queue = self.server.queue();
        loop {
            queue.search(&self.server, &self.waiter);
            if self.waiter.has_ended() {
                return self.take();
            }
            self.waiter.sleep(queue.next_search(&*self.server, &self.waiter));
        }
    }

    /// Does for a task what [`wait`](Self::wait) does for a thread.
    pub(in crate::engine) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let (server, waiter, queue) = (&self.server, &self.waiter, self.server.queue());
        // Before the slot is read, so that a later item wakes this task.
        waiter.register(context.waker());
        // The reminder of the last poll.
        self.reminder = None;
        let has_thread = queue.start_thread(server);
        if !has_thread && !waiter.has_ended() {
            queue.search_for_task(server, waiter);
        }
        if Instant::now() >= waiter.deadline || server.is_hopeless(None) {
            // The attempt may be in a driver call that does not return, and a close may have come before the waker.
            queue.end(&**server, waiter, None);
        }
        if waiter.has_ended() {
            return Poll::Ready(self.take());
        }
        let at = if has_thread { waiter.deadline } else { queue.next_search(&**server, waiter) };
        // Also if the program alone polls the pool: a deadline is not the program's to watch.
        self.reminder = MaintenanceThread::of_process().remind(Some(at), None, context.waker()).ok();
        if self.reminder.is_none() {
            // There is no thread: the executor polls again and again.
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Polls the request of a task until it is served or fails.
    pub(crate) fn poll_served(&mut self, context: &mut Context<'_>) -> Poll<Result<S::Item>> {
        let served = ready!(self.poll(context));
        Poll::Ready(self.server.end_wait(self, served))
    }

    fn take(&self) -> Option<S::Item> {
        let (item, was_handed) = self.waiter.take();
        if was_handed && item.is_some() {
            self.server.record_taken();
        }
        item
    }
}

impl<S: Server> Drop for WaitTicket<S> {
    fn drop(&mut self) {
        let (server, queue) = (&self.server, self.server.queue());
        queue.end(&**server, &self.waiter, None);
        if let (Some(item), _) = self.waiter.take() {
            server.take_back(item);
        }
        if self.waiter.is_task() {
            // It may have been the last one.
            queue.wake_thread();
        }
        if let Some(waited) = self.waited() {
            server.record_wait(waited);
        }
    }
}
