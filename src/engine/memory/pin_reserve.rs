//! Pins a reserve: in steps of granules or of a region while the pool is in use, or all at once in slices. Two threads pin the
//! slices: while one registers its slice, the threads of the other touch the next slice.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::arena_supply::ArenaSupply;
use super::block_memory::Refusal;
use super::books::Step;
use super::shape::{GRANULE_BYTES, held};
use crate::backend::{HugeTlb, SourceError, huge_bytes, too_few};
use crate::quota::{LimitLevel, QuotaExceeded};
use crate::report::Growth;
use crate::stats::CallStats;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::threads;

/// Bytes of a step: 2 to 3 ms on `mlock` and `vmm`. Larger granules are pinned one by one.
const STEP_BYTES: u64 = 8 << 20;
/// Length of a region of the reserve, and so of the longest buffer in it, if the source has no virtual memory.
const REGION_BYTES: u64 = 64 << 20;
/// Longest wait of a step for calls of other threads.
const STEP_PATIENCE: Duration = Duration::from_millis(100);
/// A refused slice is halved down to this.
const SLICE_BYTES_MIN: u64 = 16 << 20;

impl ArenaSupply {
    /// Pins a reserve of `bytes` (policy-R10) before it returns. If a limit refuses it, calls `make_room` with the bytes that may
    /// stay held, and tries again. Makes slow calls.
    pub(in crate::engine) fn reserve_now(
        &self,
        bytes: u64,
        hugetlb: HugeTlb,
        make_room: impl FnOnce(u64),
    ) -> Result<(), Refusal> {
        let pinned = self.pin_slices(bytes).or_else(|refusal| {
            let to_bytes = match &refusal {
                // Idle memory of this pool makes room under the shared limit.
                Refusal::Limit(QuotaExceeded { level: LimitLevel::Shared, bytes, .. }) => {
                    Some(self.books().held_bytes().saturating_sub(*bytes))
                }
                Refusal::Limit(QuotaExceeded { level: LimitLevel::Partition | LimitLevel::Pool, bytes, .. }) => {
                    self.budget.max_bytes().and_then(|max_bytes| max_bytes.checked_sub(*bytes))
                }
                Refusal::Source(_) | Refusal::Queued { .. } => None,
            };
            make_room(to_bytes.ok_or(refusal)?);
            self.pin_slices(bytes)
        });
        let places = pinned?;
        let pinned_bytes = places.iter().map(|place| place.len() as u64).sum::<u64>();
        let huge = || huge_bytes(&places);
        if hugetlb.is_required()
            && let Some(lack) = too_few(hugetlb, huge()[0], pinned_bytes)
        {
            self.log.huge_pages(&lack);
        }
        self.log.reserve_pinned(bytes.min(pinned_bytes), || huge().iter().sum(), self.source.numa_node());
        Ok(())
    }

    /// Pins `bytes` in dedicated ranges, in slices if the source specifies a length for them. Returns their addresses. If the source
    /// refuses even short slices, these are fewer than requested, and a log line says so. Makes slow calls.
    fn pin_slices(&self, bytes: u64) -> Result<Vec<Range<usize>>, Refusal> {
        let len = self.claim_reserve(bytes)?;
        self.books().add_request(len);
        // A new reserve is reported from its beginning.
        self.reserve.progress.lock().reported = 0;
        let slices = Slices::new(len, self.source.reserve_slice_bytes());
        let (are_several, pin_threads) = (len > slices.slice_bytes, self.settings.pin_threads);
        let threads = if are_several { touching_threads(pin_threads) } else { pin_threads };
        let slices = Mutex::new(slices);
        let next = || slices.lock().next();
        let pin = |progress: &dyn Fn(usize)| {
            while let Some(bytes) = next() {
                let pinned = self.pin_region((bytes, threads), progress);
                slices.lock().record(bytes, pinned);
                self.report_progress(0);
            }
        };
        threads::scope(|scope| {
            // Without that thread, this thread pins all slices.
            let _second = are_several.then(|| scope.spawn(c"pinpool-reserve", || pin(&|_| ())));
            pin(&|done| self.report_progress(done as u64));
        });
        let Slices { places, left_bytes, refusal, .. } = slices.into_inner();
        if left_bytes > 0 {
            let mut books = self.books();
            books.unclaim_reserve(self.reserved_bytes(left_bytes));
            books.request_less(left_bytes);
        }
        match refusal {
            Some(refusal) if places.is_empty() => return Err(refusal),
            Some(Refusal::Source(error)) => self.log.reserve_stopped(len - left_bytes, len, &error),
            _ => {}
        }
        Ok(places)
    }

