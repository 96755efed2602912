//! Helpers for testing custom backends and code that uses pinpool.
//!
//! | item | for |
//! | --- | --- |
//! | [`check_source`] | a test of the contracts of [`Source`](pinpool::source::Source) and [`VirtualMemory`](pinpool::unstable::backend::VirtualMemory) for any implementation |
//! | [`FaultSource`] | scripted failures and gates around any source |
//! | [`SinkStream`], [`SinkMem`] | copies without a GPU: a thread and ordinary memory in place of a device |
//!
//! A manual clock for a pool is in [`pinpool::unstable`].
//!
//! ```
//! use pinpool::unstable::backend::HeapSource;
//!
//! pinpool_testing::check_source(&HeapSource::new());
//! ```

mod fault;
mod sink;
mod suite;

pub use self::fault::{CallGate, FaultSource, SourceCall};
pub use self::sink::{SinkGate, SinkMem, SinkStream};
pub use self::suite::check_source;
