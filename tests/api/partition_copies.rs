//! Copies of a partition that nobody uses, and the room that they take from its parent.

use std::time::Duration;

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Backend, Pool};

#[test]
fn a_copy_of_a_partition_that_is_over_makes_room_for_its_parent() {
    const LEN: usize = 6 << 20;
    let builder = Pool::builder().without_env().backend(Backend::Heap).background_poll(false);
    let pool = builder.max_bytes(Some(8 << 20)).wait(Duration::ZERO).build().unwrap();
    let partition = pool.partition("part", 8 << 20).unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(LEN));
    partition.get(LEN).unwrap().copy_to(&stream, &mut device).unwrap();
    stream.synchronize().unwrap();
    assert!(pool.get(LEN).is_ok());
    pool.stats().validate().unwrap();
}
