//! What the double owes and what went wrong: page-locked bytes, live things, misuse.
//!
//! Owns the counters a test asserts on. Never fails a call itself, except that page-locking past the limit is refused.

use std::sync::Mutex;

use crate::call::lock;
use crate::code::Code;

/// Everything countable, at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Figures {
    /// Bytes of host memory page-locked now: allocated, registered or created as physical granules.
    pub pinned_bytes: u64,
    /// The most there ever were since the last reset.
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
    /// Live streams that somebody created.
    pub streams: u64,
    /// Live events.
    pub events: u64,
    /// Primary contexts that somebody holds.
    pub contexts: u64,
    /// Pieces of work enqueued and not over.
    pub work_in_flight: u64,
    /// Calls of `cuMemFreeHost`, `cuMemHostUnregister` or `cuMemFree` that found work in flight, and so stopped everybody.
    pub frees_with_work_in_flight: u64,
    /// Captures spoiled by a call that is not allowed beside them.
    pub spoiled_captures: u64,
    /// Misuses seen; [`crate::Double::wrong_uses`] has their words.
    pub wrong_uses: u64,
}

struct Ledger {
    pinned_bytes: u64,
    peak_pinned_bytes: u64,
    pin_limit_bytes: u64,
    frees_with_work_in_flight: u64,
    spoiled_captures: u64,
    wrong_uses: Vec<String>,
}

static LEDGER: Mutex<Ledger> = Mutex::new(Ledger {
    pinned_bytes: 0,
    peak_pinned_bytes: 0,
    pin_limit_bytes: u64::MAX,
    frees_with_work_in_flight: 0,
    spoiled_captures: 0,
    wrong_uses: Vec::new(),
});

/// Takes page-locked bytes, or refuses.
pub(crate) fn pin(bytes: u64) -> Result<(), Code> {
    let mut ledger = lock(&LEDGER);
    let wanted = ledger.pinned_bytes.saturating_add(bytes);
    if wanted > ledger.pin_limit_bytes {
        return Err(Code::OUT_OF_MEMORY);
    }
    ledger.pinned_bytes = wanted;
    ledger.peak_pinned_bytes = ledger.peak_pinned_bytes.max(wanted);
    Ok(())
}

/// Gives page-locked bytes back.
pub(crate) fn unpin(bytes: u64) {
    lock(&LEDGER).pinned_bytes -= bytes;
}

/// From here on page-locking past this fails.
pub(crate) fn limit_pinned(bytes: u64) {
    lock(&LEDGER).pin_limit_bytes = bytes;
}

/// A free that stops everybody.
pub(crate) fn freed_with_work_in_flight() {
    lock(&LEDGER).frees_with_work_in_flight += 1;
}

/// A capture that a forbidden call spoiled.
pub(crate) fn spoiled_capture() {
    lock(&LEDGER).spoiled_captures += 1;
}

/// A misuse, in words.
pub(crate) fn misused(words: String) {
    lock(&LEDGER).wrong_uses.push(words);
}

/// The words of one misuse.
pub(crate) fn misuse(index: usize) -> Option<String> {
    lock(&LEDGER).wrong_uses.get(index).cloned()
}

/// The ledger's own part of the figures.
pub(crate) fn figures() -> Figures {
    let ledger = lock(&LEDGER);
    Figures {
        pinned_bytes: ledger.pinned_bytes,
        peak_pinned_bytes: ledger.peak_pinned_bytes,
        frees_with_work_in_flight: ledger.frees_with_work_in_flight,
        spoiled_captures: ledger.spoiled_captures,
        wrong_uses: ledger.wrong_uses.len() as u64,
        ..Figures::default()
    }
}

/// Forgets what happened; what is still pinned stays on the books.
pub(crate) fn reset() {
    let mut ledger = lock(&LEDGER);
    *ledger = Ledger {
        pinned_bytes: ledger.pinned_bytes,
        peak_pinned_bytes: ledger.pinned_bytes,
        pin_limit_bytes: u64::MAX,
        frees_with_work_in_flight: 0,
        spoiled_captures: 0,
        wrong_uses: Vec::new(),
    };
}
