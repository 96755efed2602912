//! One copy at a time, held while it is observed: the memory must not be reused meanwhile, and the right bytes must arrive.

use cudarc::driver::CudaContext;
use pinpool::{PinnedBuf, Pool};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, HeldStream, Lane, Rig, filled, wait_until_put};
use crate::events_only::EventsOnly;
use crate::methods::METHODS;
use crate::until::until;

const LEN: usize = 3 * MIB + 1;

/// The buffer of this length, once it is idle.
fn wait_for_idle(pool: &Pool, len: usize) -> PinnedBuf {
    let mut found = None;
    until("the buffer is put", || {
        found = pool.try_get(len).unwrap();
        found.is_some()
    });
    found.unwrap()
}

fn check_in_flight(pool: &Pool, what: &str) {
    pool.maintain();
    let stats = pool.stats();
    assert_eq!((stats.copies.in_flight, stats.memory.in_use, stats.memory.idle), (1, 0, 0), "{what}");
    assert!(pool.try_get(LEN).unwrap().is_none(), "{what}: handed out during a copy");
}

/// The kinds of streams that programs use. For the last two, cudarc records no events.
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
        for has_events in [true, false] {
            let _events = has_events.then(EventsOnly::begin);
            let pool = rig.builder().build().unwrap();
            for (number, mut lane) in (1..).zip(usual_lanes(rig)) {
                for (method, copy) in METHODS {
                    let (what, batch) =
                        (format!("{}, {method}, events {has_events}", lane.name), Batch::new(number, LEN));
                    let buf = filled(&pool, batch);
                    let id = buf.unstable_id();
                    let hold = HeldStream::on(&lane.stream);
                    copy(buf, &mut lane);
                    check_in_flight(&pool, &what);
                    hold.open();
                    let mut again = wait_for_idle(&pool, LEN);
                    assert_eq!(again.unstable_id(), id, "{what}");
                    again.wait_slice_mut().unwrap().fill(0xEE);
                    lane.check(batch);
                }
            }
            assert_eq!((pool.stats().memory.pin.count, pool.stats().memory.quarantined), (1, 0), "{}", rig.name());
        }
    });
}

#[test]
fn device_writes_complete_before_a_read_or_reuse() {
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
            assert!(!pending.is_complete().unwrap(), "{}", lane.name);
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
fn copies_outlive_their_streams_and_later_streams_with_the_same_handle() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for has_events in [true, false] {
            let _events = has_events.then(EventsOnly::begin);
            let pool = rig.builder().build().unwrap();
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
                        until("the other copies are complete", || {
                            pool.maintain();
                            pool.stats().copies.in_flight <= 1
                        });
                        assert_eq!(pool.stats().copies.in_flight, 1, "{}, events {has_events}", lane.name);
                        hold.open();
                    }
                }
                (0..).zip(&lanes).for_each(|(number, lane)| lane.check(Batch::new(round * 4 + number, LEN)));
            }
            wait_until_put(&pool);
            assert_eq!(pool.stats().memory.quarantined, 0, "{}, events {has_events}", rig.name());
        }
    });
}
