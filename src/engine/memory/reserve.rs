//! A reserve that is not waited for (policy-R10): after the first step a thread pins the rest, and gives way to requests.
//!
//! ```text
//!   begin: [lock: ask, plan] ─▶ first step ─▶ returns
//!   pinpool-reserve: a request needs memory? ─yes─▶ pause
//!                    [lock: plan] ─▶ step (no lock) ─▶ [lock: finish] ─▶ again, until all is there
//!                       └─ no room: ends; a tick or a higher limit starts it again
//!                       └─ refused: ends with a warning; the pool continues with what it has
//! ```
//!
//! A dedicated thread, one for each arena that has something to pin, since a step may take as long as a driver likes: the
//! maintenance thread looks after all pools of the process. It holds no reference to the arena between two steps, and is no
//! thread that a `fork` copies. Without a maintenance thread (`background_thread(false)`) each `Pool::maintain` makes one step.
//!
//! - **background-I1**: one thread makes a step at a time, and none after `cancel_reserve` has returned.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::Supply;
use super::arena_supply::ArenaSupply;
use super::block_memory::Refusal;
use super::books::Step;
use super::progress::{Begin, Reserve};
use crate::arena::RANGE_BYTES_MAX;
use crate::backend::SourceError;
use crate::diag;
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::threads;

/// A step waits no longer for requests that need memory; what they commit is a part of the reserve.
const PATIENCE_FOR_GETS: Duration = Duration::from_millis(100);
const PAUSE_FOR_GETS: Duration = Duration::from_micros(50);
/// Longest wait of `cancel_reserve` for a step.
const CANCEL_PATIENCE: Duration = Duration::from_secs(30);
/// Progress is logged this often.
const REPORTS: u128 = 4;

/// How a wait for the reserve ended.
#[derive(Debug)]
pub(in crate::engine) enum ReserveWait {
    Pinned,
    TimedOut,
    Stopped(SourceError),
}

/// A request that needs new memory. A reserve pauses while there is one.
pub(super) struct GetFirst<'arena>(&'arena AtomicU64);

