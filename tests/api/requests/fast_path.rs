//! Hits that a thread serves from its recently used pools: what they return, and what they must not overlook.
#![allow(unsafe_code)] // Forks.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pinpool::unstable::{ManualClock, fast_path};
use pinpool::{PinnedBuf, Pool, PoolBuilder, Preset, Request, Stats};

use crate::fixture::{LONG, heap, with_manual_clock};
use crate::until::until;
use crate::valid_stats::valid_stats;

const PRESETS: [Preset; 2] = [Preset::Adaptive, Preset::TensorFlow];
const LEN: usize = 5_000;

fn builder(preset: Preset) -> PoolBuilder {
    heap().preset(preset).unstable_settings(|only| only.pressure = Some("/dev/null".into()))
}

fn pool(preset: Preset) -> Pool {
    builder(preset).build().unwrap()
}

#[test]
fn pools_used_in_turn_give_each_its_own_buffers() {
    for preset in PRESETS {
        for count in 1..=4 {
            let pools: Vec<_> = (0..count).map(|_| pool(preset)).collect();
            let first: Vec<_> = pools.iter().map(|pool| pool.get(LEN).unwrap().as_ptr()).collect();
            for round in 0..100 {
                for (pool, &first) in pools.iter().zip(&first) {
                    let held = pool.get(LEN).unwrap();
                    assert_eq!(held.as_ptr(), first, "{preset:?}, {count} pools, round {round}");
                    // Returned while the thread has cached another pool.
                    drop(pools[round % count].get(LEN / 2).unwrap());
                }
            }
            for pool in &pools {
                let Stats { memory, requests, .. } = valid_stats(pool);
                assert_eq!((memory.in_use, requests.served), (0, requests.hits + requests.misses), "{preset:?}");
                assert!(requests.hits >= 100 && requests.misses <= 3, "{requests:?}");
            }
        }
    }
}

#[test]
fn a_new_pool_never_finds_the_buffers_of_one_that_has_ended() {
    let rounds = if cfg!(miri) { 5 } else { 150 };
    for preset in PRESETS {
        let lasting = pool(preset);
        for round in 0..rounds {
            let new = pool(preset);
            drop(new.get(LEN).unwrap());
            let stats = new.stats();
            assert_eq!((stats.requests.served, stats.requests.hits, stats.requests.misses), (1, 0, 1), "round {round}");
            drop(new.get(LEN).unwrap());
            assert_eq!(new.stats().requests.hits, 1);
            // Sometimes the thread still caches the ended pool, and sometimes another one replaces it.
            if round % 3 == 0 {
                drop(lasting.get(LEN).unwrap());
            }
        }
        valid_stats(&lasting);
    }
}

/// Values that a user keeps in a thread-local.
struct Kept {
    pool: Pool,
    held: Option<PinnedBuf>,
    hits: mpsc::Sender<bool>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.held.take());
        let mut hit = self.pool.get(LEN).unwrap();
        hit.wait_slice_mut().unwrap().fill(3);
        drop(hit);
        // A pool that this thread has never used, and one that ends here.
        let new = pool(Preset::Adaptive);
        drop(new.get(LEN).unwrap());
        drop(new.get(LEN).unwrap());
        self.hits.send(new.stats().requests.hits == 1).unwrap();
    }
}

