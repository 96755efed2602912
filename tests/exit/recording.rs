//! A process that ends while its pools record: what was recorded before is in the file.

use std::env;
use std::ffi::CString;
use std::fs::OpenOptions;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use pinpool::Pool;
use pinpool_replay::{Event, Input, Recording};

use super::{CASE, ended, heap};

/// Names the file of a case that another case runs.
const TRACE: &str = "TEST_EXIT_TRACE";
/// Fewer records than a queue holds.
const PAIRS: usize = 1000;

fn path() -> PathBuf {
    env::var_os(TRACE).unwrap().into()
}

fn pairs(pool: &Pool) {
    (0..PAIRS).for_each(|_| drop(pool.get(4096).unwrap()));
}

/// Runs `case`, which must exit with `code`, and returns its recording.
fn recording_of(case: &str, code: i32) -> Recording {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace.gz");
    run(case, &path, code);
    Recording::read(Input::open(&path).unwrap().into_reader()).unwrap()
}

fn run(case: &str, path: &Path, code: i32) {
    let child = Command::new(env::current_exe().unwrap()).env(CASE, case).env(TRACE, path).spawn().unwrap();
    assert_eq!(ended(child), Some(code), "{case}");
}

/// The numbers of requests, returns and ended pools in a complete recording.
fn counts(recording: &Recording) -> (usize, usize, usize) {
    assert_eq!((recording.warning.as_deref(), recording.lost), (None, 0));
    let count = |is: fn(&Event) -> bool| recording.records.iter().filter(|record| is(&record.event)).count();
    let (gets, puts) = (count(|of| matches!(of, Event::Get { .. })), count(|of| matches!(of, Event::Put { .. })));
    (gets, puts, count(|event| *event == Event::End))
}

pub(super) fn return_leaves_all_records() {
    // Another thread keeps requesting and returning a buffer, and no pool ends.
    let (gets, puts, ends) = counts(&recording_of("record_and_return", 0));
    assert!(gets >= 2 * PAIRS && puts >= 2 * PAIRS && ends == 0, "{gets} {puts} {ends}");
}

pub(super) fn record_and_return() {
    static POOL: OnceLock<Pool> = OnceLock::new();
    let pool = POOL.get_or_init(|| heap().trace(path()).build().unwrap());
    thread::spawn(|| pairs(pool)).join().unwrap();
    thread::spawn(|| {
        loop {
            drop(pool.get(100).unwrap());
            thread::sleep(Duration::from_millis(1));
        }
    });
    std::mem::forget(heap().trace(path()).build().unwrap());
    pairs(pool);
}

pub(super) fn forked_child_exits_at_once() {
    // The forked child neither waits nor writes, and its parent's exit writes all records.
    assert_eq!(counts(&recording_of("record_and_fork", 7)), (PAIRS, PAIRS, 0));
}

pub(super) fn record_and_fork() {
    let pool = heap().trace(path()).build().unwrap();
    // SAFETY: the child only exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: runs the exit handlers, which must work although the other threads are gone.
        unsafe { libc::exit(3) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 3);
    pairs(&pool);
    std::process::exit(7);
}

pub(super) fn exit_while_the_disk_stalls() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the string ends in zero.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    run("record_to_a_full_pipe", &path, 7);
}

pub(super) fn record_to_a_full_pipe() {
    let _reader = OpenOptions::new().read(true).write(true).open(path()).unwrap();
    let pool = heap().trace(path()).build().unwrap();
    for _ in 0..20 {
        pairs(&pool);
        thread::sleep(Duration::from_millis(60));
    }
    std::process::exit(7);
}
