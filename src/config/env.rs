//! The `PINPOOL_*` variables, one for each setting, and the only code that reads them.
//!
//! | in the environment | result |
//! | --- | --- |
//! | an invalid value | an error, since the default would not be what was intended |
//! | an unknown or retired name | a warning: it may come from another version |
//! | a value other than the one that code sets | a warning: code wins |
//! | an empty value | not set |

use std::ffi::OsString;

use super::settings::{Config, Settings, for_each_setting, setting_error};
use super::text::*;
use super::{Backend, CodeOnlySettings};
use crate::error::{Error, ErrorKind, Result};
use strsim::levenshtein;

/// The prefix of every variable.
pub const PREFIX: &str = "PINPOOL_";

/// Settings of builds before the first release, without the prefix, and what replaces them.
const RETIRED: [(&str, &str); 12] = [
    ("CALL_STACKS", "set call_stacks in Rust or C, or use `pinpool load --call-stacks`"),
    ("CLOSE_WAIT", "a pool that ends waits 30s for a stuck copy"),
    ("FENCE", "streams count completed copies in host memory, or record events if the driver refuses that"),
    ("HANDLE_TYPES", "pool memory cannot be exported; pinpool-shared-buffers shares buffers between processes"),
    ("MAX_FALLBACK_BYTES", "pageable memory is limited to as much as PINPOOL_MAX_BYTES"),
    ("PIN_THREADS", "the pool pins with one thread per core that the process may use"),
    ("POLL", "set maintenance_thread in code"),
    ("POOLS_PER_HOST", "share one limit with PINPOOL_LEDGER, or set PINPOOL_MAX_BYTES to a size"),
    ("PRESSURE", "the pool always follows the kernel's memory pressure"),
    ("RELEASE_POLICY", "register and cuda release memory on request, at the limit, under pressure, and at the end"),
    ("STUCK_AFTER", "a copy in flight for 30s is reported as stuck"),
    ("WRITE_COMBINED", "pool memory is always cached; allocate write-combined memory with cuMemHostAlloc"),
];

/// Prefixes, without `PINPOOL_`, of variables that do not configure a pool. These variables are for `pinpool run`, its preloaded
/// library, and the GPU tests.
const OTHER_PREFIXES: [&str; 3] = ["PRELOAD_", "REQUIRE_GPU", "GPU_"];

/// A function that parses a text and sets one of the [`CodeOnlySettings`] to the value.
type SetExtra = fn(&mut CodeOnlySettings, &str) -> Result<(), ParseError>;

/// Settings that code can set from text but that have no variable.
pub static WITHOUT_VARIABLE: &[(&str, SetExtra)] = &[
    ("maintenance_thread", |settings, text| {
        (SWITCH.parse)(text).map(|is_enabled| settings.maintenance_thread = Some(is_enabled))
    }),
    #[cfg(feature = "observe")]
    ("call_stacks", |settings, text| (COUNT.parse)(text).map(|every| settings.call_stacks = every)),
];

/// A variable and its setting.
#[derive(Debug)]
pub struct Variable {
    /// Full name.
    pub name: &'static str,
    /// The heading in the settings table.
    pub group: &'static str,
    /// The effect, in one sentence.
    pub meaning: &'static str,
    read: fn(&mut Settings, &str) -> Result<(), ParseError>,
    /// A function that returns the value of the variable in some settings, as text; `None` if they do not set it.
    set_to: fn(&Settings) -> Option<String>,
    show: fn(&Config) -> String,
}

impl Variable {
    /// Returns the default value, as text.
    pub fn default(&self) -> String {
        (self.show)(&Settings::default().or_defaults())
    }

    /// Returns the error for an invalid value. `from` is a text that names the origin of the value.
    fn invalid_value(&self, text: &str, error: &ParseError, from: &str) -> Error {
        let why = format!("{}; correct it, or leave it out for the default {}{from}", error.problem(), self.default());
        setting_error(self.name, text, why)
    }
}