thread_local! {
    static BEFORE: RefCell<Option<Kept>> = const { RefCell::new(None) };
    static AFTER: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

#[test]
fn thread_locals_of_a_user_may_hold_buffers_and_pools() {
    for preset in PRESETS {
        for lasts in [true, false] {
            let pool = pool(preset);
            let (hits, received) = mpsc::channel();
            let kept = |pool: &Pool, held| Some(Kept { pool: pool.clone(), held, hits: hits.clone() });
            let (before, after) = (kept(&pool, None), kept(&pool, None));
            drop(hits);
            let lasting = lasts.then(|| pool.clone());
            thread::spawn(move || {
                // Registered before the thread-locals of the library, and after them: one of the two is dropped later.
                BEFORE.set(before);
                let (first, second) = (pool.get(LEN).unwrap(), pool.get(LEN).unwrap());
                drop(pool.get(LEN).unwrap());
                BEFORE.with_borrow_mut(|kept| kept.as_mut().unwrap().held = Some(first));
                AFTER.set(after);
                AFTER.with_borrow_mut(|kept| kept.as_mut().unwrap().held = Some(second));
                drop(pool);
            })
            .join()
            .unwrap();
            assert_eq!(received.iter().collect::<Vec<_>>(), [true, true]);
            if let Some(pool) = lasting {
                let Stats { memory, requests, .. } = valid_stats(&pool);
                assert_eq!((requests.served, requests.returned), (5, 5), "{preset:?}");
                assert_eq!((requests.hits, memory.idle), (2, 3), "{preset:?}");
            }
        }
    }
}

#[test]
fn a_remote_return_serves_the_first_thread_until_it_ends() {
    for preset in PRESETS {
        let pool = pool(preset);
        let start = thread::scope(|scope| {
            let getting = scope.spawn(|| {
                drop(pool.get(LEN).unwrap());
                let mut start = std::ptr::null();
                for _ in 0..100 {
                    let held = pool.get(LEN).unwrap();
                    start = held.as_ptr();
                    let pool = &pool;
                    thread::scope(|scope| {
                        scope.spawn(move || (drop(pool.get(LEN).unwrap()), drop(held))).join().unwrap()
                    });
                    let again = pool.get(LEN).unwrap();
                    assert!(!again.as_ptr().is_null());
                }
                start as usize
            });
            getting.join().unwrap()
        });
        assert_ne!(start, 0);
        let stats = valid_stats(&pool);
        // At most two were in use at once.
        assert!(stats.requests.misses <= 2, "{stats:?}");
        assert_eq!((stats.memory.in_use, stats.requests.served, stats.requests.returned), (0, 301, 301), "{preset:?}");
        let both = [pool.get(LEN).unwrap(), pool.get(LEN).unwrap()];
        assert_eq!(pool.stats().requests.misses, stats.requests.misses, "found though their thread has ended");
        drop(both);
    }
}

/// Leaves a buffer in some state.
type Use = fn(&mut PinnedBuf);

#[test]
fn the_next_user_of_a_buffer_finds_it_as_new() {
    let uses: [Use; 4] = [
        |buf| buf.truncate(10),
        |buf| buf.try_slice_mut().unwrap().unwrap().fill(9),
        |buf| buf.wait().unwrap(),
        |buf| {
            buf.truncate(0);
            assert!(buf.is_empty() && buf.wait_slice_mut().unwrap().is_empty());
        },
    ];
    for preset in PRESETS {
        let pool = pool(preset);
        for align in [4, 64, 8192] {
            for use_of in uses {
                let mut used = pool.get_with(Request::new(LEN).align(align)).unwrap();
                let (id, capacity) = (used.unstable_id(), used.capacity());
                use_of(&mut used);
                drop(used);
                // These requests have the same class on either path.
                for (len, align) in [(LEN, align), (LEN - 1, align), (LEN, align)] {
                    let mut next = pool.get_with(Request::new(len).align(align)).unwrap();
                    assert_eq!((next.len(), next.capacity()), (len, capacity));
                    assert_eq!(next.wait_slice().unwrap().len(), len);
                    assert!(next.as_ptr().addr().is_multiple_of(align));
                    assert!(preset == Preset::TensorFlow || next.unstable_id() == id);
                    next.wait_slice_mut().unwrap().fill(7);
                }
            }
        }
        valid_stats(&pool);
    }
}

#[test]
fn counts_never_fall_and_the_limit_holds_while_threads_hit() {
    let looks = if cfg!(miri) { 5 } else { 300 };
    for preset in PRESETS {
        let pool = builder(preset).pool_size_limit(6).auto_resize(false).build().unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let (pass, passed) = mpsc::sync_channel::<PinnedBuf>(2);
            let (pool, stop) = (&pool, &stop);
            scope.spawn(move || passed.into_iter().for_each(drop));
            for thread in 0..2 {
                let pass = pass.clone();
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        for len in [LEN, 100, 100_000, LEN * (thread + 1)] {
                            (0..20).for_each(|_| drop(pool.get(len).unwrap()));
                            drop((0..5).map(|_| pool.get(len).unwrap()).collect::<Vec<_>>());
                            pass.send(pool.get(len).unwrap()).unwrap();
                        }
                    }
                });
            }
            drop(pass);
            let mut before = pool.stats();
            for look in 0..looks {
                let now = pool.stats();
                let counts = |Stats { memory, requests, .. }: &Stats| {
                    [requests.served, requests.hits, requests.misses, requests.returned, memory.evictions.over_limit]
                };
                let (old, new) = (counts(&before), counts(&now));
                // Stops the threads before the panic below.
                let is_over = preset == Preset::TensorFlow && now.memory.idle > 6;
                if is_over || old.iter().zip(&new).any(|(old, new)| old > new) {
                    stop.store(true, Ordering::Relaxed);
                    panic!("{preset:?}, look {look}: {before:?} then {now:?}");
                }
                before = now;
            }
            stop.store(true, Ordering::Relaxed);
        });
        pool.maintain();
        let stats = valid_stats(&pool);
        assert_eq!((stats.memory.in_use, stats.requests.served), (0, stats.requests.returned));
        assert!(stats.memory.idle <= 6, "{preset:?}: {}", stats.memory.idle);
    }
}

