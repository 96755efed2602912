//! The contexts that the program uses: each with its pool, its idle events, and whether it is still there.
//!
//! A context is recorded when it is retained, created or made current, or if it is current at a request, a free or the creation
//! of a stream. Memory is portable, so the work of any context may use it, and a free records an event in each.
//!
//! The end of a context (destroyed, its primary context reset or released for the last time) excludes calls that use it: they
//! enter [`Alive`], and the end of `Alive` waits for them while the driver works.

use std::ffi::c_int;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pinpool::Pool;

use crate::alive::{Alive, Ending};
use crate::driver::{Code, Driver};
use crate::{captures, log, process};
use pinpool_os::sync::plain::Mutex;

/// After a wait for memory has timed out, allocations do not wait for this long.
const NO_WAIT: Duration = Duration::from_secs(1);

/// A context of the program.
#[derive(Debug)]
pub(crate) struct Context {
    handle: usize,
    /// No other context of the process has it; a handle may be reused.
    number: u64,
    /// `None` if the driver did not report it.
    device: Option<c_int>,
    /// The program made it: it is no primary context. All others are assumed to be primary, since the runtime also retains
    /// primary contexts through a separate table.
    is_made: AtomicBool,
    alive: Alive,
    spare_events: Mutex<Vec<usize>>,
    pool: Mutex<PoolState>,
    /// When the last wait for memory timed out.
    timed_out_at: Mutex<Option<Instant>>,
}

/// The pool that serves the requests of a context.
#[derive(Debug, Clone)]
enum PoolState {
    NotYet,
    Ready(Arc<Pool>),
    /// The pool could not be made.
    Failed,
}

static NUMBERS: AtomicU64 = AtomicU64::new(0);

static CONTEXTS: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());

impl Context {
    pub(crate) fn handle(&self) -> usize {
        self.handle
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Runs `call` with the handle while the context cannot end; `None` if it is gone.
    pub(crate) fn while_alive<R>(&self, call: impl FnOnce(usize) -> R) -> Option<R> {
        let _used = self.alive.enter()?;
        Some(call(self.handle))
    }

    /// The pool, made at the first call; `None` if it cannot be made.
    pub(crate) fn pool(self: &Arc<Self>, make: impl FnOnce(Arc<Self>) -> pinpool::Result<Pool>) -> Option<Arc<Pool>> {
        // Held while the pool is made: of several threads one makes it, and the others wait.
        let mut serving = self.pool.lock();
        if let PoolState::NotYet = *serving {
            *serving = match make(self.clone()) {
                Ok(pool) => PoolState::Ready(Arc::new(pool)),
                Err(error) => {
                    log::no_pool(&error);
                    PoolState::Failed
                }
            };
        }
        if let PoolState::Ready(pool) = &*serving { Some(pool.clone()) } else { None }
    }

    /// The pool, if there is one.
    pub(crate) fn known_pool(&self) -> Option<Arc<Pool>> {
        if let PoolState::Ready(pool) = &*self.pool.try_lock()? { Some(pool.clone()) } else { None }
    }

    /// Returns whether a request may wait for memory: not while a stream captures, nor soon after a wait without success.
    pub(crate) fn may_wait(&self) -> bool {
        !captures::are_under_way() && self.timed_out_at.lock().is_none_or(|at| at.elapsed() >= NO_WAIT)
    }

    /// Records that a wait for memory timed out.
    pub(crate) fn record_timeout(&self) {
        *self.timed_out_at.lock() = Some(Instant::now());
    }

    /// An event of this context that nothing uses. The context is current.
    pub(crate) fn take_event(&self, driver: &Driver) -> Result<usize, Code> {
        let spare = self.spare_events.lock().pop();
        spare.map_or_else(|| driver.event(), Ok)
    }

    /// Takes back an event that nothing waits for. It is reused, and destroyed with the context.
    pub(crate) fn put_event(&self, event: usize) {
        self.spare_events.lock().push(event);
    }

    /// Removes the pool of a context that is gone.
    pub(crate) fn take_pool(&self) -> Option<Arc<Pool>> {
        match mem::replace(&mut *self.pool.lock(), PoolState::Failed) {
            PoolState::Ready(pool) => Some(pool),
            PoolState::NotYet | PoolState::Failed => None,
        }
    }

    /// Returns whether it may be the primary context of this device.
    pub(crate) fn may_be_primary_of(&self, device: c_int) -> bool {
        // Acquire, with the Release in `record_made`.
        !self.is_made.load(Ordering::Acquire) && self.device.is_none_or(|own| own == device)
    }

    fn is_gone(&self) -> bool {
        self.alive.is_gone()
    }
}

/// All contexts that are there.
pub(crate) fn all() -> Vec<Arc<Context>> {
    CONTEXTS.lock().iter().filter(|context| !context.is_gone()).cloned().collect()
}

/// The context with this handle, recorded if it is new.
pub(crate) fn find_or_add(handle: usize) -> Arc<Context> {
    // Before a lock is taken that another thread of the parent might hold in a child.
    process::own();
    let has_handle = |context: &&Arc<Context>| context.handle == handle && !context.is_gone();
    if let Some(known) = CONTEXTS.lock().iter().find(has_handle) {
        return known.clone();
    }
    let device = Driver::get().ok().and_then(|driver| driver.device_of(handle).ok());
    let mut contexts = CONTEXTS.lock();
    contexts.iter().find(has_handle).cloned().unwrap_or_else(|| {
        let context = Arc::new(Context {
            handle,
            // Relaxed: a number that publishes nothing.
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            device,
            is_made: AtomicBool::new(false),
            alive: Alive::default(),
            spare_events: Mutex::default(),
            pool: Mutex::new(PoolState::NotYet),
            timed_out_at: Mutex::default(),
        });
        contexts.push(context.clone());
        context
    })
}

/// Records the context with this handle.
pub(crate) fn record(handle: usize) {
    find_or_add(handle);
}

/// Records the context with this handle, which the program has made.
pub(crate) fn record_made(handle: usize) {
    find_or_add(handle).is_made.store(true, Ordering::Release);
}

/// Records the context that is current on this thread.
pub(crate) fn record_current() {
    if let Ok(driver) = Driver::get()
        && let Ok(handle @ 1..) = driver.current()
    {
        find_or_add(handle);
    }
}

/// The number of the stream's context, which is recorded.
pub(crate) fn number_of(stream: usize) -> Option<u64> {
    let driver = Driver::get().ok()?;
    let handle = if captures::is_default(stream) { driver.current() } else { driver.context_of(stream) };
    handle.ok().filter(|&handle| handle != 0).map(|handle| find_or_add(handle).number())
}

/// Ends the contexts for which `ends` holds by `end`, unless `is_gone` denies it for the code; returns those that ended.
pub(crate) fn end_by(
    ends: impl Fn(&Context) -> bool,
    end: impl FnOnce() -> Code,
    is_gone: impl FnOnce(Code) -> bool,
) -> (Code, Vec<Arc<Context>>) {
    let found: Vec<_> = all().into_iter().filter(|context| ends(context)).collect();
    // One at most, or several that were recorded at once.
    let endings: Vec<_> = found.iter().map(|context| context.alive.begin_end()).collect();
    let code = end();
    if !is_gone(code) {
        return (code, Vec::new());
    }
    endings.iter().for_each(Ending::end);
    drop(endings);
    CONTEXTS.lock().retain(|context| !context.is_gone());
    (code, found)
}
