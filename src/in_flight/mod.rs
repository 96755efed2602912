//! Blocks whose copies may still be running; each waits for its own fences.
//!
//! ```text
//!   insert ──▶ its stream's queue, or, while another thread holds the lock,
//!              arrivals (lock-free queue) ──┐
//!                                           ▼  sweep: one thread at a time, others return at once
//!   stream 1      [a][b][c]   only the head is queried: copies of a stream end in order
//!   stream 2      [d]         a slow stream delays only its own copies
//!   multi-stream  {e, f}      used on more than one stream: all fences of each are queried
//!                                           └──▶ completed (by value, in the order seen), lost
//! ```
//!
//! The module owns the items in flight. It never blocks a caller that did not ask to wait, and it never frees or reuses an
//! item: completed and lost items leave by return value. Streams are told apart by [`Fence::stream`], a number that a later
//! stream may get again; that costs at most a delay, since each item's own fences are queried.
//!
//! Invariants:
//!
//! - **in-flight-I1**: an item completes only after each of its own fences returned `Ok(true)`.
//! - **in-flight-I2**: an item with a failed fence never completes. It is lost: the device may still be using it.

use std::collections::VecDeque;
use std::time::Duration;

use crossbeam::queue::SegQueue;
use smallvec::SmallVec;

use crate::error::Error;
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicU64, Ordering};

mod fence;

pub(crate) use fence::{CopyFences, Fences, SharedFence};
pub use fence::{Fence, FenceKind, StreamId};

/// After so many sweeps that found the lock taken, threads are known to contend for it.
const CONTENDED_SWEEPS: u64 = 64;
/// Empty queues are removed when there are more than this many; up to here they are kept for their streams.
const KEPT_QUEUES: usize = 16;

/// Items whose copies may still be running, with the fences of these copies.
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    arrivals: SegQueue<PendingCopy<T>>,
    queues: Mutex<StreamQueues<T>>,
    count: AtomicU64,
    /// Sweeps that found another thread sweeping.
    contended_sweeps: AtomicU64,
}

#[derive(Debug)]
struct PendingCopy<T> {
    item: T,
    bytes: u64,
    fences: Fences,
    since_us: u64,
    is_reported_stuck: bool,
}

#[derive(Debug)]
struct StreamQueues<T> {
    /// Searched linearly: programs copy on a few streams.
    by_stream: Vec<StreamQueue<T>>,
    multi_stream: Vec<PendingCopy<T>>,
}

#[derive(Debug)]
struct StreamQueue<T> {
    stream: u64,
    copies: VecDeque<PendingCopy<T>>,
}

/// Items of one stream that have been in flight for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingGroup {
    pub(crate) buffers: u64,
    /// Of the oldest.
    pub(crate) age: Duration,
    /// For an item of several streams, the first stream whose copy is not over.
    pub(crate) stream: u64,
    pub(crate) bytes: u64,
}

/// The result of a sweep.
#[derive(Debug)]
pub(crate) struct Swept<T> {
    /// Items whose copies are over, in the order seen. Most sweeps find one, which needs no allocation.
    pub(crate) completed: SmallVec<[T; 1]>,
    /// Items whose copies may run for an unknown time (in-flight-I2).
    pub(crate) lost: Vec<(T, Error)>,
}

impl<T> InFlight<T> {
    pub(crate) fn new() -> Self {
        Self {
            arrivals: SegQueue::new(),
            queues: Mutex::new(StreamQueues { by_stream: Vec::new(), multi_stream: Vec::new() }),
            count: AtomicU64::new(0),
            contended_sweeps: AtomicU64::new(0),
        }
    }

    /// Keeps `item` until all `fences` are over.
    pub(crate) fn insert(&self, item: T, bytes: u64, fences: Fences, now_us: u64) {
        // Relaxed: the lock or the queue orders the item. Counted before it is visible, so that a sweep never subtracts
        // an item that is not yet counted.
        self.count.fetch_add(1, Ordering::Relaxed);
        let copy = PendingCopy { item, bytes, fences, since_us: now_us, is_reported_stuck: false };
        match self.queues.try_lock() {
            Some(mut queues) => {
                self.enqueue_arrivals(&mut queues);
                queues.enqueue(copy);
            }
            None => self.arrivals.push(copy),
        }
    }

