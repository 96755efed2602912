//! Reserves: memory that is pinned in few calls and kept.

use std::time::{Duration, Instant};

use super::arena_supply::ArenaSupply;
use super::block_memory::Refusal;
use super::books::Step;
use super::shape::{Mapping, held};
use super::slices::{Place, Progress, Slices};
use crate::backend::SourceError;
use crate::diag::Growth;
use pinpool_os::threads;

/// A step pins about so much: 2 to 3 ms on `mlock` and `vmm`. Larger granules are pinned one by one.
const STEP_BYTES: u64 = 8 << 20;
/// Length of a region of the reserve if the source has no virtual memory and no copy is in flight: no buffer is longer.
const REGION_BYTES: u64 = 64 << 20;

/// A step waits no longer for calls of other threads.
const STEP_PATIENCE: Duration = Duration::from_millis(100);

impl ArenaSupply {
    /// Pins `bytes` and keeps them until the end (policy-R10), in ranges of their own, in slices of this length if there is one.
    /// Returns their addresses: if the source refuses even short slices, fewer than were requested, and the log says so. `refusal`
    /// is called once the bytes are claimed. A slow call.
    pub(in crate::engine) fn add_reserve(
        &self,
        (bytes, slice_bytes): (u64, Option<u64>),
        progress: &dyn Fn(u64),
        refusal: impl FnOnce() -> Option<Refusal>,
    ) -> Result<Vec<Place>, Refusal> {
        let held_bytes = |bytes| held(bytes, |len| self.source.held_bytes_fast(len));
        let len = self.books().claim_reserve(bytes, held_bytes)? as u64;
        if let Some(refusal) = refusal() {
            self.books().unclaim_reserve(held_bytes(len));
            return Err(refusal);
        }
        let slices = Slices::of(len, slice_bytes);
        let threads =
            if slices.are_several() { touching_threads(self.settings.pin_threads) } else { self.settings.pin_threads };
        let pin = |progress: &dyn Fn(usize)| {
            while let Some(bytes) = slices.next() {
                slices.note(bytes, self.add_slice((bytes, threads), held_bytes(bytes), progress));
            }
        };
        threads::scope(|scope| {
            // Without such a thread, this thread pins all.
            let _second = slices.are_several().then(|| scope.spawn(c"pinpool-reserve", || pin(&|_| ())));
            pin(&|done| progress(slices.done_bytes() + done as u64));
        });
        let Progress { places, left_bytes, refusal, .. } = slices.end();
        if left_bytes > 0 {
            self.books().unclaim_reserve(held_bytes(left_bytes));
        }
        match refusal {
            Some(refusal) if places.is_empty() => return Err(refusal),
            Some(Refusal::Source(error)) => self.log.reserve_stopped(len - left_bytes, len, &error),
            _ => {}
        }
        Ok(places)
    }

    /// Pins a slice of a reserve with N threads. `held_bytes` are claimed for it and stay claimed if that fails.
    fn add_slice(
        &self,
        (bytes, threads): (u64, usize),
        held_bytes: u64,
        progress: &dyn Fn(usize),
    ) -> Result<Place, Refusal> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let begun = Instant::now();
        let acquired = self.source.acquire_fast(len, threads, progress);
        let took = begun.elapsed();
        let mut books = self.books();
        let held_before_bytes = books.held_bytes();
        let finished = books.finish_reserve((len, held_bytes), acquired, took).map_err(Refusal::Source)?;
        let (held_bytes, max_bytes) = (books.held_bytes(), books.budget().max_bytes());
        drop(books);
        let growth = Growth { asked_bytes: bytes, held_before_bytes, held_bytes, page_locks: 1, took, max_bytes };
        self.log.page_locked(&growth);
        let no_range = |region| {
            let refusal = Refusal::Source(SourceError::new("arena", "no range is left for a reserve"));
            self.release_mapping(Mapping::Region(region)).map_err(Refusal::Source).and(Err(refusal))
        };
        finished.or_else(no_range).map(|start| Place(start, len))
    }

    /// One step: granules, or a region if the source has no virtual memory. `refusal` is called as by
    /// [`add_reserve`](Self::add_reserve). A slow call.
    pub(super) fn commit_step(
        &self,
        (now_us, has_copies): (u64, bool),
        refusal: impl FnOnce(u64) -> Option<Refusal>,
    ) -> Result<Step, SourceError> {
        if self.shape.is_discrete { self.region_step((now_us, has_copies), refusal) } else { self.granule_step(now_us) }
    }

    fn granule_step(&self, now_us: u64) -> Result<Step, SourceError> {
        let mut books = self.books();
        let remedy = self.shape.address_remedy.unwrap_or("reserve less, or raise PINPOOL_MAX_BYTES");
        let plan = match books.plan_reserve_step(STEP_BYTES, remedy)? {
            Ok(plan) => plan,
            Err(step) => return Ok(step),
        };
        let until = Instant::now() + STEP_PATIENCE;
        self.carry_out(books, plan, (None, until), |books, plan, executed| {
            books.finish_reserve_step(plan, executed, now_us)
        })?;
        Ok(Step::Made)
    }

    /// A region of the reserve. Short while copies are in flight, since it would delay enqueues.
    fn region_step(
        &self,
        (now_us, has_copies): (u64, bool),
        refusal: impl FnOnce(u64) -> Option<Refusal>,
    ) -> Result<Step, SourceError> {
        let books = self.books();
        let (to_come, is_first) = (books.reserve_to_come(), books.reserve_progress().0 == 0);
        let is_unused = books.is_closed();
        drop(books);
        if to_come == 0 || is_unused {
            return Ok(Step::Done);
        }
        let longest_bytes = if is_first || has_copies { STEP_BYTES } else { REGION_BYTES };
        let bytes = to_come.min(longest_bytes);
        match self.add_reserve((bytes, None), &|_| (), || refusal(bytes)) {
            Ok(places) => {
                let pinned_bytes = places.iter().map(|&Place(_, len)| len as u64).sum();
                self.books().requested_once(pinned_bytes);
            }
            Err(Refusal::Source(error)) => return Err(error),
            Err(Refusal::QuotaExceeded { .. } | Refusal::Line { .. }) => return Ok(self.books().without_room(bytes)),
        }
        if self.books().is_unused() {
            // The pool has ended meanwhile, and found this region on its way.
            self.teardown(now_us);
        }
        Ok(Step::Made)
    }
}

/// The threads that touch a slice while another is registered. One core is left to the thread that registers: with 15 threads on
/// 16 cores a C loop of the same steps reached 34.7 GB/s, with 16 only 24.8.
fn touching_threads(pin_threads: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    pin_threads.min(cores - 1).max(1)
}
