//! A program that does not know of the double, configured by the environment: this binary, run again.

use std::process::{Command, Output};
use std::{env, fs, process};

use cudarc::driver::{CudaContext, result, sys};
use driver_double::{Code, Double};

use crate::virtual_memory::{self, GRANULE, ON_DEVICE, ON_NUMA_NODE};

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
    assert!(report.contains("cuMemcpyHtoDAsync_v2 2"), "{report}");
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
    // What a program sends to see whether the device copies.
    let word = stream.clone_htod(&[0x70_u8; 8]).unwrap();
    assert_eq!(stream.clone_dtoh(&word).unwrap(), [0x70; 8]);
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

#[test]
fn the_first_touch_after_each_mapping_faults_pages_in_where_costs_are_measured() {
    let output = program("touches_a_granule_twice_at_each_of_two_places", &HOLLOW);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// Page faults of this thread while it writes to every page.
fn faults_of_a_touch(start: u64) -> i64 {
    let faults = || {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: space for the answer.
        assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) }, 0);
        // SAFETY: all zeros before, and written by the call.
        unsafe { usage.assume_init() }.ru_minflt
    };
    let bytes = virtual_memory::bytes(start, GRANULE);
    let before = faults();
    bytes.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    faults() - before
}

#[test]
#[ignore = "a program for the test above"]
fn touches_a_granule_twice_at_each_of_two_places() {
    let _context = CudaContext::new(0).unwrap();
    let base = virtual_memory::reserve(2 * GRANULE);
    let handle = virtual_memory::create().unwrap();
    for at in [base, base + GRANULE as u64] {
        assert_eq!(virtual_memory::map(at, handle), 0);
        assert_eq!(virtual_memory::allow(at, GRANULE, &[ON_DEVICE, ON_NUMA_NODE]), 0);
        let [first, again] = [faults_of_a_touch(at), faults_of_a_touch(at)];
        // A page or two of the test's own may be among them; a huge page takes one fault for 512.
        assert!(first > again && again < 8, "{first} at first, {again} after that");
        assert_eq!(virtual_memory::unmap(at, GRANULE), 0);
    }
}

#[test]
fn the_environment_fails_a_call_by_its_number() {
    let settings = [("DRIVER_DOUBLE_FAIL", "cuMemCreate:2=2,cuMemAddressReserve:1+=801,cuInit:1=999")];
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
