//! Threads that sleep on a word of a shared mapping, and are woken by other processes.
//!
//! The kernel compares the lower half of the word. Wake-ups may be spurious, so a sleeper checks the word again.

use std::time::Duration;

use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

/// Sleeps until another thread changes `word` and wakes the threads that sleep on it, but at most for `limit`. Returns
/// immediately if `word` differs from `seen`. If `word` changes after that comparison, the kernel compares only its lower half.
pub(crate) fn sleep_while(word: &AtomicU64, seen: u64, limit: Duration) {
    if word.load(Ordering::SeqCst) == seen {
        wait(word, seen, limit);
    }
}

/// Returns the address of the lower half of `word`.
#[cfg(target_os = "linux")]
fn lower_half(word: &AtomicU64) -> *mut u32 {
    let half = word.as_ptr().cast::<u32>();
    if cfg!(target_endian = "big") { half.wrapping_add(1) } else { half }
}

#[cfg(all(target_os = "linux", not(miri)))]
#[allow(clippy::cast_possible_truncation, clippy::unnecessary_fallible_conversions)] // The lower half is meant; types vary.
fn wait(word: &AtomicU64, seen: u64, limit: Duration) {
    // SAFETY: `timespec` consists of numbers, for which zero is a valid value.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    time.tv_sec = limit.as_secs().try_into().unwrap_or(libc::time_t::MAX);
    time.tv_nsec = limit.subsec_nanos().try_into().unwrap_or_default();
    // SAFETY: `word` is mapped while it is borrowed, and the kernel reads only `word` and the time. The futex is not private,
    // because other processes wake its sleepers.
    unsafe { libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAIT, seen as u32, &raw const time) };
}

/// Wakes at most `threads` threads, of all processes, that sleep on `word`.
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) fn wake(word: &AtomicU64, threads: i32) {
    // SAFETY: as in `wait`; the kernel writes to no memory.
    unsafe { libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAKE, threads) };
}

/// Sleeps for at most 1 ms and ignores `word`: no memory can be shared on this system, so no other process wakes a thread.
#[cfg(not(all(target_os = "linux", not(miri))))]
fn wait(_word: &AtomicU64, _seen: u64, limit: Duration) {
    std::thread::sleep(limit.min(Duration::from_millis(1)));
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(crate) fn wake(_word: &AtomicU64, _threads: i32) {}
