//! Detects whether an object was created before a `fork`, in the parent process.
//!
//! A child has none of the parent's threads. Locks that those threads held stay locked, and pins and device mappings are not
//! inherited. So a pool that was created before the fork refuses requests in the child and keeps no memory there. Each pool
//! stores the fork generation in which it was created.
//!
//! A child that was created by a bare `clone` or by `vfork` is not detected.
#![allow(unsafe_code)] // Registers the handler, and returns values that are never freed.

use std::time::Duration;

use crate::sync::unmodeled::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// The number of forks between the first process and this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The generation in which an object was created.
#[derive(Debug, Clone, Copy)]
pub struct ForkGeneration(u32);

impl ForkGeneration {
    /// Returns the current generation. The first call registers the handler that counts forks.
    pub fn now() -> Self {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        extern "C" fn count() {
            GENERATION.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler only adds to an atomic.
        unsafe { call_in_children(&REGISTERED, count) };
        Self(current())
    }

    /// Returns whether the object was created in a parent of this process.
    #[inline(always)]
    pub fn is_stale(self) -> bool {
        current() != self.0
    }

    /// Returns the generation as a number. [`current`] returns the same number, except in children forked later.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// Returns the number of the current generation.
#[inline(always)]
pub fn current() -> u32 {
    // Relaxed: only the handler writes, before the child has a second thread.
    GENERATION.load(Ordering::Relaxed)
}

/// A value that each process has once. A forked child creates a new value, because a thread that the child does not have may hold
/// a lock in the inherited value.
pub struct PerProcess<T: 'static> {
    /// Null, or the value of this process or of a parent. Never freed.
    current: AtomicPtr<GenerationValue<T>>,
    make: fn() -> T,
}

struct GenerationValue<T> {
    generation: ForkGeneration,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    pub const fn new(make: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(std::ptr::null_mut()), make }
    }

    /// Returns the value of this process, which the first call creates. If several threads call at the same time, each may create
    /// a value, but only one value is kept.
    pub fn get(&self) -> &'static T {
        // Acquire pairs with the Release of the exchange below, so the value is completely initialized.
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            if let Some(value) = Self::of_this_process(current) {
                return value;
            }
            let fresh =
                Box::into_raw(Box::new(GenerationValue { generation: ForkGeneration::now(), value: (self.make)() }));
            match self.current.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = fresh,
                Err(other) => {
                    // SAFETY: `fresh` came from a box above, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(fresh) });
                    current = other;
                }
            }
        }
    }

    /// Returns the value, if this process has created it.
    pub fn get_if_made(&self) -> Option<&'static T> {
        Self::of_this_process(self.current.load(Ordering::Acquire))
    }

    /// Returns the value, which this process or a parent has created. A lock in a parent's value may be held forever.
    pub fn get_inherited(&self) -> Option<&'static T> {
        // SAFETY: the pointer is null, or points to a completely initialized value that is never freed.
        unsafe { self.current.load(Ordering::Acquire).as_ref() }.map(|made| &made.value)
    }

    fn of_this_process(made: *mut GenerationValue<T>) -> Option<&'static T> {
        // SAFETY: `made` is null, or points to a completely initialized value that is never freed.
        let made = unsafe { made.as_ref() };
        made.filter(|made| !made.generation.is_stale()).map(|made| &made.value)
    }
}

/// Registers `handler`, which then runs in each child that this process forks, before the fork returns there.
///
/// `registered` records that the handler is registered. It is not a lock, because a child that is forked while another thread
/// holds a lock would wait for that thread. So threads that call this function at the same time may register a handler twice, and
/// handlers must allow that.
///
/// # Safety
///
/// `handler` must only store to atomics and to thread-locals without a destructor, and make calls that a signal handler may make.
pub unsafe fn call_in_children(registered: &'static AtomicBool, handler: extern "C" fn()) {
    // SAFETY: `handler` does only what a child of a process with threads may do, by the contract above.
    unsafe { at_fork(registered, None, None, handler) }
}

/// Registers handlers that run before each fork, and after it in the parent and in the child. Does nothing if `registered` is
/// set.
///
/// # Safety
///
/// The handlers must stay loaded for the life of the process; `in_child` must do only what a child of a process with threads may do.
unsafe fn at_fork(
    registered: &'static AtomicBool,
    before: Option<unsafe extern "C" fn()>,
    in_parent: Option<unsafe extern "C" fn()>,
    in_child: unsafe extern "C" fn(),
) {
    // Acquire pairs with the Release below: if a thread reads `true`, the handlers are registered when it forks.
    if registered.load(Ordering::Acquire) {
        return;
    }
    // If registration fails for lack of memory, forks are not detected. Miri has no forks.
    if cfg!(not(miri)) {
        // SAFETY: the caller promises what the handlers do and how long they stay loaded.
        unsafe { libc::pthread_atfork(before, in_parent, Some(in_child)) };
    }
    registered.store(true, Ordering::Release);
}

/// The number of forks in progress, including forks that wait for a [`ForkDelay`]. A fork counts twice if the handlers are
/// registered twice.
static FORKING: AtomicU32 = AtomicU32::new(0);
/// The number of threads that delay forks.
static HOLDING: AtomicU32 = AtomicU32::new(0);
/// Time between two checks.
const PAUSE: Duration = Duration::from_micros(20);
/// The maximum number of checks before a fork continues regardless, after about one second, so that no fork hangs.
const CHECKS_MAX: u32 = 10_000;

/// Delays forks by other threads while it exists, each fork for at most about a second. Use it for steps that a child must see
/// either completed or not started. While a thread has it, the thread must not take a lock, wait or call a callback.
#[derive(Debug)]
pub struct ForkDelay(());

/// Waits for forks in progress, then delays new forks by other threads until the result is dropped.
pub fn delay_forks() -> ForkDelay {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // SAFETY: these handlers store to atomics and sleep. If they are registered twice, they count each fork twice, up and down.
    unsafe { at_fork(&REGISTERED, Some(prepare), Some(end_in_parent), end_in_child) };
    loop {
        // SeqCst, here and in `prepare`: each stores, then reads what the other stores, so one of them sees the other.
        HOLDING.fetch_add(1, Ordering::SeqCst);
        if FORKING.load(Ordering::SeqCst) == 0 {
            return ForkDelay(());
        }
        HOLDING.fetch_sub(1, Ordering::SeqCst);
        std::thread::sleep(PAUSE);
    }
}

impl Drop for ForkDelay {
    fn drop(&mut self) {
        HOLDING.fetch_sub(1, Ordering::SeqCst);
    }
}

extern "C" fn prepare() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    for _ in 0..CHECKS_MAX {
        if HOLDING.load(Ordering::SeqCst) == 0 {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

extern "C" fn end_in_parent() {
    // The count may be 0: if a thread registers the handlers during a fork, this handler runs although `prepare` did not.
    let _ = FORKING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |forks| forks.checked_sub(1));
}

extern "C" fn end_in_child() {
    // The child has one thread, which does not delay forks.
    FORKING.store(0, Ordering::SeqCst);
    HOLDING.store(0, Ordering::SeqCst);
}
