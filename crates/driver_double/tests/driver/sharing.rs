//! What calls share: the lock of enqueues, the thread of host functions, chunks of small blocks.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result};
use driver_double::Double;

use crate::virtual_memory::{create, release};

#[test]
fn a_call_of_virtual_memory_waits_behind_a_free_that_waits_for_the_device() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: freed below.
    let block = unsafe { result::malloc_host(4096, 0) }.unwrap().expose_provenance();
    let gate = double.hold_call("cuMemFreeHost");
    thread::scope(|scope| {
        let freeing = scope.spawn(|| {
            context.bind_to_thread().unwrap();
            // SAFETY: allocated above, freed once.
            unsafe { result::free_host(std::ptr::with_exposed_provenance_mut(block)) }.unwrap();
        });
        gate.wait_for(1);
        let creating = scope.spawn(|| release(create().unwrap()));
        thread::sleep(Duration::from_millis(20));
        assert!(!creating.is_finished());
        drop(gate);
        freeing.join().unwrap();
        creating.join().unwrap();
    });
}

#[test]
fn a_held_call_of_virtual_memory_holds_no_enqueue_up() {
    let double = Double::load();
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

/// Calls that a loop without a pause makes while one enqueue of another thread waits.
fn overtaking(context: &CudaContext, stream: &CudaStream) -> u64 {
    let (loops, waits, ended) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            context.bind_to_thread().unwrap();
            while !ended.load(Ordering::SeqCst) {
                // SAFETY: an address that is nobody's: refused, after its delay under the lock.
                let _refused = unsafe { result::free_host(std::ptr::without_provenance_mut(8)) };
                loops.fetch_add(u64::from(waits.load(Ordering::SeqCst)), Ordering::SeqCst);
            }
        });
        while loops.load(Ordering::SeqCst) == 0 {
            waits.store(true, Ordering::SeqCst);
            thread::yield_now();
        }
        let before = loops.load(Ordering::SeqCst);
        stream.record_event(None).unwrap();
        let after = loops.load(Ordering::SeqCst);
        ended.store(true, Ordering::SeqCst);
        after - before
    })
}

#[test]
fn a_loop_without_a_pause_overtakes_an_enqueue_that_waits() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    double.delay("cuMemFreeHost", Duration::from_micros(300));
    // A fair lock lets at most the call under way and one more through. The scheduler may pause the loop now and then.
    let most = (0..200).map(|_| overtaking(&context, &stream)).find(|&calls| calls > 3);
    assert!(most.is_some(), "never overtaken more than three times in a row");
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
    let _double = Double::load();
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
