//! Sizes and times as people write them.

use std::time::Duration;

use super::ParseError;

/// The units of a size, the largest last.
const SIZE_UNITS: [(&str, u64); 17] = [
    ("B", 1),
    ("K", 1 << 10),
    ("Ki", 1 << 10),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("M", 1 << 20),
    ("Mi", 1 << 20),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("G", 1 << 30),
    ("Gi", 1 << 30),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("T", 1 << 40),
    ("Ti", 1 << 40),
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
];

const TIME_UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];

/// How a size is written, for messages.
pub(super) const A_SIZE: &str = "not a size (like 2GiB, 512M, 1.5GB, 1e9 or plain bytes)";

const LARGER_UNIT: &str = "over the largest unit of a size, T (1024 G)";

/// Reads a size as people write it.
///
/// | written | bytes |
/// | --- | --- |
/// | `1000000`, `1_000_000`, `1e6`, `1e6B` | 1,000,000 |
/// | `2K`, `2Ki`, `2KiB` (and `M`, `G`, `T`) | 2 x 1024: as docker, systemd, the kernel's cgroups and GNU tools read `2K` |
/// | `2KB` (and `MB`, `GB`, `TB`) | 2 x 1000 |
/// | `1.5G`, `.5GiB`, `1.5e3K` | fractions and exponents with any unit; a part of a byte is dropped |
///
/// Case does not matter, and blanks may stand before the unit. Kubernetes writes `2G` for 2 x 1000^3: write `2GB` for that,
/// `2Gi` means the same everywhere.
///
/// # Errors
///
/// `text` is no size, or is over `u64::MAX` bytes.
pub fn parse_bytes(text: &str) -> Result<u64, ParseError> {
    scaled(text, 1, &SIZE_UNITS, A_SIZE, "more than 2^64 - 1 B").map_err(|error| {
        let unit = error.value.trim_start_matches(|c: char| !c.is_ascii_alphabetic()).to_ascii_uppercase();
        let is_larger = ["P", "PI", "PB", "PIB", "EI", "EB", "EIB"].contains(&unit.as_str());
        if is_larger && error.problem == A_SIZE && error.value.trim().starts_with(|c: char| c.is_ascii_digit()) {
            ParseError::new(error.value, LARGER_UNIT)
        } else {
            error
        }
    })
}

/// Reads `30s`, `500ms`, `2min`, `1.5h` or plain seconds.
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
    let Some((number, unit)) = Decimal::split_from(text.trim()) else { return Err(ParseError::new(text, not_one)) };
    let scale = match unit.trim_start() {
        "" => Some(plain_scale),
        unit => units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|&(_, scale)| scale),
    };
    let Some(scale) = scale else { return Err(ParseError::new(text, not_one)) };
    number.times(scale).ok_or_else(|| ParseError::new(text, too_large))
}

/// A number without a sign: the digits before and behind its point, once its exponent has moved the point.
struct Decimal {
    whole: String,
    fraction: String,
}

/// Digits behind the point that count; the next one changes no unit by a thousandth.
const FRACTION_DIGITS: usize = 18;

/// A larger exponent is over every limit.
const LARGEST_EXPONENT: usize = 99;

impl Decimal {
    /// The number at the start of `text`, and what follows it; `None` if there is no digit, or `_` is not between digits.
    fn split_from(text: &str) -> Option<(Self, &str)> {
        let (mut whole, rest) = split_digits(text)?;
        let (mut fraction, rest) = match rest.strip_prefix('.') {
            Some(rest) => split_digits(rest)?,
            None => (String::new(), rest),
        };
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let (exponent, rest) = split_exponent(rest).unwrap_or((0, rest));
        for _ in 0..exponent {
            let digit = if fraction.is_empty() { '0' } else { fraction.remove(0) };
            whole.push(digit);
        }
        Some((Self { whole, fraction }, rest))
    }

    /// The product in whole units, cut off; `None` if it is over `u64::MAX`.
    fn times(&self, scale: u64) -> Option<u64> {
        let number = |digits: &str| if digits.is_empty() { Some(0) } else { digits.parse::<u128>().ok() };
        let whole = number(self.whole.trim_start_matches('0'))?.checked_mul(scale.into())?;
        let digits = &self.fraction[..self.fraction.len().min(FRACTION_DIGITS)];
        let places = u32::try_from(digits.len()).ok()?;
        let part = number(digits)?.checked_mul(scale.into())? / 10_u128.checked_pow(places)?;
        u64::try_from(whole.checked_add(part)?).ok()
    }
}

/// The digits at the start of `text`, single `_` between them dropped, and the rest.
fn split_digits(text: &str) -> Option<(String, &str)> {
    let end = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
    let (digits, rest) = text.split_at(end);
    let is_grouped = digits.is_empty() || digits.split('_').all(|group| !group.is_empty());
    is_grouped.then(|| (digits.replace('_', ""), rest))
}

/// The exponent at the start of `text`, at most [`LARGEST_EXPONENT`], and the rest.
fn split_exponent(text: &str) -> Option<(usize, &str)> {
    let rest = text.strip_prefix(['e', 'E'])?;
    let rest = rest.strip_prefix('+').unwrap_or(rest);
    let end = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (digits, rest) = rest.split_at(end);
    let exponent = digits.trim_start_matches('0');
    let exponent = if exponent.is_empty() { "0" } else { exponent };
    (!digits.is_empty()).then(|| (exponent.parse().unwrap_or(LARGEST_EXPONENT).min(LARGEST_EXPONENT), rest))
}

/// `bytes` in the largest binary unit that leaves no remainder, so that [`parse_bytes`] reads it back exactly.
pub fn format_bytes(bytes: u64) -> String {
    let exact = SIZE_UNITS
        .iter()
        .rev()
        .find(|(name, scale)| name.ends_with("iB") && bytes != 0 && bytes.is_multiple_of(*scale));
    match exact {
        Some((name, scale)) => format!("{}{name}", bytes / scale),
        None => format!("{bytes}B"),
    }
}

/// In the largest unit up to seconds that leaves no remainder, so that [`parse_duration`] reads it back.
pub(super) fn show_time(time: &Duration) -> String {
    // What is longer is without end as well.
    let micros = time.as_micros().min(u128::from(u64::MAX));
    match TIME_UNITS[..3].iter().rev().find(|(_, scale)| micros.is_multiple_of(u128::from(*scale))) {
        Some((name, scale)) => format!("{}{name}", micros / u128::from(*scale)),
        None => format!("{micros}us"),
    }
}

#[cfg(test)]
mod all_spellings;
