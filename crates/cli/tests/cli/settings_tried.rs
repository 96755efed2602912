//! `advise` tries other settings where those as given do not meet the target, and what it advises does when it is played.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::Value;
use tempfile::TempDir;

use crate::tool::{Ran, finish, pinpool};

fn written(dir: &TempDir, text: &str) -> PathBuf {
    let path = dir.path().join("w.trace");
    fs::write(&path, text).unwrap();
    path
}

fn advise(path: &Path, args: &[&str]) -> Ran {
    finish(pinpool(&["advise"]).arg(path).args(args))
}

fn number(figures: &Value, key: &str) -> u64 {
    figures[key].as_u64().unwrap_or_else(|| panic!("no {key} in {figures}"))
}

/// The trace played under the advice holds at most what was advised, and misses at most what the target allows.
fn check(path: &Path, target: &str) {
    let ran = advise(path, &["--json", "--miss-target", target]);
    assert_eq!(ran.code(), 0, "{}{}", ran.stdout, ran.stderr);
    let advice = ran.figures();
    let (bytes, limit) = (number(&advice, "max_bytes"), number(&advice, "pool_size_limit"));
    let more = advice["set"].as_str().unwrap();
    let set = format!("MAX_BYTES={bytes},POOL_SIZE_LIMIT={limit},{more}");
    let played = finish(pinpool(&["replay", "--json", "--set", &set]).arg(path)).figures();
    let lost =
        number(&played, "misses") - number(&advice, "firsts") + number(&played, "waits") + number(&played, "fallbacks");
    assert!(lost <= number(&advice, "allowed"), "{set}: {played}");
    assert!(number(&played, "peak_pinned_bytes") <= bytes, "{set}: {played}");
}

#[test]
fn advice_for_the_shared_workloads_holds_when_it_is_played() {
    let workloads = Path::new(crate::ROOT).join("tests/data/workloads");
    thread::scope(|scope| {
        for name in ["jitter_1", "recsys_a100", "resnet50_w0_cpu"] {
            let path = workloads.join(format!("{name}.trace.gz"));
            scope.spawn(move || check(&path, "0.1%"));
        }
    });
}

#[test]
fn where_sizes_do_not_repeat_the_rules_with_coarse_classes_are_advised() {
    let dir = TempDir::new().unwrap();
    let text: String =
        (0..2_000_u64).map(|n| format!("a {n} {}\nt 1000\nf {n}\n", 600_000 + n * 7_919 % 400_000)).collect();
    let path = written(&dir, &text);
    let ran = advise(&path, &[]);
    assert_eq!(ran.code(), 0, "{}{}", ran.stdout, ran.stderr);
    for line in ["as given", "PRESET=tensorflow,ROUNDING=exact", "RESERVE=", "export PINPOOL_PRESET=tensorflow\n"] {
        assert!(ran.stdout.contains(line), "no {line} in\n{}", ran.stdout);
    }
    check(&path, "0.1%");
    // What the user sets is not tried otherwise.
    let ran = advise(&path, &["--set", "PRESET=adaptive,IDLE_TIMEOUT=1s"]);
    assert_eq!(ran.code(), 1);
    assert!(!ran.stdout.contains("PRESET=tensorflow") && !ran.stdout.contains("IDLE_TIMEOUT=none"), "{}", ran.stdout);
}

#[test]
fn no_ceiling_is_advised_below_the_least_that_any_allocator_could_hold() {
    let dir = TempDir::new().unwrap();
    let text: String =
        (0..20).map(|n| format!("a {n} 700000\nt 10\n")).chain((0..20).map(|n| format!("f {n}\nt 10\n"))).collect();
    let ran = advise(&written(&dir, &text), &["--json", "--miss-target", "100%"]);
    let advice = ran.figures();
    assert!(number(&advice, "max_bytes") >= number(&advice, "peak_requested_bytes"), "{advice}");
}

#[test]
fn settings_that_cannot_be_meant_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let path = written(&dir, "a 1 4096\nf 1\n");
    for (set, words) in [
        ("", "no setting is named"),
        (",", "no setting is named"),
        ("MAX_BYTES=1MiB,PINPOOL_MAX_BYTES=2MiB", "PINPOOL_MAX_BYTES is set twice"),
        ("MAX_BYTES=", "PINPOOL_MAX_BYTES has no value"),
        ("WAIT=soon", "PINPOOL_WAIT=soon: not a time"),
        ("NONSENSE=1", "PINPOOL_NONSENSE: not a variable of pinpool"),
    ] {
        for command in ["load", "replay", "advise", "report"] {
            let ran = finish(pinpool(&[command, "--set", set]).arg(&path));
            assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""), "{command} --set {set}");
            ran.check_stderr(words);
            ran.check_stderr("--set <NAME=VALUE>");
        }
    }
    // Names that the commands share are one setting, however many --set they come in.
    for command in [&["load"][..], &["advise"], &["report", "-o", "page.html"]] {
        let ran = finish(pinpool(command).args(["--set", "WAIT=1s", "--set", "wait=2s"]).arg(&path));
        assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""), "{command:?}");
        ran.check_stderr("--set WAIT=1s,wait=2s: PINPOOL_WAIT is set twice");
    }
}

#[test]
fn an_operation_in_an_error_is_written_as_in_the_trace() {
    let dir = TempDir::new().unwrap();
    for (text, words) in [
        ("a 1 4096\na 1 8192\n", "line 2: `a 1 8192`: buffer 1 is held already"),
        ("a 1 4096 64\na 1 8192 64\n", "line 2: `a 1 8192 64`: "),
        ("f 7\n", "line 1: `f 7`: no buffer 7 is held"),
        ("r 1 4096\ns 9000 18446744073709551615 1\n", "line 2: `s 9000 18446744073709551615 1`: "),
    ] {
        let ran = finish(pinpool(&["replay"]).arg(written(&dir, text)));
        assert_eq!(ran.code(), 1);
        ran.check_stderr(words);
    }
}
