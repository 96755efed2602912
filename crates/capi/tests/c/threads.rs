//! Many threads at once, on one pool and on many.

use std::thread;

use crate::fixture::{HEAP, close, get, open, put};

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
