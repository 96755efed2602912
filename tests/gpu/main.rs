//! On a real device: the assumed behaviour of the driver, and every copied byte compared after it is copied back.
//!
//! Without a device each test says `skipped: why` and passes; `PINPOOL_REQUIRE_GPU=1` turns that into a failure:
//!
//! ```text
//! PINPOOL_REQUIRE_GPU=1 cargo test --release --all-features --test gpu
//! ```
//!
//! The binary needs no other file, so it can be copied to a bare machine. Tests take turns by themselves.
//!
//! | file | holds |
//! | --- | --- |
//! | `device.rs` | the device, its back-ends, streams that are held |
//! | `batch.rs` | batches with known bytes |
//! | `methods.rs` | the methods of copying a buffer |
//! | `driver_facts.rs` | the assumed behaviour of the driver, checked on the double too |
//! | `churn.rs` | many threads, many streams, little memory |
//! | `copies.rs` | one copy at a time, held while it is observed |
//! | `memory.rs` | memory that is committed, remapped and released beside copies and after them |
//! | `capture.rs` | the pool beside graph captures |
//!
//! Each scenario is one function over a back-end. Never loads the driver double: a process has one driver, here that of the
//! machine.
#![allow(unsafe_code)] // The contract suite, the facts about the driver, and work that the pool does not track.

use cudarc::driver::result;
use pinpool::backend::{CudaSource, RegisterSource, VmmSource};
use pinpool::testing::check_source;

mod batch;
mod capture;
mod churn;
mod copies;
mod device;
mod driver_facts;
mod memory;
mod methods;

const MIB: usize = 1 << 20;

#[test]
fn every_fact_about_the_driver_holds_on_the_device() {
    let Some(device) = device::take() else { return };
    driver_facts::check(&device.context);
}

#[test]
fn the_sources_keep_the_contract() {
    let Some(device) = device::take() else { return };
    let cuda = CudaSource::new(0).unwrap();
    check_source(&cuda);
    // After a small block of other code the driver's next block may lie anywhere in a page.
    device.context.bind_to_thread().unwrap();
    // SAFETY: freed below, never touched.
    let odd = unsafe { result::malloc_host(100, 0) }.unwrap();
    check_source(&cuda);
    // SAFETY: allocated above.
    unsafe { result::free_host(odd) }.unwrap();
    device.on_each(|rig| match rig.name() {
        "vmm" => check_source(&VmmSource::new(0, None).unwrap()),
        "register" => check_source(&RegisterSource::new(0, None).unwrap()),
        _ => {}
    });
}
