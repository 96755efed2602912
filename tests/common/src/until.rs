//! Waits for what other threads or processes do.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// Only bounds a hang, so a busy machine cannot fail a test.
const HANGS: Duration = Duration::from_secs(300);

/// Waits until `holds`.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < HANGS, "not in {HANGS:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until `thread` has ended; returns false if it hangs. Unlike a join, this lets a test release what the thread waits for.
pub fn ends<T>(thread: &thread::ScopedJoinHandle<'_, T>) -> bool {
    let begun = Instant::now();
    while !thread.is_finished() && begun.elapsed() < HANGS {
        thread::sleep(Duration::from_millis(1));
    }
    thread.is_finished()
}

/// Runs `act` on another thread: a hang is reported, not waited for.
pub fn in_time<R: Send + 'static>(act: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = channel();
    thread::spawn(move || done.send(act()));
    result.recv_timeout(HANGS).expect("it hangs, or it panicked")
}

/// The number of threads of this process with this name. A thread that has just begun may not have its name yet.
pub fn threads_named(name: &str) -> usize {
    let names =
        fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|found| found.trim() == name).count()
}
