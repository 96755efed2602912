//! A requested recording that is missing or incomplete is a failure.

use tempfile::TempDir;

use crate::tool::{finish, heap, pinpool, scratch};

const LOAD: [&str; 5] = ["load", "--synthetic", "20", "--batch-bytes", "1MiB"];

#[test]
fn a_full_disk_fails_a_recorded_load() {
    let dir = TempDir::new().unwrap();
    for args in [&["--record", "/dev/full"][..], &["--set", "TRACE=/dev/full"], &["--quiet", "--record", "/dev/full"]] {
        let ran = finish(pinpool(&LOAD).args(args)).exits(1);
        ran.check_stderr("trace_incomplete: path=/dev/full");
        ran.check_stderr("the requested recording is missing or incomplete");
    }
    finish(pinpool(&LOAD).arg("--record").arg(dir.path().join("t.gz"))).exits(0);
}

#[test]
fn a_file_that_another_process_writes_fails_the_load() {
    let (_dir, path) = scratch("t.gz");
    let _pool = heap().trace(path.clone()).build().unwrap();
    finish(pinpool(&LOAD).arg("--record").arg(&path)).exits(1).check_stderr("another process writes it");
}

#[test]
fn an_unwritable_file_is_reported_with_its_flag() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().to_str().unwrap();
    let ran = finish(pinpool(&LOAD).args(["--record", folder])).exits(2);
    ran.check_stderr(&format!("pinpool: --record {folder}: cannot be written"));
    assert!(!ran.stderr.contains("pinpool: PINPOOL_TRACE"), "{}", ran.stderr);
    finish(pinpool(&LOAD).args(["--set", &format!("TRACE={folder}")])).exits(2).check_stderr("PINPOOL_TRACE");
}
