//! A host that stands for a device: a stream is a worker thread, device memory is a vector.
//!
//! Copies run later, in order, and read their source when they run, as a DMA engine does; a [`SinkGate`] holds a stream
//! as long as a test (or a curious user) likes.
//!
//! ```
//! use pinpool::copy::sink::{SinkMem, SinkStream};
//!
//! let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).build()?;
//! let (stream, mut device) = (SinkStream::new()?, SinkMem::new(1000));
//! let mut buf = pool.get(1000)?;
//! buf.as_mut_slice().fill(7);
//! let copy = buf.copy_to(&stream, &mut device)?;
//! copy.wait()?;
//! assert!(device.read().iter().all(|&byte| byte == 7));
//! # Ok::<(), pinpool::Error>(())
//! ```
#![allow(unsafe_code)] // Copies through raw pointers on another thread, as a device would.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::{CopyFailure, CopySource, CopyStream, CopyTarget, FencePurpose};
use crate::error::{Error, Result};
use crate::fork::ForkGeneration;
use crate::in_flight::{Fence, SharedFence, StreamId};
use crate::sync::plain::{Condvar, Mutex};
use crate::sync::process::{AtomicU64, Ordering};

/// Numbers the streams of the process, apart from the addresses that number CUDA's.
static NEXT_STREAM: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

/// An in-order queue of copies, run by a thread of its own.
///
/// Dropping it lets the copies that are queued run to their end and returns at once.
#[derive(Debug)]
pub struct SinkStream {
    queue: Sender<Copy>,
    progress: Arc<Progress>,
}

/// How far a stream has come.
#[derive(Debug)]
struct Progress {
    /// The worker does not go with a fork.
    generation: ForkGeneration,
    stream: u64,
    /// Copies enqueued; the next one's number.
    enqueued: AtomicU64,
    /// Copies over: all with a number below this.
    done: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    gates: usize,
    running: bool,
    failed: bool,
}

#[derive(Debug)]
struct Copy {
    work: Work,
    /// Copies of other streams from and to the same memory that come first.
    after: Vec<SharedFence>,
}

#[derive(Debug)]
enum Work {
    ToDevice { source: HostAddress, len: usize, target: Arc<Cell> },
    ToHost { source: Arc<Cell>, target: HostAddress, len: usize },
    Nothing,
}

/// Where to read from or write to, later.
#[derive(Debug)]
struct HostAddress(*mut u8);

// SAFETY: the promise of `enqueue` and `fetch` is that the bytes are the copy's until it is over, on any thread.
unsafe impl Send for HostAddress {}

/// Memory of the sink: written by the worker while a copy runs, read by its owner only when none does.
#[derive(Debug)]
struct Cell(UnsafeCell<Box<[u8]>>);

// SAFETY: the worker writes only between the enqueue of a copy and its fence, and `SinkMem` gives out references only
// when all of its fences are over (sink I1).
unsafe impl Sync for Cell {}

/// Memory that stands for device memory.
///
/// **I1**: a reference to the bytes exists only while no copy into them is queued or running: [`SinkMem::read`] waits
/// for all of them, and a new one needs `&mut self`.
#[derive(Debug)]
pub struct SinkMem {
    cell: Arc<Cell>,
    len: usize,
    copies: Mutex<Vec<SharedFence>>,
}

/// Holds a stream before its next copy until it is dropped.
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
    /// [`Error::is_device`] if the system has no thread to give.
    pub fn new() -> Result<Self> {
        let (queue, copies) = channel();
        let progress = Arc::new(Progress {
            generation: ForkGeneration::now(),
            // Relaxed: only that no number is given twice matters.
            stream: NEXT_STREAM.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            enqueued: AtomicU64::new(0),
            done: AtomicU64::new(0),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        });
        let seen_by_worker = progress.clone();
        thread::Builder::new()
            .name("pinpool-sink".to_owned())
            .spawn(move || work(&copies, &seen_by_worker))
            .map_err(|error| Error::device(format!("no thread for a sink stream: {error}")))?;
        Ok(Self { queue, progress })
    }

    /// Holds the stream before its next copy.
    pub fn hold(&self) -> SinkGate {
        self.progress.state.lock().gates += 1;
        SinkGate(self.progress.clone())
    }

    /// From now on every copy of this stream that is not over fails, as when a device is lost.
    pub fn fail(&self) {
        let mut state = self.progress.state.lock();
        // A copy in the middle ends first: who hears of the failure may rely on no more being written (sink I1).
        while state.running {
            self.progress.changed.wait(&mut state);
        }
        state.failed = true;
        self.progress.changed.notify_all();
    }

    fn enqueue(&self, work: Work, after: Vec<SharedFence>) -> Result<SharedFence, CopyFailure> {
        // The lock makes a copy's number its place in the queue when several threads share a stream.
        let _in_order = self.progress.state.lock();
        self.queue
            .send(Copy { work, after })
            .map_err(|_| CopyFailure::Refused(Error::device("the worker of the sink stream has gone")))?;
        // Relaxed: written under the lock.
        let number = self.progress.enqueued.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(SinkFence { progress: self.progress.clone(), number }))
    }

    /// Waits until all copies enqueued so far are over.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if the stream was told to [`fail`](SinkStream::fail).
    pub fn synchronize(&self) -> Result<()> {
        // Relaxed: the caller's own enqueues precede this on its thread; others' may or may not count.
        self.progress.wait_for(self.progress.enqueued.load(Ordering::Relaxed))
    }
}

