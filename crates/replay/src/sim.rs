//! Simulated memory: what the backend `heap` provides, up to a total, with its calls counted and priced.
//!
//! A pool never touches the memory of a source, and untouched memory is not resident, so a replay of terabytes costs nothing.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use super::priced::{CallSums, Calls, EVERYWHERE};
use pinpool::PinnedBy;
use pinpool::source::{Region, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, HeapSource, RemapError, Subrange, VirtualMemory};
use pinpool_os::sync::plain::Mutex;
use serde::Serialize;

/// Kinds of simulated memory, with their names in flags and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize)]
pub enum SourceKind {
    /// One virtual range: a buffer may span granules that were pinned by different calls.
    #[default]
    #[value(name = "span")]
    #[serde(rename = "span")]
    Virtual,
    /// Separate regions: a buffer lies within one.
    #[value(name = "walls")]
    #[serde(rename = "walls")]
    Discrete,
}

/// Provides memory up to a fixed total.
#[derive(Debug)]
pub struct SimSource {
    heap: HeapSource,
    kind: SourceKind,
    total_bytes: u64,
    /// The sums over its calls.
    pub(super) sums: Mutex<CallSums>,
    is_exact: bool,
}

impl SimSource {
    /// 16 TiB: more than any host has and a fraction of the address space.
    pub const DEFAULT_TOTAL_BYTES: u64 = 16 << 40;

    /// A source with virtual memory that holds at most `total_bytes` at one time.
    pub fn new(total_bytes: u64) -> Self {
        Self::of(SourceKind::Virtual, total_bytes)
    }

    /// A source of separate regions that holds at most `total_bytes` at one time.
    pub fn discrete(total_bytes: u64) -> Self {
        Self::of(SourceKind::Discrete, total_bytes)
    }

    pub(super) fn of(kind: SourceKind, total_bytes: u64) -> Self {
        Self { heap: HeapSource::new(), kind, total_bytes, sums: Mutex::default(), is_exact: false }
    }

    /// Counts the bytes of a request as they are, without rounding them to pages.
    #[must_use]
    pub fn exact(self) -> Self {
        Self { is_exact: true, ..self }
    }

    /// The calls since the previous call of this function.
    pub fn take_calls(&self) -> Calls {
        std::mem::take(&mut self.sums.lock().calls)
    }

    /// Makes the heap's `call` for `bytes` more, unless the total forbids it.
    fn pin<T>(&self, bytes: usize, call: impl FnOnce() -> Result<T, SourceError>) -> Result<T, SourceError> {
        self.sums.lock().pin(bytes, self.total_bytes)?;
        call().inspect_err(|_| self.unpin(bytes))
    }

    fn unpin(&self, bytes: usize) {
        self.sums.lock().pinned_bytes -= bytes as u64;
    }
}

// SAFETY: source-C1 to C4 hold for `heap`, which provides all memory.
unsafe impl Source for SimSource {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        None
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        if self.is_exact { len_bytes } else { self.heap.held_bytes(len_bytes) }
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.pin(len_bytes, || self.heap.acquire(len_bytes))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let released = (region.id(), region.len_bytes());
        // SAFETY: the caller's promise: the region came from this source, hence from `heap`, and is unused.
        unsafe { self.heap.release(region) }?;
        self.unpin(released.1);
        self.sums.lock().calls.released.push(released);
        Ok(())
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        (self.kind == SourceKind::Virtual && self.heap.virtual_memory().is_some()).then_some(self)
    }
}

// SAFETY: vm-S1 to S5 hold for `heap`, which makes every change.
unsafe impl VirtualMemory for SimSource {
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.heap.reserve(len_bytes)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        self.pin(bytes, || unsafe { self.heap.commit(range, offset, bytes) })?;
        self.sums.lock().unmap_within(&(offset..offset + bytes));
        Ok(())
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.heap.decommit(range, offset, bytes) }?;
        self.sums.lock().unmap_within(&EVERYWHERE);
        self.unpin(bytes);
        Ok(())
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        self.sums.lock().remap(from, to);
        // SAFETY: the caller's promise.
        unsafe { self.heap.remap(range, from, to) }
    }

    fn has_old_places(&self) -> bool {
        !self.sums.lock().old_places.is_empty()
    }

    fn unmap_old_places(&self) -> Result<(), SourceError> {
        self.sums.lock().unmap_within(&EVERYWHERE);
        Ok(())
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { self.heap.unreserve(range) }
    }
}
