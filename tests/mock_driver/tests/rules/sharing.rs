//! The enqueue lock.

use std::thread;

use cudarc::driver::CudaContext;
use mock_driver::MockDriver;

use crate::virtual_memory::{create, release};

#[test]
fn a_held_call_of_virtual_memory_holds_no_enqueue_up() {
    let driver = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let gate = driver.hold_call("cuMemCreate");
    thread::scope(|scope| {
        let creating = scope.spawn(|| release(create().unwrap()));
        gate.wait_for(1);
        stream.synchronize().unwrap();
        stream.record_event(None).unwrap().synchronize().unwrap();
        assert!(!creating.is_finished());
        drop(gate);
        creating.join().unwrap();
    });
}
