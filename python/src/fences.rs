//! Fences that a buffer waits for.

use std::sync::Arc;

use pinpool::PinnedBuf;
use pinpool::copy::{CopyStream, Fence};

/// Returns a buffer to its pool after the work before `fences`. The pool logs a failure and does not reuse the memory.
pub(crate) fn put_after(buf: PinnedBuf, fences: Vec<Arc<dyn Fence>>) {
    if fences.is_empty() { drop(buf) } else { drop(buf.release_after(&AllFences(fences))) }
}

/// The fence of work that ends at an unknown time.
#[derive(Debug)]
pub(crate) struct UnknownEnd(pub(crate) String);

// SAFETY: the fence never reports completion.
#[allow(unsafe_code)]
unsafe impl Fence for UnknownEnd {
    fn is_complete(&self) -> pinpool::Result<bool> {
        Err(pinpool::Error::device_failed(self.0.clone()))
    }

    fn wait(&self) -> pinpool::Result<()> {
        self.is_complete().map(drop)
    }
}

/// The fences of one or several streams, combined into one.
#[derive(Debug, Clone)]
struct AllFences(Vec<Arc<dyn Fence>>);

// SAFETY: the fence completes after all recorded fences.
#[allow(unsafe_code)]
unsafe impl CopyStream for AllFences {
    fn record_fence(&self) -> pinpool::Result<Arc<dyn Fence>> {
        Ok(if let [fence] = &*self.0 { fence.clone() } else { Arc::new(self.clone()) })
    }
}

// SAFETY: the fence completes when all of its fences, which satisfy the contract, have completed.
#[allow(unsafe_code)]
unsafe impl Fence for AllFences {
    fn is_complete(&self) -> pinpool::Result<bool> {
        self.0.iter().try_fold(true, |are_complete, fence| Ok(are_complete && fence.is_complete()?))
    }

    fn wait(&self) -> pinpool::Result<()> {
        self.0.iter().try_for_each(|fence| fence.wait())
    }
}
