//! The words of a shared file in the memory of this process.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use crate::fork::ForkGeneration;
use crate::sync::process::AtomicU64;

/// A mapping of the first bytes of a file, all of them allocated (shared-I1).
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<AtomicU64>,
    words: usize,
    generation: ForkGeneration,
}

// SAFETY: atomics that any thread may use; the address is bound to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of `file`, a multiple of 8.
    pub(super) fn of(file: &File, bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { start, words: bytes / 8, generation: ForkGeneration::now() })
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped at a page's start, for reading and writing, until this is dropped; the file has these bytes
        // (shared-I1), and every access by this crate is atomic.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A child of `fork` may have other threads' references to it on its stack.
        if !self.generation.is_stale() {
            // SAFETY: mapped by `of`, and nothing borrows from `self` any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.words * 8) };
        }
    }
}

/// Allocates the first `bytes` of `file`, so that no access finds the file system full, which would end the process.
#[cfg(target_os = "linux")]
pub(super) fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: a call with numbers.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn allocate(_file: &File, _bytes: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
