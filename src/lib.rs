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
//! buf.as_mut_slice()?.fill(7);
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
//! | `serve` | no | the statistics of a running process on a Unix socket (`PINPOOL_SOCKET`), for `pinpool top` |
//! | `serde` | no | `serde::Serialize` for [`Stats`] and its parts |
//! | `trace` | no | recording what a pool does to a file (`PINPOOL_TRACE`), for the tool's `trace`, `replay` and `advise`; call stacks of gets |
//! | `custom-source` | no | the module `backend`: memory from elsewhere for a pool, and the sources there are, to be used without one |
//! | `tools` | no | for programs about pools: the modules `config` (every variable with its text) and `ledger` (who holds what), each check of the rates; and `custom-source` |
//! | `testing` | no | the module `testing`: a manual clock, and parts to be measured alone; and `tools` |
//!
//! The reference loader is the crate `pinpool-loader`, the tool is `pinpool-cli`, the statistics go to the facade `metrics` by
//! `pinpool-metrics`, and the interface to C is `crates/capi`.
//!
//! # Platforms
//!
//! Linux, Rust 1.88 or newer. On macOS and other Unix systems the crate builds and has the back-ends `heap` and `sim`: no memory is
//! page-locked there, and there is neither `pinpool-shared` nor a host ledger. The crate writes its log through the `log` crate.
//! In a program without a logger each warning of a pool is printed to stderr, once.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // What needs Linux is not there.

#[cfg(doc)]
#[doc = include_str!("../ARCHITECTURE.md")]
pub mod architecture {}

#[allow(missing_docs)] // Public for the benches alone.
#[cfg_attr(not(feature = "testing"), allow(dead_code, unreachable_pub))] // What only benches and tests use.
mod arena;
mod buffer;
#[cfg_attr(not(feature = "tools"), allow(dead_code, unreachable_pub, unused_imports))] // What only tools use.
mod diag;
#[cfg(feature = "cuda")]
mod driver;
mod dump;
mod engine;
mod error;
mod finding;
mod in_flight;
mod maintenance_thread;
#[cfg_attr(not(feature = "tools"), allow(dead_code, unreachable_pub, unused_imports))] // What only tools use.
mod policy;
mod pool;
mod quota;
mod size_class;
mod stats;
mod why;

// The same modules, with what only sources of memory of a program's own, or tools, need.
#[cfg(feature = "custom-source")]
pub mod backend;
#[cfg(not(feature = "custom-source"))]
#[allow(dead_code, unreachable_pub, unused_imports)] // What the feature is for.
mod backend;
#[cfg(feature = "tools")]
pub mod config;
#[cfg(not(feature = "tools"))]
#[allow(dead_code, unreachable_pub, unused_imports)] // What the feature is for.
mod config;
pub mod copy;
#[cfg(feature = "tools")]
pub mod ledger;
#[cfg(not(feature = "tools"))]
#[allow(dead_code, unreachable_pub, unused_imports)] // What the feature is for.
mod ledger;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use backend::{Backend, HugeTlb, PageTiers};
#[cfg(feature = "cuda")]
pub use buffer::{BufView, BufViewMut};
pub use buffer::{CopyError, PendingBuf, Pinned, PinnedBuf};
pub use config::{Ceiling, Config, LedgerName, OnFull, ParseError, Preset};
pub use copy::Completion;
#[cfg(feature = "tools")]
pub use diag::{CheckReport, LogSampler};
pub use dump::{Dump, Owner};
pub use error::{Error, Kind as ErrorKind, Result, SourceError};
pub use finding::{Finding, Level};
pub use in_flight::{Fence, FenceKind, StreamId};
#[cfg(feature = "tools")]
pub use policy::Check;
pub use policy::Window;
pub use pool::{GetFuture, PageLocked, Pool, PoolBuilder, TaggedPool};
pub use size_class::{DEFAULT_ALIGN, Rounding};
pub use stats::{
    Calls, ClassStats, EvictionReasons, Histogram, LedgerStats, MissReasons, Peaks, Requested, Stats, StatsError,
    Underlying,
};
pub use why::Why;

/// Whether this machine has a CUDA driver that can be loaded: cudarc panics without one. Loads it, and starts nothing.
/// [`Pool::warnings`] says more, with the cause.
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
