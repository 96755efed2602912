//! The end of a pool with a stuck copy: the memory of completed copies is released, even if they were enqueued after it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use pinpool::Preset;

use crate::counting::CountingSource;
use crate::fixture::{MIB, over};
use crate::manual_copies::{ManualStream, Nowhere};

#[test]
fn a_copy_that_is_over_behind_a_stuck_one_is_not_abandoned_with_it() {
    let source = CountingSource::discrete();
    let builder = over(source.clone(), 64 << 20).preset(Preset::TensorFlow);
    let pool = builder.unstable_close_wait(Duration::from_millis(20)).build().unwrap();
    let copies = [(); 3].map(|()| ManualStream::default());
    for copy in &copies {
        drop(pool.get(MIB).unwrap().copy_to(copy, &mut Nowhere).unwrap());
    }
    let each_bytes = source.held_bytes() / 3;
    copies[1].0.is_over.store(true, Ordering::SeqCst);
    pool.maintain();
    assert_eq!(pool.stats().copies.in_flight, 2, "a stuck copy delays none of another stream");
    drop(pool);
    assert_eq!(source.held_bytes(), 2 * each_bytes, "two are stuck");
}
