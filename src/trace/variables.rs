//! Settings of a replay as `PINPOOL_*` variables.

use std::time::Duration;

use super::replay::{OtherSettings, Replay};
use crate::config::{Ceiling, Settings, env};

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
        let (settings, bad) = env::read(pairs);
        if let Some(bad) = bad.first() {
            return Err(bad.to_string());
        }
        let defaults = Self::default();
        let max_bytes = match settings.max_bytes {
            None | Some(Ceiling::None) => None,
            Some(Ceiling::Bytes(bytes)) => Some(bytes),
            Some(Ceiling::Auto) => {
                return Err("PINPOOL_MAX_BYTES=auto depends on the machine; give a size or none".to_owned());
            }
        };
        let Settings { preset, rounding, pool_size_limit, auto_resize, idle_timeout, wait, .. } = settings;
        let Settings { reserve_bytes, growth, max_idle_bytes, .. } = settings;
        let others = OtherSettings { reserve_bytes, growth, max_idle_bytes };
        let wait = wait.map_or(defaults.wait, |wait| wait.unwrap_or(Duration::MAX));
        Ok(Self { preset, rounding, pool_size_limit, auto_resize, idle_timeout, max_bytes, wait, others, ..defaults })
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
