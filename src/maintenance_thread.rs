//! The thread that maintains the pools of a process: `pinpool-maint`.
//!
//! ```text
//!   miss, return with a copy ── does the thread check often enough? ── yes ──▶ done (one load)
//!                                     └─ no ──▶ wake it, or start it
//!   thread: [due reminders: wake] ─▶ [each pool: maintain] ─▶ sleep as long as the fastest pace allows ─┐
//!              ▲────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! One thread serves all pools. It starts when a pool first needs it, and ends when no pools and no reminders are left. It checks
//! all pools at the pace of the pool that needs the most frequent checks ([`Pace`]), and sleeps without a timeout while no pool and
//! no reminder needs a check. A forked child does not inherit the thread; the first pool of the child that needs it starts a new one.
//!
//! A slow call delays the calls after it, so the thread wakes the tasks of due reminders before it maintains pools, and maintains
//! pools without a driver before pools with a driver. If a call has not returned after one second, the next reminder, or the next
//! pool that finds the thread late, starts a replacement thread, which skips the object that the call is stuck in. Until then a miss
//! or a return with a copy does the maintenance of its pool, if the maintenance is three seconds late.
//!
//! A future that waits for a deadline or a copy uses [`MaintenanceThread::remind`]:
//!
//! ```ignore
//! let reminder = MaintenanceThread::of_process().remind(Some(deadline), Some(Box::new(move || is_complete())), cx.waker())?;
//! ```
//!
//! This module only decides when to check. It knows neither pools nor memory, and holds no lock while it calls a pool or a waker.
//!
//! - **maint-I1**: no wake-up is lost. The thread publishes its pace and then checks once more what the pools need. A caller
//!   changes what its pool needs and then reads the pace. On both sides a full barrier separates the two steps.
//! - **maint-I2**: once the process has begun to exit, the thread makes no further call.

use std::any::Any;
use std::cell::Cell;
use std::io;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pinpool_os::exit::call_at_exit;
use pinpool_os::fork::PerProcess;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU32, AtomicU64, Condvar, Mutex, Ordering, fence};
use pinpool_os::threads;
use pinpool_os::unwind::catch_panic;

/// A call that has not returned after this time is stuck: its thread may be replaced, and no other thread waits for the call.
const STUCK_AFTER: Duration = Duration::from_secs(1);
/// A sleep that ends this late shows that the process was stopped.
const STOPPED_FROM: Duration = Duration::from_secs(3);
/// The longest time that the exit of the process waits for calls in progress to return.
const EXIT_PATIENCE: Duration = Duration::from_millis(200);
/// Shortest pause between two polls of copies. The timer slack of Linux may extend it to 0.1 ms.
const COPY_PAUSE_MIN: Duration = Duration::from_micros(40);
const COPY_PAUSE_MAX: Duration = Duration::from_millis(20);

/// A pool or a reminder that the thread checks.
pub(crate) trait MaintenanceTask: Send + Sync {
    /// Does what is due. The call may be slow.
    fn maintain(&self);

    /// Returns how soon the object must be checked again. Must be cheap.
    fn pace(&self) -> Pace;

