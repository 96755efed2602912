//! Internal to pinpool, no promise: memory and files that processes share, in which the death of each is noticed, and the host
//! ledger, which is one ceiling for the pools of all processes.
//!
//! Knows no pool. Linux only: elsewhere attaching is an error.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // What needs Linux is not there.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a name says enough where a doc comment would repeat it.

pub mod file;
pub mod ledger;
