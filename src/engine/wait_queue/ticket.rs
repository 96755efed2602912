//! The place of one request in the wait queue: how its thread or task waits.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::{Server, Waiter};
use crate::maintenance_thread::{MaintenanceThread, Reminder};

/// A place in the queue. Its drop leaves the queue, also while its thread unwinds, and passes on what it was handed.
pub(crate) struct WaitTicket<S: Server> {
    server: Arc<S>,
    pub(super) waiter: Arc<Waiter<S>>,
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
                waiter.set_refusal(refusal);
                queue.join(&**server, &waiter);
            }
            None => queue.state.lock().deferred.push_back(waiter.clone()),
        }
        if waiter.is_task() {
            queue.wake_thread();
        }
        Self { server: server.clone(), waiter, reminder: None }
    }

    pub(in crate::engine) fn server(&self) -> &Arc<S> {
        &self.server
    }

    pub(in crate::engine) fn waiter(&self) -> &Waiter<S> {
        &self.waiter
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
        self.waiter.joined_at().map(|joined| joined.elapsed())
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

    /// What [`wait`](Self::wait) returns, for a task.
    pub(in crate::engine) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let (server, waiter, queue) = (&self.server, &self.waiter, self.server.queue());
        // Before the slot is read: what comes later wakes this task.
        waiter.register(context.waker());
        // The reminder of the last poll.
        self.reminder = None;
        let has_thread = queue.start_thread(server);
        if !has_thread && !waiter.has_ended() {
            queue.search_for_task(server, waiter);
        }
        if Instant::now() >= waiter.deadline {
            // Its attempt may be in a driver call that does not return.
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
