//! Pins a reserve: in steps of a few granules or one region while the pool is in use, or without pauses in slices. Two threads
//! pin the slices: while one thread registers its slice, the threads that the other has started touch the next slice.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::PoolView;
use super::arena_supply::ArenaSupply;
use super::block_memory::Refusal;
use super::shape::{GRANULE_BYTES, apply_len};
use crate::backend::{BuiltInSource, Source, SourceError, huge_bytes};
use crate::quota::LimitLevel;
use crate::stats::CallStats;
use pinpool_os::sync::unmodeled::Mutex;
use pinpool_os::threads;

/// Bytes of a step, which takes 2 to 3 ms on `mlock` and `vmm`. Larger granules are pinned one by one.
const STEP_BYTES: u64 = 8 << 20;
/// Length of a region of the reserve, and so of the longest buffer in it, if the source has no virtual memory.
const REGION_BYTES: u64 = 64 << 20;
/// How long a step waits for other threads' calls.
const STEP_PATIENCE: Duration = Duration::from_millis(100);
/// A refused slice is halved repeatedly, down to this length.
const SLICE_BYTES_MIN: u64 = 16 << 20;

impl ArenaSupply {
    /// Pins a reserve of `bytes` (policy-R10) before it returns. If the source refuses even short slices, the reserve consists
    /// of the slices that are pinned; without any, the call fails. The call may be slow.
    pub(in crate::engine) fn reserve_now(&self, bytes: u64, pool: &dyn PoolView) -> Result<(), Refusal> {
        let len = self.claim_reserve(bytes, pool)?;
        let mut state = self.state();
        state.requested_reserve_bytes += len;
        // A new reserve is reported from its beginning.
        state.progress.reported = 0;
        drop(state);
        let Slices { places, left_bytes, error, .. } = self.pin_slices(len);
        let pinned_bytes = len - left_bytes;
        match error {
            Some(error) if pinned_bytes == 0 => return Err(Refusal::Source(error)),
            Some(error) => self.log.reserve_stopped(pinned_bytes, len, &error),
            None => {}
        }
        let huge = || huge_bytes(&places);
        if let Some(lack) = self.settings.hugetlb.lack(|| huge()[0], pinned_bytes) {
            self.log.huge_pages(&lack);
        }
        self.log.reserve_call(bytes.min(pinned_bytes), || huge().iter().sum(), self.source.numa_node());
        Ok(())
    }

    /// Pins `bytes` of a reserve, which are claimed already, in dedicated ranges, and in slices if the source prefers them.
    /// Bytes that it does not pin are neither claimed nor requested any longer. The call may be slow.
    fn pin_slices(&self, bytes: u64) -> Slices {
        let slices = Slices::new(bytes, self.source.reserve_slice_bytes());
        let (are_several, pin_threads) = (bytes > slices.slice_bytes, self.settings.pin_threads);
        // These threads touch a slice while another slice is registered. One core is left to the thread that registers: with 15
        // threads on 16 cores a C loop of the same steps reached 34.7 GB/s, with 16 threads only 24.8.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if are_several { pin_threads.min(cores - 1).max(1) } else { pin_threads };
        let slices = Mutex::new(slices);
        let next = || slices.lock().next();
        let pin = |progress: &dyn Fn(usize)| {
            while let Some(bytes) = next() {
                let pinned = self.pin_region(bytes, threads, progress);
                slices.lock().record(bytes, pinned);
                self.report_progress(0);
            }
        };
        threads::scope(|scope| {
            // If this thread cannot be started, the calling thread pins all slices.
            let _second = are_several.then(|| scope.spawn(c"pinpool-reserve", || pin(&|_| ())));
            pin(&|done| self.report_progress(done as u64));
        });
        let slices = slices.into_inner();
        if slices.left_bytes > 0 {
            // Both under one lock, so that memory that a request commits in between does not become part of this reserve.
            let mut state = self.state();
            state.cancel_reserve_claim(self.reserved_bytes(slices.left_bytes));
            state.reduce_reserve_request(slices.left_bytes);
        }
        slices
    }

    /// Returns the bytes that the system holds for a region of a reserve.
    fn reserved_bytes(&self, bytes: u64) -> u64 {
        apply_len(bytes, |len| self.source.held_bytes_in_bulk(len))
    }

    /// Claims a reserve of `bytes`, and returns its length. Returns a refusal if the reserves would leave no room for a waiting
    /// request. Claims before it checks, so that a request that arrives in between is refused.
    fn claim_reserve(&self, bytes: u64, pool: &dyn PoolView) -> Result<u64, Refusal> {
        let len = self.state().claim_reserve(bytes, |bytes| self.reserved_bytes(bytes))?;
        let waiting = pool.waiting_bytes();
        let short = waiting.iter().any(|&waiting_bytes| !self.could_hold_bytes(waiting_bytes));
        let Some(&first_bytes) = waiting.first().filter(|_| short) else { return Ok(len) };
        self.state().cancel_reserve_claim(self.reserved_bytes(len));
        Err(Refusal::Queued { level: LimitLevel::Pool, waiting: waiting.len() as u64, first_bytes })
    }

