//! Settings: how values are written, what a variable means, and what follows from one another.

use std::time::Duration;

use pinpool::config::env::{VARIABLES, VariableReport, report};
use pinpool::config::text::{format_bytes, parse_bytes, parse_duration};
use pinpool::{
    Backend, Ceiling, Config, Error, FenceKind, OnFull, Pool, PoolBuilder, Preset, PressureSource, Result, Rounding,
};

use crate::child::alone_with;

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
        ("64M", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("1e9", 1_000_000_000),
    ];
    for (text, bytes) in cases {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
}

#[test]
fn overflow_and_nonsense_are_refused() {
    for text in ["", "MiB", "-1", "0x10", "64MiBs", "1 2", "١KiB", "+5"] {
        assert!(parse_bytes(text).unwrap_err().problem().contains("not a size"), "{text}");
    }
    for text in ["18446744073709551616", "17179869184GiB", "99999999999999999999TiB"] {
        assert!(parse_bytes(text).unwrap_err().problem().contains("more than"), "{text}");
    }
}

#[test]
fn times_are_read_as_written() {
    for (text, micros) in [("30", 30_000_000), ("30s", 30_000_000), ("500ms", 500_000), ("0", 0), ("2min", 120_000_000)]
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

fn heap() -> PoolBuilder {
    Pool::builder().backend(Backend::Heap)
}

/// What holds in a pool with these settings and no variables.
fn resolved(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Result<Config> {
    set(heap().without_env()).build().map(|pool| pool.config().clone())
}

fn refused(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Error {
    let error = resolved(set).unwrap_err();
    assert!(error.is_setting(), "{error}");
    error
}

#[test]
fn every_default_in_the_table_is_the_default_that_holds() {
    alone_with(Vec::new, || {
        let (entries, warnings) = report().unwrap();
        assert!(warnings.is_empty());
        for entry in entries {
            assert_eq!((entry.value.as_str(), entry.origin), (entry.default.as_str(), "default"), "{}", entry.name);
        }
    });
}

#[test]
fn every_default_can_be_set_explicitly() {
    alone_with(
        || VARIABLES.iter().map(|variable| (variable.name, variable.default())).collect(),
        || assert_eq!(report().unwrap().1, []),
    );
}

#[test]
fn nonsense_in_any_variable_is_named_with_its_value_and_what_holds_instead() {
    // A file or a ledger may have any name.
    let has_any = |name: &str| ["PINPOOL_TRACE", "PINPOOL_LEDGER"].contains(&name);
    let others = || VARIABLES.iter().filter(|variable| !has_any(variable.name));
    alone_with(
        || others().map(|variable| (variable.name, "purple".to_owned())).collect(),
        || {
            let warnings = report().unwrap().1;
            assert_eq!(warnings.len(), others().count());
            for variable in others() {
                let of_it = |text: &&String| text.starts_with(&format!("{}=", variable.name));
                let texts: Vec<_> = warnings.iter().map(ToString::to_string).collect();
                let text = texts.iter().find(of_it).map(String::as_str).unwrap_or_default();
                for part in ["purple", &variable.default()] {
                    assert!(text.contains(part), "{}: {text}", variable.name);
                }
            }
        },
    );
}

/// `vars` as [`alone_with`] takes them.
fn owned(vars: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    vars.iter().map(|&(name, value)| (name, value.to_owned())).collect()
}

#[test]
fn unknown_variables_of_ours_are_named_and_others_left_alone() {
    alone_with(
        || owned(&[("PINPOOL_MAXBYTES", "1"), ("PINPOOLX", "1")]),
        || {
            let warnings = report().unwrap().1;
            assert_eq!(warnings.len(), 1);
            assert!(warnings[0].to_string().contains("PINPOOL_MAXBYTES=1"), "{}", warnings[0]);
        },
    );
}

#[test]
fn values_are_read() {
    let vars = || {
        owned(&[
            ("PINPOOL_BACKEND", "sim:3GiB"),
            ("PINPOOL_DEVICE", "2"),
            ("PINPOOL_POOL_SIZE_LIMIT", "7"),
            ("PINPOOL_AUTO_RESIZE", "off"),
            ("PINPOOL_ROUNDING", "EXACT"),
            ("PINPOOL_MAX_BYTES", "64MiB"),
            ("PINPOOL_IDLE_TIMEOUT", "none"),
            ("PINPOOL_ON_FULL", "pageable"),
            ("PINPOOL_PRESSURE", "/tmp/psi"),
            ("PINPOOL_LOG_EVERY", "1"),
            ("PINPOOL_CLOSE_WAIT", "250ms"),
            ("PINPOOL_FENCE", "timeline"),
            ("PINPOOL_STUCK_AFTER", "2s"),
            ("PINPOOL_PIN_THREADS", "8"),
        ])
    };
    alone_with(vars, || {
        assert_eq!(report().unwrap().1, []);
        let pool = Pool::from_env().unwrap();
        let config = pool.config();
        assert!(matches!(config.backend, Backend::Sim { total_bytes } if total_bytes == 3 << 30));
        assert_eq!((config.device, config.pool_size_limit, config.auto_resize), (2, 7, false));
        assert_eq!(
            (config.rounding, config.max_bytes, config.log_every),
            (Rounding::Exact, Ceiling::Bytes(64 << 20), 1)
        );
        assert_eq!((config.close_wait.as_millis(), config.idle_timeout, config.on_full), (250, None, OnFull::Pageable));
        assert_eq!((config.fence, config.stuck_after.as_secs()), (FenceKind::Timeline, 2));
        assert_eq!(config.pin_threads, Some(8));
        assert_eq!(config.pressure, PressureSource::File("/tmp/psi".into()));
    });
}

#[test]
fn a_ceiling_of_nothing_is_refused_and_none_is_no_ceiling() {
    alone_with(
        || owned(&[("PINPOOL_MAX_BYTES", "0")]),
        || {
            assert_eq!(report().unwrap().1.len(), 1);
            let error = heap().build().unwrap_err();
            assert!(error.is_setting() && error.to_string().contains("PINPOOL_MAX_BYTES=0: not a ceiling"), "{error}");
        },
    );
    assert_eq!("none".parse(), Ok(Ceiling::None));
}

#[test]
fn the_report_says_where_a_value_comes_from() {
    alone_with(
        || owned(&[("PINPOOL_POOL_SIZE_LIMIT", "0"), ("PINPOOL_LOG_EVERY", "x")]),
        || {
            let (entries, warnings) = report().unwrap();
            let is = |name| move |entry: &&VariableReport| entry.name == name;
            let origin = |name| entries.iter().find(is(name)).map(|entry| entry.origin);
            assert_eq!(origin("PINPOOL_POOL_SIZE_LIMIT"), Some("environment"));
            assert_eq!(origin("PINPOOL_AUTO_RESIZE"), Some("implied"));
            assert_eq!(origin("PINPOOL_LOG_EVERY"), Some("default"));
            assert_eq!(warnings.len(), 1);
        },
    );
}

#[test]
fn code_wins_over_environment() {
    alone_with(
        || owned(&[("PINPOOL_POOL_SIZE_LIMIT", "9"), ("PINPOOL_LOG_EVERY", "1")]),
        || {
            let pool = heap().pool_size_limit(7).build().unwrap();
            assert_eq!((pool.config().pool_size_limit, pool.config().log_every), (7, 1));
        },
    );
}

#[test]
fn a_count_of_zero_that_means_nothing_counts_as_one() {
    let config = resolved(|zeros| zeros.pools_per_host(0).log_every(0).pin_threads(0)).unwrap();
    assert_eq!((config.pools_per_host, config.log_every, config.pin_threads), (1, 1, Some(1)));
}

#[test]
fn a_limit_of_zero_implies_no_resizing_and_contradicts_it_when_explicit() {
    assert!(!resolved(|pool| pool.pool_size_limit(0)).unwrap().auto_resize);
    let error = refused(|pool| pool.pool_size_limit(0).auto_resize(true));
    assert!(error.to_string().contains("PINPOOL_POOL_SIZE_LIMIT=0"), "{error}");
}

#[test]
fn a_rounding_implies_the_preset_that_it_belongs_to_and_contradicts_the_other() {
    let exact = resolved(|pool| pool.rounding(Rounding::Exact)).unwrap();
    assert_eq!((exact.preset, exact.max_bytes, exact.wait), (Preset::Tensorflow, Ceiling::None, Duration::ZERO));
    assert_eq!(resolved(|pool| pool.preset(Preset::Tensorflow)).unwrap().rounding, Rounding::Pow2);
    assert_eq!(resolved(|pool| pool).unwrap().preset, Preset::Adaptive);
    for (preset, rounding) in [(Preset::Adaptive, Rounding::Pow2), (Preset::Tensorflow, Rounding::Eighths)] {
        let error = refused(|pool| pool.preset(preset).rounding(rounding));
        assert!(error.to_string().contains("PINPOOL_ROUNDING"), "{error}");
    }
}

#[test]
fn a_reserve_needs_an_arena_and_fits_under_the_ceiling() {
    let tight = refused(|pool| pool.reserve_bytes(2 << 30).max_bytes(1 << 30));
    let plain = refused(|pool| pool.reserve_bytes(2 << 30).preset(Preset::Tensorflow));
    for error in [tight, plain] {
        assert!(error.to_string().contains("PINPOOL_RESERVE"), "{error}");
    }
}
