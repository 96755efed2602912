//! Memory that processes share and that nobody can cut: a System V segment without a key.
//!
//! The file of a name could be cut under its users, whom the next access would end by SIGBUS; a segment has no file. It is
//! marked for removal when it is made, so it goes with the last process that has it attached, however that ends. Linux lets
//! other processes attach it by its number until then, if they are in the same namespace of interprocess communication.

use std::io;
use std::ptr::NonNull;

use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// A segment in the memory of this process. Its first word is its cookie.
#[derive(Debug)]
pub(super) struct Segment {
    start: NonNull<AtomicU64>,
    words: usize,
    id: i32,
    generation: ForkGeneration,
}

// SAFETY: atomics that any thread may use; the address is bound to no thread.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment of `words`, all zeros but the first, which is `cookie`.
    pub(super) fn create(words: usize, cookie: u64) -> io::Result<Self> {
        // SAFETY: a call with numbers.
        let id = unsafe { libc::shmget(libc::IPC_PRIVATE, words * 8, libc::IPC_CREAT | 0o600) };
        if id < 0 {
            return Err(io::Error::last_os_error());
        }
        let attached = Self::map(id, words, 0);
        // SAFETY: a call with numbers, of a segment that was made here. What is attached stays until it is detached.
        unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
        let segment = attached?;
        // Release: who finds the cookie finds the rest as it was made.
        segment.words()[0].store(cookie, Ordering::Release);
        Ok(segment)
    }

    /// The segment `id` of `words`, for reading alone if `is_read_only`. `None` if there is none that has `cookie`.
    pub(super) fn attach(id: i32, words: usize, cookie: u64, is_read_only: bool) -> Option<Self> {
        // SAFETY: a record of numbers, for which zeros are values.
        let mut found: libc::shmid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes to the record alone.
        let asked = unsafe { libc::shmctl(id, libc::IPC_STAT, &raw mut found) };
        // Shorter, an access behind its end would end the process.
        if asked < 0 || found.shm_segsz < words * 8 {
            return None;
        }
        let segment = Self::map(id, words, if is_read_only { libc::SHM_RDONLY } else { 0 }).ok()?;
        (segment.words()[0].load(Ordering::Acquire) == cookie).then_some(segment)
    }

    fn map(id: i32, words: usize, flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::shmat(id, std::ptr::null(), flags) };
        let start = NonNull::new(start.cast::<AtomicU64>()).filter(|start| start.as_ptr().addr() != usize::MAX);
        let start = start.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, words, id, generation: ForkGeneration::now() })
    }

    /// The number by which other processes attach it.
    pub(super) fn id(&self) -> i32 {
        self.id
    }

    /// Nobody stores to them who attached for reading alone.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped at a page's start until this is dropped, with at least so many words (`create`, `attach`); a segment never
        // shrinks, and every access by this crate is atomic.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A child of `fork` may have other threads' references to it on its stack.
        if !self.generation.is_stale() {
            // SAFETY: attached by `map`, and nothing borrows from `self` any more.
            unsafe { libc::shmdt(self.start.as_ptr().cast()) };
        }
    }
}