    /// Pins `bytes` of a reserve, which are claimed already, with `threads` threads that touch the memory, and returns
    /// their addresses. If that fails, the bytes stay claimed.
    fn pin_region(&self, bytes: u64, threads: usize, progress: &dyn Fn(usize)) -> Result<Range<usize>, SourceError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut pin = CallStats::default();
        let acquire = |source: &dyn Source| source.acquire_bulk(len, threads, progress);
        let acquired = self.source.acquire(len, &mut pin, acquire);
        let took = pin.time.total();
        let mut state = self.state();
        state.calls.pin.add(&pin);
        let region = acquired?;
        let (start, held_before_bytes) = (region.start().addr().get(), state.held_bytes());
        let added = state.add_reserve(region, self.reserved_bytes(bytes));
        let held_bytes = state.held_bytes();
        drop(state);
        self.log.acquired(bytes, held_before_bytes, held_bytes, 1, took);
        let Err(region) = added else { return Ok(start..start.saturating_add(len)) };
        self.release_region(&region)?;
        Err(SourceError::new("reserve", "no addresses are left for it"))
    }

    /// Pins one step while the pool is in use: granules, or a region if the source has no virtual memory. If the limit has no
    /// room for the step, memory that is committed already becomes part of the reserve. The call may be slow.
    pub(super) fn pin_step(&self, pool: &dyn PoolView) -> Result<(), Refusal> {
        let now_us = pool.now_us();
        let mut state = self.state();
        let to_come = state.unpinned_reserve_bytes();
        // Once the pool has ended, its addresses may be gone.
        if to_come == 0 || state.has_ended {
            return Ok(());
        }
        if !self.shape.has_regions {
            let plan = state.plan_reserve_step(STEP_BYTES.min(to_come))?;
            let carried_out = self.carry_out(state, plan, now_us, Instant::now() + STEP_PATIENCE, None);
            return carried_out.map(drop).map_err(Refusal::Source);
        }
        // The first region is short, so that it is pinned soon, and so are regions while copies are in flight, since pinning
        // delays enqueues.
        let short = state.reserve_progress().0 == 0 || pool.has_copies();
        drop(state);
        let bytes = to_come.min(if short { STEP_BYTES } else { REGION_BYTES });
        let len = self.claim_reserve(bytes, pool).inspect_err(|_| self.state().keep_committed(bytes))?;
        let pinned = self.pin_region(len, self.settings.pin_threads, &|_| ());
        if pinned.is_err() {
            self.state().cancel_reserve_claim(self.reserved_bytes(len));
        }
        if self.state().is_unused() {
            // The pool has ended while this region was being pinned.
            self.tear_down(now_us);
        }
        pinned.map(drop).map_err(Refusal::Source)
    }
}

/// The slices of a reserve that are pinned, and the rest.
#[derive(Debug)]
struct Slices {
    /// The addresses of each pinned slice.
    places: Vec<Range<usize>>,
    left_bytes: u64,
    slice_bytes: u64,
    min_bytes: u64,
    /// The reason that no further slice is pinned.
    error: Option<SourceError>,
}

impl Slices {
    /// Divides `bytes` into slices of this length; `None` makes one piece.
    fn new(bytes: u64, slice_bytes: Option<u64>) -> Self {
        let (slice_bytes, min_bytes) = slice_bytes.map_or((bytes, bytes), |slice_bytes| (slice_bytes, SLICE_BYTES_MIN));
        Self { places: Vec::new(), left_bytes: bytes, slice_bytes, min_bytes, error: None }
    }

    /// Returns the length of the next slice, which the caller must pin and [`record`](Self::record).
    fn next(&mut self) -> Option<u64> {
        let bytes = self.left_bytes.min(self.slice_bytes);
        if bytes == 0 || self.error.is_some() {
            return None;
        }
        self.left_bytes -= bytes;
        Some(bytes)
    }

    /// Records the outcome of a slice that [`next`](Self::next) returned.
    fn record(&mut self, bytes: u64, pinned: Result<Range<usize>, SourceError>) {
        match pinned {
            Ok(place) => self.places.push(place),
            Err(error) => {
                self.left_bytes += bytes;
                if bytes > self.min_bytes {
                    self.slice_bytes = (bytes / 2).next_multiple_of(GRANULE_BYTES).max(self.min_bytes);
                } else {
                    self.error = Some(error);
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
    fn refused_slices_are_halved_down_to_a_minimum() {
        const MIB: u64 = 1 << 20;
        let mut slices = Slices::new(600 * MIB, Some(256 * MIB));
        assert_eq!((slices.next(), slices.next()), (Some(256 * MIB), Some(256 * MIB)));
        slices.record(256 * MIB, Ok(0..0));
        let refused = || Err(SourceError::new("test", "refused"));
        slices.record(256 * MIB, refused());
        for mib in [128, 64, 32, 16] {
            assert_eq!(slices.next(), Some(mib * MIB));
            slices.record(mib * MIB, refused());
        }
        assert_eq!((slices.next(), slices.left_bytes, slices.places.len()), (None, 344 * MIB, 1));
        assert!(slices.error.is_some());
        let mut whole = Slices::new(600 * MIB, None);
        assert_eq!(whole.next(), Some(600 * MIB));
        whole.record(600 * MIB, refused());
        assert_eq!(whole.next(), None, "one piece is not halved");
    }
}
