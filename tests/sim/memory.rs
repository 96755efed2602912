//! The source of a simulated pool: it keeps accounts, checks its own contract, and fails on command.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory` over one mapping of the process.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use pinpool::PinnedBy;
use pinpool::source::{PAGE_BYTES, Region, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, BuiltInSource, RANGE_ALIGN_BYTES, RemapError, Subrange, VirtualMemory};

use crate::device::finish_all;
use crate::scenario::{Call, Setup};
use crate::site::Site;
use crate::world;

/// Addresses that the runs of one thread use in turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slab {
    start: usize,
}

/// One half is for reserved addresses, the other for regions.
const HALF_BYTES: usize = 2 << 30;

impl Slab {
    pub(crate) fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), 2 * HALF_BYTES + RANGE_ALIGN_BYTES, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.addr().next_multiple_of(RANGE_ALIGN_BYTES) }
    }
}

/// What the source holds.
#[derive(Debug)]
pub(crate) struct Memory {
    slab: Slab,
    max_bytes: u64,
    total_bytes: u64,
    is_reserved: bool,
    /// Committed granules and regions, by address.
    pieces: BTreeMap<usize, Piece>,
    next_id: u64,
    pub(crate) held_bytes: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) calls: [u64; 3],
    faults: [Fault; 3],
    lost_remaps: Fault,
    /// Calls that failed on request.
    pub(crate) failures: [u64; 3],
    pub(crate) is_ending: bool,
}

/// After `skip` more calls, `count` calls fail.
#[derive(Debug, Clone, Copy, Default)]
struct Fault {
    skip: u64,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    end: usize,
    /// A reserve, which is released only after the last buffer.
    is_reserve: bool,
    /// When a release of this piece failed. Before the end of the run, the release may be repeated.
    failed: Option<Failed>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failed {
    Before,
    AtTheEnd,
}

impl Fault {
    fn hits(&mut self) -> bool {
        match self {
            Self { count: 0, .. } => false,
            Self { skip: 0, count } => {
                *count -= 1;
                true
            }
            Self { skip, .. } => {
                *skip -= 1;
                false
            }
        }
    }
}

impl Memory {
    pub(crate) fn new(slab: Slab, setup: &Setup) -> Self {
        Self {
            slab,
            max_bytes: if setup.max_bytes == 0 { u64::MAX } else { setup.max_bytes },
            total_bytes: u64::MAX,
            is_reserved: false,
            pieces: BTreeMap::new(),
            next_id: 0,
            held_bytes: 0,
            peak_bytes: 0,
            calls: [0; 3],
            faults: [Fault::default(); 3],
            lost_remaps: Fault::default(),
            failures: [0; 3],
            is_ending: false,
        }
    }

    pub(crate) fn fail(&mut self, call: Call, skip: u64, count: u64) {
        self.faults[call as usize] = Fault { skip, count };
    }

    pub(crate) fn lose_remaps(&mut self, skip: u64, count: u64) {
        self.lost_remaps = Fault { skip, count };
    }

    pub(crate) fn set_max_bytes(&mut self, max_bytes: u64) {
        self.max_bytes = max_bytes;
    }

    pub(crate) fn limit_host(&mut self, bytes: u64) {
        self.total_bytes = bytes;
    }

    pub(crate) fn heal(&mut self) {
        (self.faults, self.lost_remaps, self.total_bytes) = ([Fault::default(); 3], Fault::default(), u64::MAX);
    }

    pub(crate) fn is_faulty(&self) -> bool {
        self.failures != [0; 3]
    }

    fn check_fault(&mut self, call: Call) -> Result<(), SourceError> {
        if self.faults[call as usize].hits() {
            return Err(self.failed(call, "told to fail"));
        }
        Ok(())
    }

    fn failed(&mut self, call: Call, what: &str) -> SourceError {
        self.failures[call as usize] += 1;
        SourceError::new("sim", format!("{call:?}: {what}"))
    }

    /// Whether all of `bytes` are committed.
    pub(crate) fn is_committed(&self, bytes: &Range<usize>) -> bool {
        let mut at = bytes.start;
        let Some((_, first)) = self.pieces.range(..=at).next_back() else { return false };
        if first.end <= at {
            return false;
        }
        at = first.end;
        while at < bytes.end {
            match self.pieces.get(&at) {
                Some(piece) => at = piece.end,
                None => return false,
            }
        }
        true
    }

