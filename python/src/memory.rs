//! The memory of one Python buffer: its views, its recorded streams, and its return to the pool.
//!
//! ```text
//!   open ──close──▶ closed ──last view ends──▶ the pool        after the recorded streams
//!     └───────────the last reference ends──────▶
//! ```
//!
//! - **memory-I1**: the buffer is not returned while a [`View`] exists, nor after [`expose`](Memory::expose) while a reference
//!   exists.
//! - **memory-I2**: `address` and `len` describe the buffer until it is returned.
//! - **memory-I3**: a buffer with a view is in [`VIEWED`].

use std::collections::BTreeMap;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pinpool::copy::Fence;
use pinpool::unstable::{config::Config, fast_path};
use pinpool::{OnFull, PinnedBuf, PinnedBy, Preset};
use pinpool_os::fork::PerProcess;
use pyo3::exceptions::PyBufferError;
use pyo3::{PyErr, PyResult};

use crate::errors::{ReleasedError, exception};
use crate::fences::{UnknownEnd, put_after};
use crate::stream::{Stream, Unfenced};
use crate::without_gil::without_gil;

/// The properties of the pool of a Python buffer, and how many of its buffers the program has.
#[derive(Debug)]
pub(crate) struct BufferOrigin {
    /// Ordinal of the GPU that receives copies.
    pub(crate) device: u32,
    /// Whether CUDA pins the memory of the pool.
    pub(crate) is_cuda_pinned: bool,
    /// Whether a hit and a return only move the buffer between lists, unless another pool wants memory.
    moves_lists_only: bool,
    may_fall_back: bool,
    /// Whether a stream was recorded on a buffer of this pool. From then on, requests and returns may call the driver.
    /// Copies of torch's blocks and of a `SharedPool` over the same pool do not set it: a request may query them with the GIL.
    has_fences: AtomicBool,
    /// Number of buffers that the program has not returned.
    pub(crate) num_unreturned: AtomicUsize,
    /// The pool, after its last Python object was dropped. Keeping it avoids a warning about buffers that outlive their pool,
    /// because Python drops objects in any order.
    pool: Mutex<Option<pinpool::Pool>>,
}

impl Drop for BufferOrigin {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            without_gil(move || drop(pool));
        }
    }
}

impl BufferOrigin {
    pub(crate) fn of(backend: &str, config: &Config) -> Self {
        Self {
            device: config.device,
            is_cuda_pinned: matches!(backend, "vmm" | "register" | "cuda"),
            // With other settings, a return may zero the buffer or release memory. With these, it releases only for other pools.
            moves_lists_only: config.preset == Preset::Adaptive && !config.zero && config.max_idle_bytes.is_none(),
            may_fall_back: config.on_full == OnFull::Pageable,
            has_fences: AtomicBool::new(false),
            num_unreturned: AtomicUsize::new(0),
            pool: Mutex::new(None),
        }
    }

    /// Returns the properties for buffers of `pool` in shared memory.
    pub(crate) fn of_shared(pool: pinpool::Pool, is_cuda_pinned: bool) -> Self {
        let mut origin = Self::of("", pool.unstable_config());
        (origin.is_cuda_pinned, origin.moves_lists_only) = (is_cuda_pinned, false);
        origin.pool = Mutex::new(Some(pool));
        origin
    }

    /// Returns whether a hit is short enough to keep the GIL.
    pub(crate) fn keeps_gil_on_hit(&self) -> bool {
        // Relaxed: the flag guards no other memory.
        self.moves_lists_only && !self.has_fences.load(Ordering::Relaxed)
    }

    /// Returns whether a return of `buf` is short enough to keep the GIL. The return of a pageable buffer releases memory, and
    /// a return may release memory while another pool wants some. A pool that begins to want memory between this check and the
    /// return is rare.
    fn keeps_gil_on_return(&self, buf: &PinnedBuf) -> bool {
        self.keeps_gil_on_hit() && fast_path::is_open_to(buf) && (buf.pinned_by().is_some() || !self.may_fall_back)
    }

    /// Releases idle memory, and keeps the pool until its last buffer is dropped. There must be no more requests.
    pub(crate) fn close(&self, pool: pinpool::Pool) {
        pool.clear();
        *self.pool.lock().unwrap_or_else(PoisonError::into_inner) = Some(pool);
    }
}

#[derive(Debug)]
struct State {
    /// `None` after the buffer was returned.
    buf: Option<PinnedBuf>,
    views: usize,
    /// Whether the buffer was released, so that there can be no new views.
    is_closed: bool,
    /// Whether there may be uncounted views while references exist.
    is_exposed: bool,
    fences: Vec<Arc<dyn Fence>>,
}

/// Buffers by address, to find the buffer of an array or tensor.
///
/// A forked child has another list, because a thread of the parent may hold the lock.
static VIEWED: PerProcess<Mutex<Viewed>> = PerProcess::new(|| {
    let of_parent = VIEWED.get_inherited().and_then(|viewed| viewed.try_lock().ok());
    let inherited = of_parent.map(|viewed| viewed.buffers.clone()).unwrap_or_default();
    Mutex::new(Viewed { inherited, ..Viewed::default() })
});

