//! Memory that outlives its process: a keeper, one holder at a time, generations, what is complete, holders that are killed.
#![allow(unsafe_code)] // Forks and kills.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pinpool::{Backend, Pool};
use pinpool_shared::keep::{Keeper, Kept, socket_of};

use super::child::{Child, alone_with};

const BYTES: usize = 1 << 20;

fn pool() -> Pool {
    Pool::builder().without_env().backend(Backend::Heap).max_bytes(8_u64 << 20).build().unwrap()
}

/// Runs `test` in a process of its own whose sockets are in a directory of its own; ends `keeper` after it.
macro_rules! alone_in_dir {
    ($test:expr) => {
        let dir = tempfile::tempdir().unwrap();
        alone_with(|| vec![("XDG_RUNTIME_DIR", dir.path().display().to_string())], || $test());
    };
}

fn kept_by<R>(keeper: &Keeper, test: impl FnOnce() -> R) -> R {
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let end = End(&is_over);
        scope.spawn(|| keeper.serve(|| is_over.load(Ordering::Relaxed)).unwrap());
        let result = test();
        drop(end);
        result
    })
}

#[test]
fn a_holder_that_was_killed_leaves_its_bytes_its_mark_and_a_generation() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("weights", BYTES, None).unwrap();
        kept_by(&keeper, || {
            for generation in 0..5_u8 {
                let mut trainer = Child::new(|| {
                    let kept = Kept::attach(&pool(), "weights", BYTES).unwrap();
                    assert_eq!((kept.generation(), kept.len()), (generation.into(), BYTES));
                    let mark = kept.completed();
                    if generation == 0 {
                        assert_eq!(mark, None);
                        assert!(
                            kept.get(0, BYTES).unwrap().as_slice_untracked().unwrap().iter().all(|&byte| byte == 0)
                        );
                    } else {
                        let mark = mark.unwrap();
                        assert_eq!((mark.label, mark.len), (format!("step {}", generation - 1), BYTES as u64));
                        assert_eq!(mark.generation, u64::from(generation) - 1);
                        let buf = kept.get(0, BYTES).unwrap();
                        assert!(buf.as_slice_untracked().unwrap().iter().all(|&byte| byte == generation - 1));
                    }
                    kept.begin();
                    assert_eq!(kept.completed(), None, "a half-written state is not taken for a whole one");
                    kept.get(0, BYTES).unwrap().as_mut_slice().unwrap().fill(generation);
                    kept.complete(&format!("step {generation}"), BYTES as u64).unwrap();
                    // SAFETY: ends this process as from outside.
                    unsafe { libc::raise(libc::SIGKILL) };
                });
                assert!(libc::WIFSIGNALED(trainer.wait()));
            }
            assert_eq!(Kept::attach(&pool(), "weights", BYTES).unwrap().generation(), 5);
        });
    });
}

#[test]
fn a_mark_is_one_of_those_that_threads_set_at_once() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("marks", 4096, None).unwrap();
        kept_by(&keeper, || {
            let kept = Kept::attach(&pool(), "marks", 4096).unwrap();
            let marks = [("a".repeat(100), 1000_u64), ("b".repeat(150), 1001)];
            let writers = Barrier::new(3);
            let running = AtomicUsize::new(2);
            thread::scope(|scope| {
                for (label, len) in &marks {
                    let (kept, writers, running) = (&kept, &writers, &running);
                    scope.spawn(move || {
                        writers.wait();
                        (0..20_000).for_each(|_| kept.complete(label, *len).unwrap());
                        running.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                writers.wait();
                while running.load(Ordering::Relaxed) > 0 {
                    if let Some(mark) = kept.completed() {
                        assert!(marks.contains(&(mark.label.clone(), mark.len)), "{mark:?}");
                    }
                }
            });
        });
    });
}

#[test]
fn a_mark_is_whole_whenever_its_process_is_killed() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("marks", 4096, None).unwrap();
        kept_by(&keeper, || {
            for round in 0..30 {
                let trainer = Child::new(|| {
                    let kept = Kept::attach(&pool(), "marks", 4096).unwrap();
                    for number in 0_u64.. {
                        kept.complete(&number.to_string().repeat(8), number % 4096).unwrap();
                    }
                });
                thread::sleep(Duration::from_micros(500 + 137 * round));
                drop(trainer);
                let kept = Kept::attach(&pool(), "marks", 4096).unwrap();
                if let Some(mark) = kept.completed() {
                    let number: u64 = mark.label[..mark.label.len() / 8].parse().unwrap();
                    assert_eq!((mark.label, mark.len), (number.to_string().repeat(8), number % 4096), "round {round}");
                }
            }
        });
    });
}

