//! Streams of a simulated device: a copy runs when the scheduler says so, and then reads or writes its bytes.
#![allow(unsafe_code)] // Implements the unsafe traits of copies, and reads memory by address as a device does.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pinpool::copy::{CopySource, CopyStream, CopyTarget, EnqueueError, Enqueued, Fence, StreamId};
use pinpool::{Error, Result};

use crate::site::Site;

/// All streams of the run, including failed ones.
#[derive(Debug, Default)]
pub(crate) struct Device {
    streams: Vec<Stream>,
    /// Fences report completion before their copies are complete.
    pub(crate) is_lying: bool,
    pub(crate) queries: u64,
    /// The buffer that the next mark releases.
    pub(crate) marked: Option<usize>,
}

#[derive(Debug)]
struct Stream {
    id: StreamId,
    pending: VecDeque<Copy>,
    has_failed: bool,
    failing_queries: u64,
    refuses: bool,
    is_unknown: bool,
}

#[derive(Debug)]
struct Copy {
    /// Start of the buffer; `None` for a mark.
    buffer: Option<usize>,
    at: usize,
    len: usize,
    value: u64,
    writes: bool,
    is_over: Arc<AtomicBool>,
}

/// A stream by its number.
#[derive(Debug, Clone)]
pub(crate) struct SimStream {
    pub(crate) site: Arc<Site>,
    pub(crate) index: usize,
}

/// Device memory of any size, for one copy of the buffer at `buffer`.
#[derive(Debug)]
pub(crate) struct SimTarget {
    pub(crate) buffer: usize,
    /// The value that a copy from the buffer must find, or that a copy into it writes.
    pub(crate) value: u64,
    pub(crate) gives_up: ReleasesBuffer,
    /// The user gave the buffer up, so another user may have it by now.
    pub(crate) has_released: Cell<bool>,
}

/// When a copy call gives the buffer up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReleasesBuffer {
    Never,
    IfRefused,
    Always,
}

impl SimTarget {
    pub(crate) fn new(buffer: usize, value: u64, gives_up: ReleasesBuffer) -> Self {
        Self { buffer, value, gives_up, has_released: Cell::new(false) }
    }

    fn enqueue(&self, stream: &SimStream, at: usize, len: usize, writes: bool) -> Enqueued {
        let enqueued = stream.enqueue(at, len, self.value, writes);
        let gives_up = match (self.gives_up, &enqueued) {
            (ReleasesBuffer::Always, _) | (_, Err(EnqueueError::Unknown(_))) => true,
            (ReleasesBuffer::IfRefused, enqueued) => enqueued.is_err(),
            (ReleasesBuffer::Never, _) => false,
        };
        if gives_up {
            self.has_released.set(true);
            stream.site.give_up(self.buffer);
        }
        enqueued
    }
}

#[derive(Debug)]
struct SimFence {
    stream: SimStream,
    id: StreamId,
    buffer: Option<usize>,
    is_over: Arc<AtomicBool>,
}

impl Device {
    pub(crate) fn with_streams(count: usize, is_lying: bool) -> Self {
        let mut device = Self { streams: Vec::new(), is_lying, queries: 0, marked: None };
        (0..count).for_each(|_| device.add());
        device
    }

    fn add(&mut self) {
        self.streams.push(Stream {
            id: StreamId::unique(),
            pending: VecDeque::new(),
            has_failed: false,
            failing_queries: 0,
            refuses: false,
            is_unknown: false,
        });
    }

    /// The index of a working stream, selected by `nth`.
    pub(crate) fn working(&self, nth: u64) -> usize {
        let working: Vec<_> = (0..self.streams.len()).filter(|&index| !self.streams[index].has_failed).collect();
        working[usize::try_from(nth).unwrap() % working.len()]
    }

    pub(crate) fn fail_stream(&mut self, index: usize) {
        self.streams[index].has_failed = true;
        self.add();
    }

    pub(crate) fn fail_query(&mut self, index: usize) {
        self.streams[index].failing_queries += 1;
    }

    pub(crate) fn refuse(&mut self, index: usize) {
        self.streams[index].refuses = true;
    }

    pub(crate) fn make_outcome_unknown(&mut self, index: usize) {
        self.streams[index].is_unknown = true;
    }

    pub(crate) fn heal(&mut self) {
        for stream in &mut self.streams {
            (stream.failing_queries, stream.refuses, stream.is_unknown) = (0, false, false);
        }
    }
}

/// Completes all copies except those on failed streams.
pub(crate) fn finish_all(site: &Arc<Site>) {
    let count = site.device().streams.len();
    for index in 0..count {
        let stream = SimStream { site: site.clone(), index };
        while stream.finish_one() {}
    }
}

impl SimStream {
    /// Completes the oldest copy of the stream. Returns false if there is none.
    pub(crate) fn finish_one(&self) -> bool {
        let copy = {
            let mut device = self.site.device();
            let stream = &mut device.streams[self.index];
            if stream.has_failed {
                return false;
            }
            stream.pending.pop_front()
        };
        let Some(copy) = copy else { return false };
        if copy.writes {
            // SAFETY: the pool lent these bytes to the copy until its fence is complete.
            unsafe { stamp(copy.at, copy.len, copy.value) };
        } else if copy.buffer.is_some()
            && let Some(found) = other_stamp(copy.at, copy.len, copy.value)
        {
            self.site.report(format!("a copy of {} B reads {found:#x} instead of {:#x}", copy.len, copy.value));
        }
        // The pool may reuse the bytes from now on.
        copy.buffer.into_iter().for_each(|buffer| self.site.end_copy(buffer));
        copy.is_over.store(true, Ordering::Release);
        true
    }

