//! A source whose calls are recorded, each with its time.
//!
//! Passes every call on and owns nothing but the recorder.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory` by passing calls on.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::{AddressRange, PageTiers, Region, RemapError, Source, SourceError, Subrange, VirtualMemory};
use pinpool_observe::record::{Event, Recorder};

/// A source, and who records its calls.
#[derive(Debug)]
pub(crate) struct RecordedSource {
    inner: Arc<dyn Source>,
    recorder: Arc<Recorder>,
}

impl RecordedSource {
    pub(crate) fn new(inner: Arc<dyn Source>, recorder: Arc<Recorder>) -> Self {
        Self { inner, recorder }
    }

    /// Makes a call that acquires.
    fn pin(&self, bytes: usize, call: impl FnOnce() -> Result<Region, SourceError>) -> Result<Region, SourceError> {
        let begun = Instant::now();
        let acquired = call();
        let address = acquired.as_ref().map_or(0, |region| region.start().addr().get() as u64);
        let (bytes, took_ns, failed) = (bytes as u64, ns_since(begun), acquired.is_err());
        self.recorder.record(Event::Pin { address, bytes, took_ns, failed });
        acquired
    }

    /// The memory of a source that has some: this one is made for no other.
    fn memory(&self) -> Result<&dyn VirtualMemory, SourceError> {
        self.inner.virtual_memory().ok_or_else(|| SourceError::new("recording", "the source has no virtual memory"))
    }
}

fn ns_since(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The address of an offset, for a record.
fn address(range: &AddressRange, offset: usize) -> u64 {
    range.start().addr().get().saturating_add(offset) as u64
}

// SAFETY: every call is passed on.
unsafe impl Source for RecordedSource {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn is_pinned(&self) -> bool {
        self.inner.is_pinned()
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        self.inner.held_bytes(len_bytes)
    }

    fn held_bytes_fast(&self, len_bytes: usize) -> usize {
        self.inner.held_bytes_fast(len_bytes)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.pin(len_bytes, || self.inner.acquire(len_bytes))
    }

    fn acquire_until(&self, len_bytes: usize, until: Instant) -> Result<Region, SourceError> {
        self.pin(len_bytes, || self.inner.acquire_until(len_bytes, until))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let (address, bytes) = (region.start().addr().get() as u64, region.len_bytes() as u64);
        let begun = Instant::now();
        // SAFETY: the caller's promise.
        let released = unsafe { self.inner.release(region) };
        let (took_ns, failed) = (ns_since(begun), released.is_err());
        self.recorder.record(Event::Unpin { address, bytes, took_ns, failed });
        released
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.pin(len_bytes, || self.inner.acquire_fast(len_bytes, threads, progress))
    }

    fn needs_gpu(&self) -> bool {
        self.inner.needs_gpu()
    }

    fn release_waits(&self) -> bool {
        self.inner.release_waits()
    }

    fn release_would_wait(&self) -> bool {
        self.inner.release_would_wait()
    }

    fn release_fast_would_wait(&self) -> bool {
        self.inner.release_fast_would_wait()
    }

    fn is_acquiring(&self) -> bool {
        self.inner.is_acquiring()
    }

    fn numa_node(&self) -> Option<u32> {
        self.inner.numa_node()
    }

    fn page_tiers(&self, start: NonNull<u8>, len_bytes: usize) -> PageTiers {
        self.inner.page_tiers(start, len_bytes)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as &dyn VirtualMemory)
    }
}

// SAFETY: every call is passed on, and this is virtual memory only if `inner` is.
unsafe impl VirtualMemory for RecordedSource {
    fn granule_bytes(&self) -> usize {
        self.inner.virtual_memory().map_or(super::PAGE_BYTES, VirtualMemory::granule_bytes)
    }

    fn descriptors(&self) -> u64 {
        self.inner.virtual_memory().map_or(0, VirtualMemory::descriptors)
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.memory()?.reserve(len_bytes)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let memory = self.memory()?;
        let begun = Instant::now();
        // SAFETY: the caller's promise.
        let committed = unsafe { memory.commit(range, offset, bytes) };
        let (took_ns, failed) = (ns_since(begun), committed.is_err());
        self.recorder.record(Event::Pin { address: address(range, offset), bytes: bytes as u64, took_ns, failed });
        committed
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let memory = self.memory()?;
        let begun = Instant::now();
        // SAFETY: the caller's promise.
        let released = unsafe { memory.decommit(range, offset, bytes) };
        let (took_ns, failed) = (ns_since(begun), released.is_err());
        self.recorder.record(Event::Unpin { address: address(range, offset), bytes: bytes as u64, took_ns, failed });
        released
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let memory = self.memory().map_err(RemapError::Kept)?;
        let begun = Instant::now();
        // SAFETY: the caller's promise.
        let moved = unsafe { memory.remap(range, from, to) };
        let mut took_ns = ns_since(begun);
        let mut to = to;
        for piece in from {
            let bytes = piece.bytes as u64;
            let old = address(range, piece.offset);
            match &moved {
                Ok(()) => self.recorder.record(Event::Move { from: old, to: address(range, to), bytes, took_ns }),
                Err(RemapError::Lost(_)) => {
                    self.recorder.record(Event::Unpin { address: old, bytes, took_ns, failed: false });
                }
                Err(RemapError::Kept(_)) => {}
            }
            took_ns = 0;
            to = to.saturating_add(piece.bytes);
        }
        moved
    }

    fn has_old_places(&self) -> bool {
        self.inner.virtual_memory().is_some_and(VirtualMemory::has_old_places)
    }

    fn unmap_old_places(&self) -> Result<(), SourceError> {
        self.memory()?.unmap_old_places()
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        let memory = self.memory()?;
        // SAFETY: the caller's promise.
        unsafe { memory.unreserve(range) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// The names of the methods in a source text, from `begin` on.
    fn methods(text: &str, begin: &str) -> BTreeSet<String> {
        let (_, body) = text.split_once(begin).expect("it is in the file");
        let body = body.split_once("\n}\n").expect("it ends").0;
        let lines = body.lines().filter_map(|line| line.trim_start().trim_start_matches("unsafe ").strip_prefix("fn "));
        lines.filter_map(|line| line.split('(').next().map(ToOwned::to_owned)).collect()
    }

    /// A method with a default that is not passed on would be another one's behaviour.
    #[test]
    fn every_method_is_passed_on() {
        let own = include_str!("recorded.rs");
        let source = methods(include_str!("source.rs"), "pub unsafe trait Source");
        assert_eq!(methods(own, "unsafe impl Source for"), source);
        let memory = methods(include_str!("virtual_memory.rs"), "pub unsafe trait VirtualMemory");
        assert_eq!(methods(own, "unsafe impl VirtualMemory for"), memory);
        assert!(source.len() > 10 && memory.len() > 5);
    }
}
