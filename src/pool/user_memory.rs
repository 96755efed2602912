//! User memory: pinned for its user, or adopted as a buffer.
#![allow(unsafe_code)] // Unpins memory.

use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Pool;
use crate::backend::{PAGE_BYTES, PinnedBy, Region, UserPin};
use crate::buffer::PinnedBuf;
use crate::engine::{Adopted, PoolCore};
use crate::error::{ErrorKind, Result};
use crate::quota::Claim;
use pinpool_os::leaked;

impl Pool {
    /// Returns a buffer over memory that another library or process pinned. Its copies are tracked.
    ///
    /// The bytes count neither as held nor towards the limit; [`RequestStats::adopted`](crate::stats::RequestStats::adopted)
    /// counts the buffer. `on_release` runs once, after the buffer was dropped and its last copy has completed. The thread that
    /// detects this calls it, without a lock. `on_release` must not wait for this pool. If it is unknown whether a copy has
    /// completed, `on_release` is neither called nor dropped, because a device may still use the memory.
    ///
    /// ```
    /// use std::ptr::NonNull;
    /// use pinpool_testing::{SinkMemory, SinkStream};
    ///
    /// let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).build()?;
    /// let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(4096));
    /// let mut frame = vec![7_u8; 4096]; // represents memory of another library, such as a `PinnedHostSlice` of cudarc
    /// let memory = NonNull::from(frame.as_mut_slice());
    /// // SAFETY: `frame` moves into `on_release`, so nothing else uses its bytes until then, or ever if that never runs.
    /// let buf = unsafe { pool.adopt(memory, None, move || drop(frame)) }?;
    /// buf.copy_to(&stream, &mut device)?.wait()?;
    /// assert_eq!(device.read(), [7; 4096]);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Safety
    ///
    /// Until `on_release` is called, the bytes of `memory` must be initialized, writable, at a fixed address, and used by nothing
    /// but the buffer and its copies. If `pinned_by` is not `None`, they must also stay pinned until then.
    ///
    /// # Errors
    ///
    /// - [`is_invalid_request`](crate::Error::is_invalid_request): more than `isize::MAX` bytes,
    /// - [`is_closed`](crate::Error::is_closed): the pool was [closed](Self::close),
    /// - [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked.
    ///
    /// After an error `on_release` is dropped without being called.
    pub unsafe fn adopt(
        &self,
        memory: NonNull<[u8]>,
        pinned_by: Option<PinnedBy>,
        on_release: impl FnOnce() + Send + 'static,
    ) -> Result<PinnedBuf> {
        let (start, len) = (memory.cast(), memory.len());
        self.core().config().rounding.class(len, 1)?;
        let block = self.core().adopt(Adopted { start, len, pinned_by, on_release: Box::new(on_release) })?;
        Ok(PinnedBuf::from_block(block, len, 1))
    }

