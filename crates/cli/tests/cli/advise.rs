//! `replay --set` and `advise`: settings side by side, and the smallest that meet a target.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::record::recorded;
use crate::tool::{Ran, finish, pinpool};

fn advise(path: &Path, args: &[&str]) -> Ran {
    finish(pinpool(&["advise"]).arg(path).args(args))
}

fn written(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    path
}

/// Batches of `held` buffers of each size, got together and put back together.
fn batches(rounds: usize, held: usize, sizes: &[u64]) -> String {
    let mut text = String::new();
    for _ in 0..rounds {
        let buffers = sizes.iter().cycle().take(held * sizes.len()).enumerate();
        for (id, size) in buffers.clone() {
            let _ = writeln!(text, "a {id} {size}");
        }
        text += "t 10000\n";
        for (id, _) in buffers {
            let _ = writeln!(text, "f {id}");
        }
        text += "t 10000\n";
    }
    text
}

#[test]
fn settings_are_played_side_by_side_with_a_column_each() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", &batches(400, 8, &[1 << 20, 300_000]));
    let replay = |args: &[&str]| finish(pinpool(&["replay"]).arg(&path).args(args));
    let sets = [
        "--set",
        "PRESET=tensorflow",
        "--set",
        "pinpool_preset=tensorflow,POOL_SIZE_LIMIT=4",
        "--set",
        "MAX_BYTES=6MiB",
    ];
    let ran = replay(&[&sets[..], &["--pin-cost", "1ms,0"]].concat());
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    for row in
        ["hits", "driver seconds", "peak pinned MiB", "waste at peak MiB", "waits", "raises", "TensorFlow's last lines"]
    {
        assert!(ran.stdout.contains(row), "no {row} in\n{}", ran.stdout);
    }
    assert!(ran.stdout.contains("PoolAllocator: After ") && ran.stdout.contains("as given"), "{}", ran.stdout);

    let ran = replay(&[&sets[..], &["--json"]].concat());
    let columns: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let number = |at: usize, key: &str| columns[at][key].as_u64().unwrap_or_else(|| panic!("{key}: {}", columns[at]));
    assert_eq!(columns.len(), 3);
    // Sixteen buffers are held and got again, and all are kept; with four, twelve are evicted each time.
    assert_eq!((number(0, "misses"), number(0, "raises"), number(0, "driver_calls")), (16, 0, 16));
    assert!(number(1, "misses") > 1000 && number(1, "raises") > 0 && number(1, "checks") > 0);
    assert!(number(2, "waits") > 0 && number(2, "peak_pinned_bytes") <= 6 << 20);
    for (at, column) in columns.iter().enumerate() {
        assert_eq!(number(at, "gets"), number(at, "front_hits") + number(at, "misses"), "{column}");
    }
    // Each get and release of the second column is a call of 100 us and more.
    assert!(columns[1]["driver_seconds"].as_f64().unwrap() > columns[0]["driver_seconds"].as_f64().unwrap());
    // Played alone, a column is the same.
    let alone = replay(&["--json", "--set", "PRESET=tensorflow"]).figures();
    assert_eq!(alone["peak_pinned_bytes"], columns[0]["peak_pinned_bytes"]);
}

#[test]
fn a_setting_that_a_replay_does_not_follow_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", &batches(2, 2, &[4096]));
    for (set, words) in [
        ("BACKEND=vmm", "PINPOOL_BACKEND has no effect in a replay"),
        ("NONSENSE=1", "PINPOOL_NONSENSE: not a variable"),
        ("MAX_BYTES=auto", "depends on the machine"),
        ("MAX_BYTES=lots", "PINPOOL_MAX_BYTES=lots"),
        ("MAX_BYTES", "is not NAME=VALUE"),
    ] {
        let ran = finish(pinpool(&["replay", "--set", set]).arg(&path));
        assert_eq!(ran.code(), 2, "{set}");
        ran.check_stderr(words);
    }
}

