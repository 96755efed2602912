//! A recording on a stalled disk: memory stays bounded, and lost records are counted and reported.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pinpool::Pool;
use pinpool_observe::record::{Event, Recording};

use crate::captured_log;
use crate::child::alone;
use crate::fixture::{recorded, status_kib};
use crate::scratch::scratch;

/// A named pipe.
#[allow(unsafe_code)] // Makes a system call.
fn pipe(path: &Path) {
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the string ends in zero.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0, "{}", io::Error::last_os_error());
}

/// Requests and returns by the calling thread.
fn pairs(pool: &Pool, pairs: u64) {
    (0..pairs).for_each(|_| drop(pool.get(4096).unwrap()));
}

#[test]
fn a_pipe_that_nobody_reads_is_refused_at_once() {
    let (_dir, path) = scratch("pipe");
    pipe(&path);
    let error = recorded(&path).build().unwrap_err();
    assert!(error.is_setting() && error.to_string().contains("cannot be written"), "{error}");
}

#[test]
fn records_are_lost_and_counted_while_the_pipe_is_full() {
    // The memory of the whole process is measured.
    alone(|| {
        captured_log::listen();
        let (_dir, path) = scratch("pipe");
        pipe(&path);
        // Opened for reading and writing, so that the pipe is open but is read only later.
        let reader = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        let pool = recorded(&path).build().unwrap();
        // More than the pipe can hold, so the writer blocks.
        for _ in 0..10 {
            pairs(&pool, 2_000);
            thread::sleep(Duration::from_millis(60));
        }
        // One queue of 256 KiB for each of these threads would be 500 MiB.
        let (threads, each) = (2_000_u64, 100);
        let before = status_kib("VmRSS");
        for _ in 0..threads {
            let pool = pool.clone();
            thread::spawn(move || pairs(&pool, each)).join().unwrap();
        }
        let grown_kib = status_kib("VmRSS") - before;
        assert!(grown_kib < 100 << 10, "{grown_kib} KiB");
        // Once the pipe is read, the recording is completed.
        let is_over = Arc::new(AtomicBool::new(false));
        let reading = thread::spawn({
            let is_over = is_over.clone();
            move || read_until(reader, &is_over)
        });
        drop(pool);
        is_over.store(true, Ordering::Release);
        let recording = Recording::read(reading.join().unwrap().as_slice()).unwrap();
        assert_eq!(recording.warning, None);
        let is_use = |event: &Event| matches!(event, Event::Get { .. } | Event::Put { .. });
        let there = recording.records.iter().filter(|record| is_use(&record.event)).count() as u64;
        let all = 2 * (20_000 + threads * each);
        assert!(recording.lost > 0 && there < all, "{there} of {all}");
        // A few records other than requests and returns may be lost too.
        assert!((all..all + 30).contains(&(there + recording.lost)), "{there} and {} of {all}", recording.lost);
        assert!(matches!(recording.records.last().map(|last| last.event), Some(Event::End)));
        let lines = captured_log::lines();
        assert_eq!(captured_log::count(&lines, &format!(" lost={}", recording.lost)), 1, "{lines:#?}");
    });
}

/// The bytes that come through the pipe until `is_over`.
fn read_until(mut pipe: File, is_over: &AtomicBool) -> Vec<u8> {
    let (mut all, mut part) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let was_over = is_over.load(Ordering::Acquire);
        match pipe.read(&mut part) {
            Ok(read) => all.extend_from_slice(&part[..read]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && was_over => return all,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(2)),
            Err(error) => panic!("{error}"),
        }
    }
}
