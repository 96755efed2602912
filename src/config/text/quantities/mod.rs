//! Sizes and times as people write them.

use std::time::Duration;

use super::ParseError;

const TIME_UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];

/// First letters of the size units, in the order of their powers of 1024 or 1000.
const LETTERS: &str = "KMGT";

/// The format of a size, for error texts.
const A_SIZE: &str = "not a size (like 2GiB, 512M, 1.5GB, 1e9 or plain bytes; the largest unit is T)";

/// Reads a size as people write it.
///
/// | written | bytes |
/// | --- | --- |
/// | `1000000`, `1_000_000`, `1e6`, `1e6B` | 1,000,000 |
/// | `2K`, `2Ki`, `2KiB` (and `M`, `G`, `T`) | 2 x 1024: as docker, systemd, the kernel's cgroups and GNU tools read `2K` |
/// | `2KB` (and `MB`, `GB`, `TB`) | 2 x 1000 |
/// | `1.5G`, `.5GiB`, `1.5e3K` | fractions and exponents with any unit; a part of a byte is dropped |
///
/// Case does not matter, and blanks before the unit are allowed. In Kubernetes `2G` is 2 x 1000^3, which is `2GB` here; `2Gi`
/// means the same everywhere.
///
/// # Errors
///
/// `text` is not a size, or exceeds `u64::MAX` bytes.
pub fn parse_bytes(text: &str) -> Result<u64, ParseError> {
    scaled(text, "B", &size_unit, A_SIZE, "more than 2^64 - 1 bytes")
}

/// Returns the number of bytes in a unit, or why the text is not a unit.
fn size_unit(unit: &str) -> Result<u64, &'static str> {
    let unit = unit.to_ascii_uppercase();
    let mut rest = unit.chars();
    let first = rest.next().unwrap_or_default();
    let scale = match (LETTERS.find(first), rest.as_str()) {
        (None, "") if first == 'B' => 1,
        (Some(index), "" | "I" | "IB") => 1 << (10 * (index + 1)),
        (Some(index), "B") => 1000_u64.pow(u32::try_from(index).unwrap_or(0) + 1),
        _ => return Err(A_SIZE),
    };
    Ok(scale)
}

/// Reads `30s`, `500ms`, `2min`, `1.5h` or plain seconds.
///
/// # Errors
///
/// `text` is not a time, or exceeds `u64::MAX` microseconds.
pub fn parse_duration(text: &str) -> Result<Duration, ParseError> {
    const A_TIME: &str = "not a time (like 30s, 500ms, 2min or plain seconds)";
    let unit = |unit: &str| {
        let found = TIME_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        found.map(|&(_, scale)| scale).ok_or(A_TIME)
    };
    scaled(text, "s", &unit, A_TIME, "more than 2^64 - 1 us").map(Duration::from_micros)
}

fn scaled(
    text: &str,
    default_unit: &str,
    scale_of: &dyn Fn(&str) -> Result<u64, &'static str>,
    not_one: &'static str,
    too_large: &'static str,
) -> Result<u64, ParseError> {
    let (number, unit) = Decimal::split_from(text.trim()).ok_or_else(|| ParseError::new(text, not_one))?;
    let unit = Some(unit.trim_start()).filter(|unit| !unit.is_empty()).unwrap_or(default_unit);
    let scale = scale_of(unit).map_err(|problem| ParseError::new(text, problem))?;
    number.times(scale).ok_or_else(|| ParseError::new(text, too_large))
}

/// An unsigned number: the digits before and after its decimal point, which the exponent has already moved.
struct Decimal {
    whole: String,
    fraction: String,
}

/// Number of digits of a fraction that are used. Further digits change the result by less than a thousandth of a byte or microsecond.
const FRACTION_DIGITS: usize = 18;

/// A larger exponent is read as this one, since both exceed every limit.
const EXPONENT_MAX: usize = 99;

impl Decimal {
    /// Returns the number at the start of `text`, and the rest of `text`; `None` if there is no digit, or a `_` is not between digits.
    fn split_from(text: &str) -> Option<(Self, &str)> {
        let (mut whole, rest) = split_digits(text)?;
        let (mut fraction, rest) = rest.strip_prefix('.').map_or(Some((String::new(), rest)), split_digits)?;
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let (exponent, rest) = split_exponent(rest).unwrap_or((0, rest));
        for _ in 0..exponent {
            whole.push(if fraction.is_empty() { '0' } else { fraction.remove(0) });
        }
        Some((Self { whole, fraction }, rest))
    }

    /// Returns the product in whole units, rounded down; `None` if it exceeds `u64::MAX`.
    fn times(&self, scale: u64) -> Option<u64> {
        let places = self.fraction.len().min(FRACTION_DIGITS);
        let scaled = |digits: &str| format!("0{digits}").parse::<u128>().ok()?.checked_mul(scale.into());
        let part = scaled(&self.fraction[..places])? / 10_u128.pow(u32::try_from(places).ok()?);
        u64::try_from(scaled(&self.whole)?.checked_add(part)?).ok()
    }
}

/// Returns the digits at the start of `text`, without single `_` between them, and the rest; `None` if a `_` is not between digits.
fn split_digits(text: &str) -> Option<(String, &str)> {
    let end = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
    let (digits, rest) = text.split_at(end);
    let is_grouped = digits.is_empty() || digits.split('_').all(|group| !group.is_empty());
    is_grouped.then(|| (digits.replace('_', ""), rest))
}

/// Returns the exponent at the start of `text`, at most [`EXPONENT_MAX`], and the rest; `None` if there is no exponent.
fn split_exponent(text: &str) -> Option<(usize, &str)> {
    let rest = text.strip_prefix(['e', 'E'])?;
    let rest = rest.strip_prefix('+').unwrap_or(rest);
    let end = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (digits, rest) = rest.split_at(end);
    let exponent = format!("0{digits}").parse().unwrap_or(EXPONENT_MAX).min(EXPONENT_MAX);
    (!digits.is_empty()).then_some((exponent, rest))
}

/// Formats `bytes` in the largest binary unit without a remainder, so that [`parse_bytes`] reads the text back exactly.
pub fn format_bytes(bytes: u64) -> String {
    let power = if bytes == 0 { 0 } else { (bytes.trailing_zeros() / 10).min(4) };
    let letter = LETTERS.chars().take(power as usize).last();
    letter.map_or_else(|| format!("{bytes}B"), |letter| format!("{}{letter}iB", bytes >> (10 * power)))
}

/// Formats `time` in the largest unit, up to seconds, without a remainder, so that [`parse_duration`] reads the text back exactly.
pub(super) fn show_time(time: &Duration) -> String {
    // A longer time is shortened to this limit, which is as good as forever.
    let micros = time.as_micros().min(u128::from(u64::MAX));
    match TIME_UNITS[..3].iter().rev().find(|(_, scale)| micros.is_multiple_of(u128::from(*scale))) {
        Some((name, scale)) => format!("{}{name}", micros / u128::from(*scale)),
        None => format!("{micros}us"),
    }
}

#[cfg(test)]
mod all_spellings;
