//! Who really pins and unpins memory.
//!
//! ```text
//!  Backend (which one)  ──choose──▶  Source (acquires and releases)  ──▶  Region (pages that stay put)
//! ```
//!
//! | source | memory | page-locked | granules |
//! | --- | --- | --- | --- |
//! | `vmm` | `cuMemCreate` on the device's memory node, mapped granule by granule | yes, known to the driver | spans |
//! | `register` | anonymous mapping in huge pages, `cuMemHostRegister` | yes, known to the driver | walls |
//! | `cuda` | `cuMemHostAlloc`, portable, cached | yes, known to the driver | walls |
//! | `mlock` | anonymous mapping, `mlock` | yes, unknown to any driver | spans |
//! | `heap` | anonymous mapping | no | spans |
//! | `sim` | address space only, a stated size | no; nothing is touched until a user touches it | spans, or walls if told |
//! | `fault` | wraps any other: scripted failures and gates | as the wrapped one | as the wrapped one |
//!
//! A source that *spans* also has a [`VirtualMemory`]: one reserved range of addresses, whose granules are locked and released
//! one by one. One with *walls* hands out regions that no buffer may lie across.
//!
//! A source knows nothing of classes, limits or reuse, and prints nothing.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

mod choose;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod device;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fault;
mod heap;
#[cfg(all(test, not(miri)))]
mod mapping;
mod mlock;
pub(crate) mod pages;
mod placement;
mod populate;
mod ranges;
#[cfg(feature = "cuda")]
mod register;
mod sim;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod suite;
mod virtual_memory;
#[cfg(feature = "cuda")]
mod vmm;

pub use crate::error::SourceError;
pub use crate::host::{GRANULE_BYTES, PAGE_BYTES, PageTiers};
pub(crate) use choose::{PinOptions, choose};
#[cfg(feature = "cuda")]
pub use cuda::CudaSource;
pub use heap::HeapSource;
pub use mlock::MlockSource;
#[cfg(feature = "cuda")]
pub use register::RegisterSource;
pub use sim::SimSource;
pub use virtual_memory::{AddressRange, RANGE_ALIGN_BYTES, RemapError, Subrange, VirtualMemory};
#[cfg(feature = "cuda")]
pub use vmm::VmmSource;

/// Which source a pool takes its memory from.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum Backend {
    /// The best one that works here: `vmm`, else `register`, else `cuda`, else `mlock`, else `heap`; under the preset
    /// `tensorflow` from `cuda` on.
    #[default]
    Auto,
    /// Virtual host memory of the CUDA driver: grows and goes back without holding up any copy. For `adaptive` only.
    Vmm,
    /// Huge pages registered with the CUDA driver (`cuMemHostRegister`). For `adaptive` only.
    Register,
    /// Page-locked by the CUDA driver (`cuMemHostAlloc`).
    Cuda,
    /// Page-locked by the kernel (`mlock`).
    Mlock,
    /// Ordinary memory: not page-locked, and says so.
    Heap,
    /// Addresses without memory behind them, for replay and tests.
    Sim {
        /// Most bytes that it hands out at one time.
        total_bytes: u64,
    },
    /// A source of your own, or a wrapped one.
    Source(Arc<dyn Source>),
}

impl Backend {
    /// Name in settings, log lines and figures.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Vmm => "vmm",
            Self::Register => "register",
            Self::Cuda => "cuda",
            Self::Mlock => "mlock",
            Self::Heap => "heap",
            Self::Sim { .. } => "sim",
            Self::Source(source) => source.name(),
        }
    }
}

/// Memory that a source handed out and has not taken back.
///
/// A region is a receipt, not an owner: dropping one leaks the memory, on purpose, because the other choice would be to
/// free memory that a device may still be reading.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping a region leaks its memory; hand it back to its source"]
pub struct Region {
    start: NonNull<u8>,
    len_bytes: usize,
    id: u64,
}

