#![allow(unsafe_code)] // Forks, and replaces descriptors.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;

use super::name::path_of;
use super::segment::SLOTS;
use super::*;
use crate::file::tests::Child;

/// The shared limit of a test; its file is always removed at the end.
struct Named(String);

impl Named {
    fn new(test: &str) -> Self {
        Self(format!("test-{}-{test}", std::process::id()))
    }

    fn path(&self) -> std::path::PathBuf {
        path_of(&self.0)
    }

    fn error(&self) -> String {
        SharedLimit::attach(&self.0, None, 100).unwrap_err()
    }

    /// Replaces the contents of the shared limit's file.
    fn write(&self, bytes: &[u8]) {
        fs::write(self.path(), bytes).unwrap();
        fs::set_permissions(self.path(), Permissions::from_mode(0o600)).unwrap();
    }

    fn attach(&self, pool: &str, max_bytes: u64) -> SharedLimit {
        SharedLimit::attach(&self.0, Some(pool), max_bytes).unwrap()
    }
}

/// Sets `want` of `member` to `bytes`, and the bytes that it needs in all to the same number.
fn want(member: &SharedLimit, want: &Want, bytes: u64) {
    member.set_want(want, bytes, bytes);
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}

#[test]
fn members_claim_under_the_limit_of_the_first() {
    let named = Named::new("claims");
    let (first, second) = (named.attach("one", 100), named.attach("two", 500));
    assert_eq!(second.max_bytes(), 100);
    assert!(first.claim(60) && !second.claim(41) && second.claim(40) && !first.claim(1));
    assert_eq!((first.room_for(1), second.report().held_bytes), (0, 100));
    first.release(60);
    assert_eq!(second.room_for(0), 60);
    let report = second.report();
    let largest = &report.members[0];
    assert_eq!((largest.pool.as_str(), largest.is_own, report.members.len()), ("two", true, 2));
    drop(second);
    assert!(first.claim(100), "the other member's bytes are free");
    first.release(101);
    assert!(first.claim(100) && !first.claim(1), "the bytes are never below zero");
    assert_eq!(super::report(&named.0).unwrap().unwrap().held_bytes, 100);
    assert!(names().contains(&named.0));
    drop(first);
    assert!(super::report(&named.0).unwrap().is_none());
    assert_eq!(named.attach("next", 700).max_bytes(), 700, "a shared limit without a member starts again");
}

#[test]
fn a_full_shared_limit_says_so_and_can_be_shown() {
    let named = Named::new("full");
    let all: Vec<_> = (0..SLOTS).map(|_| named.attach("", 100)).collect();
    let error = named.error();
    assert!(error.starts_with("all 256 slots of /dev/shm/pinpool-limit."), "{error}");
    assert_eq!(super::report(&named.0).unwrap().unwrap().members.len(), all.len());
}

#[test]
fn others_lack_what_they_want_beyond_the_room() {
    let named = Named::new("wants");
    let (first, second) = (named.attach("", 100), named.attach("", 100));
    assert!(first.claim(70));
    let [get, reserve] = <[Want; 2]>::default();
    assert_eq!((first.others_lacking_bytes(), first.is_wanted()), (0, false));
    want(&second, &get, 50);
    assert_eq!((first.others_lacking_bytes(), second.others_lacking_bytes()), (20, 0));
    assert!(first.is_wanted() && !second.is_wanted());
    first.release(10);
    assert_eq!(first.others_lacking_bytes(), 10);
    want(&second, &reserve, 7);
    want(&second, &get, 40);
    assert_eq!(first.others_lacking_bytes(), 7);
    want(&second, &get, 0);
    assert_eq!((first.others_lacking_bytes(), first.is_wanted()), (0, true));
    want(&second, &reserve, 0);
    assert!(!first.is_wanted());
}

#[test]
fn requests_and_returns_wake_each_member_until_it_leaves() {
    let named = Named::new("watch");
    let (first, second) = (named.attach("", 100), named.attach("", 100));
    assert!(first.claim(100));
    let (sender, noticed) = mpsc::channel();
    let of_second = sender.clone();
    first.watch(move |is_wanted, _| sender.send(("first", is_wanted)).is_ok()).unwrap();
    second.watch(move |is_wanted, _| of_second.send(("second", is_wanted)).is_ok()).unwrap();
    let hears = |what: (&str, bool)| {
        while noticed.recv_timeout(Duration::from_secs(60)).expect("the thread is notified") != what {}
    };
    want(&second, &Want::default(), 10);
    hears(("first", true));
    first.release(10);
    // The release also wakes the second member, which still wants memory. No other member does, hence `false`.
    hears(("second", false));
    drop((first, second));
    // Until both threads have dropped their senders.
    while noticed.recv_timeout(Duration::from_secs(60)).is_ok() {}
    assert!(matches!(noticed.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Disconnected)));
}

