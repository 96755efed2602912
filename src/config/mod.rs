//! What can be set, from where, and what follows from it.
//!
//! ```text
//!   code ──┐
//!          ├──▶ Settings (what was said) ──resolve──▶ Config (what holds)
//!   env  ──┘        code wins                 contradictions are errors
//! ```
//!
//! [`env`](mod@env) holds the table of variables and is the only reader of the process environment; [`quantity`] reads sizes and
//! times.

use std::time::Duration;

use crate::backend::Backend;
use crate::error::{Error, ErrorKind, Result};
use crate::size_class::Rounding;

pub mod env;
pub mod quantity;
mod words;

pub use env::Warning;

pub use crate::host::PressureSource;

/// A set of rules that a pool follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Preset {
    /// TensorFlow's pool in front, an arena behind it: misses and evictions cost nanoseconds, bytes are bounded and given
    /// back by themselves.
    #[default]
    Adaptive,
    /// TensorFlow's `PoolAllocator`, exact to its figures and messages: each miss is an allocation of its own.
    Tensorflow,
}

impl Preset {
    /// Name in settings and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Tensorflow => "tensorflow",
        }
    }
}

/// Most bytes that a pool holds, in use and idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ceiling {
    /// A quarter of the memory that the control group, else the machine, has; shared out by `PINPOOL_POOLS_PER_HOST`.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// None: as much as the back-end gives.
    None,
}

/// What a get does when there is no room under the ceiling and waiting did not help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFull {
    /// `Pageable` if the back-end was chosen by `Auto` and there is no GPU, else `Error`.
    Auto,
    /// It fails.
    Error,
    /// It gives ordinary memory: [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned) is false.
    Pageable,
}

/// When memory goes back to a driver whose release waits for all work of the device (`register`, `cuda`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReleasePolicy {
    /// Only while no copy of the pool is in flight.
    #[default]
    Idle,
    /// At the ceiling a get waits for the copies in flight, at most `PINPOOL_WAIT`, and new ones wait behind it.
    Force,
}

/// How a pool learns that a copy which took its buffer is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FenceKind {
    /// `Event`, until threads are seen to crowd at the question; then `Timeline`.
    #[default]
    Auto,
    /// An event behind each copy: cheap to set, but each question is a call of the driver.
    Event,
    /// A word that the stream counts up behind each copy: costs the copying thread more, asking costs a load. An event
    /// where the driver cannot do it.
    Timeline,
}

/// What was said, by code or by environment; `None` where nothing was.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) backend: Option<Backend>,
    pub(crate) device: Option<u32>,
    pub(crate) numa_node: Option<Option<u32>>,
    pub(crate) preset: Option<Preset>,
    pub(crate) pool_size_limit: Option<u64>,
    pub(crate) auto_resize: Option<bool>,
    pub(crate) rounding: Option<Rounding>,
    pub(crate) max_bytes: Option<Ceiling>,
    pub(crate) pools_per_host: Option<u64>,
    pub(crate) wait: Option<Duration>,
    pub(crate) on_full: Option<OnFull>,
    pub(crate) idle_timeout: Option<Option<Duration>>,
    pub(crate) release_policy: Option<ReleasePolicy>,
    pub(crate) pressure: Option<PressureSource>,
    pub(crate) reserve_bytes: Option<u64>,
    pub(crate) pin_threads: Option<Option<u64>>,
    pub(crate) growth: Option<bool>,
    pub(crate) background_poll: Option<bool>,
    pub(crate) log_every: Option<u64>,
    pub(crate) close_wait: Option<Duration>,
    pub(crate) fence: Option<FenceKind>,
    pub(crate) stuck_after: Option<Duration>,
}

