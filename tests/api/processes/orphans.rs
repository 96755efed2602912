//! A forked child that outlives its killed parent keeps neither the parent's sockets open nor its files locked.
#![allow(unsafe_code)] // Forks and kills.

use std::io::{BufRead, BufReader, Read, Write, pipe};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use crate::child::{Child, alone};
use crate::fixture::heap;
use crate::recordings::read_recording;
use crate::scratch::scratch;

/// Starts a process that calls `made`, forks, and is killed. The forked child lives while `test` runs.
fn with_an_orphan<T>(made: impl FnOnce() -> T, test: impl FnOnce()) {
    let (mut until_closed, open) = pipe().unwrap();
    // This process keeps its end of the pipe open until the test is over.
    let mut open = Some(open);
    let (mut begun, mut begins) = pipe().unwrap();
    let mut parent = Child::new(|| {
        let _made = made();
        drop(open.take());
        // SAFETY: the child waits and exits without running its parent's code.
        if unsafe { libc::fork() } == 0 {
            begins.write_all(b"b").unwrap();
            // Waits until the test closes the other end of the pipe.
            let _ = until_closed.read(&mut [0]);
            // SAFETY: ends only the child.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: kills this process, as another process would.
        unsafe { libc::raise(libc::SIGKILL) };
    });
    assert!(libc::WIFSIGNALED(parent.wait()));
    // Descriptors that a child does not keep are closed before `fork` returns in the child.
    begun.read_exact(&mut [0]).unwrap();
    test();
}

#[test]
fn an_orphan_does_not_keep_the_recording_locked() {
    alone(|| {
        let (_dir, path) = scratch("t.trace");
        let record = |name: &str| {
            let pool = heap().maintenance_thread(false).trace(path.clone()).name(name).build().unwrap();
            drop(pool.get(4096).unwrap());
            pool
        };
        with_an_orphan(
            || record("first"),
            || {
                drop(record("second"));
                assert_eq!(read_recording(&path).unwrap().pools[0].fact("name"), Some("second"));
            },
        );
    });
}

#[test]
fn an_orphan_does_not_keep_the_socket_open() {
    alone(|| {
        let (_dir, path) = scratch("stats.sock");
        let served = || {
            let pool = heap().setting("socket", path.display()).build().unwrap();
            first_line(&path);
            pool
        };
        with_an_orphan(served, || {
            let _pool = served();
            let object: serde_json::Value = serde_json::from_str(&first_line(&path)).unwrap();
            assert_eq!(object["process"], std::process::id());
        });
    });
}

fn first_line(socket: &Path) -> String {
    let mut line = String::new();
    BufReader::new(UnixStream::connect(socket).unwrap()).read_line(&mut line).unwrap();
    line
}

#[test]
fn a_childs_end_leaves_the_sockets_of_its_parent() {
    alone(|| {
        let (_dir, path) = scratch("stats.sock");
        let mut pool = Some(heap().setting("socket", path.display()).build().unwrap());
        let mut child = Child::new(|| {
            drop(pool.take());
            // Its own pool has a separate socket.
            let own = path.with_extension("child");
            let pool = heap().socket(pinpool::StatsSocket::from(own.clone())).build().unwrap();
            assert!(first_line(&own).contains("\"pools\":[{"));
            drop(pool);
            assert!(!own.exists());
            // SAFETY: runs the exit handlers, which must work although the other threads are gone.
            unsafe { libc::exit(0) };
        });
        assert_eq!(child.wait(), 0);
        assert!(first_line(&path).contains("\"pools\":[{"));
    });
}

#[test]
fn forks_while_pools_are_built_and_end_hang_in_no_lock() {
    alone(|| {
        let (dir, path) = scratch("stats.sock");
        let build = || drop(heap().setting("socket", path.display()).build().unwrap());
        thread::scope(|scope| {
            let building = scope.spawn(|| (0..200).for_each(|_| build()));
            while !building.is_finished() {
                let own = dir.path().join("child.sock");
                let mut child = Child::new(|| drop(heap().setting("socket", own.display()).build().unwrap()));
                assert_eq!(child.wait(), 0);
            }
        });
    });
}
