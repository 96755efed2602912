//! A pool of pinned host memory for CUDA transfers: pin once, reuse safely, stay within a byte limit.
//!
//! ```text
//!   file ──read──▶ PinnedBuf ──copy_to──▶ device
//!                    ▲   └── in flight until the copy ends ──┐
//!                    └──────────────── the pool ◀────────────┘
//! ```
//!
//! With CUDA, through [`cudarc`]:
//!
//! ```no_run
//! # #[cfg(not(feature = "cuda"))]
//! # fn main() {}
//! # #[cfg(feature = "cuda")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use pinpool::{Pool, cudarc::driver::CudaContext};
//!
//! pinpool::check_cuda_device(0)?; // fails without a driver; cudarc would panic
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let mut device = stream.alloc_zeros::<f32>(1024)?;
//! let pool = Pool::builder().max_bytes(2 << 30).build()?;
//! let mut buf = pool.get(1024 * size_of::<f32>())?; // reuses pinned memory, or pins more
//! buf.wait_slice_as_mut::<f32>()?.fill(1.5);
//! buf.copy_to(&stream, &mut device)?; // returns to the pool when the copy ends
//! assert_eq!(stream.clone_dtoh(&device)?, [1.5; 1024]);
//! # Ok(())
//! # }
//! ```
//!
//! Without a GPU, through the crate `pinpool-testing`:
//!
//! ```
//! use pinpool::Pool;
//! use pinpool_testing::{SinkMemory, SinkStream};
//!
//! let pool = Pool::builder().build()?; // settings from `PINPOOL_*`
//! let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(4096));
//! let mut buf = pool.get(4096)?;
//! buf.wait_slice_mut()?.fill(7);
//! buf.copy_to(&stream, &mut device)?;
//! assert_eq!(device.read(), [7; 4096]);
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! | start with | for |
//! | --- | --- |
//! | [`Pool`] | requesting buffers |
//! | [`PinnedBuf`], [`copy`] | filling and copying a buffer; the streams and memories to copy to |
//! | [`Pool::get_async`], [`Completion`] | requests and copies in async tasks, on any runtime |
//! | [`Pool::open_partition`], [`Pool::tagged`] | a separate limit, or a name in reports, for a part of the program |
//! | [`PoolBuilder`] | settings, nearly all also `PINPOOL_*` variables |
//! | [`Backend`] | sources of memory |
//! | [`Stats`], [`Pool::diagnose`] | what happened, and what to change |
//!
//! # Copies of plain slices
//!
//! cudarc's safe copies from a `&[T]` are sound for pageable memory only, since the driver stages such copies. From pinned memory
//! of any origin they still run when the call returns, and nothing waits for them. So do not pass cudarc the plain slice that a
//! [`PinnedSlice`] derefs to, but the [buffer](PinnedBuf#which-copies-are-tracked) itself, or use [`PinnedBuf::copy_to`].
//!
//! # A full pool
//!
//! A request that finds no room waits for up to [`PoolBuilder::wait`] (default 30 s), in order of arrival. Then it fails, and
//! [`is_timeout`](Error::is_timeout) is true for the error; [`report`](Error::report) lists the holders of memory. If only
//! [`is_limit`](Error::is_limit) is true, the request failed early: it can no longer fit, or its wait is zero.
//! [`is_backend`](Error::is_backend) means that the driver or the kernel refused memory.
//!
//! # Async tasks
//!
//! Call [`Pool::start`] on a thread that may block, since it starts the driver and pins memory. Then [`Pool::get_async`] and an
//! awaited [`Completion`] do not block the thread. These calls may, to wait for an earlier copy of the buffer: [`PinnedBuf`]'s
//! `wait_slice`, `copy_to`, `copy_range_to` and `copy_from`, and the `wait` methods of [`Completion`] and [`PendingBuf`].
//!
//! # Features
//!
//! | feature | default | adds |
//! | --- | --- | --- |
//! | `cuda` | yes | CUDA backends and copies on cudarc streams; neither driver nor toolkit is needed to build or run |
//! | `serde` | no | `serde::Serialize` for the types of [`stats`] |
//! | `observe` | no | recordings (`PINPOOL_TRACE`), call stacks of requests, and statistics of a running process on a Unix socket (`PINPOOL_SOCKET`) |
//!
//! # Other crates
//!
//! | crate | contents |
//! | --- | --- |
//! | `pinpool-testing` | streams and memory without a GPU, as in the second example; a test of a custom [`Source`](source::Source) |
//! | `pinpool-shared-buffers` | buffers that worker processes fill |
//! | `pinpool-loader` | the reference loader |
//! | `pinpool-metrics` | an adapter to the `metrics` facade |
//! | `pinpool-cli`, `pinpool-capi`, `pinpool-preload` | the tool, the C interface, and the library for unmodified CUDA programs |
//!
//! # Platforms and log
//!
//! Linux on x86-64 (aarch64 is type-checked, not tested), Rust 1.88 or newer. On other Unix systems the crate has only the
//! pageable backend `heap` and `Backend::Source`, and no limits shared by processes. Log records go through the `log` crate. If
//! the program has no logger, each kind of warning about settings and the machine is printed once to stderr.
//!
//! # Versions
//!
//! Items that rustdoc hides, `unstable` and names that begin with `unstable_` may change in any release.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // Code for Linux is unused on other systems.

