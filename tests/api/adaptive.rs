//! The adaptive preset from outside: sizes and settings that people will try, time, pressure, waits, the end.
//!
//! Time is a clock that the tests move; nothing sleeps.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use pinpool::backend::SimSource;
use pinpool::backend::Source;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::testing::FaultSource;
use pinpool::{Backend, Clock, LogSampler, ManualClock, OnFull, PinnedBuf, Pool, PoolBuilder, PressureSource, Stats};

use crate::captured_log::{count, lines, listen};
use crate::counting::Counting;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Longer than any test may take: who waits so long has failed.
const LONG: Duration = Duration::from_secs(3600);

fn over(source: Arc<dyn Source>) -> PoolBuilder {
    Pool::builder()
        .without_env()
        .backend(Backend::Source(source))
        .max_bytes(None)
        .wait(Duration::ZERO)
        .pressure(PressureSource::Off)
        .log_sampler(LogSampler::new())
}

/// A pool over a source that spans, and one over a source with walls.
fn both() -> [PoolBuilder; 2] {
    [SimSource::new(1 << 40), SimSource::discrete(1 << 40)].map(|source| over(Arc::new(source)))
}

fn spanning() -> PoolBuilder {
    over(Arc::new(SimSource::new(1 << 40)))
}

fn timed(builder: PoolBuilder) -> (Pool, ManualClock) {
    let clock = ManualClock::default();
    (builder.clock(Clock::Manual(clock.clone())).build().unwrap(), clock)
}

fn valid(pool: &Pool) -> Stats {
    let stats = pool.stats();
    assert_eq!(stats.validate(), Ok(()));
    stats
}

fn seconds(clock: &ManualClock, pool: &Pool, seconds: u64) -> Stats {
    clock.advance_us(seconds * 1_000_000);
    pool.poll();
    valid(pool)
}

/// Gets until there is no room.
fn fill(pool: &Pool, len: usize) -> Vec<PinnedBuf> {
    std::iter::from_fn(|| pool.get(len).ok()).collect()
}

fn until(what: impl Fn() -> bool) {
    while !what() {
        thread::yield_now();
    }
}

mod sizes {
    use super::*;

    #[test]
    fn that_people_try_are_served_whole_and_page_aligned_and_served_again() {
        for builder in both() {
            let pool = builder.build().unwrap();
            for len in [1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 64 * MIB + 1] {
                let mut buffer = pool.get(len).unwrap();
                let (id, address) = (buffer.id(), buffer.as_ptr());
                assert_eq!(buffer.len(), len);
                assert!(buffer.capacity() >= len && buffer.capacity() <= len.next_multiple_of(4096) * 9 / 8);
                assert!(address.addr().is_multiple_of(4096));
                let bytes = buffer.as_mut_slice().unwrap();
                (bytes[0], bytes[len - 1]) = (1, 2);
                drop(buffer);
                let again = pool.get(len).unwrap();
                assert_eq!((again.id(), again.as_ptr()), (id, address));
            }
            let stats = valid(&pool);
            assert_eq!((stats.hits, stats.misses, stats.in_use), (11, 5, 0));
        }
    }

    #[test]
    fn of_nothing_belong_to_no_pool_and_cost_nothing() {
        let pool = spanning().build().unwrap();
        let buffer = pool.get(0).unwrap();
        assert!(buffer.is_empty() && buffer.id().is_none() && !buffer.is_pinned());
        assert!(pool.try_get(0).unwrap().is_some());
        drop(buffer);
        assert_eq!((valid(&pool).gets, pool.stats().pinned_bytes), (0, 0));
    }