    /// Items in flight.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        // Relaxed: a hint to callers that may skip a sweep, and a statistic.
        self.count.load(Ordering::Relaxed)
    }

    /// Bytes in flight.
    pub(crate) fn bytes(&self) -> u64 {
        let mut queues = self.queues.lock();
        self.enqueue_arrivals(&mut queues);
        let StreamQueues { by_stream, multi_stream } = &*queues;
        by_stream.iter().flat_map(|queue| &queue.copies).chain(multi_stream).map(|copy| copy.bytes).sum()
    }

    /// Do many threads sweep at once?
    pub(crate) fn is_contended(&self) -> bool {
        // Relaxed: a statistic.
        self.contended_sweeps.load(Ordering::Relaxed) >= CONTENDED_SWEEPS
    }

    /// The item that has been in flight for the longest time.
    pub(crate) fn oldest(&self, now_us: u64) -> Option<PendingGroup> {
        let mut queues = self.queues.lock();
        self.enqueue_arrivals(&mut queues);
        let heads = queues.by_stream.iter().filter_map(|queue| queue.copies.front());
        heads.chain(&queues.multi_stream).min_by_key(|copy| copy.since_us).map(|copy| copy.as_group(now_us))
    }

    /// Items in flight for `limit` or longer, grouped by stream, each reported once. Empty if another thread is sweeping.
    pub(crate) fn newly_stuck(&self, now_us: u64, limit: Duration) -> Vec<PendingGroup> {
        let Some(mut queues) = self.queues.try_lock() else { return Vec::new() };
        self.enqueue_arrivals(&mut queues);
        let StreamQueues { by_stream, multi_stream } = &mut *queues;
        let copies = by_stream.iter_mut().flat_map(|queue| &mut queue.copies).chain(multi_stream);
        let mut stuck = Vec::new();
        for copy in copies.filter(|copy| !copy.is_reported_stuck) {
            let group = copy.as_group(now_us);
            if group.age >= limit {
                copy.is_reported_stuck = true;
                // Later copies of a stuck stream are stuck with it: one group for all.
                match stuck.iter_mut().find(|other: &&mut PendingGroup| other.stream == group.stream) {
                    Some(other) => {
                        other.buffers += 1;
                        other.bytes += group.bytes;
                        other.age = other.age.max(group.age);
                    }
                    None => stuck.push(group),
                }
            }
        }
        stuck
    }

    /// Queries the fences and returns the items that are over. Returns nothing at once if another thread is sweeping.
    pub(crate) fn sweep(&self) -> Swept<T> {
        self.sweep_until(Duration::ZERO, |_| false)
    }

    /// A sweep that ends at the first completed item that is `enough`, since each query may be a call of the driver. Waits
    /// at most `patience` for another thread's sweep to end.
    pub(crate) fn sweep_until(&self, patience: Duration, enough: impl Fn(&T) -> bool) -> Swept<T> {
        let mut swept = Swept { completed: SmallVec::new(), lost: Vec::new() };
        let guard = self.queues.try_lock().or_else(|| {
            // Relaxed: a statistic.
            self.contended_sweeps.fetch_add(1, Ordering::Relaxed);
            self.queues.try_lock_for(patience)
        });
        let Some(mut queues) = guard else { return swept };
        self.enqueue_arrivals(&mut queues);
        let StreamQueues { by_stream, multi_stream } = &mut *queues;
        for queue in &mut *by_stream {
            while let Some(head) = queue.copies.front() {
                let state = head.state();
                if let Ok(false) = state {
                    break;
                }
                let is_enough = state.is_ok() && enough(&head.item);
                self.remove(queue.copies.pop_front(), state, &mut swept);
                if is_enough {
                    return swept;
                }
            }
        }
        if by_stream.len() > KEPT_QUEUES {
            by_stream.retain(|queue| !queue.copies.is_empty());
        }
        let mut index = 0;
        while let Some(copy) = multi_stream.get(index) {
            match copy.state() {
                Ok(false) => index += 1,
                over => {
                    let copy = multi_stream.remove(index);
                    self.remove(Some(copy), over, &mut swept);
                }
            }
        }
        swept
    }

    /// All items still in flight, in any state. For the end of a pool, which leaks them.
    pub(crate) fn abandon(&self) -> Vec<T> {
        let mut queues = self.queues.lock();
        self.enqueue_arrivals(&mut queues);
        let mut copies: Vec<_> = queues.by_stream.drain(..).flat_map(|queue| queue.copies).collect();
        copies.append(&mut queues.multi_stream);
        copies.into_iter().map(|copy| copy.item).collect()
    }

    fn enqueue_arrivals(&self, queues: &mut StreamQueues<T>) {
        // Tested first: the arrivals are mostly empty, and the test is cheaper than a pop.
        while !self.arrivals.is_empty() {
            self.arrivals.pop().into_iter().for_each(|copy| queues.enqueue(copy));
        }
    }

    fn remove(&self, copy: Option<PendingCopy<T>>, over: Result<bool, Error>, swept: &mut Swept<T>) {
        let Some(PendingCopy { item, .. }) = copy else { return };
        // Relaxed, as in `insert`.
        self.count.fetch_sub(1, Ordering::Relaxed);
        match over {
            Ok(_) => swept.completed.push(item),
            Err(error) => swept.lost.push((item, error)),
        }
    }
}

