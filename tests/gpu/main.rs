//! On a real device: what the driver is taken to do, and every copied byte compared after its way there and back.
//!
//! Without a device each test says `skipped: why` and passes; `PINPOOL_REQUIRE_GPU=1` turns that into a failure:
//!
//! ```text
//! PINPOOL_REQUIRE_GPU=1 cargo test --release --all-features --test gpu
//! ```
//!
//! The binary needs nothing beside it, so it can be carried to a bare machine. Tests take turns by themselves.
//!
//! | file | owns |
//! | --- | --- |
//! | `device.rs` | the device, its back-ends, streams that stand still |
//! | `batch.rs` | bytes that are known |
//! | `ways.rs` | the ways by which a buffer is sent |
//! | `churn.rs` | many threads, many streams, little memory |
//! | `copies.rs` | one copy at a time, held up where it matters |
//! | `memory.rs` | memory that comes, moves and goes, beside copies and after them |
//! | `capture.rs` | the pool beside graphs being captured |
//!
//! Each scenario is one function over a back-end. Never loads the driver double: a process has one driver, and here it is
//! the machine's own.
#![allow(unsafe_code)] // The contract suite, the facts about the driver, and work that the pool does not know of.

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
mod ways;

const MIB: usize = 1 << 20;

#[test]
fn the_driver_does_what_the_double_says() {
    let Some(device) = device::take() else { return };
    driver_facts::check(&device.context);
}

#[test]
fn the_sources_keep_the_contract() {
    let Some(device) = device::take() else { return };
    let cuda = CudaSource::new(0).unwrap();
    check_source(&cuda);
    // Small blocks of others put the driver's next one anywhere.
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
