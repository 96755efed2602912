//! Simulated memory that adds up what moving granules would take on a device.
//!
//! The prices are those of one H200 with driver 580: to unmap a run 99 us and 27 GB/s past its first granule, to map a granule
//! 5 us, to set the access to what was mapped 165 us and 33 GB/s past the first granule. Commits and regions are counted by
//! the pool.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory` by passing calls on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{
    AddressRange, GRANULE_BYTES, Region, RemapError, SimSource, Source, SourceError, Subrange, VirtualMemory,
};

/// What the calls of a source add up to. One thread replays.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    moved_bytes: AtomicU64,
    moving_ns: AtomicU64,
    commits: AtomicU64,
}

/// Differences between two readings of a [`Ledger`].
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Calls {
    pub(super) moved_bytes: u64,
    pub(super) moving_ns: u64,
    pub(super) commits: u64,
}

impl Ledger {
    /// What was called since the last reading.
    pub(super) fn take(&self) -> Calls {
        // Relaxed, here and below: numbers of one thread.
        let take = |number: &AtomicU64| number.swap(0, Ordering::Relaxed);
        Calls { moved_bytes: take(&self.moved_bytes), moving_ns: take(&self.moving_ns), commits: take(&self.commits) }
    }
}

/// [`SimSource`] with a ledger.
#[derive(Debug)]
pub(super) struct PricedSource {
    sim: SimSource,
    ledger: Arc<Ledger>,
}

impl PricedSource {
    pub(super) fn new(sim: SimSource) -> (Self, Arc<Ledger>) {
        let ledger = Arc::<Ledger>::default();
        (Self { sim, ledger: ledger.clone() }, ledger)
    }
}

/// ns for `bytes` past the first granule, at so many bytes a ns.
fn past_the_first(bytes: u64, rate: u64) -> u64 {
    bytes.saturating_sub(GRANULE_BYTES as u64) / rate
}

fn move_ns(from: &[Subrange]) -> u64 {
    let all: u64 = from.iter().map(|piece| piece.bytes as u64).sum();
    let of_piece = |piece: &Subrange| {
        let bytes = piece.bytes as u64;
        99_000 + past_the_first(bytes, 27) + bytes.div_ceil(GRANULE_BYTES as u64) * 5_000
    };
    from.iter().map(of_piece).sum::<u64>() + 165_000 + past_the_first(all, 33)
}

// SAFETY: every call is passed on.
unsafe impl Source for PricedSource {
    fn name(&self) -> &'static str {
        self.sim.name()
    }

    fn is_pinned(&self) -> bool {
        self.sim.is_pinned()
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.ledger.commits.fetch_add(1, Ordering::Relaxed);
        self.sim.acquire(len_bytes)
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.sim.release(region) }
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.sim.virtual_memory().map(|_| self as &dyn VirtualMemory)
    }
}

// SAFETY: every call is passed on, and this is virtual memory only if `sim` is.
unsafe impl VirtualMemory for PricedSource {
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.sim.reserve(len_bytes)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.ledger.commits.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.sim.commit(range, offset, bytes) }
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.sim.decommit(range, offset, bytes) }
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let bytes: u64 = from.iter().map(|piece| piece.bytes as u64).sum();
        self.ledger.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.ledger.moving_ns.fetch_add(move_ns(from), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.sim.remap(range, from, to) }
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.sim.unreserve(range) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_granules_from_two_places_take_less_than_half_a_millisecond_and_three_more() {
        let micros = |granules: &[usize]| {
            let pieces: Vec<_> =
                granules.iter().map(|count| Subrange { offset: 0, bytes: count * GRANULE_BYTES }).collect();
            move_ns(&pieces) / 1_000
        };
        assert_eq!([micros(&[1]), micros(&[1, 1]), micros(&[2]), micros(&[1, 1, 1])], [269, 436, 415, 604]);
    }
}
