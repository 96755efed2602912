//! The Python code that runs on a thread.

use pyo3::ffi::PyEval_GetFrame;
use pyo3::prelude::*;

/// Functions that are named.
const FRAMES_MAX: usize = 32;

/// Name, file and line of the Python functions that run on this thread, the innermost first, without those of this package.
#[allow(unsafe_code)]
pub(crate) fn frames(py: Python<'_>) -> Vec<(String, String, u32)> {
    // SAFETY: the thread is attached to the interpreter.
    let innermost = unsafe { PyEval_GetFrame() };
    // SAFETY: a frame that runs, or null where no Python code does.
    let mut next = unsafe { Bound::from_borrowed_ptr_or_opt(py, innermost.cast()) };
    let mut frames = Vec::new();
    while let Some(frame) = next.filter(|_| frames.len() < FRAMES_MAX) {
        frames.extend(described(&frame).ok().flatten());
        next = frame.getattr("f_back").ok().filter(|back| !back.is_none());
    }
    frames
}

/// These attributes run no Python code.
fn described(frame: &Bound<'_, PyAny>) -> PyResult<Option<(String, String, u32)>> {
    let module = frame.getattr("f_globals")?.get_item("__name__").and_then(|name| name.extract::<String>());
    if module.is_ok_and(|module| matches!(module.split('.').next(), Some("pinpool" | "pinpool_loader"))) {
        return Ok(None);
    }
    let code = frame.getattr("f_code")?;
    let line = frame.getattr("f_lineno")?.extract().unwrap_or(0);
    Ok(Some((code.getattr("co_qualname")?.extract()?, code.getattr("co_filename")?.extract()?, line)))
}
