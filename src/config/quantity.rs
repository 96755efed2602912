//! Sizes and times as people write them, with overflow and nonsense refused.

use std::time::Duration;

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
/// What is wrong with `text`, in words for the user.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    scaled(text, 1, &SIZE_UNITS)
        .map_err(|wrong| wrong.in_words("a size (like 64MiB, 2GiB, 512KB or plain bytes)", "2^64 - 1 B"))
}

/// Reads `30s`, `500ms`, `2min` or plain seconds.
///
/// # Errors
///
/// What is wrong with `text`, in words for the user.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    scaled(text, 1_000_000, &TIME_UNITS)
        .map(Duration::from_micros)
        .map_err(|wrong| wrong.in_words("a time (like 30s, 500ms, 2min or plain seconds)", "2^64 - 1 us"))
}

enum Wrong {
    Nonsense,
    TooLarge,
}

impl Wrong {
    fn in_words(&self, wanted: &str, most: &str) -> String {
        match self {
            Self::Nonsense => format!("not {wanted}"),
            Self::TooLarge => format!("more than {most}"),
        }
    }
}

fn scaled(text: &str, plain_scale: u64, units: &[(&str, u64)]) -> Result<u64, Wrong> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let scale = match unit {
        "" => plain_scale,
        unit => units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or(Wrong::Nonsense)?.1,
    };
    if number.is_empty() {
        return Err(Wrong::Nonsense);
    }
    // Only digits are left, so the one way to fail is to be too large.
    let number: u64 = number.parse().map_err(|_| Wrong::TooLarge)?;
    number.checked_mul(scale).ok_or(Wrong::TooLarge)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        let cases = [
            ("64MiB", 64 << 20),
            ("2GiB", 2 << 30),
            ("512KB", 512_000),
            ("512 kb", 512_000),
            (" 7 ", 7),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
            ("3tib", 3 << 40),
            ("9B", 9),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn overflow_and_nonsense_are_refused() {
        for text in ["", "MiB", "64M", "-1", "1.5GiB", "0x10", "64MiBs", "1 2", "١KiB", "1e9", "+5"] {
            assert!(parse_bytes(text).unwrap_err().contains("not a size"), "{text}");
        }
        for text in ["18446744073709551616", "17179869184GiB", "99999999999999999999TiB"] {
            assert!(parse_bytes(text).unwrap_err().contains("more than"), "{text}");
        }
    }

    #[test]
    fn times_are_read_as_written() {
        for (text, micros) in
            [("30", 30_000_000), ("30s", 30_000_000), ("500ms", 500_000), ("0", 0), ("2min", 120_000_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        assert!(parse_duration("soon").is_err() && parse_duration("99999999999999h").is_err());
    }

    #[test]
    fn what_is_printed_is_read_back() {
        for bytes in [0, 1, 1023, 1024, 1 << 20, 3 << 30, (3 << 30) + 1, u64::MAX] {
            assert_eq!(parse_bytes(&format_bytes(bytes)), Ok(bytes));
        }
    }
}