    /// Whether any of `bytes` is committed.
    fn is_any_committed(&self, bytes: &Range<usize>) -> bool {
        self.pieces.range(..bytes.end).next_back().is_some_and(|(_, piece)| piece.end > bytes.start)
    }

    pub(crate) fn owns(&self, address: usize) -> bool {
        (self.slab.start..self.slab.start + 2 * HALF_BYTES).contains(&address)
    }

    fn add(&mut self, bytes: Range<usize>) {
        self.held_bytes += bytes.len() as u64;
        self.peak_bytes = self.peak_bytes.max(self.held_bytes);
        self.pieces.insert(bytes.start, Piece { end: bytes.end, is_reserve: false, failed: None });
    }

    fn remove(&mut self, bytes: &Range<usize>) {
        self.held_bytes -= bytes.len() as u64;
        self.split(bytes.start);
        self.split(bytes.end);
        for start in self.starts_in(bytes) {
            self.pieces.remove(&start);
        }
    }

    /// Records that a release of `bytes` failed.
    fn record_failed(&mut self, bytes: &Range<usize>) {
        let failed = Some(if self.is_ending { Failed::AtTheEnd } else { Failed::Before });
        self.split(bytes.start);
        self.split(bytes.end);
        for start in self.starts_in(bytes) {
            self.pieces.get_mut(&start).unwrap().failed = failed;
        }
    }

    fn starts_in(&self, bytes: &Range<usize>) -> Vec<usize> {
        self.pieces.range(bytes.clone()).map(|(start, _)| *start).collect()
    }

    /// Splits the piece that contains `at`, if any.
    fn split(&mut self, at: usize) {
        if let Some((_, piece)) = self.pieces.range_mut(..at).next_back()
            && piece.end > at
        {
            let second = *piece;
            piece.end = at;
            self.pieces.insert(at, second);
        }
    }

    /// Returns the held pieces, and whether each may remain: if its release failed, or if it is a reserve and `keeps_reserves`.
    pub(crate) fn pieces(&self, retries: bool, keeps_reserves: bool) -> Vec<(Range<usize>, bool)> {
        let is_explained = |piece: &Piece| {
            let has_failed = piece.failed.is_some_and(|when| !retries || when == Failed::AtTheEnd);
            has_failed || piece.is_reserve && keeps_reserves
        };
        self.pieces.iter().map(|(start, piece)| (*start..piece.end, is_explained(piece))).collect()
    }

    /// The lowest address where a region of `len` bytes fits, so that addresses recur.
    fn place(&self, len: usize) -> Option<usize> {
        let half = self.slab.start + HALF_BYTES;
        let mut at = half;
        for (start, piece) in self.pieces.range(half..) {
            if start - at >= len {
                break;
            }
            at = piece.end;
        }
        (at + len <= half + HALF_BYTES).then_some(at)
    }
}

/// The source over a [`Memory`].
#[derive(Debug)]
pub(crate) struct SimMemory {
    pub(crate) site: Arc<Site>,
    pub(crate) setup: Setup,
}

impl SimMemory {
    /// Lets other actors act during the call, before it takes effect.
    fn enter(&self, call: Call) {
        self.site.memory().calls[call as usize] += 1;
        world::act_during(call);
    }

    fn acquire_bytes(&self, bytes: Option<Range<usize>>, len: usize) -> Result<Range<usize>, SourceError> {
        let mut memory = self.site.memory();
        memory.check_fault(Call::Acquire)?;
        let held_bytes = memory.held_bytes + len as u64;
        if held_bytes > memory.total_bytes {
            return Err(memory.failed(Call::Acquire, "the host has no memory left"));
        }
        let Some(start) = bytes.map(|bytes| bytes.start).or_else(|| memory.place(len)) else {
            return Err(memory.failed(Call::Acquire, "no addresses left"));
        };
        let bytes = start..start + len;
        if memory.is_any_committed(&bytes) {
            self.site.report(format!("granules are committed twice, {len} B"));
        }
        memory.add(bytes.clone());
        if held_bytes > memory.max_bytes {
            let max_bytes = memory.max_bytes;
            self.site.report(format!("{held_bytes} B are held, over the limit of {max_bytes} B"));
        }
        Ok(bytes)
    }

