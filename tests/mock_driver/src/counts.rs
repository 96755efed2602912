//! Pinned bytes, counters for tests, misuse, and the report at the end of the process.

use std::sync::{LazyLock, Mutex};

use crate::code::Code;
use crate::faults;
use crate::sync::lock;

/// All counts at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Bytes of host memory pinned now: allocated, registered or created as physical granules.
    pub pinned_bytes: u64,
    /// Most bytes pinned at once since the last reset.
    pub peak_pinned_bytes: u64,
    /// Live blocks of `cuMemHostAlloc`.
    pub host_allocations: u64,
    /// Live registrations.
    pub registrations: u64,
    /// Live physical granules of `cuMemCreate`, mapped or not.
    pub granules: u64,
    /// Live mappings of granules.
    pub mappings: u64,
    /// Live address reservations.
    pub reservations: u64,
    /// Live blocks of device memory.
    pub device_allocations: u64,
    /// Live created streams.
    pub streams: u64,
    /// Live events.
    pub events: u64,
    /// Retained primary contexts.
    pub contexts: u64,
    /// Enqueued operations that are not complete.
    pub work_in_flight: u64,
    /// Calls of `cuMemFreeHost`, `cuMemHostUnregister` or `cuMemFree` that found work in flight, and so blocked all threads.
    pub frees_with_work_in_flight: u64,
    /// Captures invalidated by a forbidden call.
    pub invalidated_captures: u64,
}

#[derive(Default)]
struct Recorded {
    counts: Counts,
    pin_limit_bytes: Option<u64>,
    wrong_uses: Vec<String>,
}

static RECORDED: LazyLock<Mutex<Recorded>> = LazyLock::new(Mutex::default);

/// Counts pinned bytes. Fails if they would exceed the limit.
pub(crate) fn pin(bytes: u64) -> Result<(), Code> {
    let Recorded { counts, pin_limit_bytes, .. } = &mut *lock(&RECORDED);
    let pinned_bytes = counts.pinned_bytes.saturating_add(bytes);
    if pin_limit_bytes.is_some_and(|limit_bytes| pinned_bytes > limit_bytes) {
        return Err(Code::OUT_OF_MEMORY);
    }
    counts.pinned_bytes = pinned_bytes;
    counts.peak_pinned_bytes = counts.peak_pinned_bytes.max(pinned_bytes);
    Ok(())
}

/// Subtracts pinned bytes.
pub(crate) fn unpin(bytes: u64) {
    lock(&RECORDED).counts.pinned_bytes -= bytes;
}

/// Refuses to pin more bytes than this.
pub(crate) fn limit_pinned(bytes: u64) {
    lock(&RECORDED).pin_limit_bytes = Some(bytes);
}

/// Counts a free that blocks all threads.
pub(crate) fn freed_with_work_in_flight() {
    lock(&RECORDED).counts.frees_with_work_in_flight += 1;
}

/// Counts a capture that a forbidden call invalidated.
pub(crate) fn invalidated_capture() {
    lock(&RECORDED).counts.invalidated_captures += 1;
}

/// Records a misuse.
pub(crate) fn misused(words: String) {
    lock(&RECORDED).wrong_uses.push(words);
}

/// Returns descriptions of all misuses.
pub(crate) fn wrong_uses() -> Vec<String> {
    lock(&RECORDED).wrong_uses.clone()
}

/// Returns the counts that this module keeps; the other fields are 0.
pub(crate) fn recorded() -> Counts {
    lock(&RECORDED).counts
}

/// Resets all counts except the bytes that are still pinned.
pub(crate) fn reset() {
    let mut recorded = lock(&RECORDED);
    let pinned_bytes = recorded.counts.pinned_bytes;
    let counts = Counts { pinned_bytes, peak_pinned_bytes: pinned_bytes, ..Counts::default() };
    *recorded = Recorded { counts, ..Recorded::default() };
}

/// Reports on stderr at the end of the process.
pub(crate) fn report_at_exit() {
    // SAFETY: a plain function that lives as long as the process: a driver is never unloaded.
    let _unreported = unsafe { libc::atexit(report) };
}

extern "C" fn report() {
    let Counts { frees_with_work_in_flight, peak_pinned_bytes, .. } = recorded();
    let mut text = format!(
        "mock driver: {frees_with_work_in_flight} frees with work in flight, {} misuses, \
         {peak_pinned_bytes} bytes pinned at most; calls:",
        wrong_uses().len()
    );
    for (name, count) in faults::all_calls() {
        text += &format!(" {name} {count}");
    }
    eprintln!("{text}");
}
