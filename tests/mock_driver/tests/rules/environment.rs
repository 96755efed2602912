//! The environment configures the mock driver for a program that does not control it. The program is this binary.

use std::process::{Command, Output};
use std::{env, fs, process};

use cudarc::driver::{result, sys};
use mock_driver::MockDriver;

/// Runs one of the ignored tests below as that program.
fn program(name: &str, settings: &[(&str, &str)]) -> Output {
    let test = format!("environment::{name}");
    let folder = env::temp_dir().join(format!("mock-driver-{name}-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(MockDriver::library(), folder.join("libcuda.so")).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", &test, "--ignored", "--nocapture", "--test-threads=1"]);
    let output = command.env("LD_LIBRARY_PATH", &folder).envs(settings.iter().copied()).output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn an_invalid_setting_is_reported_and_fails_cuinit() {
    let output = program("starts_no_driver", &[("MOCK_DRIVER_COPY_DELAY", "fast")]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output).matches("MOCK_DRIVER_COPY_DELAY=fast").count(), 1, "{}", stderr(&output));
}

#[test]
#[ignore = "a program that initializes the driver under an invalid setting"]
fn starts_no_driver() {
    (0..2).for_each(|_| assert_eq!(result::init().unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE));
}
