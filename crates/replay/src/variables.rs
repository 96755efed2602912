//! Settings of a replay as `PINPOOL_*` variables.

use std::time::Duration;

use super::replay::{OtherSettings, Replay};
use pinpool::config::{Ceiling, env};
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

impl Replay {
    /// A replay under these variables, each as `NAME=VALUE`; the prefix may be left out, and case does not count.
    ///
    /// # Errors
    ///
    /// A variable that a replay cannot follow, one that is named twice, or a value that cannot be read; the text names it.
    pub fn under<'a>(variables: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let pairs = variables.into_iter().map(pair).collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<_> = pairs.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("{} is set twice; leave one of the two out", twice[0]));
        }
        if let Some((name, _)) = pairs.iter().find(|(_, value)| value.is_empty()) {
            return Err(format!("{name} has no value; give one, or leave it out for its default"));
        }
        let builder = Pool::builder().without_env();
        let set = |builder: PoolBuilder, (name, value): &(String, String)| builder.variable(name, value);
        let config = pairs.iter().try_fold(builder, set).and_then(|builder| builder.config());
        let config = config.map_err(|error| error.to_string())?;
        let is_set = |name: &str| pairs.iter().any(|(set, _)| set == name);
        let max_bytes = match config.max_bytes {
            Ceiling::Bytes(bytes) if is_set("PINPOOL_MAX_BYTES") => Some(bytes),
            Ceiling::Auto if is_set("PINPOOL_MAX_BYTES") => {
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

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("`{text}` is not VARIABLE=VALUE (like MAX_BYTES=2GiB)"))?;
    let name = name.trim().to_uppercase();
    let name = if name.starts_with(env::PREFIX) { name } else { format!("{}{name}", env::PREFIX) };
    if FOLLOWED.contains(&name.as_str()) {
        return Ok((name, value.trim().to_owned()));
    }
    let known = env::VARIABLES.iter().any(|variable| variable.name == name);
    let why = if known { "has no effect in a replay" } else { "is not a variable of pinpool" };
    Err(format!(
        "{name} {why}; a replay follows {}",
        FOLLOWED.map(|name| name.trim_start_matches(env::PREFIX)).join(", ")
    ))
}
