//! The wait queue: requests of threads and tasks that wait for room, served in order of arrival.
//!
//! ```text
//!   queue:  [head] ── handed a returned buffer, or served by an attempt ──▶ leaves, wakes the next
//!           [second] [third] ...    timed out, cancelled, unwound ──▶ leaves, wakes the next
//! ```
//!
//! While a request waits:
//!
//! - A returned buffer of the head's class is handed to the head. A buffer of another class does not become idle; its memory
//!   makes room for the head.
//! - A buffer that was idle before the queue formed may serve one more hit of its class.
//! - A request that finds no idle buffer joins the queue. It may overtake the head only if it fits in addition to the head: all
//!   bytes that have overtaken the head and are not yet returned must fit into the room that the limit leaves next to the head's
//!   request. So the head is served, at the latest, when all buffers that were in use or idle when it became the head have been
//!   returned.
//! - Of the waiting requests, only the head searches for memory, so small requests cannot overtake a large request forever.
//!
//! A waiting thread searches for memory itself. The thread `pinpool-get` searches for tasks: the first waiting task starts it,
//! and it ends when no task waits. A task that needs a driver call first is *deferred*: the thread makes the first
//! attempt before the request joins the queue. If no thread is available, and in a simulation, the polls of the tasks search
//! for memory.
//!
//! While no request waits, hits and returns on the fast path do not read the queue: the slow-path flag in the lock of their
//! shard is enough. Other returns pay one load ([`WaitQueue::has_waiters`]). Each pool has one queue. Each partition has
//! another, in which requests wait for their claim before they join the queue of the pool. This module owns the order. It never
//! acquires memory, which is the task of the [`Server`].
//!
//! - **waiters-I1**: no wake-up is lost. A return after a request has joined finds the request, or the request's next search
//!   finds the buffer. `has_waiters` describes the exception, and `longest_sleep` bounds each sleep. The end of a copy wakes no
//!   request, so the start of a copy wakes the head of the queue, which polls at short intervals while copies are in flight.
//! - **waiters-I2**: a request that leaves the queue, for any reason, wakes the next head, and passes on an item that it was
//!   handed.
//! - **waiters-I3**: nothing is handed to a request that has left the queue: both happen under the lock of the queue.
//! - **waiters-I4**: the slow path is required while the queue has a request: [`WaitQueue::change`] notifies the pool.

mod waiter;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use self::waiter::{FirstAttempt, KeepAlive, WaitTicket, Waiter, deadline};
use crate::maintenance_thread::MaintenanceThread;
use crate::size_class::Class;
use pinpool_os::sync::atomic::{AtomicUsize, Ordering};
use pinpool_os::sync::{Condvar, Mutex};
use pinpool_os::threads;
use pinpool_os::unwind::catch_panic;

/// Shortest time that an attempt may wait for other threads' driver calls.
const SEARCH_TIME_MIN: Duration = Duration::from_micros(500);

/// The pool or partition behind a queue.
pub(crate) trait Server: Sized + Send + Sync + 'static {
    /// A request.
    type Request: Send + Sync;
    /// The item that serves a request.
    type Item: Send;
    /// The reason that a request was not served.
    type Refusal: Clone + Send;

    fn queue(&self) -> &WaitQueue<Self>;

    /// Called when the queue gets its first request or loses its last: each return must check the queue while `is_waiting`. The
    /// lock of the queue is held, so the call must neither lock the queue nor call user code.
    fn on_waiting_changed(&self, is_waiting: bool);

    /// Finishes the returns that are ready, such as returns of buffers with completed copies.
    fn sweep(&self);

    /// Serves the head, or a deferred request, which has no refusal yet. Waits for other threads' driver calls until `until`.
    fn serve(self: &Arc<Self>, waiter: &Waiter<Self>, until: Instant) -> Result<Self::Item, Self::Refusal>;

    /// Records the refusal of a deferred request, and returns whether the request may wait.
    fn admit(self: &Arc<Self>, _waiter: &Waiter<Self>, _refusal: &Self::Refusal) -> bool {
        true
    }

    /// Finishes a request that has stopped waiting. Returns `item` if present, and otherwise a substitute, such as pageable
    /// memory, or an error.
    fn finish_wait(self: &Arc<Self>, ticket: &WaitTicket<Self>, item: Option<Self::Item>) -> crate::Result<Self::Item>;

    /// Takes back an item that its request cannot use any more: the request was dropped, or another item serves it.
    fn return_unused(&self, _item: Self::Item) {}

    /// Returns the longest sleep of the head, because memory may return without a wake-up. The head joined or was last woken at
    /// `since`.
    fn longest_sleep(&self, since: Instant) -> Duration;

    /// Returns whether waiting cannot help any request. With the `refusal` of its last search: whether waiting cannot help the
    /// head.
    fn is_hopeless(&self, refusal: Option<&Self::Refusal>) -> bool;

    /// Called when a request takes the item that a return had handed to it.
    fn on_handover_taken(&self) {}

    /// Records that a request has left the queue, which it joined `waited` ago.
    fn count_wait(&self, _waited: Duration) {}
}

