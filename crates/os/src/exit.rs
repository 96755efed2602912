//! Process exit handlers.
#![allow(unsafe_code)] // Registers them.

use crate::sync::process::{AtomicBool, Ordering};

/// Calls `handler` when this process exits, or a child that it forks from now on, but not after `_exit`, `abort` or a signal.
/// Handlers run in the opposite order of their registration. Without memory to register it, `handler` is not called.
///
/// `registered` records that the handler is registered. It is not a lock, because a child that is forked while another thread
/// holds a lock would wait for that thread.
pub fn call_at_exit(registered: &'static AtomicBool, handler: extern "C" fn()) {
    // Relaxed: only one thread finds it unset. Miri runs no handlers.
    if !registered.swap(true, Ordering::Relaxed) && !cfg!(miri) {
        // SAFETY: the handler stays loaded as long as the process runs, and does not unwind: that would abort.
        unsafe { libc::atexit(handler) };
    }
}
