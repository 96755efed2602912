//! A program that does not know of the double, configured by the environment: this binary, run again.

use std::process::{Command, Output};
use std::{env, fs, process};

use cudarc::driver::{CudaContext, result, sys};
use driver_double::Double;

/// Runs one of the ignored tests below as that program.
fn program(name: &str, settings: &[(&str, &str)]) -> Output {
    let test = format!("environment::{name}");
    let folder = env::temp_dir().join(format!("driver-double-{name}-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(Double::library(), folder.join("libcuda.so")).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", &test, "--ignored", "--nocapture", "--test-threads=1"]);
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
fn hollow_copies_run_and_are_refused_back_to_the_host() {
    let output = program("copies_there_and_not_back", &HOLLOW);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = stderr(&output);
    assert!(report.contains("driver double: 0 frees with work in flight, 0 wrong uses"), "{report}");
    assert!(report.contains("cuMemcpyHtoDAsync_v2 1"), "{report}");
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
    assert!(program("loads_the_double", &HOLLOW[1..]).status.success(), "measured costs are allowed");
}

#[test]
#[ignore = "a program for the test above"]
fn loads_the_double() {
    drop(Double::load());
}

#[test]
fn a_setting_that_cannot_be_parsed_is_reported_and_cuinit_fails() {
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
