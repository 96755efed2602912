//! Parsing and formatting of values: words, sizes and times.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use super::{Backend, HugeTlb, Limit, OnFull, Preset, Rounding, SharedLimitChoice, StatsSocket};

mod quantities;

use quantities::show_time;
pub use quantities::{format_bytes, parse_bytes, parse_duration};

/// An invalid value. The text names the value and the expected format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is {problem}")]
pub struct ParseError {
    value: String,
    problem: Cow<'static, str>,
}

impl ParseError {
    /// Returns the error for `value`. `problem` continues the sentence "`value` is ...": `not a size (like 64MiB)`, `less than 4KiB`.
    #[doc(hidden)]
    pub fn new(value: impl Into<String>, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { value: value.into(), problem: problem.into() }
    }

    /// Returns the problem of the value: `not a size (like 64MiB)`.
    #[doc(hidden)]
    pub fn problem(&self) -> &str {
        &self.problem
    }
}

/// Implements names, parsing and formatting for an enum with one word per value.
macro_rules! words {
    ($type:ident, $one:literal: $($variant:ident = $word:literal $(or $alias:literal)*),+) => {
        impl $type {
            /// Returns the name in settings and reports.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = ParseError;

            fn from_str(text: &str) -> Result<Self, ParseError> {
                $(if [$word $(, $alias)*].iter().any(|word| text.eq_ignore_ascii_case(word)) {
                    return Ok(Self::$variant);
                })+
                Err(ParseError::new(text, concat!("not ", $one, " (", words!(@list $($word)+), ")")))
            }
        }
    };
    (@list $first:literal $($word:literal)*) => { concat!($first $(, ", ", $word)*) };
}

words!(Preset, "a preset": Adaptive = "adaptive", TensorFlow = "tensorflow");
words!(Rounding, "a rounding": Eighths = "eighths", Pow2 = "pow2", Exact = "exact" or "noop");
words!(HugeTlb, "a kind of huge pages": Off = "off", Auto = "auto", Pages2MiB = "2MiB" or "2M", Pages1GiB = "1GiB" or "1G");
words!(OnFull, "a value of PINPOOL_ON_FULL": Error = "error", Pageable = "pageable");

impl FromStr for Backend {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let known = [Self::Auto, Self::Gpu, Self::Vmm, Self::Register, Self::Cuda, Self::Mlock, Self::Heap];
        let found = known.into_iter().find(|backend| text.eq_ignore_ascii_case(backend.name()));
        let problem = "not a backend (auto, gpu, vmm, register, cuda, mlock, heap)";
        found.ok_or_else(|| ParseError::new(text, problem))
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Limit {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::Unlimited),
            _ => match parse_bytes(text)? {
                0 => Err(ParseError::new(
                    text,
                    "not a limit, since every request would fail (PINPOOL_POOL_SIZE_LIMIT=0 turns pooling off)",
                )),
                bytes => Ok(Self::Bytes(bytes)),
            },
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Unlimited => f.write_str("none"),
            Self::Bytes(bytes) => f.write_str(&format_bytes(*bytes)),
        }
    }
}

impl FromStr for SharedLimitChoice {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text.to_ascii_lowercase().as_str() {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            _ => match pinpool_shared_limit::problem_of(text) {
                Some(problem) => Err(ParseError::new(text, problem)),
                None => Ok(Self::Named(text.to_owned())),
            },
        }
    }
}

impl fmt::Display for SharedLimitChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Auto => "auto",
            Self::Named(name) => name,
        })
    }
}

/// The text format of a variable: how its value is parsed and shown.
pub(super) struct ValueFormat<T> {
    pub(super) parse: fn(&str) -> Result<T, ParseError>,
    pub(super) show: fn(&T) -> String,
}

impl<T> ValueFormat<T> {
    const fn new(parse: fn(&str) -> Result<T, ParseError>, show: fn(&T) -> String) -> Self {
        Self { parse, show }
    }
}

