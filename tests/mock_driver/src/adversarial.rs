//! Behaviour that a real driver may have and the mock driver lacks by default: one switch each, turned on by a test or the environment.
//!
//! | switch | the driver |
//! | --- | --- |
//! | `recurring-handles` | reuses the handle of a context after a reset |
//! | `reset-unmaps` | frees host memory, registrations and device memory with their context |
//! | `dead-event-aborts` | aborts the process when a destroyed event is used |
//! | `sticky-faults` | loses the device when a copy reads memory that it may not access |
//! | `small-copies` | accepts copies of up to 64 KiB across any memory |
//! | `other-codes` | returns 101 when it refuses a NUMA node |
//! | `no-registering` | returns 801 from `cuMemHostRegister`, as under confidential computing |
//! | `green-streams` | creates all streams in a green context |

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! switches {
    ($($name:ident = $text:literal,)*) => {
        /// A switch of the mock driver, named as in the docs of the crate.
        #[allow(missing_docs, reason = "each has a row in the table of `adversarial`")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Deviation {
            $($name,)*
        }

        impl Deviation {
            /// All switches.
            pub const ALL: &[Deviation] = &[$(Deviation::$name),*];

            /// The name in `MOCK_DRIVER_ADVERSARIAL`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Deviation::$name => $text,)*
                }
            }
        }
    };
}

switches! {
    RecurringHandles = "recurring-handles",
    ResetUnmaps = "reset-unmaps",
    DeadEventAborts = "dead-event-aborts",
    StickyFaults = "sticky-faults",
    SmallCopies = "small-copies",
    OtherCodes = "other-codes",
    NoRegistering = "no-registering",
    GreenStreams = "green-streams",
}

impl Deviation {
    pub(crate) fn bit(self) -> u64 {
        1 << self as u64
    }

    /// The switch with this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|deviation| deviation.name() == name)
    }
}

static ON: AtomicU64 = AtomicU64::new(0);

/// Turns these switches on, a bit each, and all others off.
pub(crate) fn set(bits: u64) {
    // Relaxed: a test sets them before the calls that they are for.
    ON.store(bits, Ordering::Relaxed);
}

/// Returns whether a switch is on.
pub(crate) fn is_on(deviation: Deviation) -> bool {
    ON.load(Ordering::Relaxed) & deviation.bit() != 0
}
