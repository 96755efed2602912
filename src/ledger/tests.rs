use std::sync::mpsc;
use std::time::Duration;

use super::*;

/// The ledger of a test; its file is removed at the end whatever happens.
struct Named(String);

impl Named {
    fn new(test: &str) -> Self {
        Self(format!("test-{}-{test}", std::process::id()))
    }

    fn attach(&self, pool: &str, max_bytes: u64) -> HostLedger {
        HostLedger::attach(&self.0, Some(pool), max_bytes).unwrap()
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(path_of(&self.0));
    }
}

#[test]
fn owners_claim_under_the_ceiling_of_the_first() {
    let named = Named::new("claims");
    let (first, second) = (named.attach("one", 100), named.attach("two", 500));
    assert_eq!(second.max_bytes(), 100);
    assert!(first.claim(60) && !second.claim(41) && second.claim(40) && !first.claim(1));
    assert_eq!((first.room_for(1), second.report().held_bytes), (0, 100));
    first.give_back(60);
    assert_eq!(second.room_for(0), 60);
    let report = second.report();
    assert_eq!((report.owners[0].pool.as_str(), report.owners[0].is_own), ("two", true));
    assert_eq!(report.others().count(), 1);
    drop(second);
    assert!(first.claim(100), "what the other held is free");
    assert_eq!(super::report(&named.0).unwrap().unwrap().held_bytes, 100);
    assert!(names().contains(&named.0));
    drop(first);
    assert!(super::report(&named.0).unwrap().is_none());
    assert_eq!(named.attach("next", 700).max_bytes(), 700, "a ledger without an owner begins anew");
}

#[test]
fn a_ledger_that_is_full_says_so_and_can_be_looked_at() {
    let named = Named::new("full");
    let all: Vec<_> = (0..LAYOUT.slots).map(|_| named.attach("", 100)).collect();
    let error = HostLedger::attach(&named.0, None, 100).unwrap_err().to_string();
    assert!(error.starts_with("all 256 slots of /dev/shm/pinpool-ledger."), "{error}");
    assert_eq!(super::report(&named.0).unwrap().unwrap().owners.len(), all.len());
}

#[test]
fn an_owner_that_lost_its_place_changes_nothing_more() {
    let named = Named::new("lost");
    let (first, second) = (named.attach("one", 100), named.attach("two", 100));
    assert!(first.claim(60));
    // As if its locks had ended, and the slot had been cleared and taken by another.
    let slot = second.0.file.slot(first.0.file.own_slot());
    slot[OWNER].store(77, Ordering::SeqCst);
    slot[HELD].store(5, Ordering::SeqCst);
    first.give_back(60);
    first.change_want(0, 7);
    first.note_idle(1);
    assert!(!first.claim(1) && first.room_for(1) == 0);
    assert!(first.loses_place() && !first.loses_place() && !second.loses_place());
    assert_eq!([HELD, WANTED, IDLE].map(|word| slot[word].load(Ordering::SeqCst)), [5, 0, 0]);
    drop(first);
    assert_eq!(slot[HELD].load(Ordering::SeqCst), 5, "it is the other's");
    assert!(second.claim(95));
}

#[test]
fn what_is_given_back_is_never_below_zero() {
    let named = Named::new("below");
    let owner = named.attach("", 100);
    assert!(owner.claim(10));
    owner.give_back(11);
    assert!(owner.claim(100) && !owner.claim(1));
}

#[test]
fn others_lack_what_they_want_beyond_the_room() {
    let named = Named::new("wants");
    let (first, second) = (named.attach("", 100), named.attach("", 100));
    assert!(first.claim(70));
    assert_eq!(first.others_lack(), 0);
    second.change_want(0, 50);
    assert_eq!((first.others_lack(), second.others_lack()), (20, 0));
    first.give_back(10);
    assert_eq!(first.living_others_lack(), 10);
    second.change_want(50, 0);
    assert_eq!(first.others_lack(), 0);
}

#[test]
fn a_want_and_what_is_given_back_wake_the_thread_of_each_owner_until_it_leaves() {
    let named = Named::new("watch");
    let (first, second) = (named.attach("", 100), named.attach("", 100));
    assert!(first.claim(100));
    let (sender, noticed) = mpsc::channel();
    let of_second = sender.clone();
    first.watch(move |is_wanted| sender.send(("first", is_wanted)).is_ok()).unwrap();
    second.watch(move |is_wanted| of_second.send(("second", is_wanted)).is_ok()).unwrap();
    let hears = |what: (&str, bool)| {
        while noticed.recv_timeout(Duration::from_secs(20)).expect("the thread hears of it") != what {}
    };
    second.change_want(0, 10);
    hears(("first", true));
    first.give_back(10);
    hears(("second", false));
    drop((first, second));
    // Both threads have let go of the sender.
    while noticed.recv_timeout(Duration::from_secs(20)).is_ok() {}
    assert!(matches!(noticed.recv_timeout(Duration::from_secs(20)), Err(mpsc::RecvTimeoutError::Disconnected)));
}

#[test]
fn a_name_is_letters_digits_and_a_few_signs() {
    for name in ["a", "job-7", "0.x_Y", &"n".repeat(64)] {
        assert_eq!(problem_of(name), None, "{name}");
    }
    for name in ["", ".", "..", "-x", "a/b", "a b", "ä", "a\0", &"n".repeat(65)] {
        assert!(problem_of(name).is_some(), "{name}");
        assert!(super::report(name).unwrap_err().is_setting());
    }
}
