//! A process may end at any moment. Each case runs in a separate process as its `main`, and passes if the process ends with the
//! expected exit status.
//!
//! There is no test harness, because the cases test the end of `main`, statics and exit handlers.
#![allow(unsafe_code)] // Registers exit handlers, and implements a source.
#![allow(clippy::print_stdout)] // Reports as a harness does.

use std::cell::RefCell;
use std::env;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder, Request};
use pinpool_replay::SimSource;
use pinpool_testing::{FaultSource, SinkGate, SinkMemory, SinkStream, SourceCall};
use test_common::valid_stats;

use self::valid_stats::{stats_when, valid_stats};

#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "observe")]
mod recording;
#[cfg(feature = "observe")]
mod socket;

/// Names the case that a process was started for.
const CASE: &str = "TEST_EXIT_CASE";
/// A case that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

type Case = (&'static str, fn(), i32);

const CASES: &[Case] = &[
    ("exit_with_copies_in_flight_and_threads_at_work", exit_at_work, 7),
    ("return_from_main_with_pools_in_statics", return_from_main, 0),
    ("panic_in_main_with_buffers_held", panic_in_main, 101),
    ("exit_while_requests_wait", exit_with_waiters, 7),
    ("exit_handlers_use_the_pool_before_and_after_it_stops", exit_handlers, 7),
    ("exit_called_by_the_maintenance_thread", exit_by_maintenance, 7),
    ("a_thread_dies_with_buffers", thread_death, 0),
    ("a_forked_child_with_the_parents_buffers_is_killed", forked_child_killed, 0),
    #[cfg(feature = "cuda")]
    ("the_driver_is_gone_before_the_pools", driver::gone_first, 0),
    #[cfg(feature = "cuda")]
    ("exit_with_copies_on_a_device", driver::exit_with_copies, 7),
    #[cfg(feature = "observe")]
    ("return_from_main_leaves_all_records", recording::return_leaves_all_records, 0),
    #[cfg(feature = "observe")]
    ("a_forked_child_of_a_recorded_process_exits_at_once", recording::forked_child_exits_at_once, 0),
    #[cfg(feature = "observe")]
    ("exit_while_the_disk_of_a_recording_stalls", recording::exit_while_the_disk_stalls, 0),
    #[cfg(feature = "observe")]
    ("exit_removes_the_socket_of_a_pool_in_a_static", socket::exit_removes_it, 0),
    #[cfg(feature = "observe")]
    ("serve_and_exit", socket::serve_and_exit, CHILD_ONLY),
    #[cfg(feature = "observe")]
    ("record_and_return", recording::record_and_return, CHILD_ONLY),
    #[cfg(feature = "observe")]
    ("record_and_fork", recording::record_and_fork, CHILD_ONLY),
    #[cfg(feature = "observe")]
    ("record_to_a_full_pipe", recording::record_to_a_full_pipe, CHILD_ONLY),
];
/// Marks a case that only another case runs.
const CHILD_ONLY: i32 = -1;

fn main() -> ExitCode {
    if let Ok(name) = env::var(CASE) {
        CASES.iter().filter(|case| case.0 == name).for_each(|case| case.1());
        return ExitCode::SUCCESS;
    }
    if cfg!(miri) {
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<_> = env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    let mut failed = 0;
    for (name, _, code) in CASES.iter().filter(|case| is_wanted(case.0) && case.2 != CHILD_ONLY) {
        let ended = ended(start(name));
        let is_right = ended == Some(*code);
        failed += u8::from(!is_right);
        println!("test {name} ... {}", if is_right { "ok" } else { "FAILED" });
        if !is_right {
            println!("exit status {ended:?}, not {code}");
        }
    }
    ExitCode::from(failed)
}

fn start(case: &str) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(CASE, case).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of `child` and returns its exit status, or `None` if it was killed, as a hanging child is.
fn ended(mut child: Child) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if begun.elapsed() > PATIENCE {
            println!("hangs");
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn heap() -> PoolBuilder {
    let builder = Pool::builder().without_env().backend(Backend::Heap);
    builder.unstable_settings(|only| only.copies_wait = Some(Duration::from_millis(50)))
}

/// A copy that never ends.
fn stuck_copy(pool: &Pool) -> (SinkStream, SinkGate) {
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(4096));
    let hold = stream.hold();
    pool.get(4096).unwrap().copy_to(&stream, &mut device).unwrap();
    (stream, hold)
}

/// Threads that hit, miss and copy until the process is gone.
fn at_work(pool: &Pool) {
    let begun = Arc::new(AtomicU32::new(0));
    for number in 0..3 {
        let (pool, begun) = (pool.clone(), begun.clone());
        thread::spawn(move || {
            let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(1 << 20));
            for round in 0_usize.. {
                let held = pool.get(4096 * (1 + round % 40)).unwrap();
                pool.get(10_000 * (number + 1)).unwrap().copy_to(&stream, &mut device).unwrap();
                drop(held);
                begun.fetch_add(u32::from(round == 10), Ordering::SeqCst);
            }
        });
    }
    while begun.load(Ordering::SeqCst) < 3 {
        thread::yield_now();
    }
}

fn exit_at_work() {
    let pool = heap().build().unwrap();
    let _stuck = stuck_copy(&pool);
    at_work(&pool);
    std::process::exit(7);
}

static POOL: OnceLock<Pool> = OnceLock::new();

thread_local! {
    /// Dropped after `main`, in an order that we cannot choose.
    static KEPT: RefCell<Option<(Pool, PinnedBuf)>> = const { RefCell::new(None) };
}

fn return_from_main() {
    let pool = POOL.get_or_init(|| heap().build().unwrap());
    let other = heap().build().unwrap();
    let buf = other.get(4096).unwrap();
    KEPT.set(Some((other, buf)));
    std::mem::forget(stuck_copy(pool));
    at_work(pool);
}

fn panic_in_main() {
    std::panic::set_hook(Box::new(|_| {}));
    let pool = heap().build().unwrap();
    let _held = [pool.get(100).unwrap(), pool.get(10_000).unwrap()];
    let _stuck = stuck_copy(&pool);
    let other = heap().build().unwrap();
    at_work(&other);
    panic!("on purpose");
}

fn exit_with_waiters() {
    let pool = heap().max_bytes(4 << 20).wait(Duration::from_secs(3600)).build().unwrap();
    let held: Vec<_> =
        std::iter::from_fn(|| pool.get_with(Request::new(1 << 20).timeout(Duration::ZERO)).ok()).collect();
    for _ in 0..3 {
        let pool = pool.clone();
        thread::spawn(move || drop(pool.get(1 << 20)));
    }
    while pool.stats().requests.waits < 3 {
        thread::yield_now();
    }
    assert!(!held.is_empty());
    std::process::exit(7);
}

static WORKED: AtomicU32 = AtomicU32::new(0);

/// Uses the pool of the process in every way.
extern "C" fn use_pool() {
    let worked = std::panic::catch_unwind(|| {
        let Some(pool) = POOL.get() else { return };
        drop((pool.get(100).unwrap(), pool.get(1 << 20).unwrap()));
        pool.maintain();
        valid_stats(pool);
        pool.trim(0);
        let other = heap().build().unwrap();
        drop(other.get(100).unwrap());
    });
    WORKED.fetch_add(u32::from(worked.is_ok()), Ordering::SeqCst);
}

extern "C" fn judge() {
    // SAFETY: ends the process immediately.
    unsafe { libc::_exit(if WORKED.load(Ordering::SeqCst) == 2 { 7 } else { 8 }) }
}

fn exit_handlers() {
    // Handlers run in reverse order of registration, so `judge` is the last.
    for handler in [judge, use_pool] {
        // SAFETY: a function of this program.
        assert_eq!(unsafe { libc::atexit(handler) }, 0);
    }
    std::mem::forget(stuck_copy(POOL.get_or_init(|| heap().build().unwrap())));
    // SAFETY: as above. Runs before the maintenance thread stops.
    assert_eq!(unsafe { libc::atexit(use_pool) }, 0);
    std::process::exit(1);
}

fn exit_by_maintenance() {
    let source = Arc::new(FaultSource::around(Arc::new(SimSource::separate_regions(1 << 30))));
    source.act(SourceCall::Release, 0, || {
        let thread = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
        std::process::exit(if thread.trim() == "pinpool-maint" { 7 } else { 8 })
    });
    let builder = heap().backend(Backend::Source(source)).pool_size_limit(0).idle_timeout(Duration::ZERO);
    let pool = builder.build().unwrap();
    drop(pool.get(4096).unwrap());
    loop {
        thread::park();
    }
}

fn thread_death() {
    std::panic::set_hook(Box::new(|_| {}));
    let pool = heap().build().unwrap();
    for round in 0..20 {
        let pool = pool.clone();
        let dying = thread::spawn(move || {
            let held = pool.get(4096).unwrap();
            // This buffer returns in the thread's destructors, the others while the thread unwinds.
            KEPT.set(Some((pool.clone(), pool.get(10_000).unwrap())));
            let copied = pool.get(20_000).unwrap();
            let stream = SinkStream::new().unwrap();
            copied.copy_to(&stream, &mut SinkMemory::new(20_000)).unwrap();
            assert!(round % 2 == 0, "on purpose, with {} bytes held", held.len());
        });
        let _ = dying.join();
    }
    // The copies complete without a call. A buffer with a copy that was just found complete counts as in use until it is
    // returned.
    let stats = stats_when(&pool, |stats| stats.copies.in_flight + stats.memory.in_use == 0);
    assert_eq!((stats.memory.in_use, stats.requests.served, stats.requests.returned), (0, 60, 60));
}

fn forked_child_killed() {
    let pool = heap().build().unwrap();
    let mut held = pool.get(1 << 20).unwrap();
    held.wait_slice_mut().unwrap().fill(7);
    at_work(&pool);
    // SAFETY: the child touches its copy of the buffer and waits to be killed.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        held.wait_slice_mut().unwrap().fill(9);
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    }
    thread::sleep(Duration::from_millis(20));
    // SAFETY: the child is this process's own.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    assert!(held.wait_slice_mut().unwrap().iter().all(|&byte| byte == 7));
    assert!(pool.get(5000).is_ok());
}
