//! Sources, builders and buffers that several modules use.

use std::sync::Arc;

use pinpool::backend::HeapSource;
use pinpool::testing::FaultSource;
use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder, Preset};

pub(crate) fn faulty_heap() -> Arc<FaultSource> {
    Arc::new(FaultSource::around(Arc::new(HeapSource::new())))
}

/// TensorFlow's rules with at most two idle buffers.
pub(crate) fn two_buffers(source: &Arc<FaultSource>) -> PoolBuilder {
    Pool::builder()
        .without_env()
        .preset(Preset::Tensorflow)
        .backend(Backend::Source(source.clone()))
        .pool_size_limit(2)
        // These tests say when copies are looked at.
        .background_poll(false)
        .auto_resize(false)
}

pub(crate) fn filled(pool: &Pool, len: usize, byte: u8) -> PinnedBuf {
    let mut buffer = pool.get(len).unwrap();
    buffer.as_mut_slice().unwrap().fill(byte);
    buffer
}
