//! Wraps a source, which may be the user's: records slow calls if the pool records, and turns panics into failures.
#![allow(unsafe_code)] // Passes unsafe calls on.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::{AddressRange, Region, RemapError, Source, SourceError, Subrange, VirtualMemory};
use pinpool_observe::record::{Event, Recorder};
use pinpool_os::unwind::caught;

/// A source and the recorder of its calls. Properties are forwarded to the source.
#[derive(Debug, Clone)]
pub(crate) struct CalledSource {
    source: Arc<dyn Source>,
    recorder: Option<Arc<Recorder>>,
}

impl Deref for CalledSource {
    type Target = dyn Source;

    fn deref(&self) -> &Self::Target {
        &*self.source
    }
}

fn panicked(call: &'static str) -> SourceError {
    SourceError::new(call, "the backend panicked")
}

/// Makes a call of a source.
fn call<R>(name: &'static str, call: impl FnOnce() -> Result<R, SourceError>) -> Result<R, SourceError> {
    caught(call).unwrap_or_else(|| Err(panicked(name)))
}

fn ns_since(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The address of an offset, for a record.
fn address(range: &AddressRange, offset: usize) -> u64 {
    range.start().addr().get().saturating_add(offset) as u64
}

/// The address of a region, for a record; 0 without one.
fn start(region: Option<&Region>) -> u64 {
    region.map_or(0, |region| region.start().addr().get() as u64)
}

fn unpin(address: u64, bytes: u64, took_ns: u64, released: &Result<(), SourceError>) -> Event {
    Event::Unpin { address, bytes, took_ns, failed: released.is_err() }
}

impl CalledSource {
    pub(crate) fn new(source: Arc<dyn Source>, recorder: Option<Arc<Recorder>>) -> Self {
        Self { source, recorder }
    }

    /// Makes a `call` and records what `event` returns for its result and its time in nanoseconds.
    fn record<R>(
        &self,
        name: &'static str,
        make: impl FnOnce() -> Result<R, SourceError>,
        event: impl FnOnce(&Result<R, SourceError>, u64) -> Event,
    ) -> Result<R, SourceError> {
        let begun = Instant::now();
        let result = call(name, make);
        if let Some(recorder) = &self.recorder {
            recorder.record(event(&result, ns_since(begun)));
        }
        result
    }

    fn pin<R>(
        &self,
        name: &'static str,
        bytes: usize,
        address: impl FnOnce(Option<&R>) -> u64,
        make: impl FnOnce() -> Result<R, SourceError>,
    ) -> Result<R, SourceError> {
        self.record(name, make, |pinned, took_ns| {
            let address = address(pinned.as_ref().ok());
            Event::Pin { address, bytes: bytes as u64, took_ns, failed: pinned.is_err() }
        })
    }

    fn unpin(
        &self,
        name: &'static str,
        (address, bytes): (u64, usize),
        make: impl FnOnce() -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        self.record(name, make, |released, took_ns| unpin(address, bytes as u64, took_ns, released))
    }

    /// The virtual memory of a source that has some.
    fn memory(&self) -> Result<&dyn VirtualMemory, SourceError> {
        self.virtual_memory().ok_or_else(|| SourceError::new("commit", "the backend has no virtual memory"))
    }

    /// Waits for acquisitions of other threads until `until`, if there is such a time.
    pub(in crate::engine) fn acquire(&self, bytes: usize, until: Option<Instant>) -> Result<Region, SourceError> {
        self.pin("acquire", bytes, start, || match until {
            Some(until) => self.source.acquire_until(bytes, until),
            None => self.source.acquire(bytes),
        })
    }

    pub(in crate::engine) fn acquire_fast(
        &self,
        bytes: usize,
        threads: usize,
        progress: &dyn Fn(usize),
    ) -> Result<Region, SourceError> {
        self.pin("acquire", bytes, start, || self.source.acquire_fast(bytes, threads, progress))
    }

    /// # Safety
    ///
    /// The same as for [`Source::release`].
    pub(in crate::engine) unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        self.unpin("release", (start(Some(&region)), region.len_bytes()), || {
            // SAFETY: the caller's promise.
            unsafe { self.source.release(region) }
        })
    }

    /// # Safety
    ///
    /// The same as for [`VirtualMemory::commit`].
    pub(in crate::engine) unsafe fn commit(
        &self,
        range: &AddressRange,
        offset: usize,
        bytes: usize,
    ) -> Result<(), SourceError> {
        let memory = self.memory()?;
        self.pin(
            "commit",
            bytes,
            |_| address(range, offset),
            || {
                // SAFETY: the caller's promise.
                unsafe { memory.commit(range, offset, bytes) }
            },
        )
    }

    /// # Safety
    ///
    /// The same as for [`VirtualMemory::decommit`].
    pub(in crate::engine) unsafe fn decommit(
        &self,
        range: &AddressRange,
        offset: usize,
        bytes: usize,
    ) -> Result<(), SourceError> {
        let memory = self.memory()?;
        self.unpin("decommit", (address(range, offset), bytes), || {
            // SAFETY: the caller's promise.
            unsafe { memory.decommit(range, offset, bytes) }
        })
    }

    /// # Safety
    ///
    /// The same as for [`VirtualMemory::remap`].
    pub(in crate::engine) unsafe fn remap(
        &self,
        range: &AddressRange,
        from: &[Subrange],
        to: usize,
    ) -> Result<(), RemapError> {
        let (memory, begun) = (self.memory().map_err(RemapError::Kept)?, Instant::now());
        let moved = caught(|| {
            // SAFETY: the caller's promise.
            unsafe { memory.remap(range, from, to) }
        });
        // Granules may have lost their memory on the way to a panic. As lost ones they are used no more.
        let moved = moved.unwrap_or_else(|| Err(RemapError::Lost(panicked("remap"))));
        let (mut took_ns, mut to) = (ns_since(begun), to);
        for piece in from {
            let (bytes, old) = (piece.bytes as u64, address(range, piece.offset));
            let event = match &moved {
                Ok(()) => Some(Event::Move { from: old, to: address(range, to), bytes, took_ns }),
                Err(RemapError::Lost(_)) => Some(unpin(old, bytes, took_ns, &Ok(()))),
                Err(RemapError::Kept(_)) => None,
            };
            if let (Some(recorder), Some(event)) = (&self.recorder, event) {
                recorder.record(event);
            }
            took_ns = 0;
            to = to.saturating_add(piece.bytes);
        }
        moved
    }

    pub(in crate::engine) fn unmap_old_places(&self) -> Result<(), SourceError> {
        let memory = self.memory()?;
        call("unmap", || memory.unmap_old_places())
    }

    /// # Safety
    ///
    /// The same as for [`VirtualMemory::unreserve`].
    pub(in crate::engine) unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        let memory = self.memory()?;
        call("unreserve", || {
            // SAFETY: the caller's promise.
            unsafe { memory.unreserve(range) }
        })
    }
}
