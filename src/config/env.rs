//! The `PINPOOL_*` variables: one for each setting, one reader.
//!
//! A value that cannot be read is an error of building a pool: nobody means the default who writes something else. A name that
//! is not known is a warning, since it may be that of a later version. An empty variable is not set. The only reader of the
//! process environment.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::settings::{Config, Settings, for_each_setting, refused, unreadable};
use super::text::*;
use super::{Backend, Ceiling, HandleTypes, HugeTlb, LedgerName, OnFull, Preset, PressureSource};
use crate::error::{Error, ErrorKind, Result};
use crate::size_class::Rounding;

/// What the name of every variable begins with.
pub const PREFIX: &str = "PINPOOL_";

/// Variables of earlier versions, and what holds instead.
const RETIRED: [(&str, &str); 2] = [
    ("PINPOOL_FENCE", "streams write numbers to host memory, and events replace them if the driver refuses that"),
    (
        "PINPOOL_RELEASE_POLICY",
        "register and cuda release memory in trim() and clear(), at the limit when nothing else serves a request, and at the end",
    ),
];

/// How the names begin that set nothing of a pool: those of `pinpool run` with the library that it loads, and of the tests
/// that need a GPU.
const OF_NO_POOL: [&str; 3] = ["PINPOOL_PRELOAD_", "PINPOOL_REQUIRE_GPU", "PINPOOL_GPU_"];

/// A variable that sets something.
#[derive(Debug)]
pub struct Variable {
    /// Full name.
    pub name: &'static str,
    /// What it does, and when to change it.
    pub meaning: &'static str,
    default: fn() -> String,
    read: fn(&mut Settings, &str) -> Result<(), ParseError>,
    /// What it sets there, as text; `None` if nothing.
    set_to: fn(&Settings) -> Option<String>,
    show: fn(&Config) -> String,
}

impl Variable {
    /// What holds if it is not set.
    pub fn default(&self) -> String {
        (self.default)()
    }

    fn is_set(&self, settings: &Settings) -> bool {
        (self.set_to)(settings).is_some()
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
                set_to: |settings| settings.$name.as_ref().map(|value| ($format.show)(value)),
                show: |config| ($format.show)(&config.$name),
            },)+
        ];
    };
}
for_each_setting!(variables);

/// Sets what the variable called `name` sets, from `text` as its value. An empty text sets nothing.
pub(crate) fn set(settings: &mut Settings, name: &str, text: &str) -> Result<()> {
    let text = text.trim();
    let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
        let why = problem_of(name, "");
        return Err(ErrorKind::Setting { name: "variable", value: name.to_owned(), why }.into());
    };
    if text.is_empty() {
        return Ok(());
    }
    (variable.read)(settings, text).map_err(|error| unreadable(variable.name, text, &error, &variable.default()))
}

/// Why `name`, which is no variable, sets nothing.
fn problem_of(name: &str, ignored: &str) -> String {
    match RETIRED.iter().find(|(retired, _)| *retired == name) {
        Some((_, instead)) => format!("no longer a variable of pinpool{ignored}: {instead}"),
        None => format!("not a variable of pinpool{ignored}; {}", advice_for(name)),
    }
}

/// What helps who wrote `name`, which is no variable.
fn advice_for(name: &str) -> String {
    match nearest(name) {
        Some(nearest) => format!("did you mean {nearest}?"),
        None => "`pinpool doctor --settings --all` lists the variables".to_owned(),
    }
}

/// The variable whose name `name` was probably meant to be.
pub fn nearest(name: &str) -> Option<&'static str> {
    let word = |name: &str| name.trim_start_matches(PREFIX).replace('_', "").to_ascii_uppercase();
    let asked = word(name);
    let names = VARIABLES.iter().map(|variable| (changes_between(&asked, &word(variable.name)), variable.name));
    let (changes, nearest) = names.min_by_key(|(changes, _)| *changes)?;
    // A word of 6 letters may have 2 wrong ones; with more it is another word.
    (changes * 3 <= asked.len()).then_some(nearest)
}

