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
pub struct ForkGeneration(u32);

impl ForkGeneration {
    /// The current generation. The first call registers the handler that counts forks.
    pub fn now() -> Self {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        extern "C" fn count() {
            GENERATION.fetch_add(1, Ordering::Relaxed);
        }
        call_in_children(&REGISTERED, count);
        Self(current())
    }

    /// Whether the object was made in a parent of this process.
    #[inline(always)]
    pub(crate) fn is_stale(self) -> bool {
        current() != self.0
    }

    /// As a number, which [`current`] returns until the next fork.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// The number of the current generation.
#[inline(always)]
pub(crate) fn current() -> u32 {
    // Relaxed: only the handler writes, before the child has a second thread.
    GENERATION.load(Ordering::Relaxed)
}

/// Calls `handler` in each child that this process forks from now on, before the fork returns there. It may only store to
/// atomics and to thread-locals without a destructor, and make calls that a signal handler may make. `registered` remembers that it was done. Not a lock: a child forked
/// while another thread holds it would wait for that thread. So threads that come at once register the handler twice, which
/// handlers must bear.
pub(crate) fn call_in_children(registered: &'static AtomicBool, handler: extern "C" fn()) {
    // Acquire, with the Release below: a thread that sees the mark forks with the handler registered.
    if registered.load(Ordering::Acquire) {
        return;
    }
    // SAFETY: the handler stays loaded as long as the process runs and does what a child of a process with threads may do,
    // by the contract above. If registration fails for lack of memory, forks are not detected. Miri has no forks.
    #[cfg(not(miri))]
    unsafe {
        libc::pthread_atfork(None, None, Some(handler))
    };
    #[cfg(miri)]
    let _ = handler;
    registered.store(true, Ordering::Release);
}
