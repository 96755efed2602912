//! Settings: how values are written, what a variable means, and how settings affect each other.

use std::time::Duration;

use pinpool::Rounding;
use pinpool::unstable::config::Config;
use pinpool::unstable::config::env::{VARIABLES, VariableReport, report, report_of};
use pinpool::{Backend, Error, Limit, OnFull, Pool, PoolBuilder, Preset, Result};

use crate::captured_log::{lines, listen};
use crate::child::alone_with;

fn heap() -> PoolBuilder {
    Pool::builder().backend(Backend::Heap)
}

/// The configuration of a pool with these settings and no variables.
fn resolved(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Result<Config> {
    set(heap().without_env()).build().map(|pool| pool.unstable_config().clone())
}

fn refused(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Error {
    let error = resolved(set).unwrap_err();
    assert!(error.is_setting(), "{error}");
    error
}

#[test]
fn every_default_can_be_set_explicitly() {
    alone_with(VARIABLES.iter().map(|variable| (variable.name, variable.default())), || {
        let report = report();
        assert!(report.errors.is_empty() && report.warnings.is_empty(), "{report:?}");
    });
}

#[test]
fn nonsense_in_any_variable_is_an_error_that_names_its_value_and_the_default() {
    // A file or a shared limit may have any name.
    let has_any = |name: &str| ["PINPOOL_TRACE", "PINPOOL_LEDGER"].contains(&name);
    let others = || VARIABLES.iter().filter(|variable| !has_any(variable.name));
    alone_with(others().map(|variable| (variable.name, "purple")), || {
        let errors = report().errors;
        assert_eq!(errors.len(), others().count());
        for variable in others() {
            let of_it = |text: &&String| text.starts_with(&format!("{}=", variable.name));
            let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
            let text = texts.iter().find(of_it).map(String::as_str).unwrap_or_default();
            for part in ["purple", &variable.default()] {
                assert!(text.contains(part), "{}: {text}", variable.name);
            }
        }
    });
}

#[test]
fn unknown_variables_of_ours_are_named_once_and_others_left_alone() {
    alone_with([("PINPOOL_MAXBYTES", "1"), ("PINPOOLX", "1")], || {
        let report = report();
        assert!(report.errors.is_empty());
        assert_eq!(report.warnings, ["PINPOOL_MAXBYTES=1: unknown and ignored; did you mean PINPOOL_MAX_BYTES?"]);
        listen();
        (0..40).for_each(|_| drop(heap().build().unwrap()));
        assert_eq!(lines().iter().filter(|line| line.ends_with(&report.warnings[0])).count(), 1);
    });
}

/// Two of the retired names; the table is in `config`.
const RETIRED: [(&str, &str); 2] = [
    ("CLOSE_WAIT", "a pool that ends waits 30s for a stuck copy"),
    ("POOLS_PER_HOST", "share one limit with PINPOOL_LEDGER, or set PINPOOL_MAX_BYTES to a size"),
];

#[test]
fn a_retired_name_is_a_warning_that_names_what_replaces_it() {
    for (name, instead) in RETIRED {
        let expected = format!("PINPOOL_{name}=1: retired and ignored; {instead}");
        let report = report_of(&[(format!("PINPOOL_{name}"), "1".to_owned())]);
        assert_eq!((report.errors.len(), &report.warnings[..]), (0, &[expected.clone()][..]));
        assert!(report.variables.iter().all(|variable| variable.origin == "default"));
        listen();
        heap().without_env().setting(&format!("PINPOOL_{name}"), 1).build().unwrap();
        let logged = lines();
        assert!(logged.iter().any(|line| line.ends_with(&format!(" setting: {expected}"))), "{logged:?}");
    }
}

#[test]
fn another_prefix_is_kept_in_warnings_and_errors() {
    alone_with([("EVAL_STUCK_AFTER", "5s"), ("BAD_MAX_BYTES", "lots")], || {
        listen();
        heap().env_prefix("EVAL_").build().unwrap();
        let expected = "EVAL_STUCK_AFTER=5s: retired and ignored; a copy in flight for 30s is reported as stuck";
        assert!(lines().iter().any(|line| line.ends_with(expected)));
        let text = heap().env_prefix("BAD_").build().unwrap_err().to_string();
        assert!(text.contains("PINPOOL_MAX_BYTES=lots: ") && text.contains("(from BAD_MAX_BYTES)"), "{text}");
    });
}

#[test]
fn unknown_variables_and_invalid_values_are_errors_with_remedies() {
    let error = Pool::builder().setting("PINPOOL_MAX_BYTE", "1G").build().unwrap_err();
    assert!(error.is_setting() && error.setting() == Some("PINPOOL_MAX_BYTE"));
    assert_eq!(error.to_string(), "unknown setting PINPOOL_MAX_BYTE; did you mean PINPOOL_MAX_BYTES?");
    let text = Pool::builder().setting("PURPLE", "1G").build().unwrap_err().to_string();
    assert!(text.ends_with("`pinpool doctor --settings --all` lists the variables"), "{text}");
    let text = Pool::builder().setting("PINPOOL_WAIT", "soon").build().unwrap_err().to_string();
    assert!(text.starts_with("PINPOOL_WAIT=soon: not a time") && text.contains("the default 30s"), "{text}");
}

#[test]
fn a_setting_given_twice_with_different_values_is_named() {
    // Code overrides the environment, with a warning if the values differ.
    let variables = [("PINPOOL_WAIT", "5s"), ("PINPOOL_ZERO", "on"), ("EVAL_WAIT", "7s"), ("PINPOOL_LOG_EVERY", "x")];
    alone_with(variables, || {
        let warned = |builder: PoolBuilder| {
            listen();
            builder.wait(Duration::from_secs(2)).zero(true).log_every(3).build().unwrap();
            lines().into_iter().filter_map(|line| Some(line.split_once(" setting: ")?.1.to_owned())).collect::<Vec<_>>()
        };
        let in_code = |name, value, code| {
            format!("{name}={value}: ignored; the program sets {code} in code, which takes precedence")
        };
        assert_eq!(warned(heap()), [in_code("PINPOOL_LOG_EVERY", "x", "3"), in_code("PINPOOL_WAIT", "5s", "2s")]);
        // Another prefix replaces the usual one; variables with the usual prefix are not read.
        assert_eq!(warned(heap().env_prefix("EVAL_")), [in_code("EVAL_WAIT", "7s", "2s")]);
        assert_eq!(warned(heap().without_env().setting("maintenance_thread", "").setting("close_wait", " ")), [""; 0]);
    });
    // Two texts in code, as in the string that C opens a pool with.
    let twice = |texts: [&str; 2]| {
        heap().without_env().setting("max_bytes", texts[0]).setting("PINPOOL_MAX_BYTES", texts[1]).build()
    };
    let error = twice(["1GiB", "2GiB"]).unwrap_err();
    assert_eq!(error.to_string(), "PINPOOL_MAX_BYTES=2GiB: already set to 1GiB; leave one of the two out");
    assert!(error.is_setting() && twice(["1GiB", "1024M"]).is_ok());
}

#[test]
fn the_report_says_where_a_value_comes_from() {
    alone_with([("PINPOOL_POOL_SIZE_LIMIT", "0"), ("PINPOOL_LOG_EVERY", "x")], || {
        let report = report();
        let is = |name| move |entry: &&VariableReport| entry.name == name;
        let origin = |name| report.variables.iter().find(is(name)).map(|entry| entry.origin);
        assert_eq!(origin("PINPOOL_POOL_SIZE_LIMIT"), Some("variable"));
        assert_eq!(origin("PINPOOL_AUTO_RESIZE"), Some("implied"));
        assert_eq!(origin("PINPOOL_LOG_EVERY"), Some("default"));
        assert_eq!(report.errors.len(), 1);
    });
}

/// The value of setting `name` after code has called `set`, or the error text.
fn from_code(name: &str, set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Result<String, String> {
    let pool = set(heap().without_env()).build().map_err(|error| error.to_string())?;
    Ok(pool.unstable_config().value_of(name))
}

/// The values of a setting after `text` was passed to a method and set as the variable, or the error texts.
fn from_text(name: &str, text: &str) -> [Result<String, String>; 2] {
    let of_method = heap().without_env().setting(name, text).build();
    let of_method = of_method.map(|pool| pool.unstable_config().value_of(name));
    let report = report_of(&[(name.to_owned(), text.to_owned())]);
    let of_variable =
        report.errors.first().map_or_else(|| Ok(report.config.value_of(name)), |error| Err(error.to_string()));
    [of_method.map_err(|error| error.to_string()), of_variable]
}

#[test]
fn a_value_means_the_same_as_a_variable_as_text_and_in_code() {
    type Set = fn(PoolBuilder) -> PoolBuilder;
    const MAX: Duration = Duration::MAX;
    let same: &[(&str, &str, Set, &str)] = &[
        ("PINPOOL_DEVICE", "3", |pool| pool.device(3), "3"),
        ("PINPOOL_MAX_BYTES", "none", |pool| pool.max_bytes(Limit::Unlimited), "none"),
        ("PINPOOL_MAX_BYTES", "4096", |pool| pool.max_bytes(4096), "4KiB"),
        ("PINPOOL_WAIT", "none", |pool| pool.wait(None), "none"),
        ("PINPOOL_WAIT", "0", |pool| pool.wait(Duration::ZERO), "0s"),
        ("PINPOOL_WAIT", "18446744073709551615us", |pool| pool.wait(MAX), "18446744073709551615us"),
        ("PINPOOL_IDLE_TIMEOUT", "none", |pool| pool.idle_timeout(None), "none"),
        ("PINPOOL_ON_FULL", "Pageable", |pool| pool.on_full(OnFull::Pageable), "pageable"),
        ("PINPOOL_RESERVE", "none", |pool| pool.reserve(0), "0B"),
        ("PINPOOL_TRACE", "none", |pool| pool.trace(None), "none"),
        ("PINPOOL_SOCKET", "none", |pool| pool.socket(None), "none"),
        ("PINPOOL_LEDGER", "Auto", |pool| pool.ledger("Auto"), "auto"),
        ("PINPOOL_LEDGER", "train", |pool| pool.ledger("train".to_owned()), "train"),
    ];
    for &(name, text, set, value) in same {
        let value = Ok(value.to_owned());
        assert_eq!(from_text(name, text), [value.clone(), value.clone()], "{name}={text}");
        assert_eq!(from_code(name, set), value, "{name}={text}");
    }
    let texts = [
        ("PINPOOL_NUMA_NODE", "auto", "auto"),
        ("PINPOOL_POOL_SIZE_LIMIT", "0", "0"),
        ("PINPOOL_AUTO_RESIZE", "off", "0"),
        ("PINPOOL_MAX_IDLE_BYTES", "0", "0B"),
        ("PINPOOL_RESERVE_WAIT", "no", "0"),
        ("PINPOOL_HUGETLB", "2m", "2MiB"),
        ("PINPOOL_GROWTH", "true", "1"),
        ("PINPOOL_ZERO", "on", "1"),
        ("PINPOOL_SOCKET", "0", "none"),
    ];
    for (name, text, value) in texts {
        assert_eq!(from_text(name, text), [(); 2].map(|()| Ok(value.to_owned())), "{name}={text}");
    }
    let refused: &[(&str, &str, Set, &str)] = &[
        ("PINPOOL_MAX_BYTES", "0", |pool| pool.max_bytes(0), "=0B: not a limit, since every request would fail"),
        ("PINPOOL_LOG_EVERY", "0", |pool| pool.log_every(0), "=0: not a whole number of at least 1"),
        ("PINPOOL_LEDGER", "a/b", |pool| pool.ledger("a/b"), "=a/b: "),
    ];
    for &(name, text, set, problem) in refused {
        let from_code = from_code(name, set).unwrap_err();
        assert!(from_code.starts_with(&format!("{name}{problem}")), "{from_code}");
        let default = VARIABLES.iter().find(|variable| variable.name == name).unwrap().default();
        let remedy = format!("; correct it, or leave it out for the default {default}");
        assert!(from_code.ends_with(&remedy), "{from_code}");
        // Sizes are shown with their unit.
        let from_code = from_code.replacen("=0B:", "=0:", 1);
        assert_eq!(from_text(name, text), [Err(from_code.clone()), Err(from_code)], "{name}={text}");
    }
}

/// The pool is not built, so no file is made.
#[test]
#[cfg(feature = "observe")]
fn a_path_is_set_as_it_is() {
    let text = |builder: PoolBuilder, name| builder.unstable_config().unwrap().value_of(name);
    assert_eq!(text(heap().trace(std::path::PathBuf::from("t.gz")), "PINPOOL_TRACE"), "t.gz");
    for (path, shown) in [("/tmp/s", "/tmp/s"), ("./1", "./1"), ("1", "./1"), ("none", "./none"), ("x", "./x")] {
        assert_eq!(text(heap().socket(pinpool::StatsSocket::from(path)), "PINPOOL_SOCKET"), shown);
    }
    let [word, _] = from_text("PINPOOL_SOCKET", "x");
    assert!(word.unwrap_err().starts_with("PINPOOL_SOCKET=x: not a path with a slash, 1, or none; correct it"));
    assert_eq!(text(heap().socket(pinpool::StatsSocket::Default), "PINPOOL_SOCKET"), "1");
}

#[test]
fn settings_that_fail_every_request_are_refused() {
    let owned = |(name, value): &(&str, &str)| (format!("PINPOOL_{name}"), (*value).to_owned());
    let report = |pairs: &[(&str, &str)]| report_of(&pairs.iter().map(owned).collect::<Vec<_>>());
    for (name, value, words) in [
        ("GROWTH", "0", "PINPOOL_GROWTH=0: fails every request, since there is no reserve"),
        ("MAX_BYTES", "1", "PINPOOL_MAX_BYTES=1B: fails every request: the smallest takes 4KiB"),
        ("MAX_BYTES", "4095", "the smallest takes 4KiB; raise the limit"),
        ("ROUNDING", "noop", "PINPOOL_ROUNDING=exact: is not possible with PINPOOL_PRESET=adaptive"),
    ] {
        let problems = report(&[(name, value)]).errors;
        assert!(problems.len() == 1 && problems[0].to_string().contains(words), "{problems:?}");
        assert!(from_text(&format!("PINPOOL_{name}"), value)[0].as_ref().is_err_and(|error| error.contains(words)));
    }
    let tensorflow = ("PRESET", "tensorflow");
    for (pairs, words) in [
        ([("IDLE_TIMEOUT", "5s"), tensorflow], "IDLE_TIMEOUT=5s: has no effect under PINPOOL_PRESET=tensorflow"),
        ([("HUGETLB", "auto"), tensorflow], "HUGETLB=auto: has an effect only on register under the preset adaptive"),
        (
            [("HUGETLB", "2M"), ("BACKEND", "heap")],
            "HUGETLB=2MiB: has an effect only on register under the preset adaptive, or for a PINPOOL_RESERVE of vmm, mlock or heap that",
        ),
        ([("RESERVE_WAIT", "0"), ("ZERO", "1")], "RESERVE_WAIT=0: has no effect without PINPOOL_RESERVE"),
        ([("ON_FULL", "pageable"), ("WAIT", "none")], "ON_FULL=pageable: has no effect with PINPOOL_WAIT"),
    ] {
        let report = report(&pairs);
        assert!(report.errors.is_empty() && report.warnings.len() == 1, "{report:?}");
        assert!(report.warnings[0].contains(&format!("PINPOOL_{words}")), "{:?}", report.warnings);
    }
    for pairs in [
        [("GROWTH", "0"), ("RESERVE", "1M")],
        [("MAX_BYTES", "1"), tensorflow],
        [("ROUNDING", "noop"), tensorflow],
        [("HUGETLB", "2M"), ("BACKEND", "register")],
        [("HUGETLB", "2M"), ("RESERVE", "2M")],
        [("RESERVE_WAIT", "0"), ("RESERVE", "2M")],
        [("IDLE_TIMEOUT", "5s"), ("ON_FULL", "pageable")],
    ] {
        let report = report(&pairs);
        assert!(report.errors.is_empty() && report.warnings.is_empty(), "{report:?}");
    }
}

#[test]
fn all_invalid_variables_are_named_and_code_overrides_them() {
    let variables = [
        ("PINPOOL_ZERO", "ture"),
        ("PINPOOL_ON_FULL", "eror"),
        ("PINPOOL_IDLE_TIMEOUT", "soon"),
        ("PINPOOL_POOL_SIZE_LIMIT", "0"),
        ("PINPOOL_AUTO_RESIZE", "1"),
        ("PINPOOL_RESERVE", "2MiB"),
        ("PINPOOL_MAX_BYTES", "1MiB"),
    ];
    alone_with(variables, || {
        let found = report();
        assert_eq!((found.errors.len(), found.warnings.len()), (5, 0), "{found:?}");
        let text = heap().build().unwrap_err().to_string();
        let (first, others) = text.split_once("; also wrong: ").unwrap();
        assert!(first.starts_with("PINPOOL_IDLE_TIMEOUT=soon: not a time"), "{text}");
        assert!(first.contains("leave it out for the default"), "{text}");
        assert!(found.errors.iter().any(|error| error.to_string() == first), "the text of the report");
        assert_eq!(found.variables.len(), VARIABLES.len());
        assert_eq!(others, "PINPOOL_ON_FULL, PINPOOL_ZERO, PINPOOL_AUTO_RESIZE, PINPOOL_RESERVE");
        let readable = || heap().idle_timeout(None).on_full(OnFull::Error).zero(true);
        let text = readable().build().unwrap_err().to_string();
        assert!(text.starts_with("PINPOOL_AUTO_RESIZE=1: contradicts"), "{text}");
        assert!(readable().auto_resize(false).reserve(0).build().is_ok());
    });
}

#[test]
fn the_default_wait_depends_on_the_fallback_memory() {
    let of = |set: fn(PoolBuilder) -> PoolBuilder| resolved(set).map(|config| (config.on_full, config.wait)).unwrap();
    assert_eq!(of(|pool| pool), (OnFull::Error, Some(Duration::from_secs(30))));
    assert_eq!(of(|pool| pool.on_full(OnFull::Pageable)), (OnFull::Pageable, Some(Duration::from_millis(100))));
    assert_eq!(of(|pool| pool.on_full(OnFull::Pageable).wait(None)), (OnFull::Pageable, None));
    assert_eq!(of(|pool| pool.preset(Preset::TensorFlow)), (OnFull::Error, Some(Duration::ZERO)));
    let config = Pool::builder().without_env().max_bytes(8 << 20).build().unwrap().unstable_config().clone();
    assert_eq!(config.on_full, OnFull::Error, "whatever the backend that is found");
}

#[test]
fn a_rounding_belongs_to_one_preset() {
    let tensorflow = resolved(|pool| pool.preset(Preset::TensorFlow)).unwrap();
    assert_eq!((tensorflow.max_bytes, tensorflow.wait), (Limit::Unlimited, Some(Duration::ZERO)));
    let exact = resolved(|pool| pool.preset(Preset::TensorFlow).setting("rounding", "noop")).unwrap();
    assert_eq!((tensorflow.rounding, exact.rounding), (Rounding::Pow2, Rounding::Exact));
    let implied = refused(|pool| pool.rounding(Rounding::Exact));
    let other = refused(|pool| pool.preset(Preset::TensorFlow).rounding(Rounding::Eighths));
    for text in [implied, other].map(|error| error.to_string()) {
        assert!(text.contains("PINPOOL_ROUNDING") && text.contains("PINPOOL_PRESET"), "{text}");
    }
}

#[test]
fn a_reserve_needs_an_arena_and_fits_under_the_limit() {
    let tight = refused(|pool| pool.reserve(2 << 30).max_bytes(1 << 30));
    for error in [tight, refused(|pool| pool.reserve(2 << 30).preset(Preset::TensorFlow))] {
        assert!(error.to_string().contains("PINPOOL_RESERVE"), "{error}");
    }
}
