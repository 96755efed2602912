//! A device simulated on the host: a stream is a worker thread, and device memory is a vector.
//!
//! Copies run later, in order, and read their source when they run, as a DMA engine does; a [`SinkGate`] holds a stream
//! until it is dropped.
//! [`PinnedBuf`](pinpool::PinnedBuf) has an example.
//!
//! **sink-I1**: a reference to the bytes of a [`SinkMemory`] exists only while no copy into them is queued or running. Copies
//! from and to one memory wait for earlier copies on other streams, and [`SinkMemory::read`] waits for all. A new copy into the
//! memory needs `&mut`, which ends the borrow of `read`.
#![allow(unsafe_code)] // Copies through raw pointers on another thread, as a device would.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use pinpool::copy::{CopySource, CopyStream, CopyTarget, EnqueueError, Enqueued, Fence, StreamId};
use pinpool::{Error, Result};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::{AtomicU64, Condvar, Mutex, Ordering};
use pinpool_os::threads;

/// An in-order queue of copies, run by a dedicated thread.
///
/// Dropping it returns immediately. The queued copies still run.
#[derive(Debug)]
pub struct SinkStream {
    queue: Sender<QueuedCopy>,
    progress: Arc<Progress>,
}

/// The progress of a stream.
#[derive(Debug)]
struct Progress {
    /// The fork generation of the worker: a forked child has no worker.
    generation: ForkGeneration,
    id: StreamId,
    /// Number of enqueued copies, which is also the number of the next copy.
    enqueued: AtomicU64,
    /// Number of completed copies: all copies with a lower number have completed.
    done: AtomicU64,
    state: Mutex<WorkerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WorkerState {
    gates: usize,
    is_running: bool,
    has_failed: bool,
}

struct QueuedCopy {
    run: Box<dyn FnOnce() + Send>,
    /// Copies of other streams from and to the same memory.
    earlier: Vec<Arc<dyn Fence>>,
}

/// An address that a worker reads or writes later.
#[derive(Debug)]
struct HostAddress(*mut u8);

// SAFETY: the callers of `enqueue_write` and `enqueue_read` promise that the bytes belong to the copy until it has completed,
// on any thread.
unsafe impl Send for HostAddress {}

/// Memory of the sink. Workers write to it while copies run, and its owner reads it only when no copy runs.
#[derive(Debug)]
struct DeviceBytes(UnsafeCell<Box<[u8]>>);

// SAFETY: sink-I1.
unsafe impl Sync for DeviceBytes {}

/// Memory that simulates device memory.
#[derive(Debug)]
pub struct SinkMemory {
    bytes: Arc<DeviceBytes>,
    len: usize,
    copies: Mutex<Vec<Arc<dyn Fence>>>,
}

/// Keeps a stream from starting its next copy until it is dropped.
#[derive(Debug)]
#[must_use = "the stream runs on when the gate is dropped"]
pub struct SinkGate(Arc<Progress>);

#[derive(Debug)]
struct SinkFence {
    progress: Arc<Progress>,
    number: u64,
}

impl SinkStream {
    /// Starts a stream.
    ///
    /// # Errors
    ///
    /// [`Error::is_unavailable`] if the system refuses a thread.
    pub fn new() -> Result<Self> {
        let (queue, copies) = channel();
        let progress = Arc::new(Progress {
            generation: ForkGeneration::now(),
            id: StreamId::unique(),
            enqueued: AtomicU64::new(0),
            done: AtomicU64::new(0),
            state: Mutex::new(WorkerState::default()),
            changed: Condvar::default(),
        });
        let worker_progress = progress.clone();
        threads::spawn(c"pinpool-sink", move || run_copies(&copies, &worker_progress)).map_err(|why| {
            let why = format!("cannot start a thread: {why}; raise the limit on processes (`ulimit -u`)");
            Error::unavailable("the host sink", why)
        })?;
        Ok(Self { queue, progress })
    }

