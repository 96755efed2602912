//! For tests of backends of other crates, and of code that uses pinpool.
//!
//! | item | for |
//! | --- | --- |
//! | [`check_source`] | the contract of [`Source`](pinpool::source::Source), [`VirtualMemory`](pinpool::unstable::backend::VirtualMemory) included, as one test for any implementation |
//! | [`FaultSource`] | scripted failures and gates around any source |
//!
//! The time of a pool is moved by hand with [`pinpool::unstable`].
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
