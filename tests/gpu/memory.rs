//! Memory that is committed, remapped and released, during copies if the backend can and otherwise after them; a reserve.

use std::thread;
use std::time::Duration;

use pinpool::{PinnedBuf, Pool, Request};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, HeldStream, Lane, Rig, filled, wait_until_put};
use crate::until::until;
use crate::valid_stats::valid_stats;

/// Ten granules; the largest buffers here are three.
pub(crate) const LIMIT: u64 = 20 << 20;
const GRANULE: usize = 2 * MIB;

/// A buffer for each granule under the limit. The pool must hold nothing.
pub(crate) fn fill_granules(pool: &Pool, first: u64) -> Vec<(Batch, PinnedBuf)> {
    let batches = (0..LIMIT / GRANULE as u64).map(|index| Batch::new(first + index, GRANULE));
    batches.map(|batch| (batch, filled(pool, batch))).collect()
}

/// Requests three contiguous granules where every other one of ten is free, while copies from the rest are in flight. The pool
/// must hold nothing.
pub(crate) fn check_remap_during_copies(rig: &Rig<'_>, pool: &Pool) {
    let name = rig.name();
    let mut lanes: Vec<Lane> = (0..6).map(|number| rig.lane(number, 3 * GRANULE)).collect();
    let holds: Vec<HeldStream> = lanes[..5].iter().map(|lane| HeldStream::on(&lane.stream)).collect();
    let all = fill_granules(pool, 1000).into_iter().enumerate();
    let mut kept: Vec<_> = all.filter(|(index, _)| index % 2 == 1).map(|(_, kept)| kept).collect();
    for ((batch, buf), lane) in kept.iter_mut().zip(&mut lanes) {
        drop(buf.copy_range_to(0..batch.len, &lane.stream, &mut lane.memory).unwrap());
    }
    let (before, large) = (pool.stats(), Batch::new(2000, 3 * GRANULE));
    let wanted = pool.get_with(Request::new(large.len).timeout(Duration::ZERO));
    let contiguous = if rig.virtual_memory() {
        let contiguous =
            wanted.unwrap_or_else(|error| panic!("{name}: granules are not remapped during copies: {error}"));
        let stats = pool.stats();
        assert!(stats.memory.remap.count > before.memory.remap.count, "{name}: {stats:?}");
        assert_eq!(stats.memory.pin.count, before.memory.pin.count, "{name}: pinned again at the limit");
        Some(contiguous)
    } else {
        assert!(wanted.unwrap_err().is_limit(), "{name}: a region cannot be released under copies");
        None
    };
    // A copy from the old addresses of the granules, or into their new ones, is detected from here on.
    let contiguous = contiguous.map(|mut buf| {
        large.write(buf.wait_slice_mut().unwrap());
        buf
    });
    holds.into_iter().for_each(HeldStream::open);
    for ((batch, _), lane) in kept.iter().zip(&lanes) {
        lane.check(*batch);
    }
    kept.iter_mut().for_each(|(_, buf)| buf.wait_slice_mut().unwrap().fill(0));
    drop(kept);
    let buf = contiguous.unwrap_or_else(|| filled(pool, large));
    let lane = &mut lanes[5];
    let hold = HeldStream::on(&lane.stream);
    drop(buf.copy_to(&lane.stream, &mut lane.memory).unwrap());
    // Granules are unmapped at their old addresses while the device is about to read them at the new ones.
    pool.maintain();
    hold.open();
    lane.check(large);
    wait_until_put(pool);
}

#[test]
fn granules_are_remapped_during_copies_in_flight_and_regions_wait_for_them() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let pool = rig.builder().max_bytes(LIMIT).build().unwrap();
        check_remap_during_copies(rig, &pool);
        // Once more, with granules that were remapped before.
        pool.clear();
        check_remap_during_copies(rig, &pool);
        pool.clear();
        let stats = valid_stats(&pool);
        assert!(stats.memory.unpin.count > 0, "{}: {stats:?}", rig.name());
        assert!(!rig.virtual_memory() || stats.memory.remap.count > 0);
    });
}

#[test]
fn memory_is_released_during_a_copy_or_waits_for_it() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let (pool, name, batch) = (rig.pool(), rig.name(), Batch::new(1, 4096));
        let mut lane = rig.lane(0, 4096);
        drop(pool.get(5 * MIB).unwrap());
        let hold = HeldStream::on(&lane.stream);
        drop(filled(&pool, batch).copy_to(&lane.stream, &mut lane.memory).unwrap());
        let before = pool.stats();
        if rig.virtual_memory() {
            pool.clear();
            let stats = pool.stats();
            assert!(stats.memory.unpin.count > before.memory.unpin.count, "{name}: {stats:?}");
            assert!(stats.memory.held_bytes <= 2 << 20, "{name}: more than the granule of the copy: {stats:?}");
            assert_eq!(stats.copies.in_flight, 1, "{name}");
            hold.open();
        } else {
            // The release waits for the device.
            thread::scope(|scope| {
                let clearing = scope.spawn(|| pool.clear());
                thread::sleep(Duration::from_millis(20));
                assert!(!clearing.is_finished(), "{name} released memory during a copy");
                hold.open();
                clearing.join().unwrap();
            });
        }
        lane.check(batch);
        until("the rest is released", || {
            pool.maintain();
            pool.clear();
            pool.stats().memory.held_bytes == 0
        });
        assert!(pool.stats().memory.unpin.count > before.memory.unpin.count, "{name}");
    });
}

#[test]
fn a_reserve_serves_copies_without_another_pin_call() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let pool = rig.builder().reserve(16 << 20).growth(false).build().unwrap();
        pool.reserve(8 << 20).unwrap();
        let locks = pool.stats().memory.pin.count;
        let batches = [4096, 5 * MIB + 1, 9 * MIB, 7 * MIB].map(|len| Batch::new(len as u64, len));
        let mut lanes: Vec<Lane> = batches.iter().map(|batch| rig.lane(0, batch.len)).collect();
        for round in 0..3 {
            for (batch, lane) in batches.iter().zip(&mut lanes) {
                drop(filled(&pool, *batch).copy_to(&lane.stream, &mut lane.memory).unwrap());
            }
            for (batch, lane) in batches.iter().zip(&lanes) {
                lane.check(*batch);
            }
            assert_eq!(pool.stats().memory.pin.count, locks, "{}, round {round}", rig.name());
        }
    });
}
