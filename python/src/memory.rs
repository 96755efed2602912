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

use pinpool::copy::{CopyStream, Fence};
use pinpool::unstable::{config::Config, fast_path};
use pinpool::{OnFull, PinnedBuf, PinnedBy, Preset};
use pyo3::exceptions::PyBufferError;
use pyo3::{PyErr, PyResult};

use crate::errors::{ReleasedError, exception};
use crate::stream::Unfenced;
use crate::without_gil::without_gil;

/// The properties of the pool of a Python buffer, and how many of its buffers the program has.
#[derive(Debug)]
pub(crate) struct PoolTraits {
    /// Ordinal of the GPU that receives copies.
    pub(crate) device: u32,
    /// Whether CUDA pins the memory of the pool.
    pub(crate) is_cuda_pinned: bool,
    /// Whether a hit and a return only move the buffer between lists, unless another pool wants memory.
    moves_lists_only: bool,
    may_fall_back: bool,
    /// Whether a stream was recorded on a buffer of this pool. From then on, requests and returns may call the driver.
    /// Copies of torch and of a `SharedPool` over the same pool do not set it, so a request may query them with the GIL.
    has_streams: AtomicBool,
    /// Number of buffers that the program has not returned.
    pub(crate) unreturned: AtomicUsize,
    /// The pool, after its last Python object was dropped. Keeping it avoids a warning about buffers that outlive their pool,
    /// because Python drops objects in any order.
    pool: Mutex<Option<pinpool::Pool>>,
}

impl Drop for PoolTraits {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            without_gil(move || drop(pool));
        }
    }
}

impl PoolTraits {
    pub(crate) fn of(backend: &str, config: &Config) -> Self {
        Self {
            device: config.device,
            is_cuda_pinned: matches!(backend, "vmm" | "register" | "cuda"),
            // With other settings, a return may zero the buffer or release memory. With these, it releases only for other pools.
            moves_lists_only: config.preset == Preset::Adaptive && !config.zero && config.max_idle_bytes.is_none(),
            may_fall_back: config.on_full == OnFull::Pageable,
            has_streams: AtomicBool::new(false),
            unreturned: AtomicUsize::new(0),
            pool: Mutex::new(None),
        }
    }

    /// Returns the properties for buffers of `pool` in shared memory.
    pub(crate) fn of_shared(pool: pinpool::Pool, is_cuda_pinned: bool) -> Self {
        let mut traits = Self::of("", pool.config());
        (traits.is_cuda_pinned, traits.moves_lists_only) = (is_cuda_pinned, false);
        traits.pool = Mutex::new(Some(pool));
        traits
    }

    /// Returns whether a hit is short enough to keep the GIL.
    pub(crate) fn keeps_gil_on_hit(&self) -> bool {
        // Relaxed: the flag guards no other memory.
        self.moves_lists_only && !self.has_streams.load(Ordering::Relaxed)
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
    streams: Vec<Arc<dyn Fence>>,
}

/// Buffers by address, to find the buffer of an array or tensor.
///
/// Locked only by threads that are attached to the interpreter, and never during a call to Python, so no other thread holds the
/// lock when the process forks.
static VIEWED: Mutex<Viewed> = Mutex::new(Viewed { buffers: BTreeMap::new(), sweep_above: 64 });

/// Buffers that have or had views.
struct Viewed {
    /// Length and buffer, by the address of the first byte. If there are more than `sweep_above`, dropped buffers are removed.
    buffers: BTreeMap<usize, (usize, Weak<Memory>)>,
    sweep_above: usize,
}

impl Viewed {
    fn lock() -> MutexGuard<'static, Self> {
        VIEWED.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&mut self, memory: &Arc<Memory>) {
        self.buffers.insert(memory.address, (memory.len, Arc::downgrade(memory)));
        if self.buffers.len() > self.sweep_above {
            self.buffers.retain(|_, (_, memory)| memory.strong_count() > 0);
            self.sweep_above = 64.max(2 * self.buffers.len());
        }
    }

