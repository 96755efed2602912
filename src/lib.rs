//! A pool of page-locked host memory for loaders that feed GPUs.
//!
//! ```text
//!   file ──read──▶ PinnedBuf ──copy_to──▶ device
//!                    ▲   └── in flight until the copy ends ──┐
//!                    └──────────────── the pool ◀────────────┘
//! ```
//!
//! ```
//! use pinpool::Pool;
//! use pinpool::copy::sink::{SinkMem, SinkStream};
//!
//! let pool = Pool::from_env()?; // settings from `PINPOOL_*`
//! let (stream, mut device) = (SinkStream::new()?, SinkMem::new(4096)); // on a GPU: cudarc's stream and slice
//! let mut buf = pool.get(4096)?; // idle memory of this class, or newly pinned
//! buf.wait_slice_mut()?.fill(7);
//! buf.copy_to(&stream, &mut device)?; // returns to the pool when the copy ends
//! assert_eq!(device.read(), [7; 4096]);
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! | start with | for |
//! | --- | --- |
//! | [`Pool`] | getting and putting back buffers |
//! | [`PinnedBuf`] | filling and copying one |
//! | [`Backend`] | where the memory comes from |
//! | the crate `pinpool-shared` | buffers that worker processes fill; memory that outlives its process |
//! | [`Stats`] | what happened |
//! | [`PoolBuilder`] | settings; each is a `PINPOOL_*` variable too |
//! | [`architecture`] | how the crate is built, what its terms mean, and why |
//!
//! # Features
//!
//! | feature | default | adds |
//! | --- | --- | --- |
//! | `cuda` | yes | back-ends of the CUDA driver and copies on streams of cudarc; driver and toolkit are not needed to build or run |
//! | `serde` | no | `serde::Serialize` for [`Stats`] and its parts |
//! | `observe` | no | recording what a pool does to a file (`PINPOOL_TRACE`), call stacks of allocations, and the statistics of a running process on a Unix socket (`PINPOOL_SOCKET`): for the tool |
//!
//! The reference loader is the crate `pinpool-loader`, the tool is `pinpool-cli`, the statistics go to the facade `metrics` by
//! `pinpool-metrics`, and the interface to C is `crates/capi`.
//!
//! # Platforms
//!
//! Linux, Rust 1.88 or newer. On macOS and other Unix systems the crate builds and has the back-end `heap`: no memory is
//! page-locked there, and there is neither `pinpool-shared` nor a host ledger. The crate writes its log through the `log` crate.
//! In a program without a logger each warning of a pool is printed to stderr, once.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // What needs Linux is not there.

#[cfg(doc)]
#[doc = include_str!("../ARCHITECTURE.md")]
pub mod architecture {}

mod arena;
mod backend;
mod buffer;
mod config;
mod diag;
mod diagnosis;
#[cfg(feature = "cuda")]
mod driver;
mod dump;
mod engine;
mod error;
mod finding;
mod in_flight;
mod ledger;
mod maintenance_thread;
mod policy;
mod pool;
mod quota;
mod size_class;
pub mod stats;

pub mod copy;
#[doc(hidden)]
pub mod unstable;

/// Sources of memory for [`Backend::Source`]: one of your own implements [`Source`](source::Source). The contract suite for it is in
/// the crate `pinpool-testing`.
pub mod source {
    pub use crate::backend::{GRANULE_BYTES, PAGE_BYTES, Region, Source};
}

pub use backend::Backend;
#[cfg(feature = "cuda")]
pub use buffer::{BufView, BufViewMut};
pub use buffer::{CopyError, PendingBuf, Pinned, PinnedBuf};
pub use config::{LedgerName, Limit, OnFull, ParseError, Preset};
pub use copy::Completion;
pub use diagnosis::{Cause, Diagnosis};
pub use dump::{Dump, Owner};
pub use error::{Error, Kind as ErrorKind, Result, SourceError};
pub use in_flight::{Fence, FenceKind, StreamId};
pub use pool::{GetFuture, PageLocked, Pool, PoolBuilder, Request, TaggedPool};
pub use size_class::{DEFAULT_ALIGN, Rounding};
pub use stats::Stats;

/// Whether this machine has a CUDA driver that can be loaded: cudarc panics without one. Loads it, and starts nothing.
/// The log of a pool says why the GPU is not used.
#[must_use]
pub fn cuda_is_present() -> bool {
    #[cfg(feature = "cuda")]
    return driver::is_present();
    #[cfg(not(feature = "cuda"))]
    false
}

/// The crate whose traits the views of a buffer as elements use, in version 1.
pub use bytemuck;
/// The crate whose streams and device memory copies use, in version 0.19.
#[cfg(feature = "cuda")]
pub use cudarc;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
