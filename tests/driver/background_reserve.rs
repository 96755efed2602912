//! A reserve that is not waited for, over the driver: the first step at once, the rest alongside the pool.

use std::time::Duration;

use mock_driver::{Code, MockDriver};
use pinpool::{Backend, Pool};

use crate::child::alone;
use crate::fixture::{MIB, builder, filled, held};
use crate::valid_stats::valid_stats;

const MI: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn pool(backend: &Backend, bytes: u64) -> pinpool::Result<Pool> {
    builder(backend.clone()).max_bytes(256 << 20).reserve_bytes(bytes).setting("reserve_wait", false).build()
}

#[test]
fn a_refusal_of_the_driver_at_each_of_the_first_steps_leaves_what_is_there() {
    let calls =
        [(Backend::Vmm, "cuMemCreate"), (Backend::Register, "cuMemHostRegister_v2"), (Backend::Cuda, "cuMemHostAlloc")];
    for (backend, call) in calls {
        // The granules of a step are created one by one.
        let in_a_step = if matches!(backend, Backend::Vmm) { 4 } else { 1 };
        for failing in 1..3 {
            let driver = MockDriver::load();
            let before = held(&driver);
            let pool = pool(&backend, 0).unwrap();
            driver.fail(call, 1 + failing * in_a_step, Code::OUT_OF_MEMORY);
            pool.reserve(200 * MI).unwrap();
            let error = pool.wait_reserved(PATIENCE).unwrap_err();
            assert!(error.is_backend() && error.to_string().contains("OUT_OF_MEMORY"), "{backend:?}: {error}");
            let there = held(&driver).pinned_bytes - before.pinned_bytes;
            let told = if in_a_step == 4 { failing * 8 * MI } else { 8 * MI + (failing - 1) * 64 * MI };
            assert_eq!((there, pool.stats().memory.reserve_bytes), (told, told), "{backend:?} {failing}");
            drop(filled(&pool, MIB, 2));
            valid_stats(&pool);
            drop(pool);
            assert_eq!((held(&driver), driver.wrong_uses()), (before, Vec::new()), "{backend:?} {failing}");
        }
    }
}

#[test]
fn a_process_may_end_while_the_driver_pins() {
    alone(|| {
        let _driver = MockDriver::load();
        for backend in [Backend::Vmm, Backend::Register] {
            let pool = Pool::builder().without_env().backend(backend).max_bytes(1 << 30);
            std::mem::forget(pool.reserve_bytes(512 << 20).setting("reserve_wait", false).build().unwrap());
        }
    });
}
