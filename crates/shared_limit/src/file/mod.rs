//! Primitives for processes that share memory: locks that end with their process, and waits for changes by other processes.
#![allow(unsafe_code)] // Locks and wakes by system calls.

mod event_count;
mod futex;
mod locks;

pub use event_count::EventCount;
pub(crate) use futex::{sleep_while, wake};
pub use locks::LockFile;
pub(crate) use locks::random;

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Processes and files.
pub(crate) mod tests;
