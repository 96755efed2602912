//! A program that knows nothing of the double, steered by the environment: this very binary, run again.

use std::process::{Command, Output};
use std::{env, fs, process};

use cudarc::driver::{CudaContext, result, sys};
use driver_double::Double;

/// Runs one of the ignored tests below as that program.
fn program(name: &str, settings: &[(&str, &str)]) -> Output {
    let folder = env::temp_dir().join(format!("driver-double-{name}-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(Double::library(), folder.join("libcuda.so")).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    let output = command.env("LD_LIBRARY_PATH", &folder).envs(settings.iter().copied()).output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const HOLLOW: [(&str, &str); 4] = [
    ("DRIVER_DOUBLE_COPY", "hollow"),
    ("DRIVER_DOUBLE_COPY_RATE", "100GB"),
    ("DRIVER_DOUBLE_COSTS", "measured"),
    ("DRIVER_DOUBLE_REPORT", "stderr"),
];

#[test]
fn hollow_copies_take_place_and_bring_nothing_back() {
    let output = program("copies_there_and_not_back", &HOLLOW);
    assert!(output.status.success(), "{}", stderr(&output));
    let told = stderr(&output);
    assert!(told.contains("driver double: 0 frees with work in flight, 0 wrong uses"), "{told}");
    assert!(told.contains("cuMemcpyHtoDAsync_v2 1"), "{told}");
}

#[test]
#[ignore = "a program for the test above"]
fn copies_there_and_not_back() {
    let ctx = CudaContext::new(0).unwrap();
    let stream = ctx.new_stream().unwrap();
    let on_device = stream.clone_htod(&[7_u8; 1 << 20]).unwrap();
    stream.synchronize().unwrap();
    let refused = stream.clone_dtoh(&on_device).unwrap_err();
    assert_eq!(refused.0, sys::CUresult::CUDA_ERROR_NOT_SUPPORTED);
}

#[test]
fn a_test_is_refused_where_copies_are_hollow() {
    let output = program("loads_the_double", &HOLLOW);
    assert!(!output.status.success());
    assert!(stderr(&output).contains("DRIVER_DOUBLE_COPY=hollow"), "{}", stderr(&output));
    assert!(program("loads_the_double", &HOLLOW[1..]).status.success(), "slow is no reason");
}

#[test]
#[ignore = "a program for the test above"]
fn loads_the_double() {
    drop(Double::load());
}

#[test]
fn what_is_not_understood_is_told_and_no_driver_starts() {
    let output = program("starts_no_driver", &[("DRIVER_DOUBLE_COPY_RATE", "fast")]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output).matches("DRIVER_DOUBLE_COPY_RATE=fast").count(), 1, "{}", stderr(&output));
}

#[test]
#[ignore = "a program for the test above"]
fn starts_no_driver() {
    for _ in 0..2 {
        assert_eq!(result::init().unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}