/// The fewest letters that are to be added, dropped or replaced to make one word of the other.
fn changes_between(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (column, of_other) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(letter != of_other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

/// Limits that are shown also where they have their defaults.
const LIMITS: [&str; 2] = ["PINPOOL_MAX_BYTES", "PINPOOL_POOL_SIZE_LIMIT"];

/// The limits and every setting that was set, with where each value comes from: `builder` for what code sets, `variable`,
/// `implied` by another setting, or `default`.
pub(crate) fn origins(code: &Settings, env: &Settings, config: &Config) -> String {
    let show = |variable: &Variable| {
        let value = (variable.show)(config);
        let origin = match () {
            () if variable.is_set(code) => "builder",
            () if variable.is_set(env) => "variable",
            () if !LIMITS.contains(&variable.name) => return None,
            () if value == variable.default() => "default",
            () => "implied",
        };
        Some(format!("{}={value} ({origin})", variable.name))
    };
    VARIABLES.iter().filter_map(show).collect::<Vec<_>>().join(", ")
}

/// The variables whose settings `code` sets.
#[cfg(feature = "observe")]
pub(crate) fn set_in(code: &Settings) -> impl Iterator<Item = &'static str> {
    VARIABLES.iter().filter(|variable| variable.is_set(code)).map(|variable| variable.name)
}

/// The variables of `env`, whose names begin with `prefix`, that do not hold, since `code` sets something else.
pub(crate) fn outdone(code: &Settings, env: &Settings, prefix: &str) -> impl Iterator<Item = String> {
    VARIABLES.iter().filter_map(|variable| {
        let (in_code, asked) = (variable.set_to)(code).zip((variable.set_to)(env))?;
        let name = variable.name.replacen(PREFIX, prefix, 1);
        let line =
            || format!("{name}={asked}: not used: the program sets {in_code} in code, which goes before the variable");
        (in_code != asked).then(line)
    })
}

/// A variable that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadVariable {
    /// The name as it stands in the environment.
    name: String,
    value: String,
    problem: String,
    /// What it would set; `None` if the name is not known.
    variable: Option<&'static str>,
}

impl BadVariable {
    /// Whether its value cannot be read, so that no pool is built with it unless code sets what it would; otherwise its name
    /// is not known, which is a warning.
    pub fn is_error(&self) -> bool {
        self.variable.is_some()
    }
}

impl fmt::Display for BadVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}: {}", self.name, self.value, self.problem)
    }
}

/// The error of a pool whose code sets `settings`; `None` if code sets what each unreadable variable would.
pub(crate) fn refusal(bad: &[BadVariable], settings: &Settings) -> Option<Error> {
    let variable_of = |bad: &BadVariable| VARIABLES.iter().find(|variable| Some(variable.name) == bad.variable);
    let mut refused = bad.iter().filter(|bad| variable_of(bad).is_some_and(|variable| !variable.is_set(settings)));
    let first = refused.next()?;
    let others: Vec<_> = refused.map(|bad| &*bad.name).collect();
    let others = if others.is_empty() { String::new() } else { format!("; nor can {} be read", others.join(", ")) };
    let name = first.variable?;
    let from = if name == first.name { String::new() } else { format!(" (from {})", first.name) };
    let why = format!("{}{from}{others}", first.problem);
    Some(ErrorKind::Setting { name, value: first.value.clone(), why }.into())
}

/// Reads `pairs` (names with the prefix among any others) into settings, with those that it cannot use.
pub(crate) fn read(pairs: impl IntoIterator<Item = (String, String)>) -> (Settings, Vec<BadVariable>) {
    let mut settings = Settings::default();
    let mut bad = Vec::new();
    let ours = |name: &str| name.starts_with(PREFIX) && !OF_NO_POOL.iter().any(|prefix| name.starts_with(prefix));
    let mut pairs: Vec<_> = pairs.into_iter().filter(|(name, _)| ours(name)).collect();
    // The environment has no fixed order; what is wrong comes out the same each time.
    pairs.sort();
    for (name, value) in pairs {
        let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
            let problem = problem_of(&name, ", and ignored");
            bad.push(BadVariable { name, value, problem, variable: None });
            continue;
        };
        // An empty variable is not set: in a shell and in compose files it is how a variable is taken away.
        if value.trim().is_empty() {
            continue;
        }
        if let Err(error) = (variable.read)(&mut settings, value.trim()) {
            let default = variable.default();
            let problem = format!("{}; correct it, or leave it out for the default {default}", error.problem());
            bad.push(BadVariable { name, value, problem, variable: Some(variable.name) });
        }
    }
    (settings, bad)
}

/// Settings from the environment of the process: from variables whose names begin with `prefix` in place of `PINPOOL_`.
pub(crate) fn read_process(prefix: &str) -> (Settings, Vec<BadVariable>) {
    if prefix == PREFIX {
        return read(process_pairs());
    }
    let renamed = |(name, value): (String, String)| Some((format!("{PREFIX}{}", name.strip_prefix(prefix)?), value));
    let (settings, mut bad) = read(process_pairs().filter_map(renamed));
    for variable in &mut bad {
        variable.name = variable.name.replacen(PREFIX, prefix, 1);
    }
    (settings, bad)
}

/// Shows what is not Unicode with replacement characters, so that a warning can name it.
fn process_pairs() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}

/// Ranks of torchrun on this host, this process among them; 1 without torchrun.
pub fn local_ranks() -> u64 {
    let ranks = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.trim().parse().ok());
    ranks.unwrap_or(1).max(1)
}

