//! Numbers next to every power of two and of ten, printed and read back; and every spelling that combines the parts
//! below, compared with one division in wide numbers.

#![allow(clippy::print_stdout)] // How much was run.

use super::*;

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

/// The numbers within three of each power of two, ten and sixty that fits into 64 bits.
fn numbers() -> Vec<u64> {
    let powers = |base: u128| std::iter::successors(Some(1u128), move |power| power.checked_mul(base));
    let near = [2, 10, 60].into_iter().flat_map(powers).flat_map(|power| (0..7).map(move |step| power + step));
    let multiples = SIZE_UNITS.iter().chain(&TIME_UNITS).flat_map(|&(_, scale)| (1..1000).map(move |n| n * scale));
    let small = 0..if cfg!(miri) { 100 } else { 1 << 16 };
    let mut all: Vec<u64> = near.filter_map(|number| u64::try_from(number.saturating_sub(3)).ok()).collect();
    all.extend(small.chain(multiples.filter(|_| !cfg!(miri))).chain([u64::MAX]));
    all
}

#[test]
fn a_size_or_a_time_as_it_is_printed_is_read_as_the_same() {
    let numbers = numbers();
    for &number in &numbers {
        assert_eq!(parse_bytes(&format_bytes(number)), Ok(number));
        assert_eq!(parse_bytes(&number.to_string()), Ok(number));
        let time = Duration::from_micros(number);
        assert_eq!(parse_duration(&show_time(&time)), Ok(time));
    }
    println!("{} numbers", numbers.len());
}

const WHOLE: [&str; 10] = [
    "",
    "0",
    "1",
    "7",
    "0042",
    "1023",
    "16777216",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999",
];
const FRACTIONS: [&str; 8] = ["", ".", ".0", ".5", ".25", ".125", ".001", ".999"];
const EXPONENTS: [&str; 8] = ["", "e0", "E1", "e+3", "e6", "e9", "e15", "e19"];

/// The number that these parts mean, in units of `scale`, truncated; `None` if it is over 2^64 - 1, or there is no digit.
fn meant(whole: &str, fraction: &str, exponent: &str, scale: u64) -> Option<u64> {
    let places = fraction.trim_start_matches('.');
    let digits = format!("{whole}{places}").parse::<u128>().ok()?;
    let power = exponent.trim_start_matches(['e', 'E', '+']).parse().unwrap_or(0);
    // A number over 128 bits, divided by at most 1000, is still over 64 bits.
    let scaled = digits.checked_mul(scale.into())?.checked_mul(10u128.pow(power))?;
    u64::try_from(scaled / 10u128.pow(u32::try_from(places.len()).ok()?)).ok()
}

fn check(units: &[(&str, u64)], plain: u64, read: impl Fn(&str) -> Option<u64>) {
    let units = units.iter().copied().chain([("", plain)]);
    let mut spellings_read = 0;
    for (unit, scale) in units.step_by(if cfg!(miri) { 9 } else { 1 }) {
        for whole in WHOLE {
            for fraction in FRACTIONS {
                for exponent in EXPONENTS {
                    let expected = meant(whole, fraction, exponent, scale);
                    let number = format!("{whole}{fraction}{exponent}");
                    for unit in [unit.to_owned(), unit.to_lowercase(), format!("  {}", unit.to_uppercase())] {
                        assert_eq!(read(&format!("{number}{unit}")), expected, "{number}{unit}");
                        spellings_read += 1;
                    }
                }
            }
        }
    }
    println!("{spellings_read} spellings");
}

#[test]
fn every_spelling_of_a_size_is_its_exact_product_cut_off() {
    check(&SIZE_UNITS, 1, |text| parse_bytes(text).ok());
}

#[test]
fn every_spelling_of_a_time_is_its_exact_product_cut_off() {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap();
    check(&TIME_UNITS, 1_000_000, |text| parse_duration(text).ok().map(micros));
}
