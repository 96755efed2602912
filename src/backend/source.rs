//! [`Source`], the contract of every backend, and [`Region`], the memory that a source returns.
#![allow(unsafe_code)] // An unsafe trait, and a pointer that may move between threads.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::virtual_memory::VirtualMemory;
use crate::error::SourceError;
pub use crate::policy::PinnedBy;
use crate::report::Finding;
use pinpool_os::host::PAGE_BYTES;

/// Memory acquired from a source and not yet released.
///
/// A region does not own its memory. Dropping one leaks the memory on purpose: a device may still be reading it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping a region leaks its memory; pass it to `Source::release` before"]
pub struct Region {
    start: NonNull<u8>,
    len_bytes: usize,
    id: u64,
}

// SAFETY: a region is the exclusive right to `len_bytes` bytes (source-C1), which is not tied to a thread.
unsafe impl Send for Region {}
// SAFETY: a shared region returns plain numbers.
unsafe impl Sync for Region {}

impl Region {
    /// Returns the region of the `len_bytes` bytes at `start`, with the `id` that the source assigns.
    pub fn new(start: NonNull<u8>, len_bytes: usize, id: u64) -> Self {
        Self { start, len_bytes, id }
    }

    /// Returns the address of the first byte, a multiple of [`PAGE_BYTES`].
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the requested bytes; the source may hold more (see [`Source::held_bytes`]).
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the number of this acquisition. Unlike addresses, ids are never reused.
    pub fn id(&self) -> u64 {
        self.id
    }
}

/// Numbers the regions of one source (source-C4).
#[derive(Debug, Default)]
pub(super) struct RegionIds(AtomicU64);

impl RegionIds {
    pub(super) fn next(&self) -> u64 {
        // Relaxed: the addition alone makes every number unique, and it publishes no other memory.
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// Acquires and releases memory.
///
/// The contract; `pinpool_testing::check_source` tests most of it:
///
/// 1. **source-C1, ownership**: from a successful `acquire` until the `release` call, the `len_bytes` bytes at `start`
///    are mapped, readable and writable, belong to the caller alone and keep their address. If `release` fails, the memory
///    stays mapped, and the pool releases the same region again later.
/// 2. **source-C2, initialized**: every byte has a value when `acquire` returns: the kernel's zeros, or what earlier use by
///    this process left in the driver's memory.
/// 3. **source-C3, alignment**: `start` is a multiple of [`PAGE_BYTES`].
/// 4. **source-C4, identity**: no two acquisitions of one source share an id.
/// 5. **source-C5, accounting**: an acquisition of `n` bytes takes exactly `held_bytes(n)` from the system: at least `n`, and
///    never less for a larger `n`. The limit counts these bytes. A failed `acquire` takes nothing.
/// 6. **source-C6, threads**: no method panics, logs or takes a lock of the pool; all may be called from any thread
///    concurrently.
///
/// A source of ordinary memory. The crate `pinpool-testing` checks its contract:
///
/// ```
/// use std::alloc::{Layout, alloc_zeroed, dealloc};
/// use std::ptr::NonNull;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use pinpool::PinnedBy;
/// use pinpool::source::{PAGE_BYTES, Region, Source, SourceError};
///
/// #[derive(Debug, Default)]
/// struct Allocated {
///     regions: AtomicU64,
/// }
///
/// fn layout(len_bytes: usize) -> Option<Layout> {
///     Layout::from_size_align(len_bytes, PAGE_BYTES).ok().map(|layout| layout.pad_to_align())
/// }
///
/// // SAFETY: `acquire` returns zeroed pages that belong to the caller until `release` frees them (source-C1 to C3).
/// unsafe impl Source for Allocated {
///     fn name(&self) -> &'static str {
///         "allocated"
///     }
///
///     fn pinned_by(&self) -> Option<PinnedBy> {
///         None
///     }
///
///     fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
///         let refused = || SourceError::new("alloc_zeroed", "no memory");
///         let layout = layout(len_bytes).ok_or_else(refused)?;
///         // SAFETY: `acquire` is never called with a length of 0.
///         let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
///         Ok(Region::new(start, len_bytes, self.regions.fetch_add(1, Ordering::Relaxed)))
///     }
///
///     unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
///         let layout = layout(region.len_bytes()).ok_or_else(|| SourceError::new("dealloc", "not a region of this source"))?;
///         // SAFETY: the region came from `acquire` with the same layout, and nothing uses it any more.
///         unsafe { dealloc(region.start().as_ptr(), layout) };
///         Ok(())
///     }
/// }
///
/// pinpool_testing::check_source(&Allocated::default());
/// ```
///
/// # Safety
///
/// The pool returns references to this memory and lets devices read it, relying on source-C1 to C3. An implementation
/// that violates them causes undefined behavior in safe code.
pub unsafe trait Source: Send + Sync + fmt::Debug {
    /// Returns the short name, as in `PINPOOL_BACKEND` and [`Stats::backend`](crate::Stats::backend).
    fn name(&self) -> &'static str;

    /// Returns the component that pins the memory; `None` for pageable memory.
    fn pinned_by(&self) -> Option<PinnedBy>;

    /// Returns the number of bytes that an acquisition of `len_bytes` takes from the system.
    fn held_bytes(&self, len_bytes: usize) -> usize {
        len_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX)
    }

    /// Takes `len_bytes` (not zero) from the system.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel, with the likely cause. In that case nothing is held.
    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError>;

    /// Returns the memory of `region` to the system. The caller then drops the region.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel. The memory is then still mapped and still counted as held; the region may be
    /// released again.
    ///
    /// # Safety
    ///
    /// `region` must come from this source and not have been released yet, and nothing (no reference, no copy in flight on any
    /// device) may use it any more.
    unsafe fn release(&self, region: &Region) -> Result<(), SourceError>;

    /// Returns whether a release waits for all work on the device and meanwhile blocks enqueues, as `cuMemFreeHost` does. The
    /// pool then releases memory only on request, at the limit, under memory pressure and when it ends.
    fn blocks_on_release(&self) -> bool {
        false
    }

    /// Returns the NUMA node of the pages; `None` if there is only one, or it is unknown.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Returns the additional calls of a source from this repository; `None` for a custom source.
    #[doc(hidden)]
    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        None
    }
}

