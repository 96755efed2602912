//! Reserves: memory that is pinned in few calls and kept. It is pinned in slices by two threads: while one registers its slice, the
//! threads of the other touch the next.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::arena_supply::ArenaSupply;
use super::block_memory::Refusal;
use super::books::Step;
use super::shape::{GRANULE_BYTES, Mapping, held};
use crate::backend::SourceError;
use crate::diag::Growth;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::threads;

/// A step pins about so much: 2 to 3 ms on `mlock` and `vmm`. Larger granules are pinned one by one.
const STEP_BYTES: u64 = 8 << 20;
/// Length of a region of the reserve if the source has no virtual memory and no copy is in flight: no buffer is longer.
const REGION_BYTES: u64 = 64 << 20;

/// A step waits no longer for calls of other threads.
const STEP_PATIENCE: Duration = Duration::from_millis(100);

impl ArenaSupply {
    /// Pins `bytes` and keeps them until the end (policy-R10), in ranges of their own, in slices of this length if there is one.
    /// Returns their addresses: if the source refuses even short slices, fewer than were requested, and the log says so. A slow call.
    pub(in crate::engine) fn add_reserve(
        &self,
        (bytes, slice_bytes): (u64, Option<u64>),
        progress: &dyn Fn(u64),
    ) -> Result<Vec<Place>, Refusal> {
        let held_bytes = |bytes| held(bytes, |len| self.source.held_bytes_fast(len));
        let len = self.books().claim_reserve(bytes, held_bytes)? as u64;
        if let Some(refusal) = self.refusal_by_queue(bytes) {
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

    /// Whether the reserves, with the `bytes` claimed for one more, leave an earlier request that waits without room. A
    /// request that arrives now is not mistaken for one that could be served.
    fn refusal_by_queue(&self, bytes: u64) -> Option<Refusal> {
        let waiting = self.pool()?.waiting_bytes();
        let is_short = waiting.iter().any(|&waiting_bytes| !self.could_hold_bytes(waiting_bytes));
        let first_bytes = waiting.first().copied().filter(|_| is_short)?;
        Some(Refusal::Queued { needed_bytes: bytes, waiting: waiting.len() as u64, first_bytes })
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
        let growth = Growth { asked_bytes: bytes, held_before_bytes, held_bytes, pin_calls: 1, took, max_bytes };
        self.log.grew(&growth);
        let no_range = |region| {
            let refusal = Refusal::Source(SourceError::new("arena", "no range is left for a reserve"));
            self.release_mapping(Mapping::Region(region)).map_err(Refusal::Source).and(Err(refusal))
        };
        finished.or_else(no_range).map(|start| Place(start, len))
    }

    /// One step: granules, or a region if the source has no virtual memory. A slow call.
    pub(super) fn commit_step(&self, (now_us, has_copies): (u64, bool)) -> Result<Step, SourceError> {
        if self.shape.is_discrete { self.region_step((now_us, has_copies)) } else { self.granule_step(now_us) }
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
    fn region_step(&self, (now_us, has_copies): (u64, bool)) -> Result<Step, SourceError> {
        let books = self.books();
        let (to_come, is_first) = (books.reserve_to_come(), books.reserve_progress().0 == 0);
        let is_unused = books.is_closed();
        drop(books);
        if to_come == 0 || is_unused {
            return Ok(Step::Done);
        }
        let longest_bytes = if is_first || has_copies { STEP_BYTES } else { REGION_BYTES };
        let bytes = to_come.min(longest_bytes);
        match self.add_reserve((bytes, None), &|_| ()) {
            Ok(places) => {
                let pinned_bytes = places.iter().map(|&Place(_, len)| len as u64).sum();
                self.books().requested_once(pinned_bytes);
            }
            Err(Refusal::Source(error)) => return Err(error),
            Err(Refusal::QuotaExceeded { .. } | Refusal::Queued { .. }) => return Ok(self.books().without_room(bytes)),
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

/// A refused slice is halved down to this.
const SLICE_BYTES_MIN: u64 = 16 << 20;

/// Where a slice lies.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct Place(pub(in crate::engine) NonNull<u8>, pub(in crate::engine) usize);

// SAFETY: an address and a length, through which nothing is read.
#[allow(unsafe_code)]
unsafe impl Send for Place {}

/// What is pinned of a reserve, and what is to come.
#[derive(Debug)]
pub(super) struct Slices(Mutex<Progress>);

#[derive(Debug)]
pub(super) struct Progress {
    pub(super) places: Vec<Place>,
    pub(super) left_bytes: u64,
    /// Why nothing more comes.
    pub(super) refusal: Option<Refusal>,
    done_bytes: u64,
    slice_bytes: u64,
    min_bytes: u64,
}

impl Slices {
    /// `bytes` in slices of this length, or in one piece.
    pub(super) fn of(bytes: u64, slice_bytes: Option<u64>) -> Self {
        let (slice_bytes, min_bytes) = slice_bytes.map_or((bytes, bytes), |slice_bytes| (slice_bytes, SLICE_BYTES_MIN));
        let (places, refusal) = Default::default();
        Self(Mutex::new(Progress { places, left_bytes: bytes, refusal, done_bytes: 0, slice_bytes, min_bytes }))
    }

    pub(super) fn are_several(&self) -> bool {
        let progress = self.0.lock();
        progress.left_bytes > progress.slice_bytes
    }

    pub(super) fn done_bytes(&self) -> u64 {
        self.0.lock().done_bytes
    }

    /// The length of the next slice, for the caller to pin.
    pub(super) fn next(&self) -> Option<u64> {
        let mut progress = self.0.lock();
        let bytes = progress.left_bytes.min(progress.slice_bytes);
        if bytes == 0 || progress.refusal.is_some() {
            return None;
        }
        progress.left_bytes -= bytes;
        Some(bytes)
    }

    /// What became of a slice of [`next`](Self::next).
    pub(super) fn note(&self, bytes: u64, pinned: Result<Place, Refusal>) {
        let mut progress = self.0.lock();
        match pinned {
            Ok(place) => {
                progress.places.push(place);
                progress.done_bytes += bytes;
            }
            Err(refusal) => {
                progress.left_bytes += bytes;
                if bytes > progress.min_bytes {
                    progress.slice_bytes = (bytes / 2).next_multiple_of(GRANULE_BYTES).max(progress.min_bytes);
                } else {
                    progress.refusal = Some(refusal);
                }
            }
        }
    }

    pub(super) fn end(self) -> Progress {
        self.0.into_inner()
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use crate::backend::SourceError;

    #[test]
    fn a_refused_slice_is_halved_down_to_a_least_one_and_the_rest_is_left() {
        const MIB: u64 = 1 << 20;
        let slices = Slices::of(600 * MIB, Some(256 * MIB));
        assert!(slices.are_several());
        let place = Place(NonNull::dangling(), 0);
        assert_eq!((slices.next(), slices.next()), (Some(256 * MIB), Some(256 * MIB)));
        slices.note(256 * MIB, Ok(place));
        let refused = || Err(Refusal::Source(SourceError::new("test", "refused")));
        slices.note(256 * MIB, refused());
        for mib in [128, 64, 32, 16] {
            assert_eq!(slices.next(), Some(mib * MIB));
            slices.note(mib * MIB, refused());
        }
        assert_eq!((slices.next(), slices.done_bytes()), (None, 256 * MIB));
        let Progress { places, left_bytes, refusal, .. } = slices.end();
        assert_eq!((places.len(), left_bytes), (1, 344 * MIB));
        assert!(refusal.is_some());
        let whole = Slices::of(600 * MIB, None);
        assert_eq!((whole.are_several(), whole.next()), (false, Some(600 * MIB)));
        whole.note(600 * MIB, refused());
        assert_eq!(whole.next(), None, "one piece is not halved");
    }
}