    /// Returns the time by which the object must be checked, if there is one. Must be cheap.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// How soon a pool must be checked again. A larger value means sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u32)]
pub(crate) enum Pace {
    /// No check is needed: no memory is held, or the held memory never expires and cannot exceed a limit.
    #[default]
    Never,
    /// All memory is in use, and a return without copies does not wake the thread; or no memory is in use, and idle memory only ages.
    Quiet,
    /// Copies are in flight, or some memory is idle and some in use.
    Active,
    /// A waker waits for a copy, copies are in flight while adopted buffers exist, or another pool needs memory under a common limit.
    Copies,
    /// The arena compacts, so that a later request finds a contiguous hole, or a reserve is being pinned.
    Steps,
}

impl Pace {
    /// Returns the time between two rounds of a thread that was last woken at `since`; `None` if no further round is needed.
    pub(crate) fn period(self, since: Instant) -> Option<Duration> {
        match self {
            Self::Steps => Some(Duration::from_micros(200)),
            Self::Copies => Some(pause_for_copies(since)),
            Self::Active => Some(Duration::from_millis(100)),
            Self::Quiet => Some(Duration::from_secs(1)),
            Self::Never => None,
        }
    }
}

/// Returns the pause between two polls of copies. It grows with the time since `since`, so that long copies are polled less often.
pub(crate) fn pause_for_copies(since: Instant) -> Duration {
    (since.elapsed() / 128).clamp(COPY_PAUSE_MIN, COPY_PAUSE_MAX)
}

/// A pending wake-up of a task. Dropping it cancels the wake-up.
pub(crate) type Reminder = Arc<dyn Any + Send + Sync>;

/// A function that returns whether the awaited event has happened.
pub(crate) type Condition = Box<dyn Fn() -> bool + Send + Sync>;

/// Wakes a task at a deadline or when a condition holds, whichever is earlier.
struct ReminderState {
    deadline: Option<Instant>,
    condition: Option<Condition>,
    /// The waker of the task; `None` after the wake-up.
    waker: Mutex<Option<Waker>>,
}

impl ReminderState {
    fn is_pending(&self) -> bool {
        self.waker.lock().is_some()
    }
}

impl MaintenanceTask for ReminderState {
    fn maintain(&self) {
        let is_late = || self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let is_met = || self.condition.as_ref().is_some_and(|condition| condition());
        if self.is_pending() && (is_late() || is_met()) {
            let waker = self.waker.lock().take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn pace(&self) -> Pace {
        if self.condition.is_some() && self.is_pending() { Pace::Copies } else { Pace::Never }
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.is_pending())
    }
}

/// The maintenance thread of the process, and the objects that it checks.
#[derive(Debug, Default)]
pub(crate) struct MaintenanceThread {
    /// The published pace: `Steps` from a wake-up until the next round publishes its pace, and `Never` before the first wake-up and
    /// after the thread has ended.
    pace: AtomicU32,
    /// Number of [`EnteredCall`]s that exist, in maintenance threads, replaced maintenance threads, and other threads that make
    /// announced calls.
    calling: AtomicU32,
    is_exiting: AtomicBool,
    /// Sum of the delays of all sleeps that ended at least [`STOPPED_FROM`] late, in microseconds.
    stopped_us: AtomicU64,
    schedule: Mutex<Schedule>,
    changed: Condvar,
    /// Notified when a call has ended.
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Schedule {
    reminders: Vec<Weak<dyn MaintenanceTask>>,
    pools: Vec<Weak<dyn MaintenanceTask>>,
    is_running: bool,
    /// Number of the current thread. A thread with a lower number was replaced, and ends when its call returns.
    runner: u64,
    call: Option<Call>,
    /// Addresses of the objects that replaced threads are still calling; the current thread skips these objects.
    stuck: Vec<usize>,
    /// Whether the thread was woken since it last began a round.
    is_woken: bool,
    last_woken: Option<Instant>,
}

/// A call in progress to the pool or reminder at `address`.
#[derive(Debug, Clone, Copy)]
struct Call {
    address: usize,
    since: Instant,
    thread: ThreadId,
}

impl Call {
    fn is_stuck(&self) -> bool {
        self.since.elapsed() >= STUCK_AFTER
    }
}

static OF_PROCESS: PerProcess<MaintenanceThread> = PerProcess::new(MaintenanceThread::default);

impl MaintenanceThread {
    /// Returns the maintenance thread of this process. Does not start it.
    pub(crate) fn of_process() -> &'static Self {
        OF_PROCESS.get()
    }

    /// Adds `pool` to the pools that the thread maintains. Does not start the thread.
    pub(crate) fn add(&self, pool: Weak<dyn MaintenanceTask>, calls_driver: bool) {
        let mut schedule = self.schedule.lock();
        // Pools with a driver come last, because driver calls may be slow.
        let at = if calls_driver { schedule.pools.len() } else { 0 };
        schedule.pools.insert(at, pool);
        if !schedule.is_running {
            // If an earlier start failed, the published pace would keep `request_pace` from trying again.
            self.pace.store(Pace::Never as u32, Ordering::Relaxed);
        }
        drop(schedule);
        stop_at_exit(calls_driver);
    }

    /// Stops maintaining the pool at the address `pool`. If another thread is calling the pool, waits until the call has returned or
    /// is stuck.
    pub(crate) fn remove(&'static self, pool: *const ()) {
        let mut schedule = self.schedule.lock();
        schedule.pools.retain(|other| !std::ptr::addr_eq(other.as_ptr(), pool));
        // A call by this thread is not awaited: the pool may have called a log sink or waker that drops the last handle.
        let is_called = |call: Call| call.address == pool.addr() && call.thread != thread::current().id();
        while let Some(call) = schedule.call.filter(|&call| is_called(call) && !call.is_stuck()) {
            (schedule, _) = self.returned.wait_until(schedule, call.since + STUCK_AFTER);
        }
        drop(schedule);
        let _ = self.wake(false);
    }

