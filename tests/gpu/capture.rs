//! The pool alongside graph captures in CUDA's strictest mode: calls on the capturing stream are refused, others leave the
//! capture valid.

use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode;
use cudarc::driver::{CudaContext, CudaStream, result};
use pinpool::{Pool, Request, Stats};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, Lane, Rig, filled};
use crate::events_only::EventsOnly;
use crate::memory::{LIMIT, fill_granules};
use crate::until::until;

/// Captures on `stream` while `run` runs; the capture must survive it.
fn captured(what: &str, stream: &CudaStream, run: impl FnOnce()) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream, which captures until the call below.
    unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.unwrap();
    run();
    // SAFETY: as above.
    match unsafe { result::stream::end_capture(stream.cu_stream()) } {
        // SAFETY: just made, never launched.
        Ok(graph) if !graph.is_null() => unsafe { result::graph::destroy(graph) }.unwrap(),
        Ok(_) => {}
        Err(error) => panic!("{what}: the pool invalidated a capture: {:?}", error.0),
    }
}

#[test]
fn a_stream_that_captures_is_refused() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let (pool, name) = (rig.pool(), rig.name());
        let untracked = CudaContext::new(0).unwrap();
        // SAFETY: one stream, and its memory is never read.
        unsafe { untracked.disable_event_tracking() };
        let mut lane = Lane::on(&untracked.new_stream().unwrap(), name.to_owned(), MIB);
        captured(name, &lane.stream, || {
            let refused = pool.get(MIB).unwrap().copy_to(&lane.stream, &mut lane.memory).unwrap_err();
            let refused = pinpool::Error::from(refused);
            assert!(refused.is_capturing_stream(), "{name}: {refused}");
            let refused = pool.get(MIB).unwrap().copy_from(&lane.stream, &lane.memory).unwrap_err();
            let refused = pinpool::Error::from(refused);
            assert!(refused.is_capturing_stream(), "{name}: {refused}");
            let Stats { memory, copies, .. } = pool.stats();
            assert_eq!((memory.idle, copies.in_flight, memory.quarantined), (1, 0, 0), "{name}: it is put back");
            // Each launch of the graph would read these buffers again.
            assert!(
                pool.get(MIB).unwrap().release_after(&lane.stream).unwrap_err().error().is_capturing_stream(),
                "{name}"
            );
            lane.stream.memcpy_htod(&pool.get(MIB).unwrap(), &mut lane.memory).unwrap();
            pool.maintain();
            let Stats { memory, copies, .. } = pool.stats();
            assert_eq!((memory.idle, copies.in_flight, memory.quarantined), (0, 0, 2), "{name}: never reused");
        });
    });
}

#[test]
fn captures_survive_commits_remaps_releases_and_copies_on_any_thread() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        for (has_events, on_this_thread) in [(true, true), (true, false), (false, false)] {
            let _events = has_events.then(EventsOnly::begin);
            let pool = rig.builder().max_bytes(LIMIT).build().unwrap();
            let (capturing, mut lane, batch) = (rig.lane(0, 1), rig.lane(1, MIB), Batch::new(1, MIB));
            let what = format!("{}, events {has_events}, this thread: {on_this_thread}", rig.name());
            captured(&what, &capturing.stream, || {
                if on_this_thread {
                    use_pool(rig, &pool, &mut lane, batch);
                } else {
                    thread::scope(|scope| {
                        scope.spawn(|| {
                            rig.context.bind_to_thread().unwrap();
                            use_pool(rig, &pool, &mut lane, batch);
                        });
                    });
                }
            });
            lane.check(batch);
            assert_eq!(pool.stats().memory.quarantined, 0, "{what}");
        }
    });
}

/// Commits, remaps, releases, copies, waits and maintains.
fn use_pool(rig: &Rig<'_>, pool: &Pool, lane: &mut Lane, batch: Batch) {
    let mut bufs = fill_granules(pool, 10);
    (0..bufs.len()).rev().step_by(2).for_each(|index| drop(bufs.swap_remove(index)));
    let contiguous = pool.get_with(Request::new(6 * MIB).timeout(Duration::ZERO));
    assert_eq!(contiguous.is_ok(), rig.virtual_memory() && pool.stats().memory.remap.count > 0, "{}", rig.name());
    drop((bufs, contiguous));
    pool.clear();
    let stats = pool.stats();
    assert!(stats.memory.held_bytes == 0 && stats.memory.unpin.count > 0, "{}: {stats:?}", rig.name());
    let mut buf = filled(pool, batch);
    buf.copy_range_to(0..MIB, &lane.stream, &mut lane.memory).unwrap().wait().unwrap();
    assert!(buf.try_slice_mut().unwrap().is_some(), "{}", rig.name());
    let copy = buf.copy_to(&lane.stream, &mut lane.memory).unwrap();
    while !copy.is_complete().unwrap() {
        thread::yield_now();
    }
    // While the maintenance thread queries the copy, `maintain` skips it.
    until("the copy has completed", || {
        pool.maintain();
        pool.stats().copies.in_flight == 0
    });
}
