//! A thread that registers memory for long holds up no other past its wait.

use std::thread;
use std::time::{Duration, Instant};

use mock_driver::MockDriver;
use pinpool::{Backend, Pool};

use crate::fixture::{MIB, builder};
use crate::valid_stats::valid_stats;

/// No request of this file takes as long, unless it hangs.
const HANGS: Duration = Duration::from_secs(60);

fn registering() -> Pool {
    builder(Backend::Register).max_bytes(1 << 30).wait(Duration::from_millis(20)).build().unwrap()
}

#[test]
fn a_get_does_not_wait_past_its_deadline_for_the_registration_of_another_thread() {
    let driver = MockDriver::load();
    let pool = registering();
    let held = driver.hold_call("cuMemHostRegister_v2");
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
        assert!(ended, "a request waited for the registration of another thread");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.is_backend());
        let text = error.to_string();
        assert!(text.contains("another thread") && text.contains("PINPOOL_WAIT"), "{text}");
        registering.join().unwrap().unwrap();
    });
    valid_stats(&pool);
    drop(pool.get(4 * MIB).unwrap());
}