/// What holds for a pool.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Where the memory comes from.
    pub backend: Backend,
    /// Ordinal of the GPU that copies are for.
    pub device: u32,
    /// Memory node to pin on, where the machine has several; `None`: that of the GPU.
    pub numa_node: Option<u32>,
    /// The rules that the pool follows.
    pub preset: Preset,
    /// Most idle buffers to keep at the start; 0 keeps none.
    pub pool_size_limit: u64,
    /// May the limit rise?
    pub auto_resize: bool,
    /// How sizes become classes.
    pub rounding: Rounding,
    /// Ceiling on all bytes held, in use and idle.
    pub max_bytes: Ceiling,
    /// Pools on this host that share the memory from which [`Ceiling::Auto`] is taken.
    pub pools_per_host: u64,
    /// Longest wait of a get for room under the ceiling.
    pub wait: Duration,
    /// What a get does after that.
    pub on_full: OnFull,
    /// How long memory stays idle before it is given back; `None`: for ever.
    pub idle_timeout: Option<Duration>,
    /// When memory goes back whose release waits for the device.
    pub release_policy: ReleasePolicy,
    /// Where the pool hears that memory is short.
    pub pressure: PressureSource,
    /// Bytes pinned at the start and kept.
    pub reserve_bytes: u64,
    /// Threads that touch new memory at once; `None`: one for each core that the process may use.
    pub pin_threads: Option<u64>,
    /// May the pool pin more than its reserve?
    pub growth: bool,
    /// Does a thread look after the pool while the program is silent?
    pub background_poll: bool,
    /// One check in this many is printed.
    pub log_every: u64,
    /// How long the end of the pool waits for copies in flight.
    pub close_wait: Duration,
    /// How the end of a copy is learnt.
    pub fence: FenceKind,
    /// A buffer longer in flight than this is warned of.
    pub stuck_after: Duration,
}

/// TensorFlow's starting limit for its pinned-memory pool.
const DEFAULT_POOL_SIZE_LIMIT: u64 = 100;
/// One printed check in ten, as TensorFlow's `should_log`.
const DEFAULT_LOG_EVERY: u64 = 10;
/// Longer than any copy that works, shorter than the patience of who waits for a process to end.
const DEFAULT_CLOSE_WAIT: Duration = Duration::from_secs(30);
/// As above: by then something is wrong.
const DEFAULT_STUCK_AFTER: Duration = Duration::from_secs(30);
/// A few batches' time: who waits longer has a ceiling that is too low.
const DEFAULT_WAIT: Duration = Duration::from_millis(100);
/// Measured: half or twice as much changes driver time and memory held by less than 5 % over 25 loaders.
const DEFAULT_RETAIN: Duration = Duration::from_secs(45);

