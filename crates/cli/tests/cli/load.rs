//! `pinpool load`: requirements, notes about files, and grouped failures.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::{finish, number, on, pinpool, run, tree};

fn lines(text: &str, words: &str) -> usize {
    text.lines().filter(|line| line.contains(words)).count()
}

/// The mock driver as `libcuda.so.1` in `dir`.
pub(crate) fn mock_driver(dir: &Path) -> PathBuf {
    // A dev-dependency, which Cargo builds next to the test.
    let built = std::env::current_exe().unwrap().parent().unwrap().join("libmock_driver.so");
    ["libcuda.so", "libcuda.so.1"].into_iter().for_each(|name| symlink(&built, dir.join(name)).unwrap());
    dir.to_path_buf()
}

#[test]
fn without_a_gpu_a_load_warns_and_with_require_gpu_fails() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let dir = tree();
    let ran = finish(pinpool(&["load", "--json"]).arg(dir.path())).exits(0);
    let warned = ran.stderr.lines().any(|line| line.contains(": W ") && line.contains("no GPU to copy to"));
    assert!(warned, "{}", ran.stderr);
    let ran = finish(pinpool(&["load", "--json", "--require-gpu"]).arg(dir.path())).refuses(3);
    ran.check_stderr("--require-gpu: no GPU to copy to: ");
}

#[test]
fn require_gpu_is_met_only_by_memory_that_is_pinned_for_the_gpu() {
    let (dir, lib) = (tree(), tempfile::tempdir().unwrap());
    let lib = mock_driver(lib.path());
    let load = |backend: &str, args: &[&str]| {
        let mut command = pinpool(&["load", "--json", "--set", &format!("BACKEND={backend}")]);
        finish(command.args(args).arg(dir.path()).env("LD_LIBRARY_PATH", &lib))
    };
    for backend in ["vmm", "register", "cuda"] {
        let ran = load(backend, &["--require-gpu"]);
        assert_eq!(ran.code(), 0, "{backend}: {}", ran.stderr);
        let printed = ran.figures();
        assert!(printed["destination"].as_str().unwrap().starts_with("CUDA device"), "{printed}");
    }
    let ran = load("heap", &["--require-gpu"]).exits(3);
    ran.check_stderr("--require-gpu: the backend heap does not pin memory for the GPU");
    let ran = load("heap", &[]).exits(0);
    assert_eq!(lines(&ran.stderr, ": W "), 1, "{}", ran.stderr);
    ran.check_stderr("the backend heap does not pin memory for the GPU");
    let mut command = pinpool(&["load", "--json", "--require-gpu", "--set", "BACKEND=cuda,WAIT=0,ON_FULL=pageable"]);
    command.arg(dir.path()).env("LD_LIBRARY_PATH", &lib).env("MOCK_DRIVER_FAIL", "cuMemHostAlloc:1+=2");
    finish(&mut command).exits(3).check_stderr("--require-gpu: batches in pageable memory (PINPOOL_ON_FULL): 1");
}

#[test]
fn repeated_failures_are_grouped_by_cause() {
    let dir = tree();
    for number in 0..500 {
        symlink("nowhere", dir.path().join(format!("gone{number:03}"))).unwrap();
    }
    let ran = finish(pinpool(&["load", "--json"]).arg(dir.path())).exits(1);
    assert_eq!(lines(&ran.stderr, "No such file or directory"), 11, "ten and their sum: {}", ran.stderr);
    ran.check_stderr("500 failed: No such file or directory (os error 2)\n");
    let printed = ran.figures();
    assert_eq!(printed["failed_files"], 500);
    assert_eq!(printed["failures_by_cause"]["No such file or directory (os error 2)"], 500);
    let ran = finish(pinpool(&["load", "--json", "-v"]).arg(dir.path()));
    assert_eq!(lines(&ran.stderr, "No such file or directory"), 500);
}

#[test]
fn a_batch_beyond_the_limit_is_named_with_its_remedy() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("large"), vec![1; 3 << 20]).unwrap();
    let ran = finish(pinpool(&["load", "--json", "--set", "BACKEND=heap,MAX_BYTES=1MiB"]).arg(dir.path())).exits(1);
    ran.check_stderr("large: cannot allocate 3.0MiB: exceeds the pool limit of 1.0MiB (PINPOOL_MAX_BYTES)");
    ran.check_stderr("pinpool: lower --batch-bytes, or give the pool more memory\n");
    assert_eq!(ran.figures()["failures_by_cause"]["no room for the batch within the limit"], 1);
}

#[test]
fn files_that_are_skipped_or_loaded_as_plain_bytes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.tar.gz", "b.zip", "c.parquet", "d.parquet", "e.tar", "f.jpg", "G.ZIP"] {
        fs::write(dir.path().join(name), b"x").unwrap();
    }
    let _socket = UnixListener::bind(dir.path().join("socket")).unwrap();
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let ran = finish(pinpool(&["load", "--json"]).arg(dir.path())).exits(0);
    let at = |name: &str| dir.path().join(name).display().to_string();
    ran.check_stderr(&format!("skipped 2 special files (pipes, sockets or devices): {}, {}", at("fifo"), at("socket")));
    let plain =
        format!("2 archive files loaded as plain bytes ({}, {}): --archives loads", at("a.tar.gz"), at("e.tar"));
    ran.check_stderr(&plain);
    assert_eq!(["skipped_special_files", "files"].map(|name| number(&ran.figures(), name)), [2, 7]);
    fs::remove_file(fifo).unwrap();
    let ran = on("load", dir.path(), &["--archives"]).exits(1);
    ran.check_stderr("skipped 1 special file (pipes, sockets or devices): ");
    assert!(ran.stdout.contains("most batches in flight  1\n"), "{}", ran.stdout);
}

#[test]
fn quiet_prints_errors_only_and_verbose_every_batch() {
    let dir = tree();
    fs::write(dir.path().join("a.tar"), b"x").unwrap();
    let ran = finish(pinpool(&["load", "--json", "-q"]).arg(dir.path()));
    assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""));
    let ran = finish(pinpool(&["-q", "load", "--json", "/nowhere"]).arg(dir.path()));
    assert_eq!(ran.stderr, "pinpool: /nowhere: No such file or directory (os error 2)\n");
    let ran = finish(pinpool(&["load", "--json", "-v", "--batch-files", "100"]).arg(dir.path()));
    assert_eq!(lines(&ran.stderr, "pinpool: batch "), 3, "{}", ran.stderr);
    ran.check_stderr("] 1 archive file loaded as plain bytes (");
    assert_eq!(run(&["load", "-q", "-v"]).code(), 2);
}

#[test]
fn an_empty_filter_of_the_log_hides_no_warning() {
    let dir = tree();
    let ran =
        finish(pinpool(&["load", "--json"]).arg(dir.path()).env("PINPOOL_PURPLE", "1").env("RUST_LOG", "")).exits(0);
    ran.check_stderr("PINPOOL_PURPLE=1");
}
