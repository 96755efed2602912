//! The end of the process over the mock driver.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream};
use mock_driver::MockDriver;
use pinpool::{Backend, Pool, Preset};

use super::valid_stats::valid_stats;

fn pools() -> Vec<Pool> {
    let adaptive = [Backend::Vmm, Backend::Register, Backend::Cuda].map(|backend| (Preset::Adaptive, backend));
    let all = adaptive.into_iter().chain([(Preset::TensorFlow, Backend::Cuda)]);
    let build = |(preset, backend)| {
        let builder = Pool::builder().without_env().preset(preset).backend(backend);
        let builder = builder.wait(Duration::from_millis(100)).idle_timeout(Duration::from_millis(20));
        builder.unstable_settings(|only| only.copies_wait = Some(Duration::from_millis(50))).build().unwrap()
    };
    all.map(build).collect()
}

/// Leaves each pool with a copy that does not end, and an idle buffer.
fn copying(pools: &[Pool], stream: &Arc<CudaStream>) {
    for pool in pools {
        let mut memory = stream.alloc_zeros::<u8>(4096).unwrap();
        pool.get(4096).unwrap().copy_to(stream, &mut memory).unwrap();
        std::mem::forget(memory);
        drop(pool.get(3 << 20).unwrap());
    }
}

/// Uses pools after the driver has shut down, as a driver does in its exit handler.
pub(crate) fn gone_first() {
    let driver = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let pools = pools();
    let _held = driver.hold_all();
    copying(&pools, &stream);
    let kept: Vec<_> = pools.iter().map(|pool| pool.get(10_000).unwrap()).collect();
    driver.shut_down();
    // Meanwhile the maintenance thread calls the driver too.
    thread::sleep(Duration::from_millis(250));
    pools.iter().for_each(Pool::maintain);
    for pool in &pools {
        let error = pool.get(64 << 20).unwrap_err();
        assert!(error.is_backend() || error.is_limit(), "{error}");
        valid_stats(pool);
    }
    drop((kept, pools));
    std::mem::forget((stream, context));
    // Exits before the guard would reset the mock driver, so that the exit handlers find it shut down.
    std::process::exit(0);
}

/// Exits while all streams are held.
pub(crate) fn exit_with_copies() {
    let driver = MockDriver::load();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let pools = pools();
    let _held = driver.hold_all();
    copying(&pools, &stream);
    let busy = pools.clone();
    thread::spawn(move || {
        for round in 0_usize.. {
            busy.iter().for_each(|pool| drop(pool.get(4096 * (1 + round % 40))));
        }
    });
    thread::sleep(Duration::from_millis(150));
    std::process::exit(7);
}
