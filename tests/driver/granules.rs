//! Granules of several sizes: how many mappings a pool makes, and that memory of every size holds what is written to it.
#![allow(unsafe_code)] // Raises a limit of the process.

use pinpool::Backend;

use crate::fixture::{MIB, builder, filled, held, on_a_stream};

const GIB: usize = 1 << 30;

#[test]
fn a_copy_from_granules_of_two_sizes_arrives() {
    let (driver, stream, mut memory) = on_a_stream(64 * MIB);
    driver.set_sparse(true);
    let before = held(&driver);
    let pool = builder(Backend::Vmm).max_bytes(32 << 30).build().unwrap();
    // Uses all but 32 MiB of the small granules. The next buffer lies half in those, half in larger granules.
    let first = [7680 * MIB, 480 * MIB].map(|len| pool.get(len).unwrap());
    let across = filled(&pool, 64 * MIB, 7);
    let stats = pool.stats();
    assert_eq!((stats.memory.held_bytes, stats.memory.mappings), (8 * GIB as u64 + 32 * MIB as u64, 4096 + 4));
    across.copy_to(&stream, &mut memory).unwrap();
    assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&byte| byte == 7));
    drop((first, pool, memory));
    assert_eq!(held(&driver), before);
}
