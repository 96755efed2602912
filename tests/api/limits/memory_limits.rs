//! Limits that change, and limits on what is idle: a lower limit, the cgroup's, `PINPOOL_MAX_IDLE_BYTES`.

use pinpool_os::format::Size;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use pinpool::unstable::ManualClock;
use pinpool::{Backend, Limit, OnFull, PinnedBuf, Pool, PoolBuilder, Preset, Request, Stats};
use pinpool_replay::SimSource;
use tempfile::TempDir;

use crate::captured_log::{count, lines, listen};
use crate::fixture::{LONG, MIB, each_sim, over_sim, poll, run, until_waits};
use crate::until::until;
use crate::valid_stats::valid_stats;

fn builder() -> PoolBuilder {
    over_sim(Limit::Auto).wait(Duration::ZERO)
}

/// One pool over each kind of memory.
fn every_kind(set: impl Fn(PoolBuilder) -> PoolBuilder) -> Vec<Pool> {
    let separate = std::sync::Arc::new(SimSource::separate_regions(1 << 40));
    let builders = [builder(), builder().backend(Backend::Source(separate)), builder().preset(Preset::TensorFlow)];
    builders.into_iter().map(|builder| set(builder).build().unwrap()).collect()
}

fn fill(pool: &Pool, len: usize, most: usize) -> Vec<PinnedBuf> {
    std::iter::from_fn(|| pool.get(len).ok()).take(most).collect()
}

/// Idle bytes: in buffers, and free in the arena.
fn idle(stats: &Stats) -> u64 {
    stats.memory.idle_bytes + stats.memory.free_bytes
}

#[test]
fn a_lower_limit_releases_what_is_idle_and_takes_no_buffer_away() {
    for pool in every_kind(|builder| builder.max_bytes(64 << 20)) {
        let mut held = fill(&pool, 2 * MIB - 4096, 16);
        drop(held.split_off(4));
        let before = valid_stats(&pool);
        assert!(idle(&before) > 16 << 20, "{before:?}");
        pool.set_max_bytes(4 << 20).unwrap();
        let stats = valid_stats(&pool);
        assert_eq!((stats.limits.max_bytes, stats.memory.in_use), (Some(4 << 20), 4));
        assert_eq!(stats.memory.idle_bytes, 0);
        assert!(stats.memory.held_bytes <= before.memory.held_bytes / 2, "{stats:?}");
        held.iter_mut().for_each(|buffer| buffer.wait_slice_mut().unwrap()[0] = 1);
        let more = fill(&pool, 2 * MIB - 4096, 100);
        let held_bytes = valid_stats(&pool).memory.held_bytes;
        assert_eq!(held_bytes, stats.memory.held_bytes, "no request grows a pool over its limit");
        drop((more, held));
        pool.maintain();
        assert!(valid_stats(&pool).memory.held_bytes <= 4 << 20, "returned memory was released: {:?}", pool.stats());
        assert_eq!(pool.get(2 * MIB - 4096).unwrap().len(), 2 * MIB - 4096);
    }
}

#[test]
fn a_higher_limit_serves_the_requests_that_wait() {
    for pool in every_kind(|builder| builder.max_bytes(4 << 20).wait(LONG)) {
        let held = pool.get(2 * MIB).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get(3 * MIB).unwrap().len());
            until_waits(&pool, 1);
            pool.set_max_bytes(16 << 20).unwrap();
            assert_eq!(waiting.join().unwrap(), 3 * MIB);
        });
        drop(held);
        pool.set_max_bytes(Limit::Unlimited).unwrap();
        assert_eq!(pool.get(100 * MIB).unwrap().len(), 100 * MIB);
        assert_eq!(valid_stats(&pool).limits.max_bytes, None);
    }
}

#[test]
fn the_limit_holds_while_it_changes_under_load() {
    for (sim, source) in each_sim() {
        let pool = builder().backend(Backend::Source(source)).max_bytes(8 << 20).build().unwrap();
        thread::scope(|scope| {
            for seed in 1..4_usize {
                let pool = &pool;
                scope.spawn(move || {
                    for step in 0..600 {
                        drop(pool.get((step * seed * 7919) % (3 * MIB) + 1));
                    }
                });
            }
            (0..200_u64).for_each(|step| pool.set_max_bytes((4 + step % 5) << 20).unwrap());
        });
        let peak_bytes = sim.sums.lock().peak_bytes;
        assert!(peak_bytes <= 8 << 20, "{peak_bytes} B were held");
        pool.set_max_bytes(1 << 20).unwrap();
        let held_bytes = sim.sums.lock().pinned_bytes;
        assert!(held_bytes <= 1 << 20);
        assert_eq!(valid_stats(&pool).memory.held_bytes, held_bytes);
    }
}

