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
//! | [`Slab`] | many small tensors in one buffer |
//! | [`Backend`] | where the memory comes from |
//! | [`Stats`] | what happened |
//! | [`config`] | settings and `PINPOOL_*` variables |

mod budget;
mod buffer;
mod diag;
#[cfg(feature = "cuda")]
mod driver;
mod error;
mod fork;
mod in_flight;
mod machine;
mod policy;
mod pool;
mod size_class;
mod slab;
mod stats;
mod store;
mod sync;

// Public so that the benches can measure them alone; no part of the interface.
#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub mod front;

pub mod backend;
pub mod config;
pub mod copy;
#[cfg(feature = "cli")]
pub mod loader;
#[cfg(feature = "cli")]
pub mod trace;

pub use backend::Backend;
pub use buffer::PinnedBuf;
pub use config::{Ceiling, Config, FenceKind, OnFull, Preset, PressureFrom, Release};
pub use copy::{Arriving, Completion};
pub use diag::{Cadence, CheckReport};
pub use error::{Error, Result};
pub use in_flight::{Fence, StreamId};
pub use policy::{Check, Window};
pub use pool::{Clock, ManualClock, Pool, PoolBuilder};
pub use size_class::Rounding;
pub use slab::{Piece, Slab};
pub use stats::{Stats, Underlying};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
