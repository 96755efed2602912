//! Tests on a real device: the assumed behavior of the driver, and copies, with every byte compared after it is copied back.
//!
//! Without a device each test prints `skipped: why` and passes. With `PINPOOL_REQUIRE_GPU=1` a missing device is a failure, and
//! so is a missing backend, unless it is named, as in `PINPOOL_GPU_EXCEPT=vmm`. `PINPOOL_GPU_BACKENDS=cuda` limits the test to
//! the named backends:
//!
//! ```text
//! PINPOOL_REQUIRE_GPU=1 cargo test --release --all-features --test gpu
//! ```
//!
//! The binary needs no other file, so it can be copied to a bare machine. The tests run one at a time without further options.
//!
//! | file | holds |
//! | --- | --- |
//! | `device.rs` | the device, its backends, streams that are held |
//! | `batch.rs` | batches with known bytes |
//! | `methods.rs` | the methods of copying a buffer |
//! | `driver_facts.rs` | the assumed behavior of the driver, checked on the mock driver too |
//! | `copies.rs` | one copy at a time, held while it is observed |
//! | `memory.rs` | memory that is remapped and released alongside copies and after them; a reserve |
//! | `capture.rs` | the pool alongside graph captures |
//! | `kernels.rs` | kernels that run while memory is pinned, remapped and released, and that read a buffer in place |
//! | `ends.rs` | exit with copies in flight, fork after growth: each in its own process |
//! | `with_torch.py`, `tests/in_process` | a pool in PyTorch's process |
//! | `torch_allocator.py` | PyTorch with a pool for its pinned memory |
//! | `pinned_copies.py` | a PyTorch program for `pinpool run` |
//! | `libraries.py` | copies by PyTorch, CuPy and JAX from memory of the wheel's pool |
//! | `peers.py` | timings of PyTorch's and CuPy's pinned memory |
//!
//! `run.sh` runs all of this and the benches of the tool on a machine without cargo, from binaries that `collect.sh` built.
//!
//! Each scenario is one function over a backend. The mock driver is never loaded here, because a process has one driver, here
//! the machine's driver.
#![cfg(feature = "cuda")]
#![allow(clippy::print_stdout)] // Prints the outcome for each fact.
#![allow(unsafe_code)] // The contract suite, the facts about the driver, and work that the pool does not track.

use std::env;

use cudarc::driver::result;
use pinpool::unstable::backend::{CudaSource, RegisterSource, VmmSource};
use pinpool_testing::check_source;
use test_common::{until, valid_stats};

mod batch;
mod capture;
mod copies;
mod device;
mod driver_facts;
mod ends;
mod events_only;
mod kernels;
mod memory;
mod methods;

const MIB: usize = 1 << 20;

/// Names the fact that a process checks.
const FACT: &str = "PINPOOL_GPU_FACT";

/// Checks each fact in its own process, so that one that fails, hangs or breaks the device does not hide others. Prints a
/// JSON line for each fact.
#[test]
fn every_fact_about_the_driver_holds_on_the_device() {
    if device::take().is_none() {
        return;
    }
    let mut wrong = Vec::new();
    for (name, _) in driver_facts::FACTS {
        let outcome = device::in_a_process("one_fact", (FACT, name));
        println!("{{\"fact\":\"{name}\",\"outcome\":\"{outcome}\"}}");
        if outcome != "holds" {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "these facts do not hold: {wrong:?}");
}

#[test]
#[ignore = "a process that checks one fact of the driver"]
fn one_fact() {
    let wanted = env::var(FACT).unwrap();
    let device = device::take().expect("a device, as for the test above");
    let (_, fact) = driver_facts::FACTS.iter().find(|(name, _)| *name == wanted).unwrap();
    fact(&device.context);
}

#[test]
fn the_sources_keep_the_contract() {
    let Some(device) = device::take() else { return };
    let cuda = CudaSource::new(0).unwrap();
    check_source(&cuda);
    // After other code has allocated a small block, the driver's next block may lie anywhere in a page.
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
