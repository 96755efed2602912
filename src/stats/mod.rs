//! The counters of a pool in one snapshot.
//!
//! | file | has |
//! | --- | --- |
//! | `snapshot.rs` | all figures, and the sums that must balance |
//! | `reasons.rs` | why gets missed, why buffers left |
//! | `calls.rs` | calls of the source |
//! | `class.rs` | one size class |
//! | `histogram.rs` | durations in powers of two |
//! | `table.rs`, `serial.rs` | the snapshot for people and for machines |
//!
//! Each module of the pool counts its own events, under a lock or on a cache line that it holds anyway; `Core` collects the
//! counts. Nothing here decides.

mod calls;
mod class;
mod histogram;
mod reasons;
#[cfg(feature = "serde")]
mod serial;
mod snapshot;
mod table;

pub use calls::Calls;
pub(crate) use calls::SourceCalls;
pub(crate) use calls::Underlying;
pub use class::ClassStats;
pub use histogram::Histogram;
pub(crate) use reasons::{EvictionReason, MissReason};
pub use reasons::{EvictionReasons, MissReasons};
pub use snapshot::{LedgerStats, Stats, StatsError};
pub(crate) use snapshot::{Peaks, Requested};
