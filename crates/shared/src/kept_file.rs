//! The file of kept memory: a page of numbers, then the bytes.
#![allow(unsafe_code)] // Says what is made of atomics alone.

use super::layout::failed;
use crate::error::{ErrorKind, Result};
use crate::memory_file::{MemoryFile, Shared, SharedMemory};
use pinpool_os::host::PAGE_BYTES;
use pinpool_os::sync::process::{AtomicU32, AtomicU64, Ordering};

/// `pinkept` and a zero, as bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"pinkept\0");
/// Changes with each change of the numbers.
const VERSION: u32 = 1;
/// What is named in errors.
pub(super) const KEPT: &str = "kept memory";
/// Bytes of a label at most.
const LABEL_BYTES: usize = 192;

pub(super) fn shared(why: impl Into<String>) -> crate::Error {
    ErrorKind::Shared { what: KEPT, why: why.into() }.into()
}

pub(super) fn peer(why: impl Into<String>) -> crate::Error {
    ErrorKind::Peer { what: KEPT, why: why.into() }.into()
}

/// What was marked as complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// What it is, as its process named it.
    pub label: String,
    /// Its bytes, from the first one on.
    pub len: u64,
    /// The generation of the process that marked it.
    pub generation: u64,
}

#[derive(Debug)]
#[repr(C)]
struct MarkSlot {
    len: AtomicU64,
    generation: AtomicU64,
    label_len: AtomicU64,
    label: [AtomicU64; LABEL_BYTES / 8],
}

/// The first page. One process at a time writes to it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    is_ready: AtomicU32,
    bytes: AtomicU64,
    attached: AtomicU64,
    marks: AtomicU64,
    /// Number of the mark that holds, whose slot is that number modulo 2; 0: none.
    mark: AtomicU64,
    slots: [MarkSlot; 2],
}

// SAFETY: atomics alone, in the layout of C.
unsafe impl Shared for Header {}

impl Header {
    fn slot(&self, number: u64) -> &MarkSlot {
        if number.is_multiple_of(2) { &self.slots[0] } else { &self.slots[1] }
    }

    /// This process holds it.
    pub(super) fn count_holder(&self) {
        self.attached.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn clear(&self) {
        self.mark.store(0, Ordering::SeqCst);
    }

    /// The slot that does not hold is written, then the number of the mark: a process that dies between leaves the old one.
    pub(super) fn set_mark(&self, label: &str, len: u64, generation: u64) -> Result<()> {
        if label.len() > LABEL_BYTES {
            return Err(shared(format!("the label has {} bytes, at most {LABEL_BYTES} fit", label.len())));
        }
        let number = self.marks.load(Ordering::SeqCst) + 1;
        self.marks.store(number, Ordering::SeqCst);
        let held = self.mark.load(Ordering::SeqCst);
        // One that died between the two lines above left a number without a mark.
        let number = if held % 2 == number % 2 && held != 0 { number + 1 } else { number };
        self.marks.store(number, Ordering::SeqCst);
        let slot = self.slot(number);
        let words = label.as_bytes().chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        slot.label.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        slot.label_len.store(label.len() as u64, Ordering::Relaxed);
        slot.len.store(len, Ordering::Relaxed);
        slot.generation.store(generation, Ordering::Relaxed);
        // Release: the next process that sees the number sees the slot, and the bytes that were written before.
        self.mark.store(number, Ordering::SeqCst);
        Ok(())
    }

    pub(super) fn mark(&self) -> Option<Mark> {
        let number = self.mark.load(Ordering::SeqCst);
        if number == 0 {
            return None;
        }
        let slot = self.slot(number);
        let len = usize::try_from(slot.label_len.load(Ordering::Relaxed)).unwrap_or(0).min(LABEL_BYTES);
        let bytes: Vec<u8> =
            slot.label.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
        let (len, generation) = (slot.len.load(Ordering::Relaxed), slot.generation.load(Ordering::Relaxed));
        Some(Mark { label: String::from_utf8_lossy(&bytes).into_owned(), len, generation })
    }
}

/// The mapped file.
#[derive(Debug)]
pub(super) struct KeptFile {
    memory: SharedMemory,
}

impl KeptFile {
    /// A new file of `bytes`, zero, and whether it is in hugetlb pages.
    pub(super) fn create(bytes: usize, hugetlb: Option<bool>) -> Result<(MemoryFile, bool)> {
        let all = bytes.checked_add(PAGE_BYTES).filter(|_| bytes > 0);
        let all = all.ok_or_else(|| shared(format!("asked {bytes} B: 1 B and more can be kept")))?;
        let file = MemoryFile::new(c"pinpool-kept", all, hugetlb).map_err(failed(KEPT))?;
        let memory = SharedMemory::map(&file).map_err(failed(KEPT))?;
        let header = memory.shared::<Header>(0).ok_or_else(|| shared("the file has no header"))?;
        header.magic.store(MAGIC, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.bytes.store(bytes as u64, Ordering::Relaxed);
        // Release: who sees it sees the numbers.
        header.is_ready.store(1, Ordering::Release);
        Ok((file, memory.is_hugetlb()))
    }

    /// The file of the keeper of `name`, which must have `bytes`.
    pub(super) fn open(file: &MemoryFile, name: &str, bytes: usize) -> Result<Self> {
        let memory = SharedMemory::map(file).map_err(failed(KEPT))?;
        let cut_off = || shared(format!("the file of {name} has {} B: it is cut off", memory.len()));
        let header = memory.shared::<Header>(0).ok_or_else(cut_off)?;
        // Acquire, with the Release of `create`.
        let is_ready = header.is_ready.load(Ordering::Acquire) == 1;
        if header.magic.load(Ordering::Relaxed) != MAGIC || !is_ready {
            return Err(shared(format!("the file of {name} is no kept memory")));
        }
        let version = header.version.load(Ordering::Relaxed);
        if version != VERSION {
            return Err(shared(format!(
                "the keeper of {name} is of version {version}, and this process knows {VERSION}: use one version of pinpool"
            )));
        }
        let kept = header.bytes.load(Ordering::Relaxed);
        if kept != bytes as u64 {
            return Err(shared(format!(
                "the keeper of {name} holds {kept} B, asked {bytes} B: ask for as many, or end it and start another"
            )));
        }
        if bytes.checked_add(PAGE_BYTES).is_none_or(|all| all > memory.len()) {
            return Err(cut_off());
        }
        Ok(Self { memory })
    }

    /// How many processes have held it.
    pub(super) fn generation(&self) -> u64 {
        self.memory.shared::<Header>(0).map_or(0, |header| header.attached.load(Ordering::SeqCst))
    }

    pub(super) fn into_memory(self) -> SharedMemory {
        self.memory
    }
}
