//! `pinpool load` to a CUDA device of the mock driver: every byte is copied there, back and compared.

use std::fs;
use std::path::Path;

use crate::load::mock_driver;
use crate::tool::{Ran, finish, number, pinpool};

/// `load --verify` to the mock device, which reports misuses at the end.
fn load(lib: &Path, backend: &str, args: &[&str]) -> Ran {
    let mut command = pinpool(&["load", "--json", "--verify", "--require-gpu", "--set", &format!("BACKEND={backend}")]);
    command.args(args).env("LD_LIBRARY_PATH", lib).env("MOCK_DRIVER_REPORT", "stderr");
    finish(&mut command)
}

fn check(ran: &Ran, backend: &str, files: u64) {
    assert_eq!(ran.code(), 0, "{backend}: {}", ran.stderr);
    let printed = ran.figures();
    assert_eq!((&printed["backend"], &printed["pinned_by"]), (&backend.into(), &"driver".into()));
    assert!(printed["destination"].as_str().unwrap().starts_with("CUDA device"), "{printed}");
    assert_eq!((number(&printed, "files"), number(&printed, "samples")), (files, files));
    assert!(printed["failed_files"] == 0 && printed["stats"]["requests"]["pageable"] == 0, "{printed}");
    assert_eq!(printed["verified_batches"], printed["batches"]);
    assert_eq!(printed["ended"], "complete");
    ran.check_stderr(" 0 misuses");
}

#[test]
fn an_epoch_of_a_thousand_files_arrives_from_each_backend() {
    let (files, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for number in 0..1000_usize {
        let bytes: Vec<u8> = (0..=255).cycle().skip(number).take(number * 7).collect();
        fs::write(files.path().join(format!("{number:04}")), bytes).unwrap();
    }
    let lib = mock_driver(dir.path());
    for backend in ["vmm", "register", "cuda"] {
        let path = files.path().to_str().unwrap();
        check(&load(&lib, backend, &["--batch-files", "32", "--shuffle", "1", path]), backend, 1000);
    }
}

#[test]
fn a_call_that_fails_once_costs_no_file_or_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let lib = mock_driver(dir.path());
    for (backend, call) in [("vmm", "cuMemCreate:5=2"), ("register", "cuMemHostRegister_v2:2=2")] {
        let mut command =
            pinpool(&["load", "--json", "--verify", "--set", &format!("BACKEND={backend}"), "--synthetic", "30"]);
        command.env("LD_LIBRARY_PATH", &lib).env("MOCK_DRIVER_FAIL", call);
        let ran = finish(&mut command);
        let printed = ran.figures();
        let arrived = number(&printed, "files") - number(&printed, "failed_files");
        assert_eq!(ran.code(), i32::from(arrived < 30), "{backend}: {}", ran.stderr);
        assert!(arrived > 0 && printed["verified_batches"] == printed["batches"], "{printed}");
    }
}
