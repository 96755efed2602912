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
use pinpool_os::unwind::catch_panic;

/// The longest time that a request waits for room.
const WAIT_MAX: Duration = Duration::from_secs(1 << 30);

/// Returns the end of a wait that began at `begun` and lasts for `wait`, at most for [`WAIT_MAX`].
pub(crate) fn deadline(begun: Instant, wait: Duration) -> Instant {
    begun + wait.min(WAIT_MAX)
}

/// Keeps the pool open while a thread searches for memory for a task.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A request, of a thread or a task, that waits.
pub(crate) struct Waiter<S: Server> {
    pub(in crate::engine) request: S::Request,
    pub(in crate::engine) class: Class,
    /// The longest time that the request may wait.
    pub(in crate::engine) wait: Duration,
    pub(in crate::engine) begun: Instant,
    pub(super) deadline: Instant,
    /// Present if a task waits. Keeps the pool of the task open.
    keep_alive: Option<KeepAlive>,
    pub(super) state: Mutex<WaiterState<S>>,
    changed: Condvar,
}

pub(super) struct WaiterState<S: Server> {
    /// When the request joined the queue; `None` while it is deferred.
    pub(super) joined: Option<Instant>,
    /// When the request began, joined or was last woken. Polls become rarer from then on.
    pub(super) polls_since: Instant,
    is_woken: bool,
    /// Whether the wait has ended: the request was served, failed or was cancelled.
    has_ended: bool,
    item: Option<S::Item>,
    /// Whether a return handed the item over.
    was_handed: bool,
    /// The reason that the last attempt failed.
    pub(super) refusal: Option<S::Refusal>,
    /// The waker of the task; `None` from the wake-up until the next poll.
    waker: Option<Waker>,
}

impl<S: Server> Waiter<S> {
    /// Creates the waiter of a request that began at `begun` and waits for at most `wait` for room. The request of a task has a
    /// `keep_alive`, and waits for driver calls even if `wait` is zero.
    pub(in crate::engine) fn new(
        request: S::Request,
        class: Class,
        (begun, wait): (Instant, Duration),
        keep_alive: Option<KeepAlive>,
    ) -> Self {
        let waits_only_for_calls = keep_alive.is_some() && wait.is_zero();
        let deadline = deadline(begun, if waits_only_for_calls { WAIT_MAX } else { wait });
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

    /// Returns the reason that the last attempt failed; `None` until an attempt has failed.
    pub(in crate::engine) fn refusal(&self) -> Option<S::Refusal> {
        self.state.lock().refusal.clone()
    }

    /// Records that the request joins the queue. Returns whether it may: it has neither joined nor ended before. Called under
    /// the lock of the queue, like all changes of the slot.
    pub(super) fn join(&self) -> bool {
        let (now, mut state) = (Instant::now(), self.state.lock());
        let may_join = !state.has_ended && state.joined.is_none();
        (state.joined, state.polls_since) = (state.joined.or(may_join.then_some(now)), now);
        may_join
    }

    /// Ends the wait with `item`, which a return hands over.
    pub(super) fn hand(&self, item: S::Item) {
        let mut state = self.state.lock();
        (state.item, state.was_handed, state.has_ended) = (Some(item), true, true);
    }

    /// Ends the wait, with `item` or without. Returns the item that is not needed, if any: `item`, if the wait had ended before.
    /// But if a return handed over another item while an attempt found `item`, keeps `item`, since the attempt is already
    /// counted, and returns the other item.
    pub(super) fn end(&self, item: Option<S::Item>) -> Option<S::Item> {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.has_ended, true) || item.is_some() && state.item.is_some() {
            state.was_handed = false;
            return std::mem::replace(&mut state.item, item);
        }
        item
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// Takes the item that serves the request, if any. Also returns whether a return handed it over.
    pub(super) fn take(&self) -> (Option<S::Item>, bool) {
        let mut state = self.state.lock();
        (state.item.take(), state.was_handed)
    }

    pub(super) fn polls_since(&self) -> Instant {
        self.state.lock().polls_since
    }

    /// Wakes the thread or task of the request. Calls a waker, so the caller must hold no lock.
    pub(super) fn wake(&self) {
        let mut state = self.state.lock();
        state.is_woken = true;
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_one();
        if let Some(waker) = waker {
            catch_panic(|| waker.wake());
        }
    }

    /// Sleeps until `until`, or until the request is woken. Returns immediately if it was woken since the last sleep.
    pub(super) fn sleep(&self, until: Instant) {
        let mut state = self.state.lock();
        while !state.is_woken && Instant::now() < until {
            (state, _) = self.changed.wait_until(state, until);
        }
        state.is_woken = false;
    }

    /// Sets the waker that the next wake-up wakes. Clones and drops wakers, which is user code, outside the lock.
    pub(super) fn register(&self, waker: &Waker) {
        let waker = waker.clone();
        // The waker is replaced in one step, so that every wake-up finds a waker.
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
            Self::Waiting(ticket) => ticket.server.finish_wait(&ticket, ticket.wait()),
        }
    }
}

