//! The `PINPOOL_*` variables: one for each setting, one reader.
//!
//! A bad or unknown variable is a [`Warning`], never a panic and never silent; the default holds instead. The only
//! reader of the process environment.

use std::fmt;
use std::time::Duration;

use super::settings::{Config, Settings, for_each_setting};
use super::text::{self, *};
use super::{Backend, Ceiling, FenceKind, OnFull, Preset, PressureSource, ReleasePolicy};
use crate::error::Result;
use crate::size_class::Rounding;

/// What the name of every variable begins with.
pub const PREFIX: &str = "PINPOOL_";

/// A variable that sets something.
#[derive(Debug)]
pub struct Variable {
    /// Full name.
    pub name: &'static str,
    /// What it does, and when to change it.
    pub meaning: &'static str,
    default: fn() -> String,
    read: fn(&mut Settings, &str) -> Result<(), ParseError>,
    show: fn(&Config) -> String,
}

impl Variable {
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
                show: |config| ($format.show)(&config.$name),
            },)+
            Variable {
                name: "PINPOOL_REQUIRE_GPU",
                meaning: "Tests only: a GPU test without a GPU fails instead of being skipped: 0 or 1.",
                default: || "0".to_owned(),
                read: |_, text| text::switch(text).map(drop),
                show: |_| std::env::var("PINPOOL_REQUIRE_GPU").unwrap_or_else(|_| "0".to_owned()),
            },
        ];
    };
}
for_each_setting!(variables);

/// A variable that could not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    variable: String,
    value: String,
    problem: String,
    instead: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={} is {}; {}", self.variable, self.value, self.problem, self.instead)
    }
}

/// Reads `pairs` (names with the prefix among any others) into settings, with warnings about those it cannot use.
pub(crate) fn read(pairs: impl IntoIterator<Item = (String, String)>) -> (Settings, Vec<Warning>) {
    let mut settings = Settings::default();
    let mut warnings = Vec::new();
    let mut pairs: Vec<_> = pairs.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect();
    // The environment has no fixed order; warnings come out the same each time.
    pairs.sort();
    for (name, value) in pairs {
        let (problem, instead) = match VARIABLES.iter().find(|variable| variable.name == name) {
            None => ("not a variable of pinpool".to_owned(), "ignored, `pinpool env` lists the variables".to_owned()),
            Some(variable) => match (variable.read)(&mut settings, value.trim()) {
                Ok(()) => continue,
                Err(error) => (error.problem().to_owned(), format!("using the default {} instead", variable.default())),
            },
        };
        warnings.push(Warning { variable: name, value, problem, instead });
    }
    (settings, warnings)
}

/// [`read`] on the environment of the process.
pub(crate) fn read_process() -> (Settings, Vec<Warning>) {
    read(process_pairs())
}

/// Shows what is not Unicode with replacement characters, so that a warning can name it.
fn process_pairs() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
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
    report_of(process_pairs())
}

