//! A bounded queue for each thread, from which the writer takes.
//!
//! A queue is a ring of atomic words that one thread fills and the writer empties, so a push is a few plain stores. It never
//! waits: what finds no room is counted as lost, and the count is written when there is room again. A thread that is ending,
//! whose own queue is gone, uses one that all such threads share under a lock.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use super::event::Event;
use super::format::{event_of, fields};
use crate::sync::CachePadded;
use crate::sync::plain::Mutex;

/// Records that a thread's queue holds: 256 KiB.
const CAPACITY: u64 = 4096;
/// Words of a record: ticks, kind and pool, five fields.
const WORDS: usize = 8;
/// A thread wakes the writer after so many records, so that it comes before the queue is full.
const WAKE_EVERY: u32 = 512;

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
    pub(super) thread: u32,
    words: Box<[[AtomicU64; WORDS]]>,
    /// Records pushed; the thread's own.
    pushed: CachePadded<AtomicU64>,
    /// Records taken; the writer's own.
    taken: CachePadded<AtomicU64>,
    lost: AtomicU64,
}

/// The queues of one file.
#[derive(Debug)]
pub(super) struct Queues {
    /// No other file of this process has it.
    number: u64,
    all: Mutex<Vec<Arc<Queue>>>,
    /// Records of threads that are ending, and how many found no room.
    last: Mutex<(Vec<Stamped>, u64)>,
    threads: AtomicU32,
    /// Nothing is written any more.
    pub(super) is_closed: AtomicBool,
}

/// A thread's queue for one file.
struct Own {
    file: u64,
    queue: Arc<Queue>,
    until_wake: u32,
}

thread_local! {
    /// Mostly one; a thread that uses pools of several files has several.
    static OWN: RefCell<Vec<Own>> = const { RefCell::new(Vec::new()) };
}

impl Queue {
    fn new(thread: u32) -> Arc<Self> {
        let words = (0..CAPACITY).map(|_| Default::default()).collect();
        let (pushed, taken, lost) = Default::default();
        Arc::new(Self { thread, words, pushed, taken, lost })
    }

