//! Simulated memory: address space up to a stated total, without memory until it is touched, for replays and tests.
//!
//! A pool never touches the memory of a source, so a replay of terabytes costs nothing. A user who touches it gets zeroed
//! pages, one by one. Addresses recur after a release, ids do not.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::priced::{CallSums, EVERYWHERE};
use pinpool::SourceError;
use pinpool::source::{PAGE_BYTES, Region, Source};
use pinpool::unstable::backend::{AddressRange, RANGE_ALIGN_BYTES, RemapError, Subrange, VirtualMemory};

/// Kinds of simulated memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum SourceKind {
    /// One virtual range: a buffer may span granules that were pinned by different calls.
    #[default]
    #[value(name = "span")]
    Virtual,
    /// Separate regions: a buffer lies within one.
    #[value(name = "walls")]
    Discrete,
}

impl SourceKind {
    /// Name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtual => "span",
            Self::Discrete => "walls",
        }
    }
}

/// Provides addresses up to a fixed total.
#[derive(Debug)]
pub struct SimSource {
    next_id: AtomicU64,
    total_bytes: u64,
    /// Regions and committed granules together.
    held_bytes: AtomicU64,
    has_virtual_memory: bool,
    /// What a replay counts.
    sums: Option<Arc<CallSums>>,
}

impl SimSource {
    /// 16 TiB: more than any host has and a fraction of the address space.
    pub const DEFAULT_TOTAL_BYTES: u64 = 16 << 40;

    /// A source with virtual memory that holds at most `total_bytes` at one time.
    pub fn new(total_bytes: u64) -> Self {
        Self {
            next_id: AtomicU64::new(0),
            total_bytes,
            held_bytes: AtomicU64::new(0),
            has_virtual_memory: cfg!(all(target_os = "linux", not(miri))),
            sums: None,
        }
    }

    /// Makes the source as [`SimSource::new`] does, with discrete regions only.
    pub fn discrete(total_bytes: u64) -> Self {
        Self { has_virtual_memory: false, ..Self::new(total_bytes) }
    }

    /// A source of this kind that counts what its calls would cost.
    pub(super) fn priced(kind: SourceKind) -> (Self, Arc<CallSums>) {
        let sim = match kind {
            SourceKind::Virtual => Self::new(Self::DEFAULT_TOTAL_BYTES),
            SourceKind::Discrete => Self::discrete(Self::DEFAULT_TOTAL_BYTES),
        };
        let sums = Arc::<CallSums>::default();
        (Self { sums: Some(sums.clone()), ..sim }, sums)
    }

    fn claim(&self, bytes: u64) -> Result<(), SourceError> {
        let claimed = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= self.total_bytes);
        // Relaxed: the count guards no other memory.
        self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claimed).map(drop).map_err(|held| {
            SourceError::new("sim", format!("{bytes} B refused, {held} B of {} B are held", self.total_bytes))
        })
    }

    fn unclaim(&self, bytes: u64) {
        // Relaxed, as in `claim`.
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

// SAFETY: source-C1 to C3 hold for every private anonymous mapping; `MAP_NORESERVE` changes when a page gets memory, not its
// content. source-C4: `next_id`.
unsafe impl Source for SimSource {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn is_pinned(&self) -> bool {
        false
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes) as u64;
        self.claim(held_bytes)?;
        let start = map(pages(len_bytes)).inspect_err(|_| self.unclaim(held_bytes))?;
        self.sums.iter().for_each(|sums| sums.pin(len_bytes));
        // Relaxed: the addition alone makes every number unique.
        Ok(Region::new(start, len_bytes, self.next_id.fetch_add(1, Ordering::Relaxed)))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let held_bytes = self.held_bytes(region.len_bytes()) as u64;
        // SAFETY: the caller's promise: the region came from this source, hence from `map`, and is unused.
        unsafe { unmap(region.start(), pages(region.len_bytes())) }?;
        self.unclaim(held_bytes);
        self.sums.iter().for_each(|sums| sums.unpin(region.len_bytes()));
        Ok(())
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.has_virtual_memory.then_some(self)
    }
}

// SAFETY: vm-S1, S2 and S4: the range is one readable and writable mapping. vm-S3: it is zero until written to,
// and a decommit empties it. vm-S5 concerns bytes that are only counted.
unsafe impl VirtualMemory for SimSource {
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        let len_bytes = len_bytes.next_multiple_of(PAGE_BYTES);
        let spare_bytes = RANGE_ALIGN_BYTES - PAGE_BYTES;
        let widened = map(len_bytes.saturating_add(spare_bytes))?;
        let head_bytes = widened.addr().get().wrapping_neg() % RANGE_ALIGN_BYTES;
        // SAFETY: `head_bytes` is at most `spare_bytes`, so the range fits after it.
        let start = unsafe { widened.add(head_bytes) };
        // SAFETY: at most the end of the mapping, as above.
        let end = unsafe { start.add(len_bytes) };
        for (spare, bytes) in [(widened, head_bytes), (end, spare_bytes - head_bytes)] {
            // SAFETY: mapped above, outside the returned range.
            unsafe { unmap(spare, bytes) }?;
        }
        Ok(AddressRange::new(start, len_bytes))
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        range.at(offset, bytes).and_then(|_| self.claim(bytes as u64))?;
        self.sums.iter().for_each(|sums| {
            sums.unmap_within(&(offset..offset + bytes));
            sums.pin(bytes);
        });
        Ok(())
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise.
        unsafe { empty(range, offset, bytes) }?;
        self.unclaim(bytes as u64);
        self.sums.iter().for_each(|sums| {
            sums.unmap_within(&EVERYWHERE);
            sums.unpin(bytes);
        });
        Ok(())
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        self.sums.iter().for_each(|sums| sums.remap(from, to));
        for piece in from {
            // SAFETY: the caller's promise; what is committed is only counted.
            unsafe { empty(range, piece.offset, piece.bytes) }.map_err(RemapError::Kept)?;
        }
        Ok(())
    }

    fn has_old_places(&self) -> bool {
        self.sums.as_ref().is_some_and(|sums| sums.has_old_places())
    }

    fn unmap_old_places(&self) -> Result<(), SourceError> {
        self.sums.iter().for_each(|sums| sums.unmap_within(&EVERYWHERE));
        Ok(())
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: it came from `reserve` and is unused.
        unsafe { unmap(range.start(), range.len_bytes()) }
    }
}

/// Makes these bytes zero.
///
/// # Safety
///
/// `range` came from a source's `reserve`, and the content of these bytes is not needed any more.
unsafe fn empty(range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
    let start = range.at(offset, bytes)?;
    // SAFETY: within the range, by the caller's promise unused.
    let emptied = unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
    if emptied == 0 { Ok(()) } else { Err(last_os("madvise")) }
}

fn last_os(call: &'static str) -> SourceError {
    SourceError::new(call, std::io::Error::last_os_error().to_string())
}

fn pages(len_bytes: usize) -> usize {
    len_bytes.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX)
}

fn map(bytes: usize) -> Result<NonNull<u8>, SourceError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(last_os("mmap"));
    }
    NonNull::new(start.cast()).ok_or_else(|| SourceError::new("mmap", "the kernel mapped page zero"))
}

/// # Safety
///
/// The `bytes` from `start` on came from [`map`], and nothing uses them any more.
unsafe fn unmap(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    // SAFETY: the caller gives up the mapping.
    let failed = bytes > 0 && unsafe { libc::munmap(start.as_ptr().cast(), bytes) } != 0;
    if failed { Err(last_os("munmap")) } else { Ok(()) }
}
