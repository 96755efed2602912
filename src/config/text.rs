//! How values are written and read: the words of each setting, sizes and times as people write them.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{Backend, Ceiling, FenceKind, OnFull, Preset, PressureSource, ReleasePolicy};
use crate::backend::SimSource;
use crate::size_class::Rounding;

/// A value that cannot be read: names it and says what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is {problem}")]
pub struct ParseError {
    value: String,
    problem: Cow<'static, str>,
}

impl ParseError {
    /// `problem` continues the sentence "`value` is ...": `not a size (like 64MiB)`, `less than 4KiB`.
    pub fn new(value: impl Into<String>, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { value: value.into(), problem: problem.into() }
    }

    /// What is wrong with the value: `not a size (like 64MiB)`.
    pub fn problem(&self) -> &str {
        &self.problem
    }
}

const SIZE_UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

const TIME_UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];

/// Reads `64MiB`, `2GiB`, `512KB` or plain bytes.
///
/// Units of 1024 are written with an `i`, those of 1000 without; case does not matter.
///
/// # Errors
///
/// `text` is no size, or is over `u64::MAX` bytes.
pub fn parse_bytes(text: &str) -> Result<u64, ParseError> {
    scaled(text, 1, &SIZE_UNITS, "not a size (like 64MiB, 2GiB, 512KB or plain bytes)", "more than 2^64 - 1 B")
}

/// Reads `30s`, `500ms`, `2min` or plain seconds.
///
/// # Errors
///
/// `text` is no time, or is over `u64::MAX` microseconds.
pub fn parse_duration(text: &str) -> Result<Duration, ParseError> {
    let expected = "not a time (like 30s, 500ms, 2min or plain seconds)";
    scaled(text, 1_000_000, &TIME_UNITS, expected, "more than 2^64 - 1 us").map(Duration::from_micros)
}

fn scaled(
    text: &str,
    plain_scale: u64,
    units: &[(&str, u64)],
    not_one: &'static str,
    too_large: &'static str,
) -> Result<u64, ParseError> {
    let trimmed = text.trim();
    let digits = trimmed.len() - trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim_start();
    let scale = match unit {
        "" => Some(plain_scale),
        unit => units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|&(_, scale)| scale),
    };
    let Some(scale) = scale.filter(|_| !number.is_empty()) else { return Err(ParseError::new(text, not_one)) };
    // Only digits are left, so the one way to fail is to be too large.
    let scaled = number.parse().ok().and_then(|number: u64| number.checked_mul(scale));
    scaled.ok_or_else(|| ParseError::new(text, too_large))
}

/// `bytes` in the largest binary unit that leaves no remainder, so that [`parse_bytes`] reads it back exactly.
pub fn format_bytes(bytes: u64) -> String {
    let exact =
        SIZE_UNITS.iter().rev().find(|(name, scale)| name.contains('i') && bytes != 0 && bytes.is_multiple_of(*scale));
    match exact {
        Some((name, scale)) => format!("{}{name}", bytes / scale),
        None => format!("{bytes}B"),
    }
}

/// An enum whose values are single words: its names, and reading and showing them.
macro_rules! words {
    ($type:ident, $one:literal: $($variant:ident = $word:literal $(or $alias:literal)?),+) => {
        impl $type {
            /// Name in settings and reports.
            pub fn name(self) -> &'static str {
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
                match text.to_ascii_lowercase().as_str() {
                    $($word $(| $alias)? => Ok(Self::$variant),)+
                    _ => Err(ParseError::new(text, concat!("not ", $one, " (", words!(@list $($word)+), ")"))),
                }
            }
        }
    };
    (@list $first:literal $($word:literal)*) => { concat!($first $(, ", ", $word)*) };
}

words!(Preset, "a preset": Adaptive = "adaptive", Tensorflow = "tensorflow");
words!(Rounding, "a rounding": Eighths = "eighths", Pow2 = "pow2", Exact = "exact" or "noop");
words!(FenceKind, "a kind of fence": Auto = "auto", Event = "event", Timeline = "timeline");
words!(OnFull, "a value of PINPOOL_ON_FULL": Auto = "auto", Error = "error", Pageable = "pageable");
words!(ReleasePolicy, "a release policy": Idle = "idle", Force = "force");

