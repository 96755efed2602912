//! Blocks with copies that may still be running.
//!
//! ```text
//!   insert ──▶ the queue of its stream
//!
//!   stream 1   [a][b][c]   in the order of the copies, which is the order of completion
//!   stream 2   [d]         a slow stream delays only its own copies
//!   unknown    [e]         an item of an unknown stream, or of several, has a separate queue
//!               └─ sweep: removes, under the lock, what loads report as complete;
//!                         queries the other heads without the lock, one queue at a time, and removes what is complete
//!                   └──▶ completed (in the order found), failed ──quarantine──▶ quarantined: queried again at a tick
//! ```
//!
//! The module owns the items in flight. It blocks a caller only in a wait, and it never frees or reuses an item: completed and
//! failed items leave by return value. Two streams with one number cost at most a delay, since each item waits for its own
//! fences.
//!
//! A user may implement a fence, and a query may call a driver. So fences are queried and dropped without a lock: one thread at a
//! time queries a queue, and others skip that queue. The items stay in their queue during a query.
//!
//! Invariants:
//!
//! - **in-flight-I1**: an item completes only after each of its fences returned `Ok(true)`, or `Some(true)` by a load.
//! - **in-flight-I2**: an item with a failed fence is quarantined until that fence answers, because the device may still use it.
//!   A fence that panics has failed permanently.
//! - **in-flight-I3**: an item leaves its queue by its number, which no other item ever has, so the answer of one fence completes
//!   no other item.
//! - **in-flight-I4**: an item is counted exactly while it is in a queue or quarantined: both change under one lock. So the end
//!   of a pool, which checks the count, finds every counted item.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

use crate::error::Error;
use crate::stats::Stats;
use pinpool_os::sync::Mutex;
use pinpool_os::sync::atomic::{AtomicU64, Ordering};
use pinpool_os::unwind::catch_panic;

mod fence;
mod queues;

pub(crate) use fence::{CopyFences, Fences, SharedFence, WorkId, is_complete};
pub use fence::{Fence, StreamId};
use fence::{FenceFailure, are_complete_by_load, discard, query, stream_id_of};
use queues::{Candidate, InFlightState, PendingCopy, Queue};
pub(crate) use queues::{PendingGroup, QueryScope};

/// Items with copies that may still be running, and the fences of these copies.
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    /// Locked while items move. Under the lock a fence is only read by a load (`is_complete_by_load`), and neither queried nor
    /// dropped.
    state: Mutex<InFlightState<T>>,
    /// Number of items in the queues or quarantined (in-flight-I4). Like `quarantined_count`, it is written under the lock and
    /// read without it.
    unreturned: AtomicU64,
    /// Number of quarantined items.
    quarantined_count: AtomicU64,
}

/// The result of a sweep.
#[derive(Debug)]
pub(crate) struct SweepResult<T> {
    /// Items with completed copies, in the order in which they were found. A few items need no allocation.
    pub(crate) completed: SmallVec<[T; 8]>,
    /// Items with copies that may run for an unknown time (in-flight-I2).
    pub(crate) failed: Vec<FailedItem<T>>,
}

/// All items of a pool that ends, after a last query.
#[derive(Debug)]
pub(crate) struct FinalSweep<T> {
    pub(crate) swept: SweepResult<T>,
    /// Items with running copies.
    pub(crate) abandoned: Vec<T>,
    /// Quarantined items with completed copies.
    pub(crate) recovered: Vec<T>,
    /// Items that stay quarantined permanently.
    pub(crate) lost: Vec<T>,
}

/// An item with a fence that failed.
#[derive(Debug)]
pub(crate) struct FailedItem<T> {
    pub(crate) item: T,
    pub(crate) error: Error,
    /// Fences to query again; `None` if that is useless.
    pub(crate) fences: Option<Fences>,
}

