//! The progress of a reserve (policy-R10), and a reserve that is pinned in the background: after the first step the maintenance
//! thread pins the rest, while requests pin what they need.
//!
//! ```text
//!   begin: [lock: request, plan] ─▶ first step ─▶ returns
//!   each round of the thread:
//!                    [lock: plan] ─▶ step (no lock) ─▶ [lock: finish] ─▶ the next round, until the reserve is complete
//!                       └─ no room: pauses; a tick or a higher limit resumes it
//!                       └─ refused: ends with a warning; the pool continues with what it has
//! ```
//!
//! Without the maintenance thread (`maintenance_thread(false)`) each `Pool::maintain` makes one step.

use std::thread;
use std::time::{Duration, Instant};

use super::PoolView;
use super::arena_supply::ArenaSupply;
use super::block_memory::Refusal;
use crate::backend::SourceError;
use crate::maintenance_thread::{MaintenanceThread, Pace};
use crate::report;

/// Time between two checks of a thread that waits for the reserve. It must poll: memory that requests commit becomes part of
/// the reserve without a notification.
const CHECK_EVERY: Duration = Duration::from_millis(5);
/// How long `cancel_reserve` waits for a step.
const CANCEL_PATIENCE: Duration = Duration::from_secs(30);
/// The log reports the progress of a reserve in this many parts.
const REPORTS: u128 = 4;

impl ArenaSupply {
    /// Requests a reserve of `bytes` and pins its first step. The rest follows while the pool is in use. The call may be slow.
    pub(in crate::engine) fn begin_reserve(&self, bytes: u64, pool: &dyn PoolView) -> Result<(), Refusal> {
        let mut state = self.state();
        state.request_reserve(bytes)?;
        let pinned_bytes = state.reserve_progress().0;
        let progress = &mut state.progress;
        let is_first = progress.begun.is_none();
        progress.begun.get_or_insert((Instant::now(), pinned_bytes));
        (progress.stopped, progress.reported) = (None, 0);
        (progress.lacks_room, progress.has_logged_lack) = (false, false);
        drop(state);
        if is_first && let Some(Err(refusal @ Refusal::Source(_))) = self.step(pool) {
            let mut state = self.state();
            state.reduce_reserve_request(bytes);
            // Another reserve may have been requested in the meantime.
            state.progress.begun =
                state.progress.begun.filter(|_| state.reserve_progress().0 < state.reserve_progress().1);
            return Err(refusal);
        }
        let (pinned_bytes, target_bytes) = self.state().reserve_progress();
        self.log.reserve_started(pinned_bytes, target_bytes);
        if pinned_bytes >= target_bytes {
            self.end_reserve();
        }
        Ok(())
    }

    /// Returns how soon the next step is due. A reserve without room waits for a tick.
    pub(in crate::engine) fn reserve_pace(&self) -> Pace {
        self.state().progress.pace()
    }

    /// Lets a reserve that waits for room try its next step again, because there may be room. If the limit `is_raised`, also
    /// continues a reserve that was complete before the limit was lowered.
    pub(in crate::engine) fn resume_reserve(&self, is_raised: bool) {
        let mut state = self.state();
        state.progress.lacks_room = false;
        if is_raised && state.unpinned_reserve_bytes() > 0 {
            let pinned_bytes = state.reserve_progress().0;
            state.progress.begun.get_or_insert((Instant::now(), pinned_bytes));
        }
    }

    /// Makes one step, if one is due, and logs its result. Returns whether another step is due now. The call may be slow.
    pub(in crate::engine) fn run_reserve_step(&self, pool: &dyn PoolView) -> bool {
        if self.reserve_pace() != Pace::Steps {
            return false;
        }
        let Some(made) = self.step(pool) else { return false };
        match made {
            Ok(()) => {
                self.update_want();
                self.report_progress(0);
                // Waiting requests may fit into the memory that is pinned now.
                pool.on_room_made();
            }
            // Memory that requests have committed has completed the reserve.
            Err(_) if self.state().unpinned_reserve_bytes() == 0 => {}
            Err(Refusal::Source(error)) => {
                self.state().progress.stopped = Some(error.clone());
                self.update_want();
                let (pinned_bytes, target_bytes) = self.state().reserve_progress();
                self.log.reserve_stopped(pinned_bytes, target_bytes, &error);
            }
            Err(_) => self.pause_reserve(),
        }
        if self.state().unpinned_reserve_bytes() == 0 {
            self.end_reserve();
        }
        self.reserve_pace() == Pace::Steps
    }

