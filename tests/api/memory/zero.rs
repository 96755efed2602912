//! `PINPOOL_ZERO`: a new buffer holds no byte of an earlier user, and idle memory keeps none.
#![allow(unsafe_code)] // Reads idle memory, which the pool keeps mapped.

use pinpool::{Backend, OnFull, PinnedBuf, Pool, PoolBuilder, Preset};

use crate::fixture::{filled, heap, held_sink};
use crate::until::until;
use crate::valid_stats::stats_when;

fn backends() -> [Backend; 3] {
    [Backend::Heap, Backend::Mlock, Backend::Source(std::sync::Arc::new(pinpool_replay::SimSource::new(1 << 30)))]
}

fn builder(backend: Backend, preset: Preset) -> PoolBuilder {
    Pool::builder().without_env().backend(backend).preset(preset).zero(true).max_bytes(8 << 20)
}

/// Every backend of this machine, under both presets.
fn pools(with: impl Fn(PoolBuilder) -> PoolBuilder) -> impl Iterator<Item = Pool> {
    let all = backends()
        .into_iter()
        .flat_map(|backend| [Preset::Adaptive, Preset::TensorFlow].map(|preset| builder(backend.clone(), preset)));
    all.filter_map(move |builder| with(builder).build().ok())
}

/// Whether all bytes of the buffer's class are zero, not only its length.
fn is_zero(buf: &PinnedBuf) -> bool {
    // SAFETY: the buffer owns all `capacity` bytes of its class.
    unsafe { std::slice::from_raw_parts(buf.as_ptr(), buf.capacity()) }.iter().all(|&byte| byte == 0)
}

fn dirty(pool: &Pool, len: usize) -> PinnedBuf {
    let mut buf = pool.get(len).unwrap();
    assert!(is_zero(&buf), "{} B of {}", len, pool.stats().backend);
    let capacity = buf.capacity();
    // SAFETY: as in `is_zero`.
    unsafe { buf.as_mut_ptr().write_bytes(0xAB, capacity) };
    buf
}

#[test]
fn a_request_returns_zeros_whether_its_memory_is_fresh_reused_or_carved_again() {
    for maintenance_thread in [false, true] {
        for pool in
            pools(|builder| builder.maintenance_thread(maintenance_thread).pool_size_limit(2).auto_resize(false))
        {
            // More lengths than the pool keeps, so that buffers are evicted and carved from used memory.
            for round in 0..6 {
                let bufs: Vec<_> = [100, 5_000, 70_000, 300_000].map(|len| dirty(&pool, len + round * 9_000)).into();
                drop(bufs);
            }
            (0..10).for_each(|_| drop(dirty(&pool, 100)));
            // A buffer that the maintenance thread is zeroing counts as in use.
            let stats = stats_when(&pool, |stats| stats.memory.in_use == 0);
            assert!(stats.requests.hits > 0 && stats.memory.evictions.over_limit > 0, "{stats:?}");
        }
    }
}

#[test]
fn idle_memory_keeps_no_bytes() {
    for maintenance_thread in [false, true] {
        for pool in pools(|builder| builder.maintenance_thread(maintenance_thread)) {
            let buf = dirty(&pool, 10_000);
            let (start, capacity) = (buf.as_ptr(), buf.capacity());
            drop(buf);
            pool.maintain();
            until("the thread has zeroed it", || pool.stats().memory.idle > 0);
            // SAFETY: idle memory stays mapped, and no thread uses it.
            assert!(unsafe { std::slice::from_raw_parts(start, capacity) }.iter().all(|&byte| byte == 0));
        }
    }
}

#[test]
fn a_copied_buffer_is_zeroed_after_its_copy() {
    for pool in pools(|builder| builder) {
        let (stream, mut device, gate) = held_sink(10_000);
        let copy = dirty(&pool, 10_000).copy_to(&stream, &mut device).unwrap();
        pool.maintain();
        drop(gate);
        copy.wait().unwrap();
        assert!(device.read().iter().all(|&byte| byte == 0xAB), "not before the copy");
        drop(dirty(&pool, 10_000));
    }
}

#[test]
fn memory_that_stands_in_for_a_full_pool_is_zero_too() {
    let builder = builder(Backend::Heap, Preset::Adaptive).max_bytes(1 << 20).on_full(OnFull::Pageable);
    let pool = builder.wait(std::time::Duration::ZERO).build().unwrap();
    let _all = dirty(&pool, 1 << 20);
    (0..3).for_each(|_| assert!(dirty(&pool, 1 << 18).pinned_by().is_none()));
    assert_eq!(pool.stats().requests.pageable, 3);
}

#[test]
fn without_the_setting_a_buffer_keeps_its_bytes() {
    let pool = heap().build().unwrap();
    drop(filled(&pool, 100, 7));
    assert_eq!(*pool.get(100).unwrap().wait_slice().unwrap(), [7; 100]);
}
