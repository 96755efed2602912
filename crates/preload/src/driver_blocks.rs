//! The driver's blocks that pools hold, by their first byte.

use std::collections::BTreeMap;

/// A block of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DriverBlock {
    pub(crate) bytes: usize,
    /// The number of its context. Another context may get the same handle before the blocks of this context are forgotten.
    pub(crate) context: u64,
}

#[derive(Debug)]
pub(crate) struct DriverBlocks(BTreeMap<usize, DriverBlock>);

impl DriverBlocks {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(crate) fn insert(&mut self, start: usize, block: DriverBlock) {
        self.0.insert(start, block);
    }

    pub(crate) fn remove(&mut self, start: usize) {
        self.0.remove(&start);
    }

    /// Returns whether the address lies in a block.
    pub(crate) fn contains(&self, address: usize) -> bool {
        self.0.range(..=address).next_back().is_some_and(|(start, block)| address - start < block.bytes)
    }

    /// Returns the block of this context that contains the `bytes` bytes at `start`, with the address of its first byte.
    pub(crate) fn find_containing(&self, start: usize, bytes: usize, context: u64) -> Option<(usize, DriverBlock)> {
        let (&at, &block) = self.0.range(..=start).next_back()?;
        (block.context == context && start - at + bytes <= block.bytes).then_some((at, block))
    }

    /// Forgets the blocks of the context with this number.
    pub(crate) fn forget(&mut self, context: u64) {
        self.0.retain(|_, block| block.context != context);
    }
}
