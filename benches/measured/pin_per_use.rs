//! No pool: memory is mapped, page-locked, used and unmapped each time.
#![allow(unsafe_code)] // Calls `mmap`, `mlock` and `munmap`, and writes to what they map.
#![allow(clippy::print_stderr)] // Says why a baseline is missing.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use super::keepers::{Keeper, SIZES, bytes_of};

/// Counts the gets that failed, and has none when it ends.
#[derive(Debug, Default)]
pub struct PinPerUse {
    failed: AtomicU64,
}

impl PinPerUse {
    /// `None`, with the reason on stderr, where this process may lock no memory.
    pub fn where_allowed() -> Option<Self> {
        let trial = Locked::new(bytes_of(SIZES - 1));
        trial.inspect_err(|error| eprintln!("pin_per_use is left out: {error}")).ok().map(|_| Self::default())
    }
}

impl Keeper for PinPerUse {
    type Item = Option<Locked>;

    #[inline]
    fn get(&self, size: usize) -> Option<Locked> {
        let mut locked = Locked::new(bytes_of(size)).ok();
        match &mut locked {
            Some(locked) => locked.write(1),
            // Relaxed: read when the threads are joined.
            None => _ = self.failed.fetch_add(1, Ordering::Relaxed),
        }
        locked
    }

    #[inline]
    fn put(&self, item: Option<Locked>) {
        drop(item);
    }
}

impl Drop for PinPerUse {
    fn drop(&mut self) {
        assert_eq!(*self.failed.get_mut(), 0, "buffers that could not be page-locked: raise the limit (ulimit -l)");
    }
}

/// A mapping of its own, page-locked.
#[derive(Debug)]
pub struct Locked {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping belongs to this value alone, and no thread is special to the kernel.
unsafe impl Send for Locked {}

impl Locked {
    fn new(len_bytes: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping, where the kernel likes.
        let start = unsafe { libc::mmap(ptr::null_mut(), len_bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mapping = Self { start, len_bytes };
        // SAFETY: the range was mapped above and is unmapped by nobody else.
        match unsafe { libc::mlock(start.as_ptr().cast(), len_bytes) } {
            0 => Ok(mapping),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn write(&mut self, value: u8) {
        // SAFETY: the mapping is at least a byte long, writable, and this value's own.
        unsafe { self.start.as_ptr().write_volatile(value) };
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; unmapping ends the lock as well.
        let ended = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
        assert_eq!(ended, 0, "{}", io::Error::last_os_error());
    }
}
