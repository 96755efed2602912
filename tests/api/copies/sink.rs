//! The host sink: a stream that copies later and in order, and memory with views.
#![allow(unsafe_code)] // Enqueues copies of plain memory.

use std::sync::Arc;

use pinpool::copy::{CopyTarget, Fence};
use pinpool_testing::{SinkMemory, SinkStream};

fn enqueue(stream: &SinkStream, mem: &mut SinkMemory, source: &'static [u8]) -> Arc<dyn Fence> {
    // SAFETY: a static slice stays readable and unchanged.
    unsafe { mem.enqueue_write(stream, source.as_ptr(), source.len()) }.unwrap()
}

#[test]
fn copies_of_two_streams_into_one_target_keep_their_order() {
    let (first, second) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
    let mut mem = SinkMemory::new(1);
    let gate = first.hold();
    enqueue(&first, &mut mem, b"a");
    let last = enqueue(&second, &mut mem, b"b");
    assert!(!last.is_complete().unwrap());
    drop(gate);
    assert_eq!(mem.read(), b"b");
}

#[test]
fn a_stream_dropped_with_work_queued_still_does_it() {
    let stream = SinkStream::new().unwrap();
    let mut mem = SinkMemory::new(1);
    enqueue(&stream, &mut mem, b"z");
    drop(stream);
    assert_eq!(mem.read(), b"z");
}
