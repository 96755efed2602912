//! A pool of page-locked host memory for loaders that feed GPUs.
//!
//! ```text
//!   file ──read──▶ PinnedBuf ──copy_to──▶ device
//!                    ▲   └── in flight until the copy is over ──┐
//!                    └──────────────── the pool ◀───────────────┘
//! ```
//!
//! | start with | for |
//! | --- | --- |
//! | [`Pool`] | getting and putting back buffers |
//! | [`PinnedBuf`] | filling and copying one |
//! | [`BatchBuf`] | many small tensors in one buffer |
//! | [`Backend`] | where the memory comes from |
//! | [`Stats`] | what happened |
//! | [`config`] | settings and `PINPOOL_*` variables |

mod budget;
mod buffer;
mod diag;
#[cfg(feature = "cuda")]
mod driver;
mod engine;
mod error;
mod fork;
mod host;
mod in_flight;
mod policy;
mod pool;
mod size_class;
mod stats;
mod sync;

// Public so that the benches can measure them alone; no part of the interface.
#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub use engine::idle::thread_cache;

pub mod backend;
pub mod config;
pub mod copy;
#[cfg(feature = "loader")]
pub mod loader;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod trace;

pub use backend::Backend;
pub use buffer::{BatchBuf, BatchSlice, PendingBuf, Pinned, PinnedBuf};
#[cfg(feature = "cuda")]
pub use buffer::{BufView, BufViewMut};
pub use config::{Ceiling, Config, OnFull, Preset, PressureSource, ReleasePolicy};
pub use copy::Completion;
pub use diag::{CheckReport, LogSampler};
pub use error::{Error, Result};
pub use in_flight::{Fence, FenceKind, StreamId};
pub use policy::{Check, Window};
pub use pool::{Pool, PoolBuilder};
pub use size_class::Rounding;
pub use stats::{Stats, StatsError, Underlying};

/// The crate whose traits the views of a buffer as elements use, in version 1.
pub use bytemuck;
/// The crate whose streams and device memory copies use, in version 0.19.
#[cfg(feature = "cuda")]
pub use cudarc;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
