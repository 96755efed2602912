//! A thread that is in a query of the driver holds up no other.

use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;
use mock_driver::MockDriver;
use pinpool::Backend;

use crate::events_only::EventsOnly;
use crate::fixture::{MIB, builder, filled, stream_and_memory};
use crate::until::{in_time, until};

#[test]
fn a_trim_does_not_ask_a_driver_that_stands_still() {
    for backend in [Backend::Register, Backend::Cuda] {
        let driver = MockDriver::load();
        let _events = EventsOnly::begin();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, MIB);
        let pool = builder(backend).max_bytes(16 << 20).wait(Duration::from_millis(20)).build().unwrap();
        drop(pool.get(8 * MIB).unwrap());
        let copying = filled(&pool, MIB, 7);
        let gate = driver.hold_call("cuEventQuery");
        drop(copying.copy_to(&stream, &mut memory).unwrap());
        let polling = pool.clone();
        let blocked = thread::spawn(move || polling.maintain());
        gate.wait_for(1);
        // Longer than a driver is given to answer.
        thread::sleep(Duration::from_millis(50));
        let getting = pool.clone();
        in_time(move || {
            getting.trim(0);
            assert_eq!((getting.stats().copies.in_flight, getting.stats().memory.quarantined), (1, 0));
        });
        drop(gate);
        blocked.join().unwrap();
        stream.synchronize().unwrap();
        until("all is released", || {
            pool.trim(0);
            pool.stats().memory.held_bytes == 0
        });
        assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0));
    }
}
