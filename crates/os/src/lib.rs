//! Internal to pinpool, no promise: what the pool and the crates around it ask of the operating system.
//!
//! | module | owns |
//! | --- | --- |
//! | [`sync`] | atomics, cells and locks that a model checker can replace, and that a child of `fork` can use |
//! | [`fork`] | in which process of a line of forks code runs, and values that each has for itself |
//! | [`threads`] | threads that leave no lock of the process behind in a child of `fork` |
//! | [`clock`] | the monotonic clock |
//! | [`unwind`] | calls of user code: panics end there |
//! | [`lost`] | what is never used again and never freed |
//! | [`call_stack`] | where code was called from |
//! | [`file_id`] | which file a path or a descriptor leads to |
//! | [`child_descriptors`] | descriptors that children of `fork` close |
//! | [`local_socket`] | a socket in the file system, for this user alone |
//! | [`host`] | memory, limits, pressure and NUMA nodes of the machine |
//! | [`words`] | how sizes and times are written |
//!
//! Knows no pool.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, unused_imports))] // What needs Linux is not there.
#![allow(missing_docs, missing_debug_implementations, clippy::missing_errors_doc, clippy::missing_panics_doc)] // Internal: a doc comment would repeat the name.

pub mod call_stack;
pub mod child_descriptors;
pub mod clock;
pub mod file_id;
pub mod fork;
pub mod host;
pub mod local_socket;
pub mod lost;
pub mod sync;
pub mod threads;
pub mod unwind;
pub mod words;
