//! Batch buffers: disjoint slices, filled by many threads, copied as one.

use std::io::Write;

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Backend, BatchBuf, Pool};

fn batch_of(bytes: usize) -> (Pool, BatchBuf) {
    let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    let batch = pool.batch(bytes).unwrap();
    (pool, batch)
}

#[test]
fn slices_follow_each_other_each_at_its_alignment() {
    let (_pool, batch) = batch_of(8192);
    let requests = [(3, 1), (4, 8), (0, 16), (1, 4096), (4095, 1)];
    let ranges = requests.map(|(len, align)| {
        let slice = batch.take(len, align).unwrap();
        assert!(slice.as_ptr().addr().is_multiple_of(align) && slice.len() == len);
        slice.range()
    });
    assert_eq!(ranges, [0..3, 8..12, 16..16, 4096..4097, 4097..8192]);
    assert!(batch.take(1, 1).is_none() && batch.taken_bytes() == batch.capacity());
}

#[test]
fn a_slice_that_does_not_fit_takes_nothing() {
    let (_pool, batch) = batch_of(100);
    for (len, align) in [(101, 1), (usize::MAX, 1), (usize::MAX, 4096), (1, 0), (1, 3), (1, 8192)] {
        assert!(batch.take(len, align).is_none(), "{len} at {align}");
    }
    assert_eq!(batch.taken_bytes(), 0);
    assert!(batch.take(100, 64).is_some());
}

#[test]
fn many_threads_fill_a_batch_and_one_copy_carries_it_all() {
    const SLICES: usize = if cfg!(miri) { 8 } else { 200 };
    let (pool, batch) = batch_of(1 << 20);
    let fill = |thread: usize| {
        let fill_one = |n: usize| {
            let byte = u8::try_from((thread * 83 + n) % 251).unwrap();
            let mut slice = batch.take(100 + n, 64).unwrap();
            slice.fill(byte);
            (slice.range(), byte)
        };
        (0..SLICES).map(fill_one).collect::<Vec<_>>()
    };
    let fill = &fill;
    let filled: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || fill(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(1 << 20));
    batch.copy_to(&stream, &mut device).unwrap().wait().unwrap();
    let arrived = device.read();
    for (range, byte) in filled {
        assert!(arrived[range.clone()].iter().all(|&found| found == byte), "{range:?}");
    }
    pool.poll();
    let stats = pool.stats();
    assert_eq!((stats.gets, stats.puts, stats.in_flight), (1, 1, 0), "one get, one completion");
}

#[test]
fn an_empty_batch_has_nothing_to_copy() {
    let (pool, batch) = batch_of(100);
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(0));
    assert!(batch.copy_to(&stream, &mut device).unwrap().is_done().unwrap());
    assert_eq!(pool.stats().puts, 1);
}

#[test]
fn a_batch_starts_again_after_a_reset_and_its_slices_are_writers() {
    let (_pool, mut batch) = batch_of(100);
    let mut slice = batch.take(60, 1).unwrap();
    slice.write_all(&[1; 40]).unwrap();
    assert_eq!(slice.write(&[2; 40]).unwrap(), 20);
    assert_eq!(slice.write_all(&[3]).unwrap_err().kind(), std::io::ErrorKind::WriteZero);
    assert_eq!((slice[39], slice[40], slice[59]), (1, 2, 2));
    assert!(batch.take(60, 1).is_none());
    batch.reset();
    assert_eq!(batch.take(100, 1).unwrap().range(), 0..100);
}
