//! Hits make no system calls: a kernel filter catches every call of a thread that makes only hits.
//!
//! The filter permits the exit of the thread, the return from the handler that counts the other calls, and the three calls by
//! which a thread waits for a lock. Another thread holds the lock for nanoseconds, or for longer if it is preempted.
#![allow(unsafe_code)] // Installs a filter and a handler, and ends a thread without its destructors.
#![allow(clippy::cast_possible_truncation)] // The constants of filters are wider than their fields.
#![allow(clippy::print_stdout)] // Says what was skipped.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pinpool::{Pool, Preset};

use crate::child::alone;
use crate::fixture::{heap, held_sink};
use crate::until::until;

/// How long each pattern of hits runs, all at once. The kernel's pressure files used to be read once a second.
const LASTS: Duration = Duration::from_millis(1200);

/// Calls that the filter caught, and the number of the first.
static CAUGHT: AtomicU64 = AtomicU64::new(0);
static FIRST: AtomicI64 = AtomicI64::new(-1);

/// The outcomes of the threads, which end without reporting. Each test has its own process and starts its threads once.
static REFUSED: AtomicUsize = AtomicUsize::new(0);
static DONE: AtomicUsize = AtomicUsize::new(0);
static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a filled record; for SIGSYS the call number follows the call address.
    let place = unsafe { info.cast::<u8>().add(SIGSYS_NUMBER_AT) };
    // SAFETY: as above.
    let number = unsafe { place.cast::<i32>().read() };
    let _ = FIRST.compare_exchange(-1, i64::from(number), Ordering::SeqCst, Ordering::SeqCst);
    CAUGHT.fetch_add(1, Ordering::SeqCst);
}

/// Offset of `si_syscall`: three numbers, padding, the address.
const SIGSYS_NUMBER_AT: usize = 24;

fn catch_calls() -> bool {
    // SAFETY: a zeroed record is a valid one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler only touches atomics.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) }, 0);

    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let equals = |number: libc::c_long, jt: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf: 0,
        k: number as u32,
    };
    let mut program = [
        // The number is the first field of the record that a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equals(libc::SYS_exit, 5),
        equals(libc::SYS_rt_sigreturn, 4),
        equals(libc::SYS_clock_nanosleep, 3),
        equals(libc::SYS_sched_yield, 2),
        equals(libc::SYS_futex, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_TRAP),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: drops privileges for this thread only, which needs none.
    let is_bound = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
    // SAFETY: a valid filter program, for this thread only.
    is_bound && unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) } == 0
}

/// A pattern of hits.
type Hits = Box<dyn Fn() + Send>;

/// Runs all `patterns` repeatedly and at the same time, each on a dedicated thread that must make no system call. Returns false
/// if the kernel does not support the filter.
fn run_without_a_call<const N: usize>(patterns: [Hits; N], lasts: Duration) -> bool {
    for hits in patterns {
        thread::spawn(move || {
            (0..1000).for_each(|_| hits());
            if !catch_calls() {
                REFUSED.fetch_add(1, Ordering::SeqCst);
                return;
            }
            // At least once, even if this thread began late.
            loop {
                (0..100).for_each(|_| hits());
                if STOP.load(Ordering::Relaxed) {
                    break;
                }
            }
            DONE.fetch_add(1, Ordering::SeqCst);
            // SAFETY: ends this thread immediately. Its stack and thread-locals leak, which is harmless in a dedicated process.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        });
    }
    thread::sleep(lasts);
    STOP.store(true, Ordering::SeqCst);
    until("all threads end", || DONE.load(Ordering::SeqCst) + REFUSED.load(Ordering::SeqCst) == N);
    if REFUSED.load(Ordering::SeqCst) > 0 {
        println!("skipped: the kernel takes no filter");
        return false;
    }
    let (caught, first) = (CAUGHT.load(Ordering::SeqCst), FIRST.load(Ordering::SeqCst));
    assert_eq!(caught, 0, "the first was call {first}");
    true
}

#[test]
fn the_filter_catches_a_call() {
    alone(|| {
        let caught = std::panic::catch_unwind(|| {
            let calls = || {
                // SAFETY: only returns a number.
                black_box(unsafe { libc::syscall(libc::SYS_getppid) });
            };
            run_without_a_call([Box::new(calls)], Duration::from_millis(50))
        });
        assert!(matches!(caught, Err(_) | Ok(false)), "a call was not caught");
    });
}

fn touch(pool: &Pool, len: usize) {
    pool.get(len).unwrap().wait_slice_mut().unwrap()[0] = 1;
}

#[test]
fn a_hit_makes_no_system_call() {
    alone(|| {
        let pool = || heap().build().unwrap();
        let (same, mix, held) = (pool(), pool(), pool());
        let (first, second) = (pool(), pool());
        // The maintenance thread has something to do meanwhile.
        let (stream, mut device, _gate) = held_sink(4096);
        let copying = same.clone();
        copying.get(4096).unwrap().copy_to(&stream, &mut device).unwrap();

        let mixed = [100, 5_000, 100_000, 20_000, 1 << 20, 64, 9_000, 300_000];
        let patterns: [Hits; 4] = [
            Box::new(move || touch(&same, 4096)),
            Box::new(move || mixed.into_iter().for_each(|len| touch(&mix, len))),
            Box::new(move || {
                let buffers: [_; 16] = std::array::from_fn(|_| held.get(4096).unwrap());
                drop(buffers);
            }),
            Box::new(move || {
                touch(&first, 4096);
                touch(&second, 4096);
            }),
        ];
        run_without_a_call(patterns, LASTS);
    });
}

#[test]
fn a_hit_of_the_tensorflow_preset_makes_no_system_call() {
    alone(|| {
        let pool = heap().preset(Preset::TensorFlow).build().unwrap();
        run_without_a_call([Box::new(move || touch(&pool, 4096))], LASTS);
    });
}
