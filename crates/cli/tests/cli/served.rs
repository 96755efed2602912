//! `top` and `metrics` of running processes.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use pinpool::Pool;

use crate::doctor::under_limit;
use crate::tool::{finish, heap, on, pinpool, run, scratch, until};

/// A pool of this process with a buffer in use, served at the socket that `PINPOOL_SOCKET=1` would create in `dir`.
fn served(dir: &Path) -> (Pool, pinpool::PinnedBuf) {
    let socket = dir.join(format!("pinpool-{}.sock", std::process::id()));
    let pool = heap().name("train").socket(pinpool::StatsSocket::from(socket)).build().unwrap();
    let held = pool.tagged("loader/labels").get(1 << 20).unwrap();
    (0..30).for_each(|_| drop(pool.get(4096).unwrap()));
    (pool, held)
}

fn on_host(dir: &Path, args: &[&str]) -> Command {
    let mut command = pinpool(args);
    command.env("XDG_RUNTIME_DIR", dir);
    command
}

#[test]
fn other_processes_read_the_same_reports_as_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, _held) = served(dir.path());
    let process = std::process::id().to_string();
    // `stats` and `dump` are former names.
    for args in [&["top", "--once"][..], &["stats"], &["dump"]] {
        let once = finish(&mut on_host(dir.path(), &[args, &[process.as_str()]].concat())).exits(0);
        let words = ["train: warming_up", "train: healthy"];
        assert!(words.iter().any(|words| once.stdout.starts_with(words)), "{}", once.stdout);
        assert!(once.stdout.contains(&pool.stats().to_string()), "{}", once.stdout);
        assert!(once.stdout.contains("  1.0MiB loader/labels (1 buffer, the oldest "), "{}", once.stdout);
    }
    let json = finish(&mut on_host(dir.path(), &["top", "--json", &process]));
    assert_eq!(json.figures()["pools"][0]["name"], "train", "{}", json.stdout);
    let all = finish(&mut on_host(dir.path(), &["top", "--all", "--json"]));
    assert_eq!(all.figures()["processes"][0]["pools"][0]["name"], "train", "{}", all.stdout);
}

#[test]
fn the_metrics_of_all_processes_are_a_text_that_promtool_takes() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, _held) = served(dir.path());
    let ran = finish(&mut on_host(dir.path(), &["metrics", "--all"])).exits(0);
    let labels = format!("{{pid=\"{}\",pool_name=\"train\",backend=\"heap\"", std::process::id());
    let hits = format!("pinpool_requests_hits_total{labels}}} {}\n", pool.stats().requests.hits);
    assert!(ran.stdout.contains(&hits), "{}", ran.stdout);
    let holder = format!("pinpool_holder_buffers{labels},tag=\"loader/labels\"}} 1\n");
    assert!(ran.stdout.contains(&holder), "{}", ran.stdout);
    let checked =
        Command::new("promtool").args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    // Without promtool, only the tests of pinpool-metrics check the text.
    let Ok(mut checked) = checked else { return };
    checked.stdin.take().unwrap().write_all(ran.stdout.as_bytes()).unwrap();
    let checked = checked.wait_with_output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn the_metrics_are_served_until_the_command_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let (_pool, _held) = served(dir.path());
    let mut command = on_host(dir.path(), &["metrics", "--all", "--listen", "127.0.0.1:0"]);
    let mut server = under_limit(command.stdout(Stdio::piped()), libc::RLIMIT_NOFILE, 24).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        write!(stream, "{request} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // A silent client does not delay other clients, but many silent clients delay them until they disconnect.
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(&address).unwrap()).collect();
    until("all descriptors are used", || Path::new(&format!("/proc/{}/fd/23", server.id())).exists());
    let _silent = silent.into_iter().next();
    until("it serves again", || ask("GET /metrics").contains("\npinpool_memory_held_bytes{pid="));
    let got = ask("GET /metrics");
    assert!(got.starts_with("HTTP/1.1 200 OK") && got.contains("\npinpool_memory_held_bytes{pid="), "{got}");
    let head = ask("HEAD /metrics");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(ask("GET /").starts_with("HTTP/1.1 404"));
    assert!(ask("POST /metrics").starts_with("HTTP/1.1 405"));
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn top_of_all_processes_is_one_table() {
    let dir = tempfile::tempdir().unwrap();
    let ran = finish(&mut on_host(dir.path(), &["top", "--all"]));
    assert!(ran.code() == 0 && ran.stdout.contains("no process serves a pool"), "{}", ran.stdout);
    let (_pool, _held) = served(dir.path());
    // The socket of a process that was killed.
    fs::write(dir.path().join("pinpool-4194305.sock"), "").unwrap();
    let ran = finish(&mut on_host(dir.path(), &["top", "--all"])).exits(0);
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("pid ") && lines[1].starts_with(&std::process::id().to_string()), "{}", ran.stdout);
    assert!(lines[1].contains("train") && lines[1].contains("loader/labels"), "{}", ran.stdout);
}

