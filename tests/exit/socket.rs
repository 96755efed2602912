//! A process that ends while a socket serves its statistics: the socket's file is removed.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use pinpool::Pool;

use super::{CASE, ended, heap};

/// Names the socket of a case that another case runs.
const SOCKET: &str = "TEST_EXIT_SOCKET";

pub(super) fn exit_removes_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stats.sock");
    let mut command = Command::new(env::current_exe().unwrap());
    assert_eq!(ended(command.env(CASE, "serve_and_exit").env(SOCKET, &path).spawn().unwrap()), Some(7));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

pub(super) fn serve_and_exit() {
    static POOL: OnceLock<Pool> = OnceLock::new();
    let path = PathBuf::from(env::var_os(SOCKET).unwrap());
    POOL.get_or_init(|| heap().setting("socket", path.display()).build().unwrap());
    // A pool that never ends.
    std::mem::forget(heap().setting("socket", path.display()).build().unwrap());
    assert!(path.exists());
    std::process::exit(7);
}
