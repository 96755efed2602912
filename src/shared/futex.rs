//! Waits for a word of shared memory to change.
#![allow(unsafe_code)] // Calls the kernel.

use std::time::Duration;

use crate::sync::process::{AtomicU32, Ordering};

/// A word that is counted up, and the processes that wait for it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Bell {
    rings: AtomicU32,
    /// Too high by those that died waiting, which costs a call of the kernel at each ring.
    waiting: AtomicU32,
}

impl Bell {
    /// Wakes `count` that wait; costs no call of the kernel while none does.
    pub(super) fn ring(&self, count: i32) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // SAFETY: the address of a word that is mapped.
            unsafe { libc::syscall(libc::SYS_futex, self.rings.as_ptr(), libc::FUTEX_WAKE, count) };
        }
    }

    /// Calls `found` until it finds something, after each ring or when `slice` has passed; gives up when `is_late`. No ring is
    /// missed: one that comes after `found` has looked ends the wait that follows.
    pub(super) fn wait<T, E>(
        &self,
        slice: Duration,
        mut is_late: impl FnMut() -> bool,
        mut found: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let outcome = loop {
            let seen = self.rings.load(Ordering::SeqCst);
            match found() {
                Ok(None) if !is_late() => self.sleep(seen, slice),
                outcome => break outcome,
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    fn sleep(&self, seen: u32, slice: Duration) {
        let nanos = libc::c_long::from(i32::try_from(slice.subsec_nanos()).unwrap_or_default());
        let seconds = libc::time_t::try_from(slice.as_secs()).unwrap_or(1);
        let time = libc::timespec { tv_sec: seconds, tv_nsec: nanos };
        // The file is shared between processes, so the futex is not a private one.
        // SAFETY: the address of a word that is mapped, and a time.
        unsafe { libc::syscall(libc::SYS_futex, self.rings.as_ptr(), libc::FUTEX_WAIT, seen, &raw const time) };
    }
}
