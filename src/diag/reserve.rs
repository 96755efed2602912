//! The lines about reserves.

use std::time::Duration;

use super::{PoolLog, log};
use crate::backend::{PageTiers, SourceError};

impl PoolLog {
    /// With the time that is `left`, if it is known.
    ///
    /// `reserve: N of M bytes ...` (info): nothing: progress of pinning `PINPOOL_RESERVE`.
    pub(crate) fn reserving(&self, done_bytes: u64, of_bytes: u64, left: Option<Duration>) {
        let left = left.map_or_else(String::new, |left| format!(", {:.1} s to go", left.as_secs_f64()));
        log::info!(reserve, "{self}reserve: {done_bytes} of {of_bytes} bytes pinned{left}");
    }

    /// A reserve that is not waited for has its first step.
    ///
    /// `reserve: begun, N of M bytes ...` (info): nothing: with `PINPOOL_RESERVE_WAIT=0` the rest is pinned beside the
    /// program; a line for each quarter follows, with the time to go.
    pub(crate) fn reserve_begun(&self, done_bytes: u64, of_bytes: u64) {
        log::info!(
            reserve,
            "{self}reserve: begun, {done_bytes} of {of_bytes} bytes are there, the rest is pinned beside the program"
        );
    }

    /// The rest is there.
    ///
    /// `reserve: all is there, N bytes ...` (info): nothing: the line has the time and the rate.
    pub(crate) fn reserve_done(&self, bytes: u64, took: Duration, numa_node: Option<u32>) {
        let node = numa_node.map_or_else(String::new, |node| format!(", memory node {node}"));
        #[allow(clippy::cast_precision_loss)] // A rate.
        let rate = bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9;
        log::info!(reserve, "{self}reserve: all is there, {bytes} bytes in {took:?} ({rate:.1} GB/s){node}");
    }

    /// The ceiling leaves no room for the rest now.
    ///
    /// `reserve: waits for room, N of M bytes ...` (warn): raise `PINPOOL_MAX_BYTES`, or lower `PINPOOL_RESERVE`; it
    /// goes on by itself when there is room.
    pub(crate) fn reserve_waits(&self, done_bytes: u64, of_bytes: u64, max_bytes: Option<u64>) {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        log::warn!(
            reserve,
            "{self}reserve: waits for room, {done_bytes} of {of_bytes} bytes pinned under a ceiling of {max_bytes}: the rest \
             comes when there is some; raise PINPOOL_MAX_BYTES, or lower PINPOOL_RESERVE"
        );
    }

    /// The rest was refused.
    ///
    /// `reserve: stopped at N of M bytes ...` (warn): the line says who refused and what helps; the pool goes on with
    /// what is there, and `Pool::prewarm` pins the rest once that is cured.
    pub(crate) fn reserve_stopped(&self, done_bytes: u64, of_bytes: u64, error: &SourceError) {
        log::warn!(
            reserve,
            "{self}reserve: stopped at {done_bytes} of {of_bytes} bytes, the pool goes on with these: {error}; then \
             Pool::prewarm pins the rest, or lower PINPOOL_RESERVE"
        );
    }

    /// Calls `tiers`, which asks the kernel, only if the line is logged.
    ///
    /// `reserve: N bytes are in ...` (info): if the pages are not huge, check `transparent_hugepage`.
    pub(crate) fn reserved(&self, bytes: u64, tiers: impl Fn() -> PageTiers, numa_node: Option<u32>) {
        let node = numa_node.map_or_else(String::new, |node| format!(", memory node {node}"));
        log::info!(reserve, "{self}reserve: {bytes} bytes are in {}{node}", tiers());
    }

    /// The huge pages that were asked for do not suffice.
    ///
    /// `too few huge pages, other pages are taken: ...` (warn): set more aside as the line says, or
    /// `PINPOOL_HUGETLB=auto`, which takes what there is without a word.
    pub(crate) fn few_huge_pages(&self, lack: &SourceError) {
        log::warn!(reserve, "{self}too few huge pages, other pages are taken: {lack}");
    }
}
