//! Detects that an object was made before a `fork`, in the parent process.
//!
//! A child has none of the parent's threads, locks that they held stay locked, and page-locks and device mappings are not
//! inherited. So a pool made before the fork serves nothing in the child and keeps nothing there. Each pool stores the fork
//! generation in which it was made; a hit compares two numbers that no thread writes.
//!
//! A child made otherwise (a bare `clone`, `vfork`) is not detected.
#![allow(unsafe_code)] // Registers the handler.

use crate::sync::process::{AtomicBool, AtomicU32, Ordering};

/// Counts the forks between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The generation in which an object was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkGeneration(u32);

impl ForkGeneration {
    /// The current generation. The first call registers the handler that counts forks.
    pub(crate) fn now() -> Self {
        static IS_REGISTERED: AtomicBool = AtomicBool::new(false);
        // No `Once`: a child that was forked during the first call would wait for a thread that it does not have. Two threads
        // that both come first register twice, and then a fork counts twice. Release, Acquire: the handler is there.
        if !IS_REGISTERED.load(Ordering::Acquire) {
            register_handler();
            IS_REGISTERED.store(true, Ordering::Release);
        }
        // Relaxed, here and below: only the handler writes, before the child has a second thread.
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether the object was made in a parent of this process.
    #[inline(always)]
    pub(crate) fn is_stale(self) -> bool {
        GENERATION.load(Ordering::Relaxed) != self.0
    }
}

fn register_handler() {
    extern "C" fn in_the_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handler stays loaded as long as the process runs and only adds to an atomic number, which a child of a
    // process with threads may do. If registration fails for lack of memory, forks are not detected. Miri has no forks.
    #[cfg(not(miri))]
    unsafe {
        libc::pthread_atfork(None, None, Some(in_the_child))
    };
}