    fn enqueue(&self, at: usize, len: usize, value: u64, writes: bool) -> Enqueued {
        let is_unknown = {
            let mut device = self.site.device();
            let stream = &mut device.streams[self.index];
            if std::mem::take(&mut stream.refuses) || stream.has_failed {
                return Err(EnqueueError::Refused(Error::copy_refused(len, "told to refuse")));
            }
            std::mem::take(&mut stream.is_unknown)
        };
        if is_unknown {
            self.site.lose(at);
            return Err(EnqueueError::Unknown(Error::device_failed("told not to know")));
        }
        Ok(self.push(Some((at, len)), value, writes))
    }

    fn push(&self, bytes: Option<(usize, usize)>, value: u64, writes: bool) -> Arc<dyn Fence> {
        let buffer = bytes.and_then(|(at, _)| self.site.begin_copy(at));
        let (at, len) = bytes.unwrap_or_default();
        let is_over = Arc::new(AtomicBool::new(false));
        let mut device = self.site.device();
        let stream = &mut device.streams[self.index];
        stream.pending.push_back(Copy { buffer, at, len, value, writes, is_over: is_over.clone() });
        Arc::new(SimFence { stream: self.clone(), id: stream.id, buffer, is_over })
    }
}

// SAFETY: a copy is complete once `finish_one` has made it. Waiting for a fence makes all earlier copies of the stream first.
unsafe impl Fence for SimFence {
    fn is_complete(&self) -> Result<bool> {
        let mut device = self.stream.site.device();
        device.queries += 1;
        if self.is_over.load(Ordering::Acquire) || device.is_lying {
            return Ok(true);
        }
        let stream = &mut device.streams[self.stream.index];
        if stream.has_failed {
            return Err(Error::device_failed("the stream was told to fail"));
        }
        if stream.failing_queries > 0 {
            stream.failing_queries -= 1;
            drop(device);
            self.buffer.into_iter().for_each(|buffer| self.stream.site.excuse(buffer));
            return Err(Error::device_failed("the query was told to fail"));
        }
        Ok(false)
    }

    fn wait(&self) -> Result<()> {
        while !self.is_over.load(Ordering::Acquire) {
            if !self.stream.finish_one() {
                return Err(Error::device_failed("the stream was told to fail"));
            }
        }
        Ok(())
    }

    fn stream_id(&self) -> Option<StreamId> {
        Some(self.id)
    }
}

// SAFETY: nothing is enqueued if an error is returned, unless it says that this is unknown; the fence belongs to the copy.
unsafe impl CopyTarget<SimStream> for SimTarget {
    fn capacity_bytes(&self) -> usize {
        usize::MAX
    }

    unsafe fn enqueue_write(&mut self, stream: &SimStream, source: *const u8, len: usize) -> Enqueued {
        SimTarget::enqueue(self, stream, source.expose_provenance(), len, false)
    }
}

// SAFETY: as above.
unsafe impl CopySource<SimStream> for SimTarget {
    fn available_bytes(&self) -> usize {
        usize::MAX
    }

    unsafe fn enqueue_read(&self, stream: &SimStream, target: *mut u8, len: usize) -> Enqueued {
        SimTarget::enqueue(self, stream, target.expose_provenance(), len, true)
    }
}

// SAFETY: the mark is complete only after everything that was enqueued before it.
unsafe impl CopyStream for SimStream {
    fn record_fence(&self) -> Result<Arc<dyn Fence>> {
        let buffer = {
            let mut device = self.site.device();
            if device.streams[self.index].has_failed || std::mem::take(&mut device.streams[self.index].is_unknown) {
                return Err(Error::device_failed("the stream was told to fail"));
            }
            device.marked.take()
        };
        let fence = self.push(buffer.map(|buffer| (buffer, 0)), 0, false);
        buffer.into_iter().for_each(|buffer| self.site.give_up(buffer));
        Ok(fence)
    }
}

/// The offsets of a buffer's marks: both ends and the middle. An overlapping neighbor overwrites one of the ends.
fn places(len: usize) -> [usize; 3] {
    [0, (len - 8) / 2, len - 8]
}

/// Writes `value` to the `len` bytes at `at`: as eight bytes in three places, or as one byte in each of a short buffer.
///
/// # Safety
///
/// The bytes are mapped, and nothing else uses them.
pub(crate) unsafe fn stamp(at: usize, len: usize, value: u64) {
    let start: *mut u8 = std::ptr::with_exposed_provenance_mut(at);
    if len < 24 {
        // SAFETY: the caller's promise.
        return unsafe { start.write_bytes(value.to_le_bytes()[0], len) };
    }
    for place in places(len) {
        // SAFETY: the caller's promise: the eight bytes are inside.
        let to = unsafe { start.add(place) };
        // SAFETY: as above.
        unsafe { to.cast::<u64>().write_unaligned(value) };
    }
}

/// Returns a value other than `value` that the `len` bytes at `at` contain, if any.
pub(crate) fn other_stamp(at: usize, len: usize, value: u64) -> Option<u64> {
    let start: *const u8 = std::ptr::with_exposed_provenance(at);
    if len < 24 {
        // SAFETY: the bytes are mapped: the slab's bytes for the whole process, other bytes while a buffer is held or copied.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        let found = bytes.iter().copied();
        return found.map(u64::from).find(|&byte| byte != u64::from(value.to_le_bytes()[0]));
    }
    let read = |place: usize| {
        // SAFETY: as above.
        let from = unsafe { start.add(place) };
        // SAFETY: as above.
        unsafe { from.cast::<u64>().read_unaligned() }
    };
    places(len).into_iter().map(read).find(|&found| found != value)
}