#[test]
fn wants_that_change_at_once_leave_no_want_behind() {
    let named = Named::new("drift");
    let member = named.attach("", 100);
    let wants = <[Want; 4]>::default();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            // Two threads share each of two wants. The first two threads also have a separate want each.
            let (member, shared, own) = (&member, &wants[thread % 2], &wants[2 + thread % 2]);
            scope.spawn(move || {
                for round in 0..5_000 {
                    want(member, if thread < 2 { own } else { shared }, 1 + round % 9);
                    want(member, shared, 0);
                }
            });
        }
    });
    wants.iter().for_each(|one| want(&member, one, 0));
    assert_eq!(named.attach("", 1).others_lacking_bytes(), 0);
    assert_eq!(member.report().members[0].wanted_bytes, 0);
}

#[test]
fn a_member_above_its_even_share_yields_what_it_returns() {
    let named = Named::new("even");
    let (first, second) = (named.attach("", 64), named.attach("", 64));
    assert!(first.claim(56));
    let get = Want::default();
    assert_eq!(first.owed_bytes(), 0);
    want(&second, &get, 14);
    assert_eq!((first.owed_bytes(), second.owed_bytes()), (6, 0));
    first.release(14);
    assert_eq!((first.owed_bytes(), first.room_for(14)), (0, 8));
    assert!(!first.claim(14) && second.claim(14));
    want(&second, &get, 0);
    assert!(!first.claim(14) && first.claim(8));
}

#[test]
fn a_name_is_letters_digits_and_a_few_signs() {
    for name in ["a", "job-7", "0.x_Y", &"n".repeat(64)] {
        assert_eq!(problem_of(name), None, "{name}");
    }
    for name in ["", ".", "..", "-x", "a/b", "a b", "ä", "a\0", &"n".repeat(65)] {
        assert!(problem_of(name).is_some(), "{name}");
        assert!(super::report(name).is_err());
    }
}

#[test]
fn the_largest_members_come_first_with_truncated_names() {
    let named = Named::new("words");
    let names = ["loader".to_owned(), "x".repeat(80), "ä".repeat(40), format!("x{}", "ä".repeat(40)), String::new()];
    let members = names.each_ref().map(|name| named.attach(name, 1_000));
    (1..).zip(&members).for_each(|(bytes, member)| assert!(member.claim(bytes)));
    want(&members[4], &Want::default(), 7);
    let report = members[0].report();
    let read: Vec<_> = report.members.iter().rev().map(|member| member.pool.clone()).collect();
    assert_eq!(read, ["loader", &"x".repeat(72), &"ä".repeat(36), &format!("x{}", "ä".repeat(35)), ""]);
    let pid = std::process::id();
    let start = format!("process {pid} (unnamed) holds 5B, 0B idle, and waits for 7B, process {pid} (xä");
    assert!(report.describe_others().starts_with(&start));
    let _more = std::array::from_fn::<_, 6, _>(|_| named.attach("", 0));
    assert!(members[0].report().describe_others().ends_with(", and 2 more"));
}

#[test]
fn the_bytes_of_a_killed_member_are_free_while_its_child_lives() {
    let named = Named::new("death");
    let own = named.attach("own", 100);
    let ((mut reader, mut writer), mut orphan) = (std::io::pipe().unwrap(), [0; size_of::<libc::pid_t>()]);
    let member = Child::that(|| {
        let member = named.attach("killed", 100);
        assert!(member.claim(60));
        // The child inherits all files and mappings that its parent has open, but owns no slot.
        let child = Child::that(|| assert!(!member.claim(1) && member.report() == SharedLimitReport::default()));
        writer.write_all(&child.0.to_ne_bytes()).unwrap();
        std::mem::forget(child);
        member
    });
    reader.read_exact(&mut orphan).unwrap();
    let orphan = libc::pid_t::from_ne_bytes(orphan);
    assert!(!own.claim(41) && own.report().members.len() == 2);
    member.kill();
    assert_eq!(own.report().members.len(), 1);
    assert!(own.claim(100));
    // SAFETY: the call takes numbers. `orphan` is the grandchild created above, which nothing else kills.
    assert_eq!(unsafe { libc::kill(orphan, libc::SIGKILL) }, 0, "it is still alive");
}

#[test]
fn a_child_that_ends_leaves_the_slot_and_the_descriptors_of_its_parent() {
    let named = Named::new("fork");
    let member = named.attach("", 100);
    assert!(member.claim(60));
    let child = Child::that(|| {
        // Reuses the number of the descriptor that the fork closed.
        let other = File::open("/dev/null").unwrap();
        // SAFETY: this is the child's copy of the object. The parent drops its own copy in its own process.
        drop(unsafe { std::ptr::read(&raw const member) });
        assert!(other.metadata().is_ok());
        std::mem::forget(other);
    });
    child.kill();
    let other = named.attach("", 100);
    assert!(!other.claim(41) && other.report().members.len() == 2);
}