    /// Makes the thread check the pools at least at `pace`. Starts the thread if there is none. [`Pace::Copies`] always wakes the
    /// thread, which makes the pauses short again, since one more copy has begun.
    ///
    /// # Errors
    ///
    /// No thread could be started. Except for [`Pace::Copies`], this error is returned only once until another pool is added.
    #[inline]
    pub(crate) fn request_pace(&'static self, pace: Pace) -> io::Result<()> {
        // SeqCst: maint-I1.
        fence(Ordering::SeqCst);
        // Relaxed: the barrier above orders this load.
        let is_as_often = self.pace.load(Ordering::Relaxed) >= pace as u32;
        if is_as_often && pace != Pace::Copies { Ok(()) } else { self.wake(true) }
    }

    /// Makes the thread check the pools immediately. If the thread is stuck in a call, starts a replacement, so that one pool
    /// does not block other pools; the replacement skips the called object until the call returns. If there is no
    /// thread, starts one only if `may_start` is true.
    ///
    /// # Errors
    ///
    /// No thread could be started.
    #[cold]
    pub(crate) fn wake(&'static self, may_start: bool) -> io::Result<()> {
        let mut schedule = self.schedule.lock();
        if schedule.is_running {
            (schedule.is_woken, schedule.last_woken) = (true, Some(Instant::now()));
            self.changed.notify_one();
        } else if !may_start {
            return Ok(());
        }
        // Until the thread publishes the pace of its next round, other callers need not wake it.
        self.pace.store(Pace::Steps as u32, Ordering::Relaxed);
        let stuck = schedule.call.filter(Call::is_stuck);
        if schedule.is_running && stuck.is_none() {
            return Ok(());
        }
        let number = schedule.runner + 1;
        let run = move || {
            while let Some((pace, deadline)) = self.check_all(number) {
                self.sleep(pace, deadline);
            }
        };
        threads::spawn(c"pinpool-maint", run)?;
        (schedule.runner, schedule.is_running, schedule.call) = (number, true, None);
        schedule.stuck.extend(stuck.map(|call| call.address));
        self.returned.notify_all();
        Ok(())
    }

    /// Wakes `waker` once: at `deadline`, or when `condition`, which is polled at [`Pace::Copies`], returns true.
    /// The maintenance thread calls `condition` and `waker` without holding any of its locks.
    ///
    /// # Errors
    ///
    /// No thread could be started.
    pub(crate) fn remind(
        &'static self,
        deadline: Option<Instant>,
        condition: Option<Condition>,
        waker: &Waker,
    ) -> io::Result<Reminder> {
        let reminded = Arc::new(ReminderState { deadline, condition, waker: Mutex::new(Some(waker.clone())) });
        self.schedule.lock().reminders.push(Arc::<ReminderState>::downgrade(&reminded));
        self.wake(true)?;
        Ok(reminded)
    }

