//! `advise` tries other settings than the given ones, and a replay of its advice costs no more.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::advise::{advised, check};
use crate::tool::{Ran, finish, pinpool, written};

fn advise(path: &Path, args: &[&str]) -> Ran {
    finish(pinpool(&["advise"]).arg(path).args(args))
}

fn number(printed: &Value, key: &str) -> u64 {
    printed[key].as_u64().unwrap_or_else(|| panic!("no {key} in {printed}"))
}

#[test]
fn a_reserve_is_advised_if_a_program_pins_the_same_memory_again_after_each_pause() {
    let dir = TempDir::new().unwrap();
    let burst = |n: u64| {
        let gets = (0..8).map(|id| format!("a {id} {}\n", (24 << 20) + n % 3));
        gets.chain((0..8).map(|id| format!("t 100000\nf {id}\n")))
            .chain(["t 120000000\n".to_owned()])
            .collect::<String>()
    };
    let path = written(dir.path(), "w.trace", (0..20).map(burst).collect::<String>());
    let advice = check(&path);
    assert!(number(&advice["as_given"], "page_locks") > 5 * number(&advice["advised"], "page_locks"), "{advice}");
    let tried: Vec<_> = advice["tried"].as_array().unwrap().iter().map(|one| one["set"].as_str().unwrap()).collect();
    assert!(tried.len() == 2 && tried[0] == "IDLE_TIMEOUT=none" && tried[1].starts_with("RESERVE="), "{advice}");
    assert!(advised(&advice).unwrap().contains("PINPOOL_MAX_BYTES="), "{advice}");
    // A setting of the user is fixed.
    let ran = advise(&path, &["--json", "--set", "IDLE_TIMEOUT=1s,RESERVE=none"]).figures();
    assert_eq!(ran["tried"].as_array().unwrap().len(), 0, "{ran}");
}

#[test]
fn settings_that_cannot_be_meant_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let path = written(dir.path(), "w.trace", "a 1 4096\nf 1\n");
    for (set, words) in [
        ("", "no setting is named"),
        (",", "no setting is named"),
        ("MAX_BYTES=1MiB,PINPOOL_MAX_BYTES=2MiB", "PINPOOL_MAX_BYTES is set twice"),
        ("MAX_BYTES=", "PINPOOL_MAX_BYTES has no value"),
        ("WAIT=soon", "PINPOOL_WAIT=soon: not a time"),
        ("NONSENSE=1", "PINPOOL_NONSENSE: unknown setting"),
    ] {
        for command in ["load", "replay", "advise"] {
            let ran = finish(pinpool(&[command, "--set", set]).arg(&path));
            assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""), "{command} --set {set}");
            ran.check_stderr(words);
            ran.check_stderr("--set <NAME=VALUE>");
        }
    }
    // Names that the commands share are one setting, however many --set they come in.
    for command in [&["load"][..], &["advise"]] {
        let ran = finish(pinpool(command).args(["--set", "WAIT=1s", "--set", "wait=2s"]).arg(&path));
        assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""), "{command:?}");
        ran.check_stderr("--set WAIT=1s,wait=2s: PINPOOL_WAIT is set twice");
    }
}
