//! The layout of the file of shared buffers.
//!
//! ```text
//!   0        4 KiB                       whole pages
//!   ├ header ├ an entry for each buffer ┼─ buffer 0 ─┼─ buffer 1 ─┼ ...
//! ```
//!
//! The numbers of the header are read and checked only once, when the file is attached. If another process overwrites them later,
//! no access leaves the mapping.
#![allow(unsafe_code)] // Marks types that consist of atomics.

use std::time::{SystemTime, UNIX_EPOCH};

use super::state::StateWord;
use crate::error::{ErrorKind, Result};
use crate::memory_file::{MemoryFile, Shared, SharedMemory};
use pinpool::HugeTlb;
use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};
use pinpool_os::sync::unmodeled::{AtomicU32, AtomicU64, Ordering};
use pinpool_shared_limit::file::EventCount;

/// The mark of a file of shared buffers: the text `pinslabs` as bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"pinslabs");
/// Increased with each change of this file's structures or of the protocol.
const VERSION: u32 = 2;
/// Worker slots in addition to one for each buffer, since the slot of a dead worker is kept until its sent buffers are received.
const SPARE_SLOTS: u32 = 256;
const BUFFERS_MAX: usize = 1 << 15;

#[derive(Debug)]
#[repr(C)]
struct Numbers {
    /// Written last, after the other numbers.
    magic: AtomicU64,
    version: AtomicU32,
    buffers: AtomicU32,
    id: AtomicU64,
    buffer_bytes: AtomicU64,
}

/// A separate cache line, so that processes that write to one field do not delay processes that read another.
#[derive(Debug)]
#[repr(C, align(128))]
struct Line<T>(T);

/// The value of `is_closed` while workers that find no free buffer are refused immediately.
const REFUSING: u32 = 2;

/// The contents of the first page.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Header {
    numbers: Line<Numbers>,
    freed: Line<EventCount>,
    sent: Line<EventCount>,
    sends: Line<AtomicU64>,
    is_closed: Line<AtomicU32>,
    /// All slots that were ever taken are below this number.
    slots_used: Line<AtomicU32>,
}

impl Header {
    /// Returns the event count that is notified when a buffer becomes free.
    pub(super) fn freed_event(&self) -> &EventCount {
        &self.freed.0
    }

    /// Returns the event count that is notified when a buffer is sent.
    pub(super) fn sent_event(&self) -> &EventCount {
        &self.sent.0
    }

    /// Returns the sequence number for the next sent buffer, a different number in each call.
    pub(super) fn next_send(&self) -> u64 {
        self.sends.0.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the reason why workers are refused, if they are.
    pub(super) fn refusal(&self) -> Option<&'static str> {
        match self.is_closed.0.load(Ordering::SeqCst) {
            0 => None,
            REFUSING => Some("the trainer is ending its workers"),
            _ => Some("the trainer has closed them: end this worker"),
        }
    }

    /// Sets whether workers that find no free buffer may wait for one.
    pub(super) fn set_accepting_workers(&self, is_accepting: bool) {
        let (from, to) = if is_accepting { (REFUSING, 0) } else { (0, REFUSING) };
        // Closed buffers stay closed.
        let _ = self.is_closed.0.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
        self.freed_event().notify(i32::MAX);
    }

    /// Refuses buffers to workers from now on.
    pub(super) fn close(&self) {
        self.is_closed.0.store(1, Ordering::SeqCst);
        self.freed_event().notify(i32::MAX);
        self.sent_event().notify(i32::MAX);
    }

    /// Records that a worker uses `slot`.
    pub(super) fn use_slot(&self, slot: u16) {
        self.slots_used.0.fetch_max(u32::from(slot) + 1, Ordering::SeqCst);
    }

    pub(super) fn slots_used(&self) -> u32 {
        self.slots_used.0.load(Ordering::SeqCst)
    }
}

/// One buffer.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct BufferHeader {
    pub(super) state: StateWord,
    /// Bytes that the worker has filled. Set when the buffer is sent.
    pub(super) len: AtomicU64,
    /// The number that the worker passed to `send`.
    pub(super) user_data: AtomicU64,
    /// Sequence number of the buffer among all sent buffers.
    pub(super) order: AtomicU64,
}

// SAFETY: `Header` consists of atomics and has C layout.
unsafe impl Shared for Header {}
// SAFETY: `BufferHeader` consists of atomics and has C layout.
unsafe impl Shared for BufferHeader {}

/// The layout that the numbers of the header determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Different for each file, to detect a ticket of another file.
    pub(super) id: u64,
    pub(super) buffer_bytes: usize,
    pub(super) stride: usize,
    pub(super) data_offset: usize,
    pub(super) buffers: usize,
    pub(super) slots: u16,
}

impl Geometry {
    fn new(id: u64, buffer_bytes: usize, buffers: usize) -> Option<Self> {
        let stride = buffer_bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let data_offset =
            (PAGE_BYTES + buffers.checked_mul(size_of::<BufferHeader>())?).checked_next_multiple_of(PAGE_BYTES)?;
        let slots = u16::try_from(u32::try_from(buffers).ok()? + SPARE_SLOTS).ok()?;
        Some(Self { id, buffer_bytes, stride, data_offset, buffers, slots })
    }

    fn file_bytes(&self) -> Option<usize> {
        self.stride.checked_mul(self.buffers)?.checked_add(self.data_offset)
    }
}

