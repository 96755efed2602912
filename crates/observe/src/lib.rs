//! Internal to pinpool, no promise: what a running pool shows. A recording of what it does, its statistics on a socket, and the
//! judge, which says why it is as fast as it is.
//!
//! Knows no pool.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // What needs Linux is not there.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a name says enough where a doc comment would repeat it.

pub mod judge;
pub mod record;
#[cfg(feature = "io")]
pub mod stats_socket;
