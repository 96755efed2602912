//! The contexts that the program uses, each with its pool, its idle events, and whether it still exists.
//!
//! A context becomes known when it is retained, created or made current, when one of its streams begins a capture, or if it is
//! current during a request, a free, a registration or the creation of a stream. Primary contexts that no hook saw are added
//! before each free of served memory (`context_end`). Memory is portable, so the work of any context may use it, and a free
//! records an event in each known context.
//!
//! A context ends when it is destroyed or, if it is a primary context, when it is reset or released for the last time. Calls
//! that use a context enter its [`Lifetime`]. The end waits for these calls, and later calls wait while the driver ends the context.

use std::ffi::c_int;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pinpool::Pool;

use crate::driver::{CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, Code, Driver, EventHandle};
use crate::lifetime::{ExclusiveUse, Lifetime};
use crate::{captures, log, process};
use pinpool_os::sync::unmodeled::Mutex;

/// Time after a wait that timed out in which allocations do not wait for memory.
const PAUSE_AFTER_TIMEOUT: Duration = Duration::from_secs(1);

/// A context of the program.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    /// A number that no other context of the process has; a handle may be reused.
    pub(crate) number: u64,
    /// The driver's ID; `None` if the driver did not report it.
    id: Option<u64>,
    /// The device; `None` if the driver did not report it.
    device: Option<c_int>,
    /// Whether the program made the context, so that it is not a primary context. All others are assumed to be primary, since
    /// the runtime also retains primary contexts through a separate table.
    is_created_by_program: AtomicBool,
    /// The device for which the driver returned this as its primary context; negative if there is none.
    primary_of: AtomicI32,
    lifetime: Lifetime,
    spare_events: Mutex<Vec<EventHandle>>,
    pool: Mutex<PoolState>,
    /// Time at which the last wait for memory timed out.
    timed_out_at: Mutex<Option<Instant>>,
}

/// The pool that serves the requests of a context.
#[derive(Debug, Clone)]
enum PoolState {
    NotYet,
    Ready(Arc<Pool>),
    /// There is no pool and will be none: it could not be made, or the context has ended.
    Gone,
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

static CONTEXTS: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());

impl Context {
    /// Returns whether the driver reports that the context has ended. Its handle may be the handle of a later context.
    pub(crate) fn has_ended(&self, driver: &Driver) -> bool {
        match driver.id_of(self.handle) {
            Ok(id) => self.id.is_some_and(|own| own != id),
            Err(code) => matches!(code, CUDA_ERROR_CONTEXT_IS_DESTROYED | CUDA_ERROR_INVALID_CONTEXT),
        }
    }

    /// Runs `call` with the handle. The context cannot end meanwhile, except by a function that no hook sees. Returns `None` if
    /// the context has ended.
    pub(crate) fn while_alive<R>(&self, call: impl FnOnce(usize) -> R) -> Option<R> {
        let _used = self.lifetime.enter()?;
        let has_ended = Driver::get().is_ok_and(|driver| self.has_ended(driver));
        (!has_ended).then(|| call(self.handle))
    }

    /// Returns the pool, which the first call makes, or `None` if it cannot be made.
    pub(crate) fn pool(self: &Arc<Self>, make: impl FnOnce(Arc<Self>) -> pinpool::Result<Pool>) -> Option<Arc<Pool>> {
        // The lock is held while the pool is made: one of several threads makes it, and the others wait.
        let mut state = self.pool.lock();
        if let PoolState::NotYet = *state {
            let made = make(self.clone()).inspect_err(log::pool_failed);
            *state = made.map_or(PoolState::Gone, |pool| PoolState::Ready(Arc::new(pool)));
        }
        if let PoolState::Ready(pool) = &*state { Some(pool.clone()) } else { None }
    }

    /// Returns the pool, if there is one. Does not wait: if another thread holds the lock, returns `None`.
    pub(crate) fn known_pool(&self) -> Option<Arc<Pool>> {
        if let PoolState::Ready(pool) = &*self.pool.try_lock()? { Some(pool.clone()) } else { None }
    }

    /// Returns whether a request may wait for memory: no stream captures, and no wait has timed out within the last second.
    pub(crate) fn may_wait(&self) -> bool {
        !captures::any_in_progress() && self.timed_out_at.lock().is_none_or(|at| at.elapsed() >= PAUSE_AFTER_TIMEOUT)
    }

    /// Records that a wait for memory timed out.
    pub(crate) fn set_timed_out(&self) {
        *self.timed_out_at.lock() = Some(Instant::now());
    }

    /// Returns an unused event of this context, or creates one. The context must be current.
    pub(crate) fn take_event(&self, driver: &Driver) -> Result<EventHandle, Code> {
        let spare = self.spare_events.lock().pop();
        spare.map_or_else(|| driver.create_event(), Ok)
    }

