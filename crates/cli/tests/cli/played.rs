//! Several pools in replays, and replays that run out of memory.

use std::fmt::Write as _;

use crate::tool::{heap, number, on, recorded_pools, written};

#[test]
fn several_pools_are_advised_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut text = "# pools 2\n".to_owned();
    for round in 0..50 {
        let _ = write!(text, "p 0\na {round}0 300000\np 1\na {round}1 300000\nt 1000\nf {round}1\np 0\nf {round}0\n");
    }
    let path = written(dir.path(), "two.trace", &text);
    // Pools without names cannot be selected.
    on("advise", &path, &[]).refuses(1).check_stderr("two.trace: it has 2 pools, and advice is for one");
    on("replay", &path, &[]).check_stderr("two.trace: it has 2 pools, which are played as one");

    let path = dir.path().join("t.gz");
    let quiet = heap().name("quiet").trace(path.clone()).build().unwrap();
    (0..100).for_each(|_| drop(quiet.get(1 << 20).unwrap()));
    crate::why::throttled(&path);
    drop(quiet);
    let advice = |args: &[&str]| on("advise", &path, args);
    let worst = advice(&["--json"]);
    worst.check_stderr("it has 2 pools; the advice is for train, the worst (--pool names another)");
    assert_eq!(number(&worst.figures(), "requests"), 120, "{}", worst.stdout);
    let quiet = advice(&["--json", "--pool", "quiet"]).figures();
    assert_eq!(number(&quiet, "requests"), 100);
    let lost = |of: &serde_json::Value| of["recorded_lost_seconds"].as_f64();
    assert!(lost(&quiet) < lost(&worst.figures()), "{quiet}");
    advice(&["--pool", "none"]).check_stderr("no such pool with 20 requests; it has train, quiet");
}

#[test]
fn the_only_pool_with_enough_requests_is_advised() {
    let dir = tempfile::tempdir().unwrap();
    let path = recorded_pools(dir.path(), "t.gz", &[("big", 100), ("small", 5)]);
    let ran = on("advise", &path, &["--json"]).exits(0);
    ran.check_stderr("it has 2 pools; the advice is for big, the worst");
    assert_eq!(number(&ran.figures(), "requests"), 100);
    on("advise", &path, &["--pool", "small"]).refuses(1).check_stderr("no such pool with 20 requests; it has big\n");
    let tried = on("advise", &path, &["--try", "WAIT=1s"]).stdout;
    assert!(tried.contains(": pins scaled to the mean of 2 calls of one size in the trace, "), "{tried}");
}

#[test]
fn pools_with_one_name_are_told_apart_in_a_recording() {
    let dir = tempfile::tempdir().unwrap();
    let path = recorded_pools(dir.path(), "t.gz", &[("x", 100), ("x", 50)]);
    let changes = on("why", &path, &["--json", path.to_str().unwrap()]).figures();
    for (at, (pool, requests)) in [("x", 100), ("x (pool 1)", 50)].into_iter().enumerate() {
        assert_eq!(number(&on("advise", &path, &["--json", "--pool", pool]).figures(), "requests"), requests);
        let change = &changes["pools"][at];
        assert_eq!((&change["pool"], &change["before"]["requests"]), (&pool.into(), &requests.into()), "{changes}");
        assert!(on("why", &path, &["--json"]).stdout.contains(&format!("\"pool\":\"{pool}\"")), "{pool}");
    }
}

#[test]
fn a_replay_that_runs_out_of_memory_has_the_same_error_on_every_machine() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", "a 1 31457280\na 2 31457280\na 3 304294967295000\n");
    let ran = on("replay", &path, &[]).exits(1);
    ran.check_stderr("w.trace: cannot allocate 276.8TiB");
    assert!(!ran.stderr.contains("system:") && !ran.stderr.contains(" bytes are free"), "{}", ran.stderr);
}
