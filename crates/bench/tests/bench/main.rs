//! `pinpool-bench` as a program.

mod conformance;
mod ends;
mod figures;
mod soak;

use std::path::{Path, PathBuf};
use std::process::Command;

use test_common::tool::{Ran, finish, program};

fn bench(args: &[&str]) -> Command {
    program(env!("CARGO_BIN_EXE_pinpool-bench"), args)
}

fn run(args: &[&str]) -> Ran {
    finish(&mut bench(args))
}

/// A folder with the mock driver as libcuda.
fn mock_driver(dir: &Path) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    std::os::unix::fs::symlink(here.parent().unwrap().join("libmock_driver.so"), dir.join("libcuda.so")).unwrap();
    dir.to_owned()
}