    /// Keeps the stream from starting its next copy.
    pub fn hold(&self) -> SinkGate {
        self.progress.state.lock().gates += 1;
        SinkGate(self.progress.clone())
    }

    /// Makes every copy of this stream that has not completed fail, as if the device were lost.
    pub fn fail(&self) {
        let mut state = self.progress.state.lock();
        // A running copy ends first: nothing may be written after a failure is visible (sink-I1).
        while state.is_running {
            state = self.progress.changed.wait(state);
        }
        state.has_failed = true;
        self.progress.changed.notify_all();
    }

    fn enqueue(&self, run: impl FnOnce() + Send + 'static, earlier: Vec<Arc<dyn Fence>>) -> Result<Arc<dyn Fence>> {
        // With this lock, the number of a copy is its place in the queue even if several threads share a stream.
        let _in_order = self.progress.state.lock();
        self.queue
            .send(QueuedCopy { run: Box::new(run), earlier })
            .map_err(|_| Error::device_failed("the worker of the sink stream has ended"))?;
        // Relaxed: the counter changes only under the lock.
        let number = self.progress.enqueued.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(SinkFence { progress: self.progress.clone(), number }))
    }

    /// Waits until all copies enqueued so far have completed.
    ///
    /// # Errors
    ///
    /// [`Error::is_device_failed`] if the stream failed.
    pub fn synchronize(&self) -> Result<()> {
        // Relaxed: this thread's own enqueues come before this load; enqueues of other threads may or may not count.
        self.progress.wait_for(self.progress.enqueued.load(Ordering::Relaxed))
    }
}

fn run_copies(copies: &Receiver<QueuedCopy>, progress: &Progress) {
    for QueuedCopy { run, earlier } in copies {
        for copy in earlier {
            // A failed stream writes nothing more, so its copies need no wait.
            let _ = copy.wait();
        }
        let mut state = progress.state.lock();
        while state.gates > 0 && !state.has_failed {
            state = progress.changed.wait(state);
        }
        if state.has_failed {
            // A lost device copies nothing more, and its copies never count as done.
            continue;
        }
        state.is_running = true;
        drop(state);
        run();
        // The count changes under the lock, so that a waiter between its check and its sleep does not miss the change.
        let mut state = progress.state.lock();
        state.is_running = false;
        // Release: a thread that sees the count sees the bytes, and may overwrite the source.
        progress.done.fetch_add(1, Ordering::Release);
        progress.changed.notify_all();
    }
}

impl Progress {
    fn is_complete(&self, copies: u64) -> bool {
        // Acquire: pairs with the worker's release.
        self.done.load(Ordering::Acquire) >= copies
    }

    fn check_process(&self) -> Result<()> {
        let stale = self.generation.is_stale();
        if stale { Err(Error::device_failed("the sink's worker stayed in the parent process")) } else { Ok(()) }
    }

    fn wait_for(&self, copies: u64) -> Result<()> {
        self.check_process()?;
        let mut state = self.state.lock();
        while !self.is_complete(copies) {
            if state.has_failed {
                return Err(failed());
            }
            state = self.changed.wait(state);
        }
        Ok(())
    }
}

fn failed() -> Error {
    Error::device_failed("the sink stream was made to fail")
}

// SAFETY: the worker runs copies in order, and counts a copy as done after its last access to source and target.
unsafe impl Fence for SinkFence {
    fn is_complete(&self) -> Result<bool> {
        if self.progress.is_complete(self.number + 1) {
            return Ok(true);
        }
        self.progress.check_process()?;
        if self.progress.state.lock().has_failed { Err(failed()) } else { Ok(false) }
    }

    fn is_complete_by_load(&self) -> Option<bool> {
        self.progress.is_complete(self.number + 1).then_some(true)
    }

    fn wait(&self) -> Result<()> {
        self.progress.wait_for(self.number + 1)
    }

    fn stream_id(&self) -> Option<StreamId> {
        Some(self.progress.id)
    }
}

impl SinkMemory {
    /// Creates `len` zeroed bytes.
    pub fn new(len: usize) -> Self {
        vec![0; len].into()
    }