macro_rules! variables {
    ($(group $group:literal; $(
        #[doc = $doc:literal] $(#[doc = $in_code:literal])?
        $variable:literal = $default:expr, $name:ident($argument:ty): $type:ty as $format:expr;
    )+)+) => {
        /// All variables.
        pub static VARIABLES: &[Variable] = &[
            $($(Variable {
                name: $variable,
                group: $group,
                meaning: $doc.trim_ascii_start(),
                read: |settings, text| {
                    settings.$name = Some(($format.parse)(text)?);
                    Ok(())
                },
                set_to: |settings| settings.$name.as_ref().map(|value| ($format.show)(value)),
                show: |config| ($format.show)(&config.$name),
            },)+)+
        ];
    };
}
for_each_setting!(variables);

fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

/// Returns the full name of the setting `name`, which may be in any case and without the prefix.
pub(crate) fn full_name(name: &str) -> String {
    if let Some((in_code, _)) = WITHOUT_VARIABLE.iter().find(|(in_code, _)| name.eq_ignore_ascii_case(in_code)) {
        return (*in_code).to_owned();
    }
    let name = name.to_uppercase();
    if name.starts_with(PREFIX) { name } else { format!("{PREFIX}{name}") }
}

/// Returns whether a pool has the setting called `name`, or had it in an earlier version.
pub fn is_known(name: &str) -> bool {
    find(name).is_some()
        || WITHOUT_VARIABLE.iter().any(|(in_code, _)| *in_code == name)
        || name.strip_prefix(PREFIX).is_some_and(|word| retired(word).is_some())
}

/// Sets the setting called `name`, a variable or one of [`WITHOUT_VARIABLE`], to the value in `text`. Empty text sets nothing.
pub(crate) fn set(settings: &mut Settings, name: &str, text: &str) -> Result<()> {
    let text = text.trim();
    if text.is_empty() && is_known(name) {
        return Ok(());
    }
    if let Some((name, read)) = WITHOUT_VARIABLE.iter().find(|(known, _)| *known == name) {
        return read(&mut settings.code_only, text).map_err(|error| setting_error(name, text, error.problem()));
    }
    let Some(variable) = find(name) else {
        if let Some(instead) = retired(name.strip_prefix(PREFIX).unwrap_or(name)) {
            settings.retired.push(format!("{name}={text}: {instead}"));
            return Ok(());
        }
        return Err(ErrorKind::UnknownSetting { name: name.to_owned(), advice: advice_for(name) }.into());
    };
    let before = (variable.set_to)(settings);
    (variable.read)(settings, text).map_err(|error| variable.invalid_value(text, &error, ""))?;
    let other = before.filter(|before| (variable.set_to)(settings).as_ref() != Some(before));
    let why = other.map(|other| format!("already set to {other}; leave one of the two out"));
    why.map_or(Ok(()), |why| Err(setting_error(variable.name, text, why)))
}

/// Checks that the variable called `name` can have the value `text`.
///
/// # Errors
///
/// The error that [`PoolBuilder::setting`](crate::PoolBuilder::setting) would cause.
pub fn check(name: &str, text: &str) -> Result<()> {
    set(&mut Settings::default(), name, text)
}

/// Returns a text that says what replaces the retired variable of this name; `None` if there is no such retired variable.
fn retired(word: &str) -> Option<String> {
    let (_, instead) = RETIRED.iter().find(|(retired, _)| *retired == word)?;
    Some(format!("retired and ignored; {instead}"))
}

/// Returns a suggestion for `name`, which is not a variable.
fn advice_for(name: &str) -> String {
    let list = || "`pinpool doctor --settings --all` lists the variables".to_owned();
    nearest(name).map_or_else(list, |nearest| format!("did you mean {nearest}?"))
}

/// Returns the variable with the most similar name, if that name is similar enough.
pub fn nearest(name: &str) -> Option<&'static str> {
    let word = |name: &str| name.trim_start_matches(PREFIX).replace('_', "").to_ascii_uppercase();
    let asked = word(name);
    let names = VARIABLES.iter().map(|variable| (levenshtein(&asked, &word(variable.name)), variable.name));
    let (changes, nearest) = names.min_by_key(|(changes, _)| *changes)?;
    // Up to a third of the letters may differ.
    (changes * 3 <= asked.len()).then_some(nearest)
}

