//! The pool that one or several Python objects `Pool` share.

use std::sync::{Arc, OnceLock};

use pinpool::{PinnedBuf, Pool};
use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;

use crate::buffer::Buffer;
use crate::memory::{BufferPool, Memory};
use crate::unlocked::unlocked;

/// A pool that several Python objects share. It is closed when the last of them is dropped.
#[derive(Debug)]
pub(crate) struct PoolHandle {
    /// `None` only during the drop.
    pool: Option<Pool>,
    /// Set at the first use of the pool.
    pub(crate) buffer_pool: OnceLock<Arc<BufferPool>>,
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        if let (Some(pool), buffer_pool) = (self.pool.take(), self.buffer_pool.take()) {
            unlocked(move || buffer_pool.into_iter().for_each(|buffer_pool| buffer_pool.close(pool.clone())));
        }
    }
}

impl PoolHandle {
    pub(crate) fn new(pool: Pool) -> Self {
        Self { pool: Some(pool), buffer_pool: OnceLock::new() }
    }

    pub(crate) fn buffer_pool(&self) -> &Arc<BufferPool> {
        // The backend first: it starts the pool, which chooses the device of its settings.
        let of = |pool: &Pool| Arc::new(BufferPool::of(pool.stats().backend, pool.config()));
        self.buffer_pool.get_or_init(|| self.pool.as_ref().map_or_else(|| unreachable!("it is dropped"), of))
    }

    pub(crate) fn pool(&self) -> PyResult<&Pool> {
        self.pool.as_ref().ok_or_else(|| PyRuntimeError::new_err("the pool is ending"))
    }
}

/// Returns the Python object for a buffer of the crate.
pub(crate) fn buffer(buf: PinnedBuf, handle: &PoolHandle) -> Buffer {
    Buffer::over(Memory::of(buf, handle.buffer_pool().clone()))
}