    /// Pauses the reserve until there is room for the next step, and logs that once.
    fn pause_reserve(&self) {
        let mut state = self.state();
        state.progress.lacks_room = true;
        let was_logged = std::mem::replace(&mut state.progress.has_logged_lack, true);
        let (pinned_bytes, target_bytes) = state.reserve_progress();
        drop(state);
        if !was_logged {
            self.log.reserve_paused(pinned_bytes, target_bytes, self.budget.max_bytes());
        }
        // No thread was notified of releases by other members before the want was raised.
        if self.update_want() {
            self.resume_reserve(false);
        }
    }

    /// Updates the bytes that this reserve wants from other members of the shared limit. If the reserve lacks room, it wants all
    /// missing bytes for which the pool's own limit leaves room, and otherwise no more than before. Returns whether it wants
    /// more than before.
    fn update_want(&self) -> bool {
        let state = self.state();
        // If the limit is no longer shared, a want may remain from the time when it was.
        if !self.budget.is_shared() && state.progress.want.bytes() == 0 {
            return false;
        }
        let lacking_bytes = state.unpinned_reserve_bytes().min(self.budget.own_room_bytes());
        let before_bytes = state.progress.want.bytes();
        let now_bytes = match state.progress.pace() {
            Pace::Never => 0,
            Pace::Quiet => lacking_bytes,
            _ => before_bytes.min(lacking_bytes),
        };
        // Under the lock, so that two changes reach the shared limit in order. The needed bytes are 0, since others release
        // only idle memory for a reserve.
        self.budget.set_want(&state.progress.want, now_bytes, 0);
        now_bytes > before_bytes
    }

    /// Logs each time that another quarter of all reserves is pinned. `unfinished_bytes` of a call in progress count as pinned.
    pub(super) fn report_progress(&self, unfinished_bytes: u64) {
        let mut state = self.state();
        let (pinned_bytes, target_bytes) = state.reserve_progress();
        let pinned_bytes = pinned_bytes + unfinished_bytes;
        let reached = u128::from(pinned_bytes) * REPORTS / u128::from(target_bytes.max(1));
        let is_new = reached > state.progress.reported && reached < REPORTS;
        state.progress.reported = state.progress.reported.max(reached);
        let eta = state.reserve_eta();
        drop(state);
        if is_new {
            self.log.reserve_progress(pinned_bytes, target_bytes, eta);
        }
    }

    /// Ends the progress of a reserve that is complete, and logs that once.
    fn end_reserve(&self) {
        let mut state = self.state();
        let begun = state.progress.begun.take();
        (state.progress.lacks_room, state.progress.has_logged_lack) = (false, false);
        let pinned_bytes = state.reserve_progress().0;
        drop(state);
        self.update_want();
        let Some((at, before_bytes)) = begun else { return };
        self.log.reserve_complete(pinned_bytes.saturating_sub(before_bytes), at.elapsed(), self.source.numa_node());
    }

    /// Cancels the reserve because the pool ends: no step begins from now on. Waits for a step in progress.
    pub(in crate::engine) fn cancel_reserve(&self) {
        let until = Instant::now() + CANCEL_PATIENCE;
        self.state().progress.is_cancelled = true;
        while self.reserve_step.try_lock().is_none() && Instant::now() < until {
            thread::sleep(CHECK_EVERY);
        }
        self.update_want();
    }

    /// Waits until the whole reserve is pinned, at most until `until`. Returns whether it is pinned. If no thread makes the
    /// steps, `unthreaded` is the pool, and this call makes them. The call may be slow.
    ///
    /// # Errors
    ///
    /// The source refused a step.
    pub(in crate::engine) fn wait_for_reserve(
        &self,
        until: Instant,
        unthreaded: Option<&dyn PoolView>,
    ) -> Result<bool, SourceError> {
        loop {
            let due = unthreaded.is_some_and(|pool| self.run_reserve_step(pool));
            let state = self.state();
            let (pinned_bytes, target_bytes) = state.reserve_progress();
            if pinned_bytes >= target_bytes {
                return Ok(true);
            }
            if let Some(error) = &state.progress.stopped {
                return Err(error.clone());
            }
            if Instant::now() >= until || state.progress.is_cancelled {
                return Ok(false);
            }
            drop(state);
            if !due {
                thread::sleep(CHECK_EVERY.min(until.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Makes one step. Returns `None` if another thread is making one, or if the pool or the process ends.
    fn step(&self, pool: &dyn PoolView) -> Option<Result<(), Refusal>> {
        // A log sink may end the pool, so log lines are delivered after the step.
        let _deferral = report::defer();
        let (call, step) = (MaintenanceThread::of_process().enter(), self.reserve_step.try_lock());
        let mut state = self.state();
        state.progress.is_cancelled |= call.is_none();
        if state.progress.is_cancelled || step.is_none() {
            return None;
        }
        drop(state);
        Some(self.pin_step(pool))
    }
}
