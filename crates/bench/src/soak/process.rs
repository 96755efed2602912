//! Memory, descriptors and threads of this process, as the kernel counts them.

use std::fs;

use serde::Serialize;

/// A sample of the process; unreadable values are 0.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct ProcessUse {
    pub(super) resident_bytes: u64,
    pub(super) descriptors: u64,
    pub(super) threads: u64,
}

impl ProcessUse {
    pub(super) fn now() -> ProcessUse {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| -> u64 {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        // The directory is read through a separate descriptor.
        let descriptors = fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1));
        ProcessUse {
            resident_bytes: field("VmRSS:") * 1024,
            descriptors: descriptors as u64,
            threads: field("Threads:"),
        }
    }
}
