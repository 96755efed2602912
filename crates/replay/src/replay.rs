//! The settings of a replay.
//!
//! A replay has one thread and its own clock, so a file gives the same numbers on every machine.

use std::time::Duration;

use super::sim::SourceKind;
use super::workload::{MAX_BYTES, PRESET, ROUNDING, Workload};
use pinpool::unstable::config::{Config, env};
use pinpool::{Error, Limit, Pool, PoolBuilder};

/// Variables that a replay follows.
const FOLLOWED: [&str; 10] = [
    PRESET,
    ROUNDING,
    "PINPOOL_POOL_SIZE_LIMIT",
    "PINPOOL_AUTO_RESIZE",
    MAX_BYTES,
    WAIT,
    "PINPOOL_MAX_IDLE_BYTES",
    "PINPOOL_IDLE_TIMEOUT",
    "PINPOOL_RESERVE",
    "PINPOOL_GROWTH",
];
const WAIT: &str = "PINPOOL_WAIT";

/// Settings of a replay.
#[derive(Debug, Clone, Default)]
pub struct Replay {
    /// Kind of memory.
    pub source: SourceKind,
    /// Limit in bytes.
    pub max_bytes: Option<u64>,
    /// Longest wait of a request at the limit, in virtual time; `None` for 100 ms.
    pub wait: Option<Duration>,
    /// Other settings, as variables with valid values.
    pub variables: Vec<(String, String)>,
}

impl Replay {
    /// Returns a replay under the settings that the workload was recorded with, as far as it can follow them, overridden by `variables`.
    ///
    /// # Errors
    ///
    /// The errors of [`under`](Replay::under).
    pub fn with_recorded_settings(workload: &Workload, variables: &[(String, String)]) -> Result<Self, String> {
        // A recorded rounding fits only the recorded preset.
        let is_set = |name: &str| variables.iter().any(|(set, _)| set == name || *set == PRESET && name == ROUNDING);
        let recorded = workload.settings().iter().filter(|(name, _)| FOLLOWED.contains(&&**name) && !is_set(name));
        Self::under(&recorded.chain(variables).cloned().collect::<Vec<_>>())
    }

    /// Returns a replay under these variables, each with its value.
    ///
    /// # Errors
    ///
    /// A variable that a replay cannot follow, an invalid value, or settings that contradict each other; the text names it.
    pub fn under(variables: &[(String, String)]) -> Result<Self, String> {
        if let Some((name, _)) = variables.iter().find(|(name, _)| !FOLLOWED.contains(&&**name)) {
            let followed = FOLLOWED.map(|name| name.trim_start_matches(env::PREFIX)).join(", ");
            return Err(format!("{name} has no effect in a replay, which follows {followed}"));
        }
        let mut replay = Self { variables: variables.to_vec(), ..Self::default() };
        let config = replay.config().map_err(|error| error.to_string())?;
        let is_set = |name: &str| variables.iter().any(|(set, _)| set == name);
        replay.wait = is_set(WAIT).then(|| config.wait.unwrap_or(Duration::MAX));
        replay.max_bytes = if let Limit::Bytes(bytes) = config.max_bytes { Some(bytes) } else { None };
        if is_set(MAX_BYTES) && config.max_bytes == Limit::Auto {
            return Err("PINPOOL_MAX_BYTES=auto depends on the machine; give a size or none".to_owned());
        }
        replay.variables.retain(|(name, _)| ![MAX_BYTES, WAIT].contains(&&**name));
        Ok(replay)
    }

    pub(super) fn builder(&self) -> PoolBuilder {
        let builder = Pool::builder().without_env();
        self.variables.iter().fold(builder, |builder, (name, value)| builder.setting(name, value))
    }

    /// Returns the configuration of these settings.
    ///
    /// # Errors
    ///
    /// If settings contradict each other.
    pub fn config(&self) -> Result<Config, Error> {
        self.builder().unstable_config()
    }
}
