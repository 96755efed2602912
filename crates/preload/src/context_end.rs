//! The end of a context: its memory ends with it, and its pool is not used any more (preload-I4). Also detects contexts that
//! began or ended by functions that no hook saw, such as the private functions of the CUDA runtime.

use std::ffi::c_int;

use crate::contexts::{self, Context};
use crate::driver::{CUDA_SUCCESS, Code, Driver};
use crate::{buffers, captures, log, process, source};
use pinpool_os::sync::unmodeled::Mutex;

/// Held while a primary context ends, and while a primary context is retained to be added.
static PRIMARY_CONTEXTS: Mutex<()> = Mutex::new(());

/// Ends the contexts that have ended unseen, of those for which `is_checked` returns true. Costs a query of each of these.
pub(crate) fn end_unseen(is_checked: impl Fn(&Context) -> bool) {
    let Some(Ok(driver)) = process::uses_contexts_here().then(Driver::get) else { return };
    end_contexts(|context| is_checked(context) && context.has_ended(driver), || CUDA_SUCCESS, |_| true);
}

/// Ends the contexts that have ended unseen, and adds the primary contexts that have begun unseen. Also costs a query of the
/// number of devices, and a state query for each device without a known primary context.
///
/// If a private function releases a context meanwhile, the release here is the last, which ends the context.
pub(crate) fn detect_unseen() {
    end_unseen(|_| true);
    let Some(Ok(driver)) = process::uses_contexts_here().then(Driver::get) else { return };
    let is_unseen = |device: &c_int| !contexts::has_primary_of(*device) && driver.has_primary(*device);
    for device in driver.devices().filter(is_unseen) {
        let _guard = PRIMARY_CONTEXTS.lock();
        let _relaxed = driver.relax();
        // The first check held no lock, and retaining a context that has ended would create it again.
        if is_unseen(&device)
            && let Ok(handle) = driver.retain_primary(device)
        {
            contexts::add_primary(handle, device);
            // Not through `end_by_release`, which waits until no thread uses the context.
            if driver.release_primary(device) == CUDA_SUCCESS && !driver.has_primary(device) {
                end_by_release(device, || CUDA_SUCCESS);
            }
        }
    }
}

/// Destroys the context with this handle by `destroy`.
pub(crate) fn destroy(handle: usize, destroy: impl FnOnce() -> Code) -> Code {
    end_contexts(|context| context.handle == handle, destroy, |code| code == CUDA_SUCCESS)
}

/// Resets a device by `reset`. Its primary context ends, and a later context with the same handle counts as a new context.
pub(crate) fn reset(device: c_int, reset: impl FnOnce() -> Code) -> Code {
    let _guard = PRIMARY_CONTEXTS.lock();
    end_contexts(|context| context.may_be_primary_of(device), reset, |code| code == CUDA_SUCCESS)
}

/// Releases the primary context of a device by `release`. The context ends with its last release.
pub(crate) fn release(device: c_int, release: impl FnOnce() -> Code) -> Code {
    let _guard = PRIMARY_CONTEXTS.lock();
    end_by_release(device, release)
}

fn end_by_release(device: c_int, release: impl FnOnce() -> Code) -> Code {
    let was_ended = |code| code == CUDA_SUCCESS && Driver::get().is_ok_and(|driver| !driver.has_primary(device));
    end_contexts(|context| context.may_be_primary_of(device), release, was_ended)
}

fn end_contexts(
    is_affected: impl Fn(&Context) -> bool,
    driver_call: impl FnOnce() -> Code,
    was_ended: impl FnOnce(Code) -> bool,
) -> Code {
    let (code, ended) = contexts::end_matching(is_affected, driver_call, was_ended);
    for context in &ended {
        let pool = context.take_pool();
        // Before the log lines, since the driver may already return these addresses and handles to other threads.
        captures::forget(context.number);
        buffers::forget(context);
        source::forget_blocks(context.number);
        if let Some(pool) = pool {
            log::context_ended(context.handle);
            log::statistics(&pool);
            // The pool is not dropped, since that would release its memory, but closed, so that it does not also log the loss.
            pool.close();
            std::mem::forget(pool);
        }
    }
    code
}
