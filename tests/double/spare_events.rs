//! Events beyond those that are kept are destroyed, whichever thread finds their copies over.

use std::thread;

use cudarc::driver::{CudaContext, result};
use mock_driver::MockDriver;
use pinpool::{Backend, FenceKind};

use crate::fixture::{builder, filled, stream_and_memory};

#[test]
fn a_thread_without_a_context_destroys_the_events_that_are_too_many() {
    const COPIES: u64 = 1100;
    const KEPT: u64 = 1024;
    let double = MockDriver::load();
    // A context that no other test uses, so that it has no other idle events.
    double.renew_contexts();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Vmm).unstable_fence(FenceKind::Event).build().unwrap();
    let before = double.counts().events;
    let gate = double.hold(stream.cu_stream());
    for _ in 0..COPIES {
        drop(filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap());
    }
    assert!(double.counts().events - before >= COPIES);
    drop(gate);
    stream.synchronize().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(result::ctx::get_current(), Ok(None));
            pool.maintain();
            assert_eq!(pool.stats().copies.in_flight, 0);
            assert_eq!(result::ctx::get_current(), Ok(None));
        });
    });
    // One more for each copy is cudarc's own.
    assert!(double.counts().events - before <= KEPT + 16, "{} are left", double.counts().events - before);
}
