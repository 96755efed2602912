//! Knows that this process is a child of `fork`: what was made before is the parent's.
//!
//! A child has none of the parent's threads, locks that they held stay locked, and page-locks and device mappings are not
//! inherited. So a pool made before the fork serves nothing in the child and takes nothing back. Each pool remembers the
//! generation in which it was made; a hit compares two numbers that nobody writes.
//!
//! A child made by other means than `fork` (a bare `clone`, `vfork`) is not noticed.
#![allow(unsafe_code)] // Registers the handler.

use std::sync::Once;

use crate::sync::process::{AtomicU32, Ordering};

/// Forks between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// When something was made, in forks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkGeneration(u32);

impl ForkGeneration {
    /// Now. From here on forks are counted.
    pub(crate) fn now() -> Self {
        static WATCH: Once = Once::new();
        // Miri knows no forks.
        WATCH.call_once(|| {
            if !cfg!(miri) {
                watch()
            }
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Was it in a parent of this process?
    #[inline(always)]
    pub(crate) fn is_stale(self) -> bool {
        // Relaxed: only the handler writes, before the child has a second thread.
        GENERATION.load(Ordering::Relaxed) != self.0
    }
}

fn watch() {
    extern "C" fn in_the_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handler is a function of this process for as long as it runs, and does nothing but add to a number,
    // which a child of a process with threads may do. Without memory for the list, forks go unnoticed.
    unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
}
