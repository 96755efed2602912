//! Calls that may take long, without the interpreter's lock.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::Python;

/// The interpreter is ending: it is not entered any more.
static ENDING: AtomicBool = AtomicBool::new(false);

/// From now on nothing enters the interpreter.
pub(crate) fn set_ending() {
    // Relaxed: the flag guards no other memory.
    ENDING.store(true, Ordering::Relaxed);
}

pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Relaxed)
}

/// Calls `call` without the lock, on a thread that may hold it or not, as where Python ends an object.
pub(crate) fn unlocked(call: impl FnOnce() + Send) {
    let mut call = Some(call);
    let mut make = || call.take().into_iter().for_each(|call| call());
    if !is_ending() {
        Python::try_attach(|py| py.detach(&mut make));
    }
    // Where there is no interpreter to enter.
    make();
}
