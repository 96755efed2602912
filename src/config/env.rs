//! The `PINPOOL_*` variables: one for each setting, one reader.
//!
//! A bad or unknown variable is a [`Warning`], never a panic and never silent; the default holds instead. Where the default
//! would be a risk (more memory than was allowed, another device), it is an error of building a pool. An empty variable is
//! not set. The only reader of the process environment.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::settings::{Config, Settings, for_each_setting};
use super::text::{self, *};
use super::{
    Backend, Ceiling, FenceKind, HandleTypes, HugeTlb, LedgerName, OnFull, Preset, PressureSource, ReleasePolicy,
};
use crate::error::{Error, ErrorKind, Result};
use crate::size_class::Rounding;

/// What the name of every variable begins with.
pub const PREFIX: &str = "PINPOOL_";

/// Variables of `pinpool run` and the library that it loads, which set nothing of a pool.
const PRELOAD_PREFIX: &str = "PINPOOL_PRELOAD_";

/// A variable that sets something.
#[derive(Debug)]
pub struct Variable {
    /// Full name.
    pub name: &'static str,
    /// What it does, and when to change it.
    pub meaning: &'static str,
    default: fn() -> String,
    read: fn(&mut Settings, &str) -> Result<(), ParseError>,
    is_set: fn(&Settings) -> bool,
    show: fn(&Config) -> String,
    is_strict: bool,
}

impl Variable {
    /// Whether a value that cannot be read is an error of building a pool, not a warning.
    pub fn is_strict(&self) -> bool {
        self.is_strict
    }

    /// What holds if it is not set.
    pub fn default(&self) -> String {
        (self.default)()
    }
}

macro_rules! variables {
    ($(
        $(#[doc = $doc:literal])+
        $variable:literal = $default:expr, $name:ident($argument:ty): $type:ty as $format:expr;
    )+) => {
        /// Every variable there is.
        pub static VARIABLES: &[Variable] = &[
            $(Variable {
                name: $variable,
                meaning: concat!($($doc),+).trim_ascii_start(),
                default: || {
                    let default: $type = $default;
                    ($format.show)(&default)
                },
                read: |settings, text| {
                    settings.$name = Some(($format.parse)(text)?);
                    Ok(())
                },
                is_set: |settings| settings.$name.is_some(),
                show: |config| ($format.show)(&config.$name),
                is_strict: {
                    let format: ValueFormat<$type> = $format;
                    format.is_strict
                },
            },)+
            Variable {
                name: "PINPOOL_REQUIRE_GPU",
                meaning: "Tests only: a GPU test without a GPU fails instead of being skipped: 0 or 1.",
                default: || "0".to_owned(),
                read: |_, text| text::switch(text).map(drop),
                is_set: |_| false,
                is_strict: false,
                show: |_| {
                    let value = std::env::var("PINPOOL_REQUIRE_GPU").ok().filter(|value| !value.trim().is_empty());
                    value.unwrap_or_else(|| "0".to_owned())
                },
            },
        ];
    };
}
for_each_setting!(variables);

/// Sets what the variable called `name` sets, from `text` as its value. An empty text sets nothing.
pub(crate) fn set(settings: &mut Settings, name: &str, text: &str) -> Result<()> {
    let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
        let names: Vec<_> = VARIABLES.iter().map(|variable| variable.name).collect();
        let why = format!("no variable of pinpool; they are {}", names.join(", "));
        return Err(ErrorKind::Setting { name: "variable", value: name.to_owned(), why }.into());
    };
    let text = text.trim();
    if text.is_empty() {
        return Ok(());
    }
    (variable.read)(settings, text).map_err(|error| {
        let why = format!("{}; correct it, or leave it out for the default {}", error.problem(), variable.default());
        ErrorKind::Setting { name: variable.name, value: text.to_owned(), why }.into()
    })
}

/// Limits that are shown also where they have their defaults.
const LIMITS: [&str; 2] = ["PINPOOL_MAX_BYTES", "PINPOOL_POOL_SIZE_LIMIT"];

