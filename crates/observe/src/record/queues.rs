//! A bounded queue for each thread, from which the writer takes.
//!
//! A queue is a ring of atomic words that one thread fills and the writer empties, so a push is a few plain stores. It never
//! waits: what finds no room is counted as lost, and the count is written when there is room again. A thread that is ending,
//! whose own queue is gone, uses one that all such threads share under a lock.
//!
//! All queues together are bounded too, for while a disk takes nothing, threads come and go: the first get large queues, later
//! ones small queues, and then a thread has none until others have been emptied. What it records meanwhile is lost and counted.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use super::event::Event;
use super::format::{event_of, fields};
use pinpool_os::sync::CachePadded;
use pinpool_os::sync::plain::Mutex;

/// Records of a thread's queue while all together have fewer than [`LARGE_IN_ALL`]: 256 KiB.
const CAPACITY: usize = 4096;
/// Records of a queue that comes later: 16 KiB.
const SMALL_CAPACITY: usize = 256;
/// Records of all large queues: 16 MiB.
const LARGE_IN_ALL: usize = 64 * CAPACITY;
/// Records of all queues: 32 MiB. The writer holds as many once more while it sorts them.
const IN_ALL: usize = 2 * LARGE_IN_ALL;
/// Words of a record: ticks, kind and pool, five fields.
const WORDS: usize = 8;
/// A thread wakes the writer each time that it has filled this part of its queue, so that it comes before the queue is full.
const WAKES: usize = 4;

/// A record on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamped {
    pub(super) ticks: u64,
    pub(super) pool: u32,
    pub(super) event: Event,
}

/// One thread's queue.
#[derive(Debug)]
pub(super) struct Queue {
    thread: u32,
    /// Places for records, each of `WORDS` words; their number is a power of two.
    words: Box<[[AtomicU64; WORDS]]>,
    /// Written by the thread alone.
    filled: CachePadded<Filled>,
    /// Written by the writer alone.
    emptied: CachePadded<Emptied>,
}

#[derive(Debug, Default)]
struct Filled {
    /// Records pushed so far.
    pushed: AtomicU64,
    /// Records that found no room so far.
    lost: AtomicU64,
    /// [`Emptied::taken`] as the thread saw it last: so it seldom reads what the writer writes.
    taken: AtomicU64,
}

#[derive(Debug, Default)]
struct Emptied {
    /// Records taken so far.
    taken: AtomicU64,
    /// Lost records that `drain` has returned so far.
    told: AtomicU64,
    /// Ticks and pool of the record that was taken last.
    last: [AtomicU64; 2],
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
    queue: Option<Arc<Queue>>,
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
        queue.as_ref()?.push(record);
        *until_wake -= 1;
        if *until_wake > 0 {
            return Some(Pushed::Done);
        }
        *until_wake = queue.as_ref()?.words.len() / WAKES;
        Some(Pushed::Wake)
    });
    pushed.ok().flatten().unwrap_or(Pushed::NoQueue)
}

impl Queue {
    fn new(thread: u32, capacity: usize) -> Arc<Self> {
        let words = (0..capacity).map(|_| Default::default()).collect();
        let (filled, emptied) = Default::default();
        Arc::new(Self { thread, words, filled, emptied })
    }

    #[inline]
    fn words(&self, record: u64) -> &[AtomicU64; WORDS] {
        #[allow(clippy::cast_possible_truncation)] // Below the capacity.
        &self.words[record as usize & (self.words.len() - 1)]
    }

    /// Adds a record; by the thread alone that the queue is of.
    #[inline]
    fn push(&self, record: &Stamped) {
        // Relaxed: only this thread stores it.
        let pushed = self.filled.pushed.load(Ordering::Relaxed);
        if !self.has_room(pushed) {
            let lost = self.filled.lost.load(Ordering::Relaxed);
            self.filled.lost.store(lost + 1, Ordering::Relaxed);
            return;
        }
        let (kind, fields, count) = fields(&record.event);
        let words = self.words(pushed);
        // Relaxed: the Release below orders them.
        words[0].store(record.ticks, Ordering::Relaxed);
        words[1].store(u64::from(kind) | u64::from(record.pool) << 8, Ordering::Relaxed);
        for (word, field) in words[2..].iter().zip(&fields[..count]) {
            word.store(*field, Ordering::Relaxed);
        }
        // Release, with the Acquire in `drain`: the words are complete.
        self.filled.pushed.store(pushed + 1, Ordering::Release);
    }