impl Drop for GetFirst<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ArenaSupply {
    /// A request needs new memory until the result is dropped.
    pub(super) fn before_reserve(&self) -> GetFirst<'_> {
        // Relaxed: a hint for the order of two threads, which may come in either.
        self.getting.fetch_add(1, Ordering::Relaxed);
        GetFirst(&self.getting)
    }

    /// Requests a reserve of `bytes` and pins its first step. The rest follows while the pool is in use. A slow call.
    pub(in crate::engine) fn begin_reserve(self: &Arc<Self>, bytes: u64, now_us: u64) -> Result<(), Refusal> {
        if bytes > RANGE_BYTES_MAX {
            let what = format!("{bytes} B are more than the {RANGE_BYTES_MAX} B that one reserve may have");
            return Err(Refusal::Source(SourceError::new("arena", what)));
        }
        let mut books = self.books();
        if !books.request_reserve(bytes) {
            return Err(Refusal::QuotaExceeded { needed_bytes: bytes, over: books.budget().full(bytes) });
        }
        let pinned_bytes = books.reserve_progress().0;
        drop(books);
        let mut progress = self.reserve.progress.lock();
        let is_first = progress.begun.is_none();
        progress.begun.get_or_insert(Begin { at: Instant::now(), now_us, pinned_bytes });
        (progress.stopped, progress.lacks_bytes, progress.reported) = (None, None, 0);
        progress.has_told_lack = false;
        drop(progress);
        if is_first && let Err(error) = self.step(now_us) {
            self.books().request_less(bytes);
            self.reserve.progress.lock().begun = None;
            return Err(Refusal::Source(error));
        }
        let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
        self.log.reserve_begun(pinned_bytes, asked_bytes);
        if self.books().reserve_to_come() == 0 {
            self.record_done()
        } else {
            self.start_reserve_thread(now_us)
        }
        Ok(())
    }

    /// Whether some of the reserve waits for room under the limit.
    pub(in crate::engine) fn reserve_waits(&self) -> bool {
        let progress = self.reserve.progress.lock();
        progress.lacks_bytes.is_some() && !progress.is_cancelled
    }

    /// When all will be there, at the rate so far; `None` if nothing is in progress or its rate is unknown.
    pub(super) fn reserve_eta(&self) -> Option<Duration> {
        let progress = self.reserve.progress.lock();
        let begun = progress.begun.filter(|_| progress.stopped.is_none() && progress.lacks_bytes.is_none())?;
        drop(progress);
        let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
        let done_bytes = u128::from(pinned_bytes.checked_sub(begun.pinned_bytes).filter(|&bytes| bytes > 0)?);
        let left_bytes = u128::from(asked_bytes.saturating_sub(pinned_bytes));
        let micros = begun.at.elapsed().as_micros().saturating_mul(left_bytes) / done_bytes;
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// Continues a reserve that waits for room, if there is some now.
    pub(in crate::engine) fn resume_reserve(self: &Arc<Self>, now_us: u64) {
        let Some(lacks_bytes) = self.reserve.progress.lock().lacks_bytes else { return };
        let books = self.books();
        let (is_there, could_go_on) = (books.reserve_to_come() == 0, books.could_go_on(lacks_bytes));
        drop(books);
        if is_there {
            // Requests have pinned the rest.
            self.record_done();
        } else if could_go_on {
            self.reserve.progress.lock().lacks_bytes = None;
            self.start_reserve_thread(now_us);
        }
    }

    /// Other owners of the shared limit have released memory.
    pub(in crate::engine) fn shared_limit_has_changed(self: &Arc<Self>) {
        self.resume_reserve(self.reserve_now_us());
    }

    /// The time, by the clock of the pool, while a reserve is under way.
    fn reserve_now_us(&self) -> u64 {
        let begun = self.reserve.progress.lock().begun;
        begun.map_or(0, |begun| {
            begun.now_us.saturating_add(u64::try_from(begun.at.elapsed().as_micros()).unwrap_or(u64::MAX))
        })
    }

    fn start_reserve_thread(self: &Arc<Self>, now_us: u64) {
        let mut progress = self.reserve.progress.lock();
        if !self.settings.background_thread || progress.has_thread || progress.is_cancelled {
            return;
        }
        let supply = Arc::downgrade(self);
        let spawned = threads::spawn(c"pinpool-reserve", move || Self::pin_reserve(&supply));
        progress.has_thread = spawned.is_ok();
        // A tick makes a step instead, and tries again.
        progress.lacks_bytes = spawned.is_err().then_some(0);
        drop(progress);
        if let Err(error) = spawned {
            self.log.no_thread(Err(error));
            self.reserve_turn(now_us);
        }
    }

    /// The thread: step after step, as long as the arena lives.
    fn pin_reserve(supply: &Weak<Self>) {
        while let Some(supply) = supply.upgrade() {
            supply.give_way_to_gets();
            if !supply.reserve_turn(supply.reserve_now_us()) {
                let mut progress = supply.reserve.progress.lock();
                // More was requested meanwhile: continues.
                if progress.is_over() || supply.books().reserve_to_come() == 0 {
                    progress.has_thread = false;
                    drop(progress);
                    supply.reserve.changed.notify_all();
                    return;
                }
                drop(progress);
                thread::sleep(PAUSE_FOR_GETS);
            }
        }
    }

    fn give_way_to_gets(&self) {
        let begun = Instant::now();
        // Relaxed: as in `before_reserve`.
        while self.getting.load(Ordering::Relaxed) > 0 && begun.elapsed() < PATIENCE_FOR_GETS {
            thread::sleep(PAUSE_FOR_GETS);
        }
    }

    /// Makes one step and logs its result. Returns whether another step is due now. A slow call.
    pub(in crate::engine) fn reserve_turn(&self, now_us: u64) -> bool {
        let is_there = self.books().reserve_to_come() == 0;
        if is_there {
            // Requests have pinned the rest, perhaps.
            self.record_done();
            return false;
        }
        if self.reserve.progress.lock().stopped.is_some() {
            return false;
        }
        match self.step(now_us) {
            Ok(Step::Made) => {
                self.want_of_shared_limit(u64::min);
                self.report_progress();
                // Waiting requests may fit into what is there now.
                self.pool().iter().for_each(|pool| pool.room_was_made());
                if self.books().reserve_to_come() > 0 {
                    return true;
                }
                self.record_done();
            }
            Ok(Step::NotNow) => {}
            Ok(Step::Done) => self.record_done(),
            Ok(Step::NoRoom(lacks_bytes)) => {
                let mut progress = self.reserve.progress.lock();
                progress.lacks_bytes = Some(lacks_bytes);
                let is_told = std::mem::replace(&mut progress.has_told_lack, true);
                drop(progress);
                if !is_told {
                    let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
                    self.log.reserve_waits(pinned_bytes, asked_bytes, self.budget().max_bytes());
                }
                // Earlier releases notified nobody.
                if self.want_of_shared_limit(|_, lacking_bytes| lacking_bytes) && self.books().could_go_on(lacks_bytes)
                {
                    self.reserve.progress.lock().lacks_bytes = None;
                    return true;
                }
            }
            Err(error) => {
                self.reserve.progress.lock().stopped = Some(error.clone());
                self.want_of_shared_limit(|_, _| 0);
                let (pinned_bytes, asked_bytes) = self.books().reserve_progress();
                self.log.reserve_stopped(pinned_bytes, asked_bytes, &error);
            }
        }
        self.reserve.changed.notify_all();
        false
    }

    /// Changes what this reserve wants of other owners of the shared limit, of what it wanted before and what it lacks under its
    /// own limit. Returns whether that is more than before.
    fn want_of_shared_limit(&self, change: impl FnOnce(u64, u64) -> u64) -> bool {
        let books = self.books();
        let budget = books.budget().clone();
        if !budget.is_shared() {
            return false;
        }
        let lacking_bytes = books.reserve_to_come().min(books.budget().own_room_bytes());
        drop(books);
        let progress = self.reserve.progress.lock();
        let before_bytes = progress.want.bytes();
        let now_bytes = if progress.is_cancelled { 0 } else { change(before_bytes, lacking_bytes) };
        // Under the lock: two changes reach the shared limit in their order. A reserve stays, so others give what is idle alone.
        budget.set_want(&progress.want, now_bytes, 0);
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
            self.log.reserving(pinned_bytes, asked_bytes, self.reserve_eta());
        }
        self.reserve.changed.notify_all();
    }

    /// All is there: says so once.
    fn record_done(&self) {
        let mut progress = self.reserve.progress.lock();
        let begun = progress.begun.take();
        progress.lacks_bytes = None;
        drop(progress);
        self.want_of_shared_limit(|_, _| 0);
        self.reserve.changed.notify_all();
        let Some(begun) = begun else { return };
        let (pinned_bytes, _) = self.books().reserve_progress();
        let done_bytes = pinned_bytes.saturating_sub(begun.pinned_bytes);
        self.log.reserve_done(done_bytes, begun.at.elapsed(), self.source().numa_node());
    }

    /// No more steps: the pool ends. Waits for the one that is being made.
    pub(in crate::engine) fn cancel_reserve(&self) {
        let until = Instant::now() + CANCEL_PATIENCE;
        let mut progress = self.reserve.progress.lock();
        progress.is_cancelled = true;
        // A log sink or a waker that the step calls may be what ends the pool.
        let is_other = |stepper: ThreadId| stepper != thread::current().id();
        while progress.stepper.is_some_and(is_other) && Instant::now() < until {
            (progress, _) = self.reserve.changed.wait_until(progress, until);
        }
        drop(progress);
        self.want_of_shared_limit(|_, _| 0);
        self.reserve.changed.notify_all();
    }

    /// Waits until all of the reserve is there, by `until`. Without a thread of the reserve, makes the steps.
    pub(in crate::engine) fn await_reserve(&self, until: Instant, now_us: u64) -> ReserveWait {
        loop {
            if self.books().reserve_to_come() == 0 {
                return ReserveWait::Pinned;
            }
            let progress = self.reserve.progress.lock();
            if let Some(error) = &progress.stopped {
                return ReserveWait::Stopped(error.clone());
            }
            if Instant::now() >= until || progress.is_cancelled {
                return ReserveWait::TimedOut;
            }
            let is_alone = !self.settings.background_thread && progress.stepper.is_none();
            if is_alone && progress.lacks_bytes.is_none() {
                drop(progress);
                self.reserve_turn(now_us);
                continue;
            }
            // Checks again periodically: what requests commit is a part of the reserve and notifies nobody.
            let slice = until.min(Instant::now() + PATIENCE_FOR_GETS);
            drop(self.reserve.changed.wait_until(progress, slice));
        }
    }

    /// Makes one step, unless another thread makes one, the pool ends, or the process does.
    fn step(&self, now_us: u64) -> Result<Step, SourceError> {
        // Until the step has ended: a log sink may end the pool.
        let _deferral = diag::defer();
        let call = MaintenanceThread::of_process().enter();
        let mut progress = self.reserve.progress.lock();
        progress.is_cancelled |= call.is_none();
        if progress.is_cancelled || progress.stepper.is_some() {
            return Ok(Step::NotNow);
        }
        progress.stepper = Some(thread::current().id());
        drop(progress);
        let _end = EndOfStep(&self.reserve);
        let has_copies = self.pool().is_some_and(|pool| pool.has_copies());
        self.commit_step((now_us, has_copies))
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
