//! Long calls without the interpreter's lock (the GIL).

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::Python;

/// The interpreter exits, so no thread may attach to it.
static ENDING: AtomicBool = AtomicBool::new(false);

/// From now on no thread attaches to the interpreter.
pub(crate) fn set_ending() {
    // Relaxed: the flag guards no other memory.
    ENDING.store(true, Ordering::Relaxed);
}

pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Relaxed)
}

/// Runs `call` without the GIL, whether or not this thread holds it. For destructors.
pub(crate) fn unlocked(call: impl FnOnce() + Send) {
    let mut call = Some(call);
    let mut make = || call.take().into_iter().for_each(|call| call());
    if !is_ending() {
        Python::try_attach(|py| py.detach(&mut make));
    }
    // Still present if there was no interpreter to attach to.
    make();
}