/// Whether the environment shows that this process is one of several on its host: a rank of torchrun, or a process of Ray.
/// [`LedgerName::Auto`] attaches a pool to the host ledger then.
pub fn is_one_of_several() -> bool {
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

impl Settings {
    /// The settings that are set and have no effect under `config`, which was made of them.
    pub(crate) fn ineffective(&self, config: &Config) -> Vec<Error> {
        let (is_arena, has_reserve) = (config.preset == Preset::Adaptive, config.reserve_bytes > 0);
        let is_huge = match config.backend {
            Backend::Auto | Backend::Gpu | Backend::Register => is_arena,
            Backend::Cuda | Backend::Sim { .. } => false,
            _ => has_reserve && config.reserve_wait,
        };
        let (waits, is_pageable) = (config.wait.is_some(), config.on_full == OnFull::Pageable);
        let rules = [
            ("PINPOOL_IDLE_TIMEOUT", self.idle_timeout.is_some() && !is_arena, "under PINPOOL_PRESET=tensorflow"),
            ("PINPOOL_HUGETLB", config.hugetlb != HugeTlb::Off && !is_huge, "without a reserve, or register"),
            ("PINPOOL_RESERVE_WAIT", !config.reserve_wait && !has_reserve, "without PINPOOL_RESERVE"),
            ("PINPOOL_ON_FULL", is_pageable && !waits, "with PINPOOL_WAIT=none, which never ends"),
        ];
        let problem = |(name, _, why): (&'static str, bool, &str)| {
            let value = values(config).find(|(known, _)| known == name).map(|(_, value)| value);
            refused(name, value.unwrap_or_default(), format!("has no effect {why}"))
        };
        rules.into_iter().filter(|(_, is_ineffective, _)| *is_ineffective).map(problem).collect()
    }
}

/// A variable in this process: one line of `pinpool doctor --settings`.
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

/// What the environment sets.
#[derive(Debug)]
#[non_exhaustive]
pub struct EnvReport {
    /// Every variable with the value that holds in this process.
    pub variables: Vec<VariableReport>,
    /// The variables that cannot be used.
    pub bad: Vec<BadVariable>,
    /// Settings that contradict each other.
    pub contradictions: Vec<Error>,
    /// Settings without effect, as the others are.
    pub ineffective: Vec<Error>,
    /// The settings that hold; what cannot be used has its default.
    pub config: Config,
}

impl EnvReport {
    /// Whether no pool is built with these settings, unless code sets others.
    pub fn is_refused(&self) -> bool {
        !self.contradictions.is_empty() || self.bad.iter().any(BadVariable::is_error)
    }
}

/// Every variable with the value that holds in this process, and all that is wrong with them.
pub fn report() -> EnvReport {
    report_of(&process_pairs().collect::<Vec<_>>())
}

/// The variables as they would be in an environment of `pairs` (names and values), and all that is wrong with them.
pub fn report_of(pairs: &[(String, String)]) -> EnvReport {
    let (settings, bad) = read(pairs.iter().cloned());
    let (config, contradictions) = settings.clone().examine();
    let is_set = |name: &str| pairs.iter().any(|(set, value)| set == name && !value.trim().is_empty());
    let usable = |name: &str| is_set(name) && !bad.iter().any(|bad| bad.name == name);
    let reports = VARIABLES.iter().map(|variable| {
        let (name, value, default) = (variable.name, (variable.show)(&config), variable.default());
        let origin = match () {
            () if usable(name) => "environment",
            () if value == default => "default",
            () => "implied",
        };
        VariableReport { name, value, origin, default, meaning: variable.meaning }
    });
    EnvReport { variables: reports.collect(), bad, contradictions, ineffective: settings.ineffective(&config), config }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_another_word_has_none() {
        assert_eq!((changes_between("", "abc"), changes_between("abc", ""), changes_between("abc", "abc")), (3, 3, 0));
        assert_eq!((changes_between("kitten", "sitting"), changes_between("flaw", "lawn")), (3, 2));
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
            shows_several(pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())))
        };
        assert!(several(&[("LOCAL_WORLD_SIZE", "2")]) && several(&[("RANK", "0")]) && several(&[("LOCAL_RANK", "3")]));
        assert!(several(&[("TORCHELASTIC_RUN_ID", "none")]) && several(&[("RAY_JOB_ID", "01000000")]));
        assert!(several(&[("LOCAL_WORLD_SIZE", "1"), ("RAY_RAYLET_PID", "7")]));
        assert!(!several(&[("RANK", "5"), ("LOCAL_WORLD_SIZE", "1")]), "the other ranks are on other hosts");
        assert!(!several(&[]) && !several(&[("RANK", "")]) && !several(&[("WORLD_SIZE", "8"), ("PATH", "/bin")]));
    }
}