impl Settings {
    /// What `self` says, and where it is silent what `other` says.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            backend: self.backend.or(other.backend),
            device: self.device.or(other.device),
            numa_node: self.numa_node.or(other.numa_node),
            preset: self.preset.or(other.preset),
            pool_size_limit: self.pool_size_limit.or(other.pool_size_limit),
            auto_resize: self.auto_resize.or(other.auto_resize),
            rounding: self.rounding.or(other.rounding),
            max_bytes: self.max_bytes.or(other.max_bytes),
            pools_per_host: self.pools_per_host.or(other.pools_per_host),
            wait: self.wait.or(other.wait),
            on_full: self.on_full.or(other.on_full),
            idle_timeout: self.idle_timeout.or(other.idle_timeout),
            release_policy: self.release_policy.or(other.release_policy),
            pressure: self.pressure.or(other.pressure),
            reserve_bytes: self.reserve_bytes.or(other.reserve_bytes),
            pin_threads: self.pin_threads.or(other.pin_threads),
            growth: self.growth.or(other.growth),
            background_poll: self.background_poll.or(other.background_poll),
            log_every: self.log_every.or(other.log_every),
            close_wait: self.close_wait.or(other.close_wait),
            fence: self.fence.or(other.fence),
            stuck_after: self.stuck_after.or(other.stuck_after),
        }
    }

    /// Fills in the defaults and refuses contradictions.
    pub(crate) fn resolve(self) -> Result<Config> {
        let (preset, rounding) = self.rules()?;
        let adaptive = preset == Preset::Adaptive;
        let pool_size_limit = self.pool_size_limit.unwrap_or(DEFAULT_POOL_SIZE_LIMIT);
        // A pool that keeps nothing has nothing to resize: limit 0 alone turns resizing off, as nobody asked for it.
        let auto_resize = self.auto_resize.unwrap_or(pool_size_limit != 0);
        if pool_size_limit == 0 && auto_resize {
            let why = "contradicts PINPOOL_POOL_SIZE_LIMIT=0: a pool that keeps nothing cannot grow; \
                       set a limit of at least 1 or leave auto-resize off";
            return Err(contradiction("PINPOOL_AUTO_RESIZE", "1", why));
        }
        let reserve_bytes = self.reserve_bytes.unwrap_or(0);
        let growth = self.growth.unwrap_or(true);
        if !adaptive && (reserve_bytes > 0 || !growth) {
            let why = "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is an allocation of its own, \
                       so there is nothing to cut it from";
            let (name, value) = if growth {
                ("PINPOOL_RESERVE", reserve_bytes.to_string())
            } else {
                ("PINPOOL_GROWTH", "off".to_owned())
            };
            return Err(contradiction(name, value, why));
        }
        if let (Some(Ceiling::Bytes(max_bytes)), true) = (self.max_bytes, reserve_bytes > 0)
            && reserve_bytes > max_bytes
        {
            let why = format!("is over PINPOOL_MAX_BYTES={max_bytes}: lower the one or raise the other");
            return Err(contradiction("PINPOOL_RESERVE", reserve_bytes.to_string(), why));
        }
        Ok(Config {
            backend: self.backend.unwrap_or_default(),
            device: self.device.unwrap_or(0),
            numa_node: self.numa_node.unwrap_or(None),
            preset,
            pool_size_limit,
            auto_resize,
            rounding,
            max_bytes: self.max_bytes.unwrap_or(if adaptive { Ceiling::Auto } else { Ceiling::None }),
            pools_per_host: self.pools_per_host.unwrap_or(1),
            wait: self.wait.unwrap_or(if adaptive { DEFAULT_WAIT } else { Duration::ZERO }),
            on_full: self.on_full.unwrap_or(if adaptive { OnFull::Auto } else { OnFull::Error }),
            idle_timeout: self.idle_timeout.unwrap_or(Some(DEFAULT_RETAIN)),
            release_policy: self.release_policy.unwrap_or_default(),
            pressure: self.pressure.unwrap_or(PressureSource::Kernel),
            reserve_bytes,
            pin_threads: self.pin_threads.unwrap_or(None),
            growth,
            background_poll: self.background_poll.unwrap_or(false),
            log_every: self.log_every.unwrap_or(DEFAULT_LOG_EVERY),
            close_wait: self.close_wait.unwrap_or(DEFAULT_CLOSE_WAIT),
            fence: self.fence.unwrap_or_default(),
            stuck_after: self.stuck_after.unwrap_or(DEFAULT_STUCK_AFTER),
        })
    }

    /// Preset and rounding belong together: each rounding is that of one preset, and implies it.
    fn rules(&self) -> Result<(Preset, Rounding)> {
        let of_tensorflow = |rounding| matches!(rounding, Rounding::Exact | Rounding::Pow2);
        match (self.preset, self.rounding) {
            (None, Some(rounding)) if of_tensorflow(rounding) => Ok((Preset::Tensorflow, rounding)),
            (None | Some(Preset::Adaptive), None | Some(Rounding::Eighths)) => {
                Ok((Preset::Adaptive, Rounding::Eighths))
            }
            (Some(Preset::Tensorflow), None) => Ok((Preset::Tensorflow, Rounding::Pow2)),
            (Some(Preset::Tensorflow), Some(rounding)) if of_tensorflow(rounding) => Ok((Preset::Tensorflow, rounding)),
            (preset, rounding) => {
                let preset = preset.unwrap_or_default().name();
                let why =
                    format!("does not go with PINPOOL_PRESET={preset}: adaptive has eighths, tensorflow pow2 or exact");
                Err(contradiction("PINPOOL_ROUNDING", rounding.map_or("", Rounding::name), why))
            }
        }
    }
}

fn contradiction(name: &'static str, value: impl Into<String>, why: impl Into<String>) -> Error {
    ErrorKind::Setting { name, value: value.into(), why: why.into() }.into()
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

    #[test]
    fn a_rounding_implies_the_preset_that_it_belongs_to_and_contradicts_the_other() {
        let said = |preset, rounding| Settings { preset, rounding, ..Settings::default() }.resolve();
        let exact = said(None, Some(Rounding::Exact)).unwrap();
        assert_eq!((exact.preset, exact.max_bytes, exact.wait), (Preset::Tensorflow, Ceiling::None, Duration::ZERO));
        assert_eq!(said(Some(Preset::Tensorflow), None).unwrap().rounding, Rounding::Pow2);
        assert_eq!(said(None, None).unwrap().preset, Preset::Adaptive);
        for (preset, rounding) in [(Preset::Adaptive, Rounding::Pow2), (Preset::Tensorflow, Rounding::Eighths)] {
            let error = said(Some(preset), Some(rounding)).unwrap_err();
            assert!(error.is_setting() && error.to_string().contains("PINPOOL_ROUNDING"), "{error}");
        }
    }

    #[test]
    fn a_reserve_needs_an_arena_and_room_under_the_ceiling() {
        let reserve = Settings { reserve_bytes: Some(2 << 30), ..Settings::default() };
        let tight = Settings { max_bytes: Some(Ceiling::Bytes(1 << 30)), ..reserve.clone() };
        let plain = Settings { preset: Some(Preset::Tensorflow), ..reserve };
        for settings in [tight, plain] {
            assert!(settings.resolve().unwrap_err().to_string().contains("PINPOOL_RESERVE"));
        }
    }
}