    #[inline]
    fn has_room(&self, pushed: u64) -> bool {
        let has_room = |taken: u64| pushed - taken < self.words.len() as u64;
        has_room(self.filled.taken.load(Ordering::Relaxed)) || {
            // Acquire, with the Release in `drain`: the writer has read what is overwritten.
            let taken = self.emptied.taken.load(Ordering::Acquire);
            self.filled.taken.store(taken, Ordering::Relaxed);
            has_room(taken)
        }
    }

    /// Takes what is in the queue now; by the writer alone. Records that come meanwhile stay, so that one busy thread does not
    /// keep the writer. Their ticks never fall, though the counters of two cores may differ a little. Returns how many more were
    /// lost.
    fn drain(&self, mut each: impl FnMut(Stamped)) -> u64 {
        // Before the records: what is lost later is returned later.
        let lost = self.filled.lost.load(Ordering::Relaxed);
        let pushed = self.filled.pushed.load(Ordering::Acquire);
        let (mut last_ticks, mut last_pool) = self.last_taken();
        for at in self.emptied.taken.load(Ordering::Relaxed)..pushed {
            let [ticks, head, rest @ ..] = self.words(at).each_ref().map(|word| word.load(Ordering::Relaxed));
            let [kind, a, b, c, d, ..] = head.to_le_bytes();
            let mut fields = rest.into_iter();
            // Every kind that is pushed is one that is read.
            if let Ok(event) = event_of(kind, || fields.next().ok_or(()), ()) {
                (last_ticks, last_pool) = (last_ticks.max(ticks), u32::from_le_bytes([a, b, c, d]));
                each(Stamped { ticks: last_ticks, pool: last_pool, event });
            }
            // Now and then: each store takes the line from the thread.
            if at % 64 == 63 {
                self.emptied.taken.store(at + 1, Ordering::Release);
            }
        }
        // Relaxed: only the writer loads them.
        self.emptied.last[0].store(last_ticks, Ordering::Relaxed);
        self.emptied.last[1].store(last_pool.into(), Ordering::Relaxed);
        self.emptied.taken.store(pushed, Ordering::Release);
        lost - self.emptied.told.swap(lost, Ordering::Relaxed)
    }

    /// Records that were pushed or lost, and that `drain` has neither taken nor returned as lost.
    fn pending(&self) -> u64 {
        // Read first: the thread's numbers are never below it.
        let done = self.emptied.taken.load(Ordering::Relaxed) + self.emptied.told.load(Ordering::Relaxed);
        // Where the thread has let go of the queue: the count of references is read relaxed; its last stores are before its
        // end of the reference.
        fence(Ordering::Acquire);
        let all = self.filled.pushed.load(Ordering::Relaxed) + self.filled.lost.load(Ordering::Relaxed);
        all.saturating_sub(done)
    }

    /// Ticks and pool of the record that was taken last; by the writer alone.
    fn last_taken(&self) -> (u64, u32) {
        let [ticks, pool] = self.emptied.last.each_ref().map(|word| word.load(Ordering::Relaxed));
        #[allow(clippy::cast_possible_truncation)] // Stored from one.
        (ticks, pool as u32)
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
            match &own.queue {
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
            own.retain(|own| own.queue.as_ref().is_some_and(|queue| Arc::strong_count(queue) > 1));
            let (queue, until_wake) = self.add();
            own.push(Own { file: self.number, queue, until_wake });
            own.len() - 1
        });
        &mut own[at]
    }

    /// Another queue, if all together leave room for one, and the records until the next look.
    fn add(&self) -> (Option<Arc<Queue>>, usize) {
        let mut all = self.all.lock();
        let in_all: usize = all.iter().map(|queue| queue.words.len()).sum();
        let capacity = if in_all + CAPACITY <= LARGE_IN_ALL { CAPACITY } else { SMALL_CAPACITY };
        if in_all + capacity > IN_ALL {
            return (None, SMALL_CAPACITY);
        }
        // Relaxed: only unique.
        let queue = Queue::new(self.threads.fetch_add(1, Ordering::Relaxed), capacity);
        all.push(queue.clone());
        (Some(queue), capacity / WAKES)
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
            let missed = queue.drain(|record| each(queue.thread, record));
            lost += missed;
            // What found no room came after what filled the queue, about now.
            if missed > 0 {
                each(queue.thread, missing(queue.last_taken(), missed));
            }
        }
        drop(all);
        // A thread that has ended left its queue to this list alone.
        self.all.lock().retain(|queue| Arc::strong_count(queue) > 1 || queue.pending() > 0);
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
        let words: usize = queues.all.lock().iter().map(|queue| queue.words.len()).sum();
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
