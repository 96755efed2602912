//! A get and its put on the thread cache alone, beside other structures to build a pool on. `pinpool-bench hit` measures the
//! same patterns on the whole pool.
//!
//! `same`: every thread uses one class; `mix`: sixteen classes in turn; `cross`: one thread of a pair gets, the other puts,
//! up to eight buffers between them. Times are per pair of operations and thread, warm; threads are not bound to cores.
//!
//! `cargo bench --bench thread_cache`
#![allow(unsafe_code, missing_docs)] // `Slots` keeps raw pointers; criterion defines the entry point.

use std::collections::HashMap;
use std::hint::black_box;
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use crossbeam::queue::ArrayQueue;
use crossbeam::utils::{Backoff, CachePadded};
use parking_lot::Mutex;
use pinpool::unstable::thread_cache::{Entry, ThreadCache};

const CLASSES: u32 = 300;
/// Classes that `mix` uses.
const MIXED: u32 = 16;

/// In the place of a buffer: an address and a length.
type Buffer = (usize, usize);
type Item = Box<Entry<Buffer>>;

trait Baseline: Sync {
    fn take(&self, class: u32) -> Option<Item>;
    fn put(&self, item: Item);
}

impl Baseline for ThreadCache<Buffer> {
    fn take(&self, class: u32) -> Option<Item> {
        ThreadCache::take(self, class)
    }

    fn put(&self, item: Item) {
        assert!(ThreadCache::put(self, item).is_ok());
    }
}

/// One lock around everything, like the pools of TensorFlow and PyTorch.
#[derive(Default)]
struct MutexHashMap(Mutex<HashMap<u32, Vec<Item>>>);

impl Baseline for MutexHashMap {
    fn take(&self, class: u32) -> Option<Item> {
        self.0.lock().get_mut(&class)?.pop()
    }

    fn put(&self, item: Item) {
        self.0.lock().entry(item.class()).or_default().push(item);
    }
}

/// Sixty-four padded slots for each class, the thread's own first; without a limit and without an order of recency.
struct Slots(Vec<[CachePadded<AtomicPtr<Entry<Buffer>>>; 64]>);

impl Slots {
    /// The slots of a class, starting at the thread's own.
    fn of_class(&self, class: u32) -> impl Iterator<Item = &AtomicPtr<Entry<Buffer>>> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed));
        let own = OWN.with(|own| *own);
        (0..64).map(move |at| &*self.0[class as usize][(own + at) % 64])
    }
}

impl Baseline for Slots {
    fn take(&self, class: u32) -> Option<Item> {
        self.of_class(class).filter(|slot| !slot.load(Ordering::Relaxed).is_null()).find_map(|slot| {
            // Acquire: pairs with the release of `put`, which published the item.
            let item = slot.swap(ptr::null_mut(), Ordering::Acquire);
            // SAFETY: a pointer in a slot came from a box in `put`, and the swap made this thread its owner.
            (!item.is_null()).then(|| unsafe { Box::from_raw(item) })
        })
    }

    fn put(&self, item: Item) {
        let (class, item) = (item.class(), Box::into_raw(item));
        let mut free = self.of_class(class).filter(|slot| slot.load(Ordering::Relaxed).is_null());
        // Release: publishes the item.
        let store = |slot: &AtomicPtr<_>| {
            slot.compare_exchange(ptr::null_mut(), item, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        assert!(free.any(store));
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        while (0..CLASSES).any(|class| self.take(class).is_some()) {}
    }
}

#[derive(Debug, Clone, Copy)]
enum Pattern {
    Same,
    Mix,
    Cross,
}

/// `classes` is a power of two.
fn own_pairs(baseline: &dyn Baseline, classes: u32, pairs: u64) {
    let mut class = 0;
    for _ in 0..pairs {
        class = (class + 1) & (classes - 1);
        if let Some(mut item) = baseline.take(class) {
            item.1 = black_box(item.1);
            baseline.put(item);
        }
    }
}

/// The thread of a pair that gets.
fn pass_on(baseline: &dyn Baseline, queue: &ArrayQueue<Item>, pairs: u64) {
    for _ in 0..pairs {
        let mut item = wait_for(|| baseline.take(0));
        item.1 = black_box(item.1);
        let mut item = Some(item);
        wait_for(|| {
            item = queue.push(item.take()?).err();
            item.is_none().then_some(())
        });
    }
}

fn wait_for<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let backoff = Backoff::new();
    loop {
        match attempt() {
            Some(result) => return result,
            None => backoff.snooze(),
        }
    }
}

/// The time of the slowest thread, all started together.
fn run(baseline: &dyn Baseline, pattern: Pattern, threads: usize, pairs: u64) -> Duration {
    let queues: Vec<_> = (0..threads.div_ceil(2)).map(|_| CachePadded::new(ArrayQueue::new(8))).collect();
    let start = Barrier::new(threads);
    let work = |thread: usize, pairs| match pattern {
        Pattern::Same => own_pairs(baseline, 1, pairs),
        Pattern::Mix => own_pairs(baseline, MIXED, pairs),
        Pattern::Cross if thread.is_multiple_of(2) => pass_on(baseline, &queues[thread / 2], pairs),
        Pattern::Cross => (0..pairs).for_each(|_| baseline.put(wait_for(|| queues[thread / 2].pop()))),
    };
    let one = |thread: usize| {
        work(thread, 1000);
        start.wait();
        let begun = Instant::now();
        work(thread, pairs);
        begun.elapsed()
    };
    std::thread::scope(|scope| {
        let one = &one;
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("a bench thread panicked")).max().unwrap_or_default()
    })
}

fn thread_cache(criterion: &mut Criterion) {
    let shards = 2 * std::thread::available_parallelism().map_or(4, usize::from);
    let cache = ThreadCache::new(CLASSES, 1000, shards);
    let mutex_hashmap = MutexHashMap::default();
    let slots = Slots((0..CLASSES).map(|_| std::array::from_fn(|_| CachePadded::default())).collect());
    let baselines: [(&str, &dyn Baseline); 3] =
        [("thread_cache", &cache), ("mutex_hashmap", &mutex_hashmap), ("slots", &slots)];
    for (_, baseline) in baselines {
        for class in 0..MIXED {
            (0..40).for_each(|at| baseline.put(Entry::new(class, 4096, (at, 4096))));
        }
    }
    for (pattern, counts) in [(Pattern::Same, &[1, 2, 4][..]), (Pattern::Mix, &[1, 2, 4]), (Pattern::Cross, &[2, 4])] {
        let mut group = criterion.benchmark_group(format!("{pattern:?}").to_lowercase());
        for &threads in counts {
            for (name, baseline) in baselines {
                group.bench_function(format!("{threads}/{name}"), |bencher| {
                    bencher.iter_custom(|pairs| run(baseline, pattern, threads, pairs));
                });
            }
        }
    }
    cache.validate().expect("the counters of the thread cache agree");
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300))
        .without_plots();
    targets = thread_cache
}
criterion_main!(benches);
