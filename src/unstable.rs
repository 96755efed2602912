//! Additional interfaces for the other crates of this repository. Unstable: they change without notice.

/// All backends and their sources, and `try_out`, which tests a source.
pub mod backend {
    pub use crate::backend::{AddressRange, BuiltInSource, ChosenSource, GRANULE_BYTES, RANGE_ALIGN_BYTES};
    #[cfg(feature = "cuda")]
    pub use crate::backend::{CudaSource, RegisterSource, VmmSource};
    pub use crate::backend::{RemapError, Subrange, Trial, VirtualMemory, gpu_finding, lock_limit, try_out};
}
/// The `PINPOOL_*` variables with their meanings, and the parsing of their values.
pub mod config {
    pub use crate::config::{Config, env, text};
}
/// Which process holds how much under a shared limit.
pub mod shared_limit {
    pub use pinpool_shared_limit::{SharedLimitMember, SharedLimitReport, names};

    use crate::error::{ErrorKind, Result};

    /// Returns the contents of this user's shared limit `name`; `None` if it has no member. Does not join the shared limit.
    ///
    /// # Errors
    ///
    /// [`Error::is_setting`](crate::Error::is_setting): `name` is invalid, or the file is unreadable, has another version or is not a
    /// shared limit.
    pub fn report(name: &str) -> Result<Option<SharedLimitReport>> {
        pinpool_shared_limit::report(name)
            .map_err(|why| ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into())
    }
}
/// The fast path of a pool.
pub mod fast_path {
    use crate::buffer::PinnedBuf;
    use crate::pool::Pool;

    /// Returns whether requests and returns of the calling thread may take the fast path: the preset has one, no request
    /// waits, and no other member of a shared limit wants memory.
    pub fn is_open(pool: &Pool) -> bool {
        pool.core().has_fast_path()
    }

    /// Returns [`is_open`] for the pool of `buf`; true for an empty buffer, which has none.
    pub fn is_open_to(buf: &PinnedBuf) -> bool {
        buf.block.as_ref().is_none_or(|block| block.pool().has_fast_path())
    }

    /// Requests a buffer on the fast path only. Returns `None` if the slow path would have to serve the request.
    pub fn get(pool: &Pool, len: usize) -> Option<PinnedBuf> {
        let block = pool.core().thread_shard()?.take(len)?;
        Some(PinnedBuf::from_fast_path_block(block, len))
    }
}

pub use crate::engine::ManualClock;
pub use crate::policy::{RateCheck, RateWindow};
pub use crate::report::{Finding, LogSampler, RateCheckReport, Severity};
pub use crate::stats::{Kind, Statistic, Unit, Value};

use std::time::Duration;

use crate::pool::Pool;

/// Returns the state that a diagnosis is based on.
pub fn snapshot(pool: &Pool) -> pinpool_observe::diagnosis::Snapshot {
    pool.core().snapshot()
}

/// Returns TensorFlow's counters since the last raise or clear.
pub fn rate_window(pool: &Pool) -> RateWindow {
    pool.core().window()
}

/// Returns the bytes of `addresses` in hugetlb pages and the bytes in transparent huge pages, according to the text of an smaps file.
pub fn huge_bytes(smaps: &str, addresses: &std::ops::Range<usize>) -> [u64; 2] {
    crate::backend::huge_bytes_in(smaps, addresses)
}

/// Completes copies and does what is due by the pool's clock, as the maintenance thread does when it wakes. Does not compact.
pub fn run_due_work(pool: &Pool) {
    pool.core().run_due_work();
}

/// Returns the time after which the maintenance thread would check the pool again; `None` if it has nothing to check.
pub fn maintenance_period(pool: &Pool) -> Option<Duration> {
    pool.core().maintenance_period()
}

/// Remaps a few granules towards the compaction target, as the maintenance thread does while nothing is due (`policy-R13`).
/// Returns whether any were remapped.
pub fn compact_step(pool: &Pool) -> bool {
    pool.core().compact_step()
}

/// Sets whether the copies of this process write to timelines; if not, they record events. For tests and benches.
#[cfg(feature = "cuda")]
pub fn set_timelines_enabled(is_enabled: bool) {
    crate::copy::cuda::set_timelines_enabled(is_enabled);
}
