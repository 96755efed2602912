//! `tests/gpu/run.sh`, which tests a machine with a GPU, in a short form with the mock driver.
#![allow(clippy::print_stderr)] // Says why it is skipped.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::load::mock_driver;
use crate::tool::{finish, program};

/// The newest GPU suite binary next to this one; `None` if it was not built.
fn suite() -> Option<PathBuf> {
    let here = env::current_exe().unwrap();
    let is_suite = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("gpu-") && !name.contains('.')
    };
    let files = fs::read_dir(here.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    files.filter(is_suite).max_by_key(|path| fs::metadata(path).and_then(|data| data.modified()).unwrap())
}

/// Fills `folder` as `collect.sh` does, with the mock driver. Returns `None` if a binary was not built.
fn carried(folder: &Path) -> Option<PathBuf> {
    symlink(suite()?, folder.join("gpu")).unwrap();
    let tool = Path::new(env!("CARGO_BIN_EXE_pinpool"));
    symlink(tool, folder.join("pinpool")).unwrap();
    let bench = Some(tool.with_file_name("pinpool-bench")).filter(|bench| bench.exists())?;
    symlink(bench, folder.join("pinpool-bench")).unwrap();
    let lib = folder.join("lib");
    fs::create_dir(&lib).unwrap();
    Some(mock_driver(&lib))
}

const SHORT: [(&str, &str); 7] = [
    ("PINPOOL_GPU_STEPS", "facts suite copy stall pin load peers"),
    ("PINPOOL_GPU_SUITE", "a_kernel_reads capture"),
    ("PINPOOL_GPU_SECONDS", "0.02"),
    ("PINPOOL_GPU_PIN", "4MiB"),
    ("PINPOOL_GPU_SIZES", "64KiB"),
    ("PINPOOL_GPU_FILES", "10"),
    ("PINPOOL_GPU_TREE", concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gpu")),
];

#[test]
fn the_device_run_prints_json_lines_on_the_mock_driver() {
    let folder = tempfile::tempdir().unwrap();
    let Some(lib) = carried(folder.path()) else {
        eprintln!("skipped: the GPU suite or the bench is not built (cargo test --workspace builds them)");
        return;
    };
    let script = format!("{}/tests/gpu/run.sh", crate::ROOT);
    let mut command = program("bash", &[&script, folder.path().to_str().unwrap()]);
    let ran = finish(command.env_remove("PINPOOL_BACKEND").env("LD_LIBRARY_PATH", lib).envs(SHORT)).exits(0);
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}"));
    let lines: Vec<Value> = ran.stdout.lines().map(line).collect();
    let all = || &ran.stdout;
    let of = |key: &str| lines.iter().filter(|line| line.get(key).is_some()).collect::<Vec<_>>();
    assert!(of("fact").len() >= 13 && of("fact").iter().all(|line| line["outcome"] == "holds"), "{}", all());
    for name in ["facts", "suite_vmm", "suite_register", "suite_cuda", "stall", "load_tree_cuda", "all"] {
        let step = of("step").into_iter().find(|line| line["step"] == name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(step["outcome"], "ok", "{}", all());
    }
    for name in ["copy", "stall", "pin", "load_synthetic_register"] {
        let figure = of("figure").into_iter().find(|line| line["figure"] == name);
        assert!(figure.is_some_and(|line| line["result"].is_object()), "no {name}:\n{}", all());
    }
}