    #[test]
    fn beyond_reason_are_refused_as_requests() {
        let pool = spanning().build().unwrap();
        for len in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096] {
            assert!(pool.get(len).unwrap_err().is_request() || len < isize::MAX as usize, "{len}");
        }
        for align in [0, 3, 2 << 30] {
            assert!(pool.get_aligned(1, align).unwrap_err().is_request());
        }
        valid(&pool);
    }

    #[test]
    fn over_the_ceiling_are_refused_at_once_and_empty_nothing() {
        for builder in both() {
            let pool = builder.max_bytes(16 << 20).wait(LONG).build().unwrap();
            drop(pool.get(4 * MIB).unwrap());
            let error = pool.get(17 * MIB).unwrap_err();
            assert!(error.is_limit());
            let text = error.to_string();
            for part in ["asked 17825792 B", "idle 4194304", "in flight 0", "ceiling 16777216 B", "PINPOOL_MAX_BYTES"] {
                assert!(text.contains(part), "{part} is missing in: {text}");
            }
            let stats = valid(&pool);
            assert_eq!((stats.waits, stats.failed_gets, stats.reclaimed, stats.buffers_in_pool), (0, 1, 0, 1));
        }
    }

    #[test]
    fn over_the_machine_are_refused_by_the_source_and_empty_nothing() {
        for source in [SimSource::new(64 << 20), SimSource::discrete(64 << 20)] {
            let pool = over(Arc::new(source)).build().unwrap();
            drop(pool.get(4 * MIB).unwrap());
            for len in [65 * MIB, 1 << 36, 1 << 50] {
                let error = pool.get(len).unwrap_err();
                assert!(error.is_backend(), "{error}");
                assert!(!error.to_string().contains("PINPOOL_MAX_BYTES"), "there is none: {error}");
            }
            let stats = valid(&pool);
            assert_eq!((stats.failed_gets, stats.reclaimed, stats.buffers_in_pool), (3, 0, 1));
        }
    }

    #[test]
    fn what_the_source_refuses_is_made_of_what_is_idle() {
        for source in [SimSource::new(16 << 20), SimSource::discrete(16 << 20)] {
            let pool = over(Arc::new(source)).build().unwrap();
            let eight: Vec<_> = (0..8).map(|_| pool.get(2 * MIB).unwrap()).collect();
            drop(eight);
            assert_eq!(pool.get(16 * MIB).unwrap().len(), 16 * MIB);
            assert_eq!(valid(&pool).reclaimed, 8);
        }
    }

    #[test]
    fn aligned_over_a_page_start_there_and_end_inside() {
        for builder in both() {
            let pool = builder.build().unwrap();
            for align in [1, 4096, 8192, 64 * KIB, 2 * MIB, 1 << 30] {
                let buffer = pool.get_aligned(5000, align).unwrap();
                assert!(buffer.as_ptr().addr().is_multiple_of(align));
                assert!(buffer.capacity() >= 5000);
            }
            valid(&pool);
        }
    }

    #[test]
    fn ten_thousand_live_buffers_are_apart_and_all_come_back() {
        for builder in both() {
            let pool = builder.build().unwrap();
            let mut live: Vec<_> = (0..10_000).map(|n| pool.get(1 + n * 37 % 50_000).unwrap()).collect();
            assert_eq!(valid(&pool).in_use, 10_000);
            live.sort_by_key(|buffer| buffer.as_ptr().addr());
            assert!(
                live.windows(2).all(|pair| pair[0].as_ptr().addr() + pair[0].capacity() <= pair[1].as_ptr().addr())
            );
            assert_eq!(live.iter().map(PinnedBuf::id).collect::<BTreeSet<_>>().len(), 10_000);
            drop(live);
            pool.clear();
            assert_eq!((valid(&pool).pinned_bytes, pool.stats().in_use), (0, 0));
        }
    }

    #[test]
    fn a_million_tiny_gets_lock_one_granule() {
        let pool = spanning().build().unwrap();
        for n in 0..1_000_000 {
            drop(pool.get(1 + n % 100).unwrap());
        }
        let stats = valid(&pool);
        assert_eq!((stats.hits, stats.misses, stats.underlying.allocs), (999_999, 1, 1));
    }
}

mod settings {
    use super::*;

    #[test]
    fn a_limit_of_one_evicts_to_the_arena_and_a_limit_of_none_keeps_nothing() {
        for (limit, kept, evicted) in [(1, 1, 2), (0, 0, 3)] {
            let pool = spanning().pool_size_limit(limit).auto_resize(false).build().unwrap();
            let three: Vec<_> = [100, 5000, 10_000].iter().map(|&len| pool.get(len).unwrap()).collect();
            drop(three);
            let stats = valid(&pool);
            assert_eq!((stats.buffers_in_pool, stats.evicted, stats.underlying.frees), (kept, evicted, 0));
            drop(pool.get(50_000).unwrap());
            assert_eq!(pool.stats().underlying.allocs, 1, "what was evicted is cut again, without a driver call");
        }
    }