/// A setting of a pool: one line of `pinpool doctor --settings`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VariableReport {
    /// Full name of its variable.
    pub name: &'static str,
    /// The value in effect.
    pub value: String,
    /// The origin of the value: `builder` for code, `variable`, `implied` by another setting, or `default`.
    pub origin: &'static str,
    /// The default.
    pub default: String,
    /// The effect, in one sentence.
    pub meaning: &'static str,
}

/// The settings of a pool, and their problems.
#[derive(Debug)]
#[non_exhaustive]
pub struct ResolvedSettings {
    /// Every setting with its value.
    pub variables: Vec<VariableReport>,
    /// Invalid values and contradictions; with any of them no pool is built.
    pub errors: Vec<Error>,
    /// Warnings: unknown and retired names, values that code replaces, settings without effect.
    pub warnings: Vec<String>,
    /// The settings in effect; an invalid one has its default.
    pub config: Config,
}

impl ResolvedSettings {
    /// Returns whether code or the environment sets the setting of the variable `name`.
    pub fn is_set(&self, name: &str) -> bool {
        self.variables.iter().any(|report| report.name == name && ["builder", "variable"].contains(&report.origin))
    }
}

/// Returns the settings that code, the environment or another setting determines, each with its value and the origin of the value.
pub(crate) fn origins(variables: &[VariableReport]) -> String {
    let set = variables.iter().filter(|variable| variable.origin != "default");
    let shown = set.map(|VariableReport { name, value, origin, .. }| format!("{name}={value} ({origin})"));
    shown.collect::<Vec<_>>().join(", ")
}

/// Returns every variable with its value in this process, and all problems.
pub fn report() -> ResolvedSettings {
    examine(&Settings::default(), Some(PREFIX))
}

/// Returns the variables as they would be in an environment of `pairs` (names and values), and all problems.
pub fn report_of(pairs: &[(String, String)]) -> ResolvedSettings {
    examine_in(&Settings::default(), PREFIX, pairs.iter().cloned())
}

/// Returns the settings of a pool, from `code` and from the variables that begin with `prefix`, and all problems in them. Reads no
/// variable if `prefix` is `None`.
pub(crate) fn examine(code: &Settings, prefix: Option<&str>) -> ResolvedSettings {
    // Invalid Unicode is replaced, so that a warning can name the variable.
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let pairs = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    examine_in(code, prefix.unwrap_or(PREFIX), pairs.filter(|_| prefix.is_some()))
}

fn examine_in(code: &Settings, prefix: &str, pairs: impl Iterator<Item = (String, String)>) -> ResolvedSettings {
    let mut env = Settings::default();
    let (mut errors, mut warnings) = (code.invalid_values(), code.retired.clone());
    let mut pairs: Vec<_> = pairs.filter(|(name, _)| name.starts_with(prefix)).collect();
    // The environment has no fixed order, but problems are reported in a stable order.
    pairs.sort();
    for (name, value) in &pairs {
        let (word, value) = (&name[prefix.len()..], value.trim());
        // In shells and compose files, an empty value is a usual way to unset a variable.
        if value.is_empty() {
            continue;
        }
        let Some(variable) = VARIABLES.iter().find(|variable| &variable.name[PREFIX.len()..] == word) else {
            if !OTHER_PREFIXES.iter().any(|other| word.starts_with(other)) {
                let why = retired(word).unwrap_or_else(|| format!("unknown and ignored; {}", advice_for(word)));
                warnings.push(format!("{name}={value}: {why}"));
            }
            continue;
        };
        match ((variable.set_to)(code), (variable.read)(&mut env, value)) {
            (Some(in_code), _) if (variable.set_to)(&env).as_ref() != Some(&in_code) => {
                warnings.push(format!(
                    "{name}={value}: ignored; the program sets {in_code} in code, which takes precedence"
                ));
            }
            (None, Err(error)) => {
                let from = if prefix == PREFIX { String::new() } else { format!(" (from {name})") };
                errors.push(variable.invalid_value(value, &error, &from));
            }
            _ => {}
        }
    }
    let is_set = |variable: &Variable, settings| (variable.set_to)(settings).is_some();
    let config = code.clone().resolve(env.clone());
    errors.extend(config.contradictions());
    warnings.extend(config.ineffective());
    let reports = VARIABLES.iter().map(|variable| {
        let (value, default) = ((variable.show)(&config), variable.default());
        let origin = match () {
            () if is_set(variable, code) => "builder",
            () if is_set(variable, &env) => "variable",
            () if value == default => "default",
            () => "implied",
        };
        VariableReport { name: variable.name, value, origin, default, meaning: variable.meaning }
    });
    ResolvedSettings { variables: reports.collect(), errors, warnings, config }
}