/// The limits and every setting that was set, with where each value comes from: `builder` for what code sets, `variable`,
/// `implied` by another setting, or `default`.
pub(crate) fn origins(code: &Settings, env: &Settings, config: &Config) -> String {
    let show = |variable: &Variable| {
        let value = (variable.show)(config);
        let origin = match () {
            () if (variable.is_set)(code) => "builder",
            () if (variable.is_set)(env) => "variable",
            () if !LIMITS.contains(&variable.name) => return None,
            () if value == variable.default() => "default",
            () => "implied",
        };
        Some(format!("{}={value} ({origin})", variable.name))
    };
    VARIABLES.iter().filter_map(show).collect::<Vec<_>>().join(", ")
}

/// A variable that could not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// With the prefix `PINPOOL_`.
    variable: String,
    /// The name in the environment, if it has another prefix.
    read_from: Option<String>,
    value: String,
    problem: String,
    instead: String,
    is_error: bool,
}

impl Warning {
    /// Whether no pool is built with this value, unless code sets another.
    pub fn is_error(&self) -> bool {
        self.is_error
    }

    /// The error of a pool whose code sets `settings`; `None` if the default stands in, or code sets what this variable
    /// would.
    pub(crate) fn refusal(&self, settings: &Settings) -> Option<Error> {
        let variable = VARIABLES.iter().find(|variable| self.is_error && variable.name == self.variable)?;
        if (variable.is_set)(settings) {
            return None;
        }
        let from = self.read_from.as_ref().map(|name| format!(" (from {name})")).unwrap_or_default();
        let why = format!("{}{from}; correct it, or leave it out for the default {}", self.problem, variable.default());
        Some(ErrorKind::Setting { name: variable.name, value: self.value.clone(), why }.into())
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.read_from.as_ref().unwrap_or(&self.variable);
        write!(f, "{name}={} is {}; {}", self.value, self.problem, self.instead)
    }
}

/// Reads `pairs` (names with the prefix among any others) into settings, with warnings about those it cannot use.
pub(crate) fn read(pairs: impl IntoIterator<Item = (String, String)>) -> (Settings, Vec<Warning>) {
    let mut settings = Settings::default();
    let mut warnings = Vec::new();
    let ours = |name: &str| name.starts_with(PREFIX) && !name.starts_with(PRELOAD_PREFIX);
    let mut pairs: Vec<_> = pairs.into_iter().filter(|(name, _)| ours(name)).collect();
    // The environment has no fixed order; warnings come out the same each time.
    pairs.sort();
    for (name, value) in pairs {
        let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
            let (problem, instead) = ("not a variable of pinpool", "ignored, `pinpool env` lists the variables");
            let (problem, instead) = (problem.to_owned(), instead.to_owned());
            warnings.push(Warning { variable: name, read_from: None, value, problem, instead, is_error: false });
            continue;
        };
        // An empty variable is not set: in a shell and in compose files it is how a variable is taken away.
        if value.trim().is_empty() {
            continue;
        }
        if let Err(error) = (variable.read)(&mut settings, value.trim()) {
            let (default, is_error) = (variable.default(), variable.is_strict);
            let instead = if is_error {
                format!("no pool is built with it (the default is {default})")
            } else {
                format!("using the default {default} instead")
            };
            let problem = error.problem().to_owned();
            warnings.push(Warning { variable: name, read_from: None, value, problem, instead, is_error });
        }
    }
    (settings, warnings)
}

/// Settings from the environment of the process: from variables whose names begin with `prefix` in place of `PINPOOL_`.
pub(crate) fn read_process(prefix: &str) -> (Settings, Vec<Warning>) {
    if prefix == PREFIX {
        return read(process_pairs());
    }
    let renamed = |(name, value): (String, String)| Some((format!("{PREFIX}{}", name.strip_prefix(prefix)?), value));
    let (settings, mut warnings) = read(process_pairs().filter_map(renamed));
    for warning in &mut warnings {
        warning.read_from = Some(warning.variable.replacen(PREFIX, prefix, 1));
    }
    (settings, warnings)
}

