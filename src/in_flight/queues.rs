//! The queues of items in flight: one per stream, and one per item of an unknown stream. Moves items and calls no fence.

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
    pub(super) stream: Option<u64>,
    pub(super) since_us: u64,
    pub(super) is_reported_stuck: bool,
}

#[derive(Debug)]
pub(super) struct Queues<T> {
    /// Searched linearly: programs copy on a few streams.
    pub(super) queues: Vec<Queue<T>>,
    pub(super) last_number: u64,
    /// Items with a failed fence, the one queried longest ago first.
    pub(super) quarantined: VecDeque<(T, Fences)>,
    /// The pool has ended, and nothing is queried again.
    pub(super) has_ended: bool,
}

/// The items of one stream in the order of their copies, or one item of an unknown stream.
#[derive(Debug)]
pub(super) struct Queue<T> {
    /// The number of the stream, or a unique number for an item of an unknown stream. Equal numbers cost a delay at most.
    pub(super) key: u64,
    pub(super) copies: VecDeque<PendingCopy<T>>,
    pub(super) is_claimed: bool,
}

/// Which fences a sweep queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryScope {
    /// None: the sweep calls nothing and takes no lock of others.
    Nothing,
    /// Those without an answer by a load.
    Unknown,
    /// All, to detect a failed device.
    All,
}

/// The number of an item, and its fences.
pub(super) type Candidate = (u64, Fences);

/// Items of one stream that have been in flight for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingGroup {
    pub(crate) buffers: u64,
    /// Age of the oldest item.
    pub(crate) age: Duration,
    /// `None` if it is unknown, or there are several.
    pub(crate) stream: Option<u64>,
    pub(crate) bytes: u64,
}

impl<T> Queues<T> {
    pub(super) fn find(&mut self, key: u64) -> Option<&mut Queue<T>> {
        self.queues.iter_mut().find(|queue| queue.key == key)
    }

    pub(super) fn enqueue(&mut self, key: u64, copy: PendingCopy<T>) {
        if let Some(queue) = self.find(key) {
            return queue.copies.push_back(copy);
        }
        if self.queues.len() > KEPT_QUEUES {
            self.queues.retain(|queue| queue.is_claimed || !queue.copies.is_empty());
        }
        self.queues.push(Queue { key, copies: VecDeque::from([copy]), is_claimed: false });
    }
}

impl<T> Queue<T> {
    /// The next item to query.
    pub(super) fn head(&self) -> Option<Candidate> {
        self.copies.front().map(|copy| (copy.number, copy.fences.clone()))
    }

    /// Takes the head out, if it has this number.
    pub(super) fn remove(&mut self, number: u64) -> Option<PendingCopy<T>> {
        if self.copies.front()?.number == number { self.copies.pop_front() } else { None }
    }
}

impl<T> PendingCopy<T> {
    pub(super) fn as_group(&self, now_us: u64) -> PendingGroup {
        let age = Duration::from_micros(now_us.saturating_sub(self.since_us));
        PendingGroup { buffers: 1, age, stream: self.stream, bytes: self.bytes }
    }
}
