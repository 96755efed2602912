//! The ways by which a buffer is sent to the front of a lane's memory and given up, all without a wait.

use cudarc::driver::{DevicePtrMut, sys};
use pinpool::PinnedBuf;

use crate::device::Lane;

pub(crate) type Way = fn(PinnedBuf, &mut Lane);

pub(crate) const WAYS: [(&str, Way); 5] = [
    ("copy_to", copied),
    ("copy_range_to", in_two_ranges),
    ("memcpy_htod", by_cudarc),
    ("release_after", behind_the_stream),
    ("release_after_event", behind_an_event),
];

fn copied(buf: PinnedBuf, lane: &mut Lane) {
    drop(buf.copy_to(&lane.stream, &mut lane.memory).unwrap());
}

fn in_two_ranges(mut buf: PinnedBuf, lane: &mut Lane) {
    let (half, len) = (buf.len() / 2, buf.len());
    drop(buf.copy_range_to(0..half, &lane.stream, &mut lane.memory.slice_mut(..half)).unwrap());
    drop(buf.copy_range_to(half..len, &lane.stream, &mut lane.memory.slice_mut(half..len)).unwrap());
}

fn by_cudarc(buf: PinnedBuf, lane: &mut Lane) {
    lane.stream.memcpy_htod(&buf, &mut lane.memory).unwrap();
}

fn behind_the_stream(buf: PinnedBuf, lane: &mut Lane) {
    by_others(&buf, lane);
    buf.release_after(&lane.stream).unwrap();
}

fn behind_an_event(buf: PinnedBuf, lane: &mut Lane) {
    by_others(&buf, lane);
    let event = lane.stream.record_event(None).unwrap();
    buf.release_after_event(&event).unwrap();
}

/// A copy that the pool does not know of.
fn by_others(buf: &PinnedBuf, lane: &mut Lane) {
    lane.stream.context().bind_to_thread().unwrap();
    let (to, _tracking) = lane.memory.device_ptr_mut(&lane.stream);
    // SAFETY: both callers keep the buffer until the work on the stream is over; the memory is as long.
    let enqueued = unsafe { sys::cuMemcpyHtoDAsync_v2(to, buf.as_ptr().cast(), buf.len(), lane.stream.cu_stream()) };
    enqueued.result().unwrap();
}