#[test]
fn the_limit_of_memory_that_is_not_pinned_changes_with_the_limit() {
    let pool = builder().max_bytes(4 << 20).on_full(OnFull::Pageable).build().unwrap();
    pool.set_max_bytes(2 << 20).unwrap();
    assert_eq!((valid_stats(&pool).limits.max_bytes, fill(&pool, MIB, 100).len()), (Some(2 << 20), 4));
}

#[test]
fn no_more_is_kept_idle_than_the_limit_after_a_miss_or_a_tick() {
    for limit in [0, 5 << 20, 1 << 30] {
        for pool in every_kind(|builder| builder.max_bytes(Limit::Unlimited).max_idle_bytes(limit)) {
            drop(fill(&pool, 2 * MIB - 4096, 8));
            let free = valid_stats(&pool);
            pool.maintain();
            let stats = valid_stats(&pool);
            if limit == 1 << 30 {
                assert_eq!(idle(&stats), idle(&free));
                continue;
            }
            assert!(stats.memory.idle_bytes <= limit, "{limit}: {stats:?}");
            assert!(idle(&stats) <= limit, "{limit}: {stats:?}");
            assert!(idle(&free) > idle(&stats), "{limit}: {stats:?}");
            drop(fill(&pool, 2 * MIB - 4096, 8));
            // A miss of another class.
            let _miss = pool.get(64 << 10).unwrap();
            assert!(valid_stats(&pool).memory.idle_bytes <= limit, "{limit}: {:?}", pool.stats());
        }
    }
}

#[test]
fn the_limit_on_idle_memory_takes_the_oldest_first_and_no_reserve() {
    let pool = builder().max_idle_bytes(4 << 20).build().unwrap();
    let held = fill(&pool, 2 * MIB, 4);
    let addresses: Vec<_> = held.iter().map(|buffer| buffer.wait_slice().unwrap().as_ptr()).collect();
    held.into_iter().for_each(drop);
    pool.maintain();
    let kept: Vec<_> = std::iter::from_fn(|| pool.try_get(2 * MIB).unwrap()).collect();
    let kept: Vec<_> = kept.iter().map(|buffer| buffer.wait_slice().unwrap().as_ptr()).collect();
    assert_eq!(kept, [addresses[3], addresses[2]]);

    let pool = builder().max_idle_bytes(0).reserve(8 << 20).build().unwrap();
    drop(fill(&pool, 2 * MIB, 6));
    pool.maintain();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.held_bytes, stats.memory.reserve_bytes, stats.memory.idle_bytes), (8 << 20, 8 << 20, 0));
}

/// A file tree of a machine of 1000 MiB with one cgroup v2 of 400 MiB.
fn machine() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    write_machine(root.path(), "419430400\n");
    root
}