/// Buffers that have or had views. Buffers that have not been returned do not overlap.
#[derive(Default)]
struct Viewed {
    /// Buffers by the address of the first byte. If there are more than `sweep_above`, dropped buffers are removed.
    buffers: BTreeMap<usize, Weak<Memory>>,
    sweep_above: usize,
    /// The parent's buffers. Their addresses may belong to buffers of this process by now.
    inherited: BTreeMap<usize, Weak<Memory>>,
}

impl Viewed {
    fn lock() -> MutexGuard<'static, Self> {
        VIEWED.get().lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&mut self, memory: &Arc<Memory>) {
        self.buffers.insert(memory.address, Arc::downgrade(memory));
        if self.buffers.len() > self.sweep_above.max(64) {
            self.buffers.retain(|_, memory| memory.strong_count() > 0);
            self.sweep_above = 2 * self.buffers.len();
        }
    }

    /// Returns the last buffer before `end`. Removes dropped buffers that are in the way.
    fn last_before(&mut self, end: usize) -> Option<Arc<Memory>> {
        loop {
            let (&address, memory) = self.buffers.range(..end).next_back()?;
            if let Some(memory) = memory.upgrade() {
                return Some(memory);
            }
            self.buffers.remove(&address);
        }
    }
}

/// One buffer of a pool, with its views.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) is_pinned: bool,
    pub(crate) numa_node: Option<u32>,
    pub(crate) origin: Arc<BufferOrigin>,
    state: Mutex<State>,
}

/// Number of fences of a buffer at which the completed fences are dropped before another is recorded.
const UNCHECKED_FENCES_MAX: usize = 16;

const VIEW_KINDS: &str = "(memoryview, NumPy array, DLPack tensor)";
const VIEW_REMEDY: &str = "or drop the buffer with `del` or `with`: its memory returns when the last view is gone";

impl State {
    /// Fails if there are views.
    fn check_views(&self) -> PyResult<()> {
        let message = match self.views {
            0 if !self.is_exposed => return Ok(()),
            0 => "the buffer's __array_interface__ was read, and arrays made from it are not counted: delete them and the \
                  buffer to return its memory"
                .to_owned(),
            1 => format!("a view of this buffer {VIEW_KINDS} is alive: delete it first, {VIEW_REMEDY}"),
            views => format!("{views} views of this buffer {VIEW_KINDS} are alive: delete them first, {VIEW_REMEDY}"),
        };
        Err(PyBufferError::new_err(message))
    }
}

impl Memory {
    pub(crate) fn of(buf: PinnedBuf, origin: Arc<BufferOrigin>) -> Self {
        origin.num_unreturned.fetch_add(1, Ordering::Relaxed);
        Self {
            address: buf.as_ptr().expose_provenance(),
            len: buf.len(),
            is_pinned: buf.pinned_by() == Some(PinnedBy::Driver),
            numa_node: buf.numa_node(),
            origin,
            state: Mutex::new(State {
                buf: Some(buf),
                views: 0,
                is_closed: false,
                is_exposed: false,
                fences: Vec::new(),
            }),
        }
    }