mod arena;
mod backend;
mod buffer;
mod config;
#[cfg(feature = "cuda")]
mod driver;
mod engine;
mod error;
mod in_flight;
mod maintenance_thread;
mod policy;
mod pool;
mod quota;
mod report;
mod size_class;
pub mod stats;

pub mod copy;
#[doc(hidden)]
pub mod unstable;

/// Custom memory for [`Backend::Source`]: implement [`Source`](source::Source), and test it with the crate `pinpool-testing`.
pub mod source {
    pub use crate::backend::{HeapSource, PAGE_BYTES, Region, Source};
    pub use crate::error::{Retry, SourceError};
}

pub use backend::{Backend, PinnedBy};
#[cfg(feature = "cuda")]
pub use buffer::{BufView, BufViewMut, TrackedView};
pub use buffer::{CopyError, PendingBuf, PinnedBuf, PinnedSlice};
pub use config::{HugeTlb, Limit, OnFull, ParseError, Preset, Rounding, SharedLimitChoice, StatsSocket};
pub use copy::completion::{Completion, CompletionFuture};
pub use error::{Error, Result};
pub use pool::{GetFuture, Partition, Pool, PoolBuilder, Request, UserMemory};
pub use report::{Cause, Diagnosis, Dump, Holder, SuggestedSetting};
pub use stats::Stats;

/// Checks that there is a CUDA driver, and a device with this ordinal. Call it before cudarc, which panics without a driver.
/// It starts the driver, so children that are forked later cannot use CUDA.
///
/// # Errors
///
/// [`Error::is_unavailable`]: there is no driver or no such device, the driver refuses to start, or this build lacks the feature
/// `cuda`.
pub fn check_cuda_device(ordinal: u32) -> Result<()> {
    #[cfg(feature = "cuda")]
    let device = driver::device::Device::find(ordinal).map_err(|error| error.to_string());
    #[cfg(not(feature = "cuda"))]
    let device = Err::<(), _>("built without the feature `cuda`".to_owned());
    let what = format!("CUDA device {ordinal}");
    device.map(drop).map_err(|why| Error::unavailable(what, why))
}

/// Version 1 of `bytemuck`: its traits bound the element types of views.
pub use bytemuck;
/// Version 0.19 of `cudarc`: copies use its streams and device memory.
#[cfg(feature = "cuda")]
pub use cudarc;

/// Compiles the example of the README. `examples/cudarc.rs` runs a longer one.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct Readme;
