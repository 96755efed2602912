//! Each message contains the remedy that helps, and a pool that gets less than it asked for logs a warning.
#![allow(clippy::print_stdout)] // Prints why it skips.

use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use log::Level;
use pinpool::{Backend, OnFull, Pool, PoolBuilder, Preset, Request};

use crate::captured_log::{lines_with_levels, listen};
use crate::child::alone;
use crate::fixture::{LONG, MIB, Requests, heap, until_waits};

fn builder() -> PoolBuilder {
    heap().wait(Duration::ZERO).on_full(OnFull::Error)
}

/// The error text of a request for `len` bytes while a buffer of `held` bytes is in use.
fn refusal(pool: &impl Requests, held: usize, len: usize) -> String {
    let _held = pool.get(held).unwrap();
    let error = pool.get(len).unwrap_err();
    assert!(error.is_limit(), "{error}");
    error.report()
}

#[test]
fn the_remedy_of_a_refusal_is_the_one_that_helps() {
    let adaptive = || builder().max_bytes(4 << 20).build().unwrap();
    let tensorflow = || builder().preset(Preset::TensorFlow).max_bytes(4 << 20).build().unwrap();
    let fixed = || builder().max_bytes(8 << 20).reserve(4 << 20).growth(false).build().unwrap();
    let sooner = "Return buffers sooner or raise PINPOOL_MAX_BYTES";
    let smaller = "Request a smaller buffer or raise PINPOOL_MAX_BYTES";
    let all_in_use = "raise PINPOOL_RESERVE (all of it is in use), or set PINPOOL_GROWTH=1";
    let too_small = "Request a smaller buffer, raise PINPOOL_RESERVE (it is too small)";
    for (case, pool, held, len, helps, never) in [
        ("full", adaptive(), 4 * MIB, 4096, sooner, "exceeds"),
        ("never fits", adaptive(), 1, 5 * MIB, smaller, "eturn buffers"),
        ("full", tensorflow(), 3 * MIB, 4096, sooner, "exceeds"),
        ("never fits", tensorflow(), 1, 5 * MIB, smaller, "eturn buffers"),
        ("no growth, full", fixed(), 4 * MIB, 4096, all_in_use, "PINPOOL_MAX_BYTES"),
        ("no growth, never fits", fixed(), 1, 5 * MIB, too_small, "PINPOOL_MAX_BYTES"),
    ] {
        let text = refusal(&pool, held, len);
        let (_, remedy) = text.lines().next().unwrap().rsplit_once("in flight 0B").unwrap();
        assert!(remedy.contains(helps), "{case}: no \"{helps}\" in: {text}");
        assert!(!text.contains(never), "{case}: \"{never}\" in: {text}");
    }
    let part = adaptive().open_partition("part", 1 << 20).unwrap();
    for (held, len, helps) in [(MIB, 4096, "Return its buffers sooner"), (1, 2 * MIB, "Request a smaller buffer")] {
        let text = refusal(&part, held, len);
        let text = text.lines().next().unwrap();
        assert!(text.ends_with(&format!("{helps} or make the partition larger.")), "{text}");
        assert!(!text.contains("PINPOOL_MAX_BYTES"), "{text}");
    }
}

/// The two last lines of an error: the likely cause, and what to change.
fn cause(text: &str) -> (&str, &str) {
    let (_, cause) = text.split_once("\nlikely cause: ").expect(text);
    cause.split_once("\nto do: ").expect(text)
}

#[test]
fn a_request_behind_a_large_one_names_it_and_a_higher_limit() {
    let pool = builder().max_bytes(64 << 20).build().unwrap();
    let held = pool.get(10 * MIB).unwrap();
    thread::scope(|scope| {
        let large = scope.spawn(|| pool.get_with(Request::new(60 * MIB).timeout(LONG)).map(drop));
        until_waits(&pool, 1);
        let text = pool.get(8 * MIB).unwrap_err().report();
        drop(held);
        large.join().unwrap().unwrap();
        assert!(text.contains("1 earlier request is waiting and has priority, the first for 60.0MiB"), "{text}");
        let (found, change) = cause(&text);
        assert_eq!(found, "an earlier request for 60.0MiB has priority, and free memory is reserved for it");
        // 10 MiB in use, 60 MiB for the first, 8 MiB for this one.
        let remedy = "wait longer (PINPOOL_WAIT), request a smaller buffer, or raise PINPOOL_MAX_BYTES to 78.0MiB";
        assert_eq!(change, remedy);
    });
}

#[test]
fn the_log_line_of_a_shortage_has_the_same_remedy() {
    let pool = builder().max_bytes(8 << 20).reserve(4 << 20).growth(false).build().unwrap();
    listen();
    refusal(&pool, 4 * MIB, 4096);
    let kept = lines_with_levels();
    let [(Level::Warn, line), (Level::Warn, report)] = kept.as_slice() else { panic!("two lines: {kept:?}") };
    assert!(report.contains(" out_of_memory: "), "{report}");
    assert!(line.contains("raise PINPOOL_RESERVE (all of it is in use)"), "{line}");
    assert!(!line.contains("PINPOOL_MAX_BYTES"), "{line}");
}