#[test]
fn only_the_file_of_a_killed_member_is_replaced() {
    let named = Named::new("header");
    drop(Child::that(|| named.attach("", 77)));
    assert!(named.path().exists(), "a killed member leaves its file");
    let left = fs::read(named.path()).unwrap();
    let older = [&left[..16], &3_u64.to_ne_bytes(), &[0; 40]].concat();
    for killed in [&[][..], &[0; 11], &[0; 4096], &left[..8], &left, &older] {
        named.write(killed);
        assert!(super::report(&named.0).unwrap().is_none());
        assert_eq!(named.attach("", 100).max_bytes(), 100);
    }
    for foreign in [&b"#!/bin/sh\n"[..], b"a"] {
        named.write(foreign);
        for error in [named.error(), super::report(&named.0).unwrap_err()] {
            assert!(error.ends_with("is not a pinpool shared limit; remove it, or use another name"), "{error}");
        }
        assert_eq!(fs::read(named.path()).unwrap(), foreign);
    }
    fs::set_permissions(named.path(), Permissions::from_mode(0o666)).unwrap();
    assert!(named.error().contains("is not a file that only user") && named.error().contains("mode 666); remove it"));
    fs::remove_file(named.path()).unwrap();
    std::os::unix::fs::symlink("/dev/null", named.path()).unwrap();
    let error = named.error();
    assert!(error.ends_with("(it is a symbolic link: remove it)"), "{error}");
}

#[test]
fn a_foreign_file_is_refused_and_its_members_continue() {
    let named = Named::new("used");
    let member = named.attach("", 100);
    let whole = fs::read(named.path()).unwrap();
    let changed = |word: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[8 * word..][..8].copy_from_slice(&value.to_ne_bytes());
        bytes
    };
    for (bytes, text) in [
        (changed(2, 3), "has format 3, and this release of pinpool uses format 4: use the same release"),
        // As in a container that shares only the directory: no such segment, or another segment with that number.
        (changed(3, 0x7fff_ffff), "is used in another IPC namespace: share that too"),
        (changed(3, u64::MAX), "is used in another IPC namespace"),
        (changed(4, 1), "is used in another IPC namespace"),
        (whole[..8].to_vec(), "was truncated while other processes use it: stop them, or use another name"),
        (Vec::new(), "was truncated while other processes use it"),
    ] {
        named.write(&bytes);
        for error in [named.error(), super::report(&named.0).unwrap_err()] {
            assert!(error.contains(text), "{error}");
        }
        assert!(member.claim(10) && member.loss().is_none());
    }
    drop(member);
    assert!(!named.path().exists());
}

#[test]
fn members_of_a_removed_file_keep_memory_without_growing() {
    let named = Named::new("removed");
    let (first, second) = (named.attach("", 100), named.attach("", 100));
    assert!(first.claim(60));
    let (sender, noticed) = mpsc::channel();
    first.watch(move |_, loss| loss.is_none_or(|loss| sender.send(loss).is_ok())).unwrap();
    fs::remove_file(named.path()).unwrap();
    want(&second, &Want::default(), 50);
    assert_eq!((second.loss(), second.room_for(1), second.claim(1)), (Some(Loss::Removed), 0, false));
    assert_eq!((first.is_wanted(), first.others_lacking_bytes(), first.owed_bytes()), (false, 0, 0));
    assert_eq!(noticed.recv_timeout(Duration::from_secs(60)), Ok(Loss::Removed));
    first.release(20);
    assert_eq!((first.report().held_bytes, second.report().members.len()), (40, 2));
    let next = named.attach("", 70);
    assert!(next.claim(70) && !first.claim(1));
    drop((first, second));
    assert_eq!(super::report(&named.0).unwrap().unwrap().held_bytes, 70);
    // The loss was reported only once.
    assert_eq!(noticed.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_member_with_a_closed_descriptor_leaves_its_slot_alone() {
    let named = Named::new("closed");
    let member = named.attach("", 100);
    assert!(member.claim(60));
    let number = member.0.slots.locks().file().as_raw_fd();
    // Any file can take over the number, even the same file.
    let theirs = File::open(named.path()).unwrap();
    // SAFETY: the call replaces the file behind the number, which the member must notice.
    assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), number) }, number);
    // SAFETY: the member does not close the number any more, so this test owns it.
    let victim = unsafe { File::from_raw_fd(number) };
    let next = named.attach("", 100);
    assert!(next.claim(100) && !member.claim(1));
    assert_eq!(member.loss(), Some(Loss::Closed));
    member.release(60);
    want(&member, &Want::default(), 7);
    member.publish_idle(1);
    drop(Child::that(|| assert!(victim.metadata().is_ok())));
    drop(member);
    assert!(victim.metadata().is_ok());
    let report = next.report();
    assert_eq!((report.members.len(), report.held_bytes, next.is_wanted()), (1, 100, false));
}

#[test]
fn claims_of_a_process_that_may_not_have_the_lock_are_refused_in_time() {
    let named = Named::new("locked");
    let member = named.attach("", 100);
    let stopped = named.attach("", 100);
    assert!(stopped.0.slots.locked(|| !member.claim(1)).unwrap());
    assert!(member.claim(100));
}

#[test]
fn a_report_while_the_file_is_removed_and_created_again_is_no_error() {
    let named = Named::new("reports");
    std::thread::scope(|scope| {
        let churn = scope.spawn(|| (0..2_000).for_each(|_| drop(named.attach("only", 100))));
        while !churn.is_finished() {
            super::report(&named.0).unwrap();
        }
    });
}