/// Shows what is not Unicode with replacement characters, so that a warning can name it.
fn process_pairs() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}

/// Whether the environment shows that this process is one of several on its host: a rank of torchrun, or a process of Ray.
pub(crate) fn is_one_of_several() -> bool {
    shows_several(process_pairs())
}

fn shows_several(pairs: impl Iterator<Item = (String, String)>) -> bool {
    let (mut is_rank, mut local_ranks, mut is_of_ray) = (false, None, false);
    for (name, value) in pairs.filter(|(_, value)| !value.trim().is_empty()) {
        match name.as_str() {
            "LOCAL_WORLD_SIZE" => local_ranks = value.trim().parse::<u64>().ok(),
            "RANK" | "LOCAL_RANK" | "TORCHELASTIC_RUN_ID" => is_rank = true,
            name => is_of_ray |= name.starts_with("RAY_"),
        }
    }
    // A host may have one rank of many.
    is_of_ray || local_ranks.map_or(is_rank, |ranks| ranks > 1)
}

/// Each variable with the value that holds under `config`.
pub(crate) fn values(config: &Config) -> impl Iterator<Item = (String, String)> {
    VARIABLES.iter().map(|variable| (variable.name.to_owned(), (variable.show)(config)))
}

/// The variables of pinpool that are set in this process, sorted.
pub(crate) fn set_in_process() -> Vec<String> {
    let ours = process_pairs().filter(|(name, value)| name.starts_with(PREFIX) && !value.trim().is_empty());
    let mut set: Vec<_> = ours.map(|(name, value)| format!("{name}={value}")).collect();
    set.sort();
    set
}

/// A variable in this process: one line of `pinpool env`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VariableReport {
    /// Full name.
    pub name: &'static str,
    /// The value that holds.
    pub value: String,
    /// Where that comes from: `environment`, `default` or `implied`.
    pub origin: &'static str,
    /// What holds if the variable is not set.
    pub default: String,
    /// What it does.
    pub meaning: &'static str,
}

/// Every variable with the value that holds in this process, and warnings about those that cannot be used.
///
/// # Errors
///
/// [`Error::is_setting`](crate::Error::is_setting) if two variables contradict each other.
pub fn report() -> Result<(Vec<VariableReport>, Vec<Warning>)> {
    report_of(&process_pairs().collect::<Vec<_>>())
}

/// The same for an environment of `pairs`.
pub(crate) fn report_of(pairs: &[(String, String)]) -> Result<(Vec<VariableReport>, Vec<Warning>)> {
    let (settings, warnings) = read(pairs.iter().cloned());
    let config = settings.resolve()?;
    let is_set = |name: &str| pairs.iter().any(|(set, value)| set == name && !value.trim().is_empty());
    let usable = |name: &str| is_set(name) && !warnings.iter().any(|w| w.variable == name);
    let reports = VARIABLES.iter().map(|variable| {
        let (name, value, default) = (variable.name, (variable.show)(&config), variable.default());
        let origin = match () {
            () if usable(name) => "environment",
            () if value == default => "default",
            () => "implied",
        };
        VariableReport { name, value, origin, default, meaning: variable.meaning }
    });
    Ok((reports.collect(), warnings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchrun_and_ray_show_that_a_process_is_one_of_several() {
        let several = |pairs: &[(&str, &str)]| {
            shows_several(pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())))
        };
        assert!(several(&[("LOCAL_WORLD_SIZE", "2")]) && several(&[("RANK", "0")]) && several(&[("LOCAL_RANK", "3")]));
        assert!(several(&[("TORCHELASTIC_RUN_ID", "none")]) && several(&[("RAY_JOB_ID", "01000000")]));
        assert!(several(&[("LOCAL_WORLD_SIZE", "1"), ("RAY_RAYLET_PID", "7")]));
        assert!(!several(&[("RANK", "5"), ("LOCAL_WORLD_SIZE", "1")]), "the other ranks are on other hosts");
        assert!(!several(&[]) && !several(&[("RANK", "")]) && !several(&[("WORLD_SIZE", "8"), ("PATH", "/bin")]));
    }
}
