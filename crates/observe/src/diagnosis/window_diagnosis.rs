//! The result of a diagnosis: a cause, the evidence, the remedy and the seconds lost.

use std::fmt;

use super::words::seconds;

/// Less lost time than this is not printed.
const SHOWN_NS: u64 = 1_000_000;

macro_rules! causes {
    ($($(#[$doc:meta])+ $cause:ident = $name:literal,)+) => {
        /// The cause of lost time in a pool. The field `is_alarm` of a diagnosis tells whether it is a problem.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub enum Cause {
            $($(#[$doc])+ $cause,)+
        }

        impl Cause {
            /// All causes, in the order of the variants.
            pub const ALL: &[Self] = &[$(Self::$cause),+];
            /// The names of all causes, in the order of the variants.
            pub const NAMES: &[&str] = &[$($name),+];

            /// The name in log lines and statistics, such as `stuck_copy`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$cause => $name,)+
                }
            }
        }
    };
}
causes! {
    /// Little time is lost.
    Healthy = "healthy",
    /// The pool is growing.
    WarmingUp = "warming_up",
    /// Copies use pageable memory.
    NotPinned = "not_pinned",
    /// Requests wait and are served, and nothing shows that the consumer was ever idle.
    PoolFull = "pool_full",
    /// Most requests miss, with a length that was not requested recently.
    SizesNeverRecur = "sizes_never_recur",
    /// Memory is repeatedly pinned and unpinned, evicted and missed, or remapped between sizes.
    Thrashing = "thrashing",
    /// The backend refuses memory while most of the pool's memory is unused.
    IdleHoard = "idle_hoard",
    /// The backend refuses memory although most of the pool's memory is in use.
    MemoryRefused = "memory_refused",
    /// Requests fail or wait long, threads wait for each other's buffers, or this pool keeps most of a shared limit.
    LimitTooSmall = "limit_too_small",
    /// Requests wait because filled buffers queue for the consumer; more memory would only lengthen that queue.
    SlowConsumer = "slow_consumer",
    /// Other processes hold the memory under a shared limit.
    OtherProcess = "other_process",
    /// One tag holds more and more buffers, and none is returned.
    Leak = "leak",
    /// A copy has been in flight for 30 s.
    StuckCopy = "stuck_copy",
}

/// Time that all threads of the program lost in a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lost {
    /// Wall-clock length of the window.
    pub window_us: u64,
    pub waiting_ns: u64,
    pub pinning_ns: u64,
    pub moving_ns: u64,
}

impl Lost {
    pub fn total_ns(&self) -> u64 {
        self.waiting_ns.saturating_add(self.pinning_ns).saturating_add(self.moving_ns)
    }

    /// Formats the total. It may exceed the length of the window, since each waiting thread loses time.
    fn total(&self) -> String {
        format!("all threads lost {} in {}", seconds(self.total_ns()), seconds(self.window_us.saturating_mul(1000)))
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.total())?;
        let parts = [("waiting", self.waiting_ns), ("pinning", self.pinning_ns), ("remapping", self.moving_ns)];
        let parts = parts.iter().filter(|(_, ns)| *ns >= SHOWN_NS);
        let parts: Vec<_> = parts.map(|(doing, ns)| format!("{doing} {}", seconds(*ns))).collect();
        if parts.is_empty() { Ok(()) } else { write!(f, " ({})", parts.join(", ")) }
    }
}

/// The finding and the remedy for a failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize))]
pub struct LikelyCause {
    pub found: String,
    pub remedy: String,
}

/// A cause with its evidence and remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowDiagnosis {
    pub cause: Cause,
    /// True for a problem that the remedy fixes.
    pub is_alarm: bool,
    /// The finding: one sentence without a full stop.
    pub found: String,
    /// Further findings, one sentence each.
    pub evidence: Vec<String>,
    /// `None` if nothing needs to be done.
    pub remedy: Option<String>,
    /// A setting that fixes the problem, with its value.
    pub setting: Option<(&'static str, u64)>,
    /// Whether the program sets the setting in its code, so that the setting's variable has no effect.
    pub(super) is_in_code: bool,
    pub lost: Lost,
    /// The recommended size in bytes or buffers. A larger size is logged again.
    pub(super) size: u64,
}

/// The log line.
impl fmt::Display for WindowDiagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause.name(), self.found)?;
        if self.lost.total_ns() >= SHOWN_NS {
            write!(f, " ({})", self.lost.total())?;
        }
        self.remedy.as_ref().map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

impl WindowDiagnosis {
    /// Cause, evidence and remedy, one per line, as `why` prints them.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!("{}: {}", self.cause.name(), self.found), format!("  {}", self.lost)];
        lines.extend(self.evidence.iter().map(|line| format!("  {line}")));
        lines.extend(self.remedy.iter().map(|remedy| format!("  to do: {remedy}")));
        let place = if self.is_in_code { "in the program, set" } else { "export" };
        lines.extend(self.setting.iter().map(|(name, value)| format!("  {place} {name}={value}")));
        lines
    }
}