#[test]
fn one_process_holds_it_at_a_time_and_parts_do_not_overlap() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("a.b-c_1", BYTES, Some(false)).unwrap();
        kept_by(&keeper, || {
            let pool = pool();
            let kept = Kept::attach(&pool, "a.b-c_1", BYTES).unwrap();
            let error = Kept::attach(&pool, "a.b-c_1", BYTES).unwrap_err();
            assert!(error.is_peer() && error.to_string().contains("one holds it at a time"), "{error}");
            let first = kept.get(0, 5000).unwrap();
            for (offset, len) in [(0, 1), (4096, 1), (0, BYTES), (4096, 0)] {
                assert!(kept.get(offset, len).unwrap_err().is_shared(), "{offset} {len}");
            }
            let second = kept.get(8192, BYTES - 8192).unwrap();
            assert_eq!((second.len(), kept.page_lock()), (BYTES - 8192, "none"));
            drop(first);
            kept.get(0, 8192).unwrap();
            for (offset, len) in [(1, 1), (BYTES, 1), (usize::MAX, 1), (0, BYTES + 1)] {
                assert!(kept.get(offset, len).unwrap_err().is_shared(), "{offset} {len}");
            }
            assert!(kept.complete("x", BYTES as u64 + 1).unwrap_err().is_shared());
            assert!(kept.complete(&"x".repeat(193), 1).unwrap_err().is_shared());
            assert!(pool.get_timeout(8 << 20, Duration::from_millis(1)).unwrap_err().is_limit(), "under the ceiling");
            drop((kept, second));
            pool.get(8 << 20).unwrap();
        });
    });
}

#[test]
fn a_buffer_that_outlives_its_handle_keeps_other_processes_out() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("w", BYTES, None).unwrap();
        kept_by(&keeper, || {
            let pool = pool();
            let buf = Kept::attach(&pool, "w", BYTES).unwrap().get(0, BYTES).unwrap();
            let mut other = Child::new(|| {
                let error = Kept::attach(&self::pool(), "w", BYTES).unwrap_err();
                assert!(error.is_peer() && error.to_string().contains("held by another process"), "{error}");
            });
            assert_eq!(other.wait(), 0, "it is refused while the buffer lives");
            drop(buf);
            let mut other =
                Child::new(|| drop(Kept::attach(&self::pool(), "w", BYTES).unwrap().get(0, BYTES).unwrap()));
            assert_eq!(other.wait(), 0, "the lock ends with the last buffer");
        });
    });
}

#[test]
fn the_ceiling_holds_the_whole_file() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("w", BYTES, Some(false)).unwrap();
        kept_by(&keeper, || {
            let of = |bytes: usize| {
                Pool::builder().without_env().backend(Backend::Heap).max_bytes(bytes as u64).build().unwrap()
            };
            assert!(Kept::attach(&of(BYTES), "w", BYTES).unwrap_err().is_limit(), "the page of numbers is claimed too");
            drop(Kept::attach(&of(BYTES + 4096), "w", BYTES).unwrap());
        });
    });
}

#[test]
fn what_cannot_be_kept_or_held_is_refused_with_the_reason() {
    alone_in_dir!(|| {
        let refused = |error: pinpool_shared::Error, words: &str| {
            assert!((error.is_peer() || error.is_shared()) && error.to_string().contains(words), "{words}: {error}");
        };
        let pool = pool();
        refused(Kept::attach(&pool, "none", BYTES).unwrap_err(), "start `pinpool keep none --bytes 1048576`");
        for name in ["", "a/b", "..", &"x".repeat(65), "a b"] {
            refused(Keeper::new(name, BYTES, None).unwrap_err(), "is no name");
        }
        refused(Keeper::new("empty", 0, None).unwrap_err(), "1 B and more");
        assert!(!socket_of("empty").unwrap().exists(), "nothing is left behind");
        assert!(Keeper::new("large", usize::MAX, None).is_err());
        refused(Keeper::new("huge", 1 << 46, Some(true)).unwrap_err(), "nr_hugepages");
        let keeper = Keeper::new("one", BYTES, None).unwrap();
        refused(Keeper::new("one", BYTES, None).unwrap_err(), "kept by another process already");
        kept_by(&keeper, || {
            refused(Kept::attach(&pool, "one", 4096).unwrap_err(), "holds 1048576 B, asked 4096 B");
            let error = Kept::attach(
                &Pool::builder().without_env().backend(Backend::Heap).max_bytes(4096_u64).build().unwrap(),
                "one",
                BYTES,
            );
            assert!(error.unwrap_err().is_limit());
            assert_eq!(Kept::attach(&pool, "one", BYTES).unwrap().generation(), 0, "a refusal is no attachment");
        });
        let path = keeper.path().to_owned();
        drop(keeper);
        assert!(!path.exists());
        // Left behind by a keeper that was killed.
        drop(UnixListener::bind(&path).unwrap());
        drop(Keeper::new("one", BYTES, None).unwrap());
        // A socket of something else.
        let other = UnixListener::bind(&path).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| drop(other.accept().unwrap()));
            refused(Kept::attach(&pool, "one", BYTES).unwrap_err(), "without a descriptor");
        });
        drop(other);
        fs::remove_file(&path).unwrap();
    });
}