impl dyn Source + '_ {
    /// Returns whether the memory belongs to a GPU driver. If so, forked children cannot access it, and
    /// [`Pool::pin`](crate::Pool::pin) registers user memory with CUDA.
    #[doc(hidden)]
    pub fn needs_gpu(&self) -> bool {
        self.pinned_by() == Some(PinnedBy::Driver)
    }
}

/// The calls that the pool makes only to sources from this repository. For other sources, `dyn Source` implements them.
pub trait BuiltInSource: Source {
    /// Returns the exact number of bytes that `acquire_bulk` takes from the system for `len_bytes`. As in source-C5, this is at
    /// least `len_bytes`, and never less for a larger length.
    fn held_bytes_in_bulk(&self, len_bytes: usize) -> usize {
        self.held_bytes(len_bytes)
    }

    /// Takes memory as `acquire` does, but waits for other threads' acquisitions only until `until`, or slightly
    /// longer. This method is for a source that performs one acquisition at a time; by default it calls `acquire`.
    ///
    /// # Errors
    ///
    /// The errors of `acquire`, and an error if `until` has passed and another acquisition is still in progress.
    fn acquire_until(&self, len_bytes: usize, _until: Instant) -> Result<Region, SourceError> {
        self.acquire(len_bytes)
    }

    /// Takes memory as `acquire` does, for a large region that is kept. Up to `threads` (at least 1) threads touch the memory.
    ///
    /// Calls `progress` on the calling thread with the bytes done so far: increasing, at most `len_bytes`, and `len_bytes`
    /// before a successful return.
    ///
    /// # Errors
    ///
    /// The errors of `acquire`.
    fn acquire_bulk(&self, len_bytes: usize, _threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.acquire(len_bytes).inspect(|_| progress(len_bytes))
    }

    /// Returns the length of the slices in which a reserve is best acquired, two slices at a time; `None` if one piece is best. No
    /// buffer of the reserve is longer than a slice.
    fn reserve_slice_bytes(&self) -> Option<u64> {
        None
    }

    /// Returns the error of all later calls if a device reset has destroyed all memory of this source. Maintenance
    /// ticks and refused requests call it.
    fn device_lost(&self) -> Option<SourceError> {
        None
    }

    /// Calls `write`, which writes to a region, unless the memory of this source has been destroyed. A source that is
    /// told in advance, such as the preload library's, delays the destruction until `write` returns.
    fn while_mapped(&self, write: &mut dyn FnMut()) {
        write();
    }

    /// Returns disadvantages of the source, such as a GPU without access to its memory, which the pool logs.
    fn findings(&self) -> Vec<Finding> {
        Vec::new()
    }

    /// Returns the virtual memory of this source, the same on every call; `None` if the source has only separate regions.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }
}

#[deny(clippy::missing_trait_methods)]
impl BuiltInSource for dyn Source + '_ {
    fn held_bytes_in_bulk(&self, len_bytes: usize) -> usize {
        self.built_in().map_or_else(|| self.held_bytes(len_bytes), |source| source.held_bytes_in_bulk(len_bytes))
    }

    fn acquire_until(&self, len_bytes: usize, until: Instant) -> Result<Region, SourceError> {
        self.built_in().map_or_else(|| self.acquire(len_bytes), |source| source.acquire_until(len_bytes, until))
    }

    fn acquire_bulk(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let Some(source) = self.built_in() else { return self.acquire(len_bytes).inspect(|_| progress(len_bytes)) };
        source.acquire_bulk(len_bytes, threads, progress)
    }

    fn reserve_slice_bytes(&self) -> Option<u64> {
        self.built_in()?.reserve_slice_bytes()
    }

    fn device_lost(&self) -> Option<SourceError> {
        self.built_in()?.device_lost()
    }

    fn while_mapped(&self, write: &mut dyn FnMut()) {
        let Some(source) = self.built_in() else { return write() };
        source.while_mapped(write);
    }

    fn findings(&self) -> Vec<Finding> {
        self.built_in().map_or_else(Vec::new, BuiltInSource::findings)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.built_in()?.virtual_memory()
    }
}