    #[test]
    fn a_ceiling_below_one_granule_can_be_used_up() {
        for (max_bytes, buffers) in [(1 << 20, 256), (100 << 10, 24), (4096, 1), (4095, 0)] {
            let pool = spanning().max_bytes(max_bytes).build().unwrap();
            let held = fill(&pool, 4096);
            assert_eq!(held.len(), buffers, "{max_bytes}");
            assert!(pool.get(4096).unwrap_err().is_limit());
            assert!(valid(&pool).peak_pinned_bytes <= max_bytes);
        }
    }

    #[test]
    fn retain_of_nothing_gives_back_what_has_left_the_front_and_none_keeps_it_for_ever() {
        let (hasty, clock) = timed(spanning().idle_timeout(Duration::ZERO));
        drop(hasty.get(2 * MIB).unwrap());
        assert_eq!(seconds(&clock, &hasty, 9).pinned_bytes, 2 << 20);
        assert_eq!(seconds(&clock, &hasty, 1).pinned_bytes, 0);
        let (keeping, clock) = timed(spanning().idle_timeout(None));
        drop(keeping.get(2 * MIB).unwrap());
        assert_eq!(seconds(&clock, &keeping, 1_000_000).pinned_bytes, 2 << 20);
        keeping.trim(0);
        assert_eq!(valid(&keeping).pinned_bytes, 0);
    }

    #[test]
    fn try_get_takes_what_is_idle_and_asks_for_nothing() {
        let pool = spanning().wait(LONG).build().unwrap();
        assert!(pool.try_get(5000).unwrap().is_none());
        drop(pool.get(5000).unwrap());
        let hit = pool.try_get(5001).unwrap().unwrap();
        assert_eq!(hit.len(), 5001);
        assert!(pool.try_get(5000).unwrap().is_none());
        let stats = valid(&pool);
        assert_eq!((stats.gets, stats.failed_gets, stats.underlying.allocs, stats.waits), (2, 0, 1, 0));
    }

    #[test]
    fn trim_goes_down_to_what_it_is_told_and_spares_what_is_in_use() {
        for builder in both() {
            let pool = builder.build().unwrap();
            let mut held: Vec<_> = (0..16).map(|_| pool.get(2 * MIB).unwrap()).collect();
            let used = held.pop();
            drop(held);
            let before = pool.stats().pinned_bytes;
            pool.trim(u64::MAX);
            assert_eq!(pool.stats().pinned_bytes, before);
            pool.trim(20 << 20);
            let stats = valid(&pool);
            assert!(stats.pinned_bytes <= 20 << 20 && stats.in_use == 1, "{stats:?}");
            pool.trim(0);
            // A region with walls stays as long as one buffer lies in it.
            assert!(valid(&pool).pinned_bytes <= 16 << 20);
            drop(used);
            pool.clear();
            let stats = valid(&pool);
            assert_eq!((stats.pinned_bytes, stats.window, stats.buffers_in_pool), (0, Default::default(), 0));
            assert_eq!(stats.underlying.alloc_bytes, stats.underlying.free_bytes);
        }
    }

    #[test]
    fn memory_that_stands_in_is_not_pinned_counted_and_gone_at_the_put() {
        let pool = over(Counting::spanning()).max_bytes(4 << 20).on_full(OnFull::Pageable).build().unwrap();
        let pinned: Vec<_> = (0..2).map(|_| pool.get(2 * MIB).unwrap()).collect();
        assert!(pinned.iter().all(PinnedBuf::is_pinned));
        let mut stand_in = pool.get(2 * MIB).unwrap();
        stand_in.as_mut_slice().unwrap().fill(3);
        assert!(!stand_in.is_pinned());
        let huge = pool.get(5 * MIB).unwrap();
        assert!(!huge.is_pinned(), "also what could never fit");
        let stats = valid(&pool);
        assert_eq!((stats.fallbacks, stats.in_use, stats.in_use_bytes, stats.failed_gets), (2, 4, 4 << 20, 0));
        let stream = SinkStream::new().unwrap();
        stand_in.copy_to(&stream, &mut SinkMem::new(2 * MIB)).unwrap().wait().unwrap();
        drop(huge);
        pool.poll();
        let stats = valid(&pool);
        assert_eq!((stats.puts, stats.in_use, stats.buffers_in_pool), (2, 2, 0));
    }

    #[test]
    fn without_a_stand_in_it_is_an_error() {
        let pool = spanning().max_bytes(4 << 20).on_full(OnFull::Error).build().unwrap();
        let _held = fill(&pool, MIB);
        assert!(pool.get(MIB).unwrap_err().is_limit());
        assert_eq!((valid(&pool).failed_gets, pool.stats().fallbacks), (2, 0));
    }
}

