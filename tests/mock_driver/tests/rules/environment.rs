//! The environment configures the mock driver for a program that does not control it. The program is this binary.

use std::process::{Command, Output};
use std::{env, fs, process};

use cudarc::driver::{CudaContext, result, sys};
use mock_driver::{Code, MockDriver};

use crate::virtual_memory::{self, GRANULE};

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
fn a_delayed_copy_is_still_running_after_its_enqueue() {
    let settings = [("MOCK_DRIVER_COPY_DELAY", "200"), ("MOCK_DRIVER_REPORT", "stderr")];
    let output = program("copies_there", &settings);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = stderr(&output);
    assert!(report.contains("mock driver: 0 frees with work in flight, 0 wrong uses"), "{report}");
    assert!(report.contains("cuMemcpyHtoDAsync_v2 1"), "{report}");
}

#[test]
#[ignore = "a program for the test above"]
fn copies_there() {
    let ctx = CudaContext::new(0).unwrap();
    let stream = ctx.new_stream().unwrap();
    let _on_device = stream.clone_htod(&[7_u8; 1 << 20]).unwrap();
    // SAFETY: a live stream.
    let state = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
    assert_eq!(state, sys::CUresult::CUDA_ERROR_NOT_READY);
    stream.synchronize().unwrap();
}

#[test]
fn a_setting_that_cannot_be_parsed_is_reported_and_cuinit_fails() {
    let output = program("starts_no_driver", &[("MOCK_DRIVER_COPY_DELAY", "fast")]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output).matches("MOCK_DRIVER_COPY_DELAY=fast").count(), 1, "{}", stderr(&output));
}

#[test]
#[ignore = "a program for the test above"]
fn starts_no_driver() {
    for _ in 0..2 {
        assert_eq!(result::init().unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn the_environment_fails_a_call_by_its_number() {
    let settings = [("MOCK_DRIVER_FAIL", "cuMemCreate:2=2,cuMemAddressReserve:1+=801,cuInit:1=999")];
    let output = program("meets_failures", &settings);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
#[ignore = "a program for the test above"]
fn meets_failures() {
    assert_eq!(result::init().unwrap_err().0, sys::CUresult::CUDA_ERROR_UNKNOWN);
    let _context = CudaContext::new(0).unwrap();
    let created = [virtual_memory::create(), virtual_memory::create(), virtual_memory::create()];
    assert_eq!(created.map(|created| created.err()), [None, Some(Code::OUT_OF_MEMORY.0), None]);
    for _ in 0..2 {
        let mut address = 0;
        // SAFETY: space for one address.
        let refused = unsafe { sys::cuMemAddressReserve(&mut address, GRANULE, 0, 0, 0) };
        assert_eq!(refused as i32, Code::NOT_SUPPORTED.0);
    }
}
