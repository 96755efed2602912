//! A pool that several Python objects share, and the Python objects over its buffers.

use std::sync::{Arc, OnceLock};

use pinpool::{PinnedBuf, Pool};
use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;

use crate::buffer::Buffer;
use crate::memory::{Memory, Origin};
use crate::unlocked::unlocked;

/// The pool of the Python objects that share it. When the last one ends, no more requests can come.
#[derive(Debug)]
pub(crate) struct Gets {
    /// `None` only during drop.
    pool: Option<Pool>,
    /// Set at the first use of the pool.
    pub(crate) origin: OnceLock<Arc<Origin>>,
}

impl Drop for Gets {
    fn drop(&mut self) {
        if let (Some(pool), Some(origin)) = (self.pool.take(), self.origin.take()) {
            unlocked(move || origin.close(pool));
        }
    }
}

impl Gets {
    pub(crate) fn new(pool: Pool) -> Self {
        Self { pool: Some(pool), origin: OnceLock::new() }
    }

    pub(crate) fn origin(&self) -> &Arc<Origin> {
        let of = |pool: &Pool| Arc::new(Origin::of(pool.config(), pool.stats().backend));
        self.origin.get_or_init(|| self.pool.as_ref().map_or_else(|| unreachable!("it is dropped"), of))
    }

    pub(crate) fn pool(&self) -> PyResult<&Pool> {
        self.pool.as_ref().ok_or_else(|| PyRuntimeError::new_err("the pool is ending"))
    }
}

/// The Python object for a buffer of the crate.
pub(crate) fn buffer(buf: PinnedBuf, gets: &Gets) -> Buffer {
    Buffer::over(Memory::of(buf, gets.origin().clone()))
}
