//! `pinpool-bench`: all numbers are present and consistent. Their values depend on the machine.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Value {
    bench_in(args, &[])
}

/// Runs a benchmark that must be refused. A limit on its address space keeps a failing test from using the memory.
fn refused(args: &[&str]) -> (Option<i32>, String) {
    let limited = ["-c", r#"ulimit -v 4000000; exec "$0" "$@""#, env!("CARGO_BIN_EXE_pinpool-bench")];
    let output = Command::new("sh").args(limited).args(args).env_clear().output().unwrap();
    assert!(output.stdout.is_empty(), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn bench_in(args: &[&str], env: &[(&str, &Path)]) -> Value {
    let output = output(&[args, &["--json"]].concat(), env);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn output(args: &[&str], env: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinpool-bench"));
    command.args(args).env_clear().envs(env.iter().copied()).output().unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

fn is_positive(value: &Value) -> bool {
    number(value) > 0.0
}

#[test]
fn hit_has_every_number_in_each_pattern() {
    for (pattern, threads) in [("same", "1"), ("mix", "2"), ("cross", "2")] {
        let report = bench(&["hit", "--pattern", pattern, "--threads", threads]);
        assert_eq!((&report["pattern"], &report["backend"]), (&pattern.into(), &"heap".into()));
        assert_eq!(report["threads"].to_string(), threads);
        for name in ["array_queue", "malloc"] {
            assert!(is_positive(&report["baselines"][name]), "{name} in {report}");
        }
        assert!(is_positive(&report["ns_per_pair"]), "{report}");
    }
}

#[test]
fn pin_measures_the_first_buffer_and_each_reserve() {
    let threads = ["--threads", "1", "--threads", "3", "--backend", "heap"];
    let report = bench(&[&["pin", "--bytes", "8MiB", "--rounds", "2"], &threads[..]].concat());
    assert_eq!((&report["bytes"], &report["rounds"]), (&(8 << 20).into(), &2.into()));
    assert!(is_positive(&report["touch"]["gb_per_s"]), "{report}");
    let [heap] = report["backends"].as_array().unwrap().as_slice() else { panic!("{report}") };
    assert_eq!(heap["backend"], "heap");
    assert!(is_positive(&heap["first_ms"]), "{heap}");
    let reserve = heap["reserve"].as_array().unwrap();
    assert_eq!(reserve.iter().map(|each| number(&each["threads"])).collect::<Vec<_>>(), [1.0, 3.0]);
    for each in reserve {
        let [median, best] = ["gb_per_s", "best_gb_per_s"].map(|name| number(&each[name]));
        assert!(0.0 < median && median <= best, "{each}");
    }
}

#[test]
fn pin_defaults_to_the_threads_and_bytes_of_the_machine() {
    let report = bench(&["pin", "--rounds", "1", "--backend", "heap"]);
    let (bytes, most, cores) = (number(&report["bytes"]), number(&report["most_bytes"]), number(&report["cores"]));
    assert_eq!(bytes, most.min(f64::from(1 << 30)));
    let reserve = report["backends"][0]["reserve"].as_array().unwrap();
    let threads: Vec<_> = reserve.iter().map(|each| number(&each["threads"])).collect();
    assert!(threads.is_sorted() && threads[0] == 1.0 && threads.last() == Some(&cores), "{threads:?} of {cores}");
}

/// Checks the results of `stall` for one backend.
fn check_stall(of: &Value, step_bytes: f64) {
    let phases = of["phases"].as_array().unwrap();
    let [rest, grow, shrink] = phases.as_slice() else { panic!("{of}") };
    assert_eq!([&rest["phase"], &grow["phase"], &shrink["phase"]], ["rest", "grow", "shrink"]);
    // A round ends only after at least as many enqueues at rest as during growth and shrinking.
    let work = number(&grow["enqueues"]) + number(&shrink["enqueues"]);
    assert!(number(&rest["enqueues"]) >= work.max(1.0), "{of}");
    for phase in phases {
        assert!(["p50_us", "p99_us", "max_us"].map(|name| number(&phase[name])).is_sorted(), "{phase}");
    }
    let beyond = |phase: &Value| (number(&phase["max_us"]) - number(&rest["max_us"])).max(0.0);
    assert!((number(&of["grow_stall_us"]) - beyond(grow)).abs() < 0.01, "{of}");
    if number(&of["releases"]) > 0.0 {
        assert!((number(&of["shrink_stall_us"]) - beyond(shrink)).abs() < 0.01, "{of}");
    } else {
        assert!(of["shrink_stall_us"].is_null(), "{of}");
    }
    // Each round releases the memory by which it grew.
    let rounds = number(&of["rounds"]);
    assert!(rounds >= 1.0 && number(&of["grown_bytes"]) >= rounds * step_bytes / 2.0, "{of}");
}

#[test]
fn stall_separates_rest_growth_and_shrink() {
    let report = bench(&["stall", "--seconds", "0.2", "--step", "8MiB", "--backend", "heap"]);
    let of = &report["backends"][0];
    check_stall(of, f64::from(8 << 20));
    assert!(is_positive(&of["releases"]), "{of}");
}

#[test]
fn copy_has_a_rate_for_each_size_and_the_cost_of_tracking() {
    let report = bench(&["copy", "--seconds", "0.05", "--size", "4KiB", "--size", "1MiB", "--backend", "heap"]);
    let names: Vec<_> = report["backends"].as_array().unwrap().iter().map(|of| of["backend"].clone()).collect();
    assert_eq!(names, ["pageable", "heap"]);
    for of in report["backends"].as_array().unwrap() {
        assert!(of["gb_per_s"].as_array().unwrap().iter().all(is_positive) && of["gb_per_s"][1].is_number(), "{of}");
    }
    assert_eq!(report["tracked_over"], "heap");
    check_tracked(&report, &[4 << 10, 64 << 10]);
}

fn check_tracked(report: &Value, sizes: &[u64]) {
    let tracked = report["tracked"].as_array().unwrap();
    assert_eq!(tracked.iter().map(|of| of["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), sizes);
    for of in tracked {
        let [ns, bare_ns, beyond_ns] = ["ns", "bare_ns", "beyond_bare_ns"].map(|name| number(&of[name]));
        assert!(ns > 0.0 && bare_ns > 0.0 && (ns - bare_ns - beyond_ns).abs() < 0.01, "{of}");
    }
}

/// Runs with the mock driver as libcuda.
#[cfg(feature = "cuda")]
#[test]
fn over_a_driver_every_backend_shrinks_copies_and_pins() {
    let folder = tempfile::tempdir().unwrap();
    let driver = crate::mock_driver(folder.path());
    let env = [("LD_LIBRARY_PATH", &*driver)];

    let backends = ["--backend", "vmm", "--backend", "register", "--backend", "cuda"];
    let report = bench_in(&[&["stall", "--seconds", "0.2", "--step", "8MiB"], &backends[..]].concat(), &env);
    assert_eq!((&report["to"], report["missing"].as_array().unwrap().len()), (&"mock driver".into(), 0));
    let of = report["backends"].as_array().unwrap();
    of.iter().for_each(|of| check_stall(of, f64::from(8 << 20)));
    of.iter().for_each(|of| assert!(is_positive(&of["releases"]), "{of}"));
    let report = bench_in(&["copy", "--seconds", "0.02", "--size", "4KiB", "--backend", "vmm"], &env);
    check_tracked(&report, &[4 << 10, 64 << 10]);

    let report = bench_in(&[&["pin", "--bytes", "8MiB", "--rounds", "1"], &backends[..]].concat(), &env);
    assert_eq!(report["backends"].as_array().unwrap().len(), 3, "{report}");
}

#[cfg(feature = "cuda")]
#[test]
fn missing_backends_are_listed_and_without_another_the_benchmark_fails() {
    let folder = tempfile::tempdir().unwrap();
    let driver = crate::mock_driver(folder.path());
    let env = [("LD_LIBRARY_PATH", &*driver), ("MOCK_DRIVER_FAIL", Path::new("cuInit:1+=100"))];
    let args = ["copy", "--seconds", "0.01", "--size", "4KiB", "--backend", "heap", "--backend", "vmm"];
    let report = bench_in(&args, &env);
    let missing = report["missing"][0].as_str().unwrap();
    assert!(missing.starts_with("vmm: "), "{missing}");
    for bench in ["pin", "stall", "copy"] {
        let ran = output(&[bench, "--backend", "vmm"], &env);
        let stderr = String::from_utf8(ran.stderr).unwrap();
        assert_eq!((ran.status.code(), ran.stdout.len()), (Some(1), 0), "{bench}: {stderr}");
        assert!(stderr.starts_with("pinpool: vmm: "), "{bench}: {stderr}");
    }
}

#[test]
fn more_memory_than_the_default_limit_is_refused() {
    let most = bench(&["pin", "--bytes", "4KiB", "--rounds", "1", "--backend", "heap"])["most_bytes"].clone();
    let most = format!(" bytes, more than the {most} that a pool may use on this machine; give ");
    for (args, argument, words) in [
        (&["pin", "--bytes", "1048576TiB"][..], "--bytes 1048576TiB: ", &*most),
        (&["stall", "--step", "1048576TiB"], "--step 1048576TiB: ", &most),
        (&["copy", "--size", "4KiB", "--size", "1048576TiB"], "--size 1048576TiB: ", &most),
    ] {
        let (code, stderr) = refused(args);
        assert!(code == Some(2) && stderr.starts_with(&format!("pinpool: {argument}")), "{args:?}: {code:?} {stderr}");
        assert!(stderr.contains(words), "{stderr}");
    }
}

#[test]
fn invalid_values_are_refused_by_the_parser() {
    for bench in ["stall", "copy"] {
        for seconds in ["nan", "inf", "1e300", "0"] {
            let (code, stderr) = refused(&[bench, "--seconds", seconds]);
            assert!(code == Some(2) && stderr.contains("seconds from 0.001 to 3600"), "{bench} {seconds}: {stderr}");
        }
    }
    for (bench, argument) in [("pin", "--bytes"), ("copy", "--size"), ("stall", "--step")] {
        let (code, stderr) = refused(&[bench, argument, "0"]);
        assert_eq!(code, Some(2), "{bench} {argument}: {stderr}");
        assert!(stderr.contains(argument) && stderr.contains("less than "), "{bench}: {stderr}");
    }
}
