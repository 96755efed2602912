//! A fence between a store and a later load, cut in two unequal halves: one thread often and for nothing, another seldom
//! and for both.
//!
//! A thread that stores A and then loads B, and one that stores B and then loads A, must not both miss the other's store.
//! That takes a fence on each side, some twenty cycles each. Where the kernel can interrupt every core that runs this
//! process (`membarrier`), the rare side asks it to, and the frequent side needs to keep only the compiler from moving
//! things about. Where it cannot, [`available`] says so; under a model both halves are the plain fence.

/// Whether [`heavy`] does what [`light`] relies on. Asks the kernel once.
pub(super) fn available() -> bool {
    imp::available()
}

/// The frequent half.
#[inline(always)]
pub(super) fn light() {
    imp::light();
}

/// The rare half: some microseconds.
#[cold]
pub(super) fn heavy() {
    imp::heavy();
}

#[cfg(any(loom, miri))]
mod imp {
    use crate::sync::atomic::{Ordering, fence};

    pub(super) fn available() -> bool {
        true
    }

    pub(super) fn light() {
        // SeqCst: the fence of the textbook.
        fence(Ordering::SeqCst);
    }

    pub(super) fn heavy() {
        // SeqCst: the fence of the textbook.
        fence(Ordering::SeqCst);
    }
}

#[cfg(all(target_os = "linux", not(any(loom, miri))))]
#[allow(unsafe_code)] // One system call.
mod imp {
    use std::sync::OnceLock;
    use std::sync::atomic::{Ordering, compiler_fence};
    use std::time::Duration;

    pub(super) fn available() -> bool {
        static REGISTERED: OnceLock<bool> = OnceLock::new();
        *REGISTERED.get_or_init(|| membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED))
    }

    #[inline(always)]
    pub(super) fn light() {
        // SeqCst, for the compiler alone: the processor's part is `heavy`'s.
        compiler_fence(Ordering::SeqCst);
    }

    pub(super) fn heavy() {
        // Registered, the call fails only for want of memory or where a sandbox came later. A store that a core has kept
        // to itself for a millisecond does not exist.
        if !membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: the call reads and writes no memory of this process.
        let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        answer == 0
    }
}

#[cfg(not(any(target_os = "linux", loom, miri)))]
mod imp {
    use std::sync::atomic::{Ordering, fence};

    pub(super) fn available() -> bool {
        false
    }

    pub(super) fn light() {
        // SeqCst: never relied upon here, and right all the same.
        fence(Ordering::SeqCst);
    }

    pub(super) fn heavy() {
        // SeqCst: as above.
        fence(Ordering::SeqCst);
    }
}
