//! The system's monotonic clock as a number of nanoseconds. The difference of two `Instant`s would take four times as many
//! instructions.
#![allow(unsafe_code)] // Calls `clock_gettime`.

use libc::{CLOCK_MONOTONIC, clock_gettime, timespec};

/// Returns the nanoseconds since a moment before the process started.
pub fn monotonic_ns() -> u64 {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes only to `now`. Every system has this clock, so the call cannot fail.
    unsafe { clock_gettime(CLOCK_MONOTONIC, &raw mut now) };
    // Neither field is negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