mod reserve {
    use super::*;

    #[test]
    fn serves_without_a_page_lock_and_stays_to_the_end() {
        for builder in both() {
            let pool = builder.reserve_bytes(8 << 20).build().unwrap();
            assert_eq!((valid(&pool).reserve_bytes, pool.stats().pinned_bytes), (8 << 20, 8 << 20));
            let held: Vec<_> = (0..4).map(|_| pool.get(2 * MIB).unwrap()).collect();
            assert_eq!(valid(&pool).underlying.allocs, 1);
            drop(held);
            pool.trim(0);
            pool.clear();
            assert_eq!(valid(&pool).pinned_bytes, 8 << 20);
        }
    }

    #[test]
    fn adds_up_and_makes_idle_memory_leave() {
        let pool = spanning().max_bytes(16 << 20).build().unwrap();
        pool.prewarm(0).unwrap();
        drop(fill(&pool, 2 * MIB));
        pool.prewarm(4 << 20).unwrap();
        pool.prewarm_classes(&[(MIB, 3), (100, 1), (0, 9)]).unwrap();
        let stats = valid(&pool);
        assert_eq!((stats.reserve_bytes, stats.max_bytes), (8 << 20, Some(16 << 20)));
        assert!(stats.pinned_bytes <= 16 << 20);
        for bytes in [9 << 20, 1 << 40, u64::MAX] {
            let error = pool.prewarm(bytes).unwrap_err();
            assert!(error.is_limit(), "{error}");
        }
        assert!(pool.prewarm_classes(&[(MIB, usize::MAX)]).unwrap_err().is_request());
        assert_eq!(valid(&pool).reserve_bytes, 8 << 20);
    }

    #[test]
    fn is_touched_by_as_many_threads_as_were_asked_for() {
        let cores = std::thread::available_parallelism().unwrap().get();
        for (asked, touching) in [(None, cores), (Some(3), 3), (Some(0), 1)] {
            let source = Counting::spanning();
            let pool = over(source.clone()).pin_threads(asked).reserve_bytes(2 << 20).build().unwrap();
            assert_eq!((source.threads(), valid(&pool).reserve_bytes), (touching, 2 << 20));
        }
    }

    #[test]
    fn under_a_small_ceiling_is_as_large_as_that_allows() {
        let pool = spanning().max_bytes(1 << 20).reserve_bytes(1 << 20).build().unwrap();
        assert_eq!(valid(&pool).reserve_bytes, 1 << 20);
        assert_eq!(fill(&pool, 4096).len(), 256);
    }

    #[test]
    fn that_no_range_can_hold_or_no_machine_has_is_refused_and_given_back() {
        let source = Counting::spanning();
        let pool = over(source.clone()).build().unwrap();
        for bytes in [9 << 40, 2 << 40, u64::MAX] {
            assert!(pool.prewarm(bytes).unwrap_err().is_backend() || bytes == u64::MAX);
        }
        assert_eq!((source.held_bytes(), valid(&pool).pinned_bytes), (0, 0));
    }

    #[test]
    fn without_growth_is_all_there_is() {
        for builder in both() {
            let pool = builder.reserve_bytes(8 << 20).growth(false).wait(LONG).build().unwrap();
            let error = pool.get(9 * MIB).unwrap_err();
            assert!(error.is_limit() && error.to_string().contains("PINPOOL_RESERVE"), "{error}");
            let held: Vec<_> = (0..4).map(|_| pool.get(2 * MIB).unwrap()).collect();
            let error = pool.get_timeout(2 * MIB, Duration::ZERO).unwrap_err();
            assert!(error.to_string().contains("PINPOOL_GROWTH"), "{error}");
            drop(held);
            assert_eq!(pool.get(8 * MIB).unwrap().len(), 8 * MIB);
            assert_eq!(valid(&pool).underlying.allocs, 1);
        }
    }
}

mod partitions {
    use super::*;

