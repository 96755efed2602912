//! Memory pinned at once, by the fastest way there is, and kept (rule 10): a region of its own in the arena, never given
//! back before the pool ends.

use std::ptr::NonNull;
use std::time::Instant;

use super::Refusal;
use super::addresses::GRANULE_BYTES;
use super::executor::Mapping;
use super::shared_arena::SharedArena;
use crate::arena::RANGE_BYTES_MAX;
use crate::backend::{PAGE_BYTES, SourceError};

impl SharedArena {
    /// Pins `bytes` at once and keeps them (rule 10). A slow call. Says where they lie.
    pub(in crate::engine) fn add_reserve(
        &self,
        bytes: u64,
        progress: &dyn Fn(u64),
    ) -> Result<(NonNull<u8>, usize), Refusal> {
        let (bytes, len) = self.claim_reserve(bytes)?;
        let begun = Instant::now();
        let acquired = self.source.acquire_fast(len, self.pin_threads, &|done: usize| progress(done as u64));
        let mut land = self.land.lock();
        land.pending_bytes -= bytes;
        land.calls.time += begun.elapsed();
        let region = acquired.inspect_err(|_| land.calls.failures += 1).map_err(Refusal::Source)?;
        land.calls.acquired(bytes);
        let Some(range) = land.arena.add_reserve(bytes) else {
            drop(land);
            // The arena has no number left for it: it goes back.
            let refusal = Refusal::Source(SourceError::new("arena", "no range is left for a reserve"));
            return self.dismantle_site(Mapping::Region(region)).map_err(Refusal::Source).and(Err(refusal));
        };
        let start = region.start();
        land.sites.add(range, Mapping::Region(region));
        land.reserve_bytes += bytes;
        land.largest_reserve_bytes = land.largest_reserve_bytes.max(bytes);
        Ok((start, len))
    }

    /// Claims a reserve of `bytes`, in whole granules if there is room for them, else in whole pages.
    fn claim_reserve(&self, bytes: u64) -> Result<(u64, usize), Refusal> {
        let mut land = self.land.lock();
        let room = self.max_bytes().unwrap_or(u64::MAX).saturating_sub(land.claimed_bytes());
        let whole = |unit: u64| bytes.checked_next_multiple_of(unit).filter(|&whole| whole <= room);
        let bytes = whole(GRANULE_BYTES)
            .or_else(|| whole(PAGE_BYTES as u64))
            .ok_or(Refusal::Ceiling { needed_bytes: bytes })?;
        let len = usize::try_from(bytes).ok().filter(|_| bytes <= RANGE_BYTES_MAX).ok_or_else(|| {
            let what = format!("{bytes} B are more than the {RANGE_BYTES_MAX} B that one reserve may have");
            Refusal::Source(SourceError::new("arena", what))
        })?;
        land.pending_bytes += bytes;
        land.note_peak();
        Ok((bytes, len))
    }
}
