//! What can be set, from where, and what follows from it.
//!
//! ```text
//!   code ──┐                                     ┌──▶ Config
//!          ├──▶ Settings (what was set) ──examine──┼──▶ errors: invalid values, contradictions
//!   env  ──┘        code wins                      └──▶ warnings: retired and unknown names, ignored values, settings without effect
//! ```
//!
//! Prints nothing, logs nothing.

use std::path::PathBuf;
use std::time::Duration;

use crate::backend::Backend;
pub use crate::backend::HugeTlb;

pub mod env;
mod settings;
pub mod text;

pub use self::env::EnvReport;
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
/// Made from a number of bytes, from `None` for no limit, or by [`str::parse`] from what `PINPOOL_MAX_BYTES` takes. Of the
/// integers it takes `u64` alone: beside a second one `max_bytes(8 << 30)` would no longer be known to be a `u64`, would be
/// computed as `i32`, and be 0.
///
/// ```
/// let pool = pinpool::Pool::builder().max_bytes("1.5GiB".parse::<pinpool::Limit>()?).build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// A quarter of the memory that the cgroup, else the machine, has. All pools of the process with this limit share that
    /// quarter.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// As many bytes as the backend can provide.
    Unlimited,
}

impl From<u64> for Limit {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Option<u64>> for Limit {
    fn from(bytes: Option<u64>) -> Self {
        bytes.map_or(Self::Unlimited, Self::Bytes)
    }
}

/// What happens when a request times out at the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnFull {
    /// The request fails.
    #[default]
    Error,
    /// The request gets unpinned memory: [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned) is false.
    Pageable,
}

/// What code alone can set: no variable does.
#[derive(Debug, Clone, Default)]
pub struct CodeSettings {
    /// Whether the maintenance thread looks after the pool; `None` for yes.
    pub background_thread: Option<bool>,
    /// One request in this many keeps its call stack; 0 for none.
    pub call_stacks: u64,
    /// How the pool learns that a copy has completed.
    pub fence: FenceKind,
    /// Threads that touch new memory; `None` for one per core that the process may use.
    pub pin_threads: Option<usize>,
    /// How long a closing pool waits for copies in flight; `None` for 30 s.
    pub close_wait: Option<Duration>,
    /// A file to read memory pressure from; `None` for the kernel's signs.
    pub pressure: Option<PathBuf>,
}