    /// The bytes that the system holds for a region of a reserve.
    fn reserved_bytes(&self, bytes: u64) -> u64 {
        held(bytes, |len| self.source.held_bytes_fast(len))
    }

    /// Claims a reserve of `bytes`, and returns its length. Refused if the reserves would leave no room for a request that waits. The
    /// claim comes first, so that a request that arrives meanwhile is refused.
    fn claim_reserve(&self, bytes: u64) -> Result<u64, Refusal> {
        let len = self.books().claim_reserve(bytes, |bytes| self.reserved_bytes(bytes))?;
        let waiting = self.pool().map(|pool| pool.waiting_bytes()).unwrap_or_default();
        let is_short = waiting.iter().any(|&waiting_bytes| !self.could_hold_bytes(waiting_bytes));
        let Some(&first_bytes) = waiting.first().filter(|_| is_short) else { return Ok(len) };
        self.books().unclaim_reserve(self.reserved_bytes(len));
        Err(Refusal::Queued { waiting: waiting.len() as u64, first_bytes })
    }

    /// Pins claimed `bytes` of a reserve with this number of threads, and returns their addresses. If that fails, they stay claimed.
    fn pin_region(&self, (bytes, threads): (u64, usize), progress: &dyn Fn(usize)) -> Result<Range<usize>, Refusal> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut pin = CallStats::default();
        let acquired = self.source.acquire_fast(len, threads, progress, &mut pin);
        let took = pin.time.total();
        let mut books = self.books();
        books.calls.pin.add(&pin);
        let region = acquired.map_err(Refusal::Source)?;
        let (start, held_before_bytes) = (region.start().addr().get(), books.held_bytes());
        let added = books.add_reserve(region, self.reserved_bytes(bytes));
        let held_bytes = books.held_bytes();
        drop(books);
        let max_bytes = self.budget.max_bytes();
        self.log.acquired(&Growth { asked_bytes: bytes, held_before_bytes, held_bytes, pin_calls: 1, took, max_bytes });
        let Err(region) = added else { return Ok(start..start.saturating_add(len)) };
        self.release_region(region).map_err(Refusal::Source)?;
        Err(Refusal::Source(SourceError::new("arena", "no range is left for a reserve")))
    }

    /// One step while the pool is in use: granules, or a region if the source has no virtual memory. Makes slow calls.
    pub(super) fn pin_step(&self) -> Step {
        let pool = self.pool();
        let now_us = pool.as_ref().map_or(0, |pool| pool.now_us());
        if self.shape.is_discrete {
            return self.region_step(pool.is_some_and(|pool| pool.has_copies()), now_us);
        }
        let mut books = self.books();
        let remedy = self.shape.address_remedy.unwrap_or("reserve less, or raise PINPOOL_MAX_BYTES");
        let plan = match books.plan_reserve_step(STEP_BYTES, remedy) {
            Ok(plan) => plan,
            Err(step) => return step,
        };
        let until = Instant::now() + STEP_PATIENCE;
        self.carry_out(books, plan, now_us, until, None).map_or_else(Step::Failed, |_| Step::Made)
    }

    /// A region of the reserve. Short while copies are in flight, since it would delay enqueues.
    fn region_step(&self, has_copies: bool, now_us: u64) -> Step {
        let books = self.books();
        let (to_come, is_first, is_closed) =
            (books.reserve_to_come(), books.reserve_progress().pinned_bytes == 0, books.is_closed);
        drop(books);
        if to_come == 0 || is_closed {
            return Step::Done;
        }
        let bytes = to_come.min(if is_first || has_copies { STEP_BYTES } else { REGION_BYTES });
        let pinned = self.claim_reserve(bytes).and_then(|len| {
            let pinned = self.pin_region((len, self.settings.pin_threads), &|_| ());
            pinned.inspect_err(|_| self.books().unclaim_reserve(self.reserved_bytes(len)))
        });
        match pinned {
            Ok(_) => {}
            Err(Refusal::Source(error)) => return Step::Failed(error),
            Err(Refusal::Limit(_) | Refusal::Queued { .. }) => return self.books().without_room(bytes),
        }
        if self.books().is_unused() {
            // The pool has ended while this region was being pinned.
            self.teardown(now_us);
        }
        Step::Made
    }
}

