//! The queues of items in flight: one for each stream, and one for the items of several streams. Moves items and calls no
//! fence.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

use super::fence::{Fences, known_by_load};

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
    /// Items with a fence that failed; those that were asked longest ago come first.
    pub(super) failed: VecDeque<(T, Fences)>,
    /// The pool has ended, and nothing is asked again.
    pub(super) has_ended: bool,
}

/// The items of one stream in the order of their copies, or all items of several streams.
#[derive(Debug)]
pub(super) struct Queue<T> {
    pub(super) key: QueueKey,
    pub(super) copies: VecDeque<PendingCopy<T>>,
    pub(super) is_claimed: bool,
}

/// Which fences a sweep asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// None: the sweep calls nothing and takes no lock of others.
    Nothing,
    /// Those of which loads say nothing.
    Unknown,
    /// All, so that a device that failed is noticed.
    All,
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
        self.queues.push(Queue { key, copies: VecDeque::from([copy]), is_claimed: false });
    }

    /// Takes out the items whose fences say by loads that they are over: of a stream all before the first that does not.
    pub(super) fn take_completed(&mut self) -> SmallVec<[PendingCopy<T>; 4]> {
        let is_over = |copy: &PendingCopy<T>| known_by_load(&copy.fences) == Some(true);
        let mut completed = SmallVec::new();
        for queue in &mut self.queues {
            match queue.key {
                QueueKey::Stream(_) => {
                    while queue.copies.front().is_some_and(is_over) {
                        completed.extend(queue.copies.pop_front());
                    }
                }
                QueueKey::MultiStream => {
                    let mut at = 0;
                    while at < queue.copies.len() {
                        match is_over(&queue.copies[at]) {
                            true => completed.extend(queue.copies.remove(at)),
                            false => at += 1,
                        }
                    }
                }
            }
        }
        completed
    }

    /// The queues to be asked, those of one stream first: those with items of which loads say nothing, or all with items.
    pub(super) fn pending_keys(&self, ask: Ask) -> impl Iterator<Item = QueueKey> + '_ {
        let is_asked = move |copy: &PendingCopy<T>| match ask {
            Ask::Nothing => false,
            Ask::Unknown => known_by_load(&copy.fences).is_none(),
            Ask::All => true,
        };
        let pending = self.queues.iter().filter(move |queue| match queue.key {
            QueueKey::Stream(_) => queue.copies.front().is_some_and(is_asked),
            QueueKey::MultiStream => queue.copies.iter().any(is_asked),
        });
        let pending = pending.map(|queue| queue.key);
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