    /// Waits for the copies into this memory and returns its bytes.
    ///
    /// Copies of a failed stream count as completed here, since that stream writes nothing more.
    pub fn read(&self) -> &[u8] {
        // The copies stay in the list during the wait: a copy from this memory that another thread enqueues must come after them too.
        let copies = self.copies.lock().clone();
        for copy in copies {
            // A failed stream writes nothing more, so its copies need no wait.
            let _ = copy.wait();
        }
        // SAFETY: sink-I1: every copy into the bytes has completed, and the next needs `&mut self`, which ends this borrow.
        unsafe { &*self.bytes.0.get() }
    }

    /// Enqueues a copy that runs after the copies of other streams from and to this memory.
    fn enqueue_in_order(&self, stream: &SinkStream, run: impl FnOnce() + Send + 'static) -> Enqueued {
        stream.progress.check_process().map_err(EnqueueError::Refused)?;
        let mut copies = self.copies.lock();
        copies.retain(|copy| matches!(copy.is_complete(), Ok(false)));
        let is_of_other_stream = |copy: &&Arc<dyn Fence>| copy.stream_id() != Some(stream.progress.id);
        let earlier = copies.iter().filter(is_of_other_stream).cloned().collect();
        let fence = stream.enqueue(run, earlier).map_err(EnqueueError::Refused)?;
        copies.push(fence.clone());
        Ok(fence)
    }
}

/// Memory with these bytes.
impl From<Vec<u8>> for SinkMemory {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { bytes: Arc::new(DeviceBytes(UnsafeCell::new(bytes.into()))), len, copies: Mutex::default() }
    }
}

// SAFETY: if an error is returned, nothing was enqueued; the fence uses the worker's own count.
unsafe impl CopyTarget<SinkStream> for SinkMemory {
    fn capacity_bytes(&self) -> usize {
        self.len
    }

    unsafe fn enqueue_write(&mut self, stream: &SinkStream, source: *const u8, len: usize) -> Enqueued {
        let (source, target) = (HostAddress(source.cast_mut()), self.bytes.clone());
        self.enqueue_in_order(stream, move || {
            let (HostAddress(source), DeviceBytes(target)) = (source, &*target);
            // SAFETY: sink-I1: no reference to the bytes exists until this copy's fence is complete, and no other worker
            // touches them: earlier copies have ended, and later copies wait for this copy.
            let bytes = unsafe { &mut *target.get() };
            // SAFETY: the caller's promise: the source stays readable and unchanged until the fence.
            let source = unsafe { std::slice::from_raw_parts(source.cast_const(), len) };
            bytes[..len].copy_from_slice(source);
        })
    }
}

// SAFETY: as for `CopyTarget`.
unsafe impl CopySource<SinkStream> for SinkMemory {
    fn available_bytes(&self) -> usize {
        self.len
    }

    unsafe fn enqueue_read(&self, stream: &SinkStream, target: *mut u8, len: usize) -> Enqueued {
        let (source, target) = (self.bytes.clone(), HostAddress(target));
        self.enqueue_in_order(stream, move || {
            let (DeviceBytes(source), HostAddress(target)) = (&*source, target);
            // SAFETY: sink-I1: no worker writes to the bytes: earlier copies have ended, and later copies wait for this copy.
            let bytes = unsafe { &*source.get() };
            // SAFETY: the caller's promise: nothing else touches the target until the fence.
            let target = unsafe { std::slice::from_raw_parts_mut(target, len) };
            target.copy_from_slice(&bytes[..len]);
        })
    }
}

// SAFETY: the worker counts operations in the order in which they were enqueued, and this empty operation is one of them.
unsafe impl CopyStream for SinkStream {
    fn record_fence(&self) -> Result<Arc<dyn Fence>> {
        self.enqueue(|| (), Vec::new())
    }
}

impl Drop for SinkGate {
    fn drop(&mut self) {
        self.0.state.lock().gates -= 1;
        self.0.changed.notify_all();
    }
}