fn report_of(pairs: impl IntoIterator<Item = (String, String)>) -> Result<(Vec<VariableReport>, Vec<Warning>)> {
    let pairs: Vec<_> = pairs.into_iter().collect();
    let (settings, warnings) = read(pairs.iter().cloned());
    let config = settings.resolve()?;
    let usable = |name: &str| pairs.iter().any(|(set, _)| set == name) && !warnings.iter().any(|w| w.variable == name);
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

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn every_default_in_the_table_is_the_default_that_holds() {
        let (entries, warnings) = report_of(pairs(&[])).unwrap();
        assert!(warnings.is_empty());
        for entry in entries {
            assert_eq!((entry.value.as_str(), entry.origin), (entry.default.as_str(), "default"), "{}", entry.name);
        }
    }

    #[test]
    fn every_default_can_be_set_explicitly() {
        for variable in VARIABLES {
            let (_, warnings) = read(pairs(&[(variable.name, &variable.default())]));
            assert_eq!(warnings, [], "{}", variable.name);
        }
    }

    #[test]
    fn nonsense_in_any_variable_is_named_with_its_value_and_what_holds_instead() {
        for variable in VARIABLES {
            let (_, warnings) = read(pairs(&[(variable.name, "purple")]));
            let text = warnings.first().map(ToString::to_string).unwrap_or_default();
            for part in [variable.name, "purple", &variable.default()] {
                assert!(text.contains(part), "{}: {text}", variable.name);
            }
        }
    }

    #[test]
    fn unknown_variables_of_ours_are_named_and_others_left_alone() {
        let (_, warnings) = read(pairs(&[("PINPOOL_MAXBYTES", "1"), ("PATH", "/bin"), ("PINPOOLX", "1")]));
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].to_string().contains("PINPOOL_MAXBYTES=1"), "{}", warnings[0]);
    }

    #[test]
    fn values_are_read() {
        let (settings, warnings) = read(pairs(&[
            ("PINPOOL_BACKEND", "sim:3GiB"),
            ("PINPOOL_DEVICE", "2"),
            ("PINPOOL_POOL_SIZE_LIMIT", "7"),
            ("PINPOOL_AUTO_RESIZE", "off"),
            ("PINPOOL_ROUNDING", "EXACT"),
            ("PINPOOL_MAX_BYTES", "64MiB"),
            ("PINPOOL_IDLE_TIMEOUT", "none"),
            ("PINPOOL_ON_FULL", "pageable"),
            ("PINPOOL_PRESSURE", "/tmp/psi"),
            ("PINPOOL_LOG_EVERY", "1"),
            ("PINPOOL_CLOSE_WAIT", "250ms"),
            ("PINPOOL_FENCE", "timeline"),
            ("PINPOOL_STUCK_AFTER", "2s"),
            ("PINPOOL_PIN_THREADS", "8"),
        ]));
        assert_eq!(warnings, []);
        let config = settings.resolve().unwrap();
        assert!(matches!(config.backend, Backend::Sim { total_bytes } if total_bytes == 3 << 30));
        assert_eq!((config.device, config.pool_size_limit, config.auto_resize), (2, 7, false));
        assert_eq!(
            (config.rounding, config.max_bytes, config.log_every),
            (Rounding::Exact, Ceiling::Bytes(64 << 20), 1)
        );
        assert_eq!((config.close_wait.as_millis(), config.idle_timeout, config.on_full), (250, None, OnFull::Pageable));
        assert_eq!((config.fence, config.stuck_after.as_secs()), (FenceKind::Timeline, 2));
        assert_eq!(config.pin_threads, Some(8));
        assert_eq!(config.pressure, PressureSource::File("/tmp/psi".into()));
    }

    #[test]
    fn a_ceiling_of_nothing_is_refused_and_none_is_no_ceiling() {
        let (settings, warnings) = read(pairs(&[("PINPOOL_MAX_BYTES", "0")]));
        assert_eq!((settings.max_bytes, warnings.len()), (None, 1));
        let (settings, warnings) = read(pairs(&[("PINPOOL_MAX_BYTES", "none")]));
        assert_eq!((settings.max_bytes, warnings.len()), (Some(Ceiling::None), 0));
    }

    #[test]
    fn the_report_says_where_a_value_comes_from() {
        let set = pairs(&[("PINPOOL_POOL_SIZE_LIMIT", "0"), ("PINPOOL_LOG_EVERY", "x")]);
        let (entries, warnings) = report_of(set).unwrap();
        let origin = |name| entries.iter().find(|entry| entry.name == name).map(|entry| entry.origin);
        assert_eq!(origin("PINPOOL_POOL_SIZE_LIMIT"), Some("environment"));
        assert_eq!(origin("PINPOOL_AUTO_RESIZE"), Some("implied"));
        assert_eq!(origin("PINPOOL_LOG_EVERY"), Some("default"));
        assert_eq!(warnings.len(), 1);
    }
}
