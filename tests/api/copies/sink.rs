//! The host sink: a stream that copies later and in order, and memory with views.
#![allow(unsafe_code)] // Enqueues copies of plain memory.

use std::sync::Arc;
use std::thread;

use pinpool::copy::CopyTarget;
use pinpool::{Fence, FenceKind};
use pinpool_testing::{SinkMem, SinkStream};

fn enqueue(stream: &SinkStream, mem: &mut SinkMem, source: &'static [u8]) -> Arc<dyn Fence> {
    // SAFETY: a static slice stays readable and unchanged.
    unsafe { mem.enqueue(stream, source.as_ptr(), source.len(), FenceKind::Timeline) }.unwrap()
}

#[test]
fn copies_run_later_and_in_order() {
    let stream = SinkStream::new().unwrap();
    let mut mem = SinkMem::new(4);
    let gate = stream.hold();
    let first = enqueue(&stream, &mut mem, b"abcd");
    let second = enqueue(&stream, &mut mem, b"xy");
    assert!(!first.is_complete().unwrap() && !second.is_complete().unwrap());
    drop(gate);
    assert_eq!(mem.read(), b"xycd");
    assert!(first.is_complete().unwrap() && second.is_complete().unwrap());
}

#[test]
fn a_gate_holds_its_own_stream_only() {
    let (held, free) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
    let (mut first, mut second) = (SinkMem::new(1), SinkMem::new(1));
    let gate = held.hold();
    let waiting = enqueue(&held, &mut first, b"a");
    enqueue(&free, &mut second, b"b").wait().unwrap();
    assert!(!waiting.is_complete().unwrap());
    drop(gate);
    waiting.wait().unwrap();
    assert_eq!((first.read(), second.read()), (&b"a"[..], &b"b"[..]));
}

#[test]
fn copies_of_two_streams_into_one_target_keep_their_order() {
    let (first, second) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
    let mut mem = SinkMem::new(1);
    let gate = first.hold();
    enqueue(&first, &mut mem, b"a");
    let last = enqueue(&second, &mut mem, b"b");
    assert!(!last.is_complete().unwrap());
    drop(gate);
    assert_eq!(mem.read(), b"b");
}

#[test]
fn a_lost_device_fails_queries_and_waits() {
    let stream = SinkStream::new().unwrap();
    let mut mem = SinkMem::new(1);
    enqueue(&stream, &mut mem, b"a").wait().unwrap();
    let gate = stream.hold();
    let copy = enqueue(&stream, &mut mem, b"b");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| copy.wait());
        stream.fail();
        assert!(waiter.join().unwrap().unwrap_err().is_device());
    });
    assert!(copy.is_complete().unwrap_err().is_device());
    drop(gate);
    assert_eq!(mem.read(), b"a");
}

#[test]
fn a_stream_dropped_with_work_queued_still_does_it() {
    let stream = SinkStream::new().unwrap();
    let mut mem = SinkMem::new(1);
    enqueue(&stream, &mut mem, b"z");
    drop(stream);
    assert_eq!(mem.read(), b"z");
}
