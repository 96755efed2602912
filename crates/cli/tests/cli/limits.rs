//! Machines that give no threads, and files that ask for more memory or time than they are worth.

use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::tool::{Ran, finish, pinpool, run};

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

#[test]
fn a_count_without_end_is_refused_at_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("endless.trace");
    const REPEATS: &str = "a trace repeats at most 1000000000 times";
    for (text, words) in [
        ("r 18446744073709551615 1\n", REPEATS),
        ("s 2000000000 1 1\n", REPEATS),
        ("r 600000000 1\n", "the trace has more than 16000000 requests and returns"),
    ] {
        fs::write(&path, text).unwrap();
        let ran = run(&["replay", "--json", path.to_str().unwrap()]);
        assert_eq!(ran.code(), 1, "{text}: {}", ran.stderr);
        ran.check_stderr("line 1: `");
        ran.check_stderr(words);
    }
}

#[test]
fn a_long_safetensors_header_is_refused_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let mut file = fs::File::create(&path).unwrap();
    let header_bytes = 99_000_000u64;
    file.write_all(&header_bytes.to_le_bytes()).unwrap();
    file.set_len(8 + header_bytes).unwrap();
    let ran = run(&["load", "--json", path.to_str().unwrap()]);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("broken safetensors: the header claims 99000000 bytes, at most 16777216 are possible");
}
