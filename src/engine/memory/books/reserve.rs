//! Reserves in the books: claimed before they are pinned, added or given up after.

use std::ptr::NonNull;
use std::time::Duration;

use super::super::block_memory::Refusal;
use super::super::shape::{GRANULE_BYTES, Mapping};
use super::{ALIGN_BYTES, Books};
use crate::arena::RANGE_BYTES_MAX;
use crate::backend::{Region, SourceError};

impl Books {
    /// Claims what the system will hold for a reserve of `bytes`, in whole granules if there is room for them, else in whole
    /// pages. `held_bytes` says how much that is. Returns the length of the reserve.
    pub(in crate::engine) fn claim_reserve(
        &mut self,
        bytes: u64,
        held_bytes: impl Fn(u64) -> u64,
    ) -> Result<usize, Refusal> {
        let whole = |unit: u64| bytes.checked_next_multiple_of(unit);
        let needed_bytes = whole(ALIGN_BYTES).map_or(u64::MAX, &held_bytes);
        let room = self.room_for(needed_bytes);
        let fits = |&whole: &u64| held_bytes(whole) <= room.bytes();
        let fitting = whole(GRANULE_BYTES).filter(fits).or_else(|| whole(ALIGN_BYTES).filter(fits));
        let refusal = |over| Refusal::Over { needed_bytes, over };
        let bytes = fitting.ok_or_else(|| refusal(self.budget().lacking(room, needed_bytes)))?;
        let len = usize::try_from(bytes).ok().filter(|_| bytes <= RANGE_BYTES_MAX).ok_or_else(|| {
            let what = format!("{bytes} B are more than the {RANGE_BYTES_MAX} B that one reserve may have");
            Refusal::Source(SourceError::new("arena", what))
        })?;
        self.pending_bytes += held_bytes(bytes);
        let claimed = self.update_claim();
        self.pending_bytes -= if claimed.is_ok() { 0 } else { held_bytes(bytes) };
        claimed.map(|()| len).map_err(refusal)
    }

    /// Ends what is left of a claim of [`claim_reserve`](Self::claim_reserve).
    pub(in crate::engine) fn unclaim_reserve(&mut self, held_bytes: u64) {
        self.pending_bytes -= held_bytes;
        self.lower_claim();
    }

    /// Adds `len` bytes of a reserve, of which [`claim_reserve`](Self::claim_reserve) claimed `held_bytes`. Returns where they lie;
    /// returns the region if the arena has no range left for it. The claim stays where nothing is added.
    pub(in crate::engine) fn settle_reserve(
        &mut self,
        (len, held_bytes): (usize, u64),
        acquired: Result<Region, SourceError>,
        took: Duration,
    ) -> Result<Result<NonNull<u8>, Region>, SourceError> {
        let bytes = len as u64;
        self.calls.pin.record(bytes, took, acquired.is_ok());
        let region = acquired?;
        let Some(range) = self.arena.add_reserve(bytes) else { return Ok(Err(region)) };
        self.pending_bytes -= held_bytes;
        let start = region.start();
        self.mappings.add(range, Mapping::Region(region));
        self.reserve_bytes += bytes;
        self.reserve_overhead_bytes += held_bytes - bytes;
        self.lower_claim();
        self.note_peak();
        self.largest_reserve_bytes = self.largest_reserve_bytes.max(bytes);
        Ok(Ok(start))
    }

    /// What the system holds for all reserves, and the bytes of the largest; those that are being pinned count as one.
    pub(in crate::engine) fn reserve_bytes(&self) -> (u64, u64) {
        let held_bytes = self.reserve_bytes + self.reserve_overhead_bytes + self.pending_bytes;
        (held_bytes, self.largest_reserve_bytes.max(self.pending_bytes))
    }
}