impl<T> InFlight<T> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(InFlightState {
                queues: Vec::new(),
                last_number: 0,
                quarantined: VecDeque::new(),
                has_ended: false,
            }),
            unreturned: AtomicU64::new(0),
            quarantined_count: AtomicU64::new(0),
        }
    }

    /// Keeps `item` until all `fences` are complete.
    pub(crate) fn insert(&self, item: T, bytes: u64, fences: Fences, now_us: u64) {
        // If there are several fences, the stream is unknown.
        let stream = if let [fence] = &*fences { stream_id_of(&**fence).map(StreamId::number) } else { None };
        let mut state = self.state.lock();
        state.last_number += 1;
        let number = state.last_number;
        let copy = PendingCopy { number, item, bytes, fences, stream, since_us: now_us, is_reported_stuck: false };
        // A copy of unknown streams gets its own queue: `!number` exceeds the numbers of all streams.
        state.enqueue(stream.unwrap_or(!number), copy);
        // Relaxed, here and below, for the reason given in `count_with_quarantined`.
        self.unreturned.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of items in flight.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        self.count_with_quarantined().saturating_sub(self.quarantined())
    }

    /// Returns the number of items in flight or quarantined.
    #[inline]
    pub(crate) fn count_with_quarantined(&self) -> u64 {
        // Relaxed: a caller that sees an item here and then locks the queues finds the item there, or finds that it has left
        // since.
        self.unreturned.load(Ordering::Relaxed)
    }

    /// Returns the number of quarantined items.
    #[inline]
    pub(crate) fn quarantined(&self) -> u64 {
        // Relaxed: a hint and a statistic.
        self.quarantined_count.load(Ordering::Relaxed)
    }

    /// Returns the bytes in flight.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.lock().queues.iter().flat_map(|queue| &queue.copies).map(|copy| copy.bytes).sum()
    }

    pub(crate) fn fill(&self, stats: &mut Stats) {
        (stats.copies.in_flight, stats.copies.in_flight_bytes) = (self.count(), self.bytes());
        stats.memory.buffers = stats.memory.buffers.saturating_sub(self.quarantined());
    }

    /// Calls `visit` with each item under a lock, so `visit` must not lock or wait.
    pub(crate) fn for_each(&self, visit: impl FnMut(&T)) {
        let state = self.state.lock();
        state.queues.iter().flat_map(|queue| &queue.copies).map(|copy| &copy.item).for_each(visit);
    }

    /// Returns the item that has been in flight longest.
    pub(crate) fn oldest(&self, now_us: u64) -> Option<PendingGroup> {
        let state = self.state.lock();
        let heads = state.queues.iter().filter_map(|queue| queue.copies.front());
        heads.min_by_key(|copy| copy.since_us).map(|copy| copy.to_group(now_us))
    }

    /// Excludes `stopped_us`, for which the process was stopped, from the age of every copy.
    pub(crate) fn discount_pause(&self, stopped_us: u64, now_us: u64) {
        for copy in self.state.lock().queues.iter_mut().flat_map(|queue| &mut queue.copies) {
            copy.since_us = copy.since_us.saturating_add(stopped_us).min(now_us);
        }
    }

    /// Returns the items that have been in flight for `limit` or longer, grouped by stream, and marks them as reported. While a
    /// reported item of a stream is in flight, the other items of that stream are stuck with it and are not reported.
    pub(crate) fn newly_stuck(&self, now_us: u64, limit: Duration) -> Vec<PendingGroup> {
        let mut state = self.state.lock();
        let copies = state.queues.iter().flat_map(|queue| &queue.copies);
        let known: Vec<_> = copies.filter(|copy| copy.is_reported_stuck).filter_map(|copy| copy.stream).collect();
        let mut stuck: Vec<PendingGroup> = Vec::new();
        for copy in state.queues.iter_mut().flat_map(|queue| &mut queue.copies) {
            let group = copy.to_group(now_us);
            let is_known = copy.is_reported_stuck || copy.stream.is_some_and(|stream| known.contains(&stream));
            if is_known || group.age < limit {
                continue;
            }
            copy.is_reported_stuck = true;
            match stuck.iter_mut().find(|other| other.stream == group.stream) {
                Some(other) => {
                    other.buffers += group.buffers;
                    other.bytes += group.bytes;
                    other.age = other.age.max(group.age);
                }
                None => stuck.push(group),
            }
        }
        stuck
    }

    /// Removes and returns the completed and the failed items. Does not query queues that other threads are querying.
    pub(crate) fn sweep(&self, scope: QueryScope) -> SweepResult<T> {
        let mut swept = SweepResult { completed: SmallVec::new(), failed: Vec::new() };
        let (mut fences, mut pending) = (SmallVec::<[Fences; 8]>::new(), SmallVec::<[u64; 4]>::new());
        let mut state = self.state.lock();
        for queue in &mut state.queues {
            while let Some(copy) = queue.copies.front() {
                let known = catch_panic(|| are_complete_by_load(&copy.fences)).flatten();
                if known == Some(true)
                    && let Some(copy) = queue.copies.pop_front()
                {
                    fences.push(copy.fences);
                    swept.completed.push(copy.item);
                    continue;
                }
                let needs_query = scope == QueryScope::All || scope == QueryScope::Undecided && known.is_none();
                pending.extend(needs_query.then_some(queue.key));
                break;
            }
        }
        self.unreturned.fetch_sub(swept.completed.len() as u64, Ordering::Relaxed);
        drop(state);
        fences.into_iter().for_each(discard);
        for key in pending {
            if let Some(first) = self.begin_query(key) {
                self.sweep_queue(key, first, scope, &mut swept);
                self.end_query(key);
            }
        }
        swept
    }

    /// Permits only this thread to query a queue, until [`end_query`](Self::end_query). Returns the first candidate of the queue,
    /// or `None` if the queue is empty or another thread is querying it.
    fn begin_query(&self, key: u64) -> Option<Candidate> {
        let mut state = self.state.lock();
        let queue = state.find(key).filter(|queue| !queue.is_being_queried)?;
        let first = queue.head()?;
        queue.is_being_queried = true;
        Some(first)
    }

    fn end_query(&self, key: u64) {
        if let Some(queue) = self.state.lock().find(key) {
            queue.is_being_queried = false;
        }
    }

    /// Queries a queue after [`begin_query`](Self::begin_query) has returned its `first` candidate. Catches panics of fences.
    fn sweep_queue(&self, key: u64, first: Candidate, scope: QueryScope, swept: &mut SweepResult<T>) {
        let mut next = Some(first);
        while let Some(Candidate { number, fences }) = next {
            let answer = match catch_panic(|| are_complete_by_load(&fences)).flatten() {
                Some(false) if scope == QueryScope::Undecided => Ok(false),
                _ => query(&fences),
            };
            discard(fences);
            if matches!(answer, Ok(false)) {
                return;
            }
            let mut state = self.state.lock();
            // The end of the pool may have removed the queue.
            let Some(queue) = state.find(key) else { return };
            let copy = queue.remove(number);
            next = queue.head();
            self.unreturned.fetch_sub(u64::from(copy.is_some()), Ordering::Relaxed);
            drop(state);
            let Some(PendingCopy { item, fences, .. }) = copy else { continue };
            match answer {
                Ok(_) => swept.completed.push(item),
                Err(FenceFailure { error, is_final: true }) => {
                    swept.failed.push(FailedItem { item, error, fences: None });
                }
                Err(FenceFailure { error, .. }) => {
                    swept.failed.push(FailedItem { item, error, fences: Some(fences) });
                    continue;
                }
            }
            discard(fences);
        }
    }

    /// Removes all items, for the end of a pool. Queries each item, since a completed item may be behind a stuck item of another
    /// stream with the same number. Items in a queue that another thread is querying are abandoned without a query, because that
    /// thread may be blocked in the driver.
    pub(crate) fn end(&self) -> FinalSweep<T> {
        let (recovered, mut lost) = self.query_quarantined(usize::MAX);
        let (queues, quarantined) = {
            let mut state = self.state.lock();
            state.has_ended = true;
            self.unreturned.store(0, Ordering::Relaxed);
            self.quarantined_count.store(0, Ordering::Relaxed);
            (std::mem::take(&mut state.queues), std::mem::take(&mut state.quarantined))
        };
        for (item, fences) in quarantined {
            discard(fences);
            lost.push(item);
        }
        let swept = SweepResult { completed: SmallVec::new(), failed: Vec::new() };
        let mut ended = FinalSweep { swept, abandoned: Vec::new(), recovered, lost };
        for Queue { copies, is_being_queried, .. } in queues {
            for PendingCopy { item, fences, .. } in copies {
                match if is_being_queried { Ok(false) } else { query(&fences) } {
                    Ok(true) => ended.swept.completed.push(item),
                    Ok(false) => ended.abandoned.push(item),
                    Err(failure) => ended.swept.failed.push(FailedItem { item, error: failure.error, fences: None }),
                }
                discard(fences);
            }
        }
        ended
    }

    /// Keeps an item with a failed fence until the fence answers. Returns the item if the pool has ended.
    pub(crate) fn quarantine(&self, item: T, fences: Fences) -> Result<(), T> {
        let mut state = self.state.lock();
        if state.has_ended {
            drop(state);
            discard(fences);
            return Err(item);
        }
        state.quarantined.push_back((item, fences));
        self.unreturned.fetch_add(1, Ordering::Relaxed);
        self.quarantined_count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Queries the fences of at most `max_items` quarantined items again, without a lock. The items count as
    /// quarantined during the query. Returns the items with completed copies, and the items that will not be queried again.
    pub(crate) fn query_quarantined(&self, max_items: usize) -> (Vec<T>, Vec<T>) {
        if self.quarantined() == 0 {
            return Default::default();
        }
        let mut state = self.state.lock();
        let count = max_items.min(state.quarantined.len());
        let queried: Vec<_> = state.quarantined.drain(..count).collect();
        drop(state);
        let (mut recovered, mut lost, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
        for (item, fences) in queried {
            match query(&fences) {
                Ok(true) => recovered.push(item),
                Err(failure) if failure.is_final => lost.push(item),
                _ => {
                    unknown.push((item, fences));
                    continue;
                }
            }
            discard(fences);
        }
        let mut state = self.state.lock();
        if state.has_ended {
            // The counts are 0 since the end of the pool. The items without an answer cannot be quarantined again.
            drop(state);
            for (item, fences) in unknown {
                discard(fences);
                lost.push(item);
            }
        } else {
            let left = (recovered.len() + lost.len()) as u64;
            self.unreturned.fetch_sub(left, Ordering::Relaxed);
            self.quarantined_count.fetch_sub(left, Ordering::Relaxed);
            state.quarantined.extend(unknown);
        }
        (recovered, lost)
    }
}

#[cfg(all(test, pinpool_loom))]
pub(crate) mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::sync::Arc;

    use super::fence::scripted::ScriptedFence;
    use super::queues::KEPT_QUEUES;
    use super::*;

    fn behind<const N: usize>(fences: [Arc<ScriptedFence>; N]) -> Fences {
        fences.into_iter().map(|fence| fence as SharedFence).collect()
    }

    fn completed(in_flight: &InFlight<u32>) -> Vec<u32> {
        in_flight.sweep(QueryScope::Undecided).completed.into_iter().collect()
    }

    fn insert(in_flight: &InFlight<u32>, item: u32, stream: u64) -> Arc<ScriptedFence> {
        let fence = Arc::new(ScriptedFence::on(stream));
        in_flight.insert(item, 10, behind([fence.clone()]), 0);
        fence
    }

    #[test]
    fn quarantined_items_are_queried_again_until_the_end() {
        let in_flight = InFlight::new();
        let broken = [1, 2, 3].map(|item| insert(&in_flight, item, item.into()));
        broken.iter().for_each(|fence| fence.fail());
        for FailedItem { item, fences, .. } in in_flight.sweep(QueryScope::Undecided).failed {
            in_flight.quarantine(item, fences.unwrap()).unwrap();
        }
        assert!(in_flight.query_quarantined(usize::MAX).0.is_empty());
        assert_eq!((in_flight.quarantined(), in_flight.count()), (3, 0));
        broken[1].finish();
        assert!(in_flight.query_quarantined(1).0.is_empty());
        assert_eq!(
            (in_flight.query_quarantined(1).0, in_flight.count_with_quarantined()),
            (vec![2], 2),
            "one after the other"
        );
        broken[0].finish();
        let FinalSweep { recovered, lost, .. } = in_flight.end();
        assert_eq!((recovered, lost), (vec![1], vec![3]));
        assert_eq!((in_flight.count_with_quarantined(), in_flight.quarantined()), (0, 0));
        assert_eq!(in_flight.quarantine(4, behind([broken[2].clone()])), Err(4), "the pool has ended");
    }

    /// A fence that is complete once a stream has reached a number. It must not be queried.
    #[derive(Debug)]
    struct Numbered(Arc<std::sync::atomic::AtomicU64>, u64);

    // SAFETY: guards no memory: the tests' items are numbers.
    #[allow(unsafe_code)]
    unsafe impl Fence for Numbered {
        fn is_complete(&self) -> crate::error::Result<bool> {
            Err(Error::device_failed("queried"))
        }
        fn wait(&self) -> crate::error::Result<()> {
            Ok(())
        }
        fn is_complete_by_load(&self) -> Option<bool> {
            Some(self.0.load(std::sync::atomic::Ordering::Acquire) >= self.1)
        }
    }

    #[test]
    fn a_sweep_queries_no_fence_unless_told_to() {
        let (in_flight, reached) = (InFlight::new(), Arc::new(std::sync::atomic::AtomicU64::new(0)));
        let at = |number| -> SharedFence { Arc::new(Numbered(reached.clone(), number)) };
        (1..=64).for_each(|number| in_flight.insert(number, 1, Fences::from_buf([at(u64::from(number))]), 0));
        let several: Fences = [at(3), at(65)].into_iter().collect();
        in_flight.insert(65, 1, several, 0);
        assert!(completed(&in_flight).is_empty());
        reached.store(64, std::sync::atomic::Ordering::Release);
        assert_eq!(completed(&in_flight), (1..=64).collect::<Vec<_>>());
        assert_eq!((in_flight.count(), in_flight.bytes()), (1, 1));
        let failed = in_flight.sweep(QueryScope::All);
        assert_eq!((failed.completed.len(), failed.failed.len()), (0, 1), "the device has failed");
    }

    #[test]
    fn time_that_the_process_did_not_run_makes_no_copy_old() {
        let in_flight = InFlight::new();
        in_flight.insert(1, 10, behind([Arc::new(ScriptedFence::on(7))]), 1_000);
        in_flight.discount_pause(40_000, 41_200);
        assert_eq!(in_flight.oldest(41_200).map(|group| group.age), Some(Duration::from_micros(200)));
        assert_eq!(in_flight.newly_stuck(41_200, Duration::from_micros(500)), []);
        // A copy that began during the pause has no negative age.
        in_flight.discount_pause(60_000, 50_000);
        assert_eq!(in_flight.oldest(50_000).map(|group| group.age), Some(Duration::ZERO));
    }

    #[test]
    fn a_stuck_copy_is_reported_once_with_its_stream() {
        let in_flight = InFlight::new();
        in_flight.insert(1, 10, behind([7, 1].map(|stream| Arc::new(ScriptedFence::on(stream)))), 1_000);
        in_flight.insert(2, 20, behind([Arc::new(ScriptedFence::on(8))]), 2_000);
        assert!(completed(&in_flight).is_empty());
        let limit = Duration::from_micros(500);
        let first = PendingGroup { buffers: 1, age: limit, stream: None, bytes: 10 };
        assert_eq!(in_flight.newly_stuck(1_499, limit), []);
        assert_eq!(in_flight.newly_stuck(1_500, limit), [first]);
        let second = PendingGroup { buffers: 1, age: limit, stream: Some(8), bytes: 20 };
        assert_eq!(in_flight.newly_stuck(2_500, limit), [second]);
        // A log line for each of many copies would fill the log.
        in_flight.insert(3, 30, behind([Arc::new(ScriptedFence::on(8))]), 2_100);
        assert_eq!(in_flight.newly_stuck(9_000, limit), []);
        assert_eq!(in_flight.oldest(1_500), Some(first));
        // Each copy of an unknown stream is reported. On a known stream, the next copy is reported once the first has completed.
        in_flight.insert(4, 40, behind([7, 1].map(|stream| Arc::new(ScriptedFence::on(stream)))), 8_000);
        assert_eq!(in_flight.newly_stuck(9_000, limit).iter().map(|group| group.bytes).collect::<Vec<_>>(), [40]);
    }

    #[test]
    fn threads_that_find_another_querying_return_at_once() {
        let in_flight = InFlight::new();
        insert(&in_flight, 1, 1).finish();
        insert(&in_flight, 2, 2).finish();
        in_flight.begin_query(1).unwrap();
        assert_eq!(completed(&in_flight), [2], "a queue that another thread queries delays no other");
        assert!(completed(&in_flight).is_empty());
        in_flight.end_query(1);
        assert_eq!(completed(&in_flight), [1]);
    }

    #[test]
    fn empty_queues_are_removed_when_there_are_many() {
        let in_flight = InFlight::new();
        let queues = || in_flight.state.lock().queues.len();
        let kept = KEPT_QUEUES as u64;
        for stream in 0..=kept {
            insert(&in_flight, 0, stream).finish();
            completed(&in_flight);
            assert_eq!(queues() as u64, stream + 1, "few queues are kept for their streams");
        }
        let running = insert(&in_flight, 1, 0);
        insert(&in_flight, 2, 1).finish();
        in_flight.begin_query(1).unwrap();
        in_flight.state.lock().find(1).unwrap().remove(kept + 3).unwrap();
        insert(&in_flight, 3, kept + 1).finish();
        assert_eq!(queues(), 3, "a queue with an item, a queue that a thread queries, and the new one");
        in_flight.end_query(1);
        running.finish();
        assert_eq!(completed(&in_flight), [1, 3]);
    }

    #[test]
    fn an_item_that_was_abandoned_under_a_query_completes_no_other() {
        let in_flight = InFlight::new();
        insert(&in_flight, 1, 1).finish();
        let first = in_flight.begin_query(1).unwrap();
        assert_eq!(in_flight.end().abandoned, [1], "another thread is querying it");
        let later = insert(&in_flight, 2, 1);
        let mut swept = SweepResult { completed: SmallVec::new(), failed: Vec::new() };
        in_flight.sweep_queue(1, first, QueryScope::Undecided, &mut swept);
        assert!(swept.completed.is_empty() && swept.failed.is_empty());
        in_flight.end_query(1);
        later.finish();
        assert_eq!(completed(&in_flight), [2]);
    }

    #[test]
    fn the_end_returns_every_item_in_any_state() {
        let in_flight = InFlight::new();
        let [_stuck, behind, broken, _other] =
            [(1, 1), (2, 1), (3, 1), (4, 2)].map(|(item, stream)| insert(&in_flight, item, stream));
        behind.finish();
        broken.fail();
        assert!(in_flight.oldest(0).is_some());
        let FinalSweep { swept: SweepResult { completed, failed }, abandoned, .. } = in_flight.end();
        assert_eq!((completed.to_vec(), failed[0].item, abandoned), (vec![2], 3, vec![1, 4]));
        assert!(in_flight.oldest(0).is_none());
        assert_eq!((in_flight.count(), in_flight.bytes()), (0, 0));
    }
}
