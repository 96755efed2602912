//! Buffers that a device may still be reading; each waits on its fences.
//!
//! ```text
//!   arrive ──▶ its line, or, while another thread is at the lines,
//!              arrivals (queue, no lock) ──┐
//!                                          ▼  sweep: one thread at a time, the others pass by
//!   stream 1   [a][b][c]   only the head is asked: copies of a stream end in order
//!   stream 2   [d]         a slow stream holds back nobody but itself, and who gets its number when it is gone
//!   several    {e, f}      used on more than one stream: each is asked about all its fences
//!                                          └──▶ completed (by value, in the order seen), lost
//! ```
//!
//! Never blocks a caller that did not ask to wait; never frees or reuses anything itself. Invariants:
//!
//! 1. An item lands only after every one of its fences has said that it is over; in line, too, each is asked itself.
//! 2. An item with a fence that failed never lands: it is lost, for nobody knows what the device still reads.

use std::collections::VecDeque;
use std::time::Duration;

use crossbeam::queue::SegQueue;

use crate::error::Error;
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicU64, Ordering};

mod fence;
mod few;

pub(crate) use fence::{CopyFences, SharedFence};
pub use fence::{Fence, StreamId};
pub(crate) use few::Few;

/// So often one thread found another asking: not by chance.
const CROWD: u64 = 64;
/// StreamQueues of more streams than this are closed when they are empty; the others keep their room.
const OPEN_LINES: usize = 16;

/// Items on their way, with the fences they wait on.
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    arrivals: SegQueue<PendingCopy<T>>,
    lines: Mutex<StreamQueues<T>>,
    count: AtomicU64,
    passed_by: AtomicU64,
}

#[derive(Debug)]
struct PendingCopy<T> {
    item: T,
    bytes: u64,
    fences: Few<SharedFence>,
    since_us: u64,
    is_known_stuck: bool,
}

#[derive(Debug)]
struct StreamQueues<T> {
    /// Searched from the front: programs copy on a few streams.
    by_stream: Vec<StreamQueue<T>>,
    several: Vec<PendingCopy<T>>,
}

#[derive(Debug)]
struct StreamQueue<T> {
    stream: u64,
    flights: VecDeque<PendingCopy<T>>,
}

/// Items of one stream that have waited for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingGroup {
    pub(crate) buffers: u64,
    /// Of the oldest.
    pub(crate) age: Duration,
    /// Of several streams, the first whose copy is not over.
    pub(crate) stream: u64,
    pub(crate) bytes: u64,
}

/// What a sweep found.
#[derive(Debug)]
pub(crate) struct Swept<T> {
    /// Copies over, in the order seen.
    pub(crate) completed: Few<T>,
    /// Copies whose end nobody will know.
    pub(crate) lost: Vec<(T, Error)>,
}

impl<T> Swept<T> {
    const NOTHING: Self = Self { completed: Few::NONE, lost: Vec::new() };
}

impl<T> InFlight<T> {
    pub(crate) fn new() -> Self {
        Self {
            arrivals: SegQueue::new(),
            lines: Mutex::new(StreamQueues { by_stream: Vec::new(), several: Vec::new() }),
            count: AtomicU64::new(0),
            passed_by: AtomicU64::new(0),
        }
    }

    /// Takes charge of `item` until all `fences` are over.
    pub(crate) fn arrive(&self, item: T, bytes: u64, fences: Few<SharedFence>, now_us: u64) {
        // Relaxed: the lock or the queue orders the item. Counted before it is visible, so that a sweep never takes away
        // what was not yet added.
        self.count.fetch_add(1, Ordering::Relaxed);
        let flight = PendingCopy { item, bytes, fences, since_us: now_us, is_known_stuck: false };
        match self.lines.try_lock() {
            Some(mut lines) => {
                self.seat_arrivals(&mut lines);
                lines.seat(flight);
            }
            None => self.arrivals.push(flight),
        }
    }