/// The threads that touch a slice while another is registered. One core is left to the thread that registers: with 15 threads on
/// 16 cores a C loop of the same steps reached 34.7 GB/s, with 16 only 24.8.
fn touching_threads(pin_threads: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    pin_threads.min(cores - 1).max(1)
}

/// The slices of a reserve that are pinned, and the rest.
#[derive(Debug)]
struct Slices {
    /// The addresses of each.
    places: Vec<Range<usize>>,
    left_bytes: u64,
    slice_bytes: u64,
    min_bytes: u64,
    /// The reason that no further slice is pinned.
    refusal: Option<Refusal>,
}

impl Slices {
    /// `bytes` in slices of this length, or in one piece.
    fn new(bytes: u64, slice_bytes: Option<u64>) -> Self {
        let (slice_bytes, min_bytes) = slice_bytes.map_or((bytes, bytes), |slice_bytes| (slice_bytes, SLICE_BYTES_MIN));
        Self { places: Vec::new(), left_bytes: bytes, slice_bytes, min_bytes, refusal: None }
    }

    /// The length of the next slice, for the caller to pin.
    fn next(&mut self) -> Option<u64> {
        let bytes = self.left_bytes.min(self.slice_bytes);
        if bytes == 0 || self.refusal.is_some() {
            return None;
        }
        self.left_bytes -= bytes;
        Some(bytes)
    }

    /// Records the outcome of a slice of [`next`](Self::next).
    fn record(&mut self, bytes: u64, pinned: Result<Range<usize>, Refusal>) {
        match pinned {
            Ok(place) => self.places.push(place),
            Err(refusal) => {
                self.left_bytes += bytes;
                if bytes > self.min_bytes {
                    self.slice_bytes = (bytes / 2).next_multiple_of(GRANULE_BYTES).max(self.min_bytes);
                } else {
                    self.refusal = Some(refusal);
                }
            }
        }
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use crate::backend::SourceError;

    #[test]
    fn a_refused_slice_is_halved_down_to_a_least_one_and_the_rest_is_left() {
        const MIB: u64 = 1 << 20;
        let mut slices = Slices::new(600 * MIB, Some(256 * MIB));
        assert_eq!((slices.next(), slices.next()), (Some(256 * MIB), Some(256 * MIB)));
        slices.record(256 * MIB, Ok(0..0));
        let refused = || Err(Refusal::Source(SourceError::new("test", "refused")));
        slices.record(256 * MIB, refused());
        for mib in [128, 64, 32, 16] {
            assert_eq!(slices.next(), Some(mib * MIB));
            slices.record(mib * MIB, refused());
        }
        assert_eq!((slices.next(), slices.left_bytes, slices.places.len()), (None, 344 * MIB, 1));
        assert!(slices.refusal.is_some());
        let mut whole = Slices::new(600 * MIB, None);
        assert_eq!(whole.next(), Some(600 * MIB));
        whole.record(600 * MIB, refused());
        assert_eq!(whole.next(), None, "one piece is not halved");
    }
}
