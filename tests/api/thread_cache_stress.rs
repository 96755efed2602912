//! Many threads on one thread cache, and balanced counters afterwards.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, mpsc};

use pinpool::unstable::thread_cache::{Entry, ThreadCache};

use crate::draw::Draw;

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
    rejected: AtomicU64,
    removed: AtomicU64,
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
    if cache.put(buffer).is_err() {
        count_one(&done.rejected);
    }
    while cache.evict_over_limit().is_some() {
        count_one(&done.removed);
    }
}

/// Gets, puts, sends and receives; one also evicts, drains, changes the limit and reads counters.
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
        if thread == 0 && step % 64 == 0 {
            cache.begin_tick(now);
        }
        let class = u32::try_from(draw.below(u64::from(CLASSES))).unwrap();
        match draw.below(16) {
            0..7 => {
                let buffer = cache.take(class);
                count_one(if buffer.is_some() { &done.hits } else { &done.misses });
                let buffer = buffer.unwrap_or_else(|| Entry::new(class, BYTES, AtomicBool::new(false)));
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
                match draw.below(5) {
                    0 => cache.evict_oldest().into_iter().for_each(removed),
                    1 => cache.drain(now.saturating_sub(2), removed),
                    2 => cache.set_limit(usize::try_from(draw.below(30)).unwrap()),
                    3 if step % 256 == 0 => cache.drain(u64::MAX, removed),
                    _ => {
                        cache.set_slow_path(step % 2 == 0);
                        assert!(cache.counts().idle_bytes <= BYTES * 10_000);
                    }
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
    let [hits, misses, puts, rejected, removed] = [&done.hits, &done.misses, &done.puts, &done.rejected, &done.removed]
        .map(|number| number.load(Ordering::Relaxed));
    let counts = cache.counts();
    assert_eq!((counts.hits, counts.puts), (hits, puts - rejected));
    assert_eq!(hits + misses, puts, "every buffer that was taken was put");
    assert_eq!(counts.puts, hits + removed + counts.idle, "each buffer that was kept left once or is here");
    assert_eq!(counts.idle_bytes as u64, counts.idle * BYTES as u64);
    assert!(cfg!(miri) || removed > 1000, "{removed} removed");

    while cache.evict_over_limit().is_some() {}
    let idle = cache.counts().idle;
    assert_eq!(idle, counts.idle.min(cache.limit() as u64));
    let mut drained = 0;
    cache.drain(u64::MAX, |_| drained += 1);
    assert_eq!((drained, cache.counts().idle), (idle, 0));
    cache.validate().unwrap();
}

#[test]
fn counters_balance_with_a_shard_for_each_thread() {
    check_balance(16, false);
}

#[test]
fn counters_balance_with_more_threads_than_shards() {
    check_balance(2, false);
}

#[test]
fn counters_balance_after_a_seal_while_buffers_are_put() {
    check_balance(4, true);
}