    /// Items in flight.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        // Relaxed: a hint for those who may skip a sweep, and a figure.
        self.count.load(Ordering::Relaxed)
    }

    /// Bytes in flight.
    pub(crate) fn bytes(&self) -> u64 {
        let mut lines = self.lines.lock();
        self.seat_arrivals(&mut lines);
        let StreamQueues { by_stream, several } = &*lines;
        by_stream.iter().flat_map(|line| &line.flights).chain(several).map(|flight| flight.bytes).sum()
    }

    /// Do many threads ask at once?
    pub(crate) fn is_crowded(&self) -> bool {
        // Relaxed: a figure.
        self.passed_by.load(Ordering::Relaxed) >= CROWD
    }

    /// The item that has waited longest.
    pub(crate) fn oldest(&self, now_us: u64) -> Option<PendingGroup> {
        let mut lines = self.lines.lock();
        self.seat_arrivals(&mut lines);
        let heads = lines.by_stream.iter().filter_map(|line| line.flights.front());
        heads.chain(&lines.several).min_by_key(|flight| flight.since_us).map(|flight| flight.waiting(now_us))
    }

    /// Items that have waited for `limit` or longer, by stream, each told once. If another thread is asking already, none.
    pub(crate) fn newly_stuck(&self, now_us: u64, limit: Duration) -> Vec<PendingGroup> {
        let Some(mut lines) = self.lines.try_lock() else { return Vec::new() };
        self.seat_arrivals(&mut lines);
        let StreamQueues { by_stream, several } = &mut *lines;
        let flights = by_stream.iter_mut().flat_map(|line| &mut line.flights).chain(several);
        let mut stuck = Vec::new();
        for flight in flights.filter(|flight| !flight.is_known_stuck) {
            let waiting = flight.waiting(now_us);
            if waiting.age >= limit {
                flight.is_known_stuck = true;
                // What stands behind it on its stream is the same news.
                match stuck.iter_mut().find(|other: &&mut PendingGroup| other.stream == waiting.stream) {
                    Some(other) => {
                        other.buffers += 1;
                        other.bytes += waiting.bytes;
                        other.age = other.age.max(waiting.age);
                    }
                    None => stuck.push(waiting),
                }
            }
        }
        stuck
    }

    /// Asks the fences and returns what is over. If another thread is asking already, returns nothing at once.
    pub(crate) fn sweep(&self) -> Swept<T> {
        self.sweep_until(Duration::ZERO, |_| false)
    }

    /// Asks until one is over that is `enough`: each question may be one to a driver. While another thread is asking,
    /// waits for its turn, at most for `patience`.
    pub(crate) fn sweep_until(&self, patience: Duration, enough: impl Fn(&T) -> bool) -> Swept<T> {
        let asking = self.lines.try_lock().or_else(|| {
            self.passed_by.fetch_add(1, Ordering::Relaxed); // Relaxed: a figure.
            self.lines.try_lock_for(patience)
        });
        let Some(mut lines) = asking else { return Swept::NOTHING };
        self.seat_arrivals(&mut lines);
        let StreamQueues { by_stream, several } = &mut *lines;
        let mut swept = Swept::NOTHING;
        for line in &mut *by_stream {
            while let Some(head) = line.flights.front() {
                let state = head.state();
                if let Ok(false) = state {
                    break;
                }
                let is_enough = state.is_ok() && enough(&head.item);
                self.leave(line.flights.pop_front(), state, &mut swept);
                if is_enough {
                    return swept;
                }
            }
        }
        if by_stream.len() > OPEN_LINES {
            by_stream.retain(|line| !line.flights.is_empty());
        }
        let mut index = 0;
        while let Some(flight) = several.get(index) {
            match flight.state() {
                Ok(false) => index += 1,
                over => {
                    let flight = several.remove(index);
                    self.leave(Some(flight), over, &mut swept);
                }
            }
        }
        swept
    }

    /// Everything still in flight, whatever its fences say. For the end of a pool, which lets go of it for ever.
    pub(crate) fn abandon(&self) -> Vec<T> {
        let mut lines = self.lines.lock();
        self.seat_arrivals(&mut lines);
        let seated = lines.by_stream.drain(..).flat_map(|line| line.flights);
        let mut flights: Vec<_> = seated.collect();
        flights.append(&mut lines.several);
        flights.into_iter().map(|flight| flight.item).collect()
    }

    fn seat_arrivals(&self, lines: &mut StreamQueues<T>) {
        // A look first: mostly nobody was in the way, and the queue has nothing.
        while !self.arrivals.is_empty() {
            self.arrivals.pop().into_iter().for_each(|flight| lines.seat(flight));
        }
    }

    fn leave(&self, flight: Option<PendingCopy<T>>, over: Result<bool, Error>, swept: &mut Swept<T>) {
        let Some(PendingCopy { item, .. }) = flight else { return };
        // Relaxed, as in `arrive`.
        self.count.fetch_sub(1, Ordering::Relaxed);
        match over {
            Ok(_) => swept.completed.push(item),
            Err(error) => swept.lost.push((item, error)),
        }
    }
}

impl<T> StreamQueues<T> {
    fn seat(&mut self, flight: PendingCopy<T>) {
        let Some(fence) = flight.fences.only() else { return self.several.push(flight) };
        let stream = fence.stream();
        match self.by_stream.iter_mut().find(|line| line.stream == stream) {
            Some(line) => line.flights.push_back(flight),
            None => self.by_stream.push(StreamQueue { stream, flights: VecDeque::from([flight]) }),
        }
    }
}

impl<T> PendingCopy<T> {
    fn waiting(&self, now_us: u64) -> PendingGroup {
        let age = Duration::from_micros(now_us.saturating_sub(self.since_us));
        let is_open = |fence: &&SharedFence| !matches!(fence.is_done(), Ok(true));
        let fence =
            self.fences.only().or_else(|| self.fences.iter().find(is_open)).or_else(|| self.fences.iter().last());
        let stream = fence.map_or(0, |fence| fence.stream());
        PendingGroup { buffers: 1, age, stream, bytes: self.bytes }
    }

