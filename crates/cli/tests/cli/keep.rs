//! `pinpool keep`.
#![allow(unsafe_code)] // Signals a process.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use crate::tool::{finish, pinpool, until};

/// Killed when it is dropped.
struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_keeper_ends_at_a_signal_and_leaves_nothing() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let dir = tempfile::tempdir().unwrap();
        let keep = |args: &[&str]| {
            let mut command = pinpool(args);
            command.env("XDG_RUNTIME_DIR", dir.path());
            command
        };
        let started = keep(&["keep", "weights", "--bytes", "1MiB"]).stderr(Stdio::null()).spawn().unwrap();
        let mut keeper = Keeper(started);
        let socket = dir.path().join("pinpool-keep-weights.sock");
        until("there is a socket", || socket.exists());
        let ran = finish(&mut keep(&["keep", "weights", "--bytes", "1MiB"]));
        assert_eq!(ran.code(), 1);
        ran.check_stderr("kept by another process already");
        assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        // SAFETY: a child of this test that was not waited for.
        unsafe { libc::kill(i32::try_from(keeper.0.id()).unwrap(), signal) };
        assert!(keeper.0.wait().unwrap().success());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_keeper_without_descriptors_waits_and_keeps_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = pinpool(&["keep", "w", "--bytes", "1MiB"]);
    let started = command.env("XDG_RUNTIME_DIR", dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    let mut keeper = Keeper(started);
    let mut told = BufReader::new(keeper.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(told.next().unwrap().contains("keeps 1MiB"));
    let id = i32::try_from(keeper.0.id()).unwrap();
    let limit_files = |soft| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: reads the limit of a child that was not waited for.
        assert_eq!(unsafe { libc::prlimit(id, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) }, 0);
        let limit = libc::rlimit { rlim_cur: soft, ..limit };
        // SAFETY: sets the limit of that child.
        assert_eq!(unsafe { libc::prlimit(id, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) }, 0);
    };
    limit_files(4);
    let mut asking = UnixStream::connect(dir.path().join("pinpool-keep-w.sock")).unwrap();
    asking.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let line = told.next().unwrap();
    assert!(line.contains("no process can attach at") && line.contains("os error 24"), "{line}");
    // Several tries.
    thread::sleep(Duration::from_millis(350));
    limit_files(64);
    let mut mark = [0];
    asking.read_exact(&mut mark).unwrap();
    // SAFETY: a child of this test that was not waited for.
    unsafe { libc::kill(id, libc::SIGTERM) };
    assert!(keeper.0.wait().unwrap().success());
    assert_eq!(told.filter(|line| line.contains("no process can attach")).count(), 0, "told once");
}

#[test]
fn what_cannot_be_kept_is_refused() {
    for (args, words) in [
        (&["a/b", "--bytes", "1MiB"][..], "is no name"),
        (&["a", "--bytes", "0"], "1 B and more"),
        (&["a", "--bytes", "64TiB", "--hugetlb", "only"], "nr_hugepages"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut command = pinpool(&[&["keep"], args].concat());
        command.env("XDG_RUNTIME_DIR", dir.path());
        let ran = finish(&mut command);
        assert_eq!(ran.code(), 1, "{args:?}");
        ran.check_stderr(words);
    }
}
