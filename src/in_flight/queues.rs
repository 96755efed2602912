//! The queues of items in flight: one for each stream, and one for each item of an unknown stream. This module only moves items
//! and calls no fence.

use std::collections::VecDeque;
use std::time::Duration;

use super::fence::Fences;

/// Number of queues up to which empty queues are kept for their streams. If there are more, empty queues are removed.
pub(super) const KEPT_QUEUES: usize = 16;

#[derive(Debug)]
pub(super) struct PendingCopy<T> {
    pub(super) number: u64,
    pub(super) item: T,
    pub(super) bytes: u64,
    pub(super) fences: Fences,
    pub(super) stream: Option<u64>,
    pub(super) since_us: u64,
    pub(super) is_reported_stuck: bool,
}

#[derive(Debug)]
pub(super) struct InFlightState<T> {
    /// Searched linearly: programs copy on a few streams.
    pub(super) queues: Vec<Queue<T>>,
    pub(super) last_number: u64,
    /// Items with a failed fence, the item queried longest ago first.
    pub(super) quarantined: VecDeque<(T, Fences)>,
    /// Whether the pool has ended. Then no fence is queried again.
    pub(super) has_ended: bool,
}

/// The items of one stream in the order of their copies, or one item of an unknown stream.
#[derive(Debug)]
pub(super) struct Queue<T> {
    /// The number of the stream, or a unique number for an item of an unknown stream. Two streams with equal numbers cost at most
    /// a delay.
    pub(super) key: u64,
    pub(super) copies: VecDeque<PendingCopy<T>>,
    pub(super) is_being_queried: bool,
}

/// Which fences a sweep queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryScope {
    /// No fences: the sweep removes only items that loads report as complete. It calls no driver and takes no other lock.
    LoadsOnly,
    /// Fences for which a load has no answer.
    Undecided,
    /// All fences, to detect a failed device.
    All,
}

/// An item to query.
pub(super) struct Candidate {
    pub(super) number: u64,
    pub(super) fences: Fences,
}

/// Items of one stream that have been in flight for a long time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingGroup {
    pub(crate) buffers: u64,
    /// Age of the oldest item.
    pub(crate) age: Duration,
    /// `None` if the stream is unknown, as for an item with several fences.
    pub(crate) stream: Option<u64>,
    pub(crate) bytes: u64,
}

impl<T> InFlightState<T> {
    pub(super) fn find(&mut self, key: u64) -> Option<&mut Queue<T>> {
        self.queues.iter_mut().find(|queue| queue.key == key)
    }

    pub(super) fn enqueue(&mut self, key: u64, copy: PendingCopy<T>) {
        if let Some(queue) = self.find(key) {
            return queue.copies.push_back(copy);
        }
        if self.queues.len() > KEPT_QUEUES {
            self.queues.retain(|queue| queue.is_being_queried || !queue.copies.is_empty());
        }
        self.queues.push(Queue { key, copies: VecDeque::from([copy]), is_being_queried: false });
    }
}

impl<T> Queue<T> {
    /// Returns the item to query next.
    pub(super) fn head(&self) -> Option<Candidate> {
        self.copies.front().map(|copy| Candidate { number: copy.number, fences: copy.fences.clone() })
    }

    /// Removes and returns the head if it has this number.
    pub(super) fn remove(&mut self, number: u64) -> Option<PendingCopy<T>> {
        if self.copies.front()?.number == number { self.copies.pop_front() } else { None }
    }
}

impl<T> PendingCopy<T> {
    pub(super) fn to_group(&self, now_us: u64) -> PendingGroup {
        let age = Duration::from_micros(now_us.saturating_sub(self.since_us));
        PendingGroup { buffers: 1, age, stream: self.stream, bytes: self.bytes }
    }
}
