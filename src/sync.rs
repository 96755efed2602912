//! The one door to locks and atomics.
//!
//! Every room takes its primitives from here, so that a model checker can stand in for them
//! (`RUSTFLAGS="--cfg loom"`) and so that the choice of lock is made once.

pub(crate) use parking_lot::{Condvar, Mutex};

#[cfg(loom)]
pub(crate) mod atomic {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
}
#[cfg(not(loom))]
pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
}
