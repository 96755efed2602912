//! A reserve that is pinned in the background (policy-R10): after the first step a thread pins the rest, and requests have
//! priority.
//!
//! ```text
//!   begin: [lock: request, plan] ─▶ first step ─▶ returns
//!   pinpool-reserve: a request needs memory? ─yes─▶ pause
//!                    [lock: plan] ─▶ step (no lock) ─▶ [lock: finish] ─▶ again, until the reserve is complete
//!                       └─ no room: ends; a tick or a higher limit starts it again
//!                       └─ refused: ends with a warning; the pool continues with what it has
//! ```
//!
//! Each arena with a reserve to pin has a dedicated thread, because a step may be slow and the maintenance thread serves all pools
//! of the process. The thread keeps no reference to the arena between two steps. Without background threads
//! (`background_thread(false)`) each `Pool::maintain` makes one step.
//!
//! - **background-I1**: one thread makes a step at a time, and none after `cancel_reserve` has returned.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::arena_supply::{ArenaSupply, Reserve};
use super::block_memory::Refusal;
use super::books::Step;
use crate::backend::SourceError;
use crate::maintenance_thread::MaintenanceThread;
use crate::report;
use pinpool_os::threads;

/// Longest pause of the thread for requests that need memory; the memory that they commit becomes part of the reserve.
const PATIENCE_FOR_REQUESTS: Duration = Duration::from_millis(100);
const PAUSE_FOR_REQUESTS: Duration = Duration::from_micros(50);
/// Longest wait of `cancel_reserve` for a step.
const CANCEL_PATIENCE: Duration = Duration::from_secs(30);
/// Progress reports of a reserve in the log.
pub(super) const REPORTS: u128 = 4;

/// A request that needs new memory, until the drop.
pub(super) struct RequestFirst<'arena>(&'arena AtomicU64);

