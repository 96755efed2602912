use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

use super::*;

const LAYOUT: Layout = Layout { kind: *b"tests   ", version: 2, common_words: 2, slots: 4, slot_words: 8 };

/// A file of this test's own in shared memory; removed at the end whatever happens.
struct Named(PathBuf);

impl Named {
    fn new(test: &str) -> Self {
        Self(Path::new(DIRECTORY).join(format!("pinpool-test.{}.{test}", std::process::id())))
    }

    fn attach(&self) -> Result<(SharedFile, bool), SharedFileError> {
        SharedFile::attach(&self.0, &LAYOUT, PATIENCE, |common| common[0].store(77, Ordering::SeqCst))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A child of `fork`, killed and waited for at the latest by its drop.
struct Child(libc::pid_t);

impl Child {
    /// Runs `work`, reports that by one byte, keeps what it returned, and sleeps.
    fn that<T>(work: impl FnOnce() -> T) -> Self {
        let (mut ends, mut byte) = ([0; 2], 0_u8);
        // SAFETY: two descriptors are written.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: just made, and owned by nobody else.
        let [reader, writer] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // SAFETY: the child works on its one thread and never unwinds; the allocator survives a fork.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: ends a child that nobody ends.
            unsafe { libc::alarm(30) };
            let kept = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            let done = u8::from(kept.is_ok());
            // SAFETY: writes one byte that is there.
            unsafe { libc::write(writer.as_raw_fd(), (&raw const done).cast(), 1) };
            loop {
                // SAFETY: sleeps until a signal.
                unsafe { libc::pause() };
            }
        }
        drop(writer);
        let child = Self(child);
        // SAFETY: reads one byte into a place for it.
        assert_eq!(unsafe { libc::read(reader.as_raw_fd(), (&raw mut byte).cast(), 1) }, 1);
        assert_eq!(byte, 1, "the child's work succeeded");
        child
    }

    fn kill(self) {}
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child is this test's own and not waited for before.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: as above.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

#[test]
fn owners_share_words_and_the_last_removes_the_file() {
    let named = Named::new("words");
    let (first, is_first) = named.attach().unwrap();
    let (second, is_second_first) = named.attach().unwrap();
    assert!(is_first && !is_second_first);
    assert_eq!((first.own_slot(), second.own_slot()), (0, 1));
    assert_eq!(second.common()[0].load(Ordering::SeqCst), 77);
    first.slot(0)[3].store(5, Ordering::SeqCst);
    assert_eq!(second.slot(0)[3].load(Ordering::SeqCst), 5);
    assert_eq!(std::fs::metadata(&named.0).unwrap().permissions().mode() & 0o777, 0o600);
    // Two attachments of one process are two owners: the end of one leaves the other's locks.
    drop(second);
    let (third, _) = named.attach().unwrap();
    assert_eq!(third.own_slot(), 1);
    assert!(third.is_owned(0) && third.is_owned(1) && !third.is_owned(2));
    assert!(!third.clear_if_dead(0), "it lives");
    drop((first, third));
    assert!(!named.0.exists());
}

#[test]
fn words_of_earlier_owners_are_zero_for_the_next() {
    let named = Named::new("anew");
    let child = Child::that(|| {
        let (file, _) = named.attach().unwrap();
        file.slot(0)[0].store(9, Ordering::SeqCst);
        file.common()[1].store(9, Ordering::SeqCst);
        file
    });
    child.kill();
    assert!(named.0.exists(), "one that is killed removes nothing");
    let (file, is_first) = named.attach().unwrap();
    assert!(is_first);
    assert_eq!(file.slot(0)[0].load(Ordering::SeqCst), 0);
    assert_eq!([0, 1].map(|word| file.common()[word].load(Ordering::SeqCst)), [77, 0]);
}

#[test]
fn the_death_of_an_owner_is_seen_at_once_though_a_child_of_it_lives() {
    let named = Named::new("death");
    let (own, _) = named.attach().unwrap();
    let (mut ends, mut orphan) = ([0; 2], 0);
    // SAFETY: two descriptors are written.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    let owner = Child::that(|| {
        let (file, _) = named.attach().unwrap();
        file.slot(file.own_slot())[0].store(9, Ordering::SeqCst);
        // Its child keeps the copies of everything that its parent has open and mapped, and drops the object.
        let child = Child::that(|| {
            let own_slot = file.own_slot();
            assert!(file.is_forked() && !file.clear_if_dead(0) && !file.clear_if_dead(own_slot));
        });
        // SAFETY: writes a number that is there.
        unsafe { libc::write(ends[1], (&raw const child.0).cast(), size_of::<libc::pid_t>()) };
        std::mem::forget(child);
        file
    });
    // SAFETY: reads a number into a place for it.
    let bytes = unsafe { libc::read(ends[0], (&raw mut orphan).cast(), size_of::<libc::pid_t>()) };
    assert_eq!(bytes, 4);
    for end in ends {
        // SAFETY: this test's own descriptor, which is used no more.
        unsafe { libc::close(end) };
    }
    assert!(own.is_owned(1) && !own.clear_if_dead(1));
    assert_eq!(own.slot(1)[0].load(Ordering::SeqCst), 9);
    owner.kill();
    assert!(!own.is_owned(1));
    assert!(own.clear_if_dead(1));
    assert_eq!(own.slot(1)[0].load(Ordering::SeqCst), 0);
    // SAFETY: the child that this test had made, which no one else ends.
    assert_eq!(unsafe { libc::kill(orphan, libc::SIGKILL) }, 0, "it lived all the time");
}

