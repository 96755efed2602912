//! The statistics of a pool: [`Stats`] and its parts.

// | file | contains |
// | --- | --- |
// | `list.rs` | every statistic with its name, unit and help text |
// | `entry.rs` | one statistic of the list |
// | `reasons.rs`, `calls.rs`, `histogram.rs` | counting |
// | `class.rs` | one size class |
// | `table.rs`, `serial.rs` | the snapshot as a table and as data |
//
// Each module of the pool counts its own events, under a lock or on a cache line that the module already holds. A snapshot
// collects the counts.

mod calls;
mod class;
mod entry;
mod histogram;
mod list;
mod reasons;
#[cfg(feature = "serde")]
mod serial;
mod table;
mod validate;

pub(crate) use calls::SourceCalls;
pub use class::ClassStats;
#[doc(hidden)]
pub use entry::{Kind, Statistic, Unit, Value};
pub use histogram::Histogram;
pub use list::{
    CallStats, CopyStats, EvictionReasons, LimitStats, MemoryStats, MissReasons, RequestStats, SharedLimitStats, Stats,
};
pub(crate) use reasons::EvictionReason;
