//! Threads that sleep on a word of a shared mapping, and are woken by other processes.
//!
//! The kernel compares the lower half of the word. A wake-up may come without a change, and a sleeper looks at the word
//! again.

use std::time::Duration;

use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Sleeps until `word` is changed and woken, at most for `limit` if there is one. Returns at once if the lower half of `word`
/// is not that of `seen`.
pub fn sleep_while(word: &AtomicU64, seen: u64, limit: Option<Duration>) {
    if word.load(Ordering::SeqCst) == seen {
        wait(word, seen, limit);
    }
}

/// Wakes all threads, of all processes, that sleep on `word`.
pub fn wake_all(word: &AtomicU64) {
    wake(word, i32::MAX);
}

/// Where the lower half of `word` is.
#[cfg(target_os = "linux")]
fn lower_half(word: &AtomicU64) -> *mut u32 {
    let half = word.as_ptr().cast::<u32>();
    if cfg!(target_endian = "big") { half.wrapping_add(1) } else { half }
}

#[cfg(all(target_os = "linux", not(miri)))]
#[allow(clippy::cast_possible_truncation, clippy::unnecessary_fallible_conversions)] // The lower half is meant; types vary.
fn wait(word: &AtomicU64, seen: u64, limit: Option<Duration>) {
    let limit = limit.map(|limit| {
        // SAFETY: a record of numbers, for which zeros are values.
        let mut time: libc::timespec = unsafe { std::mem::zeroed() };
        time.tv_sec = limit.as_secs().try_into().unwrap_or(libc::time_t::MAX);
        time.tv_nsec = limit.subsec_nanos().try_into().unwrap_or_default();
        time
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `word` is mapped while it is borrowed; the kernel reads it and the limit. Not private: other processes wake.
    unsafe { libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAIT, seen as u32, limit) };
}

/// Wakes at most `threads` of those that sleep on `word`.
#[cfg(all(target_os = "linux", not(miri)))]
pub(super) fn wake(word: &AtomicU64, threads: i32) {
    // SAFETY: as in `wait`; nothing is written.
    unsafe { libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAKE, threads) };
}

/// Nothing can be shared here, so nobody waits.
#[cfg(not(all(target_os = "linux", not(miri))))]
fn wait(_word: &AtomicU64, _seen: u64, limit: Option<Duration>) {
    std::thread::sleep(limit.unwrap_or(Duration::from_millis(1)).min(Duration::from_millis(1)));
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(super) fn wake(_word: &AtomicU64, _threads: i32) {}
