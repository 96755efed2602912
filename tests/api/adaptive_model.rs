//! Random operations on an adaptive pool, with time, recounted after each step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pinpool::unstable::{LogSampler, ManualClock};
use pinpool::{Backend, PinnedBuf, Pool, Request};
use pinpool_replay::SimSource;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Get { len: usize, align: usize },
    TryGet(usize),
    Put(usize),
    PutAll,
    Wait { seconds: u64 },
    Trim(u64),
    Clear,
    Reserve(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let len = || prop_oneof![4 => 0..9000_usize, 3 => 0..400_000_usize, 1 => 0..9_000_000_usize];
    prop_oneof![
        12 => (len(), prop::sample::select(vec![1, 4096, 8192, 65_536])).prop_map(|(len, align)| Step::Get { len, align }),
        2 => len().prop_map(Step::TryGet),
        10 => any::<usize>().prop_map(Step::Put),
        1 => Just(Step::PutAll),
        3 => (0..60_u64).prop_map(|seconds| Step::Wait { seconds }),
        1 => (0..16_u64 << 20).prop_map(Step::Trim),
        1 => Just(Step::Clear),
        1 => (0..1_u64 << 20).prop_map(Step::Reserve),
    ]
}

/// A buffer in use, and what was written to it.
struct Held {
    buffer: PinnedBuf,
    mark: u8,
}

/// Both ends and the middle: an overlapping neighbour writes to one of the ends.
fn marked_bytes(len: usize) -> [usize; 3] {
    [0, len / 2, len.saturating_sub(1)]
}

fn run(
    backend: Backend,
    write: bool,
    max_bytes: Option<u64>,
    limit: u64,
    steps: Vec<Step>,
) -> Result<(), TestCaseError> {
    let clock = ManualClock::default();
    let pool = Pool::builder()
        .without_env()
        .backend(backend)
        .max_bytes(max_bytes)
        .setting("pool_size_limit", limit)
        .setting("auto_resize", false)
        .wait(Duration::ZERO)
        .unstable_pressure("/dev/null")
        .unstable_log_sampler(LogSampler::new())
        .unstable_clock(clock.clone())
        .build()
        .unwrap();
    let mut held: Vec<Held> = Vec::new();
    let mut reserve_bytes = 0;
    for (at, step) in steps.into_iter().enumerate() {
        let got = match step {
            Step::Get { len, align } => match pool.get_with(Request::new(len).align(align)) {
                Ok(buffer) => {
                    prop_assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(align.max(4096)));
                    Some((buffer, len))
                }
                Err(error) => {
                    prop_assert!(max_bytes.is_some() && error.is_limit(), "{}", error);
                    None
                }
            },
            Step::TryGet(len) => {
                let asked = pool.stats().memory.pin.count;
                let got = pool.try_get(len).unwrap();
                prop_assert_eq!(pool.stats().memory.pin.count, asked);
                got.map(|buffer| (buffer, len))
            }
            Step::Put(which) => {
                if !held.is_empty() {
                    held.swap_remove(which % held.len());
                }
                None
            }
            Step::PutAll => {
                held.clear();
                None
            }
            Step::Wait { seconds } => {
                for _ in 0..seconds {
                    clock.advance_us(1_000_000);
                    pool.maintain();
                    prop_assert!(pool.stats().memory.idle <= limit);
                }
                if seconds >= 10 {
                    prop_assert_eq!(pool.stats().memory.idle, 0, "buffers idle for ten seconds leave the thread cache");
                }
                None
            }
            Step::Trim(to_bytes) => {
                pool.trim(to_bytes);
                None
            }
            Step::Clear => {
                pool.clear();
                prop_assert_eq!(pool.stats().memory.idle, 0);
                None
            }
            Step::Reserve(bytes) => {
                if pool.reserve(bytes).is_ok() {
                    reserve_bytes += bytes;
                } else {
                    prop_assert!(max_bytes.is_some());
                }
                None
            }
        };
        if let Some((mut buffer, len)) = got {
            prop_assert_eq!(buffer.len(), len);
            prop_assert!(buffer.capacity() >= len);
            let mark = u8::try_from(at % 255).unwrap() + 1;
            if write && len > 0 {
                marked_bytes(len).iter().for_each(|&at| buffer.wait_slice_mut().unwrap()[at] = mark);
            }
            held.push(Held { buffer, mark });
        }
        // Buffers do not overlap, have distinct ids and hold what was written to them.
        let live = held.iter().filter(|held| !held.buffer.is_empty());
        let mut by_address = BTreeMap::new();
        for Held { buffer, mark } in live.clone() {
            by_address.insert(buffer.as_ptr().addr(), (buffer.capacity(), buffer.id()));
            let intact =
                !write || marked_bytes(buffer.len()).iter().all(|&place| buffer.wait_slice().unwrap()[place] == *mark);
            prop_assert!(intact, "overwritten: {:?}", buffer);
        }
        prop_assert_eq!(by_address.len(), live.clone().count());
        let ids: std::collections::BTreeSet<_> = by_address.values().map(|(_, id)| id).collect();
        prop_assert_eq!(ids.len(), by_address.len());
        let mut end = 0;
        for (start, (capacity, _)) in &by_address {
            prop_assert!(*start >= end, "overlap at {start:#x}");
            end = start + capacity;
        }
        let stats = pool.stats();
        prop_assert_eq!(stats.validate(), Ok(()));
        prop_assert_eq!(stats.memory.in_use, by_address.len() as u64);
        prop_assert!(
            stats.memory.in_use_bytes >= by_address.values().map(|(capacity, _)| *capacity as u64).sum::<u64>()
        );
        prop_assert!(stats.memory.held_bytes <= max_bytes.unwrap_or(u64::MAX));
        prop_assert!(stats.memory.reserve_bytes >= reserve_bytes);
        prop_assert_eq!(stats.memory.pin.bytes - stats.memory.unpin.bytes, stats.memory.held_bytes);
        prop_assert_eq!(stats.memory.transit_bytes, 0);
    }
    drop(held);
    pool.clear();
    let stats = pool.stats();
    prop_assert_eq!((stats.memory.in_use, stats.memory.held_bytes), (0, stats.memory.reserve_bytes));
    Ok(())
}

fn max_bytes() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![2 => Just(None), 1 => (4096..1_u64 << 20).prop_map(Some), 2 => (1 << 20..40_u64 << 20).prop_map(Some)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 96 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_operations_over_virtual_memory_balance(max_bytes in max_bytes(), limit in 0..9_u64, steps in steps()) {
        run(Backend::Source(Arc::new(SimSource::new(1 << 40))), false, max_bytes, limit, steps)?;
    }

    #[test]
    fn any_operations_over_discrete_regions_balance(max_bytes in max_bytes(), limit in 0..9_u64, steps in steps()) {
        run(Backend::Source(Arc::new(SimSource::discrete(1 << 40))), false, max_bytes, limit, steps)?;
    }

    #[test]
    fn any_operations_over_written_memory_balance(max_bytes in max_bytes(), limit in 0..9_u64, steps in steps()) {
        run(Backend::Heap, true, max_bytes, limit, steps)?;
    }
}
