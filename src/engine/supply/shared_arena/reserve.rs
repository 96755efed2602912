//! Reserves: memory that is pinned in one call and kept.

use std::ptr::NonNull;
use std::time::Instant;

use super::super::Refusal;
use super::super::executor::{Mapping, held};
use super::SharedArena;
use crate::backend::SourceError;
use crate::diag::Growth;

impl SharedArena {
    /// Pins `bytes` and keeps them until the end (policy-R10): a range of its own in the arena. Returns where it lies. A
    /// slow call.
    pub(in crate::engine) fn add_reserve(
        &self,
        bytes: u64,
        progress: &dyn Fn(u64),
    ) -> Result<(NonNull<u8>, usize), Refusal> {
        let held_bytes = |bytes| held(bytes, |len| self.source.held_bytes_fast(len));
        let len = self.state.lock().claim_reserve(bytes, held_bytes)?;
        if let Some(refusal) = self.refusal_for_line(bytes) {
            self.state.lock().unclaim_reserve(held_bytes(len as u64));
            return Err(refusal);
        }
        let begun = Instant::now();
        let progress = |done: usize| progress(done as u64);
        let acquired = self.source.acquire_fast(len, self.config.pin_threads, &progress);
        let took = begun.elapsed();
        let mut state = self.state.lock();
        let held_before_bytes = state.held_bytes();
        let settled = state.settle_reserve((len, held_bytes(len as u64)), acquired, took).map_err(Refusal::Source)?;
        let (held_bytes, max_bytes) = (state.held_bytes(), state.quota().max_bytes());
        drop(state);
        let growth = Growth { asked_bytes: bytes, held_before_bytes, held_bytes, page_locks: 1, took, max_bytes };
        self.log.page_locked(&growth);
        let no_range = |region| {
            let refusal = Refusal::Source(SourceError::new("arena", "no range is left for a reserve"));
            self.release_mapping(Mapping::Region(region)).map_err(Refusal::Source).and(Err(refusal))
        };
        settled.or_else(no_range).map(|start| (start, len))
    }

    /// Whether the reserves, with the `bytes` claimed for one more, leave a get without room that waits and came before. A
    /// get that comes now is not taken for one that could be served.
    fn refusal_for_line(&self, bytes: u64) -> Option<Refusal> {
        let lines = self.attached().into_iter().map(|pool| pool.waiting_bytes());
        let short = lines.into_iter().find(|line| line.iter().any(|&waiting_bytes| !self.could_hold(waiting_bytes)))?;
        let (waiting, first_bytes) = (short.len() as u64, short.first().copied().unwrap_or(0));
        Some(Refusal::Line { needed_bytes: bytes, waiting, first_bytes })
    }
}