    /// Returns the last buffer before `end` that contains `address`.
    fn containing(&self, address: usize, end: usize) -> Option<Arc<Memory>> {
        let before = self.buffers.range(..end).rev();
        before.filter(|(first, (len, _))| address - **first < *len).find_map(|(_, (_, memory))| memory.upgrade())
    }
}

/// One buffer of a pool, with its views.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) is_pinned: bool,
    pub(crate) numa_node: Option<u32>,
    pub(crate) traits: Arc<PoolTraits>,
    state: Mutex<State>,
}

/// Number of fences of a buffer at which the completed fences are dropped before another is recorded.
const STREAMS_UNCHECKED: usize = 16;

const KINDS: &str = "(memoryview, NumPy array, DLPack tensor)";
const INSTEAD: &str = "first, or drop the buffer with `del` or `with`: its memory returns when the last view is gone";

impl State {
    /// Fails if there are views.
    fn check_views(&self) -> PyResult<()> {
        let message = match self.views {
            0 if !self.is_exposed => return Ok(()),
            0 => "the buffer's __array_interface__ was read, and arrays made from it are not counted: delete them and the \
                  buffer to return its memory"
                .to_owned(),
            1 => format!("a view of this buffer {KINDS} is alive: delete it {INSTEAD}"),
            views => format!("{views} views of this buffer {KINDS} are alive: delete them {INSTEAD}"),
        };
        Err(PyBufferError::new_err(message))
    }
}

impl Memory {
    pub(crate) fn of(buf: PinnedBuf, traits: Arc<PoolTraits>) -> Self {
        traits.unreturned.fetch_add(1, Ordering::Relaxed);
        Self {
            address: buf.as_ptr().expose_provenance(),
            len: buf.len(),
            is_pinned: buf.pinned_by() == Some(PinnedBy::Driver),
            numa_node: buf.numa_node(),
            traits,
            state: Mutex::new(State {
                buf: Some(buf),
                views: 0,
                is_closed: false,
                is_exposed: false,
                streams: Vec::new(),
            }),
        }
    }

