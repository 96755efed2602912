//! Behavior that a real driver may have but the mock driver lacks by default. A test or the environment turns on the switches.

use std::sync::atomic::{AtomicU64, Ordering};

/// A switch of the mock driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deviation {
    /// The handle of a context is reused after a reset.
    RecurringHandles,
    /// Host memory, registrations and device memory are freed with their context.
    ResetUnmaps,
    /// Use of a destroyed event aborts the process.
    DeadEventAborts,
    /// A copy that reads memory which the device may not access loses the device.
    StickyFaults,
    /// Copies of up to 64 KiB may span any memory.
    SmallCopies,
    /// A refused NUMA node returns 101.
    OtherCodes,
    /// `cuMemHostRegister` returns 801, as under confidential computing.
    NoRegistering,
    /// All streams are in a green context.
    GreenStreams,
}

impl Deviation {
    /// All switches.
    pub const ALL: [Self; 8] = [
        Self::RecurringHandles,
        Self::ResetUnmaps,
        Self::DeadEventAborts,
        Self::StickyFaults,
        Self::SmallCopies,
        Self::OtherCodes,
        Self::NoRegistering,
        Self::GreenStreams,
    ];

    pub(crate) fn bit(self) -> u64 {
        1 << self as u64
    }

    /// Returns the switch with this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|deviation| format!("{deviation:?}") == name)
    }
}

static ON: AtomicU64 = AtomicU64::new(0);

/// Turns these switches on, one bit each, and all others off.
pub(crate) fn set(bits: u64) {
    // Relaxed: a test sets the switches before the calls that they affect.
    ON.store(bits, Ordering::Relaxed);
}

/// Returns whether a switch is on.
pub(crate) fn is_on(deviation: Deviation) -> bool {
    ON.load(Ordering::Relaxed) & deviation.bit() != 0
}
