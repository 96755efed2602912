//! What can be set, from where, and what follows from it.
//!
//! ```text
//!   code ──┐
//!          ├──▶ Settings (what was set) ──resolve──▶ Config (what holds)
//!   env  ──┘        code wins                 unreadable values and contradictions are errors
//! ```
//!
//! Prints nothing, logs nothing.

use std::path::{Path, PathBuf};

use pinpool_os::host::PressureGauge;

use crate::backend::Backend;
pub use crate::backend::HugeTlb;

pub mod env;
mod settings;
pub mod text;

pub use self::env::{BadVariable, EnvReport};
pub use self::settings::Config;
pub(crate) use self::settings::{Settings, for_each_setting};
pub use self::text::ParseError;
pub use crate::in_flight::FenceKind;
pub use crate::ledger::LedgerName;

/// A set of rules that a pool follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Preset {
    /// TensorFlow's rules over an arena: misses and evictions cost nanoseconds, bytes are bounded and idle memory is
    /// given back.
    #[default]
    Adaptive,
    /// TensorFlow's `PoolAllocator`, exact to its counters and log lines: each miss is an allocation of its own.
    TensorFlow,
}

/// Most bytes that a pool holds, in use and idle.
///
/// Made from a number of bytes, from `None` for no ceiling, or by [`str::parse`] from what `PINPOOL_MAX_BYTES` takes. Of the
/// integers it takes `u64` alone: beside a second one `max_bytes(8 << 30)` would no longer be known to be a `u64`, would be
/// computed as `i32`, and be 0.
///
/// ```
/// let pool = pinpool::Pool::builder().max_bytes("1.5GiB".parse::<pinpool::Ceiling>()?).build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ceiling {
    /// A quarter of the memory that the control group, else the machine, has, divided by `PINPOOL_POOLS_PER_HOST`. All pools of
    /// the process with this ceiling share that quarter, undivided.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// The pool holds as many bytes as the back-end gives.
    None,
}

impl From<u64> for Ceiling {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Option<u64>> for Ceiling {
    fn from(bytes: Option<u64>) -> Self {
        bytes.map_or(Self::None, Self::Bytes)
    }
}

/// What a get does that found no memory under the ceiling, not even after a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnFull {
    /// It fails.
    #[default]
    Error,
    /// It gives ordinary memory: [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned) is false.
    Pageable,
}

/// Where a pool learns that the machine is short of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PressureSource {
    /// The kernel's pressure files and the limits of control groups, as far as they exist.
    Kernel,
    /// One file in the kernel's format (`/proc/pressure/memory`).
    File(PathBuf),
    /// Nowhere: memory never counts as short.
    Off,
}

impl PressureSource {
    /// Reads it; `None` if it is off or the kernel offers no sign.
    pub(crate) fn open(&self) -> Option<PressureGauge> {
        match self {
            Self::Kernel => PressureGauge::of_kernel(Path::new("/")),
            Self::File(path) => Some(PressureGauge::of_file(path)),
            Self::Off => None,
        }
    }
}