/// A request's place in the queue. Dropping the ticket leaves the queue, even while the thread unwinds, and passes on an item
/// that the request was handed.
pub(crate) struct WaitTicket<S: Server> {
    server: Arc<S>,
    pub(in crate::engine) waiter: Arc<Waiter<S>>,
    /// Makes the executor poll the task again at a given time.
    reminder: Option<Reminder>,
}

impl<S: Server> std::fmt::Debug for WaitTicket<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WaitTicket").field("waited", &self.waited()).finish_non_exhaustive()
    }
}

impl<S: Server> WaitTicket<S> {
    /// Appends the request of `waiter`, which was refused with `refusal`, to the queue. Without a refusal, the request is deferred
    /// instead.
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

    /// Returns how long ago the request was made.
    pub(crate) fn age(&self) -> Duration {
        self.waiter.begun.elapsed()
    }

    /// Returns how long ago the request joined the queue; `None` if it never joined.
    pub(in crate::engine) fn waited(&self) -> Option<Duration> {
        self.waiter.state.lock().joined.map(|joined| joined.elapsed())
    }

    /// Blocks the thread until the request is served, its deadline has passed, or waiting cannot help.
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
        // Registered before the slot is read, so that a later item wakes this task.
        waiter.register(context.waker());
        // Cancels the reminder of the last poll.
        self.reminder = None;
        let has_thread = queue.start_thread(server);
        if !has_thread && !waiter.has_ended() {
            queue.search_for_task(server, waiter);
        }
        if Instant::now() >= waiter.deadline || server.is_hopeless(None) {
            // The attempt may be in a driver call that does not return, and the pool may have ended before the waker was
            // registered.
            queue.end(&**server, waiter, None);
        }
        if waiter.has_ended() {
            return Poll::Ready(self.take());
        }
        let at = if has_thread { waiter.deadline } else { queue.next_search(&**server, waiter) };
        // The maintenance thread reminds the task even if the program maintains the pool itself: the program cannot watch
        // deadlines.
        self.reminder = MaintenanceThread::of_process().remind(Some(at), None, context.waker()).ok();
        if self.reminder.is_none() {
            // Without a maintenance thread, the executor must poll again and again.
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Polls the request of a task until it is served or fails.
    pub(crate) fn poll_served(&mut self, context: &mut Context<'_>) -> Poll<Result<S::Item>> {
        let served = ready!(self.poll(context));
        Poll::Ready(self.server.finish_wait(self, served))
    }

    fn take(&self) -> Option<S::Item> {
        let (item, was_handed) = self.waiter.take();
        if was_handed && item.is_some() {
            self.server.on_handover_taken();
        }
        item
    }
}

impl<S: Server> Drop for WaitTicket<S> {
    fn drop(&mut self) {
        let (server, queue) = (&self.server, self.server.queue());
        queue.end(&**server, &self.waiter, None);
        if let (Some(item), _) = self.waiter.take() {
            server.return_unused(item);
        }
        if self.waiter.is_task() {
            // If this was the last task, the thread must end.
            queue.wake_thread();
        }
        if let Some(waited) = self.waited() {
            server.count_wait(waited);
        }
    }
}
