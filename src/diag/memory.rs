//! The lines about memory that is taken from the system, and about how it is kept.

use pinpool_os::words::Size;

use super::{Growth, PoolLog, log};

impl PoolLog {
    /// Held memory has doubled, from 64 MiB on. To do: nothing if it stops.
    pub(crate) fn grown(&self, growth: &Growth) {
        log::info!(growth, "{self}grew: {growth}");
    }

    /// One request took memory from the system. To do: if many appear in steady state, see the diagnosis.
    pub(crate) fn grew(&self, growth: &Growth) {
        log::debug!(growth, "{self}acquired: {growth:#}");
    }

    /// Sizes began to vary (policy-R12), or recur again.
    pub(crate) fn sizes_changed(&self, vary: Option<bool>) {
        match vary {
            None => {}
            Some(true) => self.sizes_vary(),
            Some(false) => self.sizes_recur(),
        }
    }

    /// Requests come in sizes that no idle buffer has. To do: nothing.
    fn sizes_vary(&self) {
        log::debug!(sizes, "{self}sizes_vary: large buffers are merged when they return");
    }

    /// Requests repeat their sizes again. To do: nothing.
    fn sizes_recur(&self) {
        log::debug!(sizes, "{self}sizes_recur: large buffers stay idle when they return");
    }

    /// A miss was served from held memory. To do: nothing.
    pub(crate) fn carved(&self, bytes: u64) {
        log::trace!(growth, "{self}carved: bytes={bytes}B");
    }

    pub(crate) fn pressure_changed(&self, is_calm: bool) {
        if is_calm { self.pressure_ended() } else { self.pressure_began() }
    }

    /// The machine or cgroup is short of memory. To do: nothing.
    fn pressure_began(&self) {
        log::info!(pressure, "{self}memory_pressure: idle memory is released sooner");
    }

    /// Memory is no longer short. To do: nothing.
    fn pressure_ended(&self) {
        log::info!(pressure, "{self}memory_pressure: over, idle memory is kept for PINPOOL_IDLE_TIMEOUT again");
    }

    /// The process nears `vm.max_map_count`, so the pool grows in larger pieces. To do: raise it.
    pub(crate) fn few_mappings(&self, used: u64, limit: u64, own: u64, granule_bytes: u64) {
        let min = Size(granule_bytes);
        log::warn!(
            growth,
            "{self}mappings: close to vm.max_map_count used={used} limit={limit} own={own} min_growth={min}; raise it \
             (sysctl vm.max_map_count)"
        );
    }
}