impl Drop for RequestFirst<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ArenaSupply {
    /// A request needs new memory until the result is dropped.
    pub(super) fn before_reserve(&self) -> RequestFirst<'_> {
        // Relaxed: a hint for the order of two threads, which may come in either.
        self.reserve.requests.fetch_add(1, Ordering::Relaxed);
        RequestFirst(&self.reserve.requests)
    }

    /// Requests a reserve of `bytes` and pins its first step. The rest follows while the pool is in use. A slow call.
    pub(in crate::engine) fn begin_reserve(self: &Arc<Self>, bytes: u64) -> Result<(), Refusal> {
        let mut books = self.books();
        books.request_reserve(bytes)?;
        let pinned_bytes = books.reserve_progress().0;
        drop(books);
        let mut progress = self.reserve.progress.lock();
        let is_first = progress.begun.is_none();
        progress.begun.get_or_insert((Instant::now(), pinned_bytes));
        (progress.stopped, progress.lacks_bytes, progress.reported) = (None, None, 0);
        progress.has_told_lack = false;
        drop(progress);
        if is_first && let Step::Failed(error) = self.step() {
            self.books().request_less(bytes);
            self.reserve.progress.lock().begun = None;
            return Err(Refusal::Source(error));
        }
        let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
        self.log.reserve_started(pinned_bytes, asked_bytes);
        if self.books().reserve_to_come() == 0 {
            self.end_reserve()
        } else {
            self.start_reserve_thread()
        }
        Ok(())
    }

    /// Returns whether some of the reserve waits for room under the limit.
    pub(in crate::engine) fn reserve_waits(&self) -> bool {
        let progress = self.reserve.progress.lock();
        progress.lacks_bytes.is_some() && !progress.is_cancelled
    }

    /// The time until the reserve is complete, at the rate so far; `None` if no reserve is in progress or the rate is unknown.
    pub(super) fn reserve_eta(&self) -> Option<Duration> {
        let progress = self.reserve.progress.lock();
        let (at, before_bytes) = progress.begun.filter(|_| !progress.is_complete())?;
        drop(progress);
        let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
        let done_bytes = u128::from(pinned_bytes.checked_sub(before_bytes).filter(|&bytes| bytes > 0)?);
        let left_bytes = u128::from(asked_bytes.saturating_sub(pinned_bytes));
        let micros = at.elapsed().as_micros().saturating_mul(left_bytes) / done_bytes;
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// Continues a reserve that waits for room, if there is some now.
    pub(in crate::engine) fn resume_reserve(self: &Arc<Self>) {
        let Some(lacks_bytes) = self.reserve.progress.lock().lacks_bytes else { return };
        let books = self.books();
        let (is_there, could_go_on) = (books.reserve_to_come() == 0, books.could_go_on(lacks_bytes));
        drop(books);
        if is_there {
            // Requests have pinned the rest.
            self.end_reserve();
        } else if could_go_on {
            self.reserve.progress.lock().lacks_bytes = None;
            self.start_reserve_thread();
        }
    }

    fn start_reserve_thread(self: &Arc<Self>) {
        let mut progress = self.reserve.progress.lock();
        if !self.settings.background_thread || progress.has_thread || progress.is_cancelled {
            return;
        }
        let supply = Arc::downgrade(self);
        let spawned = threads::spawn(c"pinpool-reserve", move || Self::run_reserve(&supply));
        progress.has_thread = spawned.is_ok();
        // A tick makes a step instead, and tries again.
        progress.lacks_bytes = spawned.is_err().then_some(0);
        drop(progress);
        if let Err(error) = spawned {
            self.log.thread_started(Err(error));
            self.reserve_turn();
        }
    }

    /// The thread: step after step, as long as the arena lives.
    fn run_reserve(supply: &Weak<Self>) {
        while let Some(supply) = supply.upgrade() {
            let begun = Instant::now();
            // Relaxed: as in `before_reserve`.
            while supply.reserve.requests.load(Ordering::Relaxed) > 0 && begun.elapsed() < PATIENCE_FOR_REQUESTS {
                thread::sleep(PAUSE_FOR_REQUESTS);
            }
            if !supply.reserve_turn() {
                let mut progress = supply.reserve.progress.lock();
                // More was requested meanwhile: continues.
                if progress.is_complete() || supply.books().reserve_to_come() == 0 {
                    progress.has_thread = false;
                    drop(progress);
                    supply.reserve.changed.notify_all();
                    return;
                }
                drop(progress);
                thread::sleep(PAUSE_FOR_REQUESTS);
            }
        }
    }

    /// Makes one step and logs its result. Returns whether another step is due now. A slow call.
    pub(in crate::engine) fn reserve_turn(&self) -> bool {
        if self.books().reserve_to_come() == 0 {
            // Requests may have pinned the rest.
            self.end_reserve();
            return false;
        }
        if self.reserve.progress.lock().stopped.is_some() {
            return false;
        }
        match self.step() {
            Step::Made => {
                self.update_want(false);
                self.report_progress();
                // Waiting requests may fit into what is there now.
                self.pool().iter().for_each(|pool| pool.room_was_made());
                if self.books().reserve_to_come() > 0 {
                    return true;
                }
                self.end_reserve();
            }
            Step::NotNow => {}
            Step::Done => self.end_reserve(),
            Step::NoRoom(lacks_bytes) => {
                let mut progress = self.reserve.progress.lock();
                progress.lacks_bytes = Some(lacks_bytes);
                let is_told = std::mem::replace(&mut progress.has_told_lack, true);
                drop(progress);
                if !is_told {
                    let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
                    self.log.reserve_paused(pinned_bytes, asked_bytes, self.budget.max_bytes());
                }
                // Earlier releases notified nobody.
                if self.update_want(true) && self.books().could_go_on(lacks_bytes) {
                    self.reserve.progress.lock().lacks_bytes = None;
                    return true;
                }
            }
            Step::Failed(error) => {
                self.reserve.progress.lock().stopped = Some(error.clone());
                self.update_want(false);
                let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
                self.log.reserve_stopped(pinned_bytes, asked_bytes, &error);
            }
        }
        self.reserve.changed.notify_all();
        false
    }

    /// Updates the bytes that this reserve wants from other owners of the shared limit: if it `is_lacking`, all that its own limit
    /// leaves room for, and otherwise no more than before. Returns whether that is more than before.
    fn update_want(&self, is_lacking: bool) -> bool {
        if !self.budget.is_shared() {
            return false;
        }
        let lacking_bytes = self.books().reserve_to_come().min(self.budget.own_room_bytes());
        let progress = self.reserve.progress.lock();
        let before_bytes = progress.want.bytes();
        let now_bytes = match is_lacking {
            _ if progress.is_cancelled || progress.stopped.is_some() => 0,
            true => lacking_bytes,
            false => before_bytes.min(lacking_bytes),
        };
        // Under the lock, so that two changes reach the shared limit in order. Others release only idle memory for a reserve.
        self.budget.set_want(&progress.want, now_bytes, 0);
        now_bytes > before_bytes
    }

    fn report_progress(&self) {
        let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
        let reached = u128::from(pinned_bytes) * REPORTS / u128::from(asked_bytes.max(1));
        let mut progress = self.reserve.progress.lock();
        let is_new = reached > progress.reported && reached < REPORTS;
        progress.reported = progress.reported.max(reached);
        drop(progress);
        if is_new {
            self.log.reserve_progress(pinned_bytes, asked_bytes, self.reserve_eta());
        }
        self.reserve.changed.notify_all();
    }

    /// The reserve is complete: logs that once.
    fn end_reserve(&self) {
        let mut progress = self.reserve.progress.lock();
        let begun = progress.begun.take();
        progress.lacks_bytes = None;
        drop(progress);
        self.update_want(false);
        self.reserve.changed.notify_all();
        let Some((at, before_bytes)) = begun else { return };
        let done_bytes = self.books().reserve_progress().0.saturating_sub(before_bytes);
        self.log.reserve_complete(done_bytes, at.elapsed(), self.source.numa_node());
    }

    /// The pool ends: no further step is made. Waits for a step in progress.
    pub(in crate::engine) fn cancel_reserve(&self) {
        let until = Instant::now() + CANCEL_PATIENCE;
        let mut progress = self.reserve.progress.lock();
        progress.is_cancelled = true;
        // A log sink or a waker that the step calls may end the pool.
        let is_other = |stepper: ThreadId| stepper != thread::current().id();
        while progress.stepper.is_some_and(is_other) && Instant::now() < until {
            (progress, _) = self.reserve.changed.wait_until(progress, until);
        }
        drop(progress);
        self.update_want(false);
        self.reserve.changed.notify_all();
    }

    /// Waits until the reserve is complete, at most until `until`. Returns whether it is. Without a thread, makes the steps. A slow
    /// call.
    ///
    /// # Errors
    ///
    /// The source refused a step.
    pub(in crate::engine) fn await_reserve(&self, until: Instant) -> Result<bool, SourceError> {
        loop {
            if self.books().reserve_to_come() == 0 {
                return Ok(true);
            }
            let progress = self.reserve.progress.lock();
            if let Some(error) = &progress.stopped {
                return Err(error.clone());
            }
            if Instant::now() >= until || progress.is_cancelled {
                return Ok(false);
            }
            let is_alone = !self.settings.background_thread && progress.stepper.is_none();
            if is_alone && progress.lacks_bytes.is_none() {
                drop(progress);
                self.reserve_turn();
                continue;
            }
            // Checks periodically: memory that requests commit becomes part of the reserve, and notifies nobody.
            let slice = until.min(Instant::now() + PATIENCE_FOR_REQUESTS);
            drop(self.reserve.changed.wait_until(progress, slice));
        }
    }

    /// Makes one step, unless another thread makes one, or the pool or the process ends.
    fn step(&self) -> Step {
        // A log sink may end the pool, so log lines are delivered after the step.
        let _deferral = report::defer();
        let call = MaintenanceThread::of_process().enter();
        let mut progress = self.reserve.progress.lock();
        progress.is_cancelled |= call.is_none();
        if progress.is_cancelled || progress.stepper.is_some() {
            return Step::NotNow;
        }
        progress.stepper = Some(thread::current().id());
        drop(progress);
        let _end = EndOfStep(&self.reserve);
        self.pin_step()
    }
}

/// Ends a step when it is dropped, also by a panic of a log sink.
struct EndOfStep<'arena>(&'arena Reserve);

impl Drop for EndOfStep<'_> {
    fn drop(&mut self) {
        self.0.progress.lock().stepper = None;
        self.0.changed.notify_all();
    }
}
