//! Settings: how values are written, what a variable means, and what follows from one another.

use std::time::Duration;

use pinpool::unstable::config::BadVariable;
use pinpool::unstable::config::Config;
use pinpool::unstable::config::env::{VARIABLES, VariableReport, report, report_of};
use pinpool::unstable::config::text::{format_bytes, parse_bytes, parse_duration};
use pinpool::{Backend, Ceiling, Error, OnFull, Pool, PoolBuilder, Preset, PressureSource, Result, Rounding};

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
        let report = report();
        assert!(report.bad.is_empty() && !report.is_refused());
        for entry in report.variables {
            assert_eq!((entry.value.as_str(), entry.origin), (entry.default.as_str(), "default"), "{}", entry.name);
        }
    });
}

#[test]
fn every_default_can_be_set_explicitly() {
    alone_with(
        || VARIABLES.iter().map(|variable| (variable.name, variable.default())).collect(),
        || {
            let report = report();
            assert!(report.bad.is_empty() && report.contradictions.is_empty(), "{report:?}");
        },
    );
}

#[test]
fn nonsense_in_any_variable_is_an_error_that_names_its_value_and_the_default() {
    // A file or a ledger may have any name.
    let has_any = |name: &str| ["PINPOOL_TRACE", "PINPOOL_LEDGER"].contains(&name);
    let others = || VARIABLES.iter().filter(|variable| !has_any(variable.name));
    alone_with(
        || others().map(|variable| (variable.name, "purple".to_owned())).collect(),
        || {
            let bad = report().bad;
            assert_eq!(bad.len(), others().count());
            assert!(bad.iter().all(BadVariable::is_error));
            for variable in others() {
                let of_it = |text: &&String| text.starts_with(&format!("{}=", variable.name));
                let texts: Vec<_> = bad.iter().map(ToString::to_string).collect();
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
            let report = report();
            let [bad] = &report.bad[..] else { panic!("{report:?}") };
            assert!(!bad.is_error() && !report.is_refused());
            let text = "PINPOOL_MAXBYTES=1: not a variable of pinpool, and ignored; did you mean PINPOOL_MAX_BYTES?";
            assert_eq!(bad.to_string(), text);
        },
    );
}

#[test]
fn a_retired_variable_is_a_warning_that_says_what_holds_instead() {
    alone_with(
        || owned(&[("PINPOOL_FENCE", "event"), ("PINPOOL_RELEASE_POLICY", "force")]),
        || {
            let report = report();
            let texts: Vec<_> = report.bad.iter().map(ToString::to_string).collect();
            assert!(!report.is_refused() && texts.len() == 2, "{texts:?}");
            assert!(
                texts[0].contains("no longer a variable") && texts[0].contains("streams write numbers"),
                "{texts:?}"
            );
            assert!(texts[1].contains("no longer a variable") && texts[1].contains("trim()"), "{texts:?}");
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
            ("PINPOOL_STUCK_AFTER", "2s"),
            ("PINPOOL_WAIT", "NONE"),
            ("PINPOOL_PIN_THREADS", "8"),
            ("PINPOOL_RESERVE", "none"),
            ("PINPOOL_SOCKET", "0"),
            ("PINPOOL_MAX_FALLBACK_BYTES", "0"),
        ])
    };
    alone_with(vars, || {
        assert_eq!(report().bad, []);
        let pool = Pool::from_env().unwrap();
        let config = pool.config();
        assert!(matches!(config.backend, Backend::Sim { total_bytes } if total_bytes == 3 << 30));
        assert_eq!((config.device, config.pool_size_limit, config.auto_resize), (2, 7, false));
        assert_eq!(
            (config.rounding, config.max_bytes, config.log_every),
            (Rounding::Exact, Ceiling::Bytes(64 << 20), 1)
        );
        assert_eq!((config.close_wait, config.idle_timeout), (Some(Duration::from_millis(250)), None));
        assert_eq!(config.stuck_after, Some(Duration::from_secs(2)));
        assert_eq!(
            (config.wait, config.on_full, config.max_fallback_bytes),
            (None, OnFull::Pageable, Ceiling::Bytes(0))
        );
        assert_eq!((config.pin_threads, config.reserve_bytes, config.socket.as_ref()), (Some(8), 0, None));
        assert_eq!(config.pressure, PressureSource::File("/tmp/psi".into()));
    });
}

