//! Simulated memory: memory of the backend `heap`, up to a total. Calls are counted, and the time of remaps is estimated.
//!
//! Remaps cost the time that the calls of `vmm` would take on a GPU. Granules are mapped at their new addresses first, and
//! unmapped at the old addresses later, or when these are needed. The times were measured on an H200 with driver 580: 99 us to
//! unmap a run, 5 us to map a granule, and 165 us to set access. Past the first granule, unmapping runs at 27 GB/s and setting
//! access at 33 GB/s.
//!
//! A pool never touches the memory of a source, and untouched memory is not resident, so a replay of terabytes costs nothing.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use std::ops::Range;

use pinpool::PinnedBy;
use pinpool::source::{HeapSource, Region, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, BuiltInSource, GRANULE_BYTES, RemapError, Subrange, VirtualMemory};
use pinpool_os::sync::unmodeled::Mutex;
use serde::Serialize;

/// Kinds of simulated memory, with their names in flags and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    /// One virtual range: a buffer may span granules that were pinned by different calls.
    #[default]
    #[value(alias = "span")]
    Virtual,
    /// Separate regions: a buffer lies within one.
    #[value(alias = "walls")]
    Separate,
}

/// Provides memory up to a fixed total.
#[derive(Debug)]
pub struct SimSource {
    heap: HeapSource,
    kind: SourceKind,
    total_bytes: u64,
    /// Sums over the calls of this source.
    pub sums: Mutex<CallSums>,
    is_exact: bool,
}

impl SimSource {
    /// The default total: 16 TiB, which is more than any host has and a fraction of the address space.
    pub const DEFAULT_TOTAL_BYTES: u64 = 16 << 40;

    /// Creates a source with virtual memory that provides at most `total_bytes` at one time.
    pub fn new(total_bytes: u64) -> Self {
        Self::of(SourceKind::Virtual, total_bytes)
    }

    /// Creates a source of separate regions that provides at most `total_bytes` at one time.
    pub fn separate_regions(total_bytes: u64) -> Self {
        Self::of(SourceKind::Separate, total_bytes)
    }

    pub(super) fn of(kind: SourceKind, total_bytes: u64) -> Self {
        Self { heap: HeapSource::new(), kind, total_bytes, sums: Mutex::default(), is_exact: false }
    }

    /// Counts the bytes of a request as they are, without rounding them to pages.
    pub fn exact(self) -> Self {
        Self { is_exact: true, ..self }
    }

    /// Returns the calls since the previous `take_calls`.
    pub fn take_calls(&self) -> Calls {
        std::mem::take(&mut self.sums.lock().calls)
    }

    /// Makes `call`, by which the heap provides `bytes` more, unless that would exceed the total.
    fn pin<T>(&self, bytes: usize, call: impl FnOnce() -> Result<T, SourceError>) -> Result<T, SourceError> {
        let mut sums = self.sums.lock();
        let (total_bytes, pinned_bytes) = (self.total_bytes, sums.pinned_bytes.saturating_add(bytes as u64));
        if pinned_bytes > total_bytes {
            let held = format!("{} of {total_bytes} bytes are held", sums.pinned_bytes);
            return Err(SourceError::new("sim", format!("{bytes} bytes refused, {held}")));
        }
        sums.calls.pins += 1;
        (sums.pinned_bytes, sums.peak_bytes) = (pinned_bytes, sums.peak_bytes.max(pinned_bytes));
        drop(sums);
        call().inspect_err(|_| self.sums.lock().pinned_bytes -= bytes as u64)
    }
}

// SAFETY: source-C1 to C4 hold for `heap`, which provides all memory.
unsafe impl Source for SimSource {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        None
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        if self.is_exact { len_bytes } else { self.heap.held_bytes(len_bytes) }
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.pin(len_bytes, || self.heap.acquire(len_bytes))
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        let released = (region.id(), region.len_bytes());
        // SAFETY: the caller's promise: the region came from this source, hence from `heap`, and is unused.
        unsafe { self.heap.release(region) }?;
        let mut sums = self.sums.lock();
        sums.pinned_bytes -= released.1 as u64;
        sums.calls.released.push(released);
        Ok(())
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for SimSource {
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        (self.kind == SourceKind::Virtual && self.heap.virtual_memory().is_some()).then_some(self)
    }
}

// SAFETY: vm-S1 to S5 hold for `heap`, which makes every change.
unsafe impl VirtualMemory for SimSource {
    fn reserve_addresses(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.heap.reserve_addresses(len_bytes)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        self.pin(bytes, || unsafe { self.heap.commit(range, offset, bytes) })?;
        self.sums.lock().unmap_within(&(offset..offset + bytes));
        Ok(())
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.heap.decommit(range, offset, bytes) }?;
        let mut sums = self.sums.lock();
        sums.unmap_within(&EVERYWHERE);
        sums.pinned_bytes -= bytes as u64;
        Ok(())
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        self.sums.lock().remap(from, to);
        // SAFETY: the caller's promise.
        unsafe { self.heap.remap(range, from, to) }
    }

    fn has_old_places(&self) -> bool {
        !self.sums.lock().old_places.is_empty()
    }

    fn unmap_old_places(&self) -> Result<(), SourceError> {
        self.sums.lock().unmap_within(&EVERYWHERE);
        Ok(())
    }

    unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.heap.release_addresses(range) }
    }
}