impl Settings {
    /// Returns the errors for values that code sets and that are invalid for their variables.
    fn invalid_values(&self) -> Vec<Error> {
        // A custom source is valid, although `PINPOOL_BACKEND` does not accept its name.
        let custom = matches!(self.backend, Some(Backend::Source(_)));
        let named = VARIABLES.iter().filter(|variable| !custom || variable.name != "PINPOOL_BACKEND");
        let invalid_values = named.filter_map(|variable| {
            let text = (variable.set_to)(self)?;
            let error = (variable.read)(&mut Self::default(), &text).err()?;
            Some(variable.invalid_value(&text, &error, ""))
        });
        invalid_values.collect()
    }
}

impl Config {
    /// Returns the value of the variable called `name`, as text.
    pub fn value_of(&self, name: &str) -> String {
        find(name).map(|variable| (variable.show)(self)).unwrap_or_default()
    }
}

/// Returns whether the environment shows that this process is one of several on its host: a torchrun rank, or a Ray process. In
/// that case [`SharedLimitChoice::Auto`](super::SharedLimitChoice::Auto) attaches a pool to the shared limit.
pub fn is_one_of_several() -> bool {
    shows_several(|name| std::env::var(name).ok())
}

fn shows_several(value_of: impl Fn(&str) -> Option<String>) -> bool {
    let is_any_set = |names: &[&str]| names.iter().any(|name| value_of(name).is_some_and(|it| !it.trim().is_empty()));
    let local_ranks = pinpool_os::host::limits::parse_ranks(value_of("LOCAL_WORLD_SIZE"));
    // The number of local ranks decides, if it is known: a host may have only one of many ranks.
    let is_rank = || local_ranks.map_or_else(|| is_any_set(&["RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"]), |n| n > 1);
    is_any_set(&["RAY_JOB_ID", "RAY_RAYLET_PID"]) || is_rank()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_another_word_has_none() {
        for (name, meant) in [
            ("PINPOOL_MAXBYTES", Some("PINPOOL_MAX_BYTES")),
            ("PINPOOL_max_bytes", Some("PINPOOL_MAX_BYTES")),
            ("PINPOOL_MAX_BYTE", Some("PINPOOL_MAX_BYTES")),
            ("PINPOOL_RESREVE", Some("PINPOOL_RESERVE")),
            ("MAX_IDLE", None),
            ("PINPOOL_ONFULL", Some("PINPOOL_ON_FULL")),
            ("PINPOOL_PURPLE", None),
            ("PINPOOL_", None),
            ("PINPOOL_\u{e4}\u{e4}\u{e4}", None),
        ] {
            assert_eq!(nearest(name), meant, "{name}");
        }
    }

    #[test]
    fn torchrun_and_ray_show_that_a_process_is_one_of_several() {
        let several = |pairs: &[(&str, &str)]| {
            shows_several(|of| pairs.iter().find(|(name, _)| *name == of).map(|&(_, value)| value.to_owned()))
        };
        assert!(several(&[("LOCAL_WORLD_SIZE", "2")]) && several(&[("RANK", "0")]) && several(&[("LOCAL_RANK", "3")]));
        assert!(several(&[("TORCHELASTIC_RUN_ID", "none")]) && several(&[("RAY_JOB_ID", "01000000")]));
        assert!(several(&[("LOCAL_WORLD_SIZE", "1"), ("RAY_RAYLET_PID", "7")]));
        assert!(!several(&[("RANK", "5"), ("LOCAL_WORLD_SIZE", "1")]), "the other ranks are on other hosts");
        assert!(!several(&[]) && !several(&[("RANK", "")]));
        assert!(!several(&[("WORLD_SIZE", "8"), ("RAY_ADDRESS", "auto")]));
    }
}
