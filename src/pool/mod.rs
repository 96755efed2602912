//! The handle of a pool and its builder.
//!
//! Dropping the last clone of a [`Pool`] ends the engine: idle memory is released then, the rest once no buffer is in use, without
//! an arena each buffer separately. This module converts lengths into size classes and blocks into buffers. It makes no decisions about memory.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::PinnedBuf;
use crate::config::Limit;
use crate::engine::{Block, BlockRequest, PartitionCore, PoolCore, Tag, ThreadShard};
use crate::error::Result;
use crate::quota::Claim;

mod builder;
mod config_on_host;
mod get_future;
mod handle;
mod partition;
mod request;
mod reserve;
mod start;
mod statistics;
mod user_memory;

pub use builder::PoolBuilder;
pub use get_future::GetFuture;
use handle::{Handle, RequestScope};
pub use partition::Partition;
pub use request::Request;
use start::PoolStart;
pub use user_memory::UserMemory;

/// A pool of pinned host memory. Cheap to clone; all clones are the same pool.
///
/// The drop of the last clone releases idle memory, except a reserve. The rest is released once the last buffer is dropped, too.
/// Whichever drop comes later waits for the copies in flight; a call that consumes the last buffer, such as
/// [`copy_to`](crate::PinnedBuf::copy_to), counts as its drop. After 30 s it gives up as soon as a second passes without a
/// completed copy; the memory of the remaining copies is never freed.
///
/// With the backends `register` and `cuda` ([`Backend`](crate::Backend)) idle memory is released only with the rest, and the
/// drop of the last clone waits even while buffers are in use. If it gives up, it frees nothing. With these backends, and for
/// a reserve of `vmm`, the release also waits for all device work, so an async task should drop the last handle on a thread that
/// may block.
///
/// | pool | requests, `reserve`, `open_partition`, `pin`, `adopt` | everything else |
/// | --- | --- | --- |
/// | full | requests wait up to `PINPOOL_WAIT`, then fail ([`is_limit`](crate::Error::is_limit)) or get pageable memory (`PINPOOL_ON_FULL`); `reserve` and `pin` wait only for a shared limit; `open_partition` and `adopt` work | works |
/// | [closed](Self::close) | fail immediately ([`is_closed`](crate::Error::is_closed)) | works; buffers and copies remain valid |
/// | in a forked child, if the pool had [started](PoolBuilder::build) | fail immediately ([`is_forked`](crate::Error::is_forked)); build a new pool there | does nothing, or fails as requests do; statistics are 0 |
///
/// ```
/// let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// let mut buf = pool.get(1 << 20)?;
/// buf.wait_slice_mut()?.fill(1);
/// drop(buf); // returns it
/// assert!(pool.try_get(1 << 20)?.is_some(), "reused without a driver call");
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    handle: Arc<Handle>,
}

/// Prints the name, backend, preset and initial limit. [`Pool::stats`] has the present limit and the other values.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.unstable_config();
        let core = self.handle.existing_core();
        f.debug_struct("Pool")
            .field("name", &self.name())
            .field("backend", &core.map_or(config.backend.name(), |core| core.memory().source().name()))
            .field("preset", &config.preset)
            .field("max_bytes", &config.max_bytes)
            .finish_non_exhaustive()
    }
}

/// Creates the buffer for `request` from `block`. If the request belongs to a partition, charges the block to the
/// partition with `claim`.
#[inline]
fn to_buf(core: &PoolCore, mut block: Block, request: &BlockRequest, align: usize, claim: Option<Claim>) -> PinnedBuf {
    if let Some((partition, claim)) = request.partition.as_ref().zip(claim) {
        partition.charge(&mut block, claim);
    }
    core.record_holder(&mut block, request);
    PinnedBuf::from_block(block, request.len, align)
}

impl Pool {
    /// Returns a builder for a new pool. A setting that code does not set takes its value from its `PINPOOL_*` variable, or else
    /// its default.
    pub fn builder() -> PoolBuilder {
        PoolBuilder::default()
    }

    /// Returns the partition that requests of this handle claim from, if this is the handle inside a [`Partition`].
    #[inline]
    fn partition_core(&self) -> Option<&Arc<PartitionCore>> {
        self.handle.scope.as_ref()?.partition.as_ref()
    }

    fn scope_tag(&self) -> Option<&Arc<Tag>> {
        self.handle.scope.as_ref()?.tag.as_ref()
    }

