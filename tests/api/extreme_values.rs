//! Lengths and times that no machine has are errors or mean "for ever", and never a panic.

use std::thread;
use std::time::Duration;

use pinpool::{Backend, Pool};

fn pool(max_bytes: Option<u64>) -> Pool {
    Pool::builder().without_env().backend(Backend::Heap).max_bytes(max_bytes).build().unwrap()
}

#[test]
fn a_reserve_that_no_number_of_granules_makes_is_refused() {
    for bytes in [u64::MAX, u64::MAX - 1, u64::MAX - (1 << 20)] {
        let pool = pool(None);
        let refusal = pool.prewarm(bytes).unwrap_err();
        assert!(refusal.is_limit() || refusal.is_backend(), "{refusal}");
        assert_eq!(pool.stats().pinned_bytes, 0);
        let built = Pool::builder().without_env().backend(Backend::Mlock).max_bytes(None).reserve_bytes(bytes).build();
        assert_eq!(built.unwrap_err().to_string(), refusal.to_string().replace("`heap`", "`mlock`"));
    }
}

#[test]
fn a_wait_without_end_ends_with_room() {
    let pool = pool(Some(4 << 20));
    let held = pool.get(3 << 20).unwrap();
    let waiting = {
        let pool = pool.clone();
        thread::spawn(move || pool.get_timeout(3 << 20, Duration::MAX).map(|buffer| buffer.len()))
    };
    while pool.stats().waits == 0 {
        thread::yield_now();
    }
    drop(held);
    assert_eq!(waiting.join().unwrap().unwrap(), 3 << 20);
}
