//! Internal to pinpool and unstable: operating-system services for the pool and its companion crates.
//!
//! | module | owns |
//! | --- | --- |
//! | [`sync`] | atomics, cells and locks that a model checker can replace, and that a child of `fork` can use |
//! | [`exit`] | process exit handlers |
//! | [`fork`] | fork detection, and values that each process has separately |
//! | [`threads`] | threads that leave no process-wide lock locked in a forked child |
//! | [`clock`] | the monotonic clock |
//! | [`unwind`] | calls of user code that catch panics |
//! | [`leaked`] | leaked values: never used again and never freed |
//! | [`call_stack`] | the call stack of the current thread |
//! | [`file_id`] | the identity of the file behind a path or a descriptor |
//! | [`child_descriptors`] | descriptors that forked children close |
//! | [`local_socket`] | a socket in the file system, for this user alone |
//! | [`host`] | memory, limits, pressure and NUMA nodes of the machine |
//! | [`format`](mod@format) | how sizes and times are written |
//!
//! This crate does not depend on pools.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // Linux-only items are missing on other systems.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a doc comment would repeat the name.

pub mod call_stack;
pub mod child_descriptors;
pub mod clock;
pub mod exit;
pub mod file_id;
pub mod fork;
pub mod format;
pub mod host;
pub mod leaked;
pub mod local_socket;
pub mod sync;
pub mod threads;
pub mod unwind;
