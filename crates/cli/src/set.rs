//! `--set NAME=VALUE`: settings of the pool, by the names of their variables.

use std::error::Error;
use std::str::FromStr;

use pinpool::unstable::config::env;
use pinpool::{Pool, PoolBuilder};
use pinpool_replay::Replay;

use pinpool_cli::exit::ExitError;

/// Valid settings, each once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Set {
    /// The settings as the user wrote them, separated by commas.
    pub(crate) text: String,
    /// Full names of variables, with their values.
    pub(crate) pairs: Vec<(String, String)>,
}

impl FromStr for Set {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut settings: Vec<String> = Vec::new();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            match settings.last_mut() {
                // The value of a setting may contain commas.
                Some(setting) if !part.contains('=') => *setting = format!("{setting},{part}"),
                _ => settings.push(part.to_owned()),
            }
        }
        let pairs = settings.iter().map(|setting| pair(setting)).collect::<Result<Vec<_>, _>>()?;
        if pairs.is_empty() {
            return Err("no setting is named; give one, as in --set MAX_BYTES=2GiB".to_owned());
        }
        let mut names: Vec<_> = pairs.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(twice) => Err(format!("{} is set twice; leave one of the two out", twice[0])),
            None => Ok(Self { text: text.to_owned(), pairs }),
        }
    }
}

impl Set {
    /// Combines the settings of several `--set` arguments.
    pub(crate) fn all(sets: &[Self]) -> Result<Self, Box<dyn Error>> {
        let text = sets.iter().map(|set| &*set.text).collect::<Vec<_>>().join(",");
        if sets.is_empty() {
            return Ok(Self::default());
        }
        text.parse().map_err(|why| ExitError::Settings.because(format_args!("--set {text}: {why}")))
    }

    /// Returns a builder with these settings. The environment provides all other settings.
    pub(crate) fn builder(&self) -> PoolBuilder {
        self.pairs.iter().fold(Pool::builder(), |builder, (name, value)| builder.setting(name, value))
    }

    /// Refuses settings that a replay cannot apply. A rounding without a preset is not checked, because it may fit the recorded
    /// preset.
    pub(crate) fn check_for_replay(&self) -> Result<(), Box<dyn Error>> {
        let has_preset = self.pairs.iter().any(|(name, _)| name == "PINPOOL_PRESET");
        let checked = self.pairs.iter().filter(|(name, _)| has_preset || name != "PINPOOL_ROUNDING");
        let replay = Replay::under(&checked.cloned().collect::<Vec<_>>());
        replay.map(drop).map_err(|why| ExitError::Settings.because(why))
    }
}

/// Parses `NAME=VALUE` into the variable and its valid value. The prefix is optional.
pub(crate) fn pair(setting: &str) -> Result<(String, String), String> {
    let (name, value) =
        setting.split_once('=').ok_or_else(|| format!("`{setting}` is not NAME=VALUE (like MAX_BYTES=2GiB)"))?;
    let name = name.trim().to_uppercase();
    let name = if name.starts_with(env::PREFIX) { name } else { format!("{}{name}", env::PREFIX) };
    env::check(&name, value).map_err(|error| error.to_string())?;
    match value.trim() {
        "" => Err(format!("{name} has no value; give one, or leave it out for its default")),
        value => Ok((name, value.to_owned())),
    }
}
