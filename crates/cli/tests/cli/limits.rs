//! Machines that give no threads, and files that ask for more memory or time than they are worth.

use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::tool::{Ran, finish, pinpool};

/// A stack that no machine has: every thread of `std` is refused.
const NO_STACK: &str = "70368744177664";

fn without_threads(args: &[&str]) -> Ran {
    finish(pinpool(args).env("RUST_MIN_STACK", NO_STACK))
}

#[test]
fn a_load_that_gets_no_threads_ends_with_an_error() {
    let dir = crate::tool::tree();
    let ran = without_threads(&["load", "--json", dir.path().to_str().unwrap()]);
    assert_eq!(ran.code(), 1, "{}", ran.stderr);
    assert!(!ran.stderr.contains(" quarantined: "), "{}", ran.stderr);
    ran.check_stderr("no thread to read with: ");
    ran.check_stderr("ulimit -u");
}

#[test]
fn a_compressed_trace_takes_no_more_than_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb.trace.gz");
    let mut gzip = GzEncoder::new(fs::File::create(&path).unwrap(), Compression::fast());
    let line = "##\n".repeat(100_000);
    for _ in 0..50 {
        gzip.write_all(line.as_bytes()).unwrap();
    }
    gzip.finish().unwrap();
    assert!(fs::metadata(&path).unwrap().len() < 100_000);
    let ran = finish(pinpool(&["replay", "--json"]).arg(&path));
    assert_eq!(ran.code(), 1, "{}", ran.stderr);
    ran.check_stderr("line 4000001: `##");
    ran.check_stderr("a trace has at most 4000000 lines");
}
