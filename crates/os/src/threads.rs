//! Threads that pools start.
//!
//! The threads are created through `pthread_create`, not through `std`. In a program with a Rust `main`, a `std` thread takes a
//! process-wide lock when it starts and when it ends, to record the end of its stack. In a child that was forked at that time, this
//! lock stays locked, so the child can never start a `std` thread.
//!
//! The system knows the names of these threads, but `std` does not.
#![allow(unsafe_code)] // Starts threads, and masks signals.

use std::ffi::CStr;
use std::io;

/// The stack size of a thread, the same as in `std`.
#[cfg(not(miri))]
const STACK_BYTES: usize = 2 << 20;

/// Starts a detached thread. A panic ends only this thread. The thread blocks signals, so that the program's own threads handle
/// them.
///
/// # Errors
///
/// An error of the system, if it refuses another thread.
pub fn spawn(name: &'static CStr, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    system::start(name, Box::new(work)).map(system::Started::detach)
}

/// Threads that end before [`scope`] returns, so they may borrow values that outlive the `scope` call.
pub struct Scope<'env> {
    started: std::cell::RefCell<Vec<system::Started>>,
    /// Makes the type invariant in `'env`: the lifetime cannot be shortened, so no thread borrows a value that is
    /// dropped before the scope ends.
    _borrowed: std::marker::PhantomData<&'env mut &'env ()>,
}

/// Calls `act`, which may start threads, and returns when all of them have ended.
pub fn scope<'env, R>(act: impl FnOnce(&Scope<'env>) -> R) -> R {
    // Dropped only at the end of this function, even if `act` unwinds: `act` has only a reference, so it cannot drop or leak
    // the scope.
    let scope = Scope { started: std::cell::RefCell::default(), _borrowed: std::marker::PhantomData };
    act(&scope)
}

impl<'env> Scope<'env> {
    /// Starts a thread that ends before [`scope`] returns, otherwise as [`spawn`] does.
    ///
    /// # Errors
    ///
    /// The errors of [`spawn`].
    pub fn spawn(&self, name: &'static CStr, work: impl FnOnce() + Send + 'env) -> io::Result<()> {
        let work: Box<dyn FnOnce() + Send + 'env> = Box::new(work);
        // SAFETY: only the lifetime changes. `work` is dropped before the thread ends, the drop of this scope waits for the end
        // of the thread, and `'env` outlives the `scope` call, which drops the scope.
        let work = unsafe { std::mem::transmute::<Box<dyn FnOnce() + Send + 'env>, system::Work>(work) };
        let started = system::start(name, work)?;
        self.started.borrow_mut().push(started);
        Ok(())
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.started.take().into_iter().for_each(system::Started::join);
    }
}

#[cfg(not(miri))]
mod system {
    use std::ffi::{CStr, c_void};
    use std::io;
    use std::mem::MaybeUninit;

    use super::STACK_BYTES;
    use crate::unwind::catch_panic;

    pub(super) type Work = Box<dyn FnOnce() + Send>;

    struct Named {
        name: &'static CStr,
        work: Work,
    }

    /// A thread that must be detached or joined exactly once.
    pub(super) struct Started(libc::pthread_t);

