//! A thread that registers memory for long holds up no other past its wait.

use std::thread;
use std::time::{Duration, Instant};

use driver_double::Double;
use pinpool::{Backend, Pool};

use crate::fixture::{MIB, builder};

/// No get of this file takes as long, unless it hangs.
const HANGS: Duration = Duration::from_secs(20);

fn registering() -> Pool {
    builder(Backend::Register).max_bytes(1 << 30).wait(Duration::from_millis(20)).build().unwrap()
}

#[test]
fn a_get_does_not_wait_past_its_deadline_for_the_registration_of_another_thread() {
    let double = Double::load();
    let pool = registering();
    let held = double.hold_call("cuMemHostRegister_v2");
    thread::scope(|scope| {
        let registering = scope.spawn(|| pool.get(8 * MIB).map(drop));
        held.wait_for(1);
        let waiting = scope.spawn(|| pool.get(4 * MIB).map(drop));
        let begun = Instant::now();
        while !waiting.is_finished() && begun.elapsed() < HANGS {
            thread::sleep(Duration::from_millis(1));
        }
        let ended = waiting.is_finished();
        assert!(!registering.is_finished());
        drop(held);
        assert!(ended, "a get waited for the registration of another thread");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.is_backend());
        let text = error.to_string();
        assert!(text.contains("another thread") && text.contains("PINPOOL_WAIT"), "{text}");
        registering.join().unwrap().unwrap();
    });
    assert_eq!(pool.stats().validate(), Ok(()));
    drop(pool.get(4 * MIB).unwrap());
}

#[test]
fn a_get_is_served_when_the_registration_of_another_thread_ends_in_time() {
    let double = Double::load();
    let pool = registering();
    let held = double.hold_call("cuMemHostRegister_v2");
    thread::scope(|scope| {
        let registering = scope.spawn(|| pool.get(8 * MIB).map(drop));
        held.wait_for(1);
        let waiting = scope.spawn(|| pool.get_timeout(4 * MIB, HANGS).map(drop));
        thread::sleep(Duration::from_millis(20));
        drop(held);
        registering.join().unwrap().unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_trim_does_not_wait_for_the_page_lock_of_another_thread() {
    for (backend, page_lock) in [(Backend::Register, "cuMemHostRegister_v2"), (Backend::Cuda, "cuMemHostAlloc")] {
        let double = Double::load();
        let pool = builder(backend).max_bytes(1 << 30).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        let held = double.hold_call(page_lock);
        thread::scope(|scope| {
            let registering = scope.spawn(|| pool.get(64 * MIB).map(drop));
            held.wait_for(1);
            let trimming = scope.spawn(|| pool.trim(0));
            let begun = Instant::now();
            while !trimming.is_finished() && begun.elapsed() < HANGS {
                thread::sleep(Duration::from_millis(1));
            }
            let ended = trimming.is_finished();
            let awaiting_bytes = pool.stats().awaiting_release_bytes;
            drop(held);
            assert!(ended, "a trim waited for a page-lock of another thread");
            assert!(awaiting_bytes >= 3 << 20, "{awaiting_bytes}");
            registering.join().unwrap().unwrap();
        });
        pool.trim(0);
        assert_eq!(pool.stats().pinned_bytes, 0, "what waited is released by the next call");
    }
}