/// A queue of waiting requests.
pub(crate) struct WaitQueue<S: Server> {
    /// Number of waiting requests. Written under the lock of the queue.
    waiting: AtomicUsize,
    state: Mutex<QueueState<S>>,
    /// Wakes the thread that serves tasks.
    changed: Condvar,
    may_start_thread: bool,
}

struct QueueState<S: Server> {
    /// The waiting requests, each with its number in the order of arrival, from 1.
    waiters: VecDeque<(u64, Arc<Waiter<S>>)>,
    /// Number of requests that have ever joined: a statistic, and the number of the last request that joined.
    joined: u64,
    /// Bytes that overtook the head and have not been returned.
    overtaking_bytes: u64,
    /// Tasks that wait for the thread to make their first attempt.
    deferred: VecDeque<Arc<Waiter<S>>>,
    /// Whether the thread that serves tasks runs.
    has_thread: bool,
    /// Whether the thread must search before it sleeps.
    is_woken: bool,
}

impl<S: Server> WaitQueue<S> {
    /// Creates an empty queue. Without `may_start_thread`, the polls of tasks search for memory.
    pub(super) fn new(may_start_thread: bool) -> Self {
        Self {
            waiting: AtomicUsize::new(0),
            state: Mutex::new(QueueState {
                waiters: VecDeque::new(),
                joined: 0,
                overtaking_bytes: 0,
                deferred: VecDeque::new(),
                has_thread: false,
                is_woken: false,
            }),
            changed: Condvar::default(),
            may_start_thread,
        }
    }

    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        // SeqCst, with the store in `change`: a waiter that this load misses joined after the load, so its search sees the
        // return that came before the load. The exception: the store of that return may still be in a store buffer, unless the
        // return took a lock that the search also takes. The longest sleep covers this rare case, which is cheaper than a
        // barrier in every return.
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Returns the number of requests that have ever joined the queue, and the number that wait now.
    pub(super) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.joined, state.waiters.len() as u64)
    }

    /// Returns the bytes of each waiting request, in the order of the queue.
    pub(super) fn waiting_bytes(&self) -> Vec<u64> {
        if !self.has_waiters() {
            return Vec::new();
        }
        self.state.lock().waiters.iter().map(|(_, waiter)| waiter.class.bytes as u64).collect()
    }

    /// Returns the total time that the waiting requests have waited so far.
    pub(super) fn total_waited(&self, now: Instant) -> Duration {
        let waited = |since| now.saturating_duration_since(since);
        self.state.lock().waiters.iter().filter_map(|(_, waiter)| waiter.state.lock().joined).map(waited).sum()
    }

    /// Excludes `stopped`, for which the process was stopped, from the waiting time of each request.
    pub(super) fn discount_pause(&self, stopped: Duration) {
        for (_, waiter) in &self.state.lock().waiters {
            let mut state = waiter.state.lock();
            state.joined = state.joined.map(|joined| Instant::now().min(joined + stopped));
        }
    }

    /// Changes the queue. Tells the pool if the queue has become empty or non-empty, and wakes a new head.
    fn change<R>(&self, server: &S, change: impl FnOnce(&mut QueueState<S>) -> R) -> R {
        let mut state = self.state.lock();
        let head_before = state.head_number();
        let result = change(&mut state);
        let head = state.head_number();
        // SeqCst: a return that follows a search by a request that has joined sees the request.
        self.waiting.store(state.waiters.len(), Ordering::SeqCst);
        if head.is_some() != head_before.is_some() {
            server.on_waiting_changed(head.is_some());
        }
        let mut next = None;
        if head != head_before {
            // Buffers of requests that overtook the previous head are in use like any others for the new head.
            state.overtaking_bytes = 0;
            next = state.head().filter(|_| head_before.is_some()).cloned();
        }
        drop(state);
        if let Some(next) = next {
            self.wake(&next);
        }
        result
    }

    /// Makes `waiter` check again, on its own thread or on the thread that serves tasks. May call a waker, so the caller must hold
    /// no lock.
    fn wake(&self, waiter: &Waiter<S>) {
        waiter.state.lock().polls_since = Instant::now();
        if !waiter.is_task() || !self.wake_thread() {
            waiter.wake();
        }
    }

    /// Wakes the thread that serves tasks. Returns whether there is one.
    fn wake_thread(&self) -> bool {
        let mut state = self.state.lock();
        state.is_woken = true;
        let has_thread = state.has_thread;
        drop(state);
        self.changed.notify_one();
        has_thread
    }

    /// Appends `waiter` to the queue, unless its wait has already ended.
    fn join(&self, server: &S, waiter: &Arc<Waiter<S>>) {
        self.change(server, |state| {
            state.deferred.retain(|other| !Arc::ptr_eq(other, waiter));
            if waiter.join() {
                state.joined += 1;
                state.waiters.push_back((state.joined, waiter.clone()));
            }
        });
    }

    /// Ends the wait of `waiter`, with `item` or without. An item that is left over is returned to the pool.
    fn end(&self, server: &S, waiter: &Arc<Waiter<S>>, item: Option<S::Item>) {
        let left = self.change(server, |state| {
            state.waiters.retain(|(_, other)| !Arc::ptr_eq(other, waiter));
            state.deferred.retain(|other| !Arc::ptr_eq(other, waiter));
            waiter.end(item)
        });
        if let Some(item) = left {
            server.return_unused(item);
        }
    }

    /// Searches for memory for `waiter` if it is the head or deferred. Ends the wait if the request is served or late, or if
    /// waiting cannot help.
    fn search(&self, server: &Arc<S>, waiter: &Arc<Waiter<S>>) {
        if waiter.has_ended() {
            return;
        }
        let is_deferred = waiter.state.lock().joined.is_none();
        if !is_deferred && self.is_head(server, waiter) {
            // The sweep hands a returned item to the head, which may be this request.
            server.sweep();
        }
        let searched = is_deferred || self.is_head(server, waiter);
        if searched {
            // A short time, so that the request soon finds an item that it is handed during the sleep.
            let longest = server.longest_sleep(waiter.polls_since()).max(SEARCH_TIME_MIN);
            match server.serve(waiter, waiter.deadline.min(Instant::now() + longest)) {
                Ok(item) => return self.end(server, waiter, Some(item)),
                Err(refusal) if !is_deferred => waiter.state.lock().refusal = Some(refusal),
                Err(refusal) => {
                    let admitted = !waiter.has_ended() && server.admit(waiter, &refusal);
                    waiter.state.lock().refusal = Some(refusal);
                    if admitted {
                        self.join(server, waiter);
                        return self.search(server, waiter);
                    }
                    return self.end(server, waiter, None);
                }
            }
        }
        // Without a search now, an old refusal is not decisive: other threads may have returned memory since.
        let refusal = waiter.refusal().filter(|_| searched);
        if Instant::now() >= waiter.deadline || server.is_hopeless(refusal.as_ref()) {
            self.end(server, waiter, None);
        }
    }

    /// Returns whether `waiter` is the head, after late tasks at the front were removed from the queue.
    fn is_head(&self, server: &S, waiter: &Arc<Waiter<S>>) -> bool {
        self.change(server, |state| {
            state.remove_late();
            state.head().is_some_and(|head| Arc::ptr_eq(head, waiter))
        })
    }

    /// Returns when to search for `waiter` again if it is not woken. For the head that is soon, since room may appear without a
    /// wake-up. For another request it is the deadline of the head, since the searches of other requests remove late tasks.
    fn next_search(&self, server: &S, waiter: &Arc<Waiter<S>>) -> Instant {
        let soon = Instant::now() + server.longest_sleep(waiter.polls_since());
        let state = self.state.lock();
        let head = state.head().filter(|head| !Arc::ptr_eq(head, waiter)).map(|head| head.deadline);
        // A head that is a late thread is about to leave, so search soon.
        head.filter(|&late| late > Instant::now()).unwrap_or(soon).min(waiter.deadline)
    }

    /// Starts the thread that serves tasks, unless it runs. Returns whether it runs; if not, the polls of the tasks must
    /// search.
    fn start_thread(&self, server: &Arc<S>) -> bool {
        if !self.may_start_thread || std::mem::replace(&mut self.state.lock().has_thread, true) {
            return self.may_start_thread;
        }
        let of_thread = server.clone();
        let started = threads::spawn(c"pinpool-get", move || of_thread.queue().serve_tasks(&of_thread)).is_ok();
        if !started {
            self.state.lock().has_thread = false;
        }
        started
    }

    /// Runs the thread: serves tasks until no task waits.
    fn serve_tasks(&self, server: &Arc<S>) {
        let mut for_head = false;
        loop {
            let Some(entered) = MaintenanceThread::of_process().enter() else {
                // The process has begun to exit. The thread calls and wakes nothing more, and its end does not drop the pool.
                return std::mem::forget(server.clone());
            };
            let mut state = self.state.lock();
            state.is_woken = false;
            if state.deferred.is_empty() && !state.waiters.iter().any(|(_, waiter)| waiter.is_task()) {
                state.has_thread = false;
                return;
            }
            let is_deferred = !state.deferred.is_empty();
            // Alternates: deferred tasks that overtake the head must not keep it from being served.
            for_head = !for_head;
            let (head, first) = (state.head().filter(|head| head.is_task()), state.deferred.front());
            let task = if for_head { head.or(first) } else { first.or(head) }.cloned();
            drop(state);
            if let Some(task) = &task {
                self.search_for_task(server, task);
                if task.has_ended() {
                    task.wake();
                }
            }
            let until = task.as_ref().map(|task| self.next_search(&**server, task));
            // The task may have the last reference to the pool.
            drop(task);
            drop(entered);
            if !is_deferred {
                self.sleep(until);
            }
        }
    }

    /// Searches for memory for a task. A panic ends the wait of the task.
    fn search_for_task(&self, server: &Arc<S>, task: &Arc<Waiter<S>>) {
        if catch_panic(|| self.search(server, task)).is_none() {
            self.end(&**server, task, None);
        }
    }

    /// Sleeps until `until`, or until the thread is woken. Returns immediately if it was woken since it began its last search.
    fn sleep(&self, until: Option<Instant>) {
        let mut state = self.state.lock();
        while !state.is_woken && until.is_none_or(|until| Instant::now() < until) {
            state = match until {
                Some(until) => self.changed.wait_until(state, until).0,
                None => self.changed.wait(state),
            };
        }
    }

    /// Offers a returned item to the head. Returns the item if the head is of another class, or if no request waits.
    pub(super) fn offer(&self, server: &S, item: S::Item, class: Class) -> Option<S::Item> {
        let mut item = Some(item);
        let served = self.change(server, |state| {
            state.remove_late();
            let head = state.head().filter(|head| head.class == class)?;
            head.hand(item.take()?);
            state.waiters.pop_front()
        });
        if let Some((_, head)) = served {
            head.wake();
        }
        item
    }

    /// Permits a request to search for memory. Returns 0 if no request waits, or the number of the head if the request overtakes
    /// it. Given the class of the head, `bytes_next_to` returns the bytes that the limit leaves next to the head, and the bytes
    /// that the request needs. Otherwise fails with the number of waiting requests and the bytes of the head.
    pub(super) fn try_overtake(&self, bytes_next_to: impl FnOnce(Class) -> (u64, u64)) -> Result<u64, (u64, u64)> {
        let mut state = self.state.lock();
        let Some(&(number, ref head)) = state.waiters.front() else { return Ok(0) };
        let (room_bytes, needed_bytes) = bytes_next_to(head.class);
        let behind = (state.waiters.len() as u64, head.class.bytes as u64);
        let overtaking_bytes = state.overtaking_bytes.checked_add(needed_bytes);
        state.overtaking_bytes = overtaking_bytes.filter(|&sum| needed_bytes > 0 && sum <= room_bytes).ok_or(behind)?;
        Ok(number)
    }

    /// Ends the overtaking of a request for `bytes` that has overtaken the head `overtaken`: the request found no memory, or has returned its buffer.
    pub(super) fn end_overtaking(&self, overtaken: u64, bytes: u64) {
        let mut state = self.state.lock();
        if state.head_number() == Some(overtaken) {
            state.overtaking_bytes = state.overtaking_bytes.saturating_sub(bytes);
        }
    }

    /// Wakes all waiting requests, so that they check again.
    pub(super) fn wake_all(&self) {
        let state = self.state.lock();
        let all: Vec<_> = state.waiters.iter().map(|(_, waiter)| waiter).chain(&state.deferred).cloned().collect();
        drop(state);
        for waiter in all {
            self.wake(&waiter);
            // Tasks are woken directly, too, because the thread that serves them may be in a driver call.
            waiter.wake();
        }
    }

    /// Wakes the head, so that it checks again.
    pub(super) fn wake_head(&self) {
        let head = self.state.lock().head().cloned();
        if let Some(head) = head {
            self.wake(&head);
        }
    }
}

impl<S: Server> QueueState<S> {
    fn head(&self) -> Option<&Arc<Waiter<S>>> {
        self.waiters.front().map(|(_, head)| head)
    }

    fn head_number(&self) -> Option<u64> {
        self.waiters.front().map(|&(number, _)| number)
    }

    /// Removes late tasks from the front: a task that is no longer polled must not block other requests.
    fn remove_late(&mut self) {
        while self.head().is_some_and(|head| head.is_task() && Instant::now() >= head.deadline) {
            self.waiters.pop_front();
        }
    }
}

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
