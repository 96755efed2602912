//! Quantities, words and the environment.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use pinpool::Rounding;
use pinpool::unstable::config::env::{self, ResolvedSettings};
use pinpool::unstable::config::text::{ParseError, format_bytes, parse_bytes, parse_duration};
use pinpool::{Backend, Limit, OnFull, Preset};

/// Sizes and times: a printed size is read back unchanged, and an error names the refused text.
pub(crate) fn quantities(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(bytes) = accepted(&text, parse_bytes(&text)) {
        assert_eq!(parse_bytes(&format_bytes(bytes)), Ok(bytes), "{text}");
    }
    accepted(&text, parse_duration(&text));
    // Plain digits are read as their number, or refused as too large.
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        assert_eq!(parse_bytes(&text).ok(), text.parse().ok(), "{text}");
    }
    if let Some(&bytes) = data.first_chunk().map(|chunk| u64::from_le_bytes(*chunk)).as_ref() {
        assert_eq!(parse_bytes(&format_bytes(bytes)), Ok(bytes));
    }
}

/// Settings of one word.
pub(crate) fn words(data: &[u8]) {
    let text = &*String::from_utf8_lossy(data);
    word::<Preset>(text);
    word::<Rounding>(text);
    word::<OnFull>(text);
    word::<Limit>(text);
    let _: Option<Backend> = accepted(text, text.parse());
}

fn word<T: FromStr<Err = ParseError> + Display + Debug + PartialEq>(text: &str) {
    if let Some(value) = accepted(text, T::from_str(text)) {
        assert_eq!(value.to_string().parse(), Ok(value), "{text}");
    }
}

fn accepted<T>(text: &str, parsed: Result<T, ParseError>) -> Option<T> {
    parsed
        .map_err(|error| {
            assert!(error.to_string().contains(text), "{error} does not name {text}");
            assert!(!error.problem().is_empty(), "{error}");
        })
        .ok()
}

/// Lines of `NAME=VALUE` as the environment: each warning and error names a variable, and the values that the report shows are
/// read back unchanged.
pub(crate) fn environment(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let pair = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let report = env::report_of(&text.lines().filter_map(pair).collect::<Vec<_>>());
    for warning in &report.warnings {
        assert!(warning.contains("PINPOOL_"), "{warning} names no variable");
    }
    for error in &report.errors {
        assert!(error.is_setting() && error.to_string().contains("PINPOOL_"), "{error}");
    }
    if !report.errors.is_empty() {
        return;
    }
    let shown: Vec<_> = report.variables.iter().map(|report| (report.name.to_owned(), report.value.clone())).collect();
    let again = env::report_of(&shown);
    assert!(again.errors.is_empty(), "what is shown cannot be read: {again:?}");
    let values = |report: &ResolvedSettings| report.variables.iter().map(|set| set.value.clone()).collect::<Vec<_>>();
    assert_eq!(values(&again), values(&report));
}
