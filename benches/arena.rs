//! A carve and a return in the arena when no memory must be committed, alongside plain best fit over `BTreeMap`s that ignores
//! granules, ages and separate regions. One pair is one buffer returned and one carved.
//!
//! `cargo bench --bench arena`

use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pinpool::unstable::arena::{Arena, ArenaPtr, GrowthLimits, GrowthMode, PlanOutcome, Retention};

const PAGE: u64 = 4096;
const GRANULE: u64 = 2 << 20;

/// A xorshift generator, so that every run has the same sizes.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap_or(0)
    }
}

/// An allocator of offsets.
trait Carver {
    fn carve(&mut self, bytes: u64) -> u64;
    fn give(&mut self, at: u64, bytes: u64);
}

struct PoolArena {
    arena: Arena,
    now_us: u64,
}

impl PoolArena {
    /// An arena with `bytes` committed and free.
    fn committed(bytes: u64) -> Self {
        let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
        arena.add_virtual_range(bytes.next_multiple_of(GRANULE)).expect("a range");
        let limits = GrowthLimits::UNLIMITED;
        let plan = arena.grow(bytes, PAGE, limits).expect("within the limits");
        let ptr = plan.ptr().expect("a buffer");
        assert!(arena.finish_plan(plan, PlanOutcome::Done, 0));
        arena.free(ptr, bytes, 0);
        Self { arena, now_us: 0 }
    }
}

impl Carver for PoolArena {
    fn carve(&mut self, bytes: u64) -> u64 {
        self.arena.carve(bytes, PAGE).expect("a hole").offset()
    }

    fn give(&mut self, at: u64, bytes: u64) {
        // A distinct time for every return keeps idle granules in separate runs.
        self.now_us += 1;
        self.arena.free(ArenaPtr::new(0, at), bytes, self.now_us);
    }
}

/// The baseline: best fit, lowest address, merging with both neighbours.
struct BestFit {
    len_by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl BestFit {
    fn committed(bytes: u64) -> Self {
        Self { len_by_start: [(0, bytes)].into(), by_len: [(bytes, 0)].into() }
    }
}

impl Carver for BestFit {
    fn carve(&mut self, bytes: u64) -> u64 {
        let &(len, start) = self.by_len.range((bytes, 0)..).next().expect("a hole");
        self.by_len.remove(&(len, start));
        self.len_by_start.remove(&start);
        if len > bytes {
            self.len_by_start.insert(start + bytes, len - bytes);
            self.by_len.insert((len - bytes, start + bytes));
        }
        start
    }

    fn give(&mut self, at: u64, bytes: u64) {
        let (mut start, mut len) = (at, bytes);
        if let Some((&before, &before_len)) = self.len_by_start.range(..at).next_back()
            && before + before_len == at
        {
            self.len_by_start.remove(&before);
            self.by_len.remove(&(before_len, before));
            (start, len) = (before, before_len + len);
        }
        if let Some(after_len) = self.len_by_start.remove(&(at + bytes)) {
            self.by_len.remove(&(after_len, at + bytes));
            len += after_len;
        }
        self.len_by_start.insert(start, len);
        self.by_len.insert((len, start));
    }
}

/// Sizes of a loader's buffers: pages to some MiB, small ones more often.
fn mixed(random: &mut Random) -> u64 {
    let doubling = random.next() % 10;
    PAGE * (1 + random.next() % (1 << doubling))
}

fn tiny(_: &mut Random) -> u64 {
    PAGE
}

/// Fills the carver, frees every third buffer to make holes, then measures pairs.
fn pairs<C: Carver>(
    criterion: &mut Criterion,
    group: &str,
    name: &str,
    live: usize,
    size: fn(&mut Random) -> u64,
    committed: fn(u64) -> C,
) {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let sizes: Vec<u64> = (0..live + live / 2).map(|_| size(&mut random)).collect();
    let mut carver = committed(sizes.iter().sum::<u64>() * 5 / 4);
    let mut buffers: Vec<(u64, u64)> = sizes.iter().map(|&bytes| (carver.carve(bytes), bytes)).collect();
    for _ in 0..live / 2 {
        let (at, bytes) = buffers.swap_remove(random.below(buffers.len()));
        carver.give(at, bytes);
    }
    assert_eq!(buffers.len(), live);
    criterion.benchmark_group(group).bench_function(BenchmarkId::from_parameter(name), |bencher| {
        bencher.iter(|| {
            let which = random.below(buffers.len());
            let (at, bytes) = buffers[which];
            carver.give(at, bytes);
            let bytes = size(&mut random);
            buffers[which] = black_box((carver.carve(bytes), bytes));
        });
    });
}

fn arena(criterion: &mut Criterion) {
    let group = "return and carve, 10000 live, 4 KiB to 2 MiB";
    pairs(criterion, group, "arena", 10_000, mixed, PoolArena::committed);
    pairs(criterion, group, "best fit over BTreeMap", 10_000, mixed, BestFit::committed);
    let group = "return and carve, 1000000 live, 4 KiB";
    pairs(criterion, group, "arena", 1_000_000, tiny, PoolArena::committed);
    pairs(criterion, group, "best fit over BTreeMap", 1_000_000, tiny, BestFit::committed);
}

criterion_group!(benches, arena);
criterion_main!(benches);