    /// Adds a record; by the thread alone that the queue is of.
    #[inline]
    fn push(&self, record: &Stamped) {
        // Relaxed: only this thread stores it.
        let pushed = self.pushed.load(Ordering::Relaxed);
        // Acquire, with the Release in `pop`: the writer has read what is overwritten.
        if pushed.wrapping_sub(self.taken.load(Ordering::Acquire)) >= CAPACITY {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (kind, fields, count) = fields(&record.event);
        #[allow(clippy::cast_possible_truncation)] // Below the capacity.
        let words = &self.words[(pushed % CAPACITY) as usize];
        // Relaxed: the Release below orders them.
        words[0].store(record.ticks, Ordering::Relaxed);
        words[1].store(u64::from(kind) | u64::from(record.pool) << 8, Ordering::Relaxed);
        for (word, field) in words[2..].iter().zip(&fields[..count]) {
            word.store(*field, Ordering::Relaxed);
        }
        // Release, with the Acquire in `pop`: the words are complete.
        self.pushed.store(pushed.wrapping_add(1), Ordering::Release);
    }

    /// Takes the oldest record; by the writer alone.
    fn pop(&self) -> Option<Stamped> {
        let taken = self.taken.load(Ordering::Relaxed);
        if taken != self.pushed.load(Ordering::Acquire) {
            #[allow(clippy::cast_possible_truncation)] // Below the capacity.
            let words = &self.words[(taken % CAPACITY) as usize];
            let [ticks, head, rest @ ..] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
            self.taken.store(taken.wrapping_add(1), Ordering::Release);
            let [kind, a, b, c, d, ..] = head.to_le_bytes();
            let mut fields = rest.into_iter();
            // Every kind that is pushed is one that is read.
            let event = event_of(kind, || fields.next().ok_or(()), ()).ok()?;
            return Some(Stamped { ticks, pool: u32::from_le_bytes([a, b, c, d]), event });
        }
        None
    }

    /// Whether all that the thread, which has let go of the queue, recorded or lost has been taken.
    fn is_told(&self) -> bool {
        // The count of references is read relaxed; the thread's last stores are before its end of the reference.
        fence(Ordering::Acquire);
        self.taken.load(Ordering::Relaxed) == self.pushed.load(Ordering::Relaxed)
            && self.lost.load(Ordering::Relaxed) == 0
    }

    /// Ticks and pool of the record that was taken last; by the writer alone.
    fn last_taken(&self) -> (u64, u32) {
        let last = self.taken.load(Ordering::Relaxed).wrapping_sub(1);
        #[allow(clippy::cast_possible_truncation)] // Below the capacity.
        let [ticks, head, ..] =
            self.words[(last % CAPACITY) as usize].each_ref().map(|word| word.load(Ordering::Relaxed));
        let [_, a, b, c, d, ..] = head.to_le_bytes();
        (ticks, u32::from_le_bytes([a, b, c, d]))
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
            threads: AtomicU32::new(1),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Adds a record. True now and then: the writer is to be woken.
    #[inline]
    pub(super) fn push(&self, record: Stamped) -> bool {
        let pushed = OWN.try_with(|own| {
            let mut own = own.try_borrow_mut().ok()?;
            let index = match own.iter().position(|own| own.file == self.number) {
                Some(index) => index,
                None => self.add_to(&mut own),
            };
            let Own { queue, until_wake, .. } = own.get_mut(index)?;
            queue.push(&record);
            *until_wake -= 1;
            if *until_wake > 0 {
                return Some(false);
            }
            *until_wake = WAKE_EVERY;
            Some(true)
        });
        pushed.ok().flatten().unwrap_or_else(|| {
            self.push_last(record);
            false
        })
    }

    #[cold]
    fn push_last(&self, record: Stamped) {
        let (records, lost) = &mut *self.last.lock();
        if (records.len() as u64) < CAPACITY { records.push(record) } else { *lost += 1 }
    }

    #[cold]
    fn add_to(&self, own: &mut Vec<Own>) -> usize {
        // Queues that the writer has let go of are of files that are closed.
        own.retain(|own| Arc::strong_count(&own.queue) > 1);
        // Relaxed: only unique.
        let queue = Queue::new(self.threads.fetch_add(1, Ordering::Relaxed));
        self.all.lock().push(queue.clone());
        own.push(Own { file: self.number, queue, until_wake: WAKE_EVERY });
        own.len() - 1
    }

    /// Takes all records, thread by thread, with the number that was lost before them. Returns the number lost.
    pub(super) fn take(&self, mut each: impl FnMut(u32, Stamped)) -> u64 {
        let (records, mut lost) = std::mem::take(&mut *self.last.lock());
        records.into_iter().for_each(|record| each(0, record));
        let all = self.all.lock().clone();
        for queue in &all {
            // No more than one filling, so that one busy thread does not keep the writer.
            for record in (0..CAPACITY).map_while(|_| queue.pop()) {
                each(queue.thread, record);
            }
            let missed = queue.lost.swap(0, Ordering::Relaxed);
            lost += missed;
            // What found no room came after what filled the queue, about now.
            if missed > 0 {
                let (ticks, pool) = queue.last_taken();
                each(queue.thread, Stamped { ticks, pool, event: Event::Missing { records: missed } });
            }
        }
        drop(all);
        // A thread that has ended left its queue to this list alone.
        self.all.lock().retain(|queue| Arc::strong_count(queue) > 1 || !queue.is_told());
        lost
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

    #[test]
    fn a_full_queue_loses_records_and_the_count_is_told_before_the_next() {
        let queues = Queues::new();
        let more = 10;
        (0..CAPACITY + more).for_each(|id| {
            queues.push(record(id));
        });
        let mut taken = 0;
        let mut told = 0;
        assert_eq!(
            queues.take(|_, record| match record.event {
                Event::Missing { records } => told += records,
                _ => taken += 1,
            }),
            more
        );
        assert_eq!((taken, told), (CAPACITY, more));
        queues.push(record(1));
        assert_eq!(queues.take(|_, _| taken += 1), 0);
        assert_eq!(taken, CAPACITY + 1);
    }

    #[test]
    fn threads_have_queues_of_their_own_and_leave_what_they_recorded() {
        let queues = Queues::new();
        std::thread::scope(|scope| {
            let queues = &queues;
            let threads: Vec<_> = (0..3).map(|id| scope.spawn(move || queues.push(record(id)))).collect();
            // A scope may end before the destructors of its threads; a join does not.
            threads.into_iter().for_each(|thread| thread.join().map(drop).unwrap());
        });
        let mut taken = Vec::new();
        queues.take(|thread, record| taken.push((thread, record.ticks)));
        taken.sort_unstable();
        assert_eq!(taken.iter().map(|(thread, _)| *thread).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(queues.all.lock().is_empty(), "their threads have ended");
    }
}
