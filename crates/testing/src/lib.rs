//! Helpers for testing custom backends and code that uses pinpool.
//!
//! | item | for |
//! | --- | --- |
//! | [`check_source`] | a test of the contracts of [`Source`](pinpool::source::Source) and [`VirtualMemory`](pinpool::unstable::backend::VirtualMemory) for any implementation |
//! | [`FaultSource`] | scripted failures and gates around any source |
//!
//! A manual clock for a pool is in [`pinpool::unstable`].
//!
//! ```
//! use pinpool::unstable::backend::HeapSource;
//!
//! pinpool_testing::check_source(&HeapSource::new());
//! ```

mod fault;
mod suite;

pub use self::fault::{CallGate, FaultSource, SourceCall};
pub use self::suite::check_source;
