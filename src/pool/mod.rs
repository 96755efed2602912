//! The pool: what a user holds, and the conductor behind it.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod.rs` | [`Pool`], the handle |
//! | `builder.rs` | [`PoolBuilder`]: from settings to a pool |
//! | `core.rs` | the order of steps; the only place that takes the pool's lock |
//! | `block.rs` | what moves between store, user and device |
//! | `supply.rs` | the source under its ceiling |

use std::sync::Arc;

use crate::buffer::PinnedBuf;
use crate::config::Config;
use crate::error::Result;
use crate::size_class::DEFAULT_ALIGN;
use crate::stats::Stats;

mod block;
mod builder;
mod core;
mod supply;

pub use builder::PoolBuilder;

pub(crate) use self::block::Block;
use self::core::Core;

/// A pool of page-locked host memory. Cheap to clone; all clones are the same pool.
///
/// When the last clone and the last buffer are gone, the pool gives all of its memory back, after waiting for copies
/// still in flight (at most `PINPOOL_CLOSE_WAIT`; what is in flight after that is left alone, never freed).
///
/// ```
/// let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// let mut buf = pool.get(1 << 20)?;
/// buf.as_mut_slice().fill(1);
/// drop(buf); // the put
/// assert!(pool.try_get(1 << 20)?.is_some(), "served again without asking the back-end");
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Pool {
    door: Arc<Door>,
}

/// Shared by the clones of a pool and by nothing else: when it goes, nobody can get any more.
#[derive(Debug)]
struct Door(Arc<Core>);

impl Drop for Door {
    fn drop(&mut self) {
        self.0.seal();
    }
}

impl Pool {
    /// Settings for a new pool.
    pub fn builder() -> PoolBuilder {
        PoolBuilder::new()
    }

    /// A pool with the settings of the environment, and defaults where it is silent.
    ///
    /// # Errors
    ///
    /// As [`PoolBuilder::build`].
    pub fn from_env() -> Result<Self> {
        Self::builder().build()
    }

    pub(crate) fn of(core: Arc<Core>) -> Self {
        Self { door: Arc::new(Door(core)) }
    }

    fn core(&self) -> &Arc<Core> {
        &self.door.0
    }

    /// A buffer of `len` bytes at a page-aligned address.
    ///
    /// An idle buffer of the same class if there is one; else the back-end is asked, which is slow. What it holds is what
    /// its last user left there, or zeros.
    ///
    /// # Errors
    ///
    /// - [`is_request`](crate::Error::is_request): `len` is over `isize::MAX` with rounding,
    /// - [`is_limit`](crate::Error::is_limit): over the ceiling even with every idle buffer given back,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused.
    pub fn get(&self, len: usize) -> Result<PinnedBuf> {
        // The page-aligned base is a gift of the back-end: it never enters the class.
        self.get_aligned(len, DEFAULT_ALIGN)
    }

    /// A buffer of `len` bytes at a multiple of `align`, a power of two of at most 1 GiB.
    ///
    /// # Errors
    ///
    /// As [`get`](Pool::get); [`is_request`](crate::Error::is_request) also for an `align` that is no such number.
    pub fn get_aligned(&self, len: usize, align: usize) -> Result<PinnedBuf> {
        let class_bytes = self.core().config().rounding.class_bytes(len, align)?;
        if len == 0 {
            return Ok(PinnedBuf::empty());
        }
        Ok(PinnedBuf::over(self.core().get(len, class_bytes)?, len, align))
    }

    /// A buffer of `len` bytes if one of its class is idle; never calls the back-end and never waits.
    ///
    /// # Errors
    ///
    /// [`is_request`](crate::Error::is_request) as for [`get`](Pool::get).
    pub fn try_get(&self, len: usize) -> Result<Option<PinnedBuf>> {
        let class_bytes = self.core().config().rounding.class_bytes(len, DEFAULT_ALIGN)?;
        if len == 0 {
            return Ok(Some(PinnedBuf::empty()));
        }
        Ok(self.core().try_get(class_bytes).map(|block| PinnedBuf::over(block, len, DEFAULT_ALIGN)))
    }

    /// Puts back the buffers whose copies are over. Every get and put does so too; call it from a program that falls
    /// silent.
    pub fn poll(&self) {
        self.core().poll();
    }

    /// Gives every idle buffer back to the system and sets the four counters of the window to zero. The limit reached so
    /// far, buffers in use and copies in flight stay.
    pub fn clear(&self) {
        self.core().clear();
    }

    /// A snapshot of the figures. Exact at rest; while other threads run, figures may be some operations apart.
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// The settings that hold, after environment and defaults.
    pub fn config(&self) -> &Config {
        self.core().config()
    }
}
