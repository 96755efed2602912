//! Helpers for testing custom backends and code that uses pinpool.
//!
//! | item | for |
//! | --- | --- |
//! | [`check_source`] | a test of the contract of [`Source`](pinpool::source::Source) for any implementation |
//! | [`FaultSource`] | scripted failures and gates around any source |
//! | [`SinkStream`], [`SinkMemory`] | copies without a GPU: a thread and ordinary memory in place of a device |
//!
//! [`Source`](pinpool::source::Source) has an example of a custom backend with its test.

mod fault;
mod sink;
mod source_contract;

pub use self::fault::{CallGate, FaultSource, SourceCall};
pub use self::sink::{SinkGate, SinkMemory, SinkStream};
pub use self::source_contract::check_source;