    #[test]
    fn have_ceilings_and_figures_of_their_own() {
        let pool = spanning().max_bytes(16 << 20).build().unwrap();
        let eval = pool.partition("eval", 4 << 20).unwrap();
        let held: Vec<_> = (0..2).map(|_| eval.get(2 * MIB).unwrap()).collect();
        let error = eval.get(2 * MIB).unwrap_err();
        assert!(error.is_limit() && error.to_string().contains("ceiling 4194304 B"), "{error}");
        assert!(eval.get(5 * MIB).unwrap_err().to_string().contains("partition"));
        let (of_eval, of_all) = (valid(&eval), valid(&pool));
        assert_eq!((of_eval.in_use_bytes, of_eval.pinned_bytes, of_eval.max_bytes), (4 << 20, 4 << 20, Some(4 << 20)));
        assert_eq!((of_all.in_use_bytes, of_all.partition_bytes, of_all.pinned_bytes), (0, 4 << 20, 4 << 20));
        drop(held);
        assert_eq!((valid(&eval).idle_bytes, valid(&pool).partition_bytes), (4 << 20, 4 << 20));
        assert_eq!(eval.get(4 * MIB).unwrap().len(), 4 * MIB, "its own idle buffers make way");
    }

    #[test]
    fn make_way_for_each_other_under_the_common_ceiling() {
        let pool = spanning().max_bytes(8 << 20).build().unwrap();
        let eval = pool.partition("eval", 8 << 20).unwrap();
        drop((0..4).map(|_| eval.get(2 * MIB).unwrap()).collect::<Vec<_>>());
        assert_eq!(pool.get(8 * MIB).unwrap().len(), 8 * MIB);
        assert_eq!((valid(&eval).reclaimed, valid(&pool).reclaimed), (4, 0));
    }

    #[test]
    fn grow_old_together_and_agree_on_the_time() {
        let (pool, clock) = timed(spanning());
        clock.advance_us(3_600_000_000);
        pool.poll();
        let eval = pool.partition("eval", 8 << 20).unwrap();
        drop(eval.get(2 * MIB).unwrap());
        assert_eq!(seconds(&clock, &pool, 9).partition_bytes, 2 << 20);
        assert_eq!(seconds(&clock, &pool, 1).partition_bytes, 0, "the silent one ages too");
        assert_eq!(valid(&eval).aged, 1);
        assert_eq!(seconds(&clock, &pool, 44).pinned_bytes, 2 << 20, "idle since then, and not since its own start");
        assert_eq!(seconds(&clock, &pool, 1).pinned_bytes, 0);
    }

    #[test]
    fn outlive_the_pool_and_the_last_one_gives_all_back() {
        let source = Counting::spanning();
        let pool = over(source.clone()).reserve_bytes(2 << 20).build().unwrap();
        let eval = pool.partition("eval", 8 << 20).unwrap();
        drop(pool.get(4 * MIB).unwrap());
        drop(pool);
        let buffer = eval.get(2 * MIB).unwrap();
        drop(eval);
        assert_eq!(source.ranges(), 1);
        drop(buffer);
        assert_eq!((source.ranges(), source.held_bytes()), (0, 0));
    }
}

mod waits {
    use super::*;

    #[test]
    fn end_when_a_buffer_is_put() {
        let pool = spanning().max_bytes(4 << 20).build().unwrap();
        let all = pool.get(4 * MIB).unwrap();
        thread::scope(|scope| {
            // As long as a wait can be told to be.
            let waiting = scope.spawn(|| pool.get_timeout(2 * MIB, Duration::MAX));
            until(|| pool.stats().waits == 1);
            drop(all);
            assert_eq!(waiting.join().unwrap().unwrap().len(), 2 * MIB);
        });
        let stats = valid(&pool);
        assert_eq!((stats.waits, stats.fallbacks, stats.failed_gets, stats.reclaimed), (1, 0, 0, 1));
    }

