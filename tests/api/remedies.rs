//! The remedy in a message is the one that helps, and what is less than was asked for is a warning.
#![allow(clippy::print_stdout)] // Prints why it skips.

use std::time::Duration;

use log::Level;
use pinpool::testing::ManualClock;
use pinpool::{Backend, OnFull, Pool, PoolBuilder, Preset};

use crate::captured_log::{lines_with_levels, listen};
use crate::child::alone;

const MIB: usize = 1 << 20;

fn heap() -> PoolBuilder {
    Pool::builder().without_env().backend(Backend::Heap).wait(Duration::ZERO).on_full(OnFull::Error)
}

/// The text of the error of a get of `len` bytes beside one of `held`.
fn refusal(pool: &Pool, held: usize, len: usize) -> String {
    let _held = pool.get(held).unwrap();
    let error = pool.get(len).unwrap_err();
    assert!(error.is_limit(), "{error}");
    error.to_string()
}

#[test]
fn the_remedy_of_a_refusal_is_the_one_that_helps() {
    let adaptive = || heap().max_bytes(4 << 20).build().unwrap();
    let tensorflow = || heap().preset(Preset::Tensorflow).max_bytes(4 << 20).build().unwrap();
    let fixed = || heap().max_bytes(8 << 20).reserve_bytes(4 << 20).growth(false).build().unwrap();
    let in_partition = || adaptive().partition("part", 1 << 20).unwrap();
    for (case, pool, held, len, helps, never) in [
        ("full", adaptive(), 4 * MIB, 4096, "put buffers back first or raise PINPOOL_MAX_BYTES", "never"),
        (
            "never fits",
            adaptive(),
            1,
            5 * MIB,
            "it can never fit under the ceiling: ask for less or raise PINPOOL_MAX_BYTES",
            "put buffers back",
        ),
        ("full", tensorflow(), 3 * MIB, 4096, "put buffers back first or raise PINPOOL_MAX_BYTES", "never"),
        ("never fits", tensorflow(), 1, 5 * MIB, "it can never fit under the ceiling", "put buffers back"),
        (
            "no growth, full",
            fixed(),
            4 * MIB,
            4096,
            "raise PINPOOL_RESERVE, or set PINPOOL_GROWTH=1",
            "PINPOOL_MAX_BYTES",
        ),
        (
            "no growth, never fits",
            fixed(),
            1,
            5 * MIB,
            "no reserve is that large: ask for less, raise PINPOOL_RESERVE",
            "PINPOOL_MAX_BYTES",
        ),
        (
            "a full partition",
            in_partition(),
            MIB,
            4096,
            "this partition is full: put its buffers back first, or make the partition larger",
            "PINPOOL_MAX_BYTES",
        ),
        (
            "never fits a partition",
            in_partition(),
            1,
            2 * MIB,
            "it can never fit in this partition: ask for less",
            "PINPOOL_MAX_BYTES",
        ),
    ] {
        let text = refusal(&pool, held, len);
        let (_, remedy) = text.lines().next().unwrap().rsplit_once("ceiling ").unwrap();
        assert!(remedy.contains(helps), "{case}: no \"{helps}\" in: {text}");
        assert!(!text.contains(never), "{case}: \"{never}\" in: {text}");
    }
}

#[test]
fn the_log_line_of_a_shortage_has_the_same_remedy() {
    let pool = heap().max_bytes(8 << 20).reserve_bytes(4 << 20).growth(false).build().unwrap();
    listen();
    refusal(&pool, 4 * MIB, 4096);
    let kept = lines_with_levels();
    let [(Level::Warn, line), (Level::Warn, report)] = kept.as_slice() else { panic!("two lines: {kept:?}") };
    assert!(report.starts_with("out of memory: "), "{report}");
    assert!(
        line.contains("PINPOOL_GROWTH=0 and the reserve is in use") && !line.contains("PINPOOL_MAX_BYTES"),
        "{line}"
    );
}

#[test]
fn a_shortage_of_one_get_lasts_no_time() {
    let clock = ManualClock::default();
    let pool = heap().max_bytes(4 << 20).clock(clock.clone()).build().unwrap();
    refusal(&pool, 4 * MIB, 4096);
    listen();
    clock.advance_us(2_000_000);
    pool.poll();
    let kept = lines_with_levels();
    let over: Vec<_> = kept.iter().filter(|(_, line)| line.contains("shortage over")).collect();
    let [(Level::Warn, line)] = over.as_slice() else { panic!("one line: {kept:?}") };
    assert!(line.starts_with("shortage over: 1 get found no memory at once"), "{line}");
}

/// Lowers the limit of locked memory, and takes from root what would make it exempt.
#[allow(unsafe_code)] // Changes this process.
fn lower_memlock(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: reads a limit that lives as long as the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    // SAFETY: has no arguments in memory; fails where this process is not root.
    unsafe { libc::setuid(65_534) };
}

#[test]
fn auto_without_page_locked_memory_warns_once_and_says_why() {
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
        let unlocked: Vec<_> = warnings.iter().filter(|(_, line)| line.contains("memory is not page-locked")).collect();
        let [(Level::Warn, line)] = unlocked.as_slice() else { panic!("one warning: {warnings:?}") };
        for part in ["RLIMIT_MEMLOCK", "65536 B", "ulimit -l", "PINPOOL_BACKEND=heap"] {
            assert!(line.contains(part), "no {part} in: {line}");
        }
        // What was asked for is no warning.
        listen();
        drop(Pool::builder().without_env().backend(Backend::Heap).build().unwrap());
        assert!(lines_with_levels().iter().all(|(level, _)| *level == Level::Info));
    });
}

/// A limit of the process makes the back-end fail, and the message names that limit.
#[allow(unsafe_code)] // Changes this process.
#[test]
fn memory_refused_for_lack_of_addresses_names_their_limit() {
    alone(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmSize:")).unwrap();
        let used: u64 = line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
        let bytes = used * 1024 + (64 << 20);
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: reads a limit that lives as long as the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
        let pool = heap().preset(Preset::Tensorflow).build().unwrap();
        let error = pool.get(256 * MIB).unwrap_err();
        assert!(error.is_backend() && error.to_string().contains("ulimit -v"), "{error}");
    });
}
