//! Granules of several sizes: how many mappings a pool makes, and that memory of every size holds what is written to it.
#![allow(unsafe_code)] // Raises a limit of the process.

use std::time::Duration;

use cudarc::driver::CudaContext;
use mock_driver::MockDriver;
use pinpool::Backend;

use crate::fixture::{MIB, builder, filled, held, stream_and_memory};

const GIB: usize = 1 << 30;
const TIB: u64 = 1 << 40;

/// The mock driver keeps a descriptor for each granule. Returns how many the process may have.
fn raise_descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` lives as long as the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    limit.rlim_cur
}

#[test]
fn a_pool_of_a_terabyte_makes_at_most_8192_mappings() {
    let descriptors = raise_descriptor_limit();
    if descriptors < 8192 {
        // Not `eprintln`: the harness hides it for a test that passes.
        let line =
            format!("skipped: the double keeps a descriptor for each granule, and only {descriptors} are allowed\n");
        std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
        return;
    }
    let double = MockDriver::load();
    double.set_sparse(true);
    let before = held(&double);
    let pool = builder(Backend::Vmm).max_bytes(TIB).wait(Duration::ZERO).build().unwrap();
    let buffers: Vec<_> = std::iter::from_fn(|| pool.get(3 * GIB).ok()).collect();
    let (stats, now) = (pool.stats(), held(&double));
    assert!(stats.memory.held_bytes > TIB - (4 * GIB) as u64, "{} B", stats.memory.held_bytes);
    let (pinned_bytes, mappings) = (now.pinned_bytes - before.pinned_bytes, now.mappings - before.mappings);
    assert_eq!((pinned_bytes, mappings), (stats.memory.held_bytes, stats.memory.mappings), "as the pool counts them");
    assert_eq!(now.granules - before.granules, mappings);
    assert!((4096..=8192).contains(&stats.memory.mappings), "{} mappings", stats.memory.mappings);
    drop(buffers);
    drop(pool);
    assert_eq!(held(&double), before);
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn a_copy_from_granules_of_two_sizes_arrives() {
    let double = MockDriver::load();
    double.set_sparse(true);
    let before = held(&double);
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 64 * MIB);
    let pool = builder(Backend::Vmm).max_bytes(32 << 30).build().unwrap();
    // All but 32 MiB of the small granules, and then half in those and half in the next.
    let first = [7680 * MIB, 480 * MIB].map(|len| pool.get(len).unwrap());
    let across = filled(&pool, 64 * MIB, 7);
    let stats = pool.stats();
    assert_eq!((stats.memory.held_bytes, stats.memory.mappings), (8 * GIB as u64 + 32 * MIB as u64, 4096 + 4));
    across.copy_to(&stream, &mut memory).unwrap();
    let arrived = stream.clone_dtoh(&memory).unwrap();
    assert!(arrived.iter().all(|&byte| byte == 7));
    drop((first, pool, memory));
    assert_eq!(held(&double), before);
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}
