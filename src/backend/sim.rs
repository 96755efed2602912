//! Address space without memory behind it: a stated size, mapped lazily, for replay and tests.
//!
//! The pool never touches what a source hands out, so a replay of terabytes costs nothing; a user who does touch it gets
//! zeroed pages, one by one. Addresses recur after a release, ids do not.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::pages::{self, Commit, Numbering};
use super::ranges::{self, Start};
use super::{AddressRange, PAGE_BYTES, Region, Source, SourceError, VirtualMemory};

/// Hands out addresses up to a stated total.
#[derive(Debug)]
pub struct SimSource {
    numbering: Numbering,
    total_bytes: u64,
    /// Regions and locked granules together.
    held_bytes: AtomicU64,
    spans: bool,
}

impl SimSource {
    /// Size of `PINPOOL_BACKEND=sim` without a number: 16 TiB, more than any host has and a fraction of the address space.
    pub const DEFAULT_TOTAL_BYTES: u64 = 16 << 40;

    /// A source that spans, and hands out at most `total_bytes` at one time.
    pub fn new(total_bytes: u64) -> Self {
        Self { numbering: Numbering::default(), total_bytes, held_bytes: AtomicU64::new(0), spans: !cfg!(miri) }
    }

    /// As [`SimSource::new`], with walls: it acquires and releases regions, and has no span.
    pub fn discrete(total_bytes: u64) -> Self {
        Self { spans: false, ..Self::new(total_bytes) }
    }

    fn claim(&self, bytes: u64) -> Result<(), SourceError> {
        let claimed = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= self.total_bytes);
        // Relaxed: the count guards no other memory.
        self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claimed).map(drop).map_err(|held| {
            SourceError::new("sim", format!("{bytes} B refused, {held} B of {} B are handed out", self.total_bytes))
        })
    }

    fn give_back(&self, bytes: u64) {
        // Relaxed, as in `claim`.
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

// SAFETY: C1 to C3 as for any private anonymous mapping (`pages`); `MAP_NORESERVE` changes when a page gets memory, not
// what it holds. C4: `Numbering`.
unsafe impl Source for SimSource {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn is_pinned(&self) -> bool {
        false
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes) as u64;
        self.claim(held_bytes)?;
        pages::map(len_bytes, Commit::Lazily, self.numbering.next()).inspect_err(|_| self.give_back(held_bytes))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let held_bytes = self.held_bytes(region.len_bytes()) as u64;
        // SAFETY: the caller's promise: the region is of this source, hence of `map`, and unused.
        unsafe { pages::unmap(region) }?;
        self.give_back(held_bytes);
        Ok(())
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.spans.then_some(self)
    }
}

// SAFETY: S1, S2 and S4 are the kernel's word on one readable and writable mapping (`ranges`). S3: it is zero until
// written to, and unlocking empties it. S5 is about bytes that are only counted.
unsafe impl VirtualMemory for SimSource {
    fn granule_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        ranges::reserve(len_bytes, Start::Open)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        range.at(offset, bytes).and_then(|_| self.claim(bytes as u64))
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: of `reserve`, and unused.
        unsafe { ranges::empty(range.at(offset, bytes)?, bytes) }?;
        self.give_back(bytes as u64);
        Ok(())
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: of `reserve`, and unused.
        unsafe { ranges::unreserve(range) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::suite::check_source;

    #[test]
    fn keeps_the_contract() {
        check_source(&SimSource::new(SimSource::DEFAULT_TOTAL_BYTES));
    }

    #[test]
    fn hands_out_its_stated_size_and_no_more() {
        let source = SimSource::new(3 * PAGE_BYTES as u64);
        let first = source.acquire(PAGE_BYTES + 1).unwrap();
        let second = source.acquire(1).unwrap();
        let refusal = source.acquire(1).unwrap_err().to_string();
        assert!(refusal.contains("12288 B of 12288 B"), "{refusal}");
        // SAFETY: acquired above, no reference into it was made.
        unsafe { source.release(first) }.unwrap();
        let third = source.acquire(2 * PAGE_BYTES).unwrap();
        assert_eq!(third.id(), 2, "a refused acquire uses up no id, a recurring address gets a new one");
        for region in [second, third] {
            // SAFETY: acquired above, no reference into it was made.
            unsafe { source.release(region) }.unwrap();
        }
    }

    #[test]
    fn walled_keeps_the_contract_and_has_no_span() {
        let source = SimSource::discrete(SimSource::DEFAULT_TOTAL_BYTES);
        check_source(&source);
        assert!(source.virtual_memory().is_none());
    }

    #[cfg(not(miri))]
    #[test]
    fn regions_and_granules_share_the_stated_size() {
        let source = SimSource::new(4 * PAGE_BYTES as u64);
        let range = source.reserve(1 << 40).unwrap();
        let region = source.acquire(PAGE_BYTES).unwrap();
        // SAFETY: of this range, and not locked.
        unsafe { source.commit(&range, 0, 3 * PAGE_BYTES) }.unwrap();
        // SAFETY: locked, and ours alone.
        unsafe { range.start().write(7) };
        // SAFETY: of this range, and not locked.
        let refusal = unsafe { source.commit(&range, 1 << 39, PAGE_BYTES) }.unwrap_err().to_string();
        assert!(refusal.contains("16384 B of 16384 B"), "{refusal}");
        assert!(source.acquire(1).is_err());
        // SAFETY: locked still, for all the refusals.
        assert_eq!(unsafe { range.start().read() }, 7);
        // SAFETY: acquired above, no reference into it was made.
        unsafe { source.release(region) }.unwrap();
        // SAFETY: of this range, and not locked.
        unsafe { source.commit(&range, 1 << 39, PAGE_BYTES) }.expect("as much as the region gave back");
        for (offset, bytes) in [(0, 3 * PAGE_BYTES), (1 << 39, PAGE_BYTES)] {
            // SAFETY: locked above, unused.
            unsafe { source.decommit(&range, offset, bytes) }.unwrap();
        }
        assert_eq!(source.held_bytes.load(Ordering::Relaxed), 0);
        // SAFETY: nothing of it is locked or in use.
        unsafe { source.unreserve(range) }.unwrap();
    }
}
