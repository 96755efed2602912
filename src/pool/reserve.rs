//! Memory that is prepared before it is asked for.

use std::time::{Duration, Instant};

use super::Pool;
use crate::error::{ErrorKind, Result};

impl Pool {
    /// Pins `bytes` now, by the fastest method of the back-end, and keeps them until the pool ends. Logs its progress.
    ///
    /// With [`reserve_wait`](crate::PoolBuilder::reserve_wait) off, returns when the first 8 MiB or so are pinned: a thread of
    /// the pool pins the rest, in steps of about 8 MiB (64 MiB on `register` and `cuda`, where no buffer of the reserve is
    /// longer), and gives way to gets. What gets pin meanwhile is a part of the reserve. A ceiling lowered below the reserve
    /// stops it, and takes what is idle of it back on back-ends with virtual memory; a higher one lets it go on. If the driver
    /// or the kernel refuses a step, the rest is given up, with a warning in the log; call this again for it once that is cured.
    /// [`Stats::pinned_fraction`](crate::Stats::pinned_fraction) has the progress, [`wait_reserved`](Self::wait_reserved) waits for the end.
    ///
    /// # Errors
    ///
    /// - [`is_setting`](crate::Error::is_setting): under the preset `tensorflow`, which has no arena to carve from, and in a
    ///   partition,
    /// - [`is_limit`](crate::Error::is_limit): over the ceiling, or no room would be left for a get that waits,
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused.
    pub fn prewarm(&self, bytes: u64) -> Result<()> {
        self.check_open()?;
        self.refuse_partition("PINPOOL_RESERVE", &bytes.to_string())?;
        if !self.core().memory().has_arena() {
            let why =
                "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is an allocation of its own".to_owned();
            return Err(ErrorKind::Setting { name: "PINPOOL_RESERVE", value: bytes.to_string(), why }.into());
        }
        self.core().prewarm(bytes)
    }

    /// Waits at most `timeout` until all of the reserve that was asked for is pinned; false if it
    /// is not then, as where the ceiling leaves no room for it or the pool ends. At once true where nothing was asked for, or
    /// where [`reserve_wait`](crate::PoolBuilder::reserve_wait) is on. With `background_thread(false)` the calling thread pins it.
    ///
    /// # Errors
    ///
    /// - [`is_backend`](crate::Error::is_backend): the driver or the kernel refused a step, and the rest was given up,
    /// - [`is_forked`](crate::Error::is_forked): the pool was made in a parent of this process.
    pub fn wait_reserved(&self, timeout: Duration) -> Result<bool> {
        self.core().check_process()?;
        let now = Instant::now();
        // A time beyond what the clock can tell is as good as a year.
        self.core().await_reserve(now.checked_add(timeout).unwrap_or(now + Duration::from_secs(366 * 86_400)))
    }
}
