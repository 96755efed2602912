//! Internal to pinpool, no stability guarantee: locks and waits across processes, and the shared limit: one limit for the pools
//! of all processes.
//!
//! Knows no pool. Linux only: attaching fails elsewhere.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // Parts need Linux.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a name says enough where a doc comment would repeat it.

pub mod file;
mod shared_limit;

pub use shared_limit::*;