#[test]
fn the_report_of_a_process_shows_its_holders_and_its_diagnosis() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, _held) = served(dir.path());
    let process = std::process::id().to_string();
    let output = dir.path().join("p.html");
    let mut command = on_host(dir.path(), &["report", &process, "--seconds", "2", "-o"]);
    finish(command.arg(&output)).exits(0);
    let page = fs::read_to_string(&output).unwrap();
    for text in
        [&*format!("{process}: a process"), "\"name\":\"loader/labels\"", "\"clock\":1", pool.diagnose().cause.name()]
    {
        assert!(page.contains(text), "no {text} in {page}");
    }
}

#[test]
fn a_process_that_ends_is_drawn_up_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, output) = (dir.path().join("s"), dir.path().join("p.html"));
    let listener = UnixListener::bind(&socket).unwrap();
    let line = b"{\"process\":1,\"pools\":[{\"number\":0,\"snapshot\":{}}]}\n";
    let ending = std::thread::spawn(move || listener.accept().unwrap().0.write_all(line).unwrap());
    let ran = finish(pinpool(&["report", "--seconds", "600", "-o"]).args([&output, &socket]));
    ending.join().unwrap();
    assert_eq!((ran.code(), ran.stderr.lines().count()), (1, 1), "{}", ran.stderr);
    ran.check_stderr(": the process has ended; the report covers the part before\n");
    assert!(output.exists());
}

/// The commands that read from a process.
const READING: [&[&str]; 4] = [&["metrics"], &["why"], &["top"], &["report", "-o", "/nonexistent/page.html"]];

/// Checks that each of these commands fails for `target` and prints only one line, with these words.
fn all_refuse(target: &str, words: &str, set: impl Fn(&mut Command)) {
    for args in READING {
        let mut command = pinpool(args);
        set(command.arg(target));
        let ran = finish(&mut command);
        let lines = ran.stderr.lines().count();
        assert_eq!((ran.code(), ran.stdout.as_str(), lines), (1, "", 1), "{args:?}: {}", ran.stderr);
        ran.check_stderr(words);
    }
}

#[test]
fn a_process_that_serves_nothing_is_named() {
    let serves = "start it with PINPOOL_SOCKET=1";
    all_refuse("4194305", serves, |_| ());
    // This process runs but has no pool.
    all_refuse(&std::os::unix::process::parent_id().to_string(), serves, |_| ());
    let (dir, dead) = scratch("s");
    drop(UnixListener::bind(&dead).unwrap());
    all_refuse(dead.to_str().unwrap(), serves, |_| ());
    let none = dir.path().join("none");
    let listener = UnixListener::bind(&none).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"{\"process\":1,\"pools\":[]}\n");
        }
    });
    for args in READING.iter().filter(|args| args[0] != "metrics") {
        let ran = finish(pinpool(args).arg(&none));
        assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""), "{args:?}");
        ran.check_stderr("the process has no pool now");
    }
    run(&["metrics", "--all", "--listen", "nonsense"]).exits(1).check_stderr("--listen nonsense");
    let other = dir.path().join(OsStr::from_bytes(b"s\xff"));
    let _other = UnixListener::bind(&other).unwrap();
    on("why", &other, &[]).refuses(1).check_stderr("the path of a socket must be UTF-8");
}

#[test]
fn a_socket_of_another_user_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (_pool, _held) = served(dir.path());
    // Only root can run a command as another user.
    if dir.path().metadata().unwrap().uid() == 0 {
        let socket = dir.path().join(format!("pinpool-{}.sock", std::process::id()));
        all_refuse(socket.to_str().unwrap(), "it belongs to another user; run this command as that user", |command| {
            command.uid(65534).gid(65534);
        });
    }
}
