//! Many concurrent threads, on one pool and on many.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, mpsc};
use std::{ptr, thread};

use pinpool_c::*;

use crate::fixture::{Address, HEAP, Handle, ROUNDS, bytes, destroy, get, open, put, stats};

const THREADS: u8 = 8;

/// Half of the buffers are checked and returned by a thread that did not request them.
#[test]
fn no_two_threads_hold_the_same_bytes() {
    let pool = open(HEAP);
    let check_and_put = move |(held, len, mark): (Address, usize, u8)| {
        assert!(bytes(held, len).iter().all(|&byte| byte == mark), "written to by another");
        put(pool, held).unwrap();
    };
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || receiver.into_iter().for_each(check_and_put));
        for thread in 0..THREADS {
            let sender = sender.clone();
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let len = 1 + (round * 7919 + usize::from(thread) * 104_729) % (2560 * ROUNDS);
                    let held = get(pool, len).unwrap();
                    let mark = thread.wrapping_mul(31).wrapping_add(u8::try_from(round).unwrap());
                    bytes(held, len).fill(mark);
                    thread::yield_now();
                    if round % 2 == 0 {
                        check_and_put((held, len, mark));
                    } else {
                        sender.send((held, len, mark)).unwrap();
                    }
                }
            });
        }
        drop(sender);
    });
    let found = stats(pool);
    assert_eq!(found["requests"]["returned"], usize::from(THREADS) * ROUNDS, "{found}");
    destroy(pool);
}

#[test]
fn only_one_of_many_threads_adopts_or_returns_a_buffer() {
    static RETURNED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn count(_ptr: *mut c_void, _data: *mut c_void) {
        RETURNED.fetch_add(1, Ordering::SeqCst);
    }
    let (pool, mut memory) = (open(HEAP), 0_u64);
    let own = Address((&raw mut memory).cast());
    let succeed = |at: Address, call: fn(Handle, Address) -> pp_status| {
        let start = &Barrier::new(4);
        let call = move || (start.wait(), call(pool, at)).1;
        thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(call));
            threads.map(|thread| thread.join().unwrap()).iter().filter(|&&status| status == pp_status::PP_OK).count()
        })
    };
    for round in 1..=4 * ROUNDS {
        // SAFETY: nothing uses the memory.
        let adopted = succeed(own, |pool, own| unsafe { pp_adopt(pool.0, own.0, 8, 0, Some(count), ptr::null_mut()) });
        let returned = [own, get(pool, 4096).unwrap()].map(|at| succeed(at, |pool, at| pp_put(pool.0, at.0)));
        assert_eq!((adopted, returned, RETURNED.load(Ordering::SeqCst)), (1, [1, 1], round));
    }
    destroy(pool);
}

#[test]
fn pools_open_and_end_in_many_threads() {
    let open_and_destroy = || {
        for _ in 0..ROUNDS / 2 {
            let pool = open("backend=heap; maintenance_thread=0");
            let held = get(pool, 1 << 20).unwrap();
            destroy(pool);
            put(pool, held).unwrap();
        }
    };
    thread::scope(|scope| drop([(); 4].map(|()| scope.spawn(open_and_destroy))));
}
