//! Where the ceiling of a pool comes from, and `auto`: a share of the memory that the process may use, which follows the limit
//! of its control group.
//!
//! The share is computed when a pool is made, and again when the limit has changed. What is free changes all the time, also
//! by what the pool itself holds, so it alone changes no ceiling.

use pinpool_os::words::Size;
use std::path::{Path, PathBuf};

use crate::config::Ceiling;
use crate::policy;
use pinpool_os::fork::OfProcess;
use pinpool_os::host::{HostMemory, LimitOrigin, MemoryGauge};
use pinpool_os::sync::plain::Mutex;

/// Between two readings of the limits, which cost system calls.
const READ_EVERY_US: u64 = 1_000_000;

/// A ceiling of `auto`.
#[derive(Debug)]
pub(crate) struct AutoCeiling {
    gauge: MemoryGauge,
    limit: (u64, LimitOrigin),
}

/// The last reading of the limits, which all pools of the process use for [`READ_EVERY_US`].
#[derive(Debug)]
struct Reading {
    root: PathBuf,
    at_us: u64,
    limit: (u64, LimitOrigin),
}

static LAST: OfProcess<Mutex<Option<Reading>>> = OfProcess::new(Mutex::default);

/// Where `auto` is read from.
#[derive(Debug, Clone)]
pub(crate) struct CeilingSource {
    /// The root of the file system.
    pub(crate) root: PathBuf,
    /// Most that the process may lock, which no ceiling passes.
    pub(crate) lock_limit_bytes: Option<u64>,
}

/// Where the ceiling of a pool comes from. A partition has no source: its ceiling is a number or none.
#[derive(Debug, Default)]
pub(super) struct CeilingControl(Mutex<Option<Origin>>);

#[derive(Debug)]
struct Origin {
    source: CeilingSource,
    /// While the ceiling is `auto`.
    auto: Option<AutoCeiling>,
}

impl CeilingControl {
    pub(super) fn begin(&self, source: CeilingSource, auto: Option<AutoCeiling>) {
        *self.0.lock() = Some(Origin { source, auto });
    }

    /// The bytes of `ceiling` for a pool that holds `held_bytes`, and why. From now on that is followed, or nothing.
    pub(super) fn set(&self, ceiling: Ceiling, held_bytes: u64) -> (Option<u64>, String) {
        let set_bytes = if let Ceiling::Bytes(bytes) = ceiling { Some(bytes) } else { None };
        let (mut max_bytes, mut why) = (set_bytes, "set_max_bytes".to_owned());
        if let Some(Origin { source, auto }) = &mut *self.0.lock() {
            *auto = None;
            if let Some((follows, bytes, share)) =
                matches!(ceiling, Ceiling::Auto).then(|| source.auto(held_bytes)).flatten()
            {
                (*auto, max_bytes, why) = (Some(follows), Some(bytes), share);
            }
            max_bytes = source.within_lock_limit(max_bytes);
        }
        (max_bytes, why)
    }

    /// The new ceiling and why, if `auto` holds and the limit of the control group has changed. That of all pools of the
    /// process follows it in `process`. `clock_us` is a time that other pools know too.
    pub(super) fn follow(
        &self,
        clock_us: u64,
        held_bytes: impl FnOnce() -> u64,
        process: impl FnOnce(&CeilingSource),
    ) -> Option<(Option<u64>, String)> {
        // Another thread that is at it is enough.
        let mut origin = self.0.try_lock()?;
        let Origin { source, auto } = origin.as_mut()?;
        let (bytes, why) = auto.as_mut()?.change(&source.root, clock_us, held_bytes)?;
        process(source);
        Some((source.within_lock_limit(Some(bytes)), why))
    }
}

impl CeilingSource {
    /// `auto` while the pool holds `held_bytes`, in bytes and in words; `None` where the memory of the machine is not known.
    pub(crate) fn auto(&self, held_bytes: u64) -> Option<(AutoCeiling, u64, String)> {
        let gauge = MemoryGauge::open(&self.root)?;
        let memory = gauge.read()?;
        let limit = (memory.total_bytes, memory.origin.clone());
        let auto = AutoCeiling { gauge, limit };
        let (bytes, why) = auto.share(&memory, held_bytes);
        Some((auto, bytes, why))
    }

    /// What the pools of a process may hold together while they hold `held_bytes`: no more than one alone.
    pub(crate) fn auto_of_process(&self, held_bytes: u64) -> u64 {
        self.auto(held_bytes).map_or(u64::MAX, |(_, bytes, _)| bytes)
    }

    /// `max_bytes`, or less where the process may lock less.
    fn within_lock_limit(&self, max_bytes: Option<u64>) -> Option<u64> {
        self.lock_limit_bytes.map(|limit_bytes| max_bytes.map_or(limit_bytes, |max| max.min(limit_bytes))).or(max_bytes)
    }
}

impl AutoCeiling {
    /// The new ceiling and its origin, if a reading is due and finds that the limit has changed. `held_bytes` are held by the
    /// pool, and so not available to others but to it.
    fn change(&mut self, root: &Path, clock_us: u64, held_bytes: impl FnOnce() -> u64) -> Option<(u64, String)> {
        let mut last = LAST.get().lock();
        let is_recent = |last: &Reading| last.root == root && clock_us.wrapping_sub(last.at_us) < READ_EVERY_US;
        if !last.as_ref().is_some_and(is_recent) {
            *last = Some(Reading { root: root.to_owned(), at_us: clock_us, limit: self.gauge.limit() });
        }
        let limit = last.as_ref().map(|last| &last.limit).filter(|limit| **limit != self.limit)?;
        self.limit = limit.clone();
        drop(last);
        Some(self.share(&self.gauge.read()?, held_bytes()))
    }

    fn share(&self, memory: &HostMemory, held_bytes: u64) -> (u64, String) {
        let HostMemory { total_bytes, available_bytes, ref origin } = *memory;
        let available_bytes = available_bytes.saturating_add(held_bytes);
        let bytes = policy::default_ceiling(total_bytes, available_bytes);
        (bytes, format!("a quarter of {}, {origin}", Size(total_bytes)))
    }
}
