//! Backends: the sources of memory, and the choice between them.
//!
//! ```text
//!   Backend (a setting) ──choose──▶ Source (acquires, releases) ──▶ Region
//!                                      └── VirtualMemory (reserves, commits, decommits, remaps) ──▶ AddressRange
//! ```
//!
//! | source | memory | pinned | addresses |
//! | --- | --- | --- | --- |
//! | `vmm` | `cuMemCreate` on the device's NUMA node, mapped granule by granule | yes, by the driver | virtual memory |
//! | `register` | anonymous mapping in huge pages, `cuMemHostRegister` | yes, by the driver | separate regions |
//! | `cuda` | `cuMemHostAlloc`, portable, cached | yes, by the driver | separate regions |
//! | `mlock` | anonymous mapping, `mlock` | by the kernel; pageable to CUDA | virtual memory |
//! | `heap` | anonymous mapping | no | virtual memory |
//!
//! A source with [`VirtualMemory`] reserves one range of addresses and commits its granules one by one. A source without
//! it returns separate regions, and no buffer crosses the border between two regions.
//!
//! A source knows nothing of size classes, limits or reuse, and logs nothing. A new source implements [`Source`], gets a variant
//! in [`Backend`], and runs the contract suite of the crate `pinpool-testing`. [`try_out`] tries any source on this machine.

mod choose;
#[cfg(feature = "cuda")]
mod cuda;
mod heap;
mod huge_pages;
mod mapping;
mod mlock;
mod options;
mod populate;
#[cfg(feature = "cuda")]
mod register;
mod source;
#[cfg(test)]
pub(crate) mod tests;
mod trial;
mod user_pin;
mod virtual_memory;
#[cfg(feature = "cuda")]
mod vmm;
#[cfg(feature = "cuda")]
mod word_copy;

pub(crate) use crate::error::SourceError;
pub(crate) use choose::driver_source;
pub use choose::{Backend, ChosenSource, gpu_finding};
pub(crate) use choose::{choose, default_device, may_start_driver};
#[cfg(feature = "cuda")]
pub use cuda::CudaSource;
pub use heap::HeapSource;
pub use huge_pages::HugeTlb;
pub(crate) use huge_pages::{huge_bytes, huge_bytes_in};
#[cfg(feature = "cuda")]
pub(crate) use mapping::page_of_this_process;
pub use mlock::lock_limit;
pub(crate) use options::PinOptions;
pub use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};
#[cfg(feature = "cuda")]
pub use register::RegisterSource;
pub use source::{BuiltInSource, PinnedBy, Region, Source};
pub use trial::{Trial, try_out};
pub(crate) use user_pin::UserPin;
pub use virtual_memory::{AddressRange, RANGE_ALIGN_BYTES, RemapError, Subrange, VirtualMemory};
#[cfg(feature = "cuda")]
pub use vmm::VmmSource;
#[cfg(feature = "cuda")]
pub(crate) use vmm::ensure_access;