#[test]
fn the_advice_meets_its_target_when_it_is_played_and_less_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", &batches(200, 20, &[1 << 20, 300_000, 70_000, 9_000]));
    let ran = advise(&path, &["--json"]);
    assert_eq!(ran.code(), 0, "{}{}", ran.stdout, ran.stderr);
    let advice = ran.figures();
    let (max_bytes, limit) = (advice["max_bytes"].as_u64().unwrap(), advice["pool_size_limit"].as_u64().unwrap());
    assert_eq!(advice["firsts"], 80, "each buffer of each size misses once");
    let peak = advice["peak_requested_bytes"].as_u64().unwrap();
    assert!(max_bytes >= peak && max_bytes < peak * 5 / 4, "{advice}");
    let play = |max_bytes: u64, limit: u64| {
        let set = format!("MAX_BYTES={max_bytes},POOL_SIZE_LIMIT={limit}");
        finish(pinpool(&["replay", "--json", "--set", &set]).arg(&path)).figures()
    };
    let lost = |played: &Value| {
        let number = |key: &str| played[key].as_u64().unwrap();
        number("misses") + number("waits") + number("fallbacks") - 80
    };
    let allowed = advice["allowed"].as_u64().unwrap();
    assert_eq!(allowed, 16, "a thousandth of 16000 gets");
    let advised = play(max_bytes, limit);
    assert!(lost(&advised) <= allowed, "{advised}");
    assert!(advised["peak_pinned_bytes"].as_u64().unwrap() <= max_bytes);
    assert!(lost(&play(max_bytes * 9 / 10, limit)) > allowed);
    assert!(lost(&play(max_bytes, limit / 2)) > allowed);

    let text = advise(&path, &["--set", "idle_timeout=5min"]).stdout;
    for line in [
        &format!("export PINPOOL_MAX_BYTES={max_bytes}"),
        "export PINPOOL_IDLE_TIMEOUT=5min",
        "export PINPOOL_POOL_SIZE_LIMIT=",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}

#[test]
fn a_target_that_no_setting_meets_is_told_and_fails() {
    let dir = tempfile::tempdir().unwrap();
    // Idle for a minute between any two uses, so each get finds its memory given back; no other settings may be tried.
    let text = "a 1 5000000\nt 10\nf 1\nt 90000000\n".repeat(30);
    let set = "PRESET=adaptive,IDLE_TIMEOUT=60s,RESERVE=0";
    let ran = advise(&written(dir.path(), "w.trace", &text), &["--set", set]);
    assert_eq!(ran.code(), 1, "{}", ran.stdout);
    assert!(
        ran.stdout.contains("TARGET NOT MET") && ran.stdout.contains("export PINPOOL_MAX_BYTES="),
        "{}",
        ran.stdout
    );
}

#[test]
fn a_load_under_the_advice_from_its_recording_holds_no_more_and_misses_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = recorded(dir.path(), "t.gz");
    // So few gets that any miss is over the default target.
    let advice = advise(&path, &["--json", "--miss-target", "10%"]).figures();
    let (max_bytes, limit) = (advice["max_bytes"].to_string(), advice["pool_size_limit"].to_string());
    let args = ["load", "--json", "--synthetic", "300", "--batch-bytes", "1MiB"];
    let ran = finish(pinpool(&args).args(["--set", &format!("MAX_BYTES={max_bytes},POOL_SIZE_LIMIT={limit}")]));
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    let figures = ran.figures();
    let peak = figures["peak_pinned_bytes"].as_u64();
    assert!(peak.is_some_and(|peak| peak <= advice["max_bytes"].as_u64().unwrap()), "{figures}");
}

#[test]
fn another_batch_size_is_answered_where_the_trace_tells_it() {
    let dir = tempfile::tempdir().unwrap();
    let of = |batch: u64, fixed: u64| batches(30, 4, &[batch * 602_112 + fixed, batch * 8]);
    let one = written(dir.path(), "one.trace", &of(32, 0));
    let peak = |ran: &Ran| ran.figures()["peak_requested_bytes"].as_u64().unwrap();
    let ran = advise(&one, &["--json", "--batch-size", "32", "--new-batch-size", "64"]);
    assert_eq!(peak(&ran), 4 * 64 * (602_112 + 8), "{}", ran.stderr);
    assert_eq!(ran.figures()["batch"]["bytes_per_sample"].as_f64(), Some((602_112.0 + 8.0) / 2.0));

    // A part that is fixed is told apart by two traces, and by one alone not.
    let (a, b) = (written(dir.path(), "a.trace", &of(32, 1001)), written(dir.path(), "b.trace", &of(48, 1001)));
    let ran = advise(&a, &["--batch-size", "32", "--new-batch-size", "64"]);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("cannot be split");
    ran.check_stderr("a second trace with another batch size");
    let ran = advise(&a, &[b.to_str().unwrap(), "--json", "--batch-size", "32,48", "--new-batch-size", "64"]);
    assert_eq!(peak(&ran), 4 * (64 * (602_112 + 8) + 1001), "{}", ran.stderr);
    let ran = advise(&a, &[b.to_str().unwrap(), "--batch-size", "32,32", "--new-batch-size", "64"]);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("two different ones are needed");
}
