//! The table of blocks that come from pools.

#[path = "../../src/driver_blocks.rs"]
mod table;

use table::{DriverBlock, DriverBlocks};

#[test]
fn a_region_is_found_only_in_a_block_of_its_context() {
    let mut blocks = DriverBlocks::new();
    let block = |context| DriverBlock { bytes: 0x3000, context };
    [(0x1000, 1), (0x5000, 1), (0x9000, 2)].into_iter().for_each(|(at, context)| blocks.insert(at, block(context)));
    assert_eq!(blocks.find_containing(0x2000, 0x2000, 1), Some((0x1000, block(1))));
    blocks.remove(0x5000);
    for (why, at, bytes, context) in [
        ("its block was forgotten, and the block before belongs to another region", 0x5000, 0x1000, 1),
        ("it ends outside", 0x2000, 0x2001, 1),
        ("the block is of another context of the same handle", 0x9000, 0x1000, 1),
        ("there is no block before it", 0x500, 0x100, 1),
    ] {
        assert_eq!(blocks.find_containing(at, bytes, context), None, "{why}");
    }
    blocks.forget(1);
    assert!(!blocks.contains(0x1000) && blocks.contains(0x9000), "a context forgets its own blocks alone");
}
