//! `pinpool bench`: every figure is there and hangs together; how large it is is the machine's affair.
#![cfg(feature = "cli")]

use std::process::Command;

use serde_json::Value;

fn bench(args: &[&str]) -> Value {
    let output =
        Command::new(env!("CARGO_BIN_EXE_pinpool")).arg("bench").args(args).arg("--json").env_clear().output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

fn is_positive(value: &Value) -> bool {
    number(value) > 0.0
}

/// The named fields must be there; what a figure means is the same in each pattern.
#[test]
fn hit_has_every_figure_in_each_pattern() {
    for (pattern, threads) in [("same", "1"), ("mix", "2"), ("cross", "2")] {
        let figures = bench(&["hit", "--pattern", pattern, "--threads", threads]);
        assert_eq!((&figures["pattern"], &figures["backend"]), (&pattern.into(), &"heap".into()));
        assert_eq!(figures["threads"].to_string(), threads);
        for name in ["mutex_hashmap", "array_queue", "malloc", "empty"] {
            assert!(is_positive(&figures["baselines"][name]), "{name} in {figures}");
        }
        assert!(is_positive(&figures["ns_per_pair"]), "{figures}");
        for of in [&figures, &figures["empty"]] {
            let percentiles = ["p50_ns", "p99_ns", "p999_ns", "max_ns"].map(|name| number(&of[name]));
            assert!(percentiles.is_sorted() && percentiles[3] > 0.0, "{of}");
        }
    }
}

#[test]
fn pin_measures_each_back_end_beside_plain_memory() {
    let threads = ["--threads", "1", "--threads", "3"];
    let figures = bench(&[&["pin", "--bytes", "8MiB", "--size", "1MiB", "--backend", "heap"], &threads[..]].concat());
    assert!(is_positive(&figures["touch_gb_per_s"]));
    let [heap] = figures["backends"].as_array().unwrap().as_slice() else { panic!("{figures}") };
    assert!(heap["backend"] == "heap" && is_positive(&heap["reserve_gb_per_s"]));
    let growth = heap["growth"].as_array().unwrap();
    assert_eq!(growth.iter().map(|each| number(&each["threads"])).collect::<Vec<_>>(), [1.0, 3.0]);
    assert!(growth.iter().all(|each| is_positive(&each["gb_per_s"]) && is_positive(&each["worst_get_us"])));
}

#[test]
fn stall_tells_rest_growth_and_shrink_apart() {
    let figures = bench(&["stall", "--seconds", "0.2", "--step", "8MiB", "--backend", "heap"]);
    let of = &figures["backends"][0];
    assert!(number(&of["rounds"]) >= 1.0);
    let phases: Vec<_> = of["phases"].as_array().unwrap().iter().map(|each| each["phase"].as_str().unwrap()).collect();
    assert_eq!(phases, ["rest", "grow", "shrink"]);
    let (rest, grow) = (&of["phases"][0], &of["phases"][1]);
    assert!(number(&rest["enqueues"]) > 1.0 && is_positive(&rest["max_us"]));
    let beyond = (number(&grow["max_us"]) - number(&rest["max_us"])).max(0.0);
    assert!((number(&of["grow_stall_us"]) - beyond).abs() < 0.01, "{of}");
}

#[test]
fn copy_has_a_rate_for_each_size_and_the_pageable_baseline_first() {
    let figures = bench(&["copy", "--seconds", "0.05", "--size", "4KiB", "--size", "1MiB", "--backend", "heap"]);
    let names: Vec<_> = figures["backends"].as_array().unwrap().iter().map(|of| of["backend"].clone()).collect();
    assert_eq!(names, ["pageable", "heap"]);
    for of in figures["backends"].as_array().unwrap() {
        assert!(of["gb_per_s"].as_array().unwrap().iter().all(is_positive) && of["gb_per_s"][1].is_number(), "{of}");
    }
}

#[test]
fn loader_stands_beside_the_same_copies_without_producers() {
    for (batches, preset) in [("fixed", "adaptive"), ("lognormal", "tensorflow")] {
        let args = ["--producers", "2", "--seconds", "0.3", "--backend", "heap", "--batches", batches];
        let figures = bench(&[&["loader", "--preset", preset], &args[..]].concat());
        for name in ["raw_gb_per_s", "gb_per_s", "first_second_gb_per_s", "acquire_worst_us", "requested_peak_bytes"] {
            assert!(is_positive(&figures[name]), "{name} in {figures}");
        }
        let of_raw = number(&figures["gb_per_s"]) / number(&figures["raw_gb_per_s"]);
        assert!((number(&figures["of_raw"]) - of_raw).abs() < 0.01, "{figures}");
        assert_eq!(figures["preset"], preset);
    }
}

#[test]
fn what_is_not_here_is_said_with_its_reason() {
    let figures = bench(&["copy", "--seconds", "0.01", "--size", "4KiB", "--backend", "heap", "--backend", "sim:0"]);
    let missing = figures["missing"][0].as_str().unwrap();
    assert!(missing.starts_with("sim: "), "{missing}");
}
