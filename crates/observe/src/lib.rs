//! Internal to pinpool, without a stability guarantee: recordings, statistics on a socket, and the diagnosis of a running pool.
//! The crate does not depend on the pools themselves. `diagnosis::Cause` is public API of pinpool: every cause needs a comment.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // Parts exist on Linux only.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a doc comment would often repeat the name.

pub mod diagnosis;
pub mod record;
#[cfg(feature = "io")]
pub mod stats_socket;
