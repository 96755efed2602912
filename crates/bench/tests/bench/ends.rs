//! Benchmarks on a system that refuses threads.

use crate::bench;
use test_common::tool::finish;

/// A stack larger than any address space: every thread of `std` is refused.
const NO_STACK: &str = "70368744177664";

#[test]
fn a_benchmark_without_threads_ends_with_an_error() {
    for args in [&["hit", "--threads", "2"][..], &["stall", "--step", "8MiB", "--backend", "heap"]] {
        let ran = finish(bench(args).env("RUST_MIN_STACK", NO_STACK));
        assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""), "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains("ulimit -u") || ran.stderr.contains("thread"), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn a_benchmark_with_too_few_threads_reports_their_number() {
    let mut command = std::process::Command::new("sh");
    let tool = bench(&[]);
    // Each thread has a stack of 64 MiB, so a few fit.
    command.args(["-c", r#"ulimit -v 1000000; exec "$0" hit --threads 64"#]).arg(tool.get_program());
    let ran = finish(command.env("RUST_MIN_STACK", "67108864")).refuses(1);
    ran.check_stderr(" of 64 threads (");
    ran.check_stderr("ulimit -u");
}
