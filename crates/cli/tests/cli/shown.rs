//! What is shown of a pool: by `top` of what a socket sends, by `soak` at its end, by `report` under other settings.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::thread;

use tempfile::TempDir;

use crate::tool::{Ran, finish, pinpool, run};

/// `top --json` of a socket that sends `bytes` and closes.
fn top_of(bytes: Vec<u8>) -> Ran {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let sender = thread::spawn(move || {
        let (mut reader, _) = listener.accept().unwrap();
        // The tool may have gone.
        let _ = reader.write_all(&bytes);
    });
    let ran = finish(pinpool(&["top", "--json"]).arg(&path));
    sender.join().unwrap();
    ran
}

#[test]
fn what_is_no_statistics_is_refused_and_not_printed() {
    for (bytes, words) in [
        (b"SSH-2.0-OpenSSH_9.6\r\n".to_vec(), "no statistics of pinpool: "),
        (b"{\"process\":1}\n".to_vec(), "no list of pools"),
        (b"{\"process\":1,\"pools\":[".to_vec(), "no statistics of pinpool: "),
        (b"\xff\xfe\n".to_vec(), "not UTF-8"),
        (Vec::new(), "ended before it sent anything"),
        (vec![b'x'; 17 << 20], "no statistics of pinpool: "),
    ] {
        let ran = top_of(bytes);
        assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""), "{words}");
        ran.check_stderr(words);
        ran.check_stderr("/s: ");
    }
    let line = "{\"process\":1,\"pools\":[]}\n";
    assert_eq!(top_of(line.as_bytes().to_vec()).stdout, line);
}

#[test]
fn a_path_that_no_socket_can_have_is_told_with_the_limit() {
    let long = format!("/tmp/{}", "x".repeat(120));
    let ran = run(&["top", "--json", &long]);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("the path has 125 bytes, and that of a socket at most 107");
    let ran = finish(pinpool(&["load", "--synthetic", "1"]).env("PINPOOL_SOCKET", long));
    ran.check_stderr("the path is too long by 18 bytes: that of a socket has at most 107");
}

#[test]
fn a_trace_is_drawn_under_the_settings_that_are_asked_for() {
    let dir = TempDir::new().unwrap();
    let (trace, log, page) = (dir.path().join("w"), dir.path().join("log"), dir.path().join("page.html"));
    fs::write(&trace, "a 1 4000000\na 2 4000000\nt 1000\nf 1\nf 2\nt 1000\n".repeat(50)).unwrap();
    fs::write(&log, "Raising pool_size_limit_ from 100 to 110\n").unwrap();
    let draw = |input, set| finish(pinpool(&["report", "--set", set, "-o"]).arg(&page).arg(input));
    let ran = draw(&trace, "MAX_BYTES=6MiB,PRESET=tensorflow");
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    let text = fs::read_to_string(&page).unwrap();
    assert!(text.contains("replayed under MAX_BYTES=6MiB, PRESET=tensorflow"), "{text}");
    assert!(!text.contains("without a ceiling"));
    for (input, set, code, words) in [
        (&trace, "NONSENSE=1", 2, "PINPOOL_NONSENSE: unknown setting"),
        (&trace, "MAX_BYTES=1,MAX_BYTES=2", 2, "set twice"),
        (&log, "MAX_BYTES=1MiB", 1, "a log cannot be played"),
    ] {
        let ran = draw(input, set);
        assert_eq!(ran.code(), code);
        ran.check_stderr(words);
    }
}
