//! Sizes as people write them, and empty variables.

use pinpool::unstable::config::env::{VARIABLES, report};
use pinpool::unstable::config::text::parse_bytes;
use pinpool::{Backend, Limit, Pool};

use crate::child::alone_with;

#[test]
fn a_size_is_read_as_people_write_it() {
    // In addition to what `all_spellings` combines: blanks, groups of digits, and a zero times a large power.
    for (text, bytes) in [
        ("7 MiB", 7 << 20),
        (" 7 ", 7),
        ("0e99", 0),
        ("1_0.2_5K", 10_496),
        ("18446744073709551615.9", u64::MAX),
        ("16777215.99T", 18_446_744_062_714_435_338),
    ] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
}

#[test]
fn what_is_no_size_says_what_a_size_is() {
    for text in
        "| |.|G|-1|+5|0x10|1 2|1,5G|1..5G|1.5.5|_1|1_|1__0|1e|1e-3|1eG|64MiBs|2Gib/s|١KiB|inf|nan|unlimited".split('|')
    {
        let error = parse_bytes(text).unwrap_err();
        assert!(error.problem().contains("not a size (like 2GiB"), "{text}: {error}");
    }
    for text in ["10PB", "10P", "1PiB", "2 EB"] {
        let error = parse_bytes(text).unwrap_err();
        assert!(error.problem().contains("the largest unit is T"), "{text}: {error}");
    }
    for text in
        ["18446744073709551616", "1e20", "1e999999999999", "16777216T", "99999999999999999999999999999999999999999999"]
    {
        let error = parse_bytes(text).unwrap_err();
        assert!(error.problem().contains("more than 2^64 - 1 bytes"), "{text}: {error}");
    }
}

#[test]
fn an_empty_variable_is_not_set_and_every_default_matches_the_table() {
    let blanks = VARIABLES.iter().map(|variable| (variable.name, if variable.name.len() % 2 == 0 { "" } else { " " }));
    alone_with(blanks, || {
        let report = report();
        assert!(report.errors.is_empty() && report.warnings.is_empty(), "{report:?}");
        for entry in report.variables {
            assert_eq!((&entry.value, entry.origin), (&entry.default, "default"), "{}", entry.name);
        }
        assert_eq!(Pool::builder().backend(Backend::Heap).build().unwrap().unstable_config().max_bytes, Limit::Auto);
    });
}
