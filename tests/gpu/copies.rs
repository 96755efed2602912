//! One copy at a time, held while it is observed: whether the memory may be reused meanwhile, and which bytes arrive.

use std::sync::Arc;
use std::thread;

use cudarc::driver::{CudaContext, DevicePtrMut, result, sys};
use pinpool::{FenceKind, PinnedBuf, Pool};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, HeldStream, Lane, Rig, filled, wait_until};
use crate::methods::METHODS;

const LEN: usize = 3 * MIB + 1;
const FENCES: [FenceKind; 2] = [FenceKind::Event, FenceKind::Timeline];

/// The buffer of this length, once it is idle.
fn wait_for_idle(pool: &Pool, len: usize) -> PinnedBuf {
    let mut found = None;
    wait_until("the buffer is put", || {
        found = pool.try_get(len).unwrap();
        found.is_some()
    });
    found.unwrap()
}

fn check_in_flight(pool: &Pool, what: &str) {
    pool.maintain();
    let stats = pool.stats();
    assert_eq!((stats.copies.in_flight, stats.memory.in_use, stats.memory.idle), (1, 0, 0), "{what}");
    assert!(pool.try_get(LEN).unwrap().is_none(), "{what}: handed out under a copy");
}

/// The kinds of streams that programs use; for the last two cudarc records no events.
fn usual_lanes(rig: &Rig<'_>) -> Vec<Lane> {
    let untracked = CudaContext::new(0).unwrap();
    // SAFETY: each block of device memory is used on one stream.
    unsafe { untracked.disable_event_tracking() };
    let streams = [
        ("a stream", rig.context.new_stream().unwrap()),
        ("the thread's stream", rig.context.per_thread_stream()),
        ("an untracked stream", untracked.new_stream().unwrap()),
        ("the default stream alone", CudaContext::new(0).unwrap().default_stream()),
    ];
    streams.map(|(which, stream)| Lane::on(&stream, format!("{}, {which}", rig.name()), LEN)).into()
}

#[test]
fn a_copied_buffer_is_in_flight_until_its_copy_completes() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for fence in FENCES {
            let pool = rig.builder().unstable_fence(fence).build().unwrap();
            for (number, mut lane) in (1..).zip(usual_lanes(rig)) {
                for (method, copy) in METHODS {
                    let (what, batch) = (format!("{}, {method}, fence {fence:?}", lane.name), Batch::new(number, LEN));
                    let buf = filled(&pool, batch);
                    let id = buf.id();
                    let hold = HeldStream::on(&lane.stream);
                    copy(buf, &mut lane);
                    check_in_flight(&pool, &what);
                    hold.open();
                    let mut again = wait_for_idle(&pool, LEN);
                    assert_eq!(again.id(), id, "{what}");
                    again.wait_slice_mut().unwrap().fill(0xEE);
                    lane.check(batch);
                }
            }
            assert_eq!((pool.stats().memory.pin.count, pool.stats().memory.quarantined), (1, 0), "{}", rig.name());
        }
    });
}

#[test]
fn a_buffer_that_a_device_writes_is_not_read_or_reused_before_the_copy_completes() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let pool = rig.pool();
        for (number, mut lane) in (1..).zip(usual_lanes(rig)) {
            let batch = Batch::new(number, LEN);
            drop(filled(&pool, batch).copy_to(&lane.stream, &mut lane.memory).unwrap());
            lane.check(batch);
            let empty = || filled(&pool, Batch::new(0, LEN));

            // A pending buffer that is dropped.
            let (buf, hold) = (empty(), HeldStream::on(&lane.stream));
            drop(buf.copy_from(&lane.stream, &lane.memory).unwrap());
            check_in_flight(&pool, &lane.name);
            hold.open();
            let (buf, hold) = (wait_for_idle(&pool, LEN), HeldStream::on(&lane.stream));
            let pending = buf.copy_from(&lane.stream, &lane.memory).unwrap();
            assert!(!pending.is_done().unwrap(), "{}", lane.name);
            hold.open();
            batch.check(pending.wait().unwrap().wait_slice().unwrap(), &lane.name);

            let (mut buf, hold) = (empty(), HeldStream::on(&lane.stream));
            lane.stream.memcpy_dtoh(&lane.memory, &mut buf).unwrap();
            assert!(buf.try_slice_mut().unwrap().is_none(), "{}: in use by a copy", lane.name);
            hold.open();
            batch.check(buf.wait_slice().unwrap(), &lane.name);
        }
    });
}

