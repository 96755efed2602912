//! Settings of a replay as `PINPOOL_*` variables.

use std::time::Duration;

use super::replay::{OtherSettings, Replay};
use super::workload::Workload;
use pinpool::unstable::config::{Limit, env};
use pinpool::{Pool, PoolBuilder};

/// Variables that a replay follows.
const FOLLOWED: [&str; 10] = [
    "PINPOOL_PRESET",
    "PINPOOL_ROUNDING",
    "PINPOOL_POOL_SIZE_LIMIT",
    "PINPOOL_AUTO_RESIZE",
    "PINPOOL_MAX_BYTES",
    "PINPOOL_WAIT",
    "PINPOOL_MAX_IDLE_BYTES",
    "PINPOOL_IDLE_TIMEOUT",
    "PINPOOL_RESERVE",
    "PINPOOL_GROWTH",
];

/// Which rules the pool follows.
const RULES: [&str; 2] = ["PINPOOL_PRESET", "PINPOOL_ROUNDING"];

impl Replay {
    /// Whether a replay follows the variable of this name.
    fn follows(name: &str) -> bool {
        FOLLOWED.contains(&name)
    }

    /// A replay under the settings that the workload was recorded with, as far as it can follow them, with `variables` in their place.
    ///
    /// # Errors
    ///
    /// The errors of [`under`](Replay::under).
    pub fn as_recorded(workload: &Workload, variables: &[(String, String)]) -> Result<Self, String> {
        // One of the two says what the other may be.
        let is_rules = |name: &str| RULES.contains(&name);
        let has_rules = variables.iter().any(|(name, _)| is_rules(name));
        let is_set = |name: &str| variables.iter().any(|(set, _)| set == name) || (has_rules && is_rules(name));
        let recorded = workload.recorded().iter().filter(|(name, _)| Self::follows(name) && !is_set(name));
        Self::under(&recorded.chain(variables).cloned().collect::<Vec<_>>())
    }

    /// A replay under these variables, each with its value.
    ///
    /// # Errors
    ///
    /// A variable that a replay cannot follow, a value that cannot be read, or settings that contradict each other; the text
    /// names it.
    pub fn under(variables: &[(String, String)]) -> Result<Self, String> {
        if let Some((name, _)) = variables.iter().find(|(name, _)| !Self::follows(name)) {
            let followed = FOLLOWED.map(|name| name.trim_start_matches(env::PREFIX)).join(", ");
            return Err(format!("{name} has no effect in a replay, which follows {followed}"));
        }
        let builder = Pool::builder().without_env();
        let set = |builder: PoolBuilder, (name, value): &(String, String)| builder.variable(name, value);
        let config = variables.iter().try_fold(builder, set).and_then(|builder| builder.config());
        let config = config.map_err(|error| error.to_string())?;
        let is_set = |name: &str| variables.iter().any(|(set, _)| set == name);
        let max_bytes = match config.max_bytes {
            Limit::Bytes(bytes) if is_set("PINPOOL_MAX_BYTES") => Some(bytes),
            Limit::Auto if is_set("PINPOOL_MAX_BYTES") => {
                return Err("PINPOOL_MAX_BYTES=auto depends on the machine; give a size or none".to_owned());
            }
            _ => None,
        };
        Ok(Self {
            preset: is_set("PINPOOL_PRESET").then_some(config.preset),
            rounding: is_set("PINPOOL_ROUNDING").then_some(config.rounding),
            pool_size_limit: is_set("PINPOOL_POOL_SIZE_LIMIT").then_some(config.pool_size_limit),
            auto_resize: is_set("PINPOOL_AUTO_RESIZE").then_some(config.auto_resize),
            idle_timeout: is_set("PINPOOL_IDLE_TIMEOUT").then_some(config.idle_timeout),
            wait: match config.wait {
                wait if is_set("PINPOOL_WAIT") => wait.unwrap_or(Duration::MAX),
                _ => Self::default().wait,
            },
            others: OtherSettings {
                reserve_bytes: is_set("PINPOOL_RESERVE").then_some(config.reserve_bytes),
                growth: is_set("PINPOOL_GROWTH").then_some(config.growth),
                max_idle_bytes: is_set("PINPOOL_MAX_IDLE_BYTES").then_some(config.max_idle_bytes),
            },
            max_bytes,
            ..Self::default()
        })
    }
}
