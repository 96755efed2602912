//! Memory that the program pins in place (`cuMemHostRegister`): no pool can serve it, so it is counted and logged at the
//! end, since a framework that registers gains nothing from this library.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{log, process};

static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts a registration of this process.
pub(crate) fn count(bytes: usize) {
    static ONCE: Once = Once::new();
    extern "C" fn at_exit() {
        // A forked child has a copy of its parent's counts.
        if process::uses_contexts_here() {
            // Relaxed, here and below: statistics.
            log::memory_registered(CALLS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        }
    }
    CALLS.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
    ONCE.call_once(|| {
        // SAFETY: the handler stays loaded; if the C library has no room for it, the log line is missing.
        let _missing = unsafe { libc::atexit(at_exit) };
    });
}
