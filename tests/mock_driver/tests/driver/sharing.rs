//! What calls share: the lock of enqueues, and the turn of host functions.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, result};
use mock_driver::MockDriver;

use crate::virtual_memory::{create, release};

#[test]
fn a_held_call_of_virtual_memory_holds_no_enqueue_up() {
    let double = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let gate = double.hold_call("cuMemCreate");
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

static ENTERED: AtomicU64 = AtomicU64::new(0);
static MAY_END: AtomicBool = AtomicBool::new(false);

extern "C" fn wait_for_leave(_argument: *mut c_void) {
    ENTERED.fetch_add(1, Ordering::SeqCst);
    while !MAY_END.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn a_host_function_that_waits_holds_up_those_of_other_streams() {
    let _double = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    ENTERED.store(0, Ordering::SeqCst);
    MAY_END.store(false, Ordering::SeqCst);
    for stream in &streams {
        // SAFETY: a live stream and a function without an argument.
        let launched =
            unsafe { result::stream::launch_host_function(stream.cu_stream(), wait_for_leave, std::ptr::null_mut()) };
        launched.unwrap();
    }
    while ENTERED.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(20));
    assert_eq!(ENTERED.load(Ordering::SeqCst), 1, "one after the other");
    // Other work of other streams continues.
    context.new_stream().unwrap().synchronize().unwrap();
    MAY_END.store(true, Ordering::SeqCst);
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(ENTERED.load(Ordering::SeqCst), 2);
}