impl FromStr for Backend {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "vmm" => Ok(Self::Vmm),
            "register" => Ok(Self::Register),
            "cuda" => Ok(Self::Cuda),
            "mlock" => Ok(Self::Mlock),
            "heap" => Ok(Self::Heap),
            "sim" => Ok(Self::Sim { total_bytes: SimSource::DEFAULT_TOTAL_BYTES }),
            other => match other.strip_prefix("sim:") {
                Some(size) => Ok(Self::Sim { total_bytes: parse_bytes(size)? }),
                None => {
                    Err(ParseError::new(text, "not a back-end (auto, vmm, register, cuda, mlock, heap, sim, sim:SIZE)"))
                }
            },
        }
    }
}

impl FromStr for Ceiling {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            _ => match parse_bytes(text)? {
                0 => Err(ParseError::new(
                    text,
                    "not a ceiling, since every get would fail (PINPOOL_POOL_SIZE_LIMIT=0 turns pooling off)",
                )),
                bytes => Ok(Self::Bytes(bytes)),
            },
        }
    }
}

impl fmt::Display for Ceiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::Bytes(bytes) => f.write_str(&format_bytes(*bytes)),
        }
    }
}

impl FromStr for PressureSource {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match switch(text) {
            Ok(true) => Ok(Self::Kernel),
            Ok(false) => Ok(Self::Off),
            Err(_) if text.starts_with('/') => Ok(Self::File(text.into())),
            Err(_) => Err(ParseError::new(text, "neither on, off nor the absolute path of a file")),
        }
    }
}

impl fmt::Display for PressureSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel => f.write_str("on"),
            Self::Off => f.write_str("off"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// How a variable is written.
pub(super) struct ValueFormat<T> {
    pub(super) parse: fn(&str) -> Result<T, ParseError>,
    pub(super) show: fn(&T) -> String,
}

pub(super) const fn word<T: FromStr<Err = ParseError> + ToString>() -> ValueFormat<T> {
    ValueFormat { parse: T::from_str, show: T::to_string }
}

pub(super) const BACKEND: ValueFormat<Backend> =
    ValueFormat { parse: Backend::from_str, show: |backend| backend.name().to_owned() };
pub(super) const ORDINAL: ValueFormat<u32> =
    ValueFormat { parse: |text| number(text, "not a device number (0, 1, ...)"), show: u32::to_string };
pub(super) const COUNT: ValueFormat<u64> =
    ValueFormat { parse: |text| number(text, "not a whole number"), show: u64::to_string };
pub(super) const AT_LEAST_ONE: ValueFormat<u64> = ValueFormat { parse: at_least_one, show: u64::to_string };
pub(super) const SIZE: ValueFormat<u64> = ValueFormat { parse: parse_bytes, show: |&bytes| format_bytes(bytes) };
pub(super) const TIME: ValueFormat<Duration> = ValueFormat { parse: parse_duration, show: |time| format!("{time:?}") };
pub(super) const SWITCH: ValueFormat<bool> = ValueFormat { parse: switch, show: |&on| u8::from(on).to_string() };
pub(super) const NODE: ValueFormat<Option<u32>> = ValueFormat {
    parse: |text| {
        or_word("auto", text, |text| number(text, "neither auto nor the number of a memory node (0, 1, ...)"))
    },
    show: |node| node.map_or("auto".to_owned(), |node| node.to_string()),
};
pub(super) const THREADS: ValueFormat<Option<u64>> = ValueFormat {
    parse: |text| or_word("auto", text, at_least_one),
    show: |threads| threads.map_or_else(|| "auto".to_owned(), |threads| threads.to_string()),
};
pub(super) const TIME_OR_NONE: ValueFormat<Option<Duration>> = ValueFormat {
    parse: |text| or_word("none", text, parse_duration),
    show: |time| time.map_or_else(|| "none".to_owned(), |time| format!("{time:?}")),
};

/// `None` for `word`, else what `parse` makes of `text`.
fn or_word<T>(word: &str, text: &str, parse: impl Fn(&str) -> Result<T, ParseError>) -> Result<Option<T>, ParseError> {
    if text.eq_ignore_ascii_case(word) { Ok(None) } else { parse(text).map(Some) }
}

fn number<T: FromStr>(text: &str, problem: &'static str) -> Result<T, ParseError> {
    text.parse().map_err(|_| ParseError::new(text, problem))
}

fn at_least_one(text: &str) -> Result<u64, ParseError> {
    let problem = "not a whole number of at least 1";
    number(text, problem).and_then(|n| if n > 0 { Ok(n) } else { Err(ParseError::new(text, problem)) })
}

pub(super) fn switch(text: &str) -> Result<bool, ParseError> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "0" | "false" | "off" | "no" => Ok(false),
        _ => Err(ParseError::new(text, "neither 0 nor 1")),
    }
}
