//! What the pool holds, printed by the tool at SIGUSR1.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::tool::pinpool;

#[allow(unsafe_code)] // Sends a signal.
fn send(process: u32, signal: libc::c_int) {
    // SAFETY: takes numbers alone; the process is a child that was not waited for.
    assert_eq!(unsafe { libc::kill(process.cast_signed(), signal) }, 0);
}

#[test]
fn a_running_load_prints_at_sigusr1_what_its_pool_holds() {
    let args = ["-v", "load", "--synthetic", "1", "--idle", "600"];
    let mut command = pinpool(&args);
    command.env("PINPOOL_DUMP", "1").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut wait_for = |part: &str| lines.by_ref().find(|line| line.contains(part)).unwrap();
    // A signal before that would end the load itself.
    wait_for("idle for 600 s");
    for _ in 0..2 {
        send(child.id(), libc::SIGUSR1);
        assert_eq!(wait_for("memory of the pool"), "pinpool: memory of the pool");
        wait_for("Current usage from device: host, allocator: heap (adaptive)");
        wait_for("system: ");
    }
    send(child.id(), libc::SIGINT);
    wait_for("ended: ");
    assert_eq!(child.wait().unwrap().code(), Some(0), "the signal ended the wait alone");
}
