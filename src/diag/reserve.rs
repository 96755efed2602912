//! The lines about reserves.

use std::time::Duration;

use pinpool_os::words::{Size, Time};

use super::texts::{Limit, Node};
use super::{PoolLog, log};
use crate::backend::SourceError;

impl PoolLog {
    /// With the time that is `left`, if it is known.
    ///
    /// Progress of pinning `PINPOOL_RESERVE`. To do: nothing.
    pub(crate) fn reserving(&self, done_bytes: u64, of_bytes: u64, left: Option<Duration>) {
        let left = left.map_or_else(String::new, |left| format!(" left={}", Time(left)));
        log::info!(reserve, "{self}reserve: pinned={} of={}{left}", Size(done_bytes), Size(of_bytes));
    }

    /// The rest is pinned while the program runs. To do: nothing.
    pub(crate) fn reserve_begun(&self, done_bytes: u64, of_bytes: u64) {
        let (pinned, of) = (Size(done_bytes), Size(of_bytes));
        log::info!(reserve, "{self}reserve: pinning the rest in the background pinned={pinned} of={of}");
    }

    /// The reserve is complete. To do: nothing.
    pub(crate) fn reserve_done(&self, bytes: u64, took: Duration, numa_node: Option<u32>) {
        #[allow(clippy::cast_precision_loss)] // A rate.
        let rate = bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9;
        let (pinned, time, node) = (Size(bytes), Time(took), Node(numa_node));
        log::info!(reserve, "{self}reserve: complete pinned={pinned} time={time} rate={rate:.1}GB/s{node}");
    }

    /// The limit has no room for the rest; it continues automatically. To do: what the line says.
    pub(crate) fn reserve_waits(&self, done_bytes: u64, of_bytes: u64, max_bytes: Option<u64>) {
        let (pinned, of, max) = (Size(done_bytes), Size(of_bytes), Limit(max_bytes));
        log::warn!(
            reserve,
            "{self}reserve: waiting for room pinned={pinned} of={of} max={max}; raise PINPOOL_MAX_BYTES or lower PINPOOL_RESERVE"
        );
    }

    /// The rest was refused; the pool continues without it. To do: fix the reason in the line, then call `Pool::reserve`.
    pub(crate) fn reserve_stopped(&self, done_bytes: u64, of_bytes: u64, error: &SourceError) {
        let (pinned, of) = (Size(done_bytes), Size(of_bytes));
        log::warn!(
            reserve,
            "{self}reserve: stopped pinned={pinned} of={of}: {error}; then call Pool::reserve, or lower PINPOOL_RESERVE"
        );
    }

    /// Calls `huge_bytes`, which queries the kernel, only if the line is logged.
    ///
    /// The reserve is pinned; `huge` is its part in huge pages. To do: if few are huge, check `transparent_hugepage`.
    pub(crate) fn reserved(&self, bytes: u64, huge_bytes: impl Fn() -> u64, numa_node: Option<u32>) {
        let (bytes, node) = (Size(bytes), Node(numa_node));
        log::info!(reserve, "{self}reserve: bytes={bytes}{node} huge={}", Size(huge_bytes()));
    }

    /// There are too few huge pages, and others are used. To do: reserve more as the line says, or set `PINPOOL_HUGETLB=auto`.
    pub(crate) fn few_huge_pages(&self, lack: &SourceError) {
        log::warn!(reserve, "{self}huge_pages: too few, other pages are used: {lack}");
    }
}