    /// Keeps an event that nothing waits for, so that it can be reused. The event is destroyed with the context.
    pub(crate) fn put_event(&self, event: EventHandle) {
        self.spare_events.lock().push(event);
    }

    /// Removes the pool of a context that is gone.
    pub(crate) fn take_pool(&self) -> Option<Arc<Pool>> {
        match mem::replace(&mut *self.pool.lock(), PoolState::Gone) {
            PoolState::Ready(pool) => Some(pool),
            PoolState::NotYet | PoolState::Gone => None,
        }
    }

    /// Returns whether this may be the primary context of `device`.
    pub(crate) fn may_be_primary_of(&self, device: c_int) -> bool {
        // Acquire: pairs with the Release in `add_created`.
        !self.is_created_by_program.load(Ordering::Acquire) && self.device.is_none_or(|own| own == device)
    }
}

/// Returns all contexts that exist.
pub(crate) fn all() -> Vec<Arc<Context>> {
    CONTEXTS.lock().iter().filter(|context| !context.lifetime.is_gone()).cloned().collect()
}

/// Returns the context with this handle, and records it if it is new.
pub(crate) fn find_or_add(handle: usize) -> Arc<Context> {
    // Set before the first lock is taken, so that a child that is forked while another thread holds a lock takes no lock.
    process::set_uses_contexts();
    let has_handle = |context: &&Arc<Context>| context.handle == handle && !context.lifetime.is_gone();
    if let Some(known) = CONTEXTS.lock().iter().find(has_handle) {
        return known.clone();
    }
    let (id, device) =
        Driver::get().map_or((None, None), |driver| (driver.id_of(handle).ok(), driver.device_of(handle).ok()));
    let mut contexts = CONTEXTS.lock();
    contexts.iter().find(has_handle).cloned().unwrap_or_else(|| {
        let context = Arc::new(Context {
            handle,
            // Relaxed: the number publishes no other data.
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            id,
            device,
            is_created_by_program: AtomicBool::new(false),
            primary_of: AtomicI32::new(-1),
            lifetime: Lifetime::default(),
            spare_events: Mutex::default(),
            pool: Mutex::new(PoolState::NotYet),
            timed_out_at: Mutex::default(),
        });
        contexts.push(context.clone());
        context
    })
}

/// Adds the context with this handle, which the program has created.
pub(crate) fn add_created(handle: usize) {
    find_or_add(handle).is_created_by_program.store(true, Ordering::Release);
}

/// Adds the context with this handle, which is the primary context of `device`.
pub(crate) fn add_primary(handle: usize, device: c_int) {
    // Relaxed: readers compare the device and read nothing else through it.
    find_or_add(handle).primary_of.store(device, Ordering::Relaxed);
}

/// Returns whether the primary context of `device` is recorded as such.
pub(crate) fn has_primary_of(device: c_int) -> bool {
    let is_of = |context: &Arc<Context>| context.primary_of.load(Ordering::Relaxed) == device;
    CONTEXTS.lock().iter().any(|context| is_of(context) && !context.lifetime.is_gone())
}

/// Adds the context that is current on this thread.
pub(crate) fn add_current() {
    if let Some(handle) = Driver::get().ok().and_then(Driver::current) {
        find_or_add(handle);
    }
}

/// Adds the stream's context if it is new, and returns the context's number.
pub(crate) fn add_context_of(stream: usize) -> Option<u64> {
    let driver = Driver::get().ok()?;
    let handle = if captures::is_default_handle(stream) { driver.current() } else { driver.context_of(stream).ok() };
    handle.map(|handle| find_or_add(handle).number)
}

/// Makes `driver_call`, which may end the contexts for which `is_affected` returns true. Returns its code, and these contexts if
/// `was_ended` confirms for the code that they have ended.
pub(crate) fn end_matching(
    is_affected: impl Fn(&Context) -> bool,
    driver_call: impl FnOnce() -> Code,
    was_ended: impl FnOnce(Code) -> bool,
) -> (Code, Vec<Arc<Context>>) {
    let affected: Vec<_> = all().into_iter().filter(|context| is_affected(context)).collect();
    // Usually at most one. Several match if they were made unseen by the hooks, or if the driver did not report their devices.
    let uses: Vec<_> = affected.iter().map(|context| context.lifetime.begin_exclusive()).collect();
    let code = driver_call();
    if !was_ended(code) {
        return (code, Vec::new());
    }
    uses.iter().for_each(ExclusiveUse::mark_gone);
    drop(uses);
    CONTEXTS.lock().retain(|context| !context.lifetime.is_gone());
    (code, affected)
}