fn work(copies: &Receiver<Copy>, progress: &Progress) {
    for Copy { work, after } in copies {
        for earlier in after {
            // A stream that failed writes no more: nothing to wait for.
            let _ = earlier.wait();
        }
        let mut state = progress.state.lock();
        while state.gates > 0 && !state.failed {
            progress.changed.wait(&mut state);
        }
        if state.failed {
            // A lost device copies nothing more, and says nothing of what it did.
            continue;
        }
        state.running = true;
        drop(state);
        work.run();
        // Under the lock, so that a waiter between its check and its sleep is not missed.
        let mut state = progress.state.lock();
        state.running = false;
        // Release: whoever sees the count sees the bytes, and may overwrite the source.
        progress.done.fetch_add(1, Ordering::Release);
        progress.changed.notify_all();
    }
}

impl Work {
    fn run(self) {
        match self {
            Self::ToDevice { source, len, target } => {
                // SAFETY: sink I1: no reference to the bytes exists until this copy's fence is over, and no other worker
                // touches them: earlier copies were waited for, later ones wait for this one.
                let bytes = unsafe { &mut *target.0.get() };
                // SAFETY: the promise of `enqueue`: the source stays readable and unchanged until the fence.
                let source = unsafe { std::slice::from_raw_parts(source.0.cast_const(), len) };
                bytes[..len].copy_from_slice(source);
            }
            Self::ToHost { source, target, len } => {
                // SAFETY: sink I1: nobody writes to the bytes: earlier copies were waited for, later ones wait for this.
                let bytes = unsafe { &*source.0.get() };
                // SAFETY: the promise of `fetch`: nobody else touches the target until the fence.
                let target = unsafe { std::slice::from_raw_parts_mut(target.0, len) };
                target.copy_from_slice(&bytes[..len]);
            }
            Self::Nothing => {}
        }
    }
}

impl Progress {
    fn is_done(&self, copies: u64) -> bool {
        // Acquire: pairs with the worker's release.
        self.done.load(Ordering::Acquire) >= copies
    }

    fn check_process(&self) -> Result<()> {
        if self.generation.is_stale() {
            Err(Error::device("the sink's worker stayed in the parent process"))
        } else {
            Ok(())
        }
    }

    fn wait_for(&self, copies: u64) -> Result<()> {
        self.check_process()?;
        let mut state = self.state.lock();
        while !self.is_done(copies) {
            if state.failed {
                return Err(failed());
            }
            self.changed.wait(&mut state);
        }
        Ok(())
    }
}

fn failed() -> Error {
    Error::device("the sink stream was told to fail")
}

// SAFETY: the worker counts a copy as done after its last access to source and target, in order.
unsafe impl Fence for SinkFence {
    fn is_done(&self) -> Result<bool> {
        if self.progress.is_done(self.number + 1) {
            return Ok(true);
        }
        self.progress.check_process()?;
        if self.progress.state.lock().failed { Err(failed()) } else { Ok(false) }
    }

    fn wait(&self) -> Result<()> {
        self.progress.wait_for(self.number + 1)
    }

    fn stream(&self) -> u64 {
        self.progress.stream
    }

    fn stream_id(&self) -> Option<StreamId> {
        Some(StreamId::new((&raw const NEXT_STREAM).addr(), self.progress.stream))
    }
}

impl SinkMem {
    /// `len` zeroed bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len].into_boxed_slice();
        Self { cell: Arc::new(Cell(UnsafeCell::new(bytes))), len, copies: Mutex::default() }
    }

    /// Waits for the copies into this memory and gives its bytes.
    ///
    /// Copies of a stream that failed are over as far as this memory goes: that stream writes no more.
    pub fn read(&self) -> &[u8] {
        // They stay in the list meanwhile: a copy from here that another thread enqueues must come after them too.
        let copies = self.copies.lock().clone();
        for copy in copies {
            // A failed stream writes nothing more (see `work`), so its copies need no wait.
            let _ = copy.wait();
        }
        // SAFETY: sink I1: every copy enqueued so far is over, and the next needs `&mut self`, which ends this borrow.
        unsafe { &*self.cell.0.get() }
    }
}

// SAFETY: nothing is enqueued when an error is returned; the fence is the worker's own count.
unsafe impl CopyTarget<SinkStream> for SinkMem {
    fn capacity_bytes(&self) -> usize {
        self.len
    }

