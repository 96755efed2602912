//! Traits of copies implemented by another crate: a stream that copies before it returns.
#![allow(unsafe_code)] // Implements the unsafe traits of copies.

use std::sync::Arc;

use pinpool::copy::{CopyFailure, CopyTarget, Fence, StreamId};
use pinpool::{Backend, Pool};

/// Copies before it returns.
struct SyncStream(StreamId);

#[derive(Debug)]
struct Done(StreamId);

// SAFETY: the copy is over before the fence is made.
unsafe impl Fence for Done {
    fn is_complete(&self) -> pinpool::Result<bool> {
        Ok(true)
    }
    fn wait(&self) -> pinpool::Result<()> {
        Ok(())
    }
    fn stream_id(&self) -> Option<StreamId> {
        Some(self.0)
    }
}

/// Memory to copy into.
struct HostMem(Vec<u8>);

// SAFETY: as for the fence; nothing is ever refused.
unsafe impl CopyTarget<SyncStream> for HostMem {
    fn capacity_bytes(&self) -> usize {
        self.0.len()
    }
    unsafe fn enqueue_write(
        &mut self,
        stream: &SyncStream,
        source: *const u8,
        len: usize,
    ) -> Result<Arc<dyn Fence>, CopyFailure> {
        // SAFETY: the caller promises `len` readable bytes.
        self.0[..len].copy_from_slice(unsafe { std::slice::from_raw_parts(source, len) });
        Ok(Arc::new(Done(stream.0)))
    }
}

#[test]
fn a_stream_that_copies_at_once_needs_a_fence_and_a_target() {
    let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    let (stream, mut memory) = (SyncStream(StreamId::unique()), HostMem(vec![0; 4]));
    let mut buf = pool.get(4).unwrap();
    buf.wait_slice_mut().unwrap().copy_from_slice(b"abcd");
    assert!(buf.copy_to(&stream, &mut memory).unwrap().is_complete().unwrap());
    assert_eq!(memory.0, b"abcd");
}
