//! Many threads on one front, and the balance when they have come to rest.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, mpsc};

use pinpool::thread_cache::{Entry, ThreadCache};

use crate::draw::Draw;
use crate::heap_calls;

const CLASSES: u32 = 5;
const THREADS: usize = if cfg!(miri) { 3 } else { 8 };
const STEPS: u64 = if cfg!(miri) { 60 } else { 40_000 };
const BYTES: usize = 64;

/// What the threads did, added up.
#[derive(Default)]
struct Done {
    hits: AtomicU64,
    misses: AtomicU64,
    puts: AtomicU64,
    victims: AtomicU64,
    handed_back: AtomicU64,
    removed: AtomicU64,
    checks: AtomicU64,
}

fn one(number: &AtomicU64) {
    number.fetch_add(1, Ordering::Relaxed);
}

type Buffer = Box<Entry<AtomicBool>>;

/// The user of a buffer: nobody else may have it.
fn use_alone(buffer: &Buffer) {
    assert!(!buffer.swap(true, Ordering::Relaxed), "two threads have one buffer");
}

fn put_back(front: &ThreadCache<AtomicBool>, done: &Done, buffer: Buffer, epoch: u32) {
    assert!(buffer.swap(false, Ordering::Relaxed));
    one(&done.puts);
    let put = front.put(buffer, epoch);
    if put.victim.is_some() {
        one(&done.victims);
    }
    if put.handed_back.is_some() {
        one(&done.handed_back);
    }
    if put.check_due {
        one(&done.checks);
        front.reset_window();
    }
}

/// Gets, puts, sends and receives; one thread also evicts, drains, changes the limit and looks.
fn work(
    front: &ThreadCache<AtomicBool>,
    done: &Done,
    thread: usize,
    to: &mpsc::Sender<Buffer>,
    from: &mpsc::Receiver<Buffer>,
) {
    let mut draw = Draw(0x9e37_79b9_7f4a_7c15 ^ (thread as u64 + 1) << 32);
    let mut held = Vec::new();
    for step in 0..STEPS {
        let epoch = u32::try_from(step / 64).unwrap();
        let class = u32::try_from(draw.below(u64::from(CLASSES))).unwrap();
        match draw.below(16) {
            0..7 => {
                let buffer = front.take(class);
                one(if buffer.is_some() { &done.hits } else { &done.misses });
                let buffer = buffer.unwrap_or_else(|| {
                    front.count_allocated();
                    Entry::new(class, BYTES, AtomicBool::new(false))
                });
                assert_eq!(buffer.class(), class);
                use_alone(&buffer);
                held.push(buffer);
            }
            7..11 => held.pop().into_iter().for_each(|buffer| put_back(front, done, buffer, epoch)),
            11..13 => held.pop().into_iter().for_each(|buffer| to.send(buffer).unwrap()),
            13..15 => from.try_iter().take(4).for_each(|buffer| put_back(front, done, buffer, epoch)),
            _ if thread > 0 => {}
            _ => {
                let removed = |_| one(&done.removed);
                match draw.below(6) {
                    0 => front.evict_oldest().into_iter().for_each(removed),
                    1 => front.drain_older_than(epoch.saturating_sub(1), removed),
                    2 => front.set_limit(usize::try_from(draw.below(30)).unwrap(), removed),
                    3 if step % 256 == 0 => front.drain_all(removed),
                    4 => assert!(front.idle_bytes() <= BYTES * 10_000),
                    _ => assert!(front.window().put <= front.totals().put),
                }
            }
        }
    }
    held.into_iter().for_each(|buffer| put_back(front, done, buffer, 1 << 20));
}

fn stress(shards: usize, seal: bool) {
    let (front, done) = (ThreadCache::new(CLASSES, 12, shards), Done::default());
    let start = Barrier::new(THREADS);
    let (senders, mut receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Buffer>()).unzip();
    receivers.rotate_left(1);
    std::thread::scope(|scope| {
        for (thread, (to, from)) in senders.into_iter().zip(receivers).enumerate() {
            let (front, done, start) = (&front, &done, &start);
            scope.spawn(move || {
                start.wait();
                work(front, done, thread, &to, &from);
                drop(to);
                if seal && thread == 1 {
                    front.seal();
                }
                from.iter().for_each(|buffer| put_back(front, done, buffer, 1 << 20));
            });
        }
    });

    front.validate().unwrap();
    let [hits, misses, puts, victims, handed_back, removed, checks] =
        [&done.hits, &done.misses, &done.puts, &done.victims, &done.handed_back, &done.removed, &done.checks]
            .map(|number| number.load(Ordering::Relaxed));
    let totals = front.totals();
    let idle = front.idle_count() as u64;
    assert_eq!((totals.get_from_pool, totals.allocated, totals.evicted), (hits, misses, victims));
    assert_eq!(hits + misses, puts, "every buffer that was got was put");
    assert_eq!(totals.put + handed_back, puts);
    assert_eq!(totals.put, hits + victims + removed + idle, "each buffer that was kept left once or is here");
    assert!(idle <= front.limit() as u64);
    assert_eq!(front.idle_bytes() as u64, idle * BYTES as u64);
    // Thread 0 brings the limit down now and then, so in the long run there are evictions, and checks with them.
    assert!(cfg!(miri) || victims > 1000 && checks > 0, "{victims} evictions, {checks} checks");

    let mut drained = 0;
    front.drain_all(|_| drained += 1);
    assert_eq!((drained, front.idle_count()), (idle, 0));
    front.validate().unwrap();
}

#[test]
fn a_shard_for_each_thread() {
    stress(16, false);
}

#[test]
fn more_threads_than_shards() {
    stress(2, false);
}

#[test]
fn sealed_while_buffers_come_back() {
    stress(4, true);
}

#[test]
fn threads_that_come_and_go_leave_nothing_behind() {
    let front = ThreadCache::new(1, 1000, 8);
    let rounds = if cfg!(miri) { 4 } else { 200 };
    for _ in 0..rounds {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let buffer = front.take(0).unwrap_or_else(|| {
                        front.count_allocated();
                        Entry::new(0, BYTES, AtomicBool::new(false))
                    });
                    use_alone(&buffer);
                    buffer.store(false, Ordering::Relaxed);
                    assert!(front.put(buffer, 0).victim.is_none());
                });
            }
        });
        front.validate().unwrap();
    }
    let totals = front.totals();
    assert_eq!(totals.get_from_pool + totals.allocated, 3 * rounds);
    assert!(totals.allocated <= 3, "{} buffers for three threads at a time", totals.allocated);
}

#[test]
fn a_get_and_its_put_allocate_nothing() {
    let front = ThreadCache::new(CLASSES, 100, 4);
    for class in 0..CLASSES {
        assert!(front.put(Entry::new(class, BYTES, AtomicBool::new(false)), 0).victim.is_none());
    }
    let before = heap_calls::by_this_thread();
    for step in 0..1000 {
        let buffer = front.take(step % CLASSES).unwrap();
        assert!(front.put(buffer, step).victim.is_none());
    }
    let last = front.take(0);
    assert!(last.is_some() && front.take(0).is_none());
    assert_eq!(heap_calls::by_this_thread(), before);
}
