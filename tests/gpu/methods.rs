//! The methods of copying a buffer to the start of a lane's memory and dropping it without a wait.

use cudarc::driver::{DevicePtrMut, sys};
use pinpool::PinnedBuf;

use crate::device::Lane;

pub(crate) type Method = fn(PinnedBuf, &mut Lane);

pub(crate) const METHODS: [(&str, Method); 5] = [
    ("copy_to", by_copy_to),
    ("copy_range_to", by_two_ranges),
    ("memcpy_htod", by_cudarc),
    ("release_after", before_release_after),
    ("release_after_event", before_release_after_event),
];

fn by_copy_to(buf: PinnedBuf, lane: &mut Lane) {
    drop(buf.copy_to(&lane.stream, &mut lane.memory).unwrap());
}

fn by_two_ranges(mut buf: PinnedBuf, lane: &mut Lane) {
    let (half, len) = (buf.len() / 2, buf.len());
    drop(buf.copy_range_to(0..half, &lane.stream, &mut lane.memory.slice_mut(..half)).unwrap());
    drop(buf.copy_range_to(half..len, &lane.stream, &mut lane.memory.slice_mut(half..len)).unwrap());
}

fn by_cudarc(buf: PinnedBuf, lane: &mut Lane) {
    lane.stream.memcpy_htod(&buf, &mut lane.memory).unwrap();
}

fn before_release_after(buf: PinnedBuf, lane: &mut Lane) {
    untracked_copy(&buf, lane);
    buf.release_after(&lane.stream).unwrap();
}

fn before_release_after_event(buf: PinnedBuf, lane: &mut Lane) {
    untracked_copy(&buf, lane);
    buf.release_after_event(&lane.stream.record_event(None).unwrap()).unwrap();
}

/// A copy that the pool does not track.
fn untracked_copy(buf: &PinnedBuf, lane: &mut Lane) {
    lane.stream.context().bind_to_thread().unwrap();
    let (to, _tracking) = lane.memory.device_ptr_mut(&lane.stream);
    // SAFETY: both callers keep the buffer until the work on the stream completes; the memory is as long.
    let enqueued = unsafe { sys::cuMemcpyHtoDAsync_v2(to, buf.as_ptr().cast(), buf.len(), lane.stream.cu_stream()) };
    enqueued.result().unwrap();
}
