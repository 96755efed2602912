//! Memory that is pinned before it is requested.

use std::time::{Duration, Instant};

use super::Pool;
use crate::error::{ErrorKind, Result};

impl Pool {
    /// Pins `bytes` more by the backend's fastest method, and keeps them pinned until the pool ends. The bytes that an abandoned
    /// background reserve lacks count towards `bytes`: `reserve(missing)` only tries those again. Only memory that was pinned in
    /// the background may be released earlier, by a [lower limit](Self::set_max_bytes). Logs its progress. Calls the driver or
    /// the kernel, so it may take seconds.
    ///
    /// `register` and usually `vmm` pin slices of at most 128 MiB (`PINPOOL_HUGETLB=1GiB`: 1 GiB), and no buffer of the reserve is
    /// longer than its slice. If the driver refuses further slices, the call succeeds with a shorter reserve and a warning;
    /// [`MemoryStats::reserve_bytes`](crate::stats::MemoryStats::reserve_bytes) has its length.
    ///
    /// With `PINPOOL_RESERVE_WAIT=0` the call returns after about 8 MiB, and the maintenance thread pins the rest in steps of
    /// about 8 MiB. On `register` and `cuda` a step is 64 MiB long while no copy is in flight, and no buffer of the reserve is
    /// longer than its step. If another reserve is in progress or was abandoned, the call pins nothing itself and returns;
    /// `wait_for_reserve` then returns a refusal. The memory that requests pin meanwhile becomes part of the reserve. If the
    /// limit has no room for the next step, the reserve pauses. If the driver or the kernel refuses a step, the rest is
    /// abandoned with a warning; call `reserve` again once the cause is fixed.
    /// [`MemoryStats::reserve_fraction`](crate::stats::MemoryStats::reserve_fraction) shows the progress, and
    /// [`wait_for_reserve`](Self::wait_for_reserve) waits for completion.
    ///
    /// # Errors
    ///
    /// - [`is_setting`](crate::Error::is_setting): the preset is `tensorflow`, which has no arena,
    /// - [`is_limit`](crate::Error::is_limit): the reserve exceeds the limit, or would leave no room for a waiting request,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused, and nothing was pinned,
    /// - [`is_forked`](crate::Error::is_forked), [`is_closed`](crate::Error::is_closed), as for [`get`](Self::get).
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.check_open()?;
        if self.core().memory().arena().is_none() {
            let why = "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is a separate allocation".to_owned();
            return Err(ErrorKind::Setting { name: "PINPOOL_RESERVE", value: bytes.to_string(), why }.into());
        }
        self.core().reserve(bytes)
    }

    /// Waits up to `timeout` until the whole reserve is pinned, and returns whether the reserve is complete.
    ///
    /// Returns true immediately if nothing was reserved or `PINPOOL_RESERVE_WAIT` is on. With
    /// `maintenance_thread(false)` the calling thread pins the reserve.
    ///
    /// # Errors
    ///
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused a step, and the rest was abandoned,
    /// - [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked.
    pub fn wait_for_reserve(&self, timeout: Duration) -> Result<bool> {
        self.core().check_process()?;
        let now = Instant::now();
        // If the clock cannot represent the deadline, wait for at most a year.
        self.core().wait_for_reserve(now.checked_add(timeout).unwrap_or(now + Duration::from_secs(366 * 86_400)))
    }
}