#[test]
fn a_ceiling_of_nothing_is_refused_and_none_is_no_ceiling() {
    alone_with(
        || owned(&[("PINPOOL_MAX_BYTES", "0")]),
        || {
            assert_eq!(report().bad.len(), 1);
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
            let report = report();
            let is = |name| move |entry: &&VariableReport| entry.name == name;
            let origin = |name| report.variables.iter().find(is(name)).map(|entry| entry.origin);
            assert_eq!(origin("PINPOOL_POOL_SIZE_LIMIT"), Some("environment"));
            assert_eq!(origin("PINPOOL_AUTO_RESIZE"), Some("implied"));
            assert_eq!(origin("PINPOOL_LOG_EVERY"), Some("default"));
            assert_eq!(report.bad.len(), 1);
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

/// The value that holds once code has set `set`, or the text of the error.
fn of_code(name: &str, set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Result<String, String> {
    let pool = set(heap().without_env()).build().map_err(|error| error.to_string())?;
    Ok(pinpool::unstable::setting(&pool, name))
}

/// The values that hold once a text was set, or the texts of the errors: as the argument of a method, and as the variable.
fn of_text(name: &str, text: &str) -> [Result<String, String>; 2] {
    let of_method = heap().without_env().variable(name, text).and_then(PoolBuilder::build);
    let of_method = of_method.map(|pool| pinpool::unstable::setting(&pool, name));
    let report = report_of(&[(name.to_owned(), text.to_owned())]);
    let of_variable = match (&report.bad[..], &report.contradictions[..]) {
        ([], []) => {
            Ok(report.variables.iter().find(|variable| variable.name == name).map(|found| found.value.clone()).unwrap())
        }
        ([bad], []) => Err(bad.to_string()),
        ([], [error, ..]) => Err(error.to_string()),
        _ => panic!("{report:?}"),
    };
    [of_method.map_err(|error| error.to_string()), of_variable]
}

#[test]
fn a_value_means_the_same_as_a_variable_as_text_and_in_code() {
    type Set = fn(PoolBuilder) -> PoolBuilder;
    const MAX: Duration = Duration::MAX;
    let same: &[(&str, &str, Set, &str)] = &[
        ("PINPOOL_DEVICE", "3", |pool| pool.device(3), "3"),
        ("PINPOOL_NUMA_NODE", "auto", |pool| pool.numa_node(None), "auto"),
        ("PINPOOL_POOL_SIZE_LIMIT", "0", |pool| pool.pool_size_limit(0), "0"),
        ("PINPOOL_AUTO_RESIZE", "off", |pool| pool.auto_resize(false), "0"),
        ("PINPOOL_ROUNDING", "noop", |pool| pool.rounding(Rounding::Exact), "exact"),
        ("PINPOOL_MAX_BYTES", "none", |pool| pool.max_bytes(None), "none"),
        ("PINPOOL_MAX_BYTES", "4096", |pool| pool.max_bytes(4096), "4KiB"),
        ("PINPOOL_POOLS_PER_HOST", "1000000", |pool| pool.pools_per_host(1_000_000), "1000000"),
        ("PINPOOL_WAIT", "none", |pool| pool.wait(None), "none"),
        ("PINPOOL_WAIT", "0", |pool| pool.wait(Duration::ZERO), "0s"),
        ("PINPOOL_WAIT", "18446744073709551615us", |pool| pool.wait(MAX), "18446744073709551615us"),
        ("PINPOOL_CLOSE_WAIT", "none", |pool| pool.close_wait(None), "none"),
        ("PINPOOL_STUCK_AFTER", "none", |pool| pool.stuck_after(None), "none"),
        ("PINPOOL_IDLE_TIMEOUT", "none", |pool| pool.idle_timeout(None), "none"),
        ("PINPOOL_ON_FULL", "Pageable", |pool| pool.on_full(OnFull::Pageable), "pageable"),
        ("PINPOOL_MAX_FALLBACK_BYTES", "0", |pool| pool.max_fallback_bytes(0), "0B"),
        ("PINPOOL_MAX_IDLE_BYTES", "0", |pool| pool.max_idle_bytes(0), "0B"),
        ("PINPOOL_RESERVE", "none", |pool| pool.reserve_bytes(0), "0B"),
        ("PINPOOL_RESERVE_WAIT", "no", |pool| pool.reserve_wait(false), "0"),
        ("PINPOOL_HUGETLB", "2m", |pool| pool.hugetlb(pinpool::HugeTlb::Of2MiB), "2MiB"),
        ("PINPOOL_PIN_THREADS", "auto", |pool| pool.pin_threads(None), "auto"),
        ("PINPOOL_PRESSURE", "0", |pool| pool.pressure(PressureSource::Off), "off"),
        ("PINPOOL_GROWTH", "true", |pool| pool.growth(true), "1"),
        ("PINPOOL_ZERO", "on", |pool| pool.zero(true), "1"),
        ("PINPOOL_POLL", "no", |pool| pool.background_poll(false), "0"),
        ("PINPOOL_SOCKET", "0", |pool| pool.socket(None), "none"),
        ("PINPOOL_TRACE", "none", |pool| pool.trace(None), "none"),
    ];
    for &(name, text, set, value) in same {
        let value = Ok(value.to_owned());
        assert_eq!(of_text(name, text), [value.clone(), value.clone()], "{name}={text}");
        assert_eq!(of_code(name, set), value, "{name}={text}");
    }
    let refused: &[(&str, &str, Set, &str)] = &[
        ("PINPOOL_MAX_BYTES", "0", |pool| pool.max_bytes(0), "=0B: not a ceiling, since every get would fail"),
        ("PINPOOL_POOLS_PER_HOST", "0", |pool| pool.pools_per_host(0), "=0: not a whole number of at least 1"),
        ("PINPOOL_LOG_EVERY", "0", |pool| pool.log_every(0), "=0: not a whole number of at least 1"),
        ("PINPOOL_PIN_THREADS", "0", |pool| pool.pin_threads(0), "=0: not a whole number of at least 1"),
        ("PINPOOL_SOCKET", "x", |pool| pool.socket(Some("x".into())), "=x: not a path with a slash, 1, or none"),
        ("PINPOOL_PRESSURE", "x/y", |pool| pool.pressure(PressureSource::File("x/y".into())), "=x/y: neither on, off"),
        ("PINPOOL_LEDGER", "a/b", |pool| pool.ledger("a/b"), "=a/b: "),
    ];
    for &(name, text, set, problem) in refused {
        let of_code = of_code(name, set).unwrap_err();
        assert!(of_code.starts_with(&format!("{name}{problem}")), "{of_code}");
        let remedy = format!("; correct it, or leave it out for the default {}", default_of(name));
        assert!(of_code.ends_with(&remedy), "{of_code}");
        // Sizes are shown with their unit.
        let of_code = of_code.replacen("=0B:", "=0:", 1);
        assert_eq!(of_text(name, text), [Err(of_code.clone()), Err(of_code)], "{name}={text}");
    }
}

#[test]
fn settings_that_fail_every_request_are_refused_and_settings_without_effect_are_named() {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let report = |pairs: &[(&str, &str)]| report_of(&pairs.iter().map(owned).collect::<Vec<_>>());
    for (name, value, words) in [
        ("PINPOOL_GROWTH", "0", "PINPOOL_GROWTH=0: fails every request, since there is no reserve"),
        ("PINPOOL_MAX_BYTES", "1", "PINPOOL_MAX_BYTES=1B: fails every request: the smallest takes 4KiB"),
        ("PINPOOL_MAX_BYTES", "4095", "the smallest takes 4KiB; raise the limit"),
    ] {
        let problems = report(&[(name, value)]).contradictions;
        assert!(problems.len() == 1 && problems[0].to_string().contains(words), "{problems:?}");
        assert!(of_text(name, value)[0].as_ref().is_err_and(|error| error.contains(words)));
    }
    let tensorflow = ("PINPOOL_PRESET", "tensorflow");
    for pairs in [[("PINPOOL_GROWTH", "0"), ("PINPOOL_RESERVE", "1M")], [("PINPOOL_MAX_BYTES", "1"), tensorflow]] {
        let report = report(&pairs);
        assert!(report.contradictions.is_empty() && report.ineffective.is_empty(), "{report:?}");
    }
    for (pairs, words) in [
        (
            [("PINPOOL_IDLE_TIMEOUT", "5s"), tensorflow],
            "PINPOOL_IDLE_TIMEOUT=5s: has no effect under PINPOOL_PRESET=tensorflow",
        ),
        ([("PINPOOL_HUGETLB", "auto"), tensorflow], "PINPOOL_HUGETLB=auto: has no effect without"),
        (
            [("PINPOOL_HUGETLB", "2M"), ("PINPOOL_BACKEND", "heap")],
            "PINPOOL_HUGETLB=2MiB: has no effect without a reserve",
        ),
        (
            [("PINPOOL_RESERVE_WAIT", "0"), ("PINPOOL_ZERO", "1")],
            "PINPOOL_RESERVE_WAIT=0: has no effect without PINPOOL_RESERVE",
        ),
        (
            [("PINPOOL_ON_FULL", "pageable"), ("PINPOOL_WAIT", "none")],
            "PINPOOL_ON_FULL=pageable: has no effect with PINPOOL_WAIT",
        ),
    ] {
        let report = report(&pairs);
        assert!(report.contradictions.is_empty() && report.ineffective.len() == 1, "{report:?}");
        assert!(report.ineffective[0].to_string().contains(words), "{:?}", report.ineffective);
    }
    for pairs in [
        [("PINPOOL_HUGETLB", "2M"), ("PINPOOL_BACKEND", "register")],
        [("PINPOOL_HUGETLB", "2M"), ("PINPOOL_RESERVE", "2M")],
        [("PINPOOL_RESERVE_WAIT", "0"), ("PINPOOL_RESERVE", "2M")],
        [("PINPOOL_IDLE_TIMEOUT", "5s"), ("PINPOOL_ON_FULL", "pageable")],
    ] {
        assert!(report(&pairs).ineffective.is_empty(), "{pairs:?}");
    }
}

fn default_of(name: &str) -> String {
    VARIABLES.iter().find(|variable| variable.name == name).unwrap().default()
}

#[test]
fn every_variable_that_cannot_be_read_is_named_in_the_error_and_code_that_sets_it_wins() {
    alone_with(
        || {
            owned(&[
                ("PINPOOL_ZERO", "ture"),
                ("PINPOOL_ON_FULL", "eror"),
                ("PINPOOL_IDLE_TIMEOUT", "soon"),
                ("PINPOOL_POOL_SIZE_LIMIT", "0"),
                ("PINPOOL_AUTO_RESIZE", "1"),
                ("PINPOOL_RESERVE", "2MiB"),
                ("PINPOOL_MAX_BYTES", "1MiB"),
            ])
        },
        || {
            let found = report();
            assert_eq!((found.bad.len(), found.contradictions.len()), (3, 2), "{found:?}");
            let text = heap().build().unwrap_err().to_string();
            let (first, others) = text.split_once("; nor can ").unwrap();
            assert!(first.starts_with("PINPOOL_IDLE_TIMEOUT=soon: not a time"), "{text}");
            assert_eq!(others, "PINPOOL_ON_FULL, PINPOOL_ZERO be read");
            let readable = || heap().idle_timeout(None).on_full(OnFull::Error).zero(true);
            let text = readable().build().unwrap_err().to_string();
            assert!(text.starts_with("PINPOOL_AUTO_RESIZE=1: contradicts"), "{text}");
            assert!(readable().auto_resize(false).reserve_bytes(0).build().is_ok());
        },
    );
}

#[test]
fn the_wait_is_short_where_other_memory_may_be_given_and_a_full_pool_is_an_error_everywhere() {
    let of = |set: fn(PoolBuilder) -> PoolBuilder| resolved(set).map(|config| (config.on_full, config.wait)).unwrap();
    assert_eq!(of(|pool| pool), (OnFull::Error, Some(Duration::from_secs(30))));
    assert_eq!(of(|pool| pool.on_full(OnFull::Pageable)), (OnFull::Pageable, Some(Duration::from_millis(100))));
    assert_eq!(of(|pool| pool.on_full(OnFull::Pageable).wait(None)), (OnFull::Pageable, None));
    let of_tensorflow = of(|pool| pool.preset(Preset::TensorFlow));
    assert_eq!(of_tensorflow, (OnFull::Error, Some(Duration::ZERO)));
    let config = Pool::builder().without_env().max_bytes(8 << 20).build().unwrap().config().clone();
    assert_eq!(config.on_full, OnFull::Error, "whatever the back-end that is found");
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
    assert_eq!((exact.preset, exact.max_bytes, exact.wait), (Preset::TensorFlow, Ceiling::None, Some(Duration::ZERO)));
    assert_eq!(resolved(|pool| pool.preset(Preset::TensorFlow)).unwrap().rounding, Rounding::Pow2);
    assert_eq!(resolved(|pool| pool).unwrap().preset, Preset::Adaptive);
    for (preset, rounding) in [(Preset::Adaptive, Rounding::Pow2), (Preset::TensorFlow, Rounding::Eighths)] {
        let error = refused(|pool| pool.preset(preset).rounding(rounding));
        assert!(error.to_string().contains("PINPOOL_ROUNDING"), "{error}");
    }
}

#[test]
fn a_reserve_needs_an_arena_and_fits_under_the_ceiling() {
    let tight = refused(|pool| pool.reserve_bytes(2 << 30).max_bytes(1 << 30));
    let plain = refused(|pool| pool.reserve_bytes(2 << 30).preset(Preset::TensorFlow));
    for error in [tight, plain] {
        assert!(error.to_string().contains("PINPOOL_RESERVE"), "{error}");
    }
}
