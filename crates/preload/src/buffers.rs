//! Allocations and frees, and the buffers in use by address.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{c_uint, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Once};
use std::time::Duration;

use pinpool::{Backend, OnFull, PinnedBuf, Pool, Request};

use crate::contexts::{self, Context};
use crate::driver::{CU_MEMHOSTALLOC_WRITECOMBINED, CUDA_ERROR_NOT_INITIALIZED, Code, Driver, SERVED_FLAGS};
use crate::fence::{FenceStream, KnownContextsFence};
use crate::log::{self, NotServed};
use crate::{process, settings, source};
use pinpool_os::sync::unmodeled::Mutex;

/// Longest wait for running work if `PINPOOL_WAIT` is not set. After that time, the driver's own function is called.
const DEFAULT_WAIT: Duration = Duration::from_millis(100);

/// A buffer of the program.
#[derive(Debug)]
struct ServedBuffer {
    buf: PinnedBuf,
    context: Arc<Context>,
}

/// The buffers in use (preload-I3), by the address of their first byte. One lock, since shards would gain little: a request
/// also takes the lock of [`contexts`], and a free the locks of `contexts` and [`captures`](crate::captures).
static BUFFERS: Mutex<BTreeMap<usize, ServedBuffer>> = Mutex::new(BTreeMap::new());

/// Leaks the buffers of a context that is gone.
pub(crate) fn forget(context: &Arc<Context>) {
    let mut buffers = BUFFERS.lock();
    let gone = |served: &ServedBuffer| Arc::ptr_eq(&served.context, context);
    let starts: Vec<usize> = buffers.iter().filter(|(_, served)| gone(served)).map(|(&start, _)| start).collect();
    starts.iter().filter_map(|start| buffers.remove(start)).for_each(|served| std::mem::forget(served.buf));
}

/// Requests memory for the program from the pool of the current context. Fails with the reason for calling the driver's own
/// function instead.
pub(crate) fn get(bytes: usize, flags: c_uint) -> Result<*mut c_void, NotServed> {
    if !process::may_be_served() {
        return Err(NotServed::Forked);
    }
    if flags & CU_MEMHOSTALLOC_WRITECOMBINED != 0 {
        return Err(NotServed::WriteCombined);
    }
    if flags & !SERVED_FLAGS != 0 {
        return Err(NotServed::Flags(flags));
    }
    let driver = Driver::get().map_err(NotServed::Driver)?;
    if process::has_stopped_serving() {
        return Err(NotServed::Stopped);
    }
    let context = contexts::find_or_add(driver.current().ok_or(NotServed::NoContext)?);
    let pool = context.pool(|context| make_pool(driver, context)).ok_or(NotServed::NoPool)?;
    let mut buf = request_pinned(&context, &pool, bytes)?;
    let start = buf.as_mut_ptr();
    let stale = BUFFERS.lock().insert(start.addr(), ServedBuffer { buf, context: context.clone() });
    // A buffer of a context that has ended is leaked (preload-I4).
    std::mem::forget(stale.map(|served| served.buf));
    // The context may have ended during the request, before the insert.
    if context.while_alive(|_| ()).is_none() {
        forget(&context);
        return Err(NotServed::NoPool);
    }
    Ok(start.cast())
}

/// Requests a buffer from the pool. If the limit leaves no room and freed memory is in flight, waits up to `PINPOOL_WAIT`. Does
/// not wait if the program holds all memory, nor within a second after a wait that timed out, nor while a stream captures,
/// since memory that is freed meanwhile stays in flight.
fn request_pinned(context: &Context, pool: &Pool, bytes: usize) -> Result<PinnedBuf, NotServed> {
    let mut got = pool.get_with(Request::new(bytes).timeout(Duration::ZERO));
    if got.as_ref().is_err_and(pinpool::Error::is_limit) && context.may_wait() && pool.stats().copies.in_flight > 0 {
        got = pool.get(bytes);
        if got.as_ref().is_err_and(pinpool::Error::is_limit) {
            context.set_timed_out();
        }
    }
    match got {
        Ok(buf) if buf.pinned_by().is_some() => Ok(buf),
        Err(error) if !error.is_limit() => Err(NotServed::Refused(error.to_string())),
        _ => Err(NotServed::Full(bytes)),
    }
}

fn make_pool(driver: &'static Driver, context: Arc<Context>) -> pinpool::Result<Pool> {
    log::init();
    log_statistics_at_exit();
    let source = Arc::new(source::HostSource::new(driver, context));
    let pool = Pool::builder().env_prefix(pinpool::unstable::config::env::PREFIX).name("preload");
    let pool = pool.backend(Backend::Source(source)).on_full(OnFull::Error);
    let is_wait_set = env::var("PINPOOL_WAIT").is_ok_and(|wait| !wait.trim().is_empty());
    if is_wait_set { pool.build() } else { pool.wait(DEFAULT_WAIT).build() }
}

/// Makes the process log the statistics of each remaining pool at its end, if that is set.
fn log_statistics_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn at_exit() {
        if process::uses_contexts_here() {
            contexts::all().iter().filter_map(|context| context.known_pool()).for_each(|pool| log::statistics(&pool));
        }
    }
    ONCE.call_once(|| {
        if *settings::LOGS_STATISTICS {
            // SAFETY: the handler stays loaded; if the C library has no room for it, the statistics are missing.
            let _missing = unsafe { libc::atexit(at_exit) };
        }
    });
}

/// The result of a free.
pub(crate) enum FreeOutcome {
    /// The buffer has returned to its pool, which reuses it after its fence.
    Done,
    /// The free failed with this code. If the wait for the device failed, the buffer is reused once the driver reports the
    /// end of its work. A forked child cannot free its parent's memory.
    Failed(Code),
    /// The address lies inside the memory of a pool, but no buffer in use begins there.
    InsidePoolMemory,
    /// The address does not lie in the memory of a pool.
    NotPoolMemory,
}

/// Returns the program's buffer at `start` to its pool, which reuses it after all work that the contexts have enqueued so far.
/// `add_contexts` finds the contexts that no hook saw.
pub(crate) fn free(start: *mut c_void, add_contexts: impl FnOnce()) -> FreeOutcome {
    let address = start.addr();
    if !process::uses_contexts_here() {
        let is_parents = !process::may_be_served() && source::is_parents_pool_memory(address);
        return if is_parents { FreeOutcome::Failed(CUDA_ERROR_NOT_INITIALIZED) } else { FreeOutcome::NotPoolMemory };
    }
    let Some(served) = BUFFERS.lock().remove(&address) else {
        let is_inside = source::is_pool_memory(address);
        return if is_inside { FreeOutcome::InsidePoolMemory } else { FreeOutcome::NotPoolMemory };
    };
    // Without a driver, or if a call below panics, the buffer is leaked, since without a fence it must not be reused (preload-I3).
    let served = ManuallyDrop::new(served);
    // Cannot fail, since the request for the buffer has found the driver.
    let Ok(driver) = Driver::get() else { return FreeOutcome::Failed(CUDA_ERROR_NOT_INITIALIZED) };
    add_contexts();
    contexts::add_current();
    let fence = Arc::new(KnownContextsFence::after(driver, contexts::all()));
    let outcome = if *settings::SYNC_ON_FREE { fence.wait_unless_capturing().map(drop) } else { Ok(()) };
    // Fails only in a forked child. If the fence fails later, the pool counts it, logs it and queries it again.
    let _forked = ManuallyDrop::into_inner(served).buf.release_after(&FenceStream(fence));
    outcome.map_or_else(FreeOutcome::Failed, |()| FreeOutcome::Done)
}
