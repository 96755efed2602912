//! The sums that hold while no other thread uses the pool.

use super::{MemoryStats, Stats};
use crate::policy::Preset;

impl Stats {
    /// Checks the sums that hold while no other thread uses the pool.
    ///
    /// # Errors
    ///
    /// The name of the first sum that does not hold, with its two sides and all statistics.
    #[doc(hidden)]
    pub fn unstable_validate(&self) -> Result<(), String> {
        if self.is_partition {
            return Ok(());
        }
        let Self { requests, memory, copies, limits, .. } = self;
        let MemoryStats { buffers, idle, quarantined, pageable, evictions, .. } = memory;
        let reasons = requests.miss_reasons;
        let out = memory.in_use + copies.in_flight;
        let out_bytes = memory.in_use_bytes + copies.in_flight_bytes;
        let other_bytes = memory.free_bytes + memory.transit_bytes + memory.overhead_bytes;
        let bytes = out_bytes + memory.idle_bytes + memory.quarantined_bytes + other_bytes;
        let made = requests.misses + pageable + requests.adopted;
        let equal = [
            ("served", requests.served, requests.hits + requests.misses),
            ("misses", requests.misses, reasons.first_of_size + reasons.evicted_earlier + reasons.all_in_use),
            ("returned", requests.served + requests.adopted, requests.returned + out + quarantined),
            ("buffers", *buffers, idle + out),
            ("made", made, buffers + quarantined + requests.pageable + evictions.total()),
            ("bytes", memory.held_bytes + memory.pageable_bytes, bytes),
        ];
        // Under `adaptive` returned buffers may exceed the limit until the next miss or tick.
        let limited = if self.preset == Preset::TensorFlow { *idle } else { 0 };
        let at_most = [
            ("idle", limited, limits.pool_size_limit),
            ("peak", memory.held_bytes, memory.peak_held_bytes),
            ("waits", requests.wait_time.count() + requests.waiting, requests.waits),
            ("timeouts", requests.timeouts, requests.wait_time.count()),
            ("rounding", requests.requested_bytes, requests.granted_bytes),
        ];
        equal
            .iter()
            .find(|(_, left, right)| left != right)
            .or_else(|| at_most.iter().find(|(_, left, right)| left > right))
            .map_or(Ok(()), |(sum, left, right)| Err(format!("{sum}: {left} against {right} in {self:?}")))
    }
}