fn write_machine(root: &Path, limit: &str) {
    for (path, text) in [
        ("proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 1000000 kB\nMemAvailable: 1000000 kB\n"),
        ("proc/self/cgroup", "0::/app\n"),
        ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"),
        ("sys/fs/cgroup/app/memory.current", "0\n"),
        ("sys/fs/cgroup/app/memory.max", limit),
    ] {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

#[test]
fn auto_follows_the_limit_of_the_cgroup_with_one_line_each() {
    let root = machine();
    let clock = ManualClock::default();
    let pool = builder().unstable_clock(clock.clone()).unstable_host_root(root.path()).build().unwrap();
    assert_eq!(valid_stats(&pool).limits.max_bytes, Some(100 << 20));
    let held = fill(&pool, 10 * MIB, 5);
    listen();
    for (limit, expected) in [("209715200\n", 50), ("209715200\n", 50), ("max\n", 250), ("41943040\n", 10)] {
        write_machine(root.path(), limit);
        for _ in 0..3 {
            clock.advance_us(1_000_000);
            pool.maintain();
        }
        assert_eq!(valid_stats(&pool).limits.max_bytes, Some(expected << 20), "{limit}");
    }
    let lines = lines();
    assert_eq!(count(&lines, " limit_changed: max="), 3, "{lines:?}");
    assert_eq!(count(&lines, " limit_changed: max=100.0MiB->50.0MiB: a quarter of 200.0MiB"), 1);
    drop(held);
    clock.advance_us(1_000_000);
    pool.maintain();
    assert!(valid_stats(&pool).memory.held_bytes <= 10 << 20);

    // A fixed limit does not follow the machine's memory until it is set to `auto` again.
    pool.set_max_bytes(64 << 20).unwrap();
    write_machine(root.path(), "419430400\n");
    clock.advance_us(5_000_000);
    pool.maintain();
    assert_eq!(valid_stats(&pool).limits.max_bytes, Some(64 << 20));
    pool.set_max_bytes(Limit::Auto).unwrap();
    assert_eq!(valid_stats(&pool).limits.max_bytes, Some(100 << 20));
}

/// A pool over memory that counts as the machine's memory. `auto` allows 100 MiB.
fn automatic(root: &Path) -> PoolBuilder {
    builder().unstable_host_root(root).max_bytes(Limit::Auto)
}

#[test]
fn the_pools_of_a_process_share_what_auto_allows_and_each_may_take_all_of_it() {
    let root = machine();
    let pools: Vec<_> = (0..20).map(|_| automatic(root.path()).build().unwrap()).collect();
    let mut held: Vec<_> = pools.iter().map(|pool| fill(pool, 10 * MIB, 1)).collect();
    let pinned = || pools.iter().map(|pool| valid_stats(pool).memory.held_bytes).sum::<u64>();
    assert_eq!((held.iter().flatten().count(), pinned()), (10, 100 << 20));
    let error = pools[19].get(10 * MIB).unwrap_err();
    let text = error.to_string();
    let first = "cannot allocate 10.0MiB: exceeds the limit of 100.0MiB that this process's pools with \
                 PINPOOL_MAX_BYTES=auto share; 100.0MiB are held (an unnamed pool holds 10.0MiB, an unnamed pool holds ";
    assert!(error.is_limit() && text.starts_with(first), "{text}");
    for part in [
        ", 2 others hold 20.0MiB)",
        "Return buffers in these pools, wait longer (PINPOOL_WAIT), or set PINPOOL_MAX_BYTES to a size",
    ] {
        assert!(text.contains(part), "no {part} in: {text}");
    }
    assert!(pools[19].stats().limits.shared.is_none(), "there is no shared limit");

    // The memory of a pool with a fixed limit does not count towards the limit that the `auto` pools share.
    pools[0].set_max_bytes(30 << 20).unwrap();
    held[0].extend(fill(&pools[0], 10 * MIB, 9));
    assert_eq!((held[0].len(), fill(&pools[19], 10 * MIB, 9).len(), pinned()), (3, 1, 130 << 20));
    pools[19].clear();
    held[0].truncate(1);
    pools[0].clear();
    pools[0].set_max_bytes(Limit::Auto).unwrap();
    assert_eq!(fill(&pools[19], 10 * MIB, 9).len(), 0);

    drop(held);
    pools.iter().for_each(Pool::clear);
    assert_eq!(pinned(), 0);
    let all = fill(&pools[7], 10 * MIB, 100);
    assert_eq!((all.len(), fill(&pools[8], 4096, 1).len()), (10, 0));
    assert!(pools[8].get(101 * MIB).unwrap_err().to_string().contains("Request a smaller buffer"));
    drop(all);
    drop(pools);
    let later = fill(&automatic(root.path()).build().unwrap(), 10 * MIB, 100);
    assert_eq!(later.len(), 10, "what ended pools held is free");
}

/// Neither a thread nor `maintain` releases anything here.
#[test]
fn two_pools_that_alternate_at_the_process_limit_never_wait_for_idle_memory() {
    let root = machine();
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let of = |name| automatic(root.path()).preset(preset).name(name).build().unwrap();
        let pools = [of("one"), of("two")];
        drop(fill(&pools[0], 16 * MIB, 6));
        for round in 0..10 {
            let (pool, other) = (&pools[(round + 1) % 2], &pools[round % 2]);
            assert!(valid_stats(other).memory.held_bytes > 50 << 20, "idle");
            drop(pool.get(60 * MIB).unwrap());
            let held = [pool, other].map(|pool| valid_stats(pool).memory.held_bytes);
            assert!(held[0] >= 60 << 20 && held.iter().sum::<u64>() <= 100 << 20, "{held:?}");
        }
        assert_eq!(pools.each_ref().map(|pool| valid_stats(pool).requests.waits), [0, 0]);
        // A task does not release memory on its own thread, but it is served without waiting for a tick.
        let (pool, other) = (&pools[1], &pools[0]);
        drop(run(pool.get_async(Request::new(60 * MIB).timeout(LONG))).unwrap());
        assert_eq!((valid_stats(pool).requests.waits, valid_stats(other).memory.held_bytes <= 40 << 20), (0, true));
    }
}

#[test]
fn a_request_at_the_process_limit_is_woken_by_a_return_to_another_pool() {
    let root = machine();
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let of = |name| automatic(root.path()).preset(preset).name(name).build().unwrap();
        let (full, lacking) = (of("full"), of("lacking"));
        let mut held = fill(&full, 16 * MIB, 6);
        let text = lacking.get(15 * MIB).unwrap_err().to_string();
        let bytes = valid_stats(&full).memory.held_bytes;
        assert!(text.contains(&format!("(full holds {})", Size(bytes))), "{text}");
        thread::scope(|scope| {
            let get = scope.spawn(|| lacking.get_with(Request::new(15 * MIB).timeout(LONG)));
            until("it waits", || valid_stats(&lacking).requests.waiting > 0);
            held.truncate(held.len() - 2);
            assert!(get.join().unwrap().is_ok());
        });
        let counts = (valid_stats(&lacking).requests.waits, valid_stats(&lacking).requests.timeouts);
        assert_eq!((counts, valid_stats(&full).memory.in_use), ((1, 0), held.len() as u64));
    }
}

