//! A bounded queue for each thread, from which the writer takes.
//!
//! A queue is a ring that one thread fills and the writer empties, so a push is a few plain stores. It never
//! waits: what finds no room is counted as lost, and the count is written when there is room again. A thread that is ending,
//! whose own queue is gone, uses one that all such threads share under a lock.
//!
//! All queues together are bounded too, for while a disk takes nothing, threads come and go: the first get large queues, later
//! ones small queues, and then a thread has none until others have been emptied. What it records meanwhile is lost and counted.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use rtrb::{Consumer, Producer, RingBuffer};

use super::event::Event;
use pinpool_os::sync::plain::Mutex;

/// Records of a thread's queue while all together have fewer than [`LARGE_IN_ALL`]: 256 KiB.
const CAPACITY: usize = 4096;
/// Records of a queue that comes later: 16 KiB.
const SMALL_CAPACITY: usize = 256;
/// Records of all large queues: 16 MiB.
const LARGE_IN_ALL: usize = 64 * CAPACITY;
/// Records of all queues: 32 MiB. The writer holds as many once more while it sorts them.
const IN_ALL: usize = 2 * LARGE_IN_ALL;
/// The writer gives room back after so many records that it takes: each time takes a line of the cache from the thread.
const CHUNK: usize = 64;
/// A thread wakes the writer each time that it has filled this part of its queue, so that it comes before the queue is full.
const WAKES: usize = 4;

/// A record on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamped {
    pub(super) ticks: u64,
    pub(super) pool: u32,
    pub(super) event: Event,
}

/// One thread's queue, as the writer has it.
#[derive(Debug)]
pub(super) struct Queue {
    thread: u32,
    capacity: usize,
    /// Records that found no room so far; written by the thread alone.
    lost: Arc<AtomicU64>,
    /// Used by the writer, and by those who count what is left.
    taken: Mutex<Taken>,
}

#[derive(Debug)]
struct Taken {
    records: Consumer<Stamped>,
    /// Lost records that `drain` has returned so far.
    told: u64,
    /// Ticks and pool of the record that was taken last.
    last: (u64, u32),
}

/// One thread's queue, as the thread has it.
struct Filled {
    records: Producer<Stamped>,
    lost: Arc<AtomicU64>,
}

/// The queues of one file.
#[derive(Debug)]
pub(super) struct Queues {
    /// No other file of this process has it.
    number: u64,
    all: Mutex<Vec<Arc<Queue>>>,
    /// Records of threads that are ending, and how many found no room.
    last: Mutex<(Vec<Stamped>, u64)>,
    /// Records of threads that could have no queue, since the last look.
    unqueued: AtomicU64,
    threads: AtomicU32,
    /// Nothing is written any more.
    pub(super) is_closed: AtomicBool,
}

/// A thread's queue for one file.
struct Own {
    file: u64,
    /// `None` while all queues together have as much as they may.
    queue: Option<Filled>,
    until_wake: usize,
}

thread_local! {
    /// Mostly one; a thread that uses pools of several files has several.
    static OWN: RefCell<Vec<Own>> = const { RefCell::new(Vec::new()) };
}

/// What became of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It is in the thread's queue, or lost and counted.
    Done,
    /// It is in the thread's queue, or lost and counted, and the writer is to be woken.
    Wake,
    /// The thread has no queue for the file, or none any more.
    NoQueue,
}

/// Adds a record to the calling thread's queue for the file of that number.
#[inline]
pub(super) fn push(file: u64, record: &Stamped) -> Pushed {
    let pushed = OWN.try_with(|own| {
        let mut own = own.try_borrow_mut().ok()?;
        let Own { queue, until_wake, .. } = own.iter_mut().find(|own| own.file == file)?;
        let queue = queue.as_mut()?;
        queue.push(record);
        *until_wake -= 1;
        if *until_wake > 0 {
            return Some(Pushed::Done);
        }
        *until_wake = queue.records.buffer().capacity() / WAKES;
        Some(Pushed::Wake)
    });
    pushed.ok().flatten().unwrap_or(Pushed::NoQueue)
}

