#![allow(unsafe_code, missing_docs)] // Two of the baselines keep raw pointers; criterion makes the entry point.

//! A get and its put on the front alone, beside what else one could build a pool on.
//!
//! `same`: every thread uses one class; `mix`: sixteen classes in turn; `cross`: one thread of a pair gets, the other puts,
//! up to eight buffers between them. Times are per pair of operations and thread, warm; threads are not bound to cores.

use criterion::{Criterion, criterion_group, criterion_main};
use crossbeam::queue::ArrayQueue;
use crossbeam::utils::{Backoff, CachePadded};
use parking_lot::Mutex;
use pinpool::thread_cache::{Entry, ThreadCache};
use std::collections::HashMap;
use std::hint::black_box;
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const CLASSES: u32 = 300;

/// What stands for a buffer: an address and a length.
type Block = (usize, usize);
type Item = Box<Entry<Block>>;

/// One way to keep buffers.
trait Keeper: Sync {
    fn take(&self, class: u32) -> Option<Item>;
    fn put(&self, item: Item);
}

impl Keeper for ThreadCache<Block> {
    fn take(&self, class: u32) -> Option<Item> {
        ThreadCache::take(self, class)
    }

    fn put(&self, item: Item) {
        let put = ThreadCache::put(self, item, 1);
        assert!(put.victim.is_none() && put.handed_back.is_none());
    }
}

/// One lock around everything, as TensorFlow's and PyTorch's pools have it.
#[derive(Default)]
struct MutexHashMap(Mutex<HashMap<u32, Vec<Item>>>);

impl Keeper for MutexHashMap {
    fn take(&self, class: u32) -> Option<Item> {
        self.0.lock().get_mut(&class)?.pop()
    }

    fn put(&self, item: Item) {
        self.0.lock().entry(item.class()).or_default().push(item);
    }
}

/// A lock-free queue for each class.
struct ArrayQueues(Vec<ArrayQueue<Item>>);

impl Keeper for ArrayQueues {
    fn take(&self, class: u32) -> Option<Item> {
        self.0[class as usize].pop()
    }

    fn put(&self, item: Item) {
        assert!(self.0[item.class() as usize].push(item).is_ok());
    }
}

/// Sixty-four padded slots for each class, the thread's own first; neither a limit nor an order of recency.
struct Slots(Vec<[CachePadded<AtomicPtr<Entry<Block>>>; 64]>);

impl Slots {
    fn own() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed));
        OWN.with(|own| *own)
    }
}

impl Keeper for Slots {
    fn take(&self, class: u32) -> Option<Item> {
        let (slots, own) = (&self.0[class as usize], Self::own());
        (0..64).map(|i| &slots[(own + i) % 64]).find_map(|slot| {
            let found = !slot.load(Ordering::Relaxed).is_null();
            let item = if found { slot.swap(ptr::null_mut(), Ordering::Acquire) } else { ptr::null_mut() };
            // SAFETY: a pointer in a slot came out of a box in `put`, and the exchange took it out.
            (!item.is_null()).then(|| unsafe { Box::from_raw(item) })
        })
    }

