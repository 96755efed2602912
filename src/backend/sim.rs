//! Address space without memory: a stated total, mapped lazily, for replay and tests.
//!
//! The pool never touches the memory of a source, so a replay of terabytes costs nothing. A user who touches it gets zeroed
//! pages, one by one. Addresses recur after a release, ids do not.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::mapping::{self, Accounting, InitialAccess};
use super::source::{Region, RegionIds, Source};
use super::virtual_memory::{AddressRange, VirtualMemory};
use crate::error::SourceError;

/// Hands out addresses up to a stated total.
#[derive(Debug)]
pub struct SimSource {
    ids: RegionIds,
    total_bytes: u64,
    /// Regions and committed granules together.
    held_bytes: AtomicU64,
    has_virtual_memory: bool,
}

impl SimSource {
    /// Total of `PINPOOL_BACKEND=sim` without a number: 16 TiB, more than any host has and a fraction of the address space.
    pub const DEFAULT_TOTAL_BYTES: u64 = 16 << 40;

    /// A source with virtual memory that holds at most `total_bytes` at one time.
    pub fn new(total_bytes: u64) -> Self {
        Self {
            ids: RegionIds::default(),
            total_bytes,
            held_bytes: AtomicU64::new(0),
            has_virtual_memory: mapping::HAS_RANGES,
        }
    }

    /// Makes the source as [`SimSource::new`] does, with discrete regions only.
    pub fn discrete(total_bytes: u64) -> Self {
        Self { has_virtual_memory: false, ..Self::new(total_bytes) }
    }

    fn claim(&self, bytes: u64) -> Result<(), SourceError> {
        let claimed = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= self.total_bytes);
        // Relaxed: the count guards no other memory.
        self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claimed).map(drop).map_err(|held| {
            SourceError::new("sim", format!("{bytes} B refused, {held} B of {} B are held", self.total_bytes))
        })
    }

    fn unclaim(&self, bytes: u64) {
        // Relaxed, as in `claim`.
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

// SAFETY: source-C1 to C3 hold for every private anonymous mapping (`mapping`); `MAP_NORESERVE` changes when a page gets
// memory, not its content. source-C4: `RegionIds`.
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
        mapping::map(len_bytes, Accounting::OnTouch, self.ids.next()).inspect_err(|_| self.unclaim(held_bytes))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let held_bytes = self.held_bytes(region.len_bytes()) as u64;
        // SAFETY: the caller's promise: the region came from this source, hence from `map`, and is unused.
        unsafe { mapping::unmap(region) }?;
        self.unclaim(held_bytes);
        Ok(())
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.has_virtual_memory.then_some(self)
    }
}

// SAFETY: vm-S1, S2 and S4: the range is one readable and writable mapping (`mapping`). vm-S3: it is zero until written to,
// and a decommit empties it. vm-S5 concerns bytes that are only counted.
unsafe impl VirtualMemory for SimSource {
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        mapping::reserve(len_bytes, InitialAccess::ReadWrite)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        range.at(offset, bytes).and_then(|_| self.claim(bytes as u64))
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: it came from `reserve` and is unused.
        unsafe { mapping::discard(range.at(offset, bytes)?, bytes) }?;
        self.unclaim(bytes as u64);
        Ok(())
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: it came from `reserve` and is unused.
        unsafe { mapping::unreserve(range) }
    }
}
