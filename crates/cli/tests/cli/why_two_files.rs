//! `why A B`: two recordings.

use std::path::PathBuf;
use std::time::Duration;

use crate::tool::{heap, on, recorded_pools};

/// Records requests. If `is_slow`, each request makes a pin call.
fn recorded(path: PathBuf, is_slow: bool) -> PathBuf {
    let builder = heap().name("train").trace(path.clone()).wait(Duration::ZERO);
    let builder =
        if is_slow { builder.setting("preset", "tensorflow").pool_size_limit(0).auto_resize(false) } else { builder };
    let pool = builder.build().unwrap();
    (0..40).for_each(|_| drop(pool.get(8 << 20).unwrap().wait_slice_mut().map(|bytes| bytes[0] = 1)));
    drop(pool);
    path
}

#[test]
fn the_slower_pool_is_shown_with_the_changed_setting() {
    let dir = tempfile::tempdir().unwrap();
    let (fast, slow) = (recorded(dir.path().join("a.gz"), false), recorded(dir.path().join("b.gz"), true));
    let diff = |after: &PathBuf, args: &[&str]| on("diff", &fast, &[&[after.to_str().unwrap()], args].concat());
    let figures = diff(&slow, &["--json"]).figures();
    let pool = &figures["pools"][0];
    assert_eq!((&pool["pool"], &pool["before"]["requests"]), (&"train".into(), &40.into()), "{figures}");
    assert!(pool["after"]["pinning_seconds"].as_f64() > pool["before"]["pinning_seconds"].as_f64(), "{figures}");
    let text = diff(&slow, &[]).stdout;
    assert!(text.contains("\ntrain\n") && text.contains("PINPOOL_PRESET"), "{text}");
    let same = diff(&fast, &[]);
    assert!(same.code() == 0 && same.stdout.starts_with("no change: "), "{}", same.stdout);
    // An unknown share of lost time does not count as 0.
    let few = recorded_pools(dir.path(), "few.gz", &[("train", 1)]);
    for pair in [[&fast, &few], [&few, &fast], [&few, &few]] {
        on("why", pair[0], &[pair[1].to_str().unwrap()]).refuses(1).check_stderr("too few requests to compare: ");
    }
}

#[test]
fn a_file_that_is_not_a_recording_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let fast = recorded(dir.path().join("a.gz"), false);
    let other = dir.path().join("w.trace");
    std::fs::write(&other, "a 1 4096\nf 1\n").unwrap();
    on("diff", &fast, &[other.to_str().unwrap()]).exits(1).check_stderr("w.trace: not a recording");
}
