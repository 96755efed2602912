//! A part of a pool with its own limit.

use std::fmt;
use std::sync::Arc;

use super::{GetFuture, Pool, Request};
use crate::buffer::PinnedBuf;
use crate::config::Limit;
use crate::engine::PartitionCore;
use crate::error::Result;
use crate::stats::Stats;

/// A part of a pool with its own limit and wait queue ([`Pool::open_partition`]). Cheap to clone; keeps its pool alive.
///
/// Requests for which the partition has no room wait in the partition's queue and delay no other user of the pool. Once they fit
/// within its limit, they become requests of the pool, and wait in the pool's queue. Buffers are tagged with the name of the
/// partition, and returned buffers are idle in the pool. Like [tagged](Pool::tagged) requests, requests of a partition take the
/// slow path.
///
/// ```
/// let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).max_bytes(64 << 20).build()?;
/// let eval = pool.open_partition("eval", 8 << 20)?;
/// let batch = eval.get(1 << 20)?;
/// assert_eq!(eval.stats().memory.in_use_bytes, 1 << 20);
/// # drop(batch);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Partition {
    core: Arc<PartitionCore>,
    /// A handle of the pool. Requests through this handle claim from `core`.
    pool: Pool,
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl Pool {
    /// Opens a part of this pool with its own limit and wait queue. Use it for a second purpose, such as evaluation during
    /// training, that must not take the memory of the first. `name` is the tag of the partition's buffers. If `max_bytes` exceeds
    /// the limit of the pool, or is [`Limit::Unlimited`] or [`Limit::Auto`], the pool's limit applies. Each call
    /// opens a new partition. Partitions with the same name have separate limits and statistics; [`dump`](Self::dump)
    /// counts their buffers together.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked), [`is_closed`](crate::Error::is_closed), as for [`get`](Self::get).
    pub fn open_partition(&self, name: &str, max_bytes: impl Into<Limit>) -> Result<Partition> {
        self.check_open()?;
        let core = self.core().open_partition(name, max_bytes.into().bytes());
        Ok(Partition { pool: self.scoped(Some(core.clone()), self.core().tag(name)), core })
    }
}

impl Partition {
    /// Requests a buffer as [`Pool::get`] does.
    ///
    /// # Errors
    ///
    /// As for [`Pool::get`]; [`is_limit`](crate::Error::is_limit) also if the partition is full, and
    /// [`is_closed`](crate::Error::is_closed) if it was closed.
    pub fn get(&self, len: usize) -> Result<PinnedBuf> {
        self.get_with(Request::new(len))
    }

    /// Requests a buffer as [`Pool::get_with`] does.
    ///
    /// # Errors
    ///
    /// As for [`get`](Self::get) and [`Pool::get_with`].
    pub fn get_with(&self, request: impl Into<Request>) -> Result<PinnedBuf> {
        self.pool.get_with(request)
    }

    /// Requests a buffer as [`Pool::get_async`] does.
    pub fn get_async(&self, request: impl Into<Request>) -> GetFuture {
        self.pool.get_async(request)
    }

    /// Requests an idle buffer as [`Pool::try_get`] does; `None` also if the partition is full.
    ///
    /// # Errors
    ///
    /// As for [`Pool::try_get`].
    pub fn try_get(&self, request: impl Into<Request>) -> Result<Option<PinnedBuf>> {
        self.pool.try_get(request)
    }

    /// Returns a handle of the pool with requests that go through this partition, for code that takes a [`Pool`]. All other
    /// calls act on the whole pool, including `close`, `set_max_bytes` and `stats`. A `tagged` handle made from it
    /// stays in the partition.
    pub fn as_pool(&self) -> &Pool {
        &self.pool
    }

    /// Changes the limit of the partition to a number of bytes, or to the limit of the pool ([`Limit::Unlimited`] and
    /// [`Limit::Auto`]). A higher limit lets waiting requests try again. A lower limit takes no buffer away, but a waiting
    /// request that is larger than the new limit fails when it is the first in the queue.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked.
    pub fn set_max_bytes(&self, limit: impl Into<Limit>) -> Result<()> {
        self.pool.core().check_process().map(|()| self.core.set_max_bytes(limit.into().bytes()))
    }

    /// Makes waiting and later requests of the partition fail with [`is_closed`](crate::Error::is_closed). Requests that already
    /// wait for memory of the pool are served, and buffers in use remain valid.
    pub fn close(&self) {
        self.pool.if_started(|_| self.core.close());
    }

    /// Returns the statistics of the partition: requests, waits, bytes and the limit; everything else is 0 ([`Stats`]).
    pub fn stats(&self) -> Stats {
        self.pool.if_started(|core| core.sweep_by_loads());
        self.core.stats()
    }

    /// Returns the name of the pool, `/`, and the name of the partition; if the pool is unnamed, only the latter.
    pub fn name(&self) -> &str {
        &self.core.name
    }
}
