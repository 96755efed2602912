//! An unused GPU is reported once per pool, in a warning with the cause and the remedy.

use log::Level;
use mock_driver::{Code, MockDriver};
use pinpool::{Backend, PinnedBy, Pool, Preset};

use crate::captured_log::{lines_with_levels, listen};
use crate::child::alone;

/// The warnings of a pool under `auto`.
fn warnings() -> Vec<String> {
    listen();
    let pool = Pool::builder().without_env().build().unwrap();
    (1..50).for_each(|len| drop(pool.get(len * 4096).unwrap()));
    lines_with_levels().into_iter().filter(|(level, _)| *level == Level::Warn).map(|(_, line)| line).collect()
}

/// Checks that exactly one warning mentions the GPU, and that it contains all of `parts`.
fn check_warned(parts: &[&str]) {
    let warnings = warnings();
    let of_gpu: Vec<_> = warnings.iter().filter(|line| line.contains("GPU")).collect();
    let [line] = of_gpu.as_slice() else { panic!("one warning of the GPU: {warnings:?}") };
    parts.iter().for_each(|part| assert!(line.contains(part), "no {part} in: {line}"));
}

#[test]
fn a_driver_that_does_not_start_is_logged_with_its_cause() {
    alone(|| {
        let driver = MockDriver::load();
        for (code, parts) in [
            (34, ["stub", "(34)", "LD_LIBRARY_PATH"]),
            (803, ["different versions", "(803)", "reload the nvidia kernel modules"]),
            (999, ["CUDA_ERROR_UNKNOWN", "(999)", "nvidia-smi"]),
        ] {
            driver.reset();
            driver.fail_from("cuInit", 1, Code(code));
            check_warned(&[&["the GPU is not used", "does not start"], &parts[..]].concat());
        }
        driver.reset();
        assert_eq!(warnings(), Vec::<String>::new(), "with the driver there is nothing to warn of");
    });
}

#[test]
fn a_missing_device_is_logged_as_a_warning() {
    alone(|| {
        let driver = MockDriver::load();
        driver.set_device_count(0);
        check_warned(&["the GPU is not used", "CUDA_ERROR_NO_DEVICE", "nvidia-smi"]);
        driver.reset();
        listen();
        Pool::builder().without_env().device(3).build().unwrap().stats();
        let lines = lines_with_levels();
        let parts = ["no GPU 3", "lists 1 device", "PINPOOL_DEVICE"];
        let warned = |level: Level, line: &str| level == Level::Warn && parts.iter().all(|part| line.contains(part));
        assert_eq!(lines.iter().filter(|(level, line)| warned(*level, line)).count(), 1, "{lines:?}");
    });
}

#[test]
fn the_backend_gpu_uses_the_best_gpu_backend_or_fails() {
    alone(|| {
        let driver = MockDriver::load();
        assert!(pinpool::check_cuda_device(0).is_ok());
        assert!(pinpool::check_cuda_device(1).is_err_and(|error| error.is_unavailable()));
        let builder = || Pool::builder().without_env().backend(Backend::Gpu);
        let pool = builder().build().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.backend, stats.pinned_by), ("vmm", Some(PinnedBy::Driver)));
        assert!(pool.get(4096).unwrap().pinned_by() == Some(PinnedBy::Driver));
        assert_eq!(builder().preset(Preset::TensorFlow).build().unwrap().stats().backend, "cuda");
        driver.fail_from("cuMemCreate", 1, Code::NOT_SUPPORTED);
        assert_eq!(builder().build().unwrap().stats().backend, "register");
        driver.fail_from("cuMemHostRegister_v2", 1, Code(801));
        driver.fail_from("cuMemHostAlloc", 1, Code(304));
        let error = builder().build().unwrap_err();
        assert!(error.is_backend(), "{error}");
        for part in ["`gpu`", "vmm:", "register:", "cuda:", "code 801", "code 304"] {
            assert!(error.to_string().contains(part), "no {part} in: {error}");
        }
        let auto = Pool::builder().without_env().build().unwrap();
        assert!(!["vmm", "register", "cuda"].contains(&auto.stats().backend), "{}", auto.stats().backend);
        driver.fail_from("cuInit", 1, Code(999));
        let error = builder().build().unwrap_err();
        assert!(error.to_string().contains("does not start") && error.to_string().contains("(999)"), "{error}");
    });
}
