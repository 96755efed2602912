//! From settings to a pool.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Pool;
use super::core::Core;
use super::supply::Supply;
use crate::backend::{self, Backend, Chosen};
use crate::config::{Preset, Settings, env};
use crate::diag::{self, Cadence, CheckReport, Listener, Voice};
use crate::error::Result;
use crate::size_class::Rounding;

/// Collects settings; whatever is not set here comes from the environment, and else from the defaults.
#[must_use]
pub struct PoolBuilder {
    settings: Settings,
    without_env: bool,
    cadence: Cadence,
    listener: Option<Listener>,
}

impl fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuilder").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl PoolBuilder {
    pub(super) fn new() -> Self {
        Self { settings: Settings::default(), without_env: false, cadence: Cadence::process(), listener: None }
    }

    /// Ignores `PINPOOL_*`: only what is set here, and the defaults.
    pub fn without_env(mut self) -> Self {
        self.without_env = true;
        self
    }

    /// Where the memory comes from (`PINPOOL_BACKEND`).
    pub fn backend(mut self, backend: Backend) -> Self {
        self.settings.backend = Some(backend);
        self
    }

    /// Ordinal of the GPU that the copies are for (`PINPOOL_DEVICE`).
    pub fn device(mut self, ordinal: u32) -> Self {
        self.settings.device = Some(ordinal);
        self
    }

    /// Rules that the pool follows (`PINPOOL_PRESET`).
    pub fn preset(mut self, preset: Preset) -> Self {
        self.settings.preset = Some(preset);
        self
    }

    /// Most idle buffers kept at the start; 0 keeps none (`PINPOOL_POOL_SIZE_LIMIT`).
    pub fn pool_size_limit(mut self, buffers: u64) -> Self {
        self.settings.pool_size_limit = Some(buffers);
        self
    }

    /// May the limit rise (`PINPOOL_AUTO_RESIZE`)?
    pub fn auto_resize(mut self, yes: bool) -> Self {
        self.settings.auto_resize = Some(yes);
        self
    }

    /// How sizes become classes (`PINPOOL_ROUNDING`).
    pub fn rounding(mut self, rounding: Rounding) -> Self {
        self.settings.rounding = Some(rounding);
        self
    }

    /// Ceiling in bytes on all memory held, in use and idle (`PINPOOL_MAX_BYTES`); `None` for no ceiling.
    pub fn max_bytes(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.settings.max_bytes = Some(bytes.into());
        self
    }

    /// One check of the rates in this many is printed (`PINPOOL_LOG_EVERY`); 0 counts as 1.
    pub fn log_every(mut self, checks: u64) -> Self {
        self.settings.log_every = Some(checks.max(1));
        self
    }

    /// Longest wait for copies in flight at the end of the pool (`PINPOOL_CLOSE_WAIT`).
    pub fn close_wait(mut self, wait: Duration) -> Self {
        self.settings.close_wait = Some(wait);
        self
    }

    /// Counts this pool's checks with `cadence` instead of with all pools of the process.
    pub fn cadence(mut self, cadence: Cadence) -> Self {
        self.cadence = cadence;
        self
    }

    /// Calls `listener` after every check of the rates, printed or not. It runs on the thread whose put led to the
    /// check, outside of every lock of the pool.
    pub fn on_check(mut self, listener: impl Fn(&CheckReport) + Send + Sync + 'static) -> Self {
        self.listener = Some(Arc::new(listener));
        self
    }

    /// Makes the pool. Pins nothing, and creates no context on a device.
    ///
    /// # Errors
    ///
    /// - [`Error::is_setting`](crate::Error::is_setting) if two settings contradict each other,
    /// - [`Error::is_backend`](crate::Error::is_backend) if the back-end asked for is not there.
    pub fn build(self) -> Result<Pool> {
        let (env, warnings) = if self.without_env { Default::default() } else { env::read_process() };
        warnings.iter().for_each(diag::bad_setting);
        let mut config = self.settings.or(env).resolve()?;
        let Chosen { source, lock_limit_bytes, passed_over } =
            backend::choose(&config.backend, config.device, config.max_bytes)?;
        diag::chose_backend(source.name(), source.is_pinned(), &passed_over);
        if let Some(limit_bytes) = lock_limit_bytes {
            diag::lock_limit(limit_bytes);
            config.max_bytes = Some(limit_bytes);
        }
        let supply = Supply::new(source, config.max_bytes);
        let voice = Voice { cadence: self.cadence, log_every: config.log_every, listener: self.listener };
        Ok(Pool::of(Arc::new(Core::new(config, supply, voice))))
    }
}
