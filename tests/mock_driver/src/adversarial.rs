//! What a real driver may do and the mock driver does not automatically: a switch for each, off until a test or the environment turns it
//! on.
//!
//! | switch | the driver |
//! | --- | --- |
//! | `recurring-handles` | gives a context that is made after a reset the handle of the old one |
//! | `reset-unmaps` | takes the memory of a context with the context: the host's, registrations, the device's |
//! | `dead-event-aborts` | ends the process at the use of an event that is not there |
//! | `sticky-faults` | loses the device at a copy from memory that it may not access |
//! | `small-copies` | takes copies up to 64 KiB whatever memory they cross |
//! | `other-codes` | answers 101 if it refuses a NUMA node |
//! | `no-registering` | answers 801 to `cuMemHostRegister`, as under confidential computing |
//! | `green-streams` | has all streams in a green context |

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

/// Whether a switch is on.
pub(crate) fn is(deviation: Deviation) -> bool {
    ON.load(Ordering::Relaxed) & deviation.bit() != 0
}
