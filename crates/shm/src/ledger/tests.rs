use std::sync::mpsc;
use std::time::Duration;

use super::layout::{HELD, IDLE, LAYOUT, OWNER, WANTED};
use super::name::path_of;
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

/// Changes a want of `owner` that it has no other of.
fn want(owner: &HostLedger, want: &Want, bytes: u64) {
    owner.set_want(want, bytes, bytes);
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
    // The slot looks as if its locks had ended, and it had been cleared and taken by another owner.
    let file = second.0.file().unwrap();
    let slot = file.slot(first.0.file().unwrap().own_slot());
    slot[OWNER].store(77, Ordering::SeqCst);
    slot[HELD].store(5, Ordering::SeqCst);
    first.give_back(60);
    want(&first, &Want::default(), 7);
    first.note_idle(1);
    assert!(!first.claim(1) && first.room_for(1) == 0);
    let news = [&first, &first, &second].map(|owner| owner.0.look().1);
    assert_eq!(news, [Some(LedgerNews::Taken), None, None]);
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
    let [get, reserve] = <[Want; 2]>::default();
    assert_eq!((first.others_lack(), first.is_wanted()), (0, false));
    want(&second, &get, 50);
    assert_eq!((first.others_lack(), second.others_lack()), (20, 0));
    assert!(first.is_wanted() && !second.is_wanted());
    first.give_back(10);
    assert_eq!(first.others_lack(), 10);
    want(&second, &reserve, 7);
    want(&second, &get, 40);
    assert_eq!(first.others_lack(), 7);
    want(&second, &get, 0);
    assert_eq!((first.others_lack(), first.is_wanted()), (0, true));
    want(&second, &reserve, 0);
    assert!(!first.is_wanted());
}

#[test]
fn a_want_and_what_is_given_back_wake_the_thread_of_each_owner_until_it_leaves() {
    let named = Named::new("watch");
    let (first, second) = (named.attach("", 100), named.attach("", 100));
    assert!(first.claim(100));
    let (sender, noticed) = mpsc::channel();
    let of_second = sender.clone();
    first.watch(move |is_wanted, _| sender.send(("first", is_wanted)).is_ok()).unwrap();
    second.watch(move |is_wanted, _| of_second.send(("second", is_wanted)).is_ok()).unwrap();
    let hears = |what: (&str, bool)| {
        while noticed.recv_timeout(Duration::from_secs(20)).expect("the thread hears of it") != what {}
    };
    want(&second, &Want::default(), 10);
    hears(("first", true));
    first.give_back(10);
    // Also its own thread: the want stands.
    hears(("second", false));
    drop((first, second));
    // Both threads have let go of the sender.
    while noticed.recv_timeout(Duration::from_secs(20)).is_ok() {}
    assert!(matches!(noticed.recv_timeout(Duration::from_secs(20)), Err(mpsc::RecvTimeoutError::Disconnected)));
}

#[test]
fn wants_that_change_at_once_leave_no_want_behind() {
    let named = Named::new("drift");
    let owner = named.attach("", 100);
    let wants = <[Want; 4]>::default();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            // Two threads change each of two wants, and two have one of their own.
            let (owner, shared, own) = (&owner, &wants[thread % 2], &wants[2 + thread % 2]);
            scope.spawn(move || {
                for round in 0..5_000 {
                    want(owner, if thread < 2 { own } else { shared }, 1 + round % 9);
                    want(owner, shared, 0);
                }
            });
        }
    });
    wants.iter().for_each(|one| want(&owner, one, 0));
    assert_eq!(named.attach("", 1).others_lack(), 0);
    assert_eq!(owner.report().owners[0].wanted_bytes, 0);
}

#[test]
fn an_owner_above_an_even_share_gives_what_it_puts_back_and_waits_behind_those_that_waited() {
    let named = Named::new("even");
    let (first, second) = (named.attach("", 64), named.attach("", 64));
    assert!(first.claim(56));
    let get = Want::default();
    assert_eq!(first.owed_bytes(), 0);
    want(&second, &get, 14);
    assert_eq!((first.owed_bytes(), second.owed_bytes()), (6, 0));
    first.give_back(14);
    assert_eq!((first.owed_bytes(), first.room_for(14)), (0, 8));
    assert!(!first.claim(14) && second.claim(14));
    want(&second, &get, 0);
    assert!(!first.claim(14) && first.claim(8));
}

#[test]
fn owners_of_a_file_that_is_removed_or_cut_move_with_all_that_they_hold_and_the_ceiling_holds_meanwhile() {
    for is_cut in [false, true] {
        let named = Named::new(if is_cut { "cut" } else { "removed" });
        let (first, second) = (named.attach("one", 100), named.attach("two", 100));
        assert!(first.claim(60) && second.claim(10));
        let get = Want::default();
        want(&second, &get, 50);
        let path = path_of(&named.0);
        if is_cut {
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
            // The thread that looks first makes another.
            assert!(first.0.look().1.is_some());
        } else {
            std::fs::remove_file(&path).unwrap();
        }
        let third = named.attach("three", 100);
        assert!(!third.claim(1) && third.room_for(1) == 0, "not all have moved");
        let what = if is_cut { "cut" } else { "removed" };
        if !is_cut {
            assert_eq!(first.0.look().1, Some(LedgerNews::Moved { what }));
        }
        assert!(!third.claim(1));
        assert!(!second.claim(1));
        assert!(matches!(second.0.look().1, Some(LedgerNews::Moved { .. })));
        assert!(second.claim(1));
        assert_eq!((third.report().held_bytes, third.report().owners.len()), (71, 3));
        assert_eq!(third.others_lack(), 21);
        want(&second, &get, 0);
        assert!(third.claim(29) && !first.claim(1));
        first.give_back(60);
        assert_eq!(third.room_for(1), 60);
        drop((first, second, third));
        assert!(super::report(&named.0).unwrap().is_none() && !path.exists());
    }
}

#[test]
fn a_place_without_a_file_to_move_to_claims_nothing_until_there_is_one() {
    let named = Named::new("blocked");
    let owner = named.attach("", 100);
    assert!(owner.claim(60));
    std::fs::write(path_of(&named.0).with_extension("x"), b"another program's").unwrap();
    std::fs::rename(path_of(&named.0).with_extension("x"), path_of(&named.0)).unwrap();
    assert!(!owner.claim(1));
    assert!(matches!(owner.0.look().1, Some(LedgerNews::NotMoved { what: "removed", .. })));
    assert!(owner.0.look().1.is_none() && !owner.claim(1));
    std::fs::remove_file(path_of(&named.0)).unwrap();
    assert_eq!(owner.0.look().1, Some(LedgerNews::Moved { what: "removed" }));
    assert!(owner.claim(40) && !owner.claim(1));
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
