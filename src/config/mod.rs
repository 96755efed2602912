//! Settings: their origin and their consequences.
//!
//! ```text
//!   code ──┐                                     ┌──▶ Config
//!          ├──▶ Settings (what was set) ─examine─┼──▶ errors: invalid values, contradictions
//!   env  ──┘        code wins                    └──▶ warnings: retired and unknown names, ignored values, settings without effect
//! ```
//!
//! This module prints nothing and logs nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::backend::Backend;
pub use crate::backend::HugeTlb;

pub mod env;
mod settings;
pub mod text;

pub(crate) use self::env::ResolvedSettings;
pub use self::settings::Config;
pub(crate) use self::settings::{Settings, for_each_setting};
pub use self::text::ParseError;
pub use crate::policy::Preset;
pub use crate::size_class::Rounding;

/// The limit on the bytes that a pool holds, in use and idle.
///
/// Converts from a number of bytes, and by [`str::parse`] from the values of `PINPOOL_MAX_BYTES`. `u64` is the only integer type
/// that converts. With a second integer type the literal in `max_bytes(8 << 30)` would be an `i32` and overflow.
///
/// ```
/// let pool = pinpool::Pool::builder().max_bytes("1.5GiB".parse::<pinpool::Limit>()?).build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// A quarter of the memory limit of the cgroup, or of the machine's memory if no cgroup limit is lower, but no more
    /// than is available. All pools of the process with this limit share it.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// As many bytes as the backend can provide.
    Unlimited,
}

impl Limit {
    pub(crate) fn bytes(self) -> Option<u64> {
        if let Self::Bytes(bytes) = self { Some(bytes) } else { None }
    }
}

impl From<u64> for Limit {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

/// The outcome of a request that finds no room: after its wait, or immediately if it exceeds the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnFull {
    /// An error.
    #[default]
    Error,
    /// Pageable memory: [`PinnedBuf::pinned_by`](crate::PinnedBuf::pinned_by) is `None`.
    Pageable,
}

/// The limit that a pool shares with other processes of this host (`PINPOOL_LEDGER`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SharedLimitChoice {
    /// No shared limit.
    #[default]
    None,
    /// The shared limit named `auto`, if the environment shows that this process is one of several on the host: a torchrun rank
    /// (`LOCAL_WORLD_SIZE` above 1, otherwise `RANK`, `LOCAL_RANK` or `TORCHELASTIC_RUN_ID`), or a Ray process (`RAY_JOB_ID` or
    /// `RAY_RAYLET_PID`).
    Auto,
    /// The shared limit with this name: up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    Named(String),
}

/// Converts the text of the variable: `none`, `auto` or a name. [`PoolBuilder::build`](crate::PoolBuilder::build) refuses an
/// invalid name.
impl<T: AsRef<str>> From<T> for SharedLimitChoice {
    fn from(text: T) -> Self {
        text.as_ref().parse().unwrap_or_else(|_| Self::Named(text.as_ref().to_owned()))
    }
}

/// The Unix socket that serves the statistics of a pool (`PINPOOL_SOCKET`). Converts from a path, which is a path even without
/// a slash, unlike in the variable.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatsSocket {
    /// A path that `pinpool top` finds by the process ID.
    Default,
    /// This path.
    Path(PathBuf),
}

impl<P: AsRef<Path>> From<P> for StatsSocket {
    fn from(path: P) -> Self {
        Self::Path(path.as_ref().to_owned())
    }
}

/// Settings that have no variable.
#[derive(Debug, Clone, Default)]
pub struct CodeOnlySettings {
    /// Whether the maintenance thread serves the pool; `None` means yes.
    pub maintenance_thread: Option<bool>,
    /// Whether the caller maintains the pool as the maintenance thread does, so that requests do not.
    pub maintained_by_caller: bool,
    /// One request in this many keeps its call stack; 0 means none.
    pub call_stacks: u64,
    /// Number of threads that touch new memory; `None` means one per core that the process may use.
    pub pin_threads: Option<usize>,
    /// The longest time that an ending pool waits for copies in flight; `None` means 30 s.
    pub copies_wait: Option<Duration>,
    /// The GPU of a pool without a device setting, if this process uses no GPU and the driver lists this one.
    pub default_device: Option<u32>,
    /// The variables that code sets.
    pub set_in_code: Vec<&'static str>,
    /// A file from which memory pressure is read; `None` means the kernel's reports.
    pub pressure: Option<PathBuf>,
}
