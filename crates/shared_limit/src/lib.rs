//! Internal to pinpool and unstable: locks and waits across processes, and the shared limit, which is one limit for the pools of
//! all processes.
//!
//! This crate does not depend on pools. It works only on Linux: on other systems attaching fails.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // Parts need Linux.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a doc comment would repeat the name.

pub mod file;
mod limit;

pub use limit::*;
