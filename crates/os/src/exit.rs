//! Process exit handlers.
#![allow(unsafe_code)] // Registers handlers.

use crate::sync::unmodeled::{AtomicBool, Ordering};

/// Registers `handler`, which then runs when this process, or a child forked later, exits, but not after `_exit`, `abort` or a
/// signal. Handlers run in reverse order of registration. If there is no memory to register `handler`, it is never called.
///
/// `registered` records that the handler is registered. It is not a lock, because a child that is forked while another thread
/// holds a lock would wait for that thread.
pub fn call_at_exit(registered: &'static AtomicBool, handler: extern "C" fn()) {
    // Relaxed: the exchange alone ensures that only one thread registers the handler. Miri runs no handlers.
    if !registered.swap(true, Ordering::Relaxed) && !cfg!(miri) {
        // SAFETY: the handler stays loaded as long as the process runs, and never unwinds: an `extern "C"` function aborts
        // instead.
        unsafe { libc::atexit(handler) };
    }
}