/// Lowers the limit on locked memory, and stops running as root, which would be exempt.
#[allow(unsafe_code)] // Changes this process.
fn lower_memlock(bytes: u64) {
    set_memlock(bytes);
    // SAFETY: has no arguments in memory; fails if this process is not root.
    unsafe { libc::setuid(65_534) };
}

/// Sets the limit on locked memory, which does not bind a process with `CAP_IPC_LOCK`.
#[allow(unsafe_code)] // Changes this process.
fn set_memlock(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: reads a limit that lives as long as the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
}

/// If the pool limit equals the limit on locked memory, the error names the limit that caused the refusal.
fn refused_at_the_lock_limit(is_bound: bool) {
    const LIMIT: u64 = 8 << 20;
    let set = if is_bound { lower_memlock } else { set_memlock };
    set(LIMIT);
    if pinpool::unstable::backend::lock_limit().is_some() != is_bound {
        println!("skipped: whether RLIMIT_MEMLOCK binds this process depends on its capabilities");
        return;
    }
    let pool = Pool::builder().without_env().backend(Backend::Mlock).max_bytes(LIMIT).build().unwrap();
    let error = pool.get(16 << 20).unwrap_err().to_string();
    assert_eq!(error.contains("exceeds the pool limit of 8.0MiB (RLIMIT_MEMLOCK)"), is_bound, "{error}");
    assert_eq!(error.contains("raise PINPOOL_MAX_BYTES"), !is_bound, "{error}");
}

#[test]
fn a_lock_limit_that_binds_is_named() {
    alone(|| refused_at_the_lock_limit(true));
}

#[test]
fn a_lock_limit_that_does_not_bind_is_not_named() {
    alone(|| refused_at_the_lock_limit(false));
}

#[test]
fn auto_without_pinned_memory_warns_once_and_says_why() {
    alone(|| {
        lower_memlock(64 << 10);
        listen();
        let pool = Pool::builder().without_env().build().unwrap();
        if pool.stats().backend != "heap" {
            println!("skipped: RLIMIT_MEMLOCK does not bind this process, or there is a GPU");
            return;
        }
        (1..100).for_each(|len| drop(pool.get(len * 5000).unwrap()));
        let warnings: Vec<_> = lines_with_levels().into_iter().filter(|(level, _)| *level <= Level::Warn).collect();
        let unlocked: Vec<_> = warnings.iter().filter(|(_, line)| line.contains("memory is not pinned")).collect();
        let [(Level::Warn, line)] = unlocked.as_slice() else { panic!("one warning: {warnings:?}") };
        for part in ["RLIMIT_MEMLOCK", "64.0KiB", "ulimit -l", "PINPOOL_BACKEND=heap"] {
            assert!(line.contains(part), "no {part} in: {line}");
        }
        // A pool that was asked to be pageable causes no warning.
        listen();
        drop(heap().build().unwrap());
        assert!(lines_with_levels().iter().all(|(level, _)| *level == Level::Info));
    });
}

#[allow(unsafe_code)] // Changes this process.
#[test]
fn without_a_logger_stderr_has_each_warning_once() {
    alone(|| {
        lower_memlock(64 << 10);
        let mut written = tempfile::tempfile().unwrap();
        // SAFETY: the descriptor stays open until the end of this process.
        assert_eq!(unsafe { libc::dup2(written.as_raw_fd(), 2) }, 2);
        let pools = [(); 2].map(|()| Pool::builder().without_env().build().unwrap());
        if pools[0].stats().backend != "heap" {
            println!("skipped: RLIMIT_MEMLOCK does not bind this process, or there is a GPU");
            return;
        }
        assert!(pools.iter().all(|pool| pool.stats().pinned_by.is_none()));
        // A pool that was asked to be pageable causes no warning.
        drop(heap().build().unwrap());
        let mut text = String::new();
        written.seek(SeekFrom::Start(0)).unwrap();
        written.read_to_string(&mut text).unwrap();
        assert_eq!(text.matches(" machine: memory is not pinned: ").count(), 1, "{text}");
    });
}

#[test]
fn a_refusal_by_the_limit_on_locked_memory_fails_at_once_and_is_not_repeated() {
    alone(|| {
        let builder = Pool::builder().without_env().backend(Backend::Mlock).max_bytes(256 << 20).wait(LONG);
        let pool = builder.build().unwrap();
        lower_memlock(8 << 20);
        let error = match pool.get(64 * MIB) {
            Ok(_) => return println!("skipped: RLIMIT_MEMLOCK does not bind this process"),
            Err(error) => error,
        };
        assert!(error.is_backend() && error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
        assert_eq!(pool.stats().requests.timeouts, 0);
        let why = pool.diagnose();
        assert_eq!(why.cause.name(), "memory_refused");
        assert!(why.remedy.as_deref().is_some_and(|cure| cure.contains("ulimit -l")), "{why}");
        // While a buffer is in use, its return may help, so the request waits and makes no further calls.
        let _held = pool.get(MIB).unwrap();
        let failures = pool.stats().memory.pin.failures;
        assert!(pool.get_with(Request::new(64 * MIB).timeout(Duration::from_millis(200))).unwrap_err().is_backend());
        let stats = pool.stats();
        assert_eq!(stats.requests.timeouts, 1);
        assert!(stats.memory.pin.failures - failures <= 2, "{} failures", stats.memory.pin.failures - failures);
    });
}