    /// Are all fences over? A failure of one outweighs the rest (invariant 2).
    fn state(&self) -> Result<bool, Error> {
        self.fences.iter().try_fold(true, |over, fence| Ok(fence.is_done()? && over))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::fence::scripted::Scripted;
    use super::*;

    fn behind<const N: usize>(fences: [Arc<Scripted>; N]) -> Few<SharedFence> {
        fences.into_iter().map(|fence| fence as SharedFence).collect()
    }

    fn completed(room: &InFlight<u32>) -> Vec<u32> {
        room.sweep().completed.into_iter().collect()
    }

    fn flying(room: &InFlight<u32>, item: u32, stream: u64) -> Arc<Scripted> {
        let fence = Arc::new(Scripted::on(stream));
        room.arrive(item, 10, behind([fence.clone()]), 0);
        fence
    }

    #[test]
    fn a_slow_stream_holds_back_nobody_but_itself() {
        let room = InFlight::new();
        let slow = flying(&room, 1, 1);
        let behind = flying(&room, 2, 1);
        let other = flying(&room, 3, 2);
        other.finish();
        behind.finish();
        assert_eq!(completed(&room), [3]);
        assert_eq!((room.count(), room.bytes()), (2, 20));
        slow.finish();
        assert_eq!(completed(&room), [1, 2]);
        assert_eq!((room.count(), room.bytes()), (0, 0));
    }

    #[test]
    fn a_sweep_that_has_enough_asks_nobody_else() {
        let room = InFlight::new();
        let fences = [1, 2, 3].map(|item| flying(&room, item, 1));
        fences.iter().for_each(|fence| fence.finish());
        let swept: Vec<_> = room.sweep_until(Duration::ZERO, |&item| item == 2).completed.into_iter().collect();
        assert_eq!((swept, room.count()), (vec![1, 2], 1));
        assert_eq!(fences.map(|fence| fence.asked()), [1, 1, 0]);
    }

    #[test]
    fn used_on_two_streams_it_waits_for_both() {
        let room = InFlight::new();
        let (first, second) = (Arc::new(Scripted::on(1)), Arc::new(Scripted::on(2)));
        room.arrive(1, 10, behind([first.clone(), second.clone()]), 0);
        let behind = flying(&room, 2, 1);
        behind.finish();
        second.finish();
        assert_eq!(completed(&room), [2]);
        first.finish();
        assert_eq!(completed(&room), [1]);
    }

    #[test]
    fn a_failed_fence_loses_its_item_and_no_other() {
        let room = InFlight::new();
        let broken = flying(&room, 1, 1);
        flying(&room, 2, 2).finish();
        broken.fail();
        let swept = room.sweep();
        assert_eq!(swept.completed.only(), Some(&2));
        assert_eq!(swept.lost.len(), 1);
        assert_eq!(room.count(), 0);
    }

    #[test]
    fn what_waits_for_long_is_told_once_with_its_stream() {
        let room = InFlight::new();
        let done = Arc::new(Scripted::on(1));
        done.finish();
        room.arrive(1, 10, behind([done, Arc::new(Scripted::on(7))]), 1_000);
        room.arrive(2, 20, behind([Arc::new(Scripted::on(8))]), 2_000);
        let limit = Duration::from_micros(500);
        let first = PendingGroup { buffers: 1, age: limit, stream: 7, bytes: 10 };
        assert_eq!(room.newly_stuck(1_499, limit), []);
        assert_eq!(room.newly_stuck(1_500, limit), [first]);
        let second = PendingGroup { buffers: 1, age: limit, stream: 8, bytes: 20 };
        assert_eq!(room.newly_stuck(2_500, limit), [second]);
        assert_eq!(room.newly_stuck(9_000, limit), []);
        assert_eq!(room.oldest(1_500), Some(first));
    }

    #[test]
    fn what_stands_behind_a_stuck_one_is_told_with_it() {
        let room = InFlight::new();
        let _fences = [flying(&room, 1, 1), flying(&room, 2, 1), flying(&room, 3, 2)];
        let age = Duration::from_micros(9);
        let expected =
            [(2, 20, 1), (1, 10, 2)].map(|(buffers, bytes, stream)| PendingGroup { buffers, age, stream, bytes });
        assert_eq!(room.newly_stuck(9, age), expected);
    }

    #[test]
    fn an_item_without_fences_lands_at_once() {
        let room = InFlight::new();
        room.arrive(1, 10, Few::NONE, 0);
        assert_eq!(completed(&room), [1]);
    }

    #[test]
    fn threads_that_find_another_asking_pass_by_and_are_counted() {
        let room = InFlight::new();
        flying(&room, 1, 1).finish();
        let asking = room.lines.lock();
        for _ in 0..CROWD {
            assert!(!room.is_crowded());
            assert!(completed(&room).is_empty());
        }
        assert!(room.is_crowded());
        drop(asking);
        assert_eq!(completed(&room), [1]);
    }

    #[test]
    fn the_end_gets_everything_back_as_it_is() {
        let room = InFlight::new();
        let _fences = [flying(&room, 1, 1), flying(&room, 2, 2)];
        assert!(room.oldest(0).is_some());
        assert_eq!(room.abandon().len(), 2);
        assert!(room.oldest(0).is_none());
    }
}
