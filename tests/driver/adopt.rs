//! User memory over the driver: pinned, copied from, and unpinned after its last copy, or never.
#![allow(unsafe_code)] // Pins and adopts memory.

use std::ptr::NonNull;
use std::sync::Arc;

use mock_driver::{Code, MockDriver};
use pinpool::{Backend, PinnedBuf, PinnedBy, Pool, UserMemory};

use super::child::{alone, in_a_child};
use super::fixture::{MIB, builder, held, maintain_until, on_a_stream};
use crate::valid_stats::valid_stats;

#[repr(align(4096))]
struct Pages([u8; MIB]);

/// Pins user pages as memory of `pool`. They share `alive`, so its count shows whether they still exist.
fn locked(pool: &Pool, alive: &Arc<()>) -> Arc<UserMemory<(Box<Pages>, Arc<()>)>> {
    let mut pages = Box::new(Pages([9; MIB]));
    // SAFETY: mapped as long as `pages`, which nothing else uses.
    Arc::new(unsafe { pool.pin(NonNull::from(pages.0.as_mut_slice()), (pages, alive.clone())) }.unwrap())
}

fn lent(pool: &Pool, locked: &Arc<UserMemory<(Box<Pages>, Arc<()>)>>) -> PinnedBuf {
    let kept = locked.clone();
    // SAFETY: only the buffer uses the bytes, which stay pinned until the call.
    unsafe { pool.adopt(locked.memory(), locked.pinned_by(), move || drop(kept)) }.unwrap()
}

#[test]
fn user_memory_stays_registered_until_its_last_copy() {
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        let (driver, stream, mut memory) = on_a_stream(MIB);
        let pool = builder(backend).build().unwrap();
        let alive = Arc::new(());
        let before = held(&driver).registrations;
        let locked = locked(&pool, &alive);
        assert_eq!((locked.pinned_by(), held(&driver).registrations), (Some(PinnedBy::Driver), before + 1));
        let waits = driver.hold(stream.cu_stream());
        let copy = lent(&pool, &locked).copy_to(&stream, &mut memory).unwrap();
        drop(locked);
        pool.maintain();
        let registered_and_alive = || (held(&driver).registrations, Arc::strong_count(&alive));
        assert_eq!((pool.stats().copies.in_flight, registered_and_alive()), (1, (before + 1, 2)));
        drop(waits);
        copy.wait().unwrap();
        pool.maintain();
        assert_eq!((pool.stats().requests.adopted, registered_and_alive()), (0, (before, 1)));
        assert_eq!(pool.stats().memory.user_memory_bytes, 0);
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![9; MIB]);
    }
}

#[test]
fn memory_with_unknown_device_work_is_never_returned() {
    let (driver, stream, mut memory) = on_a_stream(MIB);
    let pool = builder(Backend::Register).build().unwrap();
    let alive = Arc::new(());
    let held_copy = driver.hold(stream.cu_stream());
    lent(&pool, &locked(&pool, &alive)).copy_to(&stream, &mut memory).unwrap();
    driver.lose_device(Code::LAUNCH_FAILED);
    drop(held_copy);
    maintain_until(&pool, |stats| stats.memory.quarantined > 0);
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.quarantined, stats.requests.adopted, stats.memory.user_memory_bytes), (1, 1, MIB as u64));
    drop(pool);
    assert_eq!(Arc::strong_count(&alive), 2, "the pages stay mapped");
}

#[test]
fn a_failed_pin_is_an_error_and_a_failed_unpin_keeps_the_memory() {
    let driver = MockDriver::load();
    let pool = builder(Backend::Register).build().unwrap();
    let alive = Arc::new(());
    driver.fail("cuMemHostRegister_v2", 1, Code::OUT_OF_MEMORY);
    let mut pages = Box::new(Pages([9; MIB]));
    // SAFETY: mapped as long as `pages`, which nothing else uses.
    let error = unsafe { pool.pin(NonNull::from(pages.0.as_mut_slice()), pages) }.unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("cuMemHostRegister"), "{error}");
    assert_eq!(pool.stats().memory.user_memory_bytes, 0);
    let locked = locked(&pool, &alive);
    driver.fail("cuMemHostUnregister", 1, Code::UNKNOWN);
    drop(locked);
    assert_eq!((Arc::strong_count(&alive), pool.stats().memory.user_memory_bytes), (2, MIB as u64));
}

#[test]
fn forked_children_have_the_pages_again_after_they_are_unpinned() {
    alone(|| {
        let driver = MockDriver::load();
        let pool = builder(Backend::Register).build().unwrap();
        let mut pages = Box::new(Pages([9; MIB]));
        let bytes = NonNull::from(pages.0.as_mut_slice());
        // SAFETY: mapped as long as `pages`, which nothing else uses.
        drop(unsafe { pool.pin(bytes, ()) }.unwrap());
        driver.fail("cuMemHostRegister_v2", 1, Code::OUT_OF_MEMORY);
        // SAFETY: as above.
        unsafe { pool.pin(bytes, ()) }.unwrap_err();
        in_a_child(|| vec![("the pages are there", pages.0.iter().all(|&byte| byte == 9))]);
    });
}
