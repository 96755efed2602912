//! Shared memory that no process can truncate: a System V segment without a key.
//!
//! A process that may write to a file may also truncate it, and then an access beyond its end raises SIGBUS; a segment has no
//! file. It is marked for removal when it is created, so it is freed with the last process that has it attached, even if that
//! process is killed. Until then other processes in the same IPC namespace attach it by its number.
#![allow(unsafe_code)] // Maps by system calls.

use std::io;
use std::ptr::NonNull;

use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Maximum number of attached pools.
pub(super) const SLOTS: usize = 256;
pub(super) const SLOT_WORDS: usize = 16;
const FIRST_SLOT: usize = 8;
const BYTES: usize = (FIRST_SLOT + SLOTS * SLOT_WORDS) * 8;

/// A segment in the memory of this process: a cookie, which no other segment has, words of all owners, and slots.
#[derive(Debug)]
pub(super) struct Segment {
    start: NonNull<AtomicU64>,
    pub(super) id: i32,
    generation: ForkGeneration,
}

// SAFETY: atomics that any thread may use; the address is bound to no thread.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment: a cookie, and zeros.
    pub(super) fn create(cookie: u64) -> io::Result<Self> {
        // SAFETY: a call with numbers.
        let id = unsafe { libc::shmget(libc::IPC_PRIVATE, BYTES, libc::IPC_CREAT | 0o600) };
        if id < 0 {
            return Err(io::Error::last_os_error());
        }
        let attached = Self::map(id, 0);
        // SAFETY: a call with numbers, on the segment created above. What is attached stays until it is detached.
        unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
        let segment = attached?;
        // Release: a process that finds the cookie finds the rest as it was created.
        segment.word(0).store(cookie, Ordering::Release);
        Ok(segment)
    }

    /// The segment `id`, read-only if `is_read_only`. `None` if there is none that has `cookie`.
    pub(super) fn attach(id: i32, cookie: u64, is_read_only: bool) -> Option<Self> {
        // SAFETY: a record of numbers, for which zeros are values.
        let mut found: libc::shmid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes to the record alone.
        let status = unsafe { libc::shmctl(id, libc::IPC_STAT, &raw mut found) };
        // In a shorter one, an access behind its end would kill the process.
        if status < 0 || found.shm_segsz < BYTES {
            return None;
        }
        let segment = Self::map(id, if is_read_only { libc::SHM_RDONLY } else { 0 }).ok()?;
        (segment.word(0).load(Ordering::Acquire) == cookie).then_some(segment)
    }

    fn map(id: i32, flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::shmat(id, std::ptr::null(), flags) };
        let start = NonNull::new(start.cast::<AtomicU64>()).filter(|start| start.as_ptr().addr() != usize::MAX);
        let start = start.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, id, generation: ForkGeneration::now() })
    }

    /// Only loaded from if attached read-only.
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped at a page's start until this is dropped, with at least `BYTES` (`create`, `attach`); a segment never
        // shrinks, and every access by this crate is atomic.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), BYTES / 8) }
    }

    /// A word of all owners.
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
        // A forked child may have other threads' references to it on its stack.
        if !self.generation.is_stale() {
            // SAFETY: attached by `map`, and nothing borrows from `self` any more.
            unsafe { libc::shmdt(self.start.as_ptr().cast()) };
        }
    }
}