#[test]
fn a_write_to_a_borrowed_buffer_waits_for_the_copies_on_every_stream() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let (pool, batch) = (rig.pool(), Batch::new(1, LEN));
        let mut lanes: Vec<Lane> = (0..3).map(|number| rig.lane(number, LEN)).collect();
        let mut buf = filled(&pool, batch);
        let holds: Vec<HeldStream> = lanes.iter().map(|lane| HeldStream::on(&lane.stream)).collect();
        // Several copies on each stream, the last by cudarc.
        for lane in &mut lanes {
            drop(buf.copy_range_to(0..LEN, &lane.stream, &mut lane.memory).unwrap());
            drop(buf.copy_range_to(0..LEN, &lane.stream, &mut lane.memory).unwrap());
            lane.stream.memcpy_htod(&buf, &mut lane.memory).unwrap();
        }
        for hold in holds {
            assert!(buf.try_slice_mut().unwrap().is_none(), "{}: copies are in flight", rig.name());
            hold.open();
        }
        // Waits for all copies.
        buf.wait_slice_mut().unwrap().fill(0);
        lanes.iter().for_each(|lane| lane.check(batch));
        assert!(buf.try_slice_mut().unwrap().is_some(), "{}", rig.name());
    });
}

#[test]
fn a_buffer_filled_on_one_stream_is_copied_on_another_only_when_it_is_full() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let pool = rig.pool();
        let (mut down, mut up) = (rig.lane(0, LEN), rig.lane(1, LEN));
        for number in 1..12 {
            let batch = Batch::new(number, LEN);
            drop(filled(&pool, batch).copy_to(&down.stream, &mut down.memory).unwrap());
            let mut buf = pool.get(LEN).unwrap();
            down.stream.memcpy_dtoh(&down.memory, &mut buf).unwrap();
            up.stream.memcpy_htod(&buf, &mut up.memory).unwrap();
            // And back into the buffer while it is still being copied.
            let next = Batch::new(100 + number, LEN);
            drop(filled(&pool, next).copy_to(&down.stream, &mut down.memory).unwrap());
            down.stream.memcpy_dtoh(&down.memory, &mut buf).unwrap();
            up.check(batch);
            next.check(buf.wait_slice().unwrap(), &down.name);
        }
    });
}

#[test]
fn a_later_record_of_an_event_changes_nothing() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let (pool, batch) = (rig.pool(), Batch::new(1, LEN));
        let (mut lane, other) = (rig.lane(0, LEN), rig.lane(1, 1));
        let buf = filled(&pool, batch);
        let id = buf.id();
        let event = rig.context.new_event(None).unwrap();
        let hold = HeldStream::on(&lane.stream);
        let (to, tracking) = lane.memory.device_ptr_mut(&lane.stream);
        // SAFETY: the buffer is kept until the event's work completes; the memory is as long.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, buf.as_ptr().cast(), LEN, lane.stream.cu_stream()) }.result().unwrap();
        drop(tracking);
        event.record(&lane.stream).unwrap();
        buf.release_after_event(&event).unwrap();
        event.record(&other.stream).unwrap();
        drop(event);
        check_in_flight(&pool, rig.name());
        hold.open();
        assert_eq!(wait_for_idle(&pool, LEN).id(), id);
        lane.check(batch);
        // An event without a record counts as complete.
        wait_for_idle(&pool, LEN).release_after_event(&rig.context.new_event(None).unwrap()).unwrap();
        assert_eq!(wait_for_idle(&pool, LEN).id(), id);
    });
}

