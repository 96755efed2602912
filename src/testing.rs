//! For tests of code that uses pinpool, and of back-ends of other crates (feature `testing`).
//!
//! | item | for |
//! | --- | --- |
//! | [`check_source`] | the contract of [`Source`](crate::backend::Source), [`VirtualMemory`](crate::backend::VirtualMemory) included, as one test for any implementation |
//! | [`FaultSource`] | scripted failures and gates around any source |
//! | [`ManualClock`] | the time of a pool, moved by hand ([`PoolBuilder::clock`](crate::PoolBuilder::clock)) |
//!
//! ```
//! use pinpool::backend::HeapSource;
//!
//! pinpool::testing::check_source(&HeapSource::new());
//! ```

#[doc(hidden)]
pub mod parse;
#[doc(hidden)]
pub mod short_path;

pub use crate::backend::fault::{CallGate, FaultSource, SourceCall};
pub use crate::backend::suite::check_source;
pub use crate::engine::ManualClock;