impl Filled {
    #[inline]
    fn push(&mut self, record: &Stamped) {
        if self.records.push(*record).is_err() {
            // Relaxed: only this thread stores it.
            self.lost.store(self.lost.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }
}

impl Queue {
    fn new(thread: u32, capacity: usize) -> (Arc<Self>, Filled) {
        let (filled, records) = RingBuffer::new(capacity);
        let lost = Arc::new(AtomicU64::new(0));
        let taken = Mutex::new(Taken { records, told: 0, last: (0, 0) });
        (Arc::new(Self { thread, capacity, lost: lost.clone(), taken }), Filled { records: filled, lost })
    }

    /// Takes what is in the queue now. Records that come meanwhile stay, so that one busy thread does not keep the writer. Their
    /// ticks never fall, though the counters of two cores may differ a little. Returns how many more were lost, if any were with
    /// ticks and pool of the record before them.
    fn drain(&self, mut each: impl FnMut(Stamped)) -> Option<(u64, (u64, u32))> {
        // Before the records: what is lost later is returned later.
        let lost = self.lost.load(Ordering::Relaxed);
        let Taken { records, told, last } = &mut *self.taken.lock();
        let mut left = records.slots();
        while let Ok(chunk) = records.read_chunk(left.min(CHUNK)) {
            if chunk.is_empty() {
                break;
            }
            left -= chunk.len();
            for record in chunk {
                *last = (last.0.max(record.ticks), record.pool);
                each(Stamped { ticks: last.0, ..record });
            }
        }
        let more = lost - std::mem::replace(told, lost);
        (more > 0).then_some((more, *last))
    }

    /// Records that were pushed or lost, and that `drain` has neither taken nor returned as lost.
    fn pending(&self) -> u64 {
        let taken = self.taken.lock();
        taken.records.slots() as u64 + self.lost.load(Ordering::Relaxed).saturating_sub(taken.told)
    }

    /// Whether its thread has ended and all that it recorded was taken.
    fn is_over(&self) -> bool {
        let is_abandoned = self.taken.lock().records.is_abandoned();
        // The thread's last stores come before its end of the reference, whose count is read relaxed.
        fence(Ordering::Acquire);
        is_abandoned && self.pending() == 0
    }
}

impl Queues {
    pub(super) fn new() -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        Self {
            // Relaxed: only unique.
            number: FILES.fetch_add(1, Ordering::Relaxed),
            all: Mutex::default(),
            last: Mutex::default(),
            unqueued: AtomicU64::new(0),
            threads: AtomicU32::new(1),
            is_closed: AtomicBool::new(false),
        }
    }

    /// The number of the file in this process, for [`push`].
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Adds a record of a thread that has no queue, and gives it one.
    #[cold]
    pub(super) fn push_first(&self, record: Stamped) {
        let pushed = OWN.try_with(|own| {
            let mut own = own.try_borrow_mut().ok()?;
            let own = self.own(&mut own);
            own.until_wake -= 1;
            if own.queue.is_none() && own.until_wake == 0 {
                (own.queue, own.until_wake) = self.add();
            }
            match &mut own.queue {
                Some(queue) => queue.push(&record),
                // Relaxed: a sum.
                None => drop(self.unqueued.fetch_add(1, Ordering::Relaxed)),
            }
            Some(())
        });
        if pushed.ok().flatten().is_none() {
            let (records, lost) = &mut *self.last.lock();
            if records.len() < CAPACITY { records.push(record) } else { *lost += 1 }
        }
    }

    /// The calling thread's entry for this file.
    fn own<'a>(&self, own: &'a mut Vec<Own>) -> &'a mut Own {
        let at = own.iter().position(|own| own.file == self.number).unwrap_or_else(|| {
            // Queues that the writer has let go of are of files that are closed.
            own.retain(|own| own.queue.as_ref().is_some_and(|queue| !queue.records.is_abandoned()));
            let (queue, until_wake) = self.add();
            own.push(Own { file: self.number, queue, until_wake });
            own.len() - 1
        });
        &mut own[at]
    }

    /// Another queue, if all together leave room for one, and the records until the next look.
    fn add(&self) -> (Option<Filled>, usize) {
        let mut all = self.all.lock();
        let in_all: usize = all.iter().map(|queue| queue.capacity).sum();
        let capacity = if in_all + CAPACITY <= LARGE_IN_ALL { CAPACITY } else { SMALL_CAPACITY };
        if in_all + capacity > IN_ALL {
            return (None, SMALL_CAPACITY);
        }
        // Relaxed: only unique.
        let (queue, filled) = Queue::new(self.threads.fetch_add(1, Ordering::Relaxed), capacity);
        all.push(queue);
        (Some(filled), capacity / WAKES)
    }

    /// Takes all records, thread by thread, each with the number that was lost after them. Returns the number lost.
    pub(super) fn take(&self, now: u64, mut each: impl FnMut(u32, Stamped)) -> u64 {
        let (records, lost) = std::mem::take(&mut *self.last.lock());
        records.into_iter().for_each(|record| each(0, record));
        let missing = |(ticks, pool), records| Stamped { ticks, pool, event: Event::Missing { records } };
        let mut lost = lost + self.unqueued.swap(0, Ordering::Relaxed);
        if lost > 0 {
            each(0, missing((now, 0), lost));
        }
        let all = self.all.lock().clone();
        for queue in &all {
            // What found no room came after what filled the queue, about now.
            if let Some((missed, last)) = queue.drain(|record| each(queue.thread, record)) {
                lost += missed;
                each(queue.thread, missing(last, missed));
            }
        }
        drop(all);
        // A thread that has ended left its queue to this list alone.
        self.all.lock().retain(|queue| !queue.is_over());
        lost
    }

    /// Records that nobody has taken, lost ones included.
    pub(super) fn pending(&self) -> u64 {
        let last = {
            let last = self.last.lock();
            last.0.len() as u64 + last.1
        };
        let queued: u64 = self.all.lock().iter().map(|queue| queue.pending()).sum();
        last + queued + self.unqueued.load(Ordering::Relaxed)
    }

    /// Lets go of all queues: nothing is taken any more.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.all.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64) -> Stamped {
        Stamped { ticks: id, pool: 0, event: Event::Completed { id } }
    }

    fn push_to(queues: &Queues, id: u64) {
        if push(queues.number, &record(id)) == Pushed::NoQueue {
            queues.push_first(record(id));
        }
    }

    /// Records taken, and the sum of those that they say are missing.
    fn taken(queues: &Queues) -> (u64, u64) {
        let (mut taken, mut told) = (0, 0);
        let lost = queues.take(0, |_, record| match record.event {
            Event::Missing { records } => told += records,
            _ => taken += 1,
        });
        assert_eq!(lost, told);
        (taken, told)
    }

    #[test]
    fn a_full_queue_loses_records_and_the_count_is_told_once() {
        let queues = Queues::new();
        let (capacity, more) = (CAPACITY as u64, 10);
        (0..capacity + more).for_each(|id| push_to(&queues, id));
        assert_eq!(queues.pending(), capacity + more);
        assert_eq!(taken(&queues), (capacity, more));
        push_to(&queues, 1);
        assert_eq!(taken(&queues), (1, 0));
        assert_eq!(queues.pending(), 0);
    }

    #[test]
    fn threads_have_queues_of_their_own_and_leave_what_they_recorded() {
        let queues = Queues::new();
        in_threads(&queues, 3, 1);
        let mut taken = Vec::new();
        queues.take(0, |thread, record| taken.push((thread, record.ticks)));
        taken.sort_unstable();
        assert_eq!(taken.iter().map(|(thread, _)| *thread).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(queues.all.lock().is_empty(), "their threads have ended");
    }

    /// Runs `threads` threads one after the other, each of which pushes `records`.
    fn in_threads(queues: &Queues, threads: usize, records: u64) {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                // A scope may end before the destructors of its threads; a join does not.
                let thread = scope.spawn(move || (0..records).for_each(|id| push_to(queues, id)));
                thread.join().map(drop).unwrap();
            }
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "thousands of threads")]
    fn threads_that_come_while_nothing_is_taken_hold_no_more_than_the_limit() {
        let queues = Queues::new();
        let threads = 64 + LARGE_IN_ALL / SMALL_CAPACITY + 100;
        in_threads(&queues, threads, 300);
        let words: usize = queues.all.lock().iter().map(|queue| queue.capacity).sum();
        assert_eq!(words, IN_ALL);
        let all = threads as u64 * 300;
        assert_eq!(queues.pending(), all);
        let (kept, lost) = taken(&queues);
        assert_eq!(kept + lost, all);
        // 64 threads have room for all, 1024 for 256, the others for none.
        assert_eq!(kept, 64 * 300 + 1024 * 256);
        // Then there is room again.
        in_threads(&queues, 1, 300);
        assert_eq!(taken(&queues), (300, 0));
    }
}
