//! `pinpool top` without a terminal. The module of the screen tests what it draws.

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::tool::{ended, finish, pinpool, scratch, signal, until};

/// Returns the error of `top --json` if `serve` handles its connection.
fn top_of(serve: impl FnOnce(UnixStream) + Send) -> String {
    let (_dir, path) = scratch("s");
    let listener = UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| serve(listener.accept().unwrap().0));
        let ran = finish(pinpool(&["top", "--json"]).arg(&path)).refuses(1);
        ran.check_stderr(path.to_str().unwrap());
        ran.stderr
    })
}

#[test]
fn a_server_that_never_ends_its_line_ends_top() {
    // Each byte arrives in time, but not the end of the text.
    let said = top_of(|mut socket| {
        while socket.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(200));
        }
    });
    assert!(said.contains("has sent no whole line for 5 s"), "{said}");
    // The process sends spaces for as long as the connection takes them.
    let spaces = vec![b' '; 1 << 20];
    let said = top_of(|mut socket| while socket.write_all(&spaces).is_ok() {});
    assert!(said.contains("a line has more than 16777216 bytes") || said.contains("no whole line"), "{said}");
}

#[test]
#[allow(unsafe_code)] // Makes a queue of connections short.
fn a_server_that_accepts_nothing_ends_top() {
    let (_dir, path) = scratch("s");
    let listener = UnixListener::bind(&path).unwrap();
    // SAFETY: the descriptor is open.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    // This connection fills the queue, so the connection of `top` waits.
    let _waiting = UnixStream::connect(&path).unwrap();
    finish(pinpool(&["top", "--json"]).arg(&path)).exits(1).check_stderr("has sent no whole line for 5 s");
}

/// The names in a directory.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn no_socket_stays_behind_when_a_command_ends() {
    let dir = tempfile::tempdir().unwrap();
    let command = |args: &[&str]| {
        let mut command = pinpool(args);
        command.env("XDG_RUNTIME_DIR", dir.path()).env("PINPOOL_SOCKET", "1");
        command
    };
    for args in [
        &["load", "--synthetic", "20", "--quiet"][..],
        &["load", "--synthetic", "20", "--quiet", "--record", "/nonexistent/t.gz"],
    ] {
        finish(&mut command(args));
        assert_eq!(names(dir.path()), [""; 0], "{args:?}");
    }
    // A command that is ended by Ctrl-C removes its socket too.
    let load =
        command(&["load", "--synthetic", "4", "--idle", "600", "--quiet"]).stdout(Stdio::null()).spawn().unwrap();
    until("the socket is there", || names(dir.path()) == [format!("pinpool-{}.sock", load.id())]);
    signal("INT", &load);
    assert_eq!(ended("a load that was interrupted", load).code(), Some(130));
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn commands_that_only_look_open_no_socket_and_no_recording() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("w.trace"), "a 1 4096\nf 1\n").unwrap();
    let recording = crate::record::recorded(dir.path(), "t.trace");
    let before = fs::read(&recording).unwrap();
    let files = names(dir.path());
    let workload = at("w.trace");
    let commands = ["env", "doctor", "ledger", "completions bash", "load --synthetic 1"].map(str::to_owned);
    let of_files = ["inspect", "trace", "replay", "advise"].map(|command| format!("{command} {}", workload.display()));
    for command in commands.iter().chain(&of_files) {
        for trace in [&recording, &at("new.trace")] {
            let mut command = pinpool(&command.split(' ').collect::<Vec<_>>());
            command.env("PINPOOL_TRACE", trace).env("PINPOOL_SOCKET", at("s.sock"));
            let ran = finish(&mut command);
            assert_eq!(names(dir.path()), files, "{command:?}: {}", ran.stderr);
            assert_eq!(fs::read(&recording).unwrap(), before, "{command:?}");
        }
    }
}

#[test]
fn a_socket_path_that_is_too_long_is_refused_with_the_limit() {
    let long = format!("/tmp/{}", "x".repeat(120));
    let ran = finish(&mut pinpool(&["top", "--json", &long])).exits(1);
    ran.check_stderr("the path has 125 bytes; a socket path has at most 107");
    finish(pinpool(&["load", "--synthetic", "1"]).env("PINPOOL_SOCKET", long))
        .check_stderr("the path is too long by 18 bytes");
}