/// The second call of `maintain` comes before the next tick is due.
#[test]
fn maintain_enforces_the_limit_on_idle_buffers_that_other_threads_returned() {
    let builder = builder(Preset::Adaptive).pool_size_limit(1).auto_resize(false);
    let pool = builder.unstable_clock(ManualClock::default()).build().unwrap();
    let held: Vec<_> = (0..3).map(|_| pool.get(LEN).unwrap()).collect();
    pool.maintain();
    thread::scope(|scope| drop(scope.spawn(move || drop(held)).join()));
    pool.maintain();
    assert_eq!(valid_stats(&pool).memory.idle, 1);
}

/// How many of 1000 hits the fast path served.
fn fast_hits(pool: &Pool) -> usize {
    // The thread has cached the pool, and a buffer is idle.
    drop(pool.get(LEN).unwrap());
    (0..1000).filter(|_| fast_path::get(pool, LEN).is_some()).count()
}

/// More than the room in a [`full_pool`].
const MUCH: usize = 2 << 20;

/// A pool of 8 MiB without automatic maintenance, filled until only small buffers are left.
fn full_pool() -> (Pool, Vec<PinnedBuf>) {
    let pool = builder(Preset::Adaptive).max_bytes(8 << 20).wait(LONG).maintenance_thread(false).build().unwrap();
    let small = pool.get(LEN).unwrap();
    let held: Vec<_> =
        std::iter::from_fn(|| pool.get_with(Request::new(1 << 20).timeout(Duration::ZERO)).ok()).collect();
    assert_eq!(held.len(), 7);
    drop(small);
    assert_eq!((fast_path::is_open_to(&held[0]), fast_hits(&pool)), (true, 1000));
    (pool, held)
}

#[test]
fn a_hit_takes_the_fast_path_unless_a_request_waits() {
    let (pool, held) = full_pool();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| drop(pool.get(MUCH).unwrap()));
        until("the request waits", || !fast_path::is_open(&pool));
        assert!(fast_path::get(&pool, LEN).is_none() && !fast_path::is_open_to(&held[0]));
        drop(held);
        waiting.join().unwrap();
    });
    assert_eq!((fast_path::is_open(&pool), fast_hits(&pool)), (true, 1000));
}

#[test]
fn repeated_hits_keep_a_buffer_young() {
    let (pool, clock) = with_manual_clock(builder(Preset::Adaptive).maintenance_thread(false));
    drop((pool.get(LEN).unwrap(), pool.get(LEN).unwrap()));
    // One of the two buffers is hit for an hour, during which nothing reads the clock.
    for _ in 0..3600 {
        clock.advance_us(1_000_000);
        drop(pool.get(LEN).unwrap());
    }
    clock.advance_us(1_000_000);
    pool.maintain();
    let hits = pool.stats().requests.hits;
    drop(pool.get(LEN).unwrap());
    assert_eq!(pool.stats().requests.hits, hits + 1, "it was put a second ago");
    clock.advance_us(3_600_000_000);
    pool.maintain();
    assert_eq!(valid_stats(&pool).memory.idle, 0, "nobody needed it for an hour");
}
