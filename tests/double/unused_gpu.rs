//! A GPU that is here and not used is a warning with its cause and its remedy, once for a pool.

use driver_double::{Code, Double};
use log::Level;
use pinpool::Pool;

use crate::captured_log::{lines_with_levels, listen};
use crate::child::alone;

/// The warnings of a pool under `auto`.
fn warnings() -> Vec<String> {
    listen();
    let pool = Pool::builder().without_env().build().unwrap();
    (1..50).for_each(|len| drop(pool.get(len * 4096).unwrap()));
    let lines = lines_with_levels().into_iter();
    lines.filter(|(level, _)| *level == Level::Warn).map(|(_, line)| line).collect()
}

/// One warning holds all of `parts`.
fn check_warned(parts: &[&str]) {
    let warnings = warnings();
    let of_gpu: Vec<_> = warnings.iter().filter(|line| line.contains("GPU")).collect();
    let [line] = of_gpu.as_slice() else { panic!("one warning of the GPU: {warnings:?}") };
    parts.iter().for_each(|part| assert!(line.contains(part), "no {part} in: {line}"));
}

#[test]
fn a_driver_that_does_not_start_is_warned_of_with_its_cause() {
    alone(|| {
        let double = Double::load();
        for (code, parts) in [
            (34, ["stub", "(34)", "LD_LIBRARY_PATH"]),
            (803, ["different versions", "(803)", "restart the machine"]),
            (999, ["CUDA_ERROR_UNKNOWN", "(999)", "nvidia-smi"]),
        ] {
            double.reset();
            double.fail_from("cuInit", 1, Code(code));
            check_warned(&[&["the GPU is not used", "does not start"], &parts[..]].concat());
        }
        double.reset();
        assert_eq!(warnings(), Vec::<String>::new(), "with the driver there is nothing to warn of");
    });
}

#[test]
fn a_driver_without_a_device_and_a_device_that_is_not_there_are_warned_of() {
    alone(|| {
        let double = Double::load();
        double.set_device_count(0);
        check_warned(&["the GPU is not used", "CUDA_ERROR_NO_DEVICE", "nvidia-smi"]);
        double.reset();
        listen();
        drop(Pool::builder().without_env().device(3).build().unwrap());
        let lines = lines_with_levels();
        let warned = |(level, line): &(Level, String)| {
            *level == Level::Warn
                && line.contains("no GPU 3")
                && line.contains("lists 1 device")
                && line.contains("PINPOOL_DEVICE")
        };
        assert_eq!(lines.iter().filter(|line| warned(line)).count(), 1, "{lines:?}");
    });
}
