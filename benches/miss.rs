#![allow(missing_docs)] // Criterion makes the entry point.
#![allow(clippy::print_stderr)] // Says why a back-end is missing.

//! A get that finds no idle buffer, and the end of that buffer, for each back-end that is here. The pool keeps nothing
//! (a limit of 0), so that every get is a miss.
//!
//! ```text
//!   BACK-END/cut      adaptive: out of memory that is locked already, and back to it
//!   BACK-END/locked   tensorflow: a call that locks and one that releases, each time
//!   beside/...        what the baselines do when they have nothing: allocate and free; or lock and unlock
//! ```
//!
//! `mutex_hashmap` and `array_queue` clear what they allocate, the pool and `malloc` do not.
//!
//! `cargo bench --bench miss`

mod measured;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use pinpool::{Backend, Pool, Preset};

use measured::keepers::{ArrayQueues, Keeper, Malloc, MutexHashMap, SIZES, bytes_of};
use measured::{PinPerUse, sources};

/// The largest there is: 64 KiB.
const SIZE: usize = SIZES - 1;

fn each_time(criterion: &mut Criterion, group: &str, name: &str, keeper: &impl Keeper) {
    let mut group = criterion.benchmark_group(group);
    // Dropped, not put: what a baseline would keep is gone, and the pool keeps nothing.
    group.bench_function(name, |bencher| bencher.iter(|| drop(black_box(keeper.get(SIZE)))));
}

fn that_keeps_nothing(backend: Backend, preset: Preset) -> Pool {
    let builder = sources::builder(backend).preset(preset).pool_size_limit(0).auto_resize(false);
    builder.build().expect("a back-end that is here")
}

fn miss(criterion: &mut Criterion) {
    let named = ["heap", "mlock", "sim", "cuda"].map(|name| name.parse().ok());
    let named: Vec<Backend> = named.into_iter().flatten().collect();
    let (here, missing) = sources::available(&named, bytes_of(SIZE) as u64);
    missing.iter().for_each(|reason| eprintln!("left out: {reason}"));
    for backend in here {
        let cut = that_keeps_nothing(backend.clone(), Preset::Adaptive);
        // Held throughout: the granule that all others are cut from stays locked.
        let anchor = cut.get(bytes_of(0)).expect("a page");
        each_time(criterion, backend.name(), "cut", &cut);
        drop(anchor);
        let stats = cut.stats();
        assert_eq!(
            (stats.hits, stats.failed_gets, stats.underlying.allocs),
            (0, 0, 1),
            "{backend:?}: more than misses"
        );

        let locked = that_keeps_nothing(backend.clone(), Preset::Tensorflow);
        each_time(criterion, backend.name(), "locked", &locked);
        let stats = locked.stats();
        assert_eq!((stats.hits, stats.failed_gets), (0, 0), "{backend:?}: more than misses");
        assert_eq!(stats.underlying.allocs, stats.gets, "{backend:?}: a get locked nothing");
    }
    each_time(criterion, "beside", "mutex_hashmap", &MutexHashMap::default());
    each_time(criterion, "beside", "array_queue", &ArrayQueues::default());
    each_time(criterion, "beside", "malloc", &Malloc);
    if let Some(pin_per_use) = PinPerUse::where_allowed() {
        each_time(criterion, "beside", "pin_per_use", &pin_per_use);
    }
}

criterion_group! { name = benches; config = measured::criterion(); targets = miss }
criterion_main!(benches);