    #[test]
    fn end_when_a_copy_is_over() {
        let pool = spanning().max_bytes(4 << 20).wait(LONG).build().unwrap();
        let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(4 * MIB));
        let gate = stream.hold();
        let copy = pool.get(4 * MIB).unwrap().copy_to(&stream, &mut device).unwrap();
        assert_eq!(valid(&pool).in_flight_bytes, 4 << 20);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get(4 * MIB));
            until(|| pool.stats().waits == 1);
            drop(gate);
            waiting.join().unwrap().unwrap();
        });
        copy.wait().unwrap();
        valid(&pool);
    }

    #[test]
    fn are_served_in_the_order_of_arrival() {
        let pool = spanning().max_bytes(2 << 20).wait(LONG).build().unwrap();
        let first = pool.get(2 * MIB).unwrap();
        let (served, order) = channel();
        thread::scope(|scope| {
            for name in 0..4 {
                let (pool, served) = (&pool, served.clone());
                scope.spawn(move || {
                    // Of different classes, so that each needs all the room there is.
                    let buffer = pool.get(2 * MIB - name * 200 * KIB).unwrap();
                    served.send(name).unwrap();
                    drop(buffer);
                });
                until(|| pool.stats().waits == name as u64 + 1);
            }
            drop(first);
        });
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        valid(&pool);
    }

    #[test]
    fn are_not_overtaken_by_who_will_not_wait() {
        let pool = spanning().max_bytes(8 << 20).wait(LONG).build().unwrap();
        let (half, other) = (pool.get(4 * MIB).unwrap(), pool.get(4 * MIB).unwrap());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get(8 * MIB));
            until(|| pool.stats().waits == 1);
            drop(half);
            assert!(
                pool.get_timeout(MIB, Duration::ZERO).unwrap_err().is_limit(),
                "there is room, but not for this one"
            );
            drop(other);
            waiting.join().unwrap().unwrap();
        });
        valid(&pool);
    }

    #[test]
    fn of_no_time_are_none() {
        let pool = spanning().max_bytes(2 << 20).wait(LONG).build().unwrap();
        let _all = pool.get(2 * MIB).unwrap();
        assert!(pool.get_timeout(4096, Duration::ZERO).unwrap_err().is_limit());
        assert!(pool.get_timeout(4096, Duration::from_millis(1)).unwrap_err().is_limit());
        let stats = valid(&pool);
        assert_eq!((stats.waits, stats.failed_gets), (1, 2));
    }

    #[test]
    fn are_said_once_when_they_begin_and_once_when_they_are_over() {
        listen();
        let (pool, clock) = timed(spanning().max_bytes(2 << 20));
        let mut all = Some(pool.get(2 * MIB).unwrap());
        for _ in 0..100 {
            assert!(pool.get(4096).is_err());
            // At the ceiling room comes and goes.
            drop(all.take());
            all = Some(pool.get(2 * MIB).unwrap());
        }
        let said = lines();
        assert_eq!(
            (count(&said, "shortage: no memory for 4096 bytes"), count(&said, "shortage over")),
            (1, 0),
            "{said:?}"
        );
        drop(all);
        seconds(&clock, &pool, 1);
        let said = lines();
        assert_eq!(
            count(&said, "100 gets found no memory at once, 0 were given memory that is not pinned"),
            1,
            "{said:?}"
        );
    }
}

mod time {
    use super::*;

    #[test]
    fn takes_a_buffer_from_the_front_in_ten_seconds_and_a_granule_in_forty_five_more_a_fifth_each_second() {
        for (builder, granules) in [(spanning(), true), (over(Arc::new(SimSource::discrete(1 << 40))), false)] {
            let (pool, clock) = timed(builder);
            drop((0..10).map(|_| pool.get(2 * MIB).unwrap()).collect::<Vec<_>>());
            let pinned = pool.stats().pinned_bytes;
            assert_eq!(seconds(&clock, &pool, 9).buffers_in_pool, 10);
            let stats = seconds(&clock, &pool, 1);
            assert_eq!((stats.buffers_in_pool, stats.aged, stats.pinned_bytes), (0, 10, pinned));
            assert_eq!(seconds(&clock, &pool, 44).pinned_bytes, pinned);
            let mut left = Vec::new();
            for _ in 0..8 {
                left.push(seconds(&clock, &pool, 1).pinned_bytes >> 21);
                clock.advance_us(20_000);
                pool.poll();
                assert_eq!(pool.stats().pinned_bytes >> 21, *left.last().unwrap(), "once a second");
            }
            if granules {
                assert_eq!(left, [8, 6, 4, 3, 2, 1, 0, 0]);
            }
            assert_eq!(valid(&pool).pinned_bytes, 0);
        }
    }

    #[test]
    fn of_five_minutes_without_a_miss_halves_a_raised_limit() {
        listen();
        let (pool, clock) = timed(spanning().pool_size_limit(200));
        // Ever other sizes: after 200 puts each one evicts, and a thousand evictions are a check.
        let churn: Vec<_> = (0..1200).map(|n| pool.get(4096 * (1 + n % 8)).unwrap()).collect();
        drop(churn);
        let raised = valid(&pool).pool_size_limit;
        assert_eq!(raised, 220);
        lines();
        assert_eq!(seconds(&clock, &pool, 299).lowers, 0);
        let stats = seconds(&clock, &pool, 1);
        assert_eq!((stats.lowers, stats.pool_size_limit), (1, 200));
        assert_eq!(count(&lines(), "Lowering pool_size_limit_ from 220 to 200"), 1);
        assert_eq!(seconds(&clock, &pool, 300).lowers, 1, "as low as it began");
    }

