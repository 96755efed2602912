//! Ordinary memory: the same mappings as `mlock`, without the lock. Never pinned, and says so.
#![allow(unsafe_code)] // Implements the unsafe `Source`.

use super::pages::{self, Commit, Numbering};
use super::{Region, Source, SourceError};

/// Anonymous mappings that are not page-locked.
#[derive(Debug, Default)]
pub struct HeapSource {
    numbering: Numbering,
}

impl HeapSource {
    /// A source of ordinary memory.
    pub fn new() -> Self {
        Self::default()
    }
}

// SAFETY: C1 to C3 are the kernel's word on a private anonymous mapping: zeroed pages at a fixed page-aligned address,
// until `munmap`. C4: `Numbering`.
unsafe impl Source for HeapSource {
    fn name(&self) -> &'static str {
        "heap"
    }

    fn is_pinned(&self) -> bool {
        false
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        pages::map(len_bytes, Commit::Yes, self.numbering.next())
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: the region is of this source, hence of `map`, and unused.
        unsafe { pages::unmap(region) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::suite;

    #[test]
    fn keeps_the_contract() {
        suite::run(&HeapSource::new());
    }

    #[test]
    fn says_that_it_is_not_pinned() {
        assert!(!HeapSource::new().is_pinned());
    }
}
