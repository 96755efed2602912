//! The time that remaps would take on a GPU with the calls of `vmm`: granules are mapped at their new addresses first, and unmapped at
//! the old addresses later, or when these are needed.
//!
//! The times were measured on an H200 with driver 580: 99 us to unmap a run, 5 us to map a granule, 165 us to set access; past the
//! first granule, unmapping runs at 27 GB/s and setting access at 33 GB/s.

use std::ops::Range;

use pinpool::source::SourceError;
use pinpool::unstable::backend::{GRANULE_BYTES, Subrange};

/// All offsets.
pub(super) const EVERYWHERE: Range<usize> = 0..usize::MAX;

/// Sums over the calls of a source.
#[derive(Debug, Default)]
pub(super) struct CallSums {
    pub(super) calls: Calls,
    /// Held now.
    pub(super) pinned_bytes: u64,
    pub(super) peak_bytes: u64,
    /// Old addresses where remapped granules are still mapped; no two ranges touch.
    pub(super) old_places: Vec<Range<usize>>,
}

/// The calls between two readings.
#[derive(Debug, Default)]
pub struct Calls {
    pub(super) moved_bytes: u64,
    /// Time of all calls of the remaps, including the later unmapping.
    pub(super) moving_ns: u64,
    /// Time of the calls that the requesting thread waits for.
    pub(super) waited_ns: u64,
    /// Calls that pinned memory.
    pub pins: u64,
    /// Number and length of each released region.
    pub released: Vec<(u64, usize)>,
}

impl CallSums {
    /// Counts a call that pins `bytes`, unless the sum would exceed `total_bytes`.
    pub(super) fn pin(&mut self, bytes: usize, total_bytes: u64) -> Result<(), SourceError> {
        let pinned_bytes = self.pinned_bytes.saturating_add(bytes as u64);
        if pinned_bytes > total_bytes {
            let held = format!("{} B of {total_bytes} B are held", self.pinned_bytes);
            return Err(SourceError::new("sim", format!("{bytes} B refused, {held}")));
        }
        self.calls.pins += 1;
        (self.pinned_bytes, self.peak_bytes) = (pinned_bytes, self.peak_bytes.max(pinned_bytes));
        Ok(())
    }

    pub(super) fn remap(&mut self, from: &[Subrange], to: usize) {
        let bytes: usize = from.iter().map(|piece| piece.bytes).sum();
        let unmapping: u64 = from.iter().map(|piece| unmap_ns(piece.bytes as u64)).sum();
        self.unmap_within(&(to..to + bytes));
        self.calls.moved_bytes += bytes as u64;
        self.calls.waited_ns += map_ns(from);
        self.calls.moving_ns += map_ns(from) + unmapping;
        for piece in from {
            let left = piece.offset..piece.offset + piece.bytes;
            let touching = self.old_places.extract_if(.., |old| old.end == left.start || old.start == left.end);
            let run = touching.fold(left.clone(), |run, old| run.start.min(old.start)..run.end.max(old.end));
            self.old_places.push(run);
        }
    }

    /// Unmaps old addresses that overlap these bytes.
    pub(super) fn unmap_within(&mut self, wanted: &Range<usize>) {
        let unmapped = self.old_places.extract_if(.., |run| run.start < wanted.end && wanted.start < run.end);
        self.calls.waited_ns += unmapped.map(|run| unmap_ns(run.len() as u64)).sum::<u64>();
    }
}

/// Nanoseconds for `bytes` past the first granule, at `rate` bytes per ns.
fn past_the_first(bytes: u64, rate: u64) -> u64 {
    bytes.saturating_sub(GRANULE_BYTES as u64) / rate
}

/// Time to unmap a run of this many bytes.
fn unmap_ns(bytes: u64) -> u64 {
    99_000 + past_the_first(bytes, 27)
}

/// Time to map the granules of these pieces and set their access.
fn map_ns(pieces: &[Subrange]) -> u64 {
    let mapping: u64 = pieces.iter().map(|piece| piece.bytes.div_ceil(GRANULE_BYTES) as u64 * 5_000).sum();
    let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
    mapping + 165_000 + past_the_first(bytes as u64, 33)
}

/// Time of a piece of a remap and its later unmapping; the first piece of a call includes the time of the call.
pub(super) fn move_ns(bytes: u64, is_first: bool) -> u64 {
    let piece = Subrange { offset: 0, bytes: usize::try_from(bytes).unwrap_or(usize::MAX) };
    let later = if is_first { 0 } else { map_ns(&[]) };
    map_ns(&[piece]) - later + unmap_ns(bytes)
}

#[cfg(test)]
#[allow(unsafe_code)] // Calls a source.
mod tests {
    use pinpool::unstable::backend::VirtualMemory;

    use super::super::sim::SimSource;
    use super::*;

    #[test]
    fn five_granules_are_mapped_in_less_than_half_a_millisecond_and_six_are_not() {
        let micros = |granules: usize| map_ns(&[Subrange { offset: 0, bytes: granules * GRANULE_BYTES }]) / 1_000;
        assert_eq!([1, 2, 5, 6].map(micros), [170, 238, 444, 512]);
    }

    #[test]
    fn old_places_are_unmapped_when_needed_and_adjacent_ones_together() {
        let source = SimSource::new(1 << 40);
        let range = source.reserve(64 * GRANULE_BYTES).unwrap();
        let piece =
            |first: usize, count: usize| Subrange { offset: first * GRANULE_BYTES, bytes: count * GRANULE_BYTES };
        let micros = || source.take_calls().waited_ns / 1_000;
        // SAFETY: nothing of the range is committed.
        unsafe { source.commit(&range, 0, 4 * GRANULE_BYTES) }.unwrap();
        // SAFETY: committed and unused; nothing is committed at the target. So below.
        unsafe { source.remap(&range, &[piece(2, 1), piece(1, 1)], 8 * GRANULE_BYTES) }.unwrap();
        assert_eq!((micros(), source.has_old_places()), (238, true));
        // SAFETY: as above.
        unsafe { source.remap(&range, &[piece(3, 1)], GRANULE_BYTES) }.unwrap();
        assert_eq!(micros(), 176 + 170, "two granules unmapped by one call");
        source.unmap_old_places().unwrap();
        assert_eq!((micros(), source.has_old_places()), (99, false));
    }
}
