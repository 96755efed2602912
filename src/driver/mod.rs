//! The CUDA driver: what all code that calls it does around its calls, its devices, and its virtual memory.
//!
//! | item | reason |
//! | --- | --- |
//! | [`is_present`] | cudarc panics at the first call if there is no driver |
//! | [`error_name`] | cudarc's own text of an error calls the driver, which may be gone, and panics without one |
//! | [`CurrentContext`] | most calls use the thread's current context, which belongs to the user |
//! | [`RelaxedCapture`] | while a stream captures, a query or an allocation on any thread fails and invalidates the capture |
//! | [`context_id`] | a context that is made after a reset may have the handle of the old one |
//! | [`symbol`] | cudarc's bindings depend on the CUDA version of the final build; a look-up by name does not |
//! | [`known_streams`] | the streams of copies, which may have work that a release would wait for |
//! | [`device`] | the devices, their primary contexts and attributes |
//! | [`standstill`] | questions that are not asked while the driver answers nobody |
//! | [`state`] | whether there is a driver and a device, and if not, why |
//! | [`virtual_memory`] | the driver's virtual memory, found by name, with types of this crate |
//!
//! Never copies or waits, and decides nothing about memory. Uses only cudarc's `result` and `sys`: its safe layer returns
//! errors that other libraries left in a context to the next caller.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::{DriverError, result, sys};

pub(crate) mod device;
pub(crate) mod known_streams;
pub(crate) mod standstill;
pub(crate) mod state;
pub(crate) mod virtual_memory;

/// Whether there is a driver to load. Never panics, and exists under every linking feature, unlike cudarc's own check.
pub(crate) fn is_present() -> bool {
    library().is_some()
}

/// The function of this name, if the driver has it.
pub(crate) fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    NonNull::new(unsafe { libc::dlsym(library()?.as_ptr(), name.as_ptr()) })
}

/// The names of the driver's library, and what else `dlopen` is asked: the one that is loaded is the driver of this process, as
/// for the runtime. The name without a version comes last: toolkits have a stub for linking under it.
const LIBRARIES: [(&CStr, c_int); 4] = [
    (c"libcuda.so.1", libc::RTLD_NOLOAD),
    (c"libcuda.so", libc::RTLD_NOLOAD),
    (c"libcuda.so.1", 0),
    (c"libcuda.so", 0),
];

/// A handle of the driver, never closed, so that its symbols stay valid.
fn library() -> Option<NonNull<c_void>> {
    LIBRARIES.into_iter().find_map(|(library, flag)| {
        // SAFETY: loading the driver runs its initialisers, as the first CUDA call of any program does.
        NonNull::new(unsafe { libc::dlopen(library.as_ptr(), flag | libc::RTLD_LAZY | libc::RTLD_LOCAL) })
    })
}

/// The function of this name in another library that cudarc would take for the driver, since it asks for the name without a version
/// first; `None` if it takes the driver.
pub(crate) fn symbol_before(name: &CStr) -> Option<NonNull<c_void>> {
    let own = symbol(name)?;
    // SAFETY: as in `library`.
    let first = NonNull::new(unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) })?;
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    NonNull::new(unsafe { libc::dlsym(first.as_ptr(), name.as_ptr()) }).filter(|&found| found != own)
}

/// Whether a driver is loaded in this process; loads none.
pub(crate) fn is_loaded() -> bool {
    LIBRARIES.into_iter().any(|(library, _)| {
        // SAFETY: loads nothing; the handle stays open, as that of `library` does.
        !unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY | libc::RTLD_LOCAL) }.is_null()
    })
}

/// The number of a context, which no other of the process ever has, or the driver's code; `None` if the driver has no numbers
/// (before CUDA 12.0). Null is the context that is current on this thread.
pub(crate) fn context_id(context: sys::CUcontext) -> Option<Result<u64, c_int>> {
    type GetId = unsafe extern "C" fn(sys::CUcontext, *mut u64) -> c_int;
    static GET_ID: OnceLock<Option<GetId>> = OnceLock::new();
    let get_id = (*GET_ID.get_or_init(|| {
        let found = symbol(c"cuCtxGetId")?;
        // SAFETY: the driver exports this name with these arguments, and is never unloaded.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, GetId>(found) })
    }))?;
    let mut id = 0;
    // SAFETY: memory for a number. The driver knows the contexts that there are, and refuses others.
    match unsafe { get_id(context, &raw mut id) } {
        0 => Some(Ok(id)),
        code => Some(Err(code)),
    }
}

/// Whether this code says that a context is there no more: `CUDA_ERROR_INVALID_CONTEXT` or `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
pub(crate) fn is_of_ended_context(code: c_int) -> bool {
    matches!(code, 201 | 709)
}

/// Name of an error, without a call of the driver.
pub(crate) fn error_name(error: DriverError) -> String {
    format!("{:?}", error.0)
}

/// Number of an error, as in the driver's header.
pub(crate) fn error_code(error: DriverError) -> i64 {
    i64::from(error.0 as u32)
}

/// Whether a call was refused because a stream captures a graph: `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` and
/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`. The same call succeeds later, so nothing is known to have failed.
pub(crate) fn is_forbidden_by_capture(code: i64) -> bool {
    matches!(code, 900 | 901)
}

/// Makes a context current on this thread; dropping it restores the previous one.
#[derive(Debug)]
pub(crate) struct CurrentContext {
    /// The context to restore, if it is another one.
    previous: Option<sys::CUcontext>,
}

impl CurrentContext {
    /// Makes `context` current.
    ///
    /// # Safety
    ///
    /// `context` is retained for as long as the result lives.
    pub(crate) unsafe fn enter(context: sys::CUcontext) -> Result<Self, DriverError> {
        let previous = result::ctx::get_current()?.unwrap_or(ptr::null_mut());
        if previous == context {
            return Ok(Self { previous: None });
        }
        // SAFETY: the caller's promise.
        unsafe { result::ctx::set_current(context) }?;
        Ok(Self { previous: Some(previous) })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: it was current on this thread before. After a failure the pool's context stays current, in which
            // all calls work except those that need no context.
            let _ignored = unsafe { result::ctx::set_current(previous) };
        }
    }
}

/// Keeps this thread's calls from disturbing captures on any thread, until it is dropped.
///
/// In CUDA's default mode a capture anywhere in the process forbids event queries and allocations everywhere. The calls of
/// this crate touch no capturing stream, so the ban protects nothing here.
#[derive(Debug)]
pub(crate) struct RelaxedCapture {
    previous: Option<sys::CUstreamCaptureMode>,
}

impl RelaxedCapture {
    pub(crate) fn enter() -> Self {
        Self { previous: exchange_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        self.previous.take().and_then(exchange_mode);
    }
}

/// Sets this thread's capture mode and returns the previous one; `None` if the driver refused and nothing changed.
fn exchange_mode(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: `mode` is a live mode, which the driver reads and overwrites with another of the three.
    let outcome = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    outcome.result().is_ok().then_some(mode)
}
