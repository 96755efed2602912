//! The lines about memory that is taken from the system, and about how it is kept.

use super::{Growth, PoolLog, log};

impl PoolLog {
    /// Pinned memory has doubled since the last such line.
    ///
    /// `growth: N bytes asked in M calls, held A -> B bytes ...` (info): nothing if it stops; one line for each
    /// doubling from 64 MiB on, since the line before.
    pub(crate) fn grown(&self, growth: &Growth) {
        log::info!(growth, "{self}growth: {growth}");
    }

    /// One call that took memory from the system.
    ///
    /// `acquired: N bytes asked in M calls, held A -> B bytes ...` (debug): if many appear in steady state, memory is
    /// released too early; see the verdict.
    pub(crate) fn page_locked(&self, growth: &Growth) {
        log::debug!(growth, "{self}acquired: {growth}");
    }

    /// Sizes began to vary (policy-R12), or recur again.
    ///
    /// `sizes vary ...` (debug): nothing: requests come for sizes that no idle buffer has. Large buffers are merged when
    /// they return, so their requests miss, and less memory is held. `sizes recur` ends it.
    ///
    /// `sizes recur ...` (debug): nothing: requests repeat their sizes, and large buffers stay idle for the next ones.
    pub(crate) fn sizes_changed(&self, vary: Option<bool>) {
        match vary {
            None => {}
            Some(true) => log::debug!(sizes, "{self}sizes vary: large buffers are merged when they return"),
            Some(false) => log::debug!(sizes, "{self}sizes recur: large buffers stay idle when they return"),
        }
    }

    /// `carved: N bytes of memory that is held` (trace): nothing: no idle buffer had the size.
    pub(crate) fn carved(&self, bytes: u64) {
        log::trace!(growth, "{self}carved: {bytes} bytes of memory that is held");
    }

    /// `memory is short ...` (info): nothing.
    ///
    /// `memory is no longer short ...` (info): nothing.
    pub(crate) fn pressure_changed(&self, is_calm: bool) {
        if is_calm {
            log::info!(pressure, "{self}memory is no longer short: idle memory is kept for PINPOOL_IDLE_TIMEOUT again");
        } else {
            log::info!(pressure, "{self}memory is short: idle memory is given back sooner");
        }
    }

    /// `mappings: the process has N of the M ...` (warn): raise `vm.max_map_count`; until then the pool grows in larger
    /// pieces, each of which is one mapping.
    pub(crate) fn few_mappings(&self, used: u64, limit: u64, own: u64, granule_bytes: u64) {
        log::warn!(
            growth,
            "{self}mappings: the process has {used} of the {limit} that the kernel allows (vm.max_map_count), {own} of them this \
             pool's; from now on it grows by {granule_bytes} bytes at least (raise the limit: sysctl vm.max_map_count)"
        );
    }
}
