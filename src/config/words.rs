//! The values of settings as words: what variables and flags of the tool say, and how they are shown.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::quantity::{format_bytes, parse_bytes, parse_duration};
use super::{Ceiling, FenceKind, OnFull, Preset, PressureSource, ReleasePolicy};
use crate::backend::{Backend, SimSource};
use crate::size_class::Rounding;

/// As `PINPOOL_BACKEND` takes it.
impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
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
                None => Err("not a back-end (auto, vmm, register, cuda, mlock, heap, sim, sim:SIZE)".to_owned()),
            },
        }
    }
}

/// As `PINPOOL_PRESET` takes it.
impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "adaptive" => Ok(Self::Adaptive),
            "tensorflow" => Ok(Self::Tensorflow),
            _ => Err("not a preset (adaptive, tensorflow)".to_owned()),
        }
    }
}

/// As `PINPOOL_ROUNDING` takes it.
impl FromStr for Rounding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "eighths" => Ok(Self::Eighths),
            "pow2" => Ok(Self::Pow2),
            "exact" | "noop" => Ok(Self::Exact),
            _ => Err("not a rounding (eighths, pow2, exact)".to_owned()),
        }
    }
}

/// As `PINPOOL_FENCE` takes it.
impl FromStr for FenceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "event" => Ok(Self::Event),
            "timeline" => Ok(Self::Timeline),
            _ => Err("not a kind of fence (auto, event, timeline)".to_owned()),
        }
    }
}

impl fmt::Display for FenceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Event => "event",
            Self::Timeline => "timeline",
        })
    }
}

/// As `PINPOOL_MAX_BYTES` takes it.
impl FromStr for Ceiling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            _ => match parse_bytes(text)? {
                0 => {
                    Err("a ceiling of nothing would refuse every get (PINPOOL_POOL_SIZE_LIMIT=0 turns pooling off)"
                        .into())
                }
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

/// As `PINPOOL_ON_FULL` takes it.
impl FromStr for OnFull {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "error" => Ok(Self::Error),
            "pageable" => Ok(Self::Pageable),
            _ => Err("not a way out (auto, error, pageable)".to_owned()),
        }
    }
}

impl fmt::Display for OnFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Error => "error",
            Self::Pageable => "pageable",
        })
    }
}

/// As `PINPOOL_RELEASE_POLICY` takes it.
impl FromStr for ReleasePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "idle" => Ok(Self::Idle),
            "force" => Ok(Self::Force),
            _ => Err("neither idle nor force".to_owned()),
        }
    }
}

impl fmt::Display for ReleasePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Force => "force",
        })
    }
}

/// As `PINPOOL_PRESSURE` takes it.
impl FromStr for PressureSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match switch(text) {
            Ok(true) => Ok(Self::Kernel),
            Ok(false) => Ok(Self::Off),
            Err(_) if text.starts_with('/') => Ok(Self::File(text.into())),
            Err(_) => Err("neither on, off nor the absolute path of a file".to_owned()),
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

/// A time, or none for ever.
pub(super) fn retain(text: &str) -> Result<Option<Duration>, String> {
    if text.eq_ignore_ascii_case("none") { Ok(None) } else { parse_duration(text).map(Some) }
}

pub(super) fn switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "0" | "false" | "off" | "no" => Ok(false),
        _ => Err("neither 0 nor 1".to_owned()),
    }
}
