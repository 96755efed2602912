//! The end of a pool with a copy that does not end: what is known to be over goes back, whatever it stands behind.
#![allow(unsafe_code)] // Implements the unsafe traits of copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pinpool::copy::{CopyFailure, CopyTarget, FencePurpose};
use pinpool::{Backend, Fence, LogSampler, Pool, Preset, PressureSource};

use crate::counting::CountingSource;

const MIB: usize = 1 << 20;

/// One copy of a stream whose number is another's too.
#[derive(Debug, Clone, Default)]
struct OneCopy(Arc<End>);

#[derive(Debug, Default)]
struct End(AtomicBool);

// SAFETY: copies nothing, so no device uses the memory.
unsafe impl Fence for End {
    fn is_done(&self) -> pinpool::Result<bool> {
        Ok(self.0.load(Ordering::SeqCst))
    }
    fn wait(&self) -> pinpool::Result<()> {
        Ok(())
    }
    fn stream(&self) -> u64 {
        7
    }
}

struct Nowhere;

// SAFETY: copies nothing.
unsafe impl CopyTarget<OneCopy> for Nowhere {
    fn capacity_bytes(&self) -> usize {
        usize::MAX
    }
    unsafe fn enqueue(
        &mut self,
        stream: &OneCopy,
        _source: *const u8,
        _len: usize,
        _purpose: FencePurpose,
    ) -> Result<Arc<dyn Fence>, CopyFailure> {
        Ok(stream.0.clone())
    }
}

#[test]
fn a_copy_that_is_over_behind_a_stuck_one_is_not_abandoned_with_it() {
    let source = CountingSource::discrete();
    let pool = Pool::builder()
        .without_env()
        .preset(Preset::Tensorflow)
        .backend(Backend::Source(source.clone()))
        .close_wait(Duration::from_millis(20))
        .background_poll(false)
        .pressure(PressureSource::Off)
        .log_sampler(LogSampler::new())
        .build()
        .unwrap();
    let copies = [OneCopy::default(), OneCopy::default(), OneCopy::default()];
    for copy in &copies {
        drop(pool.get(MIB).unwrap().copy_to(copy, &mut Nowhere).unwrap());
    }
    let each_bytes = source.held_bytes() / 3;
    // Streams are told apart by a number, which two may share.
    copies[1].0.0.store(true, Ordering::SeqCst);
    pool.poll();
    assert_eq!(pool.stats().in_flight, 3, "of one number only the first is asked");
    drop(pool);
    assert_eq!(source.held_bytes(), 2 * each_bytes, "two are stuck, or behind it with no known end");
}