    unsafe fn enqueue(
        &mut self,
        stream: &SinkStream,
        source: *const u8,
        len: usize,
        _asker: FencePurpose,
    ) -> Result<Arc<dyn Fence>, CopyFailure> {
        let work = Work::ToDevice { source: HostAddress(source.cast_mut()), len, target: self.cell.clone() };
        self.enqueue_in_turn(stream, work)
    }
}

// SAFETY: as for `CopyTarget`.
unsafe impl CopySource<SinkStream> for SinkMem {
    fn available_bytes(&self) -> usize {
        self.len
    }

    unsafe fn fetch(&self, stream: &SinkStream, target: *mut u8, len: usize) -> Result<Arc<dyn Fence>, CopyFailure> {
        self.enqueue_in_turn(stream, Work::ToHost { source: self.cell.clone(), target: HostAddress(target), len })
    }
}

// SAFETY: the worker counts what is enqueued in order, this mark among it.
unsafe impl CopyStream for SinkStream {
    fn mark(&self) -> Result<Arc<dyn Fence>> {
        self.enqueue(Work::Nothing, Vec::new()).map_err(|failure| match failure {
            CopyFailure::Refused(error) | CopyFailure::Unknown(error) => error,
        })
    }
}

impl SinkMem {
    /// Behind the copies of other streams from and to this memory.
    fn enqueue_in_turn(&self, stream: &SinkStream, work: Work) -> Result<SharedFence, CopyFailure> {
        stream.progress.check_process().map_err(CopyFailure::Refused)?;
        let mut copies = self.copies.lock();
        copies.retain(|copy| matches!(copy.is_done(), Ok(false)));
        let elsewhere = |copy: &&SharedFence| copy.stream() != stream.progress.stream;
        let after = copies.iter().filter(elsewhere).cloned().collect();
        let fence = stream.enqueue(work, after)?;
        copies.push(fence.clone());
        Ok(fence)
    }
}

impl Drop for SinkGate {
    fn drop(&mut self) {
        self.0.state.lock().gates -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enqueue(stream: &SinkStream, mem: &mut SinkMem, source: &'static [u8]) -> Arc<dyn Fence> {
        // SAFETY: a static slice stays readable and unchanged for ever.
        unsafe { mem.enqueue(stream, source.as_ptr(), source.len(), FencePurpose::Buffer) }.unwrap()
    }

    #[test]
    fn copies_run_later_and_in_order() {
        let stream = SinkStream::new().unwrap();
        let mut mem = SinkMem::new(4);
        let gate = stream.hold();
        let first = enqueue(&stream, &mut mem, b"abcd");
        let second = enqueue(&stream, &mut mem, b"xy");
        assert!(!first.is_done().unwrap() && !second.is_done().unwrap());
        drop(gate);
        assert_eq!(mem.read(), b"xycd");
        assert!(first.is_done().unwrap() && second.is_done().unwrap());
    }

    #[test]
    fn a_gate_holds_its_own_stream_only() {
        let (held, free) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
        let (mut first, mut second) = (SinkMem::new(1), SinkMem::new(1));
        let gate = held.hold();
        let waiting = enqueue(&held, &mut first, b"a");
        enqueue(&free, &mut second, b"b").wait().unwrap();
        assert!(!waiting.is_done().unwrap());
        drop(gate);
        waiting.wait().unwrap();
        assert_eq!((first.read(), second.read()), (&b"a"[..], &b"b"[..]));
    }

    #[test]
    fn copies_of_two_streams_into_one_target_keep_their_order() {
        let (first, second) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
        let mut mem = SinkMem::new(1);
        let gate = first.hold();
        enqueue(&first, &mut mem, b"a");
        let last = enqueue(&second, &mut mem, b"b");
        assert!(!last.is_done().unwrap());
        drop(gate);
        assert_eq!(mem.read(), b"b");
    }

    #[test]
    fn a_lost_device_says_so_to_those_who_ask_and_to_those_who_wait() {
        let stream = SinkStream::new().unwrap();
        let mut mem = SinkMem::new(1);
        enqueue(&stream, &mut mem, b"a").wait().unwrap();
        let gate = stream.hold();
        let copy = enqueue(&stream, &mut mem, b"b");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| copy.wait());
            stream.fail();
            assert!(waiter.join().unwrap().unwrap_err().is_device());
        });
        assert!(copy.is_done().unwrap_err().is_device());
        drop(gate);
        assert_eq!(mem.read(), b"a");
    }

    #[test]
    fn a_stream_dropped_with_work_queued_still_does_it() {
        let stream = SinkStream::new().unwrap();
        let mut mem = SinkMem::new(1);
        enqueue(&stream, &mut mem, b"z");
        drop(stream);
        assert_eq!(mem.read(), b"z");
    }
}