    #[test]
    fn gives_every_pool_its_looks_when_hits_take_turns() {
        let (first, clock) = timed(spanning());
        let (second, other_clock) = timed(spanning());
        for pool in [&first, &second] {
            drop((pool.get(100).unwrap(), pool.get(5000).unwrap()));
        }
        clock.advance_us(20_000_000);
        other_clock.advance_us(20_000_000);
        for _ in 0..1000 {
            drop((first.get(100).unwrap(), second.get(100).unwrap()));
        }
        assert_eq!((first.stats().buffers_in_pool, second.stats().buffers_in_pool), (1, 1), "the others have aged");
    }
}

mod pressure {
    use super::*;

    fn write(file: &std::path::Path, some: f64, full: f64) {
        let line = |kind, share| format!("{kind} avg10={share:.2} avg60=0.00 avg300=0.00 total=0\n");
        fs::write(file, line("some", some) + &line("full", full)).unwrap();
    }

    #[test]
    fn shortens_the_retain_time_takes_idle_memory_when_severe_and_lets_go() {
        listen();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pressure");
        let (pool, clock) = timed(spanning().pressure(PressureSource::File(file.clone())));
        let idle = || drop((0..10).map(|_| pool.get(2 * MIB).unwrap()).collect::<Vec<_>>());
        idle();
        write(&file, 20.0, 0.0);
        seconds(&clock, &pool, 10);
        assert_eq!(seconds(&clock, &pool, 11).pinned_bytes, 20 << 20, "a quarter of 45 s");
        assert_eq!(seconds(&clock, &pool, 1).pinned_bytes, 16 << 20);
        idle();
        let used = pool.get(2 * MIB).unwrap();
        write(&file, 20.0, 20.0);
        let stats = seconds(&clock, &pool, 1);
        assert_eq!((stats.pinned_bytes, stats.buffers_in_pool), (2 << 20, 0), "at once, but for what is in use");
        drop(used);
        assert_eq!(seconds(&clock, &pool, 1).pinned_bytes, 0, "for as long as it lasts");
        write(&file, 0.0, 0.0);
        seconds(&clock, &pool, 1);
        idle();
        assert_eq!(seconds(&clock, &pool, 54).pinned_bytes, 20 << 20, "as before");
        seconds(&clock, &pool, 45);
        assert!(seconds(&clock, &pool, 1).pinned_bytes < 20 << 20);
        let said = lines();
        assert_eq!((count(&said, "memory is short:"), count(&said, "memory is no longer short")), (2, 1), "{said:?}");
    }
}

mod failures {
    use super::*;

    #[test]
    fn to_release_hold_back_nothing_else_and_are_said_once() {
        listen();
        for counting in [Counting::spanning(), Counting::walled()] {
            let source = Arc::new(FaultSource::around(counting.clone()));
            let (pool, clock) = timed(over(source.clone()));
            // A gap after each, so that no two go in one call.
            let held: Vec<_> = (0..20).map(|_| pool.get(17 * MIB).unwrap()).collect();
            let mut gaps = Vec::new();
            for (at, buffer) in held.into_iter().enumerate() {
                if at % 2 == 0 { drop(buffer) } else { gaps.push(buffer) }
            }
            (0..7).for_each(|index| source.fail_release(index));
            let before = counting.held_bytes();
            lines();
            for _ in 0..120 {
                seconds(&clock, &pool, 1);
                assert_eq!(valid(&pool).pinned_bytes, counting.held_bytes());
            }
            let said = lines();
            assert_eq!(count(&said, "release failed"), 1, "{said:?}");
            assert!(counting.held_bytes() < before && source.releases() > 7, "{} releases", source.releases());
            for _ in 0..200 {
                seconds(&clock, &pool, 1);
            }
            drop(gaps);
            pool.trim(0);
            assert_eq!((valid(&pool).pinned_bytes, counting.held_bytes()), (0, 0));
        }
    }

