//! Shared memory that no process can truncate: a System V segment without a key.
//!
//! A process that may write to a file may also truncate it, and then an access beyond its end raises SIGBUS; a segment has no
//! file. It is marked for removal when it is created, so it is freed with the last process that has it attached, even if that
//! process is killed. Until then other processes in the same IPC namespace attach it by its number.
#![allow(unsafe_code)] // Maps by system calls.

use std::io;
use std::ptr::NonNull;

use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

/// Maximum number of attached pools.
pub(super) const SLOTS: usize = 256;
pub(super) const SLOT_WORDS: usize = 16;
const FIRST_SLOT: usize = 8;
const BYTES: usize = (FIRST_SLOT + SLOTS * SLOT_WORDS) * 8;

/// A segment that is attached to this process. It contains a cookie that no other segment has, words that all members share, and
/// slots.
#[derive(Debug)]
pub(super) struct Segment {
    start: NonNull<AtomicU64>,
    pub(super) id: i32,
    generation: ForkGeneration,
}

// SAFETY: the segment consists of atomics that any thread may use, and its address is the same for all threads.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a segment that contains `cookie` and otherwise zeros.
    pub(super) fn create(cookie: u64) -> io::Result<Self> {
        // SAFETY: the call takes numbers and writes to no memory.
        let id = unsafe { libc::shmget(libc::IPC_PRIVATE, BYTES, libc::IPC_CREAT | 0o600) };
        if id < 0 {
            return Err(io::Error::last_os_error());
        }
        let attached = Self::map(id, 0);
        // SAFETY: the call marks the segment created above for removal. An attached segment stays until it is detached.
        unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
        let segment = attached?;
        // Release: a process that reads the cookie also sees the other words as they were created.
        segment.word(0).store(cookie, Ordering::Release);
        Ok(segment)
    }

    /// Attaches the segment `id`, read-only if `is_read_only`. Returns `None` if there is no such segment with `cookie`.
    pub(super) fn attach(id: i32, cookie: u64, is_read_only: bool) -> Option<Self> {
        // SAFETY: `shmid_ds` consists of numbers, for which zero is a valid value.
        let mut found: libc::shmid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes only to `found`.
        let status = unsafe { libc::shmctl(id, libc::IPC_STAT, &raw mut found) };
        // In a shorter segment, an access beyond its end would kill the process.
        if status < 0 || found.shm_segsz < BYTES {
            return None;
        }
        let segment = Self::map(id, if is_read_only { libc::SHM_RDONLY } else { 0 }).ok()?;
        (segment.word(0).load(Ordering::Acquire) == cookie).then_some(segment)
    }

    fn map(id: i32, flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: the mapping is new, at an address of the kernel's choice, so it replaces no existing memory.
        let start = unsafe { libc::shmat(id, std::ptr::null(), flags) };
        let start = NonNull::new(start.cast::<AtomicU64>()).filter(|start| start.as_ptr().addr() != usize::MAX);
        let start = start.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, id, generation: ForkGeneration::now() })
    }

    /// Returns all words. If the segment is attached read-only, the words may be loaded but not stored.
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the segment is mapped at a page's start until `self` is dropped, with at least `BYTES` (`create`, `attach`). A
        // segment never shrinks, and every access by this crate is atomic.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), BYTES / 8) }
    }

    /// Returns a word that all members share.
    pub(super) fn word(&self, index: usize) -> &AtomicU64 {
        &self.words()[index]
    }

    pub(super) fn slot(&self, index: usize) -> &[AtomicU64] {
        &self.words()[FIRST_SLOT + index * SLOT_WORDS..][..SLOT_WORDS]
    }

    pub(super) fn zero(&self, slot: usize) {
        self.slot(slot).iter().for_each(|word| word.store(0, Ordering::SeqCst));
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // In a forked child the segment stays attached, since references to it from the time before the fork may exist there.
        if !self.generation.is_stale() {
            // SAFETY: `map` attached the segment, and nothing borrows from `self` any more.
            unsafe { libc::shmdt(self.start.as_ptr().cast()) };
        }
    }
}
