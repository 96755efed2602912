//! Traces and logs from pipes: each input is read once, and `-` is stdin.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use crate::record::recorded;
use crate::tf_lines::{AFTER, RAISE};
use crate::tool::{Ran, ended, finish, number, on, packed, pinpool, scratch, written};

const WORKLOAD: &str = "# limit 100\na 1 5000\nt 10\nf 1\na 2 5000\nf 2\n";

/// Runs the command with `bytes` on stdin, through a pipe.
fn piped(command: &mut Command, bytes: Vec<u8>) -> Ran {
    let (reader, mut writer) = io::pipe().unwrap();
    let writing = thread::spawn(move || {
        // Fails if the command refuses its input and ends before all bytes are written.
        let _ = writer.write_all(&bytes);
    });
    let ran = finish(command.stdin(Stdio::from(reader)));
    // Drops the command, which holds the read end of the pipe, so that a blocked write fails.
    *command = Command::new("true");
    writing.join().unwrap();
    ran
}

/// Creates a file of each kind of trace, plain and compressed.
fn traces(dir: &Path) -> Vec<PathBuf> {
    let recording = fs::read(recorded(dir, "t.trace")).unwrap();
    let mut paths = Vec::new();
    for (name, bytes) in [("recording", recording), ("workload", WORKLOAD.into())] {
        paths.extend([written(dir, name, &bytes), written(dir, &format!("{name}.gz"), packed(&bytes))]);
    }
    paths
}

#[test]
fn every_kind_of_trace_is_read_from_a_pipe_as_from_a_file() {
    let (dir, page) = scratch("page.html");
    for path in traces(dir.path()) {
        let bytes = fs::read(&path).unwrap();
        let gets = number(&on("replay", &path, &["--json"]).figures(), "gets");
        assert!(gets > 0, "{}", path.display());
        for name in ["-", "/dev/stdin"] {
            let case = format!("{} as {name}", path.display());
            let ran = piped(&mut pinpool(&["replay", "--json", name]), bytes.clone());
            assert_eq!((ran.code(), number(&ran.figures(), "gets")), (0, gets), "{case}: {}", ran.stderr);
            let ran = piped(pinpool(&["report", name, "-o"]).arg(&page), bytes.clone());
            assert_eq!(ran.code(), i32::from(path.to_string_lossy().contains("workload")), "{case}: {}", ran.stderr);
        }
    }
    for name in ["-", "/dev/stdin"] {
        let advised = piped(&mut pinpool(&["advise", "--json", name]), WORKLOAD.into());
        assert_eq!((advised.code(), advised.stderr.as_str()), (0, ""));
        let ran = piped(&mut pinpool(&["advise", "--try", "WAIT=1s", name]), WORKLOAD.into());
        assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""));
    }
}

#[test]
fn a_log_is_read_from_a_pipe_as_from_a_file() {
    let (_dir, page) = scratch("page.html");
    let log = format!("{AFTER}\n{RAISE}\n").into_bytes();
    for bytes in [packed(&log), log] {
        for name in ["-", "/dev/stdin"] {
            let ran = piped(&mut pinpool(&["inspect", "--json", name]), bytes.clone());
            assert_eq!((ran.code(), ran.stdout.lines().count()), (0, 3), "{}", ran.stderr);
            let ran = piped(pinpool(&["report", name, "-o"]).arg(&page), bytes.clone());
            assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""), "{name}");
            assert!(fs::read_to_string(&page).unwrap().contains("id=\"report\""), "{name}");
        }
    }
}

#[test]
fn a_named_pipe_is_opened_once() {
    let (dir, pipe) = scratch("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let page = dir.path().join("page.html");
    let page = page.to_str().unwrap();
    for (args, bytes) in [
        (["replay", "--source", "virtual"], packed(WORKLOAD.as_bytes())),
        (["replay", "--source", "separate"], WORKLOAD.into()),
        (["report", "-o", page], AFTER.into()),
    ] {
        let mut command = pinpool(&args);
        let child = command.arg(&pipe).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let to = pipe.clone();
        // Opening the pipe waits for its reader, which may never open it.
        thread::spawn(move || fs::write(to, bytes));
        assert_eq!(ended("the pipe is read to its end", child).code(), Some(0), "{args:?}");
    }
}
