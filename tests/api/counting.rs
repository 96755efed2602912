//! A source of simulated memory that counts the bytes it really holds, at every instant.
#![allow(unsafe_code)] // Wraps the unsafe `Source` and `VirtualMemory`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use pinpool::PinnedBy;
use pinpool::source::{Region, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, VirtualMemory};
use pinpool_replay::SimSource;

/// Counts bytes from before they are acquired until after they are released, so never fewer than are held.
#[derive(Debug)]
pub(crate) struct CountingSource {
    inner: SimSource,
    held_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    ranges: AtomicI64,
    threads: AtomicUsize,
    looks: AtomicU64,
}

impl CountingSource {
    pub(crate) fn virtual_memory() -> Arc<Self> {
        Self::over(SimSource::new(1 << 40))
    }

    pub(crate) fn discrete() -> Arc<Self> {
        Self::over(SimSource::discrete(1 << 40))
    }

    fn over(inner: SimSource) -> Arc<Self> {
        let (held_bytes, peak_bytes, ranges, threads, looks) = Default::default();
        Arc::new(Self { inner, held_bytes, peak_bytes, ranges, threads, looks })
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::SeqCst)
    }

    /// Most bytes held at any instant.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::SeqCst)
    }

    /// Threads that the last `acquire_fast` could use.
    pub(crate) fn threads(&self) -> usize {
        self.threads.load(Ordering::SeqCst)
    }

    /// How often it was asked whether it is gone: once in each look of the maintenance thread.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::SeqCst)
    }

    /// Address ranges that are still reserved.
    pub(crate) fn ranges(&self) -> i64 {
        self.ranges.load(Ordering::SeqCst)
    }

    fn counted<T>(&self, bytes: u64, acquire: impl FnOnce() -> Result<T, SourceError>) -> Result<T, SourceError> {
        let held_bytes = self.held_bytes.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.peak_bytes.fetch_max(held_bytes, Ordering::SeqCst);
        acquire().inspect_err(|_| self.released(bytes))
    }

    fn released(&self, bytes: u64) {
        let before = self.held_bytes.fetch_sub(bytes, Ordering::SeqCst);
        assert!(before >= bytes, "{bytes} B released, {before} B held");
    }
}

// SAFETY: passes every call on to the wrapped source.
unsafe impl Source for CountingSource {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        Some(PinnedBy::Driver)
    }

    fn device_lost(&self) -> Option<SourceError> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        None
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.counted(Source::held_bytes(self, len_bytes) as u64, || self.inner.acquire(len_bytes))
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.threads.store(threads, Ordering::SeqCst);
        self.acquire(len_bytes).inspect(|_| progress(len_bytes))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let held_bytes = Source::held_bytes(self, region.len_bytes()) as u64;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.release(region) }.inspect(|()| self.released(held_bytes))
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as &dyn VirtualMemory)
    }
}

// SAFETY: as above.
unsafe impl VirtualMemory for CountingSource {
    fn granule_bytes(&self) -> usize {
        VirtualMemory::granule_bytes(&self.inner)
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.inner.reserve(len_bytes).inspect(|_| {
            self.ranges.fetch_add(1, Ordering::SeqCst);
        })
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: as above.
        self.counted(bytes as u64, || unsafe { self.inner.commit(range, offset, bytes) })
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: as above.
        unsafe { self.inner.decommit(range, offset, bytes) }.inspect(|()| self.released(bytes as u64))
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: as above.
        unsafe { self.inner.unreserve(range) }.inspect(|()| {
            self.ranges.fetch_sub(1, Ordering::SeqCst);
        })
    }
}
