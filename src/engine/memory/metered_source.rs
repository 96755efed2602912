//! Wraps a source, which may be the user's: counts its slow calls, records them if the pool records, and turns panics into
//! failures.
#![allow(unsafe_code)] // Forwards unsafe calls.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::{AddressRange, BuiltInSource, Region, RemapError, Source, SourceError, Subrange, VirtualMemory};
use crate::engine::meter::nanos;
use crate::stats::{CallStats, SourceCalls};
use pinpool_observe::record::{Event, Recorder};
use pinpool_os::unwind::catch_panic;

/// A source and the recorder of its calls. Properties are forwarded to the source.
#[derive(Debug, Clone)]
pub(crate) struct MeteredSource {
    source: Arc<dyn Source>,
    recorder: Option<Arc<dyn Recorder>>,
}

impl Deref for MeteredSource {
    type Target = dyn Source;

    fn deref(&self) -> &Self::Target {
        &*self.source
    }
}

fn panicked(call: &'static str) -> SourceError {
    SourceError::new(call, "the backend panicked")
}

/// Runs `call`, the source call `name`, and turns a panic into an error.
fn call<R>(name: &'static str, call: impl FnOnce() -> Result<R, SourceError>) -> Result<R, SourceError> {
    catch_panic(call).unwrap_or_else(|| Err(panicked(name)))
}

/// Returns the address of `offset` in `range`, for a record.
fn address(range: &AddressRange, offset: usize) -> u64 {
    range.start().addr().get().saturating_add(offset) as u64
}

/// Returns the address of a region, for a record; 0 without a region.
fn start(region: Option<&Region>) -> u64 {
    region.map_or(0, |region| region.start().addr().get() as u64)
}

fn pinned(address: u64, bytes: u64, took_ns: u64, failed: bool) -> Event {
    Event::Pin { address, bytes, took_ns, failed }
}

fn unpinned(address: u64, bytes: u64, took_ns: u64, failed: bool) -> Event {
    Event::Unpin { address, bytes, took_ns, failed }
}

impl MeteredSource {
    pub(crate) fn new(source: Arc<dyn Source>, recorder: Option<Arc<dyn Recorder>>) -> Self {
        Self { source, recorder }
    }

    /// Makes a call for `bytes`, counts it, and records it as `event` with the address that `address` finds in its result.
    fn record<R>(
        &self,
        (name, bytes): (&'static str, usize),
        counts: &mut CallStats,
        event: fn(u64, u64, u64, bool) -> Event,
        address: impl FnOnce(Option<&R>) -> u64,
        make: impl FnOnce() -> Result<R, SourceError>,
    ) -> Result<R, SourceError> {
        let begun = Instant::now();
        let result = call(name, make);
        let (bytes, took) = (bytes as u64, begun.elapsed());
        counts.record(bytes, took, result.is_ok());
        if let Some(recorder) = &self.recorder {
            recorder.record(event(address(result.as_ref().ok()), bytes, nanos(took), result.is_err()));
        }
        result
    }

    /// Returns the virtual memory of the source, or an error if it has none.
    fn memory(&self) -> Result<&dyn VirtualMemory, SourceError> {
        self.virtual_memory().ok_or_else(|| SourceError::new("commit", "the backend has no virtual memory"))
    }

    /// Acquires `bytes` by the source call `acquire`.
    pub(in crate::engine) fn acquire(
        &self,
        bytes: usize,
        counts: &mut CallStats,
        acquire: impl FnOnce(&dyn Source) -> Result<Region, SourceError>,
    ) -> Result<Region, SourceError> {
        self.record(("acquire", bytes), counts, pinned, start, || acquire(&*self.source))
    }

    /// # Safety
    ///
    /// The same as for [`Source::release`].
    pub(in crate::engine) unsafe fn release(&self, region: &Region, counts: &mut CallStats) -> Result<(), SourceError> {
        let (address, bytes) = (start(Some(region)), region.len_bytes());
        // SAFETY: the caller's promise.
        let release = || unsafe { self.source.release(region) };
        self.record(("release", bytes), counts, unpinned, |_| address, release)
    }

    /// # Safety
    ///
    /// The same as for [`VirtualMemory::commit`].
    pub(in crate::engine) unsafe fn commit(
        &self,
        range: &AddressRange,
        Subrange { offset, bytes }: Subrange,
        counts: &mut CallStats,
    ) -> Result<(), SourceError> {
        let memory = self.memory()?;
        // SAFETY: the caller's promise.
        let commit = || unsafe { memory.commit(range, offset, bytes) };
        self.record(("commit", bytes), counts, pinned, |_| address(range, offset), commit)
    }

    /// # Safety
    ///
    /// The same as for [`VirtualMemory::decommit`].
    pub(in crate::engine) unsafe fn decommit(
        &self,
        range: &AddressRange,
        Subrange { offset, bytes }: Subrange,
        counts: &mut CallStats,
    ) -> Result<(), SourceError> {
        let memory = self.memory()?;
        // SAFETY: the caller's promise.
        let decommit = || unsafe { memory.decommit(range, offset, bytes) };
        self.record(("decommit", bytes), counts, unpinned, |_| address(range, offset), decommit)
    }

    /// Remaps the granules `from` to consecutive granules at `to`. Counts granules that lost their memory as unpinned.
    ///
    /// # Safety
    ///
    /// The same as for [`VirtualMemory::remap`].
    pub(in crate::engine) unsafe fn remap(
        &self,
        range: &AddressRange,
        from: &[Subrange],
        to: usize,
        calls: &mut SourceCalls,
    ) -> Result<(), RemapError> {
        let (memory, begun) = (self.memory().map_err(RemapError::Kept)?, Instant::now());
        // SAFETY: the caller's promise.
        let moved = catch_panic(|| unsafe { memory.remap(range, from, to) });
        // Granules may have lost their memory before the panic. Reported as lost, they are not used until they are committed
        // again.
        let moved = moved.unwrap_or_else(|| Err(RemapError::Lost(panicked("remap"))));
        let took = begun.elapsed();
        calls.remap.record(from.iter().map(|piece| piece.bytes as u64).sum(), took, moved.is_ok());
        let (mut took_ns, mut to) = (nanos(took), to);
        for piece in from {
            let (bytes, old) = (piece.bytes as u64, address(range, piece.offset));
            let event = match &moved {
                Ok(()) => Some(Event::Move { from: old, to: address(range, to), bytes, took_ns }),
                Err(RemapError::Lost(_)) => {
                    // The bytes returned to the system without an unpin call.
                    (calls.unpin.count, calls.unpin.bytes) = (calls.unpin.count + 1, calls.unpin.bytes + bytes);
                    Some(unpinned(old, bytes, took_ns, false))
                }
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
    /// The same as for [`VirtualMemory::release_addresses`].
    pub(in crate::engine) unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError> {
        let memory = self.memory()?;
        // SAFETY: the caller's promise.
        call("release_addresses", || unsafe { memory.release_addresses(range) })
    }
}
