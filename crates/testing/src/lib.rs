//! Helpers for testing custom backends and code that uses pinpool.
//!
//! | item | for |
//! | --- | --- |
//! | [`check_source`] | the contract of [`Source`](pinpool::source::Source), [`VirtualMemory`](pinpool::unstable::backend::VirtualMemory) included, as one test for any implementation |
//! | [`FaultSource`] | scripted failures and gates around any source |
//!
//! [`pinpool::unstable`] moves the time of a pool manually.
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
