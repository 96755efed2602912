//! The state of a wait queue: who waits, in which order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::{Server, Waiter};

pub(super) struct QueueState<S: Server> {
    /// Each with its number in the order of arrival, from 1.
    pub(super) waiters: VecDeque<(u64, Arc<Waiter<S>>)>,
    /// Requests that have ever joined.
    pub(super) joined: u64,
    /// Bytes that passed the head and have not been returned.
    pub(super) passed_bytes: u64,
    /// Tasks with a first attempt that the thread makes.
    pub(super) deferred: VecDeque<Arc<Waiter<S>>>,
    /// The thread runs.
    pub(super) has_thread: bool,
    /// The thread must look before it sleeps.
    pub(super) is_woken: bool,
}

impl<S: Server> QueueState<S> {
    pub(super) fn head(&self) -> Option<&Arc<Waiter<S>>> {
        self.waiters.front().map(|(_, head)| head)
    }

    pub(super) fn head_number(&self) -> Option<u64> {
        self.waiters.front().map(|&(number, _)| number)
    }

    pub(super) fn is_head(&self, waiter: &Arc<Waiter<S>>) -> bool {
        self.head().is_some_and(|head| Arc::ptr_eq(head, waiter))
    }

    pub(super) fn has_tasks(&self) -> bool {
        !self.deferred.is_empty() || self.waiters.iter().any(|(_, waiter)| waiter.is_task())
    }

    pub(super) fn remove(&mut self, waiter: &Arc<Waiter<S>>) {
        self.waiters.retain(|(_, other)| !Arc::ptr_eq(other, waiter));
        self.deferred.retain(|other| !Arc::ptr_eq(other, waiter));
    }

    /// Removes tasks that are late from the front: one that is polled no more must not hold up the others.
    pub(super) fn remove_late(&mut self) {
        while self.head().is_some_and(|head| head.is_task() && Instant::now() >= head.deadline) {
            self.waiters.pop_front();
        }
    }

    pub(super) fn end_pass(&mut self, number: u64, bytes: u64) {
        if self.head_number() == Some(number) {
            self.passed_bytes = self.passed_bytes.saturating_sub(bytes);
        }
    }
}