    #[test]
    fn of_one_step_leave_the_books_straight() {
        for (lose, fail_acquire) in [(true, false), (false, false), (false, true)] {
            let counting = Counting::spanning();
            let source = Arc::new(FaultSource::around(counting.clone()));
            let pool = over(source.clone()).max_bytes(16 << 20).build().unwrap();
            // Every other granule idle in the arena: what comes next must move them.
            let held: Vec<_> = (0..8).map(|_| pool.get(2 * MIB).unwrap()).collect();
            let kept: Vec<_> =
                held.into_iter().enumerate().filter_map(|(at, buffer)| (at % 2 == 1).then_some(buffer)).collect();
            match (lose, fail_acquire) {
                (true, _) => source.lose_remap(1),
                (_, true) => source.fail_acquire(8),
                _ => source.fail_remap(1),
            }
            let outcome = pool.get(8 * MIB);
            let stats = valid(&pool);
            assert_eq!(stats.pinned_bytes, counting.held_bytes());
            assert_eq!(stats.underlying.alloc_bytes - stats.underlying.free_bytes, counting.held_bytes());
            drop((outcome, kept));
            pool.clear();
            assert_eq!((valid(&pool).pinned_bytes, counting.held_bytes()), (0, 0));
        }
    }
}

mod the_end {
    use super::*;

    fn sources() -> [Arc<Counting>; 2] {
        [Counting::spanning(), Counting::walled()]
    }

    #[test]
    fn comes_with_the_last_handle_or_the_last_buffer() {
        for source in sources() {
            let pool = over(source.clone()).reserve_bytes(2 << 20).build().unwrap();
            let (early, late) = (pool.get(3 * MIB).unwrap(), pool.get(5 * MIB).unwrap());
            let clone = pool.clone();
            drop((early, pool));
            assert!(source.held_bytes() > 0);
            drop(clone);
            assert!(source.held_bytes() > 0, "a buffer is out");
            thread::spawn(move || drop(late)).join().unwrap();
            assert_eq!((source.held_bytes(), source.ranges()), (0, 0));
        }
    }

    #[test]
    fn comes_once_and_for_all_when_the_last_ones_come_together() {
        for round in 0..200 {
            for source in sources() {
                let pool = over(source.clone()).pool_size_limit(round % 3).auto_resize(false).build().unwrap();
                let last: Vec<_> = (1..5).map(|n| pool.get(n * MIB).unwrap()).collect();
                let barrier = std::sync::Barrier::new(5);
                thread::scope(|scope| {
                    for buffer in last {
                        let barrier = &barrier;
                        scope.spawn(move || {
                            barrier.wait();
                            drop(buffer);
                        });
                    }
                    barrier.wait();
                    drop(pool);
                });
                assert_eq!((source.held_bytes(), source.ranges()), (0, 0), "round {round}");
            }
        }
    }

    #[test]
    fn waits_for_copies_in_flight() {
        for source in sources() {
            let pool = over(source.clone()).close_wait(LONG).build().unwrap();
            let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(3 * MIB));
            let gate = stream.hold();
            let copy = pool.get(3 * MIB).unwrap().copy_to(&stream, &mut device).unwrap();
            thread::scope(|scope| {
                let closing = scope.spawn(|| drop(pool));
                assert!(!closing.is_finished());
                drop(gate);
            });
            copy.wait().unwrap();
            assert_eq!((source.held_bytes(), source.ranges()), (0, 0));
        }
    }

    #[test]
    fn of_a_stand_in_is_the_end_too() {
        let source = Counting::spanning();
        let pool = over(source.clone()).max_bytes(2 << 20).on_full(OnFull::Pageable).build().unwrap();
        let (pinned, stand_in) = (pool.get(2 * MIB).unwrap(), pool.get(2 * MIB).unwrap());
        drop((pool, pinned));
        drop(stand_in);
        assert_eq!((source.held_bytes(), source.ranges()), (0, 0));
    }

    #[test]
    fn ends_the_thread_that_polls() {
        let source = Counting::spanning();
        let clock = ManualClock::default();
        let builder = over(source.clone()).idle_timeout(Duration::ZERO).background_poll(true);
        let pool = builder.clock(Clock::Manual(clock.clone())).build().unwrap();
        drop(pool.get(2 * MIB).unwrap());
        until(|| polling_threads() == 1);
        assert!(source.held_bytes() > 0);
        clock.advance_us(60_000_000);
        // Nobody calls the pool any more, and still its memory goes back.
        until(|| source.held_bytes() == 0);
        drop(pool);
        until(|| polling_threads() == 0);
        assert_eq!(source.ranges(), 0);
    }

    fn polling_threads() -> usize {
        let names =
            fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| fs::read_to_string(task.path().join("comm")));
        names.flatten().filter(|name| name.trim() == "pinpool-poll").count()
    }
}
