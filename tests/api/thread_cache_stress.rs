//! Many threads on one thread cache, and balanced figures afterwards.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, mpsc};

use pinpool::unstable::thread_cache::{Entry, ThreadCache};

use crate::draw::Draw;
use crate::heap_calls;

const CLASSES: u32 = 5;
const THREADS: usize = if cfg!(miri) { 3 } else { 8 };
const STEPS: u64 = if cfg!(miri) { 60 } else { 40_000 };
const BYTES: usize = 64;

/// What all threads did.
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

fn count_one(number: &AtomicU64) {
    number.fetch_add(1, Ordering::Relaxed);
}

type Buffer = Box<Entry<AtomicBool>>;

/// Marks a buffer as in use: no other thread may hold it.
fn use_alone(buffer: &Buffer) {
    assert!(!buffer.swap(true, Ordering::Relaxed), "two threads have one buffer");
}

fn put_back(cache: &ThreadCache<AtomicBool>, done: &Done, buffer: Buffer) {
    assert!(buffer.swap(false, Ordering::Relaxed));
    count_one(&done.puts);
    let put = cache.put(buffer);
    if put.victim.is_some() {
        count_one(&done.victims);
    }
    if put.handed_back.is_some() {
        count_one(&done.handed_back);
    }
    if put.check_due {
        count_one(&done.checks);
        cache.reset_window();
    }
}

/// Gets, puts, sends and receives; one thread also evicts, drains, changes the limit and reads figures.
fn work(
    cache: &ThreadCache<AtomicBool>,
    done: &Done,
    thread: usize,
    to: &mpsc::Sender<Buffer>,
    from: &mpsc::Receiver<Buffer>,
) {
    let mut draw = Draw(0x9e37_79b9_7f4a_7c15 ^ (thread as u64 + 1) << 32);
    let mut held = Vec::new();
    for step in 0..STEPS {
        let now = step / 64;
        if thread == 0 {
            cache.begin_tick(now);
        }
        let class = u32::try_from(draw.below(u64::from(CLASSES))).unwrap();
        match draw.below(16) {
            0..7 => {
                let buffer = cache.take(class);
                count_one(if buffer.is_some() { &done.hits } else { &done.misses });
                let buffer = buffer.unwrap_or_else(|| {
                    cache.count_allocated();
                    Entry::new(class, BYTES, AtomicBool::new(false))
                });
                assert_eq!(buffer.class(), class);
                use_alone(&buffer);
                held.push(buffer);
            }
            7..11 => held.pop().into_iter().for_each(|buffer| put_back(cache, done, buffer)),
            11..13 => held.pop().into_iter().for_each(|buffer| to.send(buffer).unwrap()),
            13..15 => from.try_iter().take(4).for_each(|buffer| put_back(cache, done, buffer)),
            _ if thread > 0 => {}
            _ => {
                let removed = |_| count_one(&done.removed);
                match draw.below(6) {
                    0 => cache.evict_oldest().into_iter().for_each(removed),
                    1 => cache.drain_older_than(now.saturating_sub(1), removed),
                    2 => cache.set_limit(usize::try_from(draw.below(30)).unwrap(), removed),
                    3 if step % 256 == 0 => cache.drain_all(removed),
                    4 => {
                        cache.set_attention(step % 2 == 0);
                        assert!(cache.idle_bytes() <= BYTES * 10_000);
                    }
                    _ => assert!(cache.window().put <= cache.totals().put),
                }
            }
        }
    }
    held.into_iter().for_each(|buffer| put_back(cache, done, buffer));
}

fn check_balance(shards: usize, seal: bool) {
    let (cache, done) = (ThreadCache::new(CLASSES, 12, shards), Done::default());
    let start = Barrier::new(THREADS);
    let (senders, mut receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Buffer>()).unzip();
    receivers.rotate_left(1);
    std::thread::scope(|scope| {
        for (thread, (to, from)) in senders.into_iter().zip(receivers).enumerate() {
            let (cache, done, start) = (&cache, &done, &start);
            scope.spawn(move || {
                start.wait();
                work(cache, done, thread, &to, &from);
                drop(to);
                if seal && thread == 1 {
                    cache.seal();
                }
                from.iter().for_each(|buffer| put_back(cache, done, buffer));
            });
        }
    });

    cache.validate().unwrap();
    let [hits, misses, puts, victims, handed_back, removed, checks] =
        [&done.hits, &done.misses, &done.puts, &done.victims, &done.handed_back, &done.removed, &done.checks]
            .map(|number| number.load(Ordering::Relaxed));
    let totals = cache.totals();
    let idle = cache.idle_count() as u64;
    assert_eq!((totals.get_from_pool, totals.allocated, totals.evicted), (hits, misses, victims));
    assert_eq!(hits + misses, puts, "every buffer that was got was put");
    assert_eq!(totals.put + handed_back, puts);
    assert_eq!(totals.put, hits + victims + removed + idle, "each buffer that was kept left once or is here");
    assert!(idle <= cache.limit() as u64);
    assert_eq!(cache.idle_bytes() as u64, idle * BYTES as u64);
    // Thread 0 lowers the limit now and then, which causes evictions and checks.
    assert!(cfg!(miri) || victims > 1000 && checks > 0, "{victims} evictions, {checks} checks");

    let mut drained = 0;
    cache.drain_all(|_| drained += 1);
    assert_eq!((drained, cache.idle_count()), (idle, 0));
    cache.validate().unwrap();
}

#[test]
fn figures_balance_with_a_shard_for_each_thread() {
    check_balance(16, false);
}

#[test]
fn figures_balance_with_more_threads_than_shards() {
    check_balance(2, false);
}

#[test]
fn figures_balance_after_a_seal_while_buffers_are_put() {
    check_balance(4, true);
}

#[test]
fn threads_that_come_and_go_leave_nothing_behind() {
    let cache = ThreadCache::new(1, 1000, 8);
    let rounds = if cfg!(miri) { 4 } else { 200 };
    for _ in 0..rounds {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let buffer = cache.take(0).unwrap_or_else(|| {
                        cache.count_allocated();
                        Entry::new(0, BYTES, AtomicBool::new(false))
                    });
                    use_alone(&buffer);
                    buffer.store(false, Ordering::Relaxed);
                    assert!(cache.put(buffer).victim.is_none());
                });
            }
        });
        cache.validate().unwrap();
    }
    let totals = cache.totals();
    assert_eq!(totals.get_from_pool + totals.allocated, 3 * rounds);
    assert!(totals.allocated <= 3, "{} buffers for three threads at a time", totals.allocated);
}

#[test]
fn a_get_and_its_put_allocate_nothing() {
    let cache = ThreadCache::new(CLASSES, 100, 4);
    for class in 0..CLASSES {
        assert!(cache.put(Entry::new(class, BYTES, AtomicBool::new(false))).victim.is_none());
    }
    let before = heap_calls::by_this_thread();
    for step in 0..1000 {
        let buffer = cache.take(step % CLASSES).unwrap();
        assert!(cache.put(buffer).victim.is_none());
    }
    let last = cache.take(0);
    assert!(last.is_some() && cache.take(0).is_none());
    assert_eq!(heap_calls::by_this_thread(), before);
}