#[test]
fn a_child_that_ends_leaves_the_slot_and_the_descriptors_of_its_parent() {
    let named = Named::new("fork");
    let (file, _) = named.attach().unwrap();
    file.slot(0)[0].store(9, Ordering::SeqCst);
    let child = Child::that(|| {
        // Its number is another file's now.
        let other = File::open("/dev/null").unwrap();
        // SAFETY: the copy of the parent's object, which the parent drops in its own process.
        drop(unsafe { std::ptr::read(&raw const file) });
        assert!(other.metadata().is_ok());
        std::mem::forget(other);
    });
    child.kill();
    assert_eq!(file.slot(0)[0].load(Ordering::SeqCst), 9);
    let (other, _) = named.attach().unwrap();
    assert!(other.is_owned(0));
}

#[test]
fn a_file_without_a_whole_header_is_made_anew_and_one_of_others_is_left_alone() {
    let named = Named::new("header");
    let write = |bytes: &[u8]| {
        std::fs::write(&named.0, bytes).unwrap();
        std::fs::set_permissions(&named.0, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    for killed in [&[][..], &[0; 11], &[0; 4096]] {
        write(killed);
        assert!(named.attach().unwrap().1);
    }
    write(b"#!/bin/sh\n");
    let error = named.attach().unwrap_err().to_string();
    assert!(error.ends_with("is no file of pinpool; remove it, or use another name"), "{error}");
    assert_eq!(std::fs::read(&named.0).unwrap(), b"#!/bin/sh\n");
    std::fs::remove_file(&named.0).unwrap();
    std::os::unix::fs::symlink("/dev/null", &named.0).unwrap();
    let error = named.attach().unwrap_err().to_string();
    assert!(error.ends_with("(it is a symbolic link: remove it)"), "{error}");
    std::fs::remove_file(&named.0).unwrap();
    write(&[]);
    std::fs::set_permissions(&named.0, std::fs::Permissions::from_mode(0o666)).unwrap();
    let error = named.attach().unwrap_err().to_string();
    assert!(error.contains("may be used by others (mode 666, not 600)"), "{error}");
}

#[test]
fn another_version_is_refused_while_it_is_used_and_replaced_after() {
    let named = Named::new("version");
    let (old, _) = named.attach().unwrap();
    let next = Layout { version: 3, slot_words: 16, slots: 9, ..LAYOUT };
    let error = SharedFile::attach(&named.0, &next, PATIENCE, |_| ()).unwrap_err().to_string();
    assert!(error.contains("has layout version 2, and this process knows version 3"), "{error}");
    let error = Snapshot::read(&named.0, &next).unwrap_err().to_string();
    assert!(error.contains("layout version 2"), "{error}");
    assert_eq!(old.common()[0].load(Ordering::SeqCst), 77);
    // The file stays, as it does after the death of its last owner.
    let bytes = std::fs::read(&named.0).unwrap();
    drop(old);
    std::fs::write(&named.0, bytes).unwrap();
    std::fs::set_permissions(&named.0, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (new, is_first) = SharedFile::attach(&named.0, &next, PATIENCE, |_| ()).unwrap();
    assert!(is_first);
    assert_eq!(new.slot(8).len(), 16);
    let error = named.attach().unwrap_err().to_string();
    assert!(error.contains("has layout version 3, and this process knows version 2"), "{error}");
}

#[test]
fn a_file_that_was_cut_is_refused_while_it_is_used() {
    let named = Named::new("cut");
    let (old, _) = named.attach().unwrap();
    let file = OpenOptions::new().write(true).open(&named.0).unwrap();
    let whole = file.metadata().unwrap().len();
    file.set_len(whole + 8).unwrap();
    let error = named.attach().unwrap_err().to_string();
    assert!(error.contains(&format!("has {} bytes in place of {whole}", whole + 8)), "{error}");
    drop(old);
    assert!(named.attach().unwrap().1);
}

#[test]
fn slots_are_limited_and_one_that_is_left_is_taken_again() {
    let named = Named::new("full");
    let mut all: Vec<_> = (0..4).map(|_| named.attach().unwrap().0).collect();
    let error = named.attach().unwrap_err().to_string();
    assert!(error.starts_with("all 4 slots of /dev/shm/pinpool-test."), "{error}");
    drop(all.remove(2));
    assert_eq!(named.attach().unwrap().0.own_slot(), 2);
}

#[test]
fn memory_that_cannot_be_had_is_an_error_and_leaves_nothing() {
    let named = Named::new("space");
    let layout = Layout { common_words: 1 << 50, ..LAYOUT };
    let error = SharedFile::attach(&named.0, &layout, PATIENCE, |_| ()).unwrap_err();
    assert!(matches!(&error, SharedFileError::Memory { .. }), "{error}");
    assert!(!named.0.exists());
    let error = SharedFile::attach(Path::new("/dev/shm/none/pinpool"), &LAYOUT, PATIENCE, |_| ()).unwrap_err();
    assert!(error.to_string().starts_with("open /dev/shm/none/pinpool: No such file"), "{error}");
}

#[test]
fn a_file_whose_memory_is_elsewhere_is_refused_while_it_is_used() {
    let named = Named::new("elsewhere");
    let (own, _) = named.attach().unwrap();
    // The file names memory as in a container that shares the directory alone: no such segment, or another one of that
    // number.
    for memory in [Memory { id: i32::MAX, cookie: 1 }, Memory { id: own.segment.id(), cookie: 1 }] {
        std::fs::write(&named.0, header::bytes_of(&LAYOUT, memory)).unwrap();
        let errors = [named.attach().unwrap_err(), Snapshot::read(&named.0, &LAYOUT).unwrap_err()];
        assert!(errors.iter().all(|error| matches!(error, SharedFileError::Elsewhere { .. })), "{errors:?}");
    }
    drop(own);
    assert!(named.attach().unwrap().1);
}

#[test]
fn a_file_that_is_cut_or_removed_is_noticed_and_its_words_stay() {
    let named = Named::new("gone");
    let (own, _) = named.attach().unwrap();
    let (other, _) = named.attach().unwrap();
    assert_eq!((own.state(), own.has_owners_elsewhere()), (FileState::Whole, false));
    OpenOptions::new().write(true).open(&named.0).unwrap().set_len(0).unwrap();
    own.slot(0)[3].store(5, Ordering::SeqCst);
    assert_eq!((other.slot(0)[3].load(Ordering::SeqCst), other.state()), (5, FileState::Cut));
    own.remove_cut(PATIENCE);
    assert_eq!((own.state(), other.state(), named.0.exists()), (FileState::Removed, FileState::Removed, false));
    let (next, is_first) = named.attach().unwrap();
    assert!(is_first);
    // Each knows of the others until they have left.
    assert!(next.has_owners_elsewhere() && own.has_owners_elsewhere());
    drop(own);
    assert!(next.has_owners_elsewhere());
    drop(other);
    assert!(!next.has_owners_elsewhere() && named.0.exists());
}

#[test]
fn a_snapshot_shows_what_living_owners_wrote() {
    let named = Named::new("snapshot");
    assert!(Snapshot::read(&named.0, &LAYOUT).unwrap().is_none());
    let (file, _) = named.attach().unwrap();
    file.slot(0)[1].store(3, Ordering::SeqCst);
    let child = Child::that(|| named.attach().unwrap().0);
    let owned = || Snapshot::read(&named.0, &LAYOUT).unwrap().unwrap().owned_slots();
    assert_eq!(owned().len(), 2);
    assert_eq!(owned()[0][1], 3);
    child.kill();
    assert_eq!(owned().len(), 1);
    assert_eq!(Snapshot::read(&named.0, &LAYOUT).unwrap().unwrap().common(), [77, 0]);
}

#[test]
fn a_sleeper_is_woken_by_another_process() {
    let named = Named::new("futex");
    let (file, _) = named.attach().unwrap();
    let word = &file.common()[1];
    let child = Child::that(|| {
        let (file, _) = named.attach().unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            file.common()[1].fetch_add(1, Ordering::SeqCst);
            wake_all(&file.common()[1]);
            std::thread::sleep(Duration::from_secs(30));
        });
    });
    let begun = Instant::now();
    while word.load(Ordering::SeqCst) == 0 && begun.elapsed() < Duration::from_secs(20) {
        sleep_while(word, 0, Some(Duration::from_secs(25)));
    }
    assert_eq!(word.load(Ordering::SeqCst), 1);
    sleep_while(word, 0, None);
    sleep_while(word, 1, Some(Duration::from_millis(1)));
    child.kill();
}

#[test]
fn locks_end_with_their_owner_though_another_process_has_the_description() {
    let file = tempfile::tempfile().unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let no_fork = fork::hold_off();
    let again = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let other = LockFile::over(again(), &no_fork).unwrap();
    let held = again();
    // The copy stands for that of a child that was made between the opening and the listing, or by other means than `fork`.
    let _copy = held.try_clone().unwrap();
    let held = LockFile::over(held, &no_fork).unwrap();
    drop(no_fork);
    assert!(held.try_lock_slot(0).unwrap() && held.mark_slot(3).unwrap());
    assert!(!other.try_lock_slot(0).unwrap());
    drop(held);
    assert!(other.try_lock_slot(0).unwrap() && !other.is_slot_marked(3).unwrap());
}

#[test]
fn a_number_that_is_another_files_by_now_is_neither_unlocked_nor_closed() {
    let named = Named::new("number");
    let (file, _) = named.attach().unwrap();
    let [locks, presence] = [file.locks.file().as_raw_fd(), file.presence.descriptor()];
    // This may be any file, also the same.
    let theirs = File::open(&named.0).unwrap();
    // Replaces both files as code does that closes what is not its own, and opens a file, which gets the number.
    let victims = [locks, presence].map(|number| {
        // SAFETY: replaces the file behind a number, which the owner is to notice.
        assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), number) }, number);
        // SAFETY: from now on this test's own.
        unsafe { File::from_raw_fd(number) }
    });
    assert_eq!(file.state(), FileState::Closed);
    let are_open = || victims.iter().all(|victim| victim.metadata().is_ok());
    drop(Child::that(|| assert!(are_open())));
    file.abandon();
    drop(file);
    assert!(are_open());
}
