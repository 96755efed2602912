//! Long calls without the GIL.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::Python;

/// The interpreter exits and is not entered any more.
static ENDING: AtomicBool = AtomicBool::new(false);

/// From now on nothing enters the interpreter.
pub(crate) fn set_ending() {
    // Relaxed: the flag guards no other memory.
    ENDING.store(true, Ordering::Relaxed);
}

pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Relaxed)
}

/// Runs `call` without the GIL, whether or not this thread holds it, as when Python ends an object.
pub(crate) fn unlocked(call: impl FnOnce() + Send) {
    let mut call = Some(call);
    let mut make = || call.take().into_iter().for_each(|call| call());
    if !is_ending() {
        Python::try_attach(|py| py.detach(&mut make));
    }
    // There is no interpreter to enter.
    make();
}
