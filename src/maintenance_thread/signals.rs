//! The signals of a thread that the program did not start.
#![allow(unsafe_code)] // Calls libc.

/// Leaves signals to the program's own threads; those of a fault come to the thread that caused them.
#[cfg(not(miri))]
pub(crate) fn block() {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];
    let mut blocked = std::mem::MaybeUninit::uninit();
    // SAFETY: fills in the set.
    unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
    // SAFETY: just filled in.
    let mut blocked = unsafe { blocked.assume_init() };
    for fault in faults {
        // SAFETY: a valid set and a valid number.
        unsafe { libc::sigdelset(&mut blocked, fault) };
    }
    // SAFETY: changes the mask of this thread alone.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, std::ptr::null_mut()) };
}

/// Miri has no signals.
#[cfg(miri)]
pub(crate) fn block() {}
