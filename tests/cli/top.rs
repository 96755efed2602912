//! `pinpool load --top` and `pinpool top` where there is no terminal. What it draws is tested beside its screen.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use serde_json::Value;

use crate::tool::{finish, pinpool, run, tree, until};

#[test]
fn without_a_terminal_nothing_is_loaded_and_the_reason_is_said() {
    let dir = tree();
    let ran = run(&["load", "--top", dir.path().to_str().unwrap()]);
    assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""));
    ran.check_stderr("--top: stdout is no terminal");
}

#[test]
fn a_process_that_was_asked_to_serves_its_statistics() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("stats.sock");
    let mut load = pinpool(&["load", "--synthetic", "4", "--idle", "60"])
        .env("PINPOOL_SOCKET", &socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut figures = Value::Null;
    until("the load has got a buffer", || {
        let ran = finish(pinpool(&["top", "--json"]).arg(&socket));
        if ran.code() == 0 {
            figures = ran.figures();
        }
        figures["pools"][0]["gets"].as_u64() > Some(0)
    });
    assert_eq!(figures["process"], load.id());
    assert_eq!(figures["pools"][0]["backend"], "heap");
    let mode = fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others cannot read it");
    // Without a terminal there is nothing to draw on.
    let ran = finish(pinpool(&["top"]).arg(&socket));
    assert_eq!(ran.code(), 1);
    ran.check_stderr("stdout is no terminal");
    load.kill().unwrap();
    load.wait().unwrap();
    let ran = finish(pinpool(&["top", "--json"]).arg(&socket));
    assert_eq!(ran.code(), 1);
    ran.check_stderr("start it with PINPOOL_SOCKET=1");
}
