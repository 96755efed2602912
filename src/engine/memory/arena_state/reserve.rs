//! The reserve of an arena: what was requested, what exists, and the next step (policy-R10).
//!
//! A part of a reserve is claimed before it is pinned. Each part is a region with a dedicated range, or granules that the arena
//! keeps.

use std::time::{Duration, Instant};

use super::super::block_memory::Refusal;
use super::super::shape::GRANULE_BYTES;
use super::ArenaState;
use crate::arena::{Plan, RANGE_BYTES_MAX};
use crate::backend::{PAGE_BYTES, Region, SourceError};
use crate::maintenance_thread::Pace;
use pinpool_os::format::Size;
use pinpool_shared_limit::Want;

/// The progress of pinning reserves.
#[derive(Debug, Default)]
pub(in crate::engine) struct Progress {
    pub(in crate::engine) is_cancelled: bool,
    /// The error that stopped the pinning.
    pub(in crate::engine) stopped: Option<SourceError>,
    /// Whether the limit had no room for the last step.
    pub(in crate::engine) lacks_room: bool,
    /// The bytes that other members of the shared limit should release for the reserve.
    pub(in crate::engine) want: Want,
    /// Whether the log has reported that the reserve waits for room.
    pub(in crate::engine) has_logged_lack: bool,
    /// When the pinning in the background began, and the bytes pinned then.
    pub(in crate::engine) begun: Option<(Instant, u64)>,
    /// Number of quarters that the log has reported.
    pub(in crate::engine) reported: u128,
}

impl Progress {
    /// Returns how soon the next step is due.
    pub(in crate::engine) fn pace(&self) -> Pace {
        if self.begun.is_none() || self.is_cancelled || self.stopped.is_some() {
            Pace::Never
        } else if self.lacks_room {
            Pace::Quiet
        } else {
            Pace::Steps
        }
    }
}

impl ArenaState {
    /// Refuses `bytes` if they exceed the longest possible reserve.
    fn check_length(&self, bytes: u64) -> Result<(), Refusal> {
        if bytes <= RANGE_BYTES_MAX {
            return Ok(());
        }
        if !self.budget.could_hold(bytes) {
            return Err(self.budget.refusal(bytes).into());
        }
        let what = format!("{} is more than one reserve may have: {}", Size(bytes), Size(RANGE_BYTES_MAX));
        Err(Refusal::Source(SourceError::new("reserve", what)))
    }

    /// Requests a reserve of `bytes` more, if the limit has room for all reserves. Bytes that a stopped reserve lacks are not
    /// requested twice.
    pub(in crate::engine) fn request_reserve(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.check_length(bytes)?;
        let lacking_bytes = self.progress.stopped.as_ref().map_or(0, |_| self.unpinned_reserve_bytes());
        let requested_bytes = self.requested_reserve_bytes.saturating_add(bytes - bytes.min(lacking_bytes));
        if self.budget.max_bytes().is_some_and(|max_bytes| requested_bytes > max_bytes) {
            return Err(self.budget.own_refusal(bytes).into());
        }
        self.requested_reserve_bytes = requested_bytes;
        Ok(())
    }

    /// Requests `bytes` less, but at most the bytes that are neither pinned nor being pinned.
    pub(in crate::engine) fn reduce_reserve_request(&mut self, bytes: u64) {
        self.requested_reserve_bytes -= bytes.min(self.unpinned_reserve_bytes());
    }

    /// Returns the pinned bytes and the requested bytes of all reserves.
    pub(in crate::engine) fn reserve_progress(&self) -> (u64, u64) {
        (self.arena.stats().reserve_bytes + self.arena.kept_bytes(), self.requested_reserve_bytes)
    }

