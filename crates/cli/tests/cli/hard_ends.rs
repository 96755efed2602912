//! A system that refuses threads, and signals while the terminal is in raw mode.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::{ptr, thread};

use crate::tool::{ended, finish, pinpool, scratch, signal, until};

/// Both ends of a terminal.
#[allow(unsafe_code)]
fn terminal() -> (File, File) {
    let (mut outer, mut inner) = (0, 0);
    // SAFETY: the call writes both numbers. Null pointers are allowed for the name and the settings.
    let made = unsafe { libc::openpty(&mut outer, &mut inner, ptr::null_mut(), ptr::null_mut(), ptr::null_mut()) };
    assert_eq!(made, 0);
    // SAFETY: the call has opened both, and nothing else owns them.
    let outer = unsafe { File::from_raw_fd(outer) };
    // SAFETY: as above.
    (outer, unsafe { File::from_raw_fd(inner) })
}

/// The modes of a terminal as `stty` prints them.
fn modes(terminal: &File) -> Vec<u8> {
    Command::new("stty").arg("-g").stdin(terminal.try_clone().unwrap()).output().unwrap().stdout
}

/// `top` in a terminal, and the connection from which it reads.
fn top(inner: &File, stderr: Stdio) -> (Child, UnixStream) {
    let (_dir, path) = scratch("s");
    let listener = UnixListener::bind(&path).unwrap();
    let end = || Stdio::from(inner.try_clone().unwrap());
    let mut command = pinpool(&["top"]);
    command.arg(&path).env("TERM", "xterm").stdin(end()).stdout(end()).stderr(stderr);
    let top = command.spawn().unwrap();
    let (mut reader, _) = listener.accept().unwrap();
    reader.write_all(b"{\"process\":1,\"pools\":[]}\n").unwrap();
    (top, reader)
}

#[test]
fn a_signal_ends_top_and_restores_the_terminal() {
    let (mut outer, inner) = terminal();
    let before = modes(&inner);
    let (top, _reader) = top(&inner, inner.try_clone().unwrap().into());
    let drawn = thread::spawn(move || {
        let (mut drawn, mut bytes) = (Vec::new(), [0; 4096]);
        // The read fails once the other end is closed.
        while let Ok(count @ 1..) = outer.read(&mut bytes) {
            drawn.extend_from_slice(&bytes[..count]);
        }
        String::from_utf8_lossy(&drawn).into_owned()
    });
    until("the terminal is taken over", || modes(&inner) != before);
    // `top` installs its signal handler before it changes the terminal.
    signal("TERM", &top);
    let status = ended("the signal ends it", top);
    let after = modes(&inner);
    drop(inner);
    let drawn = drawn.join().unwrap();
    assert_eq!(status.code(), Some(130), "{drawn:?}");
    assert!(drawn.contains("\x1b[?1049h") && drawn.contains("\x1b[?1049l"), "{drawn:?}");
    assert_eq!(after, before);
}

#[test]
fn a_terminal_that_goes_away_ends_top() {
    let (outer, inner) = terminal();
    let before = modes(&inner);
    let (top, _reader) = top(&inner, Stdio::null());
    until("the terminal is taken over", || modes(&inner) != before);
    // This sends no signal, because the terminal is not the controlling terminal of the process.
    drop((inner, outer));
    assert_eq!(ended("it ends with its terminal", top).code(), Some(1));
}

/// A stack size that no machine can provide, so that every `std` thread is refused.
const NO_STACK: &str = "70368744177664";

#[test]
fn a_load_that_gets_no_threads_ends_with_an_error() {
    let dir = crate::tool::tree();
    let ran = finish(pinpool(&["load", "--json"]).arg(dir.path()).env("RUST_MIN_STACK", NO_STACK)).exits(1);
    assert!(!ran.stderr.contains(" quarantined: "), "{}", ran.stderr);
    ran.check_stderr("cannot start a thread to read with: ");
    ran.check_stderr("ulimit -u");
}
