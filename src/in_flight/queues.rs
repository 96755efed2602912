//! The queues of items in flight: one for each stream, and one for the items of several streams. Moves items and calls no
//! fence.

use std::collections::VecDeque;
use std::time::Duration;

use super::fence::Fences;

/// Empty queues are removed when there are more than this many; up to here they are kept for their streams.
pub(super) const KEPT_QUEUES: usize = 16;

#[derive(Debug)]
pub(super) struct PendingCopy<T> {
    pub(super) number: u64,
    pub(super) item: T,
    pub(super) bytes: u64,
    pub(super) fences: Fences,
    /// For an item of several streams, the first whose copy was not over when last queried.
    pub(super) stream: u64,
    pub(super) since_us: u64,
    pub(super) is_reported_stuck: bool,
}

#[derive(Debug)]
pub(super) struct Queues<T> {
    /// Searched linearly: programs copy on a few streams.
    pub(super) queues: Vec<Queue<T>>,
    pub(super) last_number: u64,
    /// Threads that wait for the claim of another.
    pub(super) waiting: usize,
}

/// The items of one stream in the order of their copies, or all items of several streams.
#[derive(Debug)]
pub(super) struct Queue<T> {
    pub(super) key: QueueKey,
    pub(super) copies: VecDeque<PendingCopy<T>>,
    pub(super) is_claimed: bool,
    /// How often it was claimed.
    pub(super) claims: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueKey {
    Stream(u64),
    MultiStream,
}

/// The number of an item, and its fences.
pub(super) type Candidate = (u64, Fences);

/// Items of one stream that have been in flight for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingGroup {
    pub(crate) buffers: u64,
    /// Age of the oldest item.
    pub(crate) age: Duration,
    /// For an item of several streams, the first stream whose copy was not over at the last sweep.
    pub(crate) stream: u64,
    pub(crate) bytes: u64,
}

impl<T> Queues<T> {
    pub(super) fn find(&mut self, key: QueueKey) -> Option<&mut Queue<T>> {
        self.queues.iter_mut().find(|queue| queue.key == key)
    }

    pub(super) fn enqueue(&mut self, key: QueueKey, copy: PendingCopy<T>) {
        if let Some(queue) = self.find(key) {
            return queue.copies.push_back(copy);
        }
        if self.queues.len() > KEPT_QUEUES {
            self.queues.retain(|queue| queue.is_claimed || !queue.copies.is_empty());
        }
        self.queues.push(Queue { key, copies: VecDeque::from([copy]), is_claimed: false, claims: 0 });
    }

    /// The queues with items, those of one stream first.
    pub(super) fn pending_keys(&self) -> impl Iterator<Item = QueueKey> + '_ {
        let pending = self.queues.iter().filter(|queue| !queue.copies.is_empty()).map(|queue| queue.key);
        let (multi, single) = (QueueKey::MultiStream, pending.clone().filter(|&key| key != QueueKey::MultiStream));
        single.chain(pending.filter(move |&key| key == multi))
    }
}

impl<T> Queue<T> {
    /// What is to be queried after the item with this number: of one stream the head.
    pub(super) fn candidate_after(&self, number: u64) -> Option<Candidate> {
        let copy = match self.key {
            QueueKey::Stream(_) => self.copies.front(),
            QueueKey::MultiStream => self.copies.iter().find(|copy| copy.number > number),
        };
        copy.map(|copy| (copy.number, copy.fences.clone()))
    }

    pub(super) fn position(&self, number: u64) -> Option<usize> {
        self.copies.iter().position(|copy| copy.number == number)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<PendingCopy<T>> {
        self.position(number).and_then(|index| self.copies.remove(index))
    }

    pub(super) fn note_waiting(&mut self, number: u64, stream: u64) {
        if let Some(copy) = self.position(number).and_then(|index| self.copies.get_mut(index)) {
            copy.stream = stream;
        }
    }
}

impl<T> PendingCopy<T> {
    pub(super) fn as_group(&self, now_us: u64) -> PendingGroup {
        let age = Duration::from_micros(now_us.saturating_sub(self.since_us));
        PendingGroup { buffers: 1, age, stream: self.stream, bytes: self.bytes }
    }
}