    /// Pins writable memory that the caller mapped (anonymous, memfd or tmpfs) with the pool's backend. The bytes count towards
    /// the pool's limit, and idle memory is released if necessary. Read-only and file-system mappings may be refused. `owner`
    /// keeps the memory mapped. Calls the driver or the kernel, so it may take milliseconds.
    ///
    /// Parts of the memory can then be copied to a device directly: [`adopt`](Self::adopt) turns a part into a buffer.
    ///
    /// ```
    /// # use std::ptr::NonNull;
    /// # #[repr(align(4096))] struct Page([u8; 4096]);
    /// let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).build()?;
    /// let mut pages = vec![Page([1; 4096])]; // represents a mapping
    /// let memory = NonNull::from(pages[0].0.as_mut_slice());
    /// // SAFETY: a whole page, mapped as long as `pages`.
    /// let pinned = std::sync::Arc::new(unsafe { pool.pin(memory, pages) }?);
    /// let lent = pinned.clone();
    /// // SAFETY: nothing else uses the bytes, which stay pinned until the buffer has been returned.
    /// let buf = unsafe { pool.adopt(pinned.memory(), pinned.pinned_by(), move || drop(lent)) }?;
    /// assert_eq!(buf.len(), 4096);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Safety
    ///
    /// The caller must ensure that `memory` is initialized, that it stays mapped at its address until `owner` is dropped, that no
    /// other code pins it, and that no device uses it when the result is dropped. While a driver has pinned the pages, forked
    /// children do not have them, so the pages must contain nothing that the children need. `owner` must not be a `Box` or
    /// `&mut` of the memory, because moving it would invalidate other uses of the memory.
    ///
    /// # Errors
    ///
    /// - [`is_invalid_request`](crate::Error::is_invalid_request): it is empty, or does not consist of whole pages of 4096 bytes,
    /// - [`is_limit`](crate::Error::is_limit): it does not fit within the limit,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused,
    /// - [`is_closed`](crate::Error::is_closed): the pool was [closed](Self::close),
    /// - [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked.
    ///
    /// After an error `owner` is dropped.
    pub unsafe fn pin<O: Send + 'static>(&self, memory: NonNull<[u8]>, owner: O) -> Result<UserMemory<O>> {
        let core = self.core();
        self.check_open()?;
        let (start, len) = (memory.cast::<u8>(), memory.len());
        if len == 0 || !start.addr().get().is_multiple_of(PAGE_BYTES) || !len.is_multiple_of(PAGE_BYTES) {
            let why = format!(
                "{len}B at {start:p}: only whole pages of {PAGE_BYTES}B can be pinned; align the address and the length"
            );
            return Err(ErrorKind::Argument { why }.into());
        }
        let claim = core.claim_user_memory(len as u64)?;
        let (region, config) = (Region::new(start, len, 0), core.config());
        // SAFETY: the region is whole pages that stay mapped until the drop of the result, which unpins them first (user-pin-I1).
        let pinned = unsafe { UserPin::pin(&region, core.memory().source(), config.device) };
        match pinned {
            Ok(pin) => {
                let held = ManuallyDrop::new(Held { region, pin, owner, claim });
                Ok(UserMemory { held, core: core.clone() })
            }
            Err(error) => {
                core.end_user_memory_claim(claim);
                Err(core.user_memory_error(len as u64, error))
            }
        }
    }
}

/// Memory pinned by [`Pool::pin`], with its owner.
///
/// Dropping it unpins the memory, drops the owner, and returns the bytes to the limit, in this order. With `vmm`, `register`
/// and `cuda` unpinning waits for all device work. If the driver fails to unpin the memory, the owner is never dropped and
/// the bytes stay counted, because a device may use them. In a forked child nothing happens.
pub struct UserMemory<O: Send + 'static> {
    /// Taken only by `drop`.
    held: ManuallyDrop<Held<O>>,
    core: Arc<PoolCore>,
}

struct Held<O> {
    region: Region,
    pin: UserPin,
    owner: O,
    claim: Claim,
}

impl<O: Send + 'static> UserMemory<O> {
    /// Returns the address and length of the pinned memory.
    pub fn memory(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.held.region.start(), self.held.region.len_bytes())
    }

    /// Returns the value that keeps the memory mapped.
    pub fn owner(&self) -> &O {
        &self.held.owner
    }

    /// Returns the component that pinned the memory; `None` if the pool's memory is not pinned.
    pub fn pinned_by(&self) -> Option<PinnedBy> {
        self.held.pin.pinned_by()
    }
}

impl<O: Send + 'static> fmt::Debug for UserMemory<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserMemory").field("memory", &self.memory()).finish_non_exhaustive()
    }
}

impl<O: Send + 'static> Drop for UserMemory<O> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the field after the drop.
        let held = unsafe { ManuallyDrop::take(&mut self.held) };
        if self.core.is_forked() {
            // A forked child inherits neither memory locks nor memory that a driver pinned, so there is nothing to unpin.
            leaked::leak(held);
            return;
        }
        // SAFETY: the region was pinned by `pin`, and the caller of `pin` promises that no device uses it any more.
        if unsafe { held.pin.unpin(&held.region) }.is_err() {
            // A device may use the memory (user-pin-I1).
            leaked::leak(held);
            return;
        }
        let Held { owner, claim, .. } = held;
        // A panic of the owner's drop is caught here, so that the claim is returned and waiting requests get the bytes.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(owner)));
        self.core.end_user_memory_claim(claim);
        dropped.unwrap_or_else(|panic| resume_unwind(panic));
    }
}