/// The file, mapped into this process.
#[derive(Debug)]
pub(super) struct SharedFile {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

pub(super) fn io_failed(step: &str) -> impl Fn(std::io::Error) -> crate::Error {
    move |error| ErrorKind::Backend(format!("{step}: {error}")).into()
}

fn wrong(why: impl Into<String>) -> crate::Error {
    ErrorKind::Backend(why.into()).into()
}

/// Returns a random number.
fn new_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Seeded from the system's random numbers.
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.write_u128(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos()));
    hasher.finish()
}

impl SharedFile {
    /// Creates and maps a file with `buffers` buffers.
    pub(super) fn new(buffer_bytes: usize, buffers: usize, hugetlb: HugeTlb) -> Result<(MemoryFile, Self)> {
        let out_of_range = |why| ErrorKind::OutOfRange(format!("{buffers} buffers of {buffer_bytes} bytes{why}"));
        if buffer_bytes == 0 || buffers == 0 || buffers > BUFFERS_MAX {
            return Err(out_of_range(format!(": create 1 to {BUFFERS_MAX} of at least 1 byte")).into());
        }
        let planned = Geometry::new(new_id(), buffer_bytes, buffers);
        let planned = planned.and_then(|geometry| Some((geometry, geometry.file_bytes()?)));
        let why = || out_of_range(" exceed the address space: create fewer or smaller ones".to_owned());
        let (geometry, bytes) = planned.ok_or_else(why)?;
        // A file that is smaller than a huge page would waste the rest of the page.
        let hugetlb = if hugetlb == HugeTlb::Auto && bytes < GRANULE_BYTES { HugeTlb::Off } else { hugetlb };
        let file = MemoryFile::new(c"pinpool-shared", bytes, hugetlb)?;
        let made = Self { memory: SharedMemory::map(&file)?, geometry };
        made.write();
        Ok((file, made))
    }

    /// Maps the file behind the descriptor that a trainer passed, and checks its header.
    pub(super) fn attach(file: &MemoryFile) -> Result<Self> {
        let memory = SharedMemory::map(file)?;
        let Some(header) = memory.shared::<Header>(0) else {
            return Err(wrong(format!("the file has {} bytes, less than a header", memory.len())));
        };
        let geometry = read(&header.numbers.0, memory.len())?;
        Ok(Self { memory, geometry })
    }

    fn write(&self) {
        let Some(header) = self.memory.shared::<Header>(0) else { return };
        let (numbers, geometry) = (&header.numbers.0, &self.geometry);
        numbers.version.store(VERSION, Ordering::Relaxed);
        numbers.buffers.store(u32::try_from(geometry.buffers).unwrap_or(0), Ordering::Relaxed);
        numbers.id.store(geometry.id, Ordering::Relaxed);
        numbers.buffer_bytes.store(geometry.buffer_bytes as u64, Ordering::Relaxed);
        // Release: a process that reads the magic number also sees the other numbers.
        numbers.magic.store(MAGIC, Ordering::Release);
    }

    pub(super) fn view(&self) -> View<'_> {
        View { memory: &self.memory, geometry: &self.geometry }
    }
}

/// A mapping with a known geometry.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) memory: &'a SharedMemory,
    pub(super) geometry: &'a Geometry,
}

impl<'a> View<'a> {
    pub(super) fn header(self) -> Result<&'a Header> {
        self.memory.shared(0).ok_or_else(|| wrong("the file has no header"))
    }

    /// Returns the entry of buffer `index`; `None` if there is no such buffer.
    pub(super) fn buffer_header(self, index: usize) -> Option<&'a BufferHeader> {
        (index < self.geometry.buffers).then_some(())?;
        self.memory.shared(PAGE_BYTES + index * size_of::<BufferHeader>())
    }

    pub(super) fn buffer_headers(self) -> impl Iterator<Item = (usize, &'a BufferHeader)> {
        (0..self.geometry.buffers).filter_map(move |index| self.buffer_header(index).map(|entry| (index, entry)))
    }
}

impl Geometry {
    /// Returns the offset of the bytes of buffer `index`.
    pub(super) fn offset(&self, index: usize) -> usize {
        self.data_offset + index * self.stride
    }

    /// Returns the index of the buffer with its bytes at `offset`.
    pub(super) fn index(&self, offset: usize) -> Option<usize> {
        let from = offset.checked_sub(self.data_offset)?;
        (from % self.stride == 0).then_some(from / self.stride)
    }
}

fn read(numbers: &Numbers, len: usize) -> Result<Geometry> {
    // Acquire pairs with the Release in `write`.
    if numbers.magic.load(Ordering::Acquire) != MAGIC {
        return Err(wrong("the file does not contain shared buffers: pass the descriptor of a `SharedPool`"));
    }
    let version = numbers.version.load(Ordering::Relaxed);
    if version != VERSION {
        return Err(wrong(format!(
            "the file has version {version}, and this process reads version {VERSION}: use one version of pinpool on both sides"
        )));
    }
    let (id, buffers) = (numbers.id.load(Ordering::Relaxed), numbers.buffers.load(Ordering::Relaxed));
    let buffer_bytes = numbers.buffer_bytes.load(Ordering::Relaxed);
    let geometry = Geometry::new(id, usize::try_from(buffer_bytes).unwrap_or(usize::MAX), buffers as usize);
    let fits = |geometry: &Geometry| geometry.buffers > 0 && geometry.file_bytes().is_some_and(|bytes| bytes <= len);
    geometry.filter(fits).ok_or_else(|| {
        let claim = format!("the header claims {buffers} buffers of {buffer_bytes} bytes");
        wrong(format!("the file has {len} bytes and {claim}: it is truncated or damaged"))
    })
}