    fn checked(status: libc::c_int) -> io::Result<()> {
        if status == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(status)) }
    }

    pub(super) fn start(name: &'static CStr, work: Work) -> io::Result<Started> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the call initializes the attributes.
        checked(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: the attributes were initialized above. If the system refuses this size, the thread has the default size.
        unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES) };
        let named = Box::into_raw(Box::new(Named { name, work }));
        let mut thread = MaybeUninit::uninit();
        // SAFETY: the attributes are valid, and `named` is the pointer that `run_named` expects.
        let status = unsafe {
            libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run_named, named.cast::<c_void>())
        };
        // SAFETY: the attributes were initialized above and are not used any more.
        unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
        checked(status).inspect_err(|_| {
            // SAFETY: `named` was created above, and no thread received it.
            drop(unsafe { Box::from_raw(named) });
        })?;
        // SAFETY: `pthread_create` has succeeded, so it has written `thread`.
        Ok(Started(unsafe { thread.assume_init() }))
    }

    extern "C" fn run_named(named: *mut c_void) -> *mut c_void {
        // SAFETY: `start` created the box for this thread only.
        let named = unsafe { Box::from_raw(named.cast::<Named>()) };
        let Named { name, work } = *named;
        set_name(name);
        block_signals();
        // A panic must not unwind into the system's thread code.
        catch_panic(work);
        std::ptr::null_mut()
    }

    #[cfg(target_os = "linux")]
    fn set_name(name: &CStr) {
        // SAFETY: the call has no arguments and returns the handle of this thread.
        let own = unsafe { libc::pthread_self() };
        // SAFETY: the call reads the name, which ends with a zero.
        unsafe { libc::pthread_setname_np(own, name.as_ptr()) };
    }

    #[cfg(target_os = "macos")]
    fn set_name(name: &CStr) {
        // SAFETY: the call reads the name, which ends with a zero.
        unsafe { libc::pthread_setname_np(name.as_ptr()) };
    }

    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    fn set_name(_name: &CStr) {}

    /// Blocks the signals of this thread, except fault signals, which are sent to the thread that caused them.
    fn block_signals() {
        let faults =
            [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];
        let mut blocked = MaybeUninit::uninit();
        // SAFETY: the call initializes the set.
        unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
        // SAFETY: `sigfillset` has initialized the set.
        let mut blocked = unsafe { blocked.assume_init() };
        for fault in faults {
            // SAFETY: the set and the signal number are valid.
            unsafe { libc::sigdelset(&mut blocked, fault) };
        }
        // SAFETY: the call changes only the mask of this thread.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, std::ptr::null_mut()) };
    }

    impl Started {
        pub(super) fn detach(self) {
            // SAFETY: the thread is joinable, and was neither joined nor detached before.
            unsafe { libc::pthread_detach(self.0) };
        }

        pub(super) fn join(self) {
            // SAFETY: the thread is joinable, and was neither joined nor detached before.
            let status = unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
            // The caller frees what the thread borrows as soon as this returns, so the thread must have ended.
            if status != 0 {
                std::process::abort();
            }
        }
    }
}

/// Miri uses threads of `std`: it supports neither thread attributes nor signals, and never forks.
#[cfg(miri)]
mod system {
    use std::ffi::CStr;
    use std::io;
    use std::thread::{Builder, JoinHandle};

    pub(super) type Work = Box<dyn FnOnce() + Send>;

    pub(super) struct Started(JoinHandle<()>);

    pub(super) fn start(name: &'static CStr, work: Work) -> io::Result<Started> {
        Builder::new().name(name.to_string_lossy().into_owned()).spawn(work).map(Started)
    }

    impl Started {
        pub(super) fn detach(self) {}

        pub(super) fn join(self) {
            let _panicked = self.0.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn scoped_threads_end_with_the_scope_even_if_one_panics() {
        let (done, mut own) = (AtomicUsize::new(0), 0);
        let result = scope(|scope| {
            scope.spawn(c"one", || panic!("one")).unwrap();
            scope.spawn(c"two", || own = 2).unwrap();
            for _ in 0..3 {
                let add = || {
                    std::thread::yield_now();
                    done.fetch_add(1, Ordering::Relaxed);
                };
                scope.spawn(c"more", add).unwrap();
            }
            7
        });
        assert_eq!((result, own, done.into_inner()), (7, 2, 3));
        let done = AtomicUsize::new(0);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            scope(|scope| {
                scope.spawn(c"late", || done.store(1, Ordering::Relaxed)).unwrap();
                panic!("the scope")
            })
        }));
        assert!(unwound.is_err_and(|payload| payload.is::<&str>()));
        assert_eq!(done.into_inner(), 1);
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_thread_has_its_name_and_leaves_signals_to_others() {
        let (tell, told) = channel();
        spawn(c"pinpool-test", move || {
            let read = |name| std::fs::read_to_string(format!("/proc/thread-self/{name}")).unwrap();
            tell.send((read("comm"), read("status"))).unwrap();
        })
        .unwrap();
        let (name, status) = told.recv().unwrap();
        assert_eq!(name.trim(), "pinpool-test");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
        let is_blocked = |signal: i32| blocked >> (signal - 1) & 1 == 1;
        assert!(is_blocked(libc::SIGINT) && is_blocked(libc::SIGTERM) && !is_blocked(libc::SIGSEGV));
    }
}