/// All offsets.
const EVERYWHERE: Range<usize> = 0..usize::MAX;

/// Sums over the calls of a source.
#[derive(Debug, Default)]
pub struct CallSums {
    pub(super) calls: Calls,
    /// Bytes held now.
    pub pinned_bytes: u64,
    /// Maximum number of bytes held at any time.
    pub peak_bytes: u64,
    /// Old addresses where remapped granules are still mapped; no two ranges touch.
    old_places: Vec<Range<usize>>,
}

/// The calls of a source between two calls of [`SimSource::take_calls`].
#[derive(Debug, Default)]
pub struct Calls {
    pub(super) moved_bytes: u64,
    /// Time of all remap calls, including the later unmapping.
    pub(super) moving_ns: u64,
    /// Time of the calls that the requesting thread waits for.
    pub(super) waited_ns: u64,
    /// Calls that pinned memory.
    pub pins: u64,
    /// Number and length of each released region.
    pub released: Vec<(u64, usize)>,
}

impl CallSums {
    fn remap(&mut self, from: &[Subrange], to: usize) {
        let bytes: usize = from.iter().map(|piece| piece.bytes).sum();
        let granules: usize = from.iter().map(|piece| piece.bytes.div_ceil(GRANULE_BYTES)).sum();
        let mapping_ns = map_ns(granules as u64, bytes as u64);
        self.unmap_within(&(to..to + bytes));
        self.calls.moved_bytes += bytes as u64;
        self.calls.waited_ns += mapping_ns;
        self.calls.moving_ns += mapping_ns + from.iter().map(|piece| unmap_ns(piece.bytes as u64)).sum::<u64>();
        for piece in from {
            let left = piece.offset..piece.offset + piece.bytes;
            let touching = self.old_places.extract_if(.., |old| old.end == left.start || old.start == left.end);
            let run = touching.fold(left.clone(), |run, old| run.start.min(old.start)..run.end.max(old.end));
            self.old_places.push(run);
        }
    }

    /// Unmaps old addresses that overlap these bytes.
    fn unmap_within(&mut self, wanted: &Range<usize>) {
        let unmapped = self.old_places.extract_if(.., |run| run.start < wanted.end && wanted.start < run.end);
        self.calls.waited_ns += unmapped.map(|run| unmap_ns(run.len() as u64)).sum::<u64>();
    }
}

/// Returns the nanoseconds for the part of `bytes` past the first granule, at `rate` bytes per ns.
fn past_the_first(bytes: u64, rate: u64) -> u64 {
    bytes.saturating_sub(GRANULE_BYTES as u64) / rate
}

/// Returns the nanoseconds to unmap a run of this many bytes.
fn unmap_ns(bytes: u64) -> u64 {
    99_000 + past_the_first(bytes, 27)
}

/// Returns the nanoseconds to map this many granules with this many bytes and to set their access.
fn map_ns(granules: u64, bytes: u64) -> u64 {
    granules * 5_000 + 165_000 + past_the_first(bytes, 33)
}

/// Returns the nanoseconds of a piece of a remap and of its later unmapping. The first piece of a call includes the fixed
/// time of the call.
pub(super) fn move_ns(bytes: u64, is_first: bool) -> u64 {
    let later = if is_first { 0 } else { map_ns(0, 0) };
    map_ns(bytes.div_ceil(GRANULE_BYTES as u64), bytes) - later + unmap_ns(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_granules_are_mapped_in_less_than_half_a_millisecond_and_six_are_not() {
        let micros = |granules: u64| map_ns(granules, granules * GRANULE_BYTES as u64) / 1_000;
        assert_eq!([1, 2, 5, 6].map(micros), [170, 238, 444, 512]);
    }

    #[test]
    fn old_places_are_unmapped_when_needed_and_adjacent_ones_together() {
        let source = SimSource::new(1 << 40);
        let range = source.reserve_addresses(64 * GRANULE_BYTES).unwrap();
        let piece =
            |first: usize, count: usize| Subrange { offset: first * GRANULE_BYTES, bytes: count * GRANULE_BYTES };
        let micros = || source.take_calls().waited_ns / 1_000;
        // SAFETY: nothing of the range is committed.
        unsafe { source.commit(&range, 0, 4 * GRANULE_BYTES) }.unwrap();
        // SAFETY: here and below, the pieces are committed and unused, and nothing is committed at the target.
        unsafe { source.remap(&range, &[piece(2, 1), piece(1, 1)], 8 * GRANULE_BYTES) }.unwrap();
        assert_eq!((micros(), source.has_old_places()), (238, true));
        // SAFETY: as above.
        unsafe { source.remap(&range, &[piece(3, 1)], GRANULE_BYTES) }.unwrap();
        assert_eq!(micros(), 176 + 170, "two granules unmapped by one call");
        source.unmap_old_places().unwrap();
        assert_eq!((micros(), source.has_old_places()), (99, false));
    }
}
