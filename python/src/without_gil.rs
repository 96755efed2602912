//! Long calls without the interpreter's lock (the GIL).

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::Python;

/// Whether the interpreter is exiting, so that no thread may attach to it.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Prevents all threads from attaching to the interpreter from now on.
pub(crate) fn set_ending() {
    // Relaxed: the flag guards no other memory.
    ENDING.store(true, Ordering::Relaxed);
}

pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Relaxed)
}

/// Runs `call` without the GIL, whether or not this thread holds it. Meant for destructors.
pub(crate) fn without_gil(call: impl FnOnce() + Send) {
    let mut call = Some(call);
    let mut make = || call.take().into_iter().for_each(|call| call());
    if !is_ending() {
        Python::try_attach(|py| py.detach(&mut make));
    }
    // Makes the call if it was not made above, because there was no interpreter to attach to. Otherwise this does nothing.
    make();
}