    fn check_open(&self) -> Result<()> {
        self.core().check_open()?;
        self.partition_core().map_or(Ok(()), |partition| partition.check_open())
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<PoolCore> {
        self.handle.core_or_start(PoolStart::start_deferred)
    }

    /// Calls `call` if the pool has started, except in a forked child. A pool that has not started holds no memory.
    fn if_started(&self, call: impl FnOnce(&PoolCore)) {
        if let Some(core) = self.handle.existing_core().filter(|core| !core.is_forked()) {
            call(core);
        }
    }

    /// Chooses the backend now, if [`build`](PoolBuilder::build) has postponed this. The call may block: it starts the driver
    /// and may create a context. On a started pool it does nothing.
    pub fn start(&self) {
        self.core();
    }

    /// Returns a buffer of `len` bytes at a page-aligned address. For another alignment or wait use [`get_with`](Self::get_with),
    /// which takes the slow path. If `len` is 0, the buffer has no memory and is not counted.
    ///
    /// Reuses an idle buffer of the same size class. If none is idle, the pool carves a buffer from its arena, or calls the
    /// backend, which is slow. The bytes have arbitrary values, such as data of an earlier buffer, or are zero under
    /// `PINPOOL_ZERO`. If the limit leaves no room, the call blocks for at most `PINPOOL_WAIT` (by default 30 s) and then returns
    /// pageable memory or an error (`PINPOOL_ON_FULL`).
    ///
    /// # Errors
    ///
    /// - [`is_invalid_request`](crate::Error::is_invalid_request): `len` exceeds `isize::MAX` after rounding,
    /// - [`is_limit`](crate::Error::is_limit): after the wait the request does not fit within the limit, even if every idle
    ///   buffer is released, or earlier requests still wait,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused,
    /// - [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked,
    /// - [`is_closed`](crate::Error::is_closed): the pool was [closed](Self::close).
    #[inline]
    pub fn get(&self, len: usize) -> Result<PinnedBuf> {
        let Some(shard) = self.handle.thread_shard() else { return self.get_slow(len) };
        self.get_fast(shard, len)
    }

    // A separate function, so that the fast path saves no registers.
    #[inline(never)]
    fn get_fast(&self, shard: ThreadShard<'_>, len: usize) -> Result<PinnedBuf> {
        let Some(block) = shard.take(len) else { return self.get_slow(len) };
        Ok(PinnedBuf::from_fast_path_block(block, len))
    }

    #[inline(never)]
    fn get_slow(&self, len: usize) -> Result<PinnedBuf> {
        if self.handle.scope.is_none()
            && let Some(block) = self.core().take_by_second_entry_or_remote(len)
        {
            return Ok(PinnedBuf::from_fast_path_block(block, len));
        }
        // The backend aligns all memory to pages, so page alignment does not affect the class.
        self.serve(Request::new(len))
    }

    /// Returns a buffer for `request`: a length, or a [`Request`] with options.
    ///
    /// # Errors
    ///
    /// As for [`get`](Pool::get); [`is_invalid_request`](crate::Error::is_invalid_request) also if the alignment is not
    /// a power of two up to 1 GiB.
    pub fn get_with(&self, request: impl Into<Request>) -> Result<PinnedBuf> {
        self.serve(request.into())
    }

    #[inline(never)]
    fn serve(&self, request: Request) -> Result<PinnedBuf> {
        let Some(block_request) = self.block_request(request)? else { return Ok(PinnedBuf::default()) };
        self.core().enter_for_thread();
        let (mut wait, mut claim) = (self.longest_wait(request), None);
        if let Some(partition) = &block_request.partition {
            let begun = Instant::now();
            claim = Some(partition.begin_claim(&block_request, wait, None)?.wait()?);
            wait = wait.saturating_sub(begun.elapsed());
        }
        let block = self.core().begin_get(&block_request, wait, None)?.wait()?;
        Ok(to_buf(self.core(), block, &block_request, request.align, claim))
    }

    /// Requests a buffer as [`get`](Pool::get) does, for an async task. `request` is a length or a [`Request`]. Threads and tasks
    /// wait in one queue in order of arrival. No runtime is needed: the thread that returns a buffer, or a thread of the pool,
    /// wakes the task when its request is served, and a thread of the process wakes it at its deadline.
    ///
    /// With the backend `auto`, the first call on a pool may start the driver, create a context and pin up to 2 MiB on the
    /// calling or polling thread: to avoid that, call [`start`](Self::start) first, on a thread that may block. Later polls pin
    /// no memory, but may query the events of copies and then release memory, as [`try_get`](Self::try_get) does.
    ///
    /// A dedicated thread of the pool pins memory for one task at a time, and the time of its driver calls counts towards the
    /// wait. If the system refuses this thread, the polls pin memory. If the wait times out while a call runs, the future fails
    /// with [`is_backend`](crate::Error::is_backend) or resolves to pageable memory (`PINPOOL_ON_FULL`), and the next request gets
    /// the pinned memory once the call returns. With a wait of zero the future does not wait for room, but still waits for
    /// driver calls.
    ///
    /// ```
    /// # use std::pin::pin;
    /// # use std::task::{Context, Poll, Waker};
    /// let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).max_bytes(1 << 20).build()?;
    /// let held = pool.get(1 << 20)?;
    /// let mut get = pin!(pool.get_async(1 << 20)); // in a task: `pool.get_async(1 << 20).await?`
    /// let mut context = Context::from_waker(Waker::noop());
    /// assert!(get.as_mut().poll(&mut context).is_pending());
    /// drop(held); // handed over
    /// assert!(matches!(get.poll(&mut context), Poll::Ready(Ok(_))));
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The future fails as [`get`](Pool::get) does.
    pub fn get_async(&self, request: impl Into<Request>) -> GetFuture {
        GetFuture::new(self.clone(), request.into())
    }

    fn longest_wait(&self, request: Request) -> Duration {
        request.timeout.unwrap_or_else(|| self.unstable_config().longest_wait())
    }

    /// Checks that the pool is open, and returns `request` with its size class, partition and tag; `None` for zero bytes.
    fn block_request(&self, request: Request) -> Result<Option<BlockRequest>> {
        self.check_open()?;
        let Request { len, align, .. } = request;
        let class = self.core().config().rounding.class(len, align)?;
        let scope = self.handle.scope.as_ref();
        let (partition, tag) = scope.map(|scope| (scope.partition.clone(), scope.tag.clone())).unwrap_or_default();
        Ok((len > 0).then_some(BlockRequest { len, class, tag, partition }))
    }

    /// Returns an idle buffer for `request` (a length or a [`Request`]), or `None` if no buffer of its size class is idle. Pins no
    /// memory, except to [choose the backend](PoolBuilder::build), and does not wait for room, whatever the
    /// [timeout](Request::timeout). The call may query the events of copies, and if one has completed, release memory under
    /// `tensorflow`, `PINPOOL_MAX_IDLE_BYTES` or a shared limit.
    ///
    /// # Errors
    ///
    /// [`is_invalid_request`](crate::Error::is_invalid_request), [`is_forked`](crate::Error::is_forked) and
    /// [`is_closed`](crate::Error::is_closed) as for [`get`](Pool::get).
    pub fn try_get(&self, request: impl Into<Request>) -> Result<Option<PinnedBuf>> {
        let request = request.into();
        let Some(block_request) = self.block_request(request)? else { return Ok(Some(PinnedBuf::default())) };
        let served = self.core().try_get(&block_request);
        Ok(served.map(|(block, claim)| to_buf(self.core(), block, &block_request, request.align, claim)))
    }

    /// Returns a handle of this pool that tags its buffers with `tag`, so that [`dump`](Pool::dump), the error of a failed
    /// request and the log name the holders: `loader/images`. Handles with the same tag are counted together. All other calls on
    /// the handle act on the whole pool. A pool that has not started is [started](Self::start) first.
    ///
    /// A buffer is counted under the tag from its request until it is idle again, including the copies that use it.
    /// Tags are truncated to 128 bytes, control characters become `?`, and an empty tag has no effect. A pool
    /// distinguishes 1024 tags at one time. Buffers under further tags are counted together, as `(other tags)`.
    ///
    /// A tagged request and the return of its buffer never take the fast path of untagged ones.
    ///
    /// ```
    /// let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).build()?;
    /// let images = pool.tagged("loader/images");
    /// let buf = images.get(1 << 20)?;
    /// assert!(pool.dump().to_string().contains("1.0MiB loader/images (1 buffer"));
    /// # drop(buf);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    #[must_use]
    pub fn tagged(&self, tag: &str) -> Self {
        // In a forked child, a thread that does not exist here may hold the lock of the tags. Requests fail there anyway, so the
        // handle needs no tag.
        let tag = if self.core().is_forked() { None } else { self.core().tag(tag) };
        self.scoped(self.partition_core().cloned(), tag.or_else(|| self.scope_tag().cloned()))
    }

    /// Returns the tag of this handle's buffers, as reports show it ([`tagged`](Self::tagged)).
    pub fn tag(&self) -> Option<&str> {
        self.scope_tag().map(|tag| tag.name())
    }

    fn scoped(&self, partition: Option<Arc<PartitionCore>>, tag: Option<Arc<Tag>>) -> Self {
        let handle = Handle::new(self.handle.start.clone(), Some(RequestScope { partition, tag, _pool: self.clone() }));
        handle.start_core_once(|| self.core().clone());
        Self { handle: Arc::new(handle) }
    }

    /// Changes the limit on all pinned bytes, in use and idle: to a number of bytes, [`Limit::Unlimited`], or
    /// [`Limit::Auto`], which follows the cgroup.
    ///
    /// A higher limit lets waiting requests try again immediately. A lower limit releases idle memory immediately; on
    /// `register` and `cuda` this waits for all device work. It releases at most the part of a reserve that was pinned in
    /// the background. Buffers in use stay with their users, so the pool may exceed the lower limit until they are
    /// returned; it does not grow until then. The memory of returned buffers is released by the maintenance thread
    /// within a second, or by a miss that finds no room. A waiting request that is larger than the new limit fails when
    /// it is the first in the queue. The limit on pageable memory ([`on_full`](PoolBuilder::on_full)) changes as well.
    ///
    /// [`stats`](Pool::stats) has the current limit.
    ///
    /// On `vmm`, `mlock` and `heap` an `adaptive` pool reserves addresses for eight times the initial limit, at least 16 GiB
    /// and at most 4 TiB, or less if the system refuses so much. It cannot grow beyond these addresses. Unlike the builder and
    /// the C interface, this call accepts a limit of 0: the pool then pins nothing more, and only a reserve and buffers that
    /// are returned later still serve requests.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked.
    pub fn set_max_bytes(&self, limit: impl Into<Limit>) -> Result<()> {
        self.core().check_process().map(|()| self.core().set_limit(limit.into()))
    }

    /// Releases idle memory, oldest first, until at most `to_bytes` are held or nothing is idle. The calling thread
    /// makes the driver calls, so this is slow. The memory of copies in flight and of reserves is not idle.
    ///
    /// On `vmm` a trim takes 0.1 ms or more for each granule of 2 MiB. On `register` and `cuda` each release waits for all
    /// device work, and delays other threads that enqueue work during the wait. Under `adaptive` nothing is released there while a
    /// buffer is quarantined, since the release might never return.
    pub fn trim(&self, to_bytes: u64) {
        self.if_started(|core| core.trim(to_bytes));
    }

    /// Returns buffers with completed copies to the pool, and releases memory that has been idle for too long or exceeds a
    /// limit. On `register` and `cuda` a release waits for the device, so memory that exceeds a limit is released there, but
    /// memory that has only been idle for too long is kept until the system is short of memory. The maintenance thread does this
    /// work as often as the table says. With `maintenance_thread(false)`, only this call, misses and returns with copies do it.
    ///
    /// | state of the pool | how often |
    /// | --- | --- |
    /// | the arena is compacted, or a reserve is pinned in the background | about every 0.2 ms |
    /// | a copy is awaited, or copies are in flight while buffers are adopted or a shared limit has no room | every 0.04 to 20 ms |
    /// | other copies are in flight | 10 times a second |
    /// | `adaptive`: some memory is idle and some is in use | 10 times a second |
    /// | `adaptive`: otherwise there are buffers, or memory to release | once a second |
    /// | `tensorflow`: a limit may be exceeded | 10 times a second if memory is idle, otherwise once a second |
    pub fn maintain(&self) {
        self.if_started(PoolCore::maintain_for_user);
    }

    /// Closes the pool and its partitions to requests. Waiting requests of threads and tasks, and all later requests, fail with
    /// [`is_closed`](crate::Error::is_closed). Then the calling thread releases idle memory except reserves. On
    /// `register` and `cuda` this release waits for all device work. Buffers in use and copies in flight remain valid. Under `adaptive`
    /// their memory is idle once the buffers are dropped and the copies have completed, and [`trim`](Self::trim), another
    /// `close`, the idle timeout or the end of the pool releases it. Under `tensorflow` it is released immediately. A pool that has not
    /// [started](Self::start) is closed without the driver, as a pool of the backend `heap`.
    ///
    /// ```
    /// let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).max_bytes(1 << 20).build()?;
    /// let held = pool.get(1 << 20)?;
    /// std::thread::scope(|scope| {
    ///     let worker = scope.spawn(|| pool.get(1 << 20).map(drop)); // waits for `held`
    ///     pool.close();
    ///     assert!(worker.join().unwrap().unwrap_err().is_closed());
    /// });
    /// # drop(held);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    pub fn close(&self) {
        self.handle.core_or_start(PoolStart::start_over_heap);
        self.if_started(PoolCore::close);
    }
}

/// The preset `tensorflow`.
impl Pool {
    /// Does what `Clear` of TensorFlow's `PoolAllocator` does, for programs that replace it. Other programs call
    /// [`trim(0)`](Self::trim).
    ///
    /// Returns all idle memory except reserves to the system, and restarts the counters of requests, returns and evictions from
    /// which auto-resize computes its rates. The limit on idle buffers, buffers in use and copies in flight do not change.
    pub fn clear(&self) {
        self.if_started(PoolCore::clear);
    }
}
