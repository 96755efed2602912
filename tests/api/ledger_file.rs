//! The file of a host ledger that is removed or cut under its users, and descriptors that other code closes.
#![allow(unsafe_code)] // Closes descriptors.

use std::fs::{self, OpenOptions};
use std::thread;
use std::time::{Duration, Instant};

use crate::child;
use crate::ledger::{LONG, MIB, Named, Worker};

#[test]
fn a_ledger_whose_file_is_removed_never_has_two_ceilings_and_is_whole_again() {
    let named = Named::new("rm");
    let first = named.builder(64).name("first").build().unwrap();
    let mut other = Worker::start(&named, "other", 64);
    other.answer();
    let held = first.get(40 * MIB).unwrap();
    assert_eq!(other.ask(&format!("get {}", 20 * MIB)), "held");
    for _ in 0..3 {
        fs::remove_file(named.path()).unwrap();
        let next = named.builder(64).name("next").build().unwrap();
        // Neither before the others have moved nor after.
        assert!(next.get_with(pinpool::Request::new(8 * MIB).wait(Duration::from_millis(20))).is_err());
        named.wait_until(|report| report.owners.len() == 3 && report.held_bytes == 60 << 20);
        assert!(next.get_with(pinpool::Request::new(8 * MIB).wait(Duration::ZERO)).is_err());
        drop(next.get_with(pinpool::Request::new(3 * MIB).wait(LONG)).unwrap());
    }
    drop(held);
    assert_eq!(other.ask("put"), "put");
    let next = named.builder(64).build().unwrap();
    drop(next.get_with(pinpool::Request::new(60 * MIB).wait(LONG)).unwrap());
    drop((first, next));
    other.end();
    // The last reference to a pool may be the maintenance thread's.
    let begun = Instant::now();
    while fs::exists(named.path()).unwrap() {
        assert!(begun.elapsed() < LONG, "the file stays");
        std::thread::yield_now();
    }
}

#[test]
fn a_ledger_whose_file_is_cut_or_overwritten_at_any_moment_kills_nobody() {
    let named = Named::new("cut");
    let mut workers = ["one", "two"].map(|pool| Worker::start(&named, pool, 64));
    for (worker, seed) in workers.iter_mut().zip([2, 4]) {
        assert_eq!(worker.answer(), "ready");
        worker.order(&format!("churn {seed}"));
    }
    for round in 0..60 {
        // It may be removed just now.
        if let Ok(file) = OpenOptions::new().write(true).open(named.path()) {
            file.set_len([0, 8, 1 << 20][round % 3]).unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // Fails for one that something else has ended.
    workers.into_iter().for_each(Worker::kill);
    let pool = named.builder(64).build().unwrap();
    drop(pool.get_with(pinpool::Request::new(60 * MIB).wait(LONG)).unwrap());
    assert_eq!(named.report().owners.len(), 1);
}

/// Closes the descriptors of ledgers, as code does that closes what is not its own.
fn close_descriptors_of_ledgers() {
    let is_ledger = |target: &std::path::Path| target.to_string_lossy().contains("/pinpool-ledger.");
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let number = entry.file_name().to_string_lossy().parse().unwrap();
        if fs::read_link(entry.path()).is_ok_and(|target| is_ledger(&target)) {
            // SAFETY: that it is not this code's own is what the pools are to notice.
            assert_eq!(unsafe { libc::close(number) }, 0);
        }
    }
}

#[test]
fn a_pool_that_lost_its_descriptor_leaves_the_place_of_the_next_alone() {
    child::alone(|| {
        let named = Named::new("aba");
        let first = named.builder(64).name("first").wait(Duration::ZERO).build().unwrap();
        let held = first.get(40 * MIB).unwrap();
        close_descriptors_of_ledgers();
        // Takes the slot, and the number of the descriptor.
        let second = named.builder(64).name("second").wait(Duration::ZERO).build().unwrap();
        let second_held = second.get(40 * MIB).unwrap();
        assert!(first.get(10 * MIB).is_err(), "it pins no more");
        drop((held, first));
        let report = named.report();
        assert_eq!((report.owners.len(), report.held_bytes), (1, 40 << 20), "{report}");
        drop((second.get(20 * MIB).unwrap(), second_held));
    });
}

/// Whether every thread of a process is stopped.
fn is_stopped(pid: libc::pid_t) -> bool {
    let is_stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'));
    let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.all(|thread| fs::read_to_string(thread.unwrap().path().join("stat")).is_ok_and(is_stopped))
}

#[test]
fn a_stopped_process_that_has_not_moved_keeps_the_others_from_its_share() {
    let named = Named::new("stopped");
    let mut other = Worker::start(&named, "other", 64);
    other.answer();
    assert_eq!(other.ask(&format!("get {}", 40 * MIB)), "held");
    let pid = libc::pid_t::try_from(other.pid()).unwrap();
    // SAFETY: this test's own child.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
    // The call returns before the threads have stopped; one of them may be looking at the file.
    let begun = Instant::now();
    while !is_stopped(pid) {
        assert!(begun.elapsed() < LONG, "it does not stop");
        thread::sleep(Duration::from_micros(100));
    }
    fs::remove_file(named.path()).unwrap();
    let pool = named.builder(64).build().unwrap();
    let error = pool.get_with(pinpool::Request::new(MIB).wait(Duration::from_millis(5))).unwrap_err().to_string();
    assert!(error.contains("its file was removed, and not all of its owners have moved to the new one"), "{error}");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    let begun = Instant::now();
    drop(pool.get_with(pinpool::Request::new(MIB).wait(LONG)).unwrap());
    assert!(named.report().held_bytes >= 40 << 20, "{} after {:?}", named.report(), begun.elapsed());
}
