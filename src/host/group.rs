//! One control group: its limits, what is used of them, and how often they were hit.
//!
//! | | version 2 | version 1 |
//! | --- | --- | --- |
//! | limits | `memory.max`, `memory.high` | `memory.limit_in_bytes`, `hierarchical_memory_limit` of `memory.stat` |
//! | used | `memory.current` | `memory.usage_in_bytes` |
//! | page cache | `inactive_file`, `active_file` | the same with `total_` before it |
//! | limit hits | `memory.events.local`, else `memory.events` | `memory.failcnt` |
//!
//! `memory.high` counts as a limit: above it the kernel slows every allocation down until memory was reclaimed, and
//! pinned memory cannot be.

use std::path::{Path, PathBuf};

use super::files::{Files, field};

/// Which of the kernel's two interfaces a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}

/// A directory of a control group hierarchy.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) version: Version,
    pub(super) dir: PathBuf,
}

/// A number that a group's memory must not pass, and the file that says so.
#[derive(Debug)]
pub(super) struct Limit {
    pub(super) bytes: u64,
    pub(super) file: PathBuf,
}

/// How often a group met its limits since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct LimitHits {
    /// An allocation met a limit, and something had to be reclaimed first.
    pub(super) reclaimed: u64,
    /// Reclaiming gave nothing more.
    pub(super) out_of_memory: u64,
}

impl Group {
    /// The tightest limit. Unlimited groups have none (version 2), or one that no machine reaches (version 1).
    pub(super) fn limit(&self, files: &Files) -> Option<Limit> {
        let of_file = |name| Some(Limit { bytes: files.number(self.file(name))?, file: self.file(name) });
        let limits = match self.version {
            Version::V2 => [of_file("memory.max"), of_file("memory.high")],
            // The second also knows of ancestors that are not mounted here.
            Version::V1 => [of_file("memory.limit_in_bytes"), self.hierarchical_limit(files)],
        };
        limits.into_iter().flatten().min_by_key(|limit| limit.bytes)
    }

    fn hierarchical_limit(&self, files: &Files) -> Option<Limit> {
        let file = self.file("memory.stat");
        Some(Limit { bytes: field(&files.read(&file)?, "hierarchical_memory_limit")?, file })
    }

    /// What is left of `limit` when the page cache that can be dropped has been.
    pub(super) fn available_bytes(&self, files: &Files, limit: &Limit) -> u64 {
        let usage = match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        let used = files.number(self.file(usage)).unwrap_or(0);
        let stat = files.read(self.file("memory.stat")).unwrap_or_default();
        limit.bytes.saturating_sub(used.saturating_sub(self.droppable_bytes(&stat)))
    }

    /// Pages of files, but those still to be written. Locked pages and shared memory are on other lists of the kernel.
    fn droppable_bytes(&self, stat: &str) -> u64 {
        let [inactive, active, dirty, writeback] = match self.version {
            Version::V1 => ["total_inactive_file", "total_active_file", "total_dirty", "total_writeback"],
            Version::V2 => ["inactive_file", "active_file", "file_dirty", "file_writeback"],
        };
        let bytes = |key| field(stat, key).unwrap_or(0);
        let cached = bytes(inactive).saturating_add(bytes(active));
        cached.saturating_sub(bytes(dirty).saturating_add(bytes(writeback)))
    }

    /// How often this group's own limits were hit; `None` where nobody counts it.
    pub(super) fn limit_hits(&self, files: &Files) -> Option<LimitHits> {
        if self.version == Version::V1 {
            let reclaimed = files.number(self.file("memory.failcnt"))?;
            return Some(LimitHits { reclaimed, out_of_memory: 0 });
        }
        // The other file adds up the groups below, whose limits are not ours; before Linux 5.2 it is all there is.
        let events = files.read(self.file("memory.events.local")).or_else(|| files.read(self.file("memory.events")))?;
        let count = |key| field(&events, key).unwrap_or(0);
        Some(LimitHits { reclaimed: count("max").saturating_add(count("high")), out_of_memory: count("oom") })
    }

    /// Whether the memory of the groups below counts here. Always so in version 2 and since Linux 5.11.
    pub(super) fn accounts_descendants(&self, files: &Files) -> bool {
        self.version == Version::V2 || files.number(self.file("memory.use_hierarchy")) != Some(0)
    }

    pub(super) fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.join(name)
    }
}