// SAFETY: a region is the right to `len_bytes` bytes that nobody else has (source contract C1); moving that right to
// another thread moves nothing that is bound to a thread.
#[allow(unsafe_code)]
unsafe impl Send for Region {}
// SAFETY: a shared region gives out its address and length, plain numbers.
#[allow(unsafe_code)]
unsafe impl Sync for Region {}

impl Region {
    /// A receipt for `len_bytes` bytes at `start`, numbered `id` by the source that hands them out.
    pub fn new(start: NonNull<u8>, len_bytes: usize, id: u64) -> Self {
        Self { start, len_bytes, id }
    }

    /// First byte; a multiple of [`PAGE_BYTES`].
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes asked for; the source may hold more (see [`Source::held_bytes`]).
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Number of this acquisition; addresses recur, ids do not.
    pub fn id(&self) -> u64 {
        self.id
    }
}

/// Acquires and releases memory. See the [module](self) for the ones there are.
///
/// The contract, checked by one suite on every implementation, wrappers included:
///
/// 1. **C1, ownership**: from a successful `acquire` until `release` is called, the `len_bytes` bytes at `start` are
///    mapped, readable and writable, belong to the caller alone and keep their address. That holds when `release`
///    fails as well: the memory stays mapped for ever.
/// 2. **C2, initialised**: every byte has some value when `acquire` returns: the kernel's zeros, or what a driver left
///    there from earlier use by this process.
/// 3. **C3, alignment**: `start` is a multiple of [`PAGE_BYTES`].
/// 4. **C4, identity**: no two acquisitions of one source share an id.
/// 5. **C5, honesty**: `held_bytes(n)` is what an acquisition of `n` bytes really takes from the system: at least `n`,
///    never falling as `n` grows; a failed `acquire` takes nothing.
/// 6. **C6, calm**: no method panics, logs or takes a lock of the pool; all may be called from any thread at once.
///
/// # Safety
///
/// The pool hands out references to this memory and lets devices read it on the word of C1 to C3. An implementation
/// that breaks them makes safe code undefined.
#[allow(unsafe_code)]
pub unsafe trait Source: Send + Sync + fmt::Debug {
    /// Short name, as in `PINPOOL_BACKEND` and [`Stats::backend`](crate::Stats::backend).
    fn name(&self) -> &'static str;

    /// Is the memory page-locked, so that a device can copy from it at full speed?
    fn is_pinned(&self) -> bool;

    /// Bytes that an acquisition of `len_bytes` takes from the system.
    fn held_bytes(&self, len_bytes: usize) -> usize {
        len_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX)
    }

    /// Takes `len_bytes` (not zero) from the system.
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said, with the likely cause. Nothing is held then.
    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError>;

    /// Gives `region` back to the system.
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said. The memory is then lost: still mapped, still counted as held.
    ///
    /// # Safety
    ///
    /// `region` came from this source, and nothing (no reference, no copy in flight on any device) uses it any more.
    unsafe fn release(&self, region: Region) -> Result<(), SourceError>;

    /// As `acquire`, by the fastest way there is: for a large region, made once and kept.
    ///
    /// `threads` (at least 1) may touch the memory at once. `progress` hears on the calling thread how many bytes are
    /// done so far: growing, at most `len_bytes`, and `len_bytes` before a success returns.
    ///
    /// # Errors
    ///
    /// As `acquire`.
    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let _ = threads;
        self.acquire(len_bytes).inspect(|_| progress(len_bytes))
    }

    /// Is it made for copies to a GPU, so that ordinary memory is no stand-in for it?
    fn needs_gpu(&self) -> bool {
        false
    }

    /// Does a release wait for work of the device, as `cuMemFreeHost` waits for all of it?
    fn release_waits(&self) -> bool {
        false
    }

    /// Memory node that the pages are placed on; `None` where there is one node only, or nobody knows.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// The pages behind `len_bytes` addresses of this source, read back from the system.
    fn page_tiers(&self, start: NonNull<u8>, len_bytes: usize) -> PageTiers {
        PageTiers::between(start, len_bytes)
    }

    /// The span of a source that has one, always the same; `None` for a source with walls.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }
}