    /// Locks the state. The lock is not held during calls to Python, nor while the pool serves a request or a return. During driver
    /// calls, it is held only if many streams are recorded on the buffer.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_released(&self) -> bool {
        self.state().is_closed
    }

    pub(crate) fn views(&self) -> usize {
        self.state().views
    }

    /// Returns the state, or an error if the buffer was released.
    fn usable(&self) -> PyResult<MutexGuard<'_, State>> {
        let state = self.unreturned()?;
        if state.is_closed { Err(self.released()) } else { Ok(state) }
    }

    /// Returns the state, or an error if the buffer was released and has no views.
    fn unreturned(&self) -> PyResult<MutexGuard<'_, State>> {
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
        self.usable().map(drop)
    }

    /// Counts another view, until [`end_view`](Memory::end_view). The caller must be attached to the interpreter.
    pub(crate) fn begin_view(self: &Arc<Self>) -> PyResult<()> {
        let mut state = self.usable()?;
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

    /// Marks the buffer as exposed: from now on, only dropping the last reference returns it. The caller must be attached to
    /// the interpreter.
    pub(crate) fn expose(self: &Arc<Self>) -> PyResult<()> {
        let mut state = self.usable()?;
        state.is_exposed = true;
        Viewed::lock().insert(self);
        Ok(())
    }

    /// Finds the buffer that contains `address` and has or had views. The caller must be attached to the interpreter.
    pub(crate) fn containing(address: usize) -> Option<Arc<Self>> {
        let mut end = address.checked_add(1)?;
        loop {
            let memory = Viewed::lock().containing(address, end)?;
            if memory.state().buf.is_some() {
                return Some(memory);
            }
            // The buffer that was found has been returned, and its memory may be part of another buffer.
            end = memory.address;
        }
    }

    /// Delays the return until the work before `fence` has completed.
    pub(crate) fn record(&self, fence: Arc<dyn Fence>) -> PyResult<()> {
        let mut state = self.unreturned()?;
        self.traits.has_streams.store(true, Ordering::Relaxed);
        if state.streams.len() >= STREAMS_UNCHECKED {
            // A failed fence is kept, because its work may still run.
            state.streams.retain(|earlier| !matches!(earlier.is_complete(), Ok(true)));
        }
        state.streams.push(fence);
        Ok(())
    }

    /// Prevents any reuse of the memory if the stream may have work, because the end of the work is unknown. Returns the error.
    pub(crate) fn quarantine<T>(&self, Unfenced { error, may_run }: Unfenced) -> PyResult<T> {
        if may_run {
            self.record(Arc::new(UnknownEnd(error.to_string())))?;
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
        self.usable()?.check_views()
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
        let (buf, streams) = (state.buf.take(), std::mem::take(&mut state.streams));
        drop(state);
        put(buf, streams, &self.traits);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        put(state.buf.take(), std::mem::take(&mut state.streams), &self.traits);
    }
}

/// Returns a buffer to its pool after the work on `streams`.
fn put(buf: Option<PinnedBuf>, mut streams: Vec<Arc<dyn Fence>>, traits: &PoolTraits) {
    let Some(buf) = buf else { return };
    // Relaxed: the count guards no other memory.
    traits.unreturned.fetch_sub(1, Ordering::Relaxed);
    let last = streams.pop();
    match last {
        None if traits.keeps_gil_on_return(&buf) => drop(buf),
        None => without_gil(move || drop(buf)),
        // The pool logs a failure and does not reuse the memory.
        Some(last) => without_gil(move || drop(buf.release_after(&AllFences { last, others: streams }))),
    }
}

/// The fence of work that ends at an unknown time.
#[derive(Debug)]
struct UnknownEnd(String);

// SAFETY: the fence never reports completion.
#[allow(unsafe_code)]
unsafe impl Fence for UnknownEnd {
    fn is_complete(&self) -> pinpool::Result<bool> {
        Err(pinpool::Error::device_failed(self.0.clone()))
    }

    fn wait(&self) -> pinpool::Result<()> {
        self.is_complete().map(drop)
    }
}

/// The fences of several streams, combined into one.
#[derive(Debug, Clone)]
pub(crate) struct AllFences {
    pub(crate) last: Arc<dyn Fence>,
    pub(crate) others: Vec<Arc<dyn Fence>>,
}

// SAFETY: the fence completes after all recorded fences.
#[allow(unsafe_code)]
unsafe impl CopyStream for AllFences {
    fn record_fence(&self) -> pinpool::Result<Arc<dyn Fence>> {
        Ok(if self.others.is_empty() { self.last.clone() } else { Arc::new(self.clone()) })
    }
}

// SAFETY: the fence completes when all of its fences, which fulfil the contract, have completed.
#[allow(unsafe_code)]
unsafe impl Fence for AllFences {
    fn is_complete(&self) -> pinpool::Result<bool> {
        let mut fences = self.others.iter().chain([&self.last]);
        fences.try_fold(true, |are_complete, fence| Ok(are_complete && fence.is_complete()?))
    }

    fn wait(&self) -> pinpool::Result<()> {
        self.others.iter().chain([&self.last]).try_for_each(|fence| fence.wait())
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

impl Memory {
    /// Address of the first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.address)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pinned = if self.is_pinned { "pinned" } else { "not pinned" };
        let views = match self.views() {
            0 => String::new(),
            1 => ", 1 view".to_owned(),
            views => format!(", {views} views"),
        };
        let released = if self.is_released() { ", released" } else { "" };
        write!(f, "<pinpool.Buffer of {} bytes at {:#x}, {pinned}{views}{released}>", self.len, self.address)
    }
}