    /// Wakes the tasks of due reminders, then maintains the pools. Returns the pace and the next deadline; `None` if this thread
    /// must end, because it was replaced, there is nothing to check, or the process exits.
    fn check_all(&self, number: u64) -> Option<(Pace, Option<Instant>)> {
        let _entered = self.enter()?;
        let mut schedule = self.schedule.lock();
        schedule.reminders.retain(|reminder| reminder.strong_count() > 0);
        if schedule.pools.is_empty() && schedule.reminders.is_empty() {
            schedule.is_running = false;
            self.pace.store(Pace::Never as u32, Ordering::Relaxed);
            return None;
        }
        schedule.is_woken = false;
        drop(schedule);
        let (pace, deadline) = (Cell::default(), Cell::new(None));
        let check = |one: &dyn MaintenanceTask| {
            pace.set(one.pace().max(pace.get()));
            deadline.set(one.deadline().into_iter().chain(deadline.get()).min());
        };
        let is_current = self.call_each(number, |one| {
            // `check` reads the pace even if `maintain` has panicked.
            catch_panic(|| one.maintain());
            check(one);
        });
        if !is_current {
            return None;
        }
        // Relaxed: the barrier below orders this store (maint-I1).
        self.pace.store(pace.get() as u32, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.call_each(number, check).then(|| (pace.get(), deadline.get()))
    }

    /// Calls `call` with each reminder and pool, except objects in which a replaced thread is stuck. Returns whether this thread is
    /// still the current one; if not, stops early.
    fn call_each(&self, number: u64, call: impl Fn(&dyn MaintenanceTask)) -> bool {
        for at in 0.. {
            let mut schedule = self.schedule.lock();
            let mut all = schedule.reminders.iter().chain(&schedule.pools);
            let Some(one) = all.nth(at).cloned() else { break };
            let address = one.as_ptr().addr();
            // The upgraded reference may be the last one, so it must not be dropped while the lock is held.
            let Some(one) = (!schedule.stuck.contains(&address)).then(|| one.upgrade()).flatten() else { continue };
            schedule.call = Some(Call { address, since: Instant::now(), thread: thread::current().id() });
            drop(schedule);
            // The panic hook of the process reports a panic, which ends only this call.
            catch_panic(|| call(&*one));
            // If this is the last reference to a reminder, the drop runs user code: it drops the waker.
            catch_panic(|| drop(one));
            let mut schedule = self.schedule.lock();
            if schedule.runner != number {
                schedule.stuck.retain(|&other| other != address);
                return false;
            }
            schedule.call = None;
            self.returned.notify_all();
        }
        true
    }

    /// Sleeps until the next round or a reminder is due, or the thread is woken.
    fn sleep(&self, pace: Pace, deadline: Option<Instant>) {
        let (now, schedule) = (Instant::now(), self.schedule.lock());
        let period = pace.period(schedule.last_woken.unwrap_or(now));
        if schedule.is_woken {
            return;
        }
        match period.map(|period| now + period).into_iter().chain(deadline).min() {
            Some(until) => {
                drop(self.changed.wait_until(schedule, until));
                self.record_oversleep(until.max(now).elapsed());
            }
            None => drop(self.changed.wait(schedule)),
        }
    }

    /// Records that a sleep ended `late` after its end was due. If that is [`STOPPED_FROM`] or more, the process was stopped during the sleep.
    fn record_oversleep(&self, late: Duration) {
        if late >= STOPPED_FROM {
            // Relaxed: a statistic.
            self.stopped_us.fetch_add(u64::try_from(late.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// Returns how long the process was stopped (SIGSTOP) since its start, in microseconds. Counts only stops during a sleep of this
    /// thread.
    pub(crate) fn stopped_us(&self) -> u64 {
        self.stopped_us.load(Ordering::Relaxed)
    }

    /// Announces that the calling thread may make calls until the result is dropped. The exit of the process waits briefly for
    /// these calls. Returns `None` if the process has begun to exit: the caller must then make no call (maint-I2).
    pub(crate) fn enter(&self) -> Option<EnteredCall<'_>> {
        // SeqCst, as the store and load in `stop`: either this thread sees `is_exiting`, or `stop` sees this call.
        self.calling.fetch_add(1, Ordering::SeqCst);
        (!self.is_exiting.load(Ordering::SeqCst)).then_some(EnteredCall(self))
    }

    /// Prevents all further calls, and waits up to [`EXIT_PATIENCE`] for the calls in progress.
    fn stop(&self) {
        // SeqCst: maint-I2.
        self.is_exiting.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        while self.calling.load(Ordering::SeqCst) > 0 && begun.elapsed() < EXIT_PATIENCE {
            thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The announced calls of one thread ([`MaintenanceThread::enter`]), which end when this is dropped.
#[derive(Debug)]
pub(crate) struct EnteredCall<'thread>(&'thread MaintenanceThread);

impl Drop for EnteredCall<'_> {
    fn drop(&mut self) {
        self.0.calling.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Registers an exit handler that stops the thread. Handlers run in the opposite order of their registration, so the thread stops
/// before anything that was set up before the registration is torn down. The first pool that calls a driver registers the handler
/// again, because the driver, which is loaded by then, may have registered its own handler since.
fn stop_at_exit(calls_driver: bool) {
    static IS_REGISTERED: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];
    extern "C" fn stop() {
        // A forked child does not inherit the thread, so there is nothing to stop until the child makes its own.
        if let Some(thread) = OF_PROCESS.get_if_made() {
            thread.stop();
        }
    }
    call_at_exit(&IS_REGISTERED[usize::from(calls_driver)], stop);
}

#[cfg(all(test, not(pinpool_loom), not(miri)))]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct CountingWaker(AtomicUsize);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl CountingWaker {
        fn count(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns a separate record, so that these tests do not share a thread.
    fn new_thread() -> &'static MaintenanceThread {
        Box::leak(Box::new(MaintenanceThread::default()))
    }

    struct FakePool {
        pace: AtomicU32,
        checks: AtomicUsize,
        panics: bool,
    }

    impl FakePool {
        fn at(pace: Pace) -> Arc<Self> {
            Arc::new(Self { pace: AtomicU32::new(pace as u32), checks: AtomicUsize::new(0), panics: false })
        }

        fn checks(&self) -> usize {
            self.checks.load(Ordering::SeqCst)
        }
    }

    impl MaintenanceTask for FakePool {
        fn maintain(&self) {
            self.checks.fetch_add(1, Ordering::SeqCst);
            assert!(!self.panics, "on purpose");
        }

        fn pace(&self) -> Pace {
            let pace = self.pace.load(Ordering::SeqCst);
            [Pace::Steps, Pace::Copies, Pace::Active, Pace::Quiet, Pace::Never]
                .into_iter()
                .find(|&one| one as u32 == pace)
                .unwrap()
        }
    }

    fn added(thread: &'static MaintenanceThread, pool: &Arc<FakePool>) {
        let pool: Weak<FakePool> = Arc::downgrade(pool);
        thread.add(pool, false);
    }

    #[test]
    fn a_reminder_wakes_once_at_its_deadline_or_when_its_condition_holds() {
        let thread = new_thread();
        let (late, never, asked) = <[Arc<CountingWaker>; 3]>::default().into();
        let holds = Arc::new(AtomicBool::new(false));
        let seen = holds.clone();
        let condition: Condition = Box::new(move || seen.load(Ordering::SeqCst));
        let soon = Instant::now() + Duration::from_millis(20);
        let far = Instant::now() + Duration::from_secs(3600);
        let _late = thread.remind(Some(soon), None, &late.clone().into()).unwrap();
        let _never = thread.remind(Some(far), None, &never.clone().into()).unwrap();
        let _asked = thread.remind(Some(far), Some(condition), &asked.clone().into()).unwrap();
        wait_until("the deadline", || late.count() == 1);
        assert!(Instant::now() >= soon, "not before");
        assert_eq!((asked.count(), never.count()), (0, 0));
        holds.store(true, Ordering::SeqCst);
        wait_until("the condition", || asked.count() == 1);
        thread::sleep(Duration::from_millis(20));
        assert_eq!((late.count(), never.count(), asked.count()), (1, 0, 1));
    }

    #[test]
    fn a_dropped_reminder_wakes_no_task() {
        let thread = new_thread();
        let (dropped, kept) = <[Arc<CountingWaker>; 2]>::default().into();
        let is_over = Arc::new(AtomicBool::new(false));
        let remind = |waker: &Arc<CountingWaker>| {
            let is_over = is_over.clone();
            let condition: Condition = Box::new(move || is_over.load(Ordering::SeqCst));
            thread.remind(None, Some(condition), &waker.clone().into()).unwrap()
        };
        drop(remind(&dropped));
        let _kept = remind(&kept);
        is_over.store(true, Ordering::SeqCst);
        wait_until("the condition", || kept.count() == 1);
        assert_eq!(dropped.count(), 0);
    }

    #[test]
    fn the_thread_sleeps_while_its_pools_need_nothing() {
        let thread = new_thread();
        let pool = FakePool::at(Pace::Active);
        added(thread, &pool);
        assert!(!thread.schedule.lock().is_running, "not started yet");
        thread.request_pace(Pace::Quiet).unwrap();
        wait_until("checks again and again", || pool.checks() >= 3);
        pool.pace.store(Pace::Never as u32, Ordering::SeqCst);
        wait_until("sleeps", || thread.pace.load(Ordering::SeqCst) == Pace::Never as u32);
        let checks = pool.checks();
        thread::sleep(Duration::from_millis(250));
        assert_eq!(pool.checks(), checks);
        // A miss requests a pace in the same way.
        pool.pace.store(Pace::Quiet as u32, Ordering::SeqCst);
        thread.request_pace(Pace::Quiet).unwrap();
        wait_until("woken", || pool.checks() > checks);
        thread.remove(Arc::as_ptr(&pool).cast());
        wait_until("ends after the last pool", || !thread.schedule.lock().is_running);
    }

    #[test]
    fn a_pool_that_panics_stops_no_other() {
        let thread = new_thread();
        let broken = Arc::new(FakePool { panics: true, ..Arc::into_inner(FakePool::at(Pace::Active)).unwrap() });
        let sound = FakePool::at(Pace::Active);
        added(thread, &sound);
        added(thread, &broken);
        thread.request_pace(Pace::Active).unwrap();
        wait_until("both again and again", || broken.checks() >= 2 && sound.checks() >= 2);
    }

    #[test]
    fn a_waker_that_panics_when_the_thread_drops_it_ends_no_thread() {
        struct PanickingDrop;
        impl Wake for PanickingDrop {
            fn wake(self: Arc<Self>) {}
        }
        impl Drop for PanickingDrop {
            fn drop(&mut self) {
                panic!("on purpose");
            }
        }
        let thread = new_thread();
        let kept = Arc::new(Mutex::new(None::<Reminder>));
        let of_condition = kept.clone();
        // Drops the reminder while the thread checks it, so the thread has the last reference.
        let condition: Condition = Box::new(move || {
            of_condition.lock().take();
            false
        });
        let reminder = thread.remind(None, Some(condition), &Arc::new(PanickingDrop).into()).unwrap();
        *kept.lock() = Some(reminder);
        wait_until("checked", || kept.lock().is_none());
        let next = Arc::<CountingWaker>::default();
        let _next = thread.remind(Some(Instant::now()), None, &next.clone().into()).unwrap();
        wait_until("the thread runs", || next.count() == 1);
    }

    #[test]
    fn a_late_wakeup_counts_as_a_stopped_process() {
        let thread = MaintenanceThread::default();
        thread.record_oversleep(STOPPED_FROM - Duration::from_micros(1));
        assert_eq!(thread.stopped_us(), 0, "a busy machine");
        thread.record_oversleep(STOPPED_FROM);
        thread.record_oversleep(Duration::from_secs(40));
        assert_eq!(thread.stopped_us(), 43_000_000);
    }

    /// A pool that blocks in its maintenance until released.
    struct HangingPool(Mutex<bool>, Condvar, AtomicUsize);

    impl MaintenanceTask for HangingPool {
        fn maintain(&self) {
            self.2.fetch_add(1, Ordering::SeqCst);
            let mut may_return = self.0.lock();
            while !*may_return {
                may_return = self.1.wait(may_return);
            }
        }

        fn pace(&self) -> Pace {
            Pace::Active
        }
    }

    #[test]
    fn a_thread_stuck_in_one_pool_is_replaced() {
        let thread = new_thread();
        let hanging = Arc::new(HangingPool(Mutex::new(false), Condvar::default(), AtomicUsize::new(0)));
        let pool: Weak<HangingPool> = Arc::downgrade(&hanging);
        thread.add(pool, false);
        thread.request_pace(Pace::Active).unwrap();
        wait_until("it hangs", || hanging.2.load(Ordering::SeqCst) == 1);
        let sound = FakePool::at(Pace::Active);
        added(thread, &sound);
        let waker = Arc::<CountingWaker>::default();
        wait_until("a task's reminder starts another thread", || {
            let _ended = thread.remind(Some(Instant::now()), None, &waker.clone().into()).unwrap();
            thread::sleep(Duration::from_millis(20));
            waker.count() > 0 && sound.checks() > 3
        });
        assert_eq!(hanging.2.load(Ordering::SeqCst), 1, "left out");
        *hanging.0.lock() = true;
        hanging.1.notify_all();
        wait_until("polled again", || hanging.2.load(Ordering::SeqCst) > 3);
        assert!(thread.schedule.lock().stuck.is_empty());
        assert!(thread.calling.load(Ordering::SeqCst) <= 1, "by one thread");
    }

    #[test]
    fn no_wake_up_is_lost_while_the_thread_falls_asleep() {
        let thread = new_thread();
        let pool = FakePool::at(Pace::Never);
        added(thread, &pool);
        for round in 0..500 {
            let checks = pool.checks();
            pool.pace.store(Pace::Copies as u32, Ordering::SeqCst);
            thread.request_pace(Pace::Copies).unwrap();
            wait_until("polled", || pool.checks() > checks);
            pool.pace.store(Pace::Never as u32, Ordering::SeqCst);
            (0..round % 64).for_each(|_| std::hint::spin_loop());
        }
    }

    #[test]
    fn after_the_exit_has_begun_nothing_is_called() {
        let thread = new_thread();
        let pool = FakePool::at(Pace::Active);
        added(thread, &pool);
        thread.request_pace(Pace::Active).unwrap();
        wait_until("it checks", || pool.checks() > 0);
        thread.stop();
        let checks = pool.checks();
        thread.request_pace(Pace::Copies).unwrap();
        thread::sleep(Duration::from_millis(250));
        assert_eq!(pool.checks(), checks);
    }
}
