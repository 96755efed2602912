//! The pool that one or several Python objects `Pool` share.

use std::sync::{Arc, OnceLock};

use pinpool::{PinnedBuf, Pool};
use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;

use crate::buffer::Buffer;
use crate::memory::{BufferOrigin, Memory};
use crate::without_gil::without_gil;

/// A pool that several Python objects share. It is closed when the last of them is dropped.
#[derive(Debug)]
pub(crate) struct PoolHandle {
    /// `None` only during the drop.
    pool: Option<Pool>,
    /// Set at the first use of the pool.
    pub(crate) origin: OnceLock<Arc<BufferOrigin>>,
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        if let (Some(pool), origin) = (self.pool.take(), self.origin.take()) {
            without_gil(move || origin.into_iter().for_each(|origin| origin.close(pool.clone())));
        }
    }
}

impl PoolHandle {
    pub(crate) fn new(pool: Pool) -> Self {
        Self { pool: Some(pool), origin: OnceLock::new() }
    }

    pub(crate) fn origin(&self) -> &Arc<BufferOrigin> {
        // The backend is queried first: that starts the pool, which chooses the device in its settings.
        let of = |pool: &Pool| Arc::new(BufferOrigin::of(pool.stats().backend, pool.unstable_config()));
        self.origin.get_or_init(|| self.pool.as_ref().map_or_else(|| unreachable!("it is dropped"), of))
    }

    pub(crate) fn pool(&self) -> PyResult<&Pool> {
        self.pool.as_ref().ok_or_else(|| PyRuntimeError::new_err("the pool is ending"))
    }
}

/// Returns the Python object for a buffer of the crate.
pub(crate) fn buffer(buf: PinnedBuf, handle: &PoolHandle) -> Buffer {
    Buffer::over(Memory::of(buf, handle.origin().clone()))
}
