//! The limit `auto`: a share of the memory that the process may use. A tick sets it when a cgroup limit has changed.
//!
//! Free memory changes all the time, also by what the pool itself holds, so it alone changes no limit.

use pinpool_os::words::Size;
use std::path::PathBuf;

use crate::config::Limit;
use crate::policy;
use pinpool_os::fork::OfProcess;
use pinpool_os::host::{LimitOrigin, MemoryGauge};
use pinpool_os::sync::plain::Mutex;

/// Between two readings of the limits, which cost system calls.
const READ_EVERY_US: u64 = 1_000_000;

/// Where the limit of a pool comes from.
#[derive(Debug)]
pub(crate) struct AutoLimit {
    /// The root of the file system.
    pub(crate) root: PathBuf,
    /// The most that the process may lock, which no limit exceeds.
    pub(crate) lock_limit_bytes: Option<u64>,
    /// `None` if the memory of the machine is unknown.
    gauge: Option<MemoryGauge>,
    /// The limit of the machine or its cgroup that `auto` was computed from.
    followed: Mutex<Option<(u64, LimitOrigin)>>,
}

/// The root, time and limit of a reading.
type Reading = (PathBuf, u64, (u64, LimitOrigin));

/// The last reading, which all pools of the process use for [`READ_EVERY_US`].
static LAST: OfProcess<Mutex<Option<Reading>>> = OfProcess::new(Mutex::default);

impl AutoLimit {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { gauge: MemoryGauge::open(&root), root, lock_limit_bytes: None, followed: Mutex::default() }
    }

    /// `max_bytes` in bytes for pools that hold `held_bytes`, and in words. If it is `auto`, it is followed from now on.
    pub(crate) fn set(&self, max_bytes: Limit, held_bytes: u64) -> (Option<u64>, String) {
        let mut followed = self.followed.lock();
        *followed = None;
        let (bytes, words) = match max_bytes {
            Limit::Unlimited => (None, "none".to_owned()),
            Limit::Bytes(bytes) => (Some(bytes), Size(bytes).to_string()),
            Limit::Auto => match self.share(held_bytes) {
                None => (None, "none (the machine's memory is unknown)".to_owned()),
                Some((bytes, words, limit)) => {
                    *followed = Some(limit);
                    (Some(bytes), format!("{} ({words})", Size(bytes)))
                }
            },
        };
        (self.within_lock_limit(bytes), words)
    }

    /// The new limit and why, if it is `auto`, a reading is due at `now_us`, and the cgroup limit has changed.
    pub(super) fn change(&self, now_us: u64, held_bytes: impl FnOnce() -> u64) -> Option<(Option<u64>, String)> {
        // One thread at a time is enough.
        let mut followed = self.followed.try_lock()?;
        let followed = followed.as_mut()?;
        let limit = self.recent_limit(now_us)?;
        if limit == *followed {
            return None;
        }
        *followed = limit;
        let (bytes, words, _) = self.share(held_bytes())?;
        Some((self.within_lock_limit(Some(bytes)), words))
    }

    /// The limit of the machine or its cgroup, at most [`READ_EVERY_US`] old.
    fn recent_limit(&self, now_us: u64) -> Option<(u64, LimitOrigin)> {
        let mut last = LAST.get().lock();
        if let Some((root, at_us, limit)) = &*last
            && *root == self.root
            && now_us.wrapping_sub(*at_us) < READ_EVERY_US
        {
            return Some(limit.clone());
        }
        let limit = self.gauge.as_ref()?.limit();
        *last = Some((self.root.clone(), now_us, limit.clone()));
        Some(limit)
    }

    /// The share of pools that hold `held_bytes`, which are available to them alone; in words; and the limit that it is of.
    fn share(&self, held_bytes: u64) -> Option<(u64, String, (u64, LimitOrigin))> {
        let memory = self.gauge.as_ref()?.read()?;
        let bytes = policy::default_limit(memory.total_bytes, memory.available_bytes.saturating_add(held_bytes));
        let words = format!("a quarter of {}, {}", Size(memory.total_bytes), memory.origin);
        Some((bytes, words, (memory.total_bytes, memory.origin)))
    }

    fn within_lock_limit(&self, max_bytes: Option<u64>) -> Option<u64> {
        self.lock_limit_bytes.into_iter().chain(max_bytes).min()
    }
}