    /// Returns the time until the reserve is complete, at the rate so far; `None` if no reserve is in progress or the rate is
    /// unknown.
    pub(in crate::engine) fn reserve_eta(&self) -> Option<Duration> {
        let (at, before_bytes) = self.progress.begun.filter(|_| self.progress.pace() == Pace::Steps)?;
        let (pinned_bytes, target_bytes) = self.reserve_progress();
        let done_bytes = u128::from(pinned_bytes.checked_sub(before_bytes).filter(|&bytes| bytes > 0)?);
        let left_bytes = u128::from(target_bytes.saturating_sub(pinned_bytes));
        let micros = at.elapsed().as_micros().saturating_mul(left_bytes) / done_bytes;
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// Returns the requested bytes that are neither pinned nor being pinned.
    pub(in crate::engine) fn unpinned_reserve_bytes(&self) -> u64 {
        let (pinned_bytes, target_bytes) = self.reserve_progress();
        target_bytes.saturating_sub(pinned_bytes + self.pending_bytes)
    }

    /// Returns the length of the longest buffer that the granules of the complete reserve could hold.
    pub(in crate::engine) fn reserve_in_granules(&self) -> u64 {
        self.requested_reserve_bytes.saturating_sub(self.arena.stats().reserve_bytes + self.pending_bytes)
    }

    /// Plans the next step, of about `step_bytes`.
    pub(in crate::engine) fn plan_reserve_step(&mut self, step_bytes: u64) -> Result<Plan, Refusal> {
        let plan = self.arena.commit_next(step_bytes, self.budget.room_for(step_bytes)).map_err(|granule_bytes| {
            if granule_bytes == 0 {
                let error = SourceError::new("reserve", "no addresses are left for it");
                let remedy = self.shape.address_remedy.unwrap_or("reserve less, or raise PINPOOL_MAX_BYTES");
                return Refusal::Source(error.with_remedy(remedy));
            }
            self.keep_committed(granule_bytes);
            self.budget.own_refusal(granule_bytes).into()
        })?;
        Ok(self.claim_plan(plan)?)
    }

    /// Makes memory that is committed for buffers part of the reserve, because there is no room for `granule_bytes` more.
    pub(in crate::engine) fn keep_committed(&mut self, granule_bytes: u64) {
        self.arena.keep(self.unpinned_reserve_bytes());
        // There may be room later: other members of the shared limit may release memory.
        let held_by_others = self.budget.is_shared() && self.budget.own_room_bytes() >= self.unpinned_reserve_bytes();
        let has_no_room = self.budget.over_bytes() > 0 || self.arena.stats().transit_bytes > 0 || held_by_others;
        if !has_no_room && self.unpinned_reserve_bytes() < granule_bytes {
            // The limit has no room for a whole granule, so the missing part of a granule can never be pinned.
            self.reduce_reserve_request(self.unpinned_reserve_bytes());
        }
    }

    /// Claims the bytes that the system will hold for a reserve of `bytes`, as `held` computes them. The reserve has
    /// whole granules if there is room for them, and whole pages otherwise. Returns the length of the reserve.
    pub(in crate::engine) fn claim_reserve(&mut self, bytes: u64, held: impl Fn(u64) -> u64) -> Result<u64, Refusal> {
        self.check_length(bytes)?;
        let mut claim = |unit| {
            let len = bytes.next_multiple_of(unit);
            self.pending_bytes += held(len);
            self.update_claim().inspect_err(|_| self.pending_bytes -= held(len)).map(|()| len)
        };
        Ok(claim(GRANULE_BYTES).or_else(|_| claim(PAGE_BYTES as u64))?)
    }

    /// Ends the claim on `held_bytes` that [`claim_reserve`](Self::claim_reserve) made, since they will not be held.
    pub(in crate::engine) fn cancel_reserve_claim(&mut self, held_bytes: u64) {
        self.pending_bytes -= held_bytes;
        self.lower_claim();
    }

    /// Adds `region` to the reserve; [`claim_reserve`](Self::claim_reserve) claimed `held_bytes` for it. Returns the region, and
    /// keeps the claim, if the arena has no range left for it.
    pub(in crate::engine) fn add_reserve(&mut self, region: Region, held_bytes: u64) -> Result<(), Region> {
        let bytes = region.len_bytes() as u64;
        let Some(range) = self.arena.add_reserve(bytes) else { return Err(region) };
        self.pending_bytes -= held_bytes;
        self.mappings.regions.insert(range, region);
        // The region may be longer than was requested, since its length is rounded up.
        self.requested_reserve_bytes = self.requested_reserve_bytes.max(self.reserve_progress().0);
        self.reserve_overhead_bytes += held_bytes - bytes;
        self.lower_claim();
        self.record_peak();
        self.largest_reserve_bytes = self.largest_reserve_bytes.max(bytes);
        Ok(())
    }

    /// Returns the bytes that the system holds or will hold for all reserves, and the bytes of the largest. Reserves in
    /// progress count as one.
    pub(in crate::engine) fn reserve_bytes(&self) -> (u64, u64) {
        let held_bytes = self.arena.stats().reserve_bytes + self.reserve_overhead_bytes + self.pending_bytes;
        (held_bytes, self.largest_reserve_bytes.max(self.pending_bytes))
    }
}