    /// Locks the state. The lock is not held during calls to Python, nor while the pool serves a request or a return. During driver
    /// calls, it is held only if the buffer has many fences.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Address of the first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.address)
    }

    pub(crate) fn is_released(&self) -> bool {
        self.state().is_closed
    }

    pub(crate) fn num_views(&self) -> usize {
        self.state().views
    }

    /// Returns the state, or an error if the buffer was released.
    fn lock_usable(&self) -> PyResult<MutexGuard<'_, State>> {
        let state = self.lock_unreturned()?;
        if state.is_closed { Err(self.released()) } else { Ok(state) }
    }

    /// Returns the state, or an error if the buffer was released and has no views.
    fn lock_unreturned(&self) -> PyResult<MutexGuard<'_, State>> {
        let state = self.state();
        let Some(buf) = &state.buf else { return Err(self.released()) };
        // This fails for driver memory in a forked child.
        buf.wait_slice().map_err(|error| exception(&error))?;
        Ok(state)
    }

    fn released(&self) -> PyErr {
        ReleasedError::new_err(format!(
            "the buffer of {} bytes was released and its memory may have another user by now: get another one from the pool",
            self.len
        ))
    }

    /// Fails if the buffer was released.
    pub(crate) fn check(&self) -> PyResult<()> {
        self.lock_usable().map(drop)
    }

    /// Counts another view, until [`end_view`](Memory::end_view).
    pub(crate) fn begin_view(self: &Arc<Self>) -> PyResult<()> {
        let mut state = self.lock_usable()?;
        if state.views == 0 {
            Viewed::lock().insert(self);
        }
        state.views += 1;
        Ok(())
    }

    pub(crate) fn end_view(&self) {
        let mut state = self.state();
        state.views = state.views.saturating_sub(1);
        self.return_if_unused(state);
    }

    /// Marks the buffer as exposed: from now on, only dropping the last reference returns it.
    pub(crate) fn expose(self: &Arc<Self>) -> PyResult<()> {
        let mut state = self.lock_usable()?;
        state.is_exposed = true;
        Viewed::lock().insert(self);
        Ok(())
    }

    /// Finds the buffer that contains `address` and has or had views.
    pub(crate) fn containing(address: usize) -> Option<Arc<Self>> {
        let mut end = address.checked_add(1)?;
        let has_address = |memory: &Arc<Self>| address - memory.address < memory.len;
        loop {
            let found = Viewed::lock().last_before(end);
            let Some(memory) = found else { break };
            if memory.state().buf.is_some() {
                if has_address(&memory) {
                    return Some(memory);
                }
                break;
            }
            // The buffer that was found has been returned, and its memory may be part of another buffer.
            end = memory.address;
        }
        // A parent's buffer, for the error that says so. A thread of the parent may have held its lock at the fork.
        let inherited = Viewed::lock().inherited.range(..=address).next_back()?.1.upgrade()?;
        (has_address(&inherited) && inherited.state.try_lock().is_ok()).then_some(inherited)
    }

    /// Delays the return until the work enqueued on `stream` so far has completed.
    pub(crate) fn record_stream(&self, stream: Stream) -> PyResult<()> {
        let earlier = self.lock_unreturned()?.fences.clone();
        let fence = stream.fence(self.origin.device).or_else(|unfenced| self.quarantine(unfenced))?;
        self.record(fence, &earlier)
    }

    /// Delays the return until the work before `fence` has completed. The fences in `earlier` were recorded before `fence`, which
    /// therefore replaces the fence of its stream. A fence that another thread has recorded meanwhile may be a later one.
    fn record(&self, fence: Arc<dyn Fence>, earlier: &[Arc<dyn Fence>]) -> PyResult<()> {
        let mut state = self.lock_unreturned()?;
        self.origin.has_fences.store(true, Ordering::Relaxed);
        let (stream, checks_completed) = (fence.stream_id(), state.fences.len() >= UNCHECKED_FENCES_MAX);
        state.fences.retain(|each| {
            let is_of_stream = stream.is_some() && each.stream_id() == stream;
            let is_replaced = is_of_stream && earlier.iter().any(|earlier| Arc::ptr_eq(earlier, each));
            // A failed fence is kept, because its work may still run.
            !(is_replaced || checks_completed && matches!(each.is_complete(), Ok(true)))
        });
        state.fences.push(fence);
        Ok(())
    }

    /// Prevents any reuse of the memory if the stream may have work, because the end of the work is unknown. Returns the error.
    fn quarantine<T>(&self, Unfenced { error, may_run }: Unfenced) -> PyResult<T> {
        if may_run {
            self.record(Arc::new(UnknownEnd(error.to_string())), &[])?;
        }
        Err(error)
    }

    /// Releases the buffer now. Fails while it has views.
    pub(crate) fn release(&self) -> PyResult<()> {
        let mut state = self.state();
        if !state.is_closed {
            state.check_views()?;
            state.is_closed = true;
            self.return_if_unused(state);
        }
        Ok(())
    }

    /// Fails if the buffer was released, or has views so that [`release`](Memory::release) would fail.
    pub(crate) fn check_release(&self) -> PyResult<()> {
        self.lock_usable()?.check_views()
    }

    /// Releases the buffer. Its memory returns to the pool immediately, or later if views or references must end first (memory-I1).
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        self.return_if_unused(state);
    }

    fn return_if_unused(&self, mut state: MutexGuard<'_, State>) {
        if !state.is_closed || state.views > 0 || state.is_exposed {
            return;
        }
        let (buf, fences) = (state.buf.take(), std::mem::take(&mut state.fences));
        drop(state);
        put(buf, fences, &self.origin);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        put(state.buf.take(), std::mem::take(&mut state.fences), &self.origin);
    }
}

/// Returns a buffer to its pool after the work before `fences`.
fn put(buf: Option<PinnedBuf>, fences: Vec<Arc<dyn Fence>>, origin: &BufferOrigin) {
    let Some(buf) = buf else { return };
    // Relaxed: the count guards no other memory.
    origin.num_unreturned.fetch_sub(1, Ordering::Relaxed);
    if fences.is_empty() && origin.keeps_gil_on_return(&buf) {
        drop(buf);
    } else {
        without_gil(move || put_after(buf, fences));
    }
}

/// A counted view. It may be dropped on any thread, without an interpreter.
#[derive(Debug)]
pub(crate) struct View(Arc<Memory>);

impl View {
    pub(crate) fn of(memory: &Arc<Memory>) -> PyResult<Self> {
        memory.begin_view()?;
        Ok(Self(memory.clone()))
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.0
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.0.end_view();
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pinned = if self.is_pinned { "pinned" } else { "not pinned" };
        let views = match self.num_views() {
            0 => String::new(),
            1 => ", 1 view".to_owned(),
            views => format!(", {views} views"),
        };
        let released = if self.is_released() { ", released" } else { "" };
        write!(f, "<pinpool.Buffer of {} bytes at {:#x}, {pinned}{views}{released}>", self.len, self.address)
    }
}
