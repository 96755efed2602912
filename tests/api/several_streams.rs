//! A buffer that work on several streams uses.

use pinpool::copy::Streams;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Backend, Pool};

fn pool() -> Pool {
    Pool::builder().backend(Backend::Heap).build().unwrap()
}

#[test]
fn a_buffer_released_after_several_streams_is_used_again_when_the_last_is_over() {
    let pool = pool();
    let streams = [SinkStream::new().unwrap(), SinkStream::new().unwrap(), SinkStream::new().unwrap()];
    let mut gates: Vec<_> = streams.iter().map(SinkStream::hold).collect();
    let mut targets = [SinkMem::new(64), SinkMem::new(64), SinkMem::new(64)];
    for (stream, target) in streams.iter().zip(&mut targets) {
        drop(pool.get(64).unwrap().copy_to(stream, target).unwrap());
    }
    let buf = pool.get(1 << 20).unwrap();
    let id = buf.id();
    buf.release_after(&Streams(&streams)).unwrap();
    while let Some(gate) = gates.pop() {
        assert_ne!(pool.get(1 << 20).unwrap().id(), id, "{} streams are held", gates.len() + 1);
        drop(gate);
        streams[gates.len()].synchronize().unwrap();
    }
    pool.poll();
    assert_eq!(pool.stats().in_flight, 0);
    assert_eq!(pool.stats().lost, 0);
}

#[test]
fn no_stream_is_a_plain_put() {
    let pool = pool();
    let buf = pool.get(4096).unwrap();
    let id = buf.id();
    buf.release_after(&Streams::<SinkStream>(&[])).unwrap();
    pool.poll();
    assert_eq!(pool.get(4096).unwrap().id(), id);
}

#[test]
fn a_failure_of_one_stream_keeps_the_memory_from_every_later_use() {
    let pool = pool();
    let streams = [SinkStream::new().unwrap(), SinkStream::new().unwrap()];
    let gate = streams[1].hold();
    let mut target = SinkMem::new(64);
    drop(pool.get(64).unwrap().copy_to(&streams[1], &mut target).unwrap());
    let buf = pool.get(1 << 20).unwrap();
    streams[1].fail();
    let released = buf.release_after(&Streams(&streams));
    drop(gate);
    // Until both have reached the end the pool waits for either.
    let _ended = streams.each_ref().map(SinkStream::synchronize);
    pool.poll();
    assert!(released.is_err() || pool.stats().lost > 0, "{released:?}");
    assert_eq!(pool.stats().in_use, 0);
}
