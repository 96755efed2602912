//! Many threads at once, on one pool and on many.

use std::sync::mpsc;
use std::thread;

use crate::fixture::{Address, HEAP, bytes, close, get, open, put, stats};

const THREADS: u8 = 8;
const ROUNDS: usize = 500;

#[test]
fn no_two_threads_hold_the_same_bytes() {
    let pool = open(HEAP);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let len = 1 + (round * 7919 + usize::from(thread) * 104_729) % (128 << 10);
                    let held = get(pool, len).unwrap();
                    let mark = thread.wrapping_mul(31).wrapping_add(u8::try_from(round % 256).unwrap());
                    bytes(held, len).fill(mark);
                    thread::yield_now();
                    assert!(bytes(held, len).iter().all(|&byte| byte == mark), "written to by another");
                    put(pool, held).unwrap();
                }
            });
        }
    });
    let found = stats(pool);
    assert_eq!(found["requests"]["returned"], usize::from(THREADS) * ROUNDS, "{found}");
    close(pool);
}

#[test]
fn one_thread_gets_and_others_put() {
    let pool = open(HEAP);
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel::<Address>()).unzip();
    thread::scope(|scope| {
        for receiver in receivers {
            scope.spawn(move || receiver.into_iter().for_each(|held| put(pool, held).unwrap()));
        }
        for round in 0..ROUNDS {
            senders[round % 4].send(get(pool, 4096).unwrap()).unwrap();
        }
        drop(senders);
    });
    assert_eq!(stats(pool)["requests"]["returned"], ROUNDS);
    close(pool);
}

#[test]
fn of_many_threads_that_put_one_buffer_one_succeeds() {
    let pool = open(HEAP);
    for _ in 0..50 {
        let held = get(pool, 4096).unwrap();
        let done = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(move || put(pool, held).is_ok())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|&done| done).count()
        });
        assert_eq!(done, 1);
    }
    close(pool);
}

#[test]
fn pools_open_and_close_in_many_threads() {
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let pool = open("backend=heap; background_thread=0");
                    let held = get(pool, 1 << 20).unwrap();
                    close(pool);
                    put(pool, held).unwrap();
                }
            });
        }
    });
}
