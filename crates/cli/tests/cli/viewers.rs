//! Converted traces in a check of the requirements of PyTorch's memory_viz.
#![allow(clippy::print_stdout)] // Says what was skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::record::recorded_load;
use crate::recordings::read_recording;
use crate::tool::{finish, pinpool};

/// Runs a Python script; `None` without Python.
fn python(script: &str, input: &Path) -> Option<String> {
    let Ok(ran) = Command::new("python3").arg(Path::new(crate::ROOT).join(script)).arg(input).output() else {
        println!("skipped: there is no python3");
        return None;
    };
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {out}{err}", input.display());
    println!("{}: {out}", input.display());
    Some(out.into_owned())
}

fn converted(trace: &Path) -> PathBuf {
    let out = trace.with_extension("pickle");
    let ran = finish(pinpool(&["trace", "--format", "pytorch", "-o"]).arg(&out).arg(trace));
    assert!(ran.code() == 0 || ran.stderr.contains("truncated"), "{}", ran.stderr);
    out
}

/// Creates recordings of the backends `mlock` and `heap`, and truncated recordings with buffers in use.
fn traces(dir: &Path) -> Vec<PathBuf> {
    let record =
        |name: &str, set: &str| recorded_load(dir, name, &["--synthetic", "60", "--batch-files", "4", "--set", set]);
    let mut paths = vec![
        record("mlock.trace", "POOL_SIZE_LIMIT=2,BACKEND=mlock"),
        record("heap.trace", "POOL_SIZE_LIMIT=2,BACKEND=heap"),
    ];
    let whole = fs::read(&paths[0]).unwrap();
    // In truncated recordings, buffers are in use or in flight at the end.
    for part in 1..8 {
        let cut = dir.join(format!("cut{part}.trace"));
        fs::write(&cut, &whole[..whole.len() * part / 8]).unwrap();
        if read_recording(&cut).unwrap().records.len() > 1 {
            paths.push(cut);
        }
    }
    paths
}

#[test]
fn a_snapshot_can_be_played_backwards_as_memory_viz_does() {
    let dir = tempfile::tempdir().unwrap();
    let mut entries = 0;
    for path in traces(dir.path()) {
        let Some(said) = python("tests/data/torch_snapshot/check.py", &converted(&path)) else { return };
        entries += said.lines().find_map(|line| line.strip_prefix("entries ")).unwrap().parse::<u64>().unwrap();
    }
    assert!(entries > 100, "{entries}");
}
