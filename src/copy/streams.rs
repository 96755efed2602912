//! Several streams as one.

use std::sync::Arc;

use super::CopyStream;
use crate::error::Result;
use crate::in_flight::Fence;

/// Several streams, of one device or of several, for a buffer that work on all of them uses:
/// [`release_after`](crate::PinnedBuf::release_after) waits for each.
///
/// ```
/// # use pinpool::copy::{Streams, sink::SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// let streams = [SinkStream::new()?, SinkStream::new()?];
/// pool.get(4096)?.release_after(&Streams(&streams))?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Streams<'a, S>(pub &'a [S]);

// SAFETY: the fence is over when those of all streams are, and each of them stands behind all work of its stream.
#[allow(unsafe_code)]
unsafe impl<S: CopyStream> CopyStream for Streams<'_, S> {
    fn mark(&self) -> Result<Arc<dyn Fence>> {
        match self.0 {
            [stream] => stream.mark(),
            streams => Ok(Arc::new(AllOf(streams.iter().map(CopyStream::mark).collect::<Result<_>>()?))),
        }
    }
}

/// Over when all are. Has no identity of a stream, since it is not in order with the fences of any.
#[derive(Debug)]
struct AllOf(Vec<Arc<dyn Fence>>);

// SAFETY: each fence is asked, and a failure of one is a failure of all.
#[allow(unsafe_code)]
unsafe impl Fence for AllOf {
    fn is_done(&self) -> Result<bool> {
        for fence in &self.0 {
            if !fence.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(&self) -> Result<()> {
        self.0.iter().try_for_each(|fence| fence.wait())
    }

    fn stream(&self) -> u64 {
        self.0.first().map_or(0, |fence| fence.stream())
    }
}
