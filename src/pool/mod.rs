//! What a user holds of a pool: its handle and its builder.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::PageTiers;
use crate::buffer::{BatchBuf, PinnedBuf};
use crate::config::Config;
use crate::engine::{Core, Poller};
use crate::error::{ErrorKind, Result};
use crate::size_class::{DEFAULT_ALIGN, MAX_LEN};
use crate::stats::Stats;

mod builder;

pub use builder::PoolBuilder;

/// A pool of page-locked host memory. Cheap to clone; all clones are the same pool.
///
/// When the last clone and the last buffer are gone, the pool gives all of its memory back, after waiting for copies
/// still in flight (at most `PINPOOL_CLOSE_WAIT`; what is in flight after that is left alone, never freed).
///
/// ```
/// let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// let mut buf = pool.get(1 << 20)?;
/// buf.as_mut_slice()?.fill(1);
/// drop(buf); // the put
/// assert!(pool.try_get(1 << 20)?.is_some(), "served again without asking the back-end");
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Pool {
    handle: Arc<Handle>,
}

/// Shared by the clones of a pool and by nothing else: when it goes, nobody can get any more.
#[derive(Debug)]
struct Handle {
    core: Arc<Core>,
    /// Ends with the door.
    _poller: Option<Poller>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.core.is_forked() {
            // The bookkeeping stays as the parent left it: its locks may be held for ever.
            std::mem::forget(self.core.clone());
            return;
        }
        self.core.seal();
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
        let poller = core.config().background_poll.then(|| core.start_poller()).flatten();
        Self { handle: Arc::new(Handle { core, _poller: poller }) }
    }

    #[inline]
    fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    /// A buffer of `len` bytes at a page-aligned address.
    ///
    /// An idle buffer of the same class if there is one; else one is cut from the arena or asked of the back-end, which is
    /// slow. What it holds is what an earlier user left there, or zeros. Where the ceiling leaves no room, waits for some,
    /// at most `PINPOOL_WAIT`; after that gives memory that is not pinned, or fails, as `PINPOOL_ON_FULL` says.
    ///
    /// # Errors
    ///
    /// - [`is_request`](crate::Error::is_request): `len` is over `isize::MAX` with rounding,
    /// - [`is_limit`](crate::Error::is_limit): over the ceiling even with every idle buffer given back,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused,
    /// - [`is_forked`](crate::Error::is_forked): the pool was made in a parent of this process.
    #[inline]
    pub fn get(&self, len: usize) -> Result<PinnedBuf> {
        // The page-aligned base is a gift of the back-end: it never enters the class.
        self.get_within(len, DEFAULT_ALIGN, self.core().config().wait)
    }

    /// A buffer of `len` bytes at a multiple of `align`, a power of two of at most 1 GiB.
    ///
    /// # Errors
    ///
    /// As [`get`](Pool::get); [`is_request`](crate::Error::is_request) also for an `align` that is no such number.
    pub fn get_aligned(&self, len: usize, align: usize) -> Result<PinnedBuf> {
        self.get_within(len, align, self.core().config().wait)
    }

    /// As [`get`](Pool::get), with a wait for room of its own in place of `PINPOOL_WAIT`.
    ///
    /// # Errors
    ///
    /// As [`get`](Pool::get).
    pub fn get_timeout(&self, len: usize, wait: Duration) -> Result<PinnedBuf> {
        self.get_within(len, DEFAULT_ALIGN, wait)
    }

    #[inline]
    fn get_within(&self, len: usize, align: usize, wait: Duration) -> Result<PinnedBuf> {
        self.core().check_process()?;
        let class = self.core().config().rounding.class(len, align)?;
        if len == 0 {
            return Ok(PinnedBuf::empty());
        }
        Ok(PinnedBuf::over(self.core().get(len, class, wait)?, len, align))
    }

    /// A buffer of `len` bytes if one of its class is idle; never calls the back-end and never waits.
    ///
    /// # Errors
    ///
    /// [`is_request`](crate::Error::is_request) and [`is_forked`](crate::Error::is_forked) as for [`get`](Pool::get).
    pub fn try_get(&self, len: usize) -> Result<Option<PinnedBuf>> {
        self.core().check_process()?;
        let class = self.core().config().rounding.class(len, DEFAULT_ALIGN)?;
        if len == 0 {
            return Ok(Some(PinnedBuf::empty()));
        }
        Ok(self.core().try_get(class).map(|block| PinnedBuf::over(block, len, DEFAULT_ALIGN)))
    }

    /// One buffer of `bytes`, handed out in pieces: for a batch of many small tensors.
    ///
    /// # Errors
    ///
    /// As [`get`](Pool::get).
    pub fn batch(&self, bytes: usize) -> Result<BatchBuf> {
        self.get(bytes).map(BatchBuf::over)
    }

    /// Pins `bytes` now, the fastest way there is, and keeps them to the end of the pool. Progress is in the log.
    ///
    /// # Errors
    ///
    /// - [`is_setting`](crate::Error::is_setting): under the preset `tensorflow`, where nothing could be cut from it,
    /// - [`is_limit`](crate::Error::is_limit): over the ceiling,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused.
    pub fn prewarm(&self, bytes: u64) -> Result<()> {
        self.core().check_process()?;
        if !self.core().backing().has_arena() {
            let why =
                "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is an allocation of its own".to_owned();
            return Err(ErrorKind::Setting { name: "PINPOOL_RESERVE", value: bytes.to_string(), why }.into());
        }
        self.core().prewarm(bytes)
    }

    /// Gets memory ready for `count` buffers of `len` bytes, for each `(len, count)`: as a reserve, or under the preset
    /// `tensorflow` as idle buffers, got and put back.
    ///
    /// # Errors
    ///
    /// As [`prewarm`](Pool::prewarm) and [`get`](Pool::get).
    pub fn prewarm_classes(&self, buffers: &[(usize, usize)]) -> Result<()> {
        if !self.core().backing().has_arena() {
            let all = buffers.iter().flat_map(|&(len, count)| std::iter::repeat_n(len, count));
            return all.map(|len| self.get(len)).collect::<Result<Vec<_>>>().map(drop);
        }
        let mut sum: u64 = 0;
        for &(len, count) in buffers {
            let class_bytes = self.core().config().rounding.class_bytes(len, DEFAULT_ALIGN)? as u64;
            let all = class_bytes.checked_mul(count as u64).and_then(|bytes| sum.checked_add(bytes));
            sum = all.ok_or(ErrorKind::Length { len, max_len: MAX_LEN })?;
        }
        self.prewarm(sum)
    }

    /// A pool with counts, limit and a ceiling of its own that cuts its buffers from the same memory: for a second use
    /// (evaluation beside training, say) that must not crowd out the first. Its own name is that of this pool, if it has
    /// one, with `/` and `name` behind it.
    ///
    /// # Errors
    ///
    /// [`is_setting`](crate::Error::is_setting) under the preset `tensorflow`, where there is nothing to share.
    pub fn partition(&self, name: &str, max_bytes: u64) -> Result<Self> {
        self.core().check_process()?;
        let partition = self.core().partition(name, max_bytes).map(Self::of);
        partition.ok_or_else(|| {
            let why = "needs PINPOOL_PRESET=adaptive: under tensorflow pools share nothing".to_owned();
            ErrorKind::Setting { name: "partition", value: name.to_owned(), why }.into()
        })
    }

    /// Gives idle memory back to the system, oldest first, until at most `to_bytes` are held or nothing is idle.
    pub fn trim(&self, to_bytes: u64) {
        if !self.core().is_forked() {
            self.core().trim(to_bytes);
        }
    }

    /// Puts back the buffers whose copies are over, and does what time brings: what is idle for long goes back to the
    /// system. Gets do so too, now and then; call it from a program that falls silent, or set `PINPOOL_POLL=1`.
    pub fn poll(&self) {
        if !self.core().is_forked() {
            self.core().poll();
        }
    }

    /// Gives every idle buffer back to the system and sets the four counters of the window to zero. The limit reached so
    /// far, buffers in use and copies in flight stay.
    pub fn clear(&self) {
        if !self.core().is_forked() {
            self.core().clear();
        }
    }

    /// A snapshot of the figures. Exact at rest; while other threads run, figures may be some operations apart.
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// The pages that the memory held now lies in, read back from the kernel. Reads a file of the kernel's: not for hot
    /// paths. `None` under the preset `tensorflow`, where nobody keeps a list.
    pub fn page_tiers(&self) -> Option<PageTiers> {
        self.core().backing().page_tiers()
    }

    /// The name in the pool's log lines ([`PoolBuilder::name`]).
    pub fn name(&self) -> Option<&str> {
        self.core().name()
    }

    /// The settings that hold, after environment and defaults.
    pub fn config(&self) -> &Config {
        self.core().config()
    }
}
