//! What can be set, from where, and what follows from it.
//!
//! ```text
//!   code ──┐
//!          ├──▶ Settings (what was said) ──resolve──▶ Config (what holds)
//!   env  ──┘        code wins                 contradictions are errors
//! ```
//!
//! [`env`] holds the table of variables and is the only reader of the process environment; [`quantity`] reads sizes and
//! times.

use std::time::Duration;

use crate::backend::Backend;
use crate::error::{Kind, Result};
use crate::size_class::Rounding;

pub mod env;
pub mod quantity;

pub use env::Warning;

/// A set of rules that a pool follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Preset {
    /// TensorFlow's `PoolAllocator`, exact to its figures and messages.
    #[default]
    Tensorflow,
}

impl Preset {
    /// Name in settings and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tensorflow => "tensorflow",
        }
    }
}

/// What was said, by code or by environment; `None` where nothing was.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) backend: Option<Backend>,
    pub(crate) device: Option<u32>,
    pub(crate) preset: Option<Preset>,
    pub(crate) pool_size_limit: Option<u64>,
    pub(crate) auto_resize: Option<bool>,
    pub(crate) rounding: Option<Rounding>,
    /// `Some(None)`: explicitly without a ceiling.
    pub(crate) max_bytes: Option<Option<u64>>,
    pub(crate) log_every: Option<u64>,
    pub(crate) close_wait: Option<Duration>,
}

/// What holds for a pool.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Where the memory comes from.
    pub backend: Backend,
    /// Ordinal of the GPU that copies are for.
    pub device: u32,
    /// The rules that the pool follows.
    pub preset: Preset,
    /// Most idle buffers to keep at the start; 0 keeps none.
    pub pool_size_limit: u64,
    /// May the limit rise?
    pub auto_resize: bool,
    /// How sizes become classes.
    pub rounding: Rounding,
    /// Ceiling on all bytes held, in use and idle.
    pub max_bytes: Option<u64>,
    /// One check in this many is printed.
    pub log_every: u64,
    /// How long the end of the pool waits for copies in flight.
    pub close_wait: Duration,
}

/// TensorFlow's starting limit for its pinned-memory pool.
const DEFAULT_POOL_SIZE_LIMIT: u64 = 100;
/// One printed check in ten, as TensorFlow's `should_log`.
const DEFAULT_LOG_EVERY: u64 = 10;
/// Longer than any copy that works, shorter than the patience of who waits for a process to end.
const DEFAULT_CLOSE_WAIT: Duration = Duration::from_secs(30);

impl Settings {
    /// What `self` says, and where it is silent what `other` says.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            backend: self.backend.or(other.backend),
            device: self.device.or(other.device),
            preset: self.preset.or(other.preset),
            pool_size_limit: self.pool_size_limit.or(other.pool_size_limit),
            auto_resize: self.auto_resize.or(other.auto_resize),
            rounding: self.rounding.or(other.rounding),
            max_bytes: self.max_bytes.or(other.max_bytes),
            log_every: self.log_every.or(other.log_every),
            close_wait: self.close_wait.or(other.close_wait),
        }
    }

    /// Fills in the defaults and refuses contradictions.
    pub(crate) fn resolve(self) -> Result<Config> {
        let pool_size_limit = self.pool_size_limit.unwrap_or(DEFAULT_POOL_SIZE_LIMIT);
        // A pool that keeps nothing has nothing to resize: limit 0 alone turns resizing off, as nobody asked for it.
        let auto_resize = self.auto_resize.unwrap_or(pool_size_limit != 0);
        if pool_size_limit == 0 && auto_resize {
            let why = "contradicts PINPOOL_POOL_SIZE_LIMIT=0: a pool that keeps nothing cannot grow; \
                       set a limit of at least 1 or leave auto-resize off";
            return Err(
                Kind::Setting { name: "PINPOOL_AUTO_RESIZE", value: "1".to_owned(), why: why.to_owned() }.into()
            );
        }
        Ok(Config {
            backend: self.backend.unwrap_or_default(),
            device: self.device.unwrap_or(0),
            preset: self.preset.unwrap_or_default(),
            pool_size_limit,
            auto_resize,
            rounding: self.rounding.unwrap_or(Rounding::Pow2),
            max_bytes: self.max_bytes.unwrap_or(None),
            log_every: self.log_every.unwrap_or(DEFAULT_LOG_EVERY),
            close_wait: self.close_wait.unwrap_or(DEFAULT_CLOSE_WAIT),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_wins_over_environment() {
        let code = Settings { pool_size_limit: Some(7), ..Settings::default() };
        let env = Settings { pool_size_limit: Some(9), log_every: Some(1), ..Settings::default() };
        let config = code.or(env).resolve().unwrap();
        assert_eq!((config.pool_size_limit, config.log_every), (7, 1));
    }

    #[test]
    fn a_limit_of_zero_implies_no_resizing_and_contradicts_it_when_explicit() {
        let silent = Settings { pool_size_limit: Some(0), ..Settings::default() };
        assert!(!silent.clone().resolve().unwrap().auto_resize);
        let error = Settings { auto_resize: Some(true), ..silent }.resolve().unwrap_err();
        assert!(error.is_setting());
        assert!(error.to_string().contains("PINPOOL_POOL_SIZE_LIMIT=0"), "{error}");
    }
}
