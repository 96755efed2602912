//! What every room that calls the CUDA driver does around its calls.
//!
//! | item | why |
//! | --- | --- |
//! | [`is_present`] | cudarc panics at the first call where there is no driver |
//! | [`words`] | cudarc's own text of an error calls the driver, which may be gone, and panics without one |
//! | [`Current`] | most calls work in the thread's current context, and that belongs to the user |
//! | [`Relaxed`] | while a stream captures, a query or an allocation on any thread fails and spoils the capture |
//! | [`symbol`] | what cudarc binds depends on the CUDA version that the final build chose; what is found by name does not |
//! | [`virtual_memory`] | such functions, with types of our own |
//!
//! Never allocates, copies or waits. Calls go to cudarc's `result` and `sys` only: its safe layer hands errors that other
//! libraries left in a context to whoever comes next.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use cudarc::driver::{DriverError, result, sys};

pub(crate) mod virtual_memory;

/// Is there a driver to load? Never panics, and exists under every linking feature, unlike cudarc's own check.
pub(crate) fn is_present() -> bool {
    library().is_some()
}

/// The function of this name, if the driver has it.
pub(crate) fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    NonNull::new(unsafe { libc::dlsym(library()?.as_ptr(), name.as_ptr()) })
}

/// A handle of the driver. It is never closed, so that what is found in it stays.
fn library() -> Option<NonNull<c_void>> {
    // cudarc's own order.
    [c"libcuda.so", c"libcuda.so.1"].into_iter().find_map(|library| {
        // SAFETY: loading the driver runs its initialisers, as the first CUDA call of any program does.
        NonNull::new(unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) })
    })
}

/// Name of an error, without asking the driver for it.
pub(crate) fn words(error: DriverError) -> String {
    format!("{:?}", error.0)
}

/// Number of an error, as in the driver's header.
pub(crate) fn code(error: DriverError) -> i64 {
    i64::from(error.0 as u32)
}

/// A context is current on this thread until this is dropped; then the one before is again.
#[derive(Debug)]
pub(crate) struct Current {
    /// `Some` if there is something to undo.
    before: Option<sys::CUcontext>,
}

impl Current {
    /// Makes `context` current.
    ///
    /// # Safety
    ///
    /// `context` is retained for as long as the result lives.
    pub(crate) unsafe fn enter(context: sys::CUcontext) -> Result<Self, DriverError> {
        let before = result::ctx::get_current()?.unwrap_or(ptr::null_mut());
        if before == context {
            return Ok(Self { before: None });
        }
        // SAFETY: the caller's promise.
        unsafe { result::ctx::set_current(context) }?;
        Ok(Self { before: Some(before) })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread a moment ago. A failure leaves the user with our context, where every
            // call but those that asked for none works as well.
            let _left_behind = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// This thread's calls do not disturb captures, its own or others', until this is dropped.
///
/// In CUDA's default mode a capture that runs anywhere in the process forbids event queries and allocations everywhere.
/// None of ours touches a capturing stream, so the ban protects nothing here.
#[derive(Debug)]
pub(crate) struct Relaxed {
    before: Option<sys::CUstreamCaptureMode>,
}

impl Relaxed {
    pub(crate) fn enter() -> Self {
        Self { before: exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        self.before.take().and_then(exchange);
    }
}

/// The mode before; `None` if the driver refused, and then nothing changed.
fn exchange(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: room for one mode, which the driver reads and overwrites with another of the three.
    let outcome = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    outcome.result().is_ok().then_some(mode)
}