    fn put(&self, item: Item) {
        let (slots, own) = (&self.0[item.class() as usize], Self::own());
        let item = Box::into_raw(item);
        let slots = (0..64).map(|i| &slots[(own + i) % 64]);
        let mut free = slots.filter(|slot| slot.load(Ordering::Relaxed).is_null());
        let laid = |slot: &CachePadded<AtomicPtr<_>>| {
            slot.compare_exchange(ptr::null_mut(), item, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        assert!(free.any(laid));
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        while (0..CLASSES).any(|class| self.take(class).is_some()) {}
    }
}

/// No pool at all.
struct Malloc;

impl Keeper for Malloc {
    fn take(&self, class: u32) -> Option<Item> {
        let block: Vec<u8> = black_box(Vec::with_capacity(32 << 10));
        black_box(block.as_ptr());
        drop(block);
        let _ = class;
        None
    }

    fn put(&self, _: Item) {}
}

/// Eight slots between a thread that gets and one that puts.
type Between = [CachePadded<AtomicPtr<Entry<Block>>>; 8];

fn seeded(keeper: &dyn Keeper, classes: u32, each: usize) {
    for class in 0..classes {
        (0..each).for_each(|at| keeper.put(Entry::new(class, 4096, (at, 4096))));
    }
}

/// `classes` is a power of two.
fn own_pairs(keeper: &dyn Keeper, classes: u32, pairs: u64) {
    let mut class = 0;
    for _ in 0..pairs {
        class = (class + 1) & (classes - 1);
        if let Some(mut item) = keeper.take(class) {
            item.1 = black_box(item.1);
            keeper.put(item);
        }
    }
}

fn getter(keeper: &dyn Keeper, between: &Between, pairs: u64) {
    for slot in between.iter().cycle().take(usize::try_from(pairs).unwrap()) {
        let backoff = Backoff::new();
        let mut item = loop {
            match keeper.take(0) {
                Some(item) => break item,
                None => backoff.snooze(),
            }
        };
        item.1 = black_box(item.1);
        let item = Box::into_raw(item);
        while !slot.load(Ordering::Acquire).is_null() {
            backoff.snooze();
        }
        slot.store(item, Ordering::Release);
    }
}

fn putter(keeper: &dyn Keeper, between: &Between, pairs: u64) {
    for slot in between.iter().cycle().take(usize::try_from(pairs).unwrap()) {
        let backoff = Backoff::new();
        let item = loop {
            let item = slot.load(Ordering::Acquire);
            if !item.is_null() {
                break item;
            }
            backoff.snooze();
        };
        slot.store(ptr::null_mut(), Ordering::Release);
        // SAFETY: the getter laid down a box and left it.
        keeper.put(unsafe { Box::from_raw(item) });
    }
}

#[derive(Clone, Copy)]
enum Pattern {
    Same,
    Mix,
    Cross,
}

/// The time of the slowest thread, all started together.
fn run(keeper: &dyn Keeper, pattern: Pattern, threads: usize, pairs: u64) -> Duration {
    let betweens: Vec<Between> = (0..threads.div_ceil(2)).map(|_| Default::default()).collect();
    let start = Barrier::new(threads);
    let one = |thread: usize| {
        let warm = 1000;
        match pattern {
            Pattern::Same => own_pairs(keeper, 1, warm),
            Pattern::Mix => own_pairs(keeper, 16, warm),
            Pattern::Cross => {}
        }
        start.wait();
        let began = Instant::now();
        match pattern {
            Pattern::Same => own_pairs(keeper, 1, pairs),
            Pattern::Mix => own_pairs(keeper, 16, pairs),
            Pattern::Cross if thread.is_multiple_of(2) => getter(keeper, &betweens[thread / 2], pairs),
            Pattern::Cross => putter(keeper, &betweens[thread / 2], pairs),
        }
        began.elapsed()
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    })
}

fn contention(criterion: &mut Criterion) {
    let shards = 2 * std::thread::available_parallelism().map_or(4, usize::from);
    let front = ThreadCache::new(CLASSES, 1000, shards);
    let mutex_hashmap = MutexHashMap::default();
    let array_queues = ArrayQueues((0..CLASSES).map(|_| ArrayQueue::new(256)).collect());
    let slots = Slots((0..CLASSES).map(|_| std::array::from_fn(|_| CachePadded::default())).collect());
    let keepers: [(&str, &dyn Keeper); 4] =
        [("front", &front), ("mutex_hashmap", &mutex_hashmap), ("array_queue", &array_queues), ("slots", &slots)];
    for (_, keeper) in keepers {
        seeded(keeper, 16, 40);
    }
    let with_malloc = keepers.into_iter().chain([("malloc", &Malloc as &dyn Keeper)]);

    for (pattern, name, counts) in
        [(Pattern::Same, "same", &[1, 2, 4][..]), (Pattern::Mix, "mix", &[1, 2, 4]), (Pattern::Cross, "cross", &[2, 4])]
    {
        let mut group = criterion.benchmark_group(name);
        for &threads in counts {
            for (keeper_name, keeper) in with_malloc.clone() {
                if keeper_name == "malloc" && !matches!(pattern, Pattern::Same) {
                    continue;
                }
                group.bench_function(format!("{threads}/{keeper_name}"), |bencher| {
                    bencher.iter_custom(|pairs| run(keeper, pattern, threads, pairs));
                });
            }
        }
        group.finish();
    }
    front.validate().expect("the figures are of a sound front");
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300))
        .without_plots();
    targets = contention
}
criterion_main!(benches);