impl<T> StreamQueues<T> {
    fn enqueue(&mut self, copy: PendingCopy<T>) {
        let [fence] = copy.fences.as_slice() else { return self.multi_stream.push(copy) };
        let stream = fence.stream();
        match self.by_stream.iter_mut().find(|queue| queue.stream == stream) {
            Some(queue) => queue.copies.push_back(copy),
            None => self.by_stream.push(StreamQueue { stream, copies: VecDeque::from([copy]) }),
        }
    }
}

impl<T> PendingCopy<T> {
    fn as_group(&self, now_us: u64) -> PendingGroup {
        let age = Duration::from_micros(now_us.saturating_sub(self.since_us));
        let fence = match self.fences.as_slice() {
            [only] => Some(only),
            several => several.iter().find(|fence| !matches!(fence.is_done(), Ok(true))).or(several.last()),
        };
        PendingGroup { buffers: 1, age, stream: fence.map_or(0, |fence| fence.stream()), bytes: self.bytes }
    }

    /// Are all fences over? The failure of one outweighs the others (in-flight-I2).
    fn state(&self) -> Result<bool, Error> {
        self.fences.iter().try_fold(true, |over, fence| Ok(fence.is_done()? && over))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::fence::scripted::ScriptedFence;
    use super::*;

    fn behind<const N: usize>(fences: [Arc<ScriptedFence>; N]) -> Fences {
        fences.into_iter().map(|fence| fence as SharedFence).collect()
    }

    fn completed(in_flight: &InFlight<u32>) -> Vec<u32> {
        in_flight.sweep().completed.into_iter().collect()
    }

    fn insert(in_flight: &InFlight<u32>, item: u32, stream: u64) -> Arc<ScriptedFence> {
        let fence = Arc::new(ScriptedFence::on(stream));
        in_flight.insert(item, 10, behind([fence.clone()]), 0);
        fence
    }

    #[test]
    fn a_slow_stream_delays_only_its_own_copies() {
        let in_flight = InFlight::new();
        let slow = insert(&in_flight, 1, 1);
        let behind = insert(&in_flight, 2, 1);
        let other = insert(&in_flight, 3, 2);
        other.finish();
        behind.finish();
        assert_eq!(completed(&in_flight), [3]);
        assert_eq!((in_flight.count(), in_flight.bytes()), (2, 20));
        slow.finish();
        assert_eq!(completed(&in_flight), [1, 2]);
        assert_eq!((in_flight.count(), in_flight.bytes()), (0, 0));
    }

    #[test]
    fn a_sweep_that_has_enough_queries_no_further_fence() {
        let in_flight = InFlight::new();
        let fences = [1, 2, 3].map(|item| insert(&in_flight, item, 1));
        fences.iter().for_each(|fence| fence.finish());
        let swept: Vec<_> = in_flight.sweep_until(Duration::ZERO, |&item| item == 2).completed.into_iter().collect();
        assert_eq!((swept, in_flight.count()), (vec![1, 2], 1));
        assert_eq!(fences.map(|fence| fence.queries()), [1, 1, 0]);
    }

    #[test]
    fn an_item_used_on_two_streams_waits_for_both() {
        let in_flight = InFlight::new();
        let (first, second) = (Arc::new(ScriptedFence::on(1)), Arc::new(ScriptedFence::on(2)));
        in_flight.insert(1, 10, behind([first.clone(), second.clone()]), 0);
        let behind = insert(&in_flight, 2, 1);
        behind.finish();
        second.finish();
        assert_eq!(completed(&in_flight), [2]);
        first.finish();
        assert_eq!(completed(&in_flight), [1]);
    }

    #[test]
    fn a_failed_fence_loses_its_item_and_no_other() {
        let in_flight = InFlight::new();
        let broken = insert(&in_flight, 1, 1);
        insert(&in_flight, 2, 2).finish();
        broken.fail();
        let swept = in_flight.sweep();
        assert_eq!(swept.completed.as_slice(), [2]);
        assert_eq!(swept.lost.len(), 1);
        assert_eq!(in_flight.count(), 0);
    }

    #[test]
    fn a_stuck_copy_is_reported_once_with_its_stream() {
        let in_flight = InFlight::new();
        let done = Arc::new(ScriptedFence::on(1));
        done.finish();
        in_flight.insert(1, 10, behind([done, Arc::new(ScriptedFence::on(7))]), 1_000);
        in_flight.insert(2, 20, behind([Arc::new(ScriptedFence::on(8))]), 2_000);
        let limit = Duration::from_micros(500);
        let first = PendingGroup { buffers: 1, age: limit, stream: 7, bytes: 10 };
        assert_eq!(in_flight.newly_stuck(1_499, limit), []);
        assert_eq!(in_flight.newly_stuck(1_500, limit), [first]);
        let second = PendingGroup { buffers: 1, age: limit, stream: 8, bytes: 20 };
        assert_eq!(in_flight.newly_stuck(2_500, limit), [second]);
        assert_eq!(in_flight.newly_stuck(9_000, limit), []);
        assert_eq!(in_flight.oldest(1_500), Some(first));
    }

    #[test]
    fn copies_behind_a_stuck_one_are_reported_with_it() {
        let in_flight = InFlight::new();
        let _fences = [insert(&in_flight, 1, 1), insert(&in_flight, 2, 1), insert(&in_flight, 3, 2)];
        let age = Duration::from_micros(9);
        let expected =
            [(2, 20, 1), (1, 10, 2)].map(|(buffers, bytes, stream)| PendingGroup { buffers, age, stream, bytes });
        assert_eq!(in_flight.newly_stuck(9, age), expected);
    }

    #[test]
    fn an_item_without_fences_completes_at_once() {
        let in_flight = InFlight::new();
        in_flight.insert(1, 10, Fences::new(), 0);
        assert_eq!(completed(&in_flight), [1]);
    }

    #[test]
    fn threads_that_find_another_sweeping_return_at_once_and_are_counted() {
        let in_flight = InFlight::new();
        insert(&in_flight, 1, 1).finish();
        let sweeping = in_flight.queues.lock();
        for _ in 0..CONTENDED_SWEEPS {
            assert!(!in_flight.is_contended());
            assert!(completed(&in_flight).is_empty());
        }
        assert!(in_flight.is_contended());
        drop(sweeping);
        assert_eq!(completed(&in_flight), [1]);
    }

    #[test]
    fn abandon_returns_every_item_in_any_state() {
        let in_flight = InFlight::new();
        let _fences = [insert(&in_flight, 1, 1), insert(&in_flight, 2, 2)];
        assert!(in_flight.oldest(0).is_some());
        assert_eq!(in_flight.abandon().len(), 2);
        assert!(in_flight.oldest(0).is_none());
    }
}
