//! The limit `auto`: a share of the memory that the process may use. A tick sets it when a cgroup limit has changed.
//!
//! Free memory changes all the time, also by what the pool itself holds, so it alone changes no limit.

use pinpool_os::words::Size;
use std::path::PathBuf;

use crate::config::Limit;
use crate::policy;
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
    /// `None` where the memory of the machine is unknown.
    gauge: Option<MemoryGauge>,
    /// While the limit is `auto`.
    last: Mutex<Option<Reading>>,
}

/// The last reading.
#[derive(Debug)]
struct Reading {
    at_us: u64,
    limit: (u64, LimitOrigin),
}

impl AutoLimit {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { gauge: MemoryGauge::open(&root), root, lock_limit_bytes: None, last: Mutex::default() }
    }

    /// `max_bytes` in bytes for pools that hold `held_bytes`, and in words. If it is `auto`, it is followed from now on.
    pub(crate) fn set(&self, max_bytes: Limit, held_bytes: u64) -> (Option<u64>, String) {
        let mut last = self.last.lock();
        *last = None;
        let (bytes, words) = match max_bytes {
            Limit::Unlimited => (None, "none".to_owned()),
            Limit::Bytes(bytes) => (Some(bytes), Size(bytes).to_string()),
            Limit::Auto => match self.share(held_bytes) {
                None => (None, "none (the machine's memory is unknown)".to_owned()),
                Some((bytes, words, limit)) => {
                    *last = Some(Reading { at_us: 0, limit });
                    (Some(bytes), format!("{} ({words})", Size(bytes)))
                }
            },
        };
        (self.within_lock_limit(bytes), words)
    }

    /// The new limit and why, if it is `auto`, a reading is due at `now_us`, and the cgroup limit has changed.
    pub(super) fn change(&self, now_us: u64, held_bytes: impl FnOnce() -> u64) -> Option<(Option<u64>, String)> {
        // Another thread that is at it is enough.
        let mut last = self.last.try_lock()?;
        let last = last.as_mut().filter(|last| now_us.saturating_sub(last.at_us) >= READ_EVERY_US)?;
        last.at_us = now_us;
        let limit = self.gauge.as_ref()?.limit();
        if limit == last.limit {
            return None;
        }
        last.limit = limit;
        let (bytes, words, _) = self.share(held_bytes())?;
        Some((self.within_lock_limit(Some(bytes)), words))
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