#[test]
fn copies_outlive_their_streams_and_later_streams_with_the_same_handle() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for fence in FENCES {
            let pool = rig.builder().unstable_fence(fence).build().unwrap();
            let mut lanes: Vec<Lane> = (0..4).map(|number| rig.lane(number, LEN)).collect();
            // A driver gives the handle of a destroyed stream to the next one.
            for round in 0..24 {
                for (number, lane) in (0..).zip(&mut lanes) {
                    let stream = rig.context.new_stream().unwrap();
                    let batch = Batch::new(round * 4 + number, LEN);
                    let hold = (number == 3).then(|| HeldStream::on(&stream));
                    drop(filled(&pool, batch).copy_to(&stream, &mut lane.memory).unwrap());
                    drop(stream);
                    if let Some(hold) = hold {
                        wait_until("the other copies are complete", || {
                            pool.maintain();
                            pool.stats().copies.in_flight <= 1
                        });
                        assert_eq!(pool.stats().copies.in_flight, 1, "{}, fence {fence:?}", lane.name);
                        hold.open();
                    }
                }
                for (number, lane) in (0..).zip(&lanes) {
                    lane.check(Batch::new(round * 4 + number, LEN));
                }
            }
            wait_until("every buffer is put", || {
                pool.maintain();
                pool.stats().copies.in_flight == 0
            });
            assert_eq!(pool.stats().memory.quarantined, 0, "{}, fence {fence:?}", rig.name());
        }
    });
}

#[test]
fn a_thread_without_a_context_puts_waits_and_polls() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for fence in FENCES {
            let pool = rig.builder().unstable_fence(fence).background_thread(true).build().unwrap();
            let (mut lane, mut borrowing) = (rig.lane(0, LEN), rig.lane(1, LEN));
            let [given, borrowed, sliced] = [1, 2, 3].map(|number| Batch::new(number, LEN));
            let (mut kept, by_cudarc) = (filled(&pool, borrowed), filled(&pool, sliced));
            let hold = HeldStream::on(&lane.stream);
            let copy = filled(&pool, given).copy_to(&lane.stream, &mut lane.memory).unwrap();
            drop(kept.copy_range_to(0..LEN, &borrowing.stream, &mut borrowing.memory).unwrap());
            borrowing.stream.memcpy_htod(&by_cudarc, &mut borrowing.memory).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    pool.maintain();
                    drop(by_cudarc);
                    assert!(!copy.is_done().unwrap());
                    hold.open();
                    copy.wait().unwrap();
                    kept.wait_slice_mut().unwrap().fill(0);
                    drop(kept);
                    drop(pool.get(5 * MIB).unwrap());
                    wait_until("every buffer is put", || {
                        pool.maintain();
                        pool.stats().copies.in_flight == 0
                    });
                    assert_eq!(result::ctx::get_current(), Ok(None), "{}: left a context behind", rig.name());
                });
            });
            lane.check(given);
            borrowing.check(sliced);
            assert_eq!(pool.stats().memory.quarantined, 0, "{}, fence {fence:?}", rig.name());
        }
    });
}

#[test]
fn the_device_reads_a_buffer_at_its_device_address() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        // Memory of growth and of a reserve, which may be of another kind.
        for reserve in [0, 16 << 20] {
            let pool = rig.builder().reserve_bytes(reserve).build().unwrap();
            let batch = Batch::new(reserve, 5 * MIB + 1);
            let mut lane = rig.lane(0, batch.len);
            let buf = filled(&pool, batch);
            let address = buf
                .device_ptr(rig.context)
                .unwrap_or_else(|error| panic!("{}, reserve of {reserve} B: {error}", rig.name()));
            copy_from_address(rig.context, address, &mut lane, batch.len);
            buf.release_after(&lane.stream).unwrap();
            lane.check(batch);
        }
    });
}

/// Reads as a kernel does: by the address alone.
fn copy_from_address(context: &Arc<CudaContext>, address: u64, lane: &mut Lane, len: usize) {
    context.bind_to_thread().unwrap();
    let (to, _tracking) = lane.memory.device_ptr_mut(&lane.stream);
    // SAFETY: the caller keeps the buffer until the work on the stream completes; the memory is as long.
    unsafe { sys::cuMemcpyAsync(to, address, len, lane.stream.cu_stream()) }.result().unwrap();
}