/// Each pool has idle memory that the other needs, and both request memory at the same time.
#[test]
fn two_pools_at_one_process_limit_that_wait_for_each_other_are_both_served() {
    let root = machine();
    for (preset, has_thread) in
        [(Preset::Adaptive, true), (Preset::Adaptive, false), (Preset::TensorFlow, true), (Preset::TensorFlow, false)]
    {
        let of = || automatic(root.path()).preset(preset).maintenance_thread(has_thread).wait(LONG).build().unwrap();
        let pools = [of(), of()];
        pools.iter().for_each(|pool| drop(fill(pool, 10 * MIB, 3)));
        thread::scope(|scope| {
            for pool in &pools {
                scope.spawn(|| (0..20).for_each(|_| drop(pool.get(60 * MIB).unwrap())));
            }
        });
        let held: u64 = pools.iter().map(|pool| valid_stats(pool).memory.held_bytes).sum();
        assert!(held <= 100 << 20, "{held}");
    }
}

#[test]
fn auto_counts_what_the_pool_holds_itself_as_available_to_it() {
    let root = machine();
    let clock = ManualClock::default();
    let pool = builder().unstable_clock(clock.clone()).unstable_host_root(root.path()).build().unwrap();
    let _held = fill(&pool, 10 * MIB, 8);
    // 190 of 200 MiB are in use, 80 of them by the pool.
    write_machine(root.path(), "209715200\n");
    fs::write(root.path().join("sys/fs/cgroup/app/memory.current"), (190 << 20).to_string()).unwrap();
    clock.advance_us(1_000_000);
    pool.maintain();
    assert_eq!(valid_stats(&pool).limits.max_bytes, Some(50 << 20));
}

#[test]
fn a_request_under_a_shared_limit_gets_what_is_idle_here_and_elsewhere() {
    let root = machine();
    for (sim, _) in each_sim() {
        let [one, two] =
            [(); 2].map(|()| automatic(root.path()).backend(Backend::Source(sim.clone())).build().unwrap());
        [54, 3].into_iter().for_each(|mib| drop(one.get(mib * MIB).unwrap()));
        drop(two.get(44 * MIB).unwrap());
        assert_eq!(one.get(58 * MIB).unwrap().len(), 58 * MIB);
    }
}

#[test]
fn memory_that_no_request_waits_for_any_longer_serves_other_pools() {
    let root = machine();
    let [one, two] = [(); 2].map(|()| automatic(root.path()).reserve_wait(false).build().unwrap());
    let held = two.get(60 * MIB).unwrap();
    let mut late = one.get_async(Request::new(60 * MIB).timeout(Duration::from_millis(50)));
    assert!(poll(&mut late).is_pending());
    until_waits(&one, 1);
    until("its time is over", || one.stats().requests.waiting == 0);
    drop(held);
    two.clear();
    let held = two.get(90 * MIB).unwrap();
    // A reserve that lacks room is completed under its separate limit.
    one.reserve(40 << 20).unwrap();
    one.set_max_bytes(100 << 20).unwrap();
    assert!(one.wait_for_reserve(LONG).unwrap());
    drop(held);
    two.clear();
    one.set_max_bytes(Limit::Auto).unwrap();
    assert_eq!(two.get(55 * MIB).unwrap().len(), 55 * MIB);
}