#[test]
fn a_fork_meanwhile_keeps_nothing_locked() {
    alone_in_dir!(|| {
        let keeper = Keeper::new("w", 4096, Some(false)).unwrap();
        kept_by(&keeper, || {
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                let forking = scope.spawn(|| {
                    let mut children = Vec::new();
                    while children.len() < 150 && !is_over.load(Ordering::Relaxed) {
                        // SAFETY: sleeps until it is killed.
                        children.push(Child::new(|| assert_eq!(unsafe { libc::pause() }, -1)));
                    }
                    children
                });
                let mut attaches = 0;
                while !forking.is_finished() || attaches < 50 {
                    if let Err(error) = Kept::attach(&pool(), "w", 4096) {
                        is_over.store(true, Ordering::Relaxed);
                        panic!("attach {attaches} beside children that live: {error}");
                    }
                    attaches += 1;
                }
                drop(forking.join().unwrap());
            });
        });
    });
}

#[test]
fn a_keeper_replaces_and_removes_nothing_but_its_own_socket() {
    alone_in_dir!(|| {
        let path = socket_of("w").unwrap();
        fs::write(&path, b"a file of the user").unwrap();
        let error = Keeper::new("w", BYTES, None).unwrap_err();
        assert!(error.is_shared() && error.to_string().contains("is no socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"a file of the user");
        fs::remove_file(&path).unwrap();
        let keeper = Keeper::new("w", BYTES, None).unwrap();
        fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(keeper);
        assert!(path.exists(), "the socket of another process stays");
        drop(other);
        fs::remove_file(&path).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0, "nothing is left behind");
    });
}

#[test]
fn of_keepers_that_start_at_once_one_has_the_name() {
    alone_in_dir!(|| {
        let path = socket_of("w").unwrap();
        for round in 0..50 {
            // Left behind by a keeper that was killed.
            drop(UnixListener::bind(&path).unwrap());
            let begin = Barrier::new(4);
            let new = || {
                begin.wait();
                Keeper::new("w", 4096, Some(false))
            };
            let kept: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(new)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(kept.iter().filter(|made| made.is_ok()).count(), 1, "round {round}: {kept:?}");
        }
    });
}

#[test]
fn the_directory_of_sockets_is_this_users_alone() {
    alone_with(Vec::new, || {
        // SAFETY: no other thread reads the environment.
        unsafe { std::env::remove_var("XDG_RUNTIME_DIR") };
        let path = socket_of("x").unwrap();
        let dir = path.parent().unwrap();
        assert_eq!(fs::metadata(dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(dir.starts_with("/tmp"));
    });
}

#[test]
fn a_keeper_of_another_user_is_refused_and_gives_nothing_to_one() {
    alone_in_dir!(|| {
        // SAFETY: takes nothing and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return;
        }
        let other = |work: fn()| {
            let mut child = Child::new(|| {
                // SAFETY: changes the user of this process, which has one thread.
                assert_eq!(unsafe { libc::setuid(65_534) }, 0);
                work();
            });
            assert_eq!(child.wait(), 0);
        };
        // A directory and a socket that are open to others, as where `XDG_RUNTIME_DIR` is shared.
        let path = socket_of("w").unwrap();
        let open = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        open(path.parent().unwrap(), 0o777);
        let keeper = Keeper::new("w", BYTES, Some(false)).unwrap();
        open(&path, 0o666);
        kept_by(&keeper, || {
            other(|| {
                // What root keeps may be used by its user, but root's keeper gives nothing to others.
                let error = Kept::attach(&pool(), "w", BYTES).unwrap_err();
                assert!(error.is_peer() && error.to_string().contains("without a descriptor"), "{error}");
            });
            drop(Kept::attach(&pool(), "w", BYTES).unwrap());
        });
        drop(keeper);
        // The other way about: root asks a keeper of another user.
        let mut child = Child::new(|| {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::setuid(65_534) }, 0);
            let keeper = Keeper::new("w", BYTES, Some(false)).unwrap();
            keeper.serve(|| false).unwrap();
        });
        while !path.exists() {
            thread::sleep(Duration::from_millis(1));
        }
        let error = Kept::attach(&pool(), "w", BYTES).unwrap_err().to_string();
        assert!(error.contains("belongs to user 65534, and this one to user 0"), "{error}");
        // SAFETY: a child of this process that was not waited for.
        unsafe { libc::kill(child.id(), libc::SIGKILL) };
        child.wait();
        // What it has left behind is another user's, too.
        let error = Keeper::new("w", BYTES, Some(false)).unwrap_err().to_string();
        assert!(error.contains("user 65534"), "{error}");
        assert!(path.exists());
    });
}