    fn release_bytes(&self, bytes: &Range<usize>, call: Call) -> Result<(), SourceError> {
        if let Some(user) = self.site.used(bytes) {
            self.site.report(format!("{call:?} of bytes that are in use ({user})"));
        }
        let mut memory = self.site.memory();
        if !memory.is_committed(bytes) {
            self.site.report(format!("{call:?} of bytes that are not committed"));
        }
        if call == Call::Release
            && let Err(error) = memory.check_fault(Call::Release)
        {
            memory.record_failed(bytes);
            return Err(error);
        }
        memory.remove(bytes);
        Ok(())
    }
}

fn bytes_at(range: &AddressRange, offset: usize, len: usize) -> Range<usize> {
    let start = range.start().as_ptr().addr() + offset;
    start..start + len
}

fn pointer(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap()
}

// SAFETY: regions are distinct parts of a mapping that lives as long as the process, page-aligned, and zero or what
// earlier use left; ids count up.
unsafe impl Source for SimMemory {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        Some(PinnedBy::Kernel)
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        len_bytes.next_multiple_of(PAGE_BYTES) + if self.setup.extra_page == 1 { PAGE_BYTES } else { 0 }
    }

    fn blocks_on_release(&self) -> bool {
        self.setup.blocks_on_release == 1
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.enter(Call::Acquire);
        let bytes = self.acquire_bytes(None, self.held_bytes(len_bytes))?;
        let mut memory = self.site.memory();
        memory.next_id += 1;
        Ok(Region::new(pointer(bytes.start), len_bytes, memory.next_id))
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        self.enter(Call::Release);
        if self.setup.blocks_on_release == 1 {
            // A pool that is ending may have abandoned copies that are completed here.
            if self.site.memory().is_ending {
                self.site.excuse_copied();
            }
            finish_all(&self.site);
        }
        let start = region.start().as_ptr().addr();
        self.release_bytes(&(start..start + self.held_bytes(region.len_bytes())), Call::Release)
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for SimMemory {
    fn acquire_bulk(&self, len_bytes: usize, _threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let region = self.acquire(len_bytes)?;
        progress(len_bytes);
        let mut memory = self.site.memory();
        memory.pieces.get_mut(&region.start().as_ptr().addr()).unwrap().is_reserve = true;
        Ok(region)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        (self.setup.separate == 0).then_some(self)
    }
}

// SAFETY: the range is the first half of a mapping that is readable and writable all the time; what is committed is only
// counted.
unsafe impl VirtualMemory for SimMemory {
    fn granule_bytes(&self) -> usize {
        usize::try_from(self.setup.granule_bytes).unwrap().max(PAGE_BYTES)
    }

    fn reserve_addresses(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        let mut memory = self.site.memory();
        if len_bytes > HALF_BYTES || memory.is_reserved {
            return Err(SourceError::new("sim", format!("no {len_bytes} addresses")));
        }
        memory.is_reserved = true;
        Ok(AddressRange::new(pointer(memory.slab.start), len_bytes))
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.enter(Call::Acquire);
        self.acquire_bytes(Some(bytes_at(range, offset, bytes)), bytes).map(drop)
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.enter(Call::Release);
        self.release_bytes(&bytes_at(range, offset, bytes), Call::Release)
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        self.enter(Call::Remap);
        let is_lost = {
            let mut memory = self.site.memory();
            memory.check_fault(Call::Remap).map_err(RemapError::Kept)?;
            memory.lost_remaps.hits()
        };
        for piece in from {
            let bytes = bytes_at(range, piece.offset, piece.bytes);
            self.release_bytes(&bytes, Call::Remap).map_err(RemapError::Kept)?;
        }
        let mut memory = self.site.memory();
        if is_lost {
            return Err(RemapError::Lost(memory.failed(Call::Remap, "told to lose the granules")));
        }
        let bytes = bytes_at(range, to, from.iter().map(|piece| piece.bytes).sum());
        if memory.is_any_committed(&bytes) {
            self.site.report(format!("granules are remapped onto committed ones, {} B", bytes.len()));
        }
        memory.add(bytes);
        Ok(())
    }

    unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError> {
        let bytes = bytes_at(&range, 0, range.len_bytes());
        if let Some(user) = self.site.used(&bytes) {
            self.site.report(format!("addresses of a buffer are released ({user})"));
        }
        let mut memory = self.site.memory();
        let left: Vec<_> =
            memory.pieces(false, false).into_iter().filter(|(piece, _)| bytes.contains(&piece.start)).collect();
        if left.iter().any(|(_, is_explained)| !is_explained) {
            self.site.report("addresses are released before their granules".to_owned());
        }
        memory.is_reserved = false;
        Ok(())
    }
}
