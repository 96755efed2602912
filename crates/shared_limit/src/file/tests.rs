use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::*;
use pinpool_os::fork;

/// A forked child. Dropping it kills the process and waits for its end.
pub(crate) struct Child(pub(crate) libc::pid_t);

impl Child {
    /// Forks a child that runs `work`, reports the outcome by one byte, keeps the result, and sleeps.
    pub(crate) fn that<T>(work: impl FnOnce() -> T) -> Self {
        let (mut ends, mut byte) = ([0; 2], 0_u8);
        // SAFETY: the call writes two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: the descriptors are new, and nothing else owns them.
        let [reader, writer] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // SAFETY: the child works on its one thread and never unwinds; the allocator survives a fork.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: the call takes a number. The alarm ends a child that the test has not killed.
            unsafe { libc::alarm(30) };
            let kept = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            let done = u8::from(kept.is_ok());
            // SAFETY: the call reads one byte, which is `done`.
            unsafe { libc::write(writer.as_raw_fd(), (&raw const done).cast(), 1) };
            loop {
                // SAFETY: the call only sleeps until a signal.
                unsafe { libc::pause() };
            }
        }
        drop(writer);
        let child = Self(child);
        // SAFETY: the call writes at most one byte, into `byte`.
        assert_eq!(unsafe { libc::read(reader.as_raw_fd(), (&raw mut byte).cast(), 1) }, 1);
        assert_eq!(byte, 1, "the child's work succeeded");
        child
    }

    pub(crate) fn kill(self) {}
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: this test created the child and has not waited for it yet.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: as above.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

#[test]
fn locks_end_with_their_process_despite_a_shared_description() {
    let file = tempfile::tempfile().unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let no_fork = fork::delay_forks();
    let again = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let other = LockFile::new(again(), &no_fork).unwrap();
    let held = again();
    // The copy represents the descriptor of a child that was created between opening and listing, or without `fork`.
    let _copy = held.try_clone().unwrap();
    let held = LockFile::new(held, &no_fork).unwrap();
    drop(no_fork);
    assert!(held.try_lock_slot(0).unwrap());
    assert!(!other.try_lock_slot(0).unwrap());
    drop(held);
    assert!(other.try_lock_slot(0).unwrap());
}