pub(super) const fn word<T: FromStr<Err = ParseError> + ToString>() -> ValueFormat<T> {
    ValueFormat::new(T::from_str, T::to_string)
}

pub(super) const ORDINAL: ValueFormat<u32> =
    ValueFormat::new(|text| number(text, "not a device number (0, 1, ...)"), u32::to_string);
pub(super) const COUNT: ValueFormat<u64> = ValueFormat::new(|text| number(text, "not a whole number"), u64::to_string);
pub(super) const AT_LEAST_ONE: ValueFormat<u64> = ValueFormat::new(
    |text| number::<NonZeroU64>(text, "not a whole number of at least 1").map(NonZeroU64::get),
    u64::to_string,
);
pub(super) const SIZE: ValueFormat<u64> =
    ValueFormat::new(|text| Ok(or_word("none", text, parse_bytes)?.unwrap_or(0)), |&bytes| format_bytes(bytes));
pub(super) const SWITCH: ValueFormat<bool> = ValueFormat::new(switch, |&on| u8::from(on).to_string());
pub(super) const NODE: ValueFormat<Option<u32>> = ValueFormat::new(
    |text| or_word("auto", text, |text| number(text, "neither auto nor the number of a NUMA node (0, 1, ...)")),
    |node| node.map_or("auto".to_owned(), |node| node.to_string()),
);
pub(super) const SIZE_OR_NONE: ValueFormat<Option<u64>> = ValueFormat::new(
    |text| or_word("none", text, parse_bytes),
    |bytes| bytes.map_or_else(|| "none".to_owned(), format_bytes),
);
pub(super) const TIME_OR_NONE: ValueFormat<Option<Duration>> = ValueFormat::new(
    |text| or_word("none", text, parse_duration),
    |time| time.as_ref().map_or_else(|| "none".to_owned(), show_time),
);
pub(super) const PATH_OR_NONE: ValueFormat<Option<PathBuf>> = ValueFormat::new(
    |text| or_word("none", text, |text| Ok(PathBuf::from(text))),
    |path| path.as_deref().unwrap_or(Path::new("none")).display().to_string(),
);

pub(super) const SOCKET: ValueFormat<Option<StatsSocket>> = ValueFormat::new(socket, |socket| match socket {
    None => "none".to_owned(),
    Some(StatsSocket::Default) => "1".to_owned(),
    // In the variable, a word without a slash is not a path.
    Some(StatsSocket::Path(path)) if path.iter().count() == 1 => format!("./{}", path.display()),
    Some(StatsSocket::Path(path)) => path.display().to_string(),
});

/// Parses the path of a socket. Refuses a word without a slash, which is more likely a mistake than a socket in the current
/// directory.
fn socket(text: &str) -> Result<Option<StatsSocket>, ParseError> {
    match switch(text) {
        Ok(is_served) => Ok(is_served.then_some(StatsSocket::Default)),
        Err(_) if text.contains('/') => Ok(Some(Path::new(text).into())),
        Err(_) => or_word("none", text, |text| Err(ParseError::new(text, "not a path with a slash, 1, or none"))),
    }
}

/// Returns `None` if `text` is `word`, else the result of `parse`.
fn or_word<T>(word: &str, text: &str, parse: impl Fn(&str) -> Result<T, ParseError>) -> Result<Option<T>, ParseError> {
    if text.eq_ignore_ascii_case(word) { Ok(None) } else { parse(text).map(Some) }
}

fn number<T: FromStr>(text: &str, problem: &'static str) -> Result<T, ParseError> {
    text.parse().map_err(|_| ParseError::new(text, problem))
}

pub(super) fn switch(text: &str) -> Result<bool, ParseError> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "0" | "false" | "off" | "no" => Ok(false),
        _ => Err(ParseError::new(text, "neither 0 (no, off, false) nor 1 (yes, on, true)")),
    }
}
