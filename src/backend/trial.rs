//! Tests a source: takes a little memory, touches it, has a device copy from it and compares, and releases it.
//!
//! ```text
//!   acquire ──▶ touch ──▶ copy a word ──▶ release
//!   reserve and commit ──▶ touch ──▶ copy a word ──▶ decommit and unreserve
//! ```
//!
//! These are the calls of a pool that grows and shrinks, in its order and with its flags: a source that refuses any of them
//! is found out before a pool depends on it.
#![allow(unsafe_code)] // Touches the memory that it takes, and gives it back.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::source::Source;
use super::virtual_memory::VirtualMemory;
use crate::error::SourceError;
use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};

/// Has a device copy from memory; it may overwrite the first two words.
pub(crate) type Copy<'a> = &'a dyn Fn(NonNull<u8>) -> Result<(), SourceError>;

/// For a source that no device copies from.
pub(crate) const NO_COPY: Copy<'static> = &|_| Ok(());

/// Memory that a source gave and took back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trial {
    /// Bytes taken: at most 2 MiB.
    pub bytes: usize,
    /// The time of the taking.
    pub took: Duration,
}

/// Tries `source` as [`Backend::Auto`](crate::Backend::Auto) does: at most 2 MiB are taken, touched and released. If the source [needs a GPU](Source::needs_gpu), the device of this ordinal copies from
/// them, for which a context is made. `None` if a stream that captures a graph forbids that now: nothing is known then.
///
/// ```
/// use pinpool::unstable::backend::{HeapSource, try_out};
///
/// let trial = try_out(&HeapSource::new(), 0)?.expect("no stream captures a graph");
/// assert_eq!(trial.bytes, 2 << 20);
/// # Ok::<(), pinpool::SourceError>(())
/// ```
///
/// A driver may end the process: a program that must survive makes this call in a separate process.
///
/// # Errors
///
/// The first call that the driver or the kernel refused. The memory is released.
pub fn try_out(source: &dyn Source, device: u32) -> Result<Option<Trial>, SourceError> {
    let tried = match source.needs_gpu() {
        true => of_driver(source, device, None)?,
        false => Some(grow(source, None, NO_COPY)?),
    };
    Ok(tried.map(|(bytes, took)| Trial { bytes, took }))
}

/// Tries a source of the driver, with a copy to the device of this ordinal and back. Makes a context. `None` if a capture
/// forbids it: nothing is known then, and the same calls succeed later.
pub(crate) fn of_driver(
    source: &dyn Source,
    device: u32,
    max_bytes: Option<u64>,
) -> Result<Option<(usize, Duration)>, SourceError> {
    match grow(source, max_bytes, &|start| copy_word(device, start)) {
        Err(error) if error.code().is_some_and(is_forbidden_by_capture) => Ok(None),
        tried => tried.map(Some),
    }
}

/// Whether a call was refused because a stream captures a graph.
fn is_forbidden_by_capture(code: i64) -> bool {
    #[cfg(feature = "cuda")]
    return crate::driver::is_forbidden_by_capture(code);
    #[cfg(not(feature = "cuda"))]
    return code == i64::MIN;
}

#[cfg(feature = "cuda")]
fn copy_word(device: u32, start: NonNull<u8>) -> Result<(), SourceError> {
    let device = crate::driver::device::Device::find(device)?;
    // SAFETY: a trial passes memory that it has just taken and that is no one else's.
    unsafe { super::word_copy::through(&device, start) }
}

#[cfg(not(feature = "cuda"))]
fn copy_word(_device: u32, _start: NonNull<u8>) -> Result<(), SourceError> {
    Ok(())
}

/// Takes memory as a pool does when it grows, has it touched and copied from, and gives it back. Returns the bytes, no more
/// than a granule and the limit `max_bytes`, and the time of the taking. A limit that leaves no room is no refusal.
pub(crate) fn grow(
    source: &dyn Source,
    max_bytes: Option<u64>,
    copy: Copy<'_>,
) -> Result<(usize, Duration), SourceError> {
    let limit = max_bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    let fits = |&bytes: &usize| bytes > 0 && source.held_bytes(bytes) <= limit;
    let most = GRANULE_BYTES.min(limit / PAGE_BYTES * PAGE_BYTES);
    // A region may hold a page more than was asked for.
    let Some(bytes) = [most, most.saturating_sub(PAGE_BYTES)].into_iter().find(fits) else {
        return Ok((0, Duration::ZERO));
    };
    match source.virtual_memory() {
        Some(memory) => granules(memory, bytes.next_multiple_of(memory.granule_bytes()), copy),
        None => region(source, bytes, copy),
    }
}

/// Takes `bytes` as a reserve does, with `threads` threads, and gives them back. Returns the time of the taking.
pub(crate) fn reserve(source: &dyn Source, bytes: usize, threads: usize) -> Result<Duration, SourceError> {
    let begun = Instant::now();
    let region = source.acquire_fast(bytes, threads, &|_| {})?;
    let took = begun.elapsed();
    // SAFETY: acquired above from this source; no reference into it was made.
    unsafe { source.release(region) }.map(|()| took)
}

fn region(source: &dyn Source, bytes: usize, copy: Copy<'_>) -> Result<(usize, Duration), SourceError> {
    let begun = Instant::now();
    let region = source.acquire(bytes)?;
    let took = begun.elapsed();
    // SAFETY: acquired above, and longer than two words.
    let used = unsafe { touch(region.start()) }.and_then(|()| copy(region.start()));
    // SAFETY: acquired above from this source; the copy is over.
    let released = unsafe { source.release(region) };
    used.and(released).map(|()| (bytes, took))
}

fn granules(memory: &dyn VirtualMemory, bytes: usize, copy: Copy<'_>) -> Result<(usize, Duration), SourceError> {
    let range = memory.reserve(bytes)?;
    let begun = Instant::now();
    // SAFETY: nothing of this range was committed before.
    let mut outcome = unsafe { memory.commit(&range, 0, bytes) };
    let took = begun.elapsed();
    if outcome.is_ok() {
        // SAFETY: committed above, and longer than two words.
        outcome = unsafe { touch(range.start()) }.and_then(|()| copy(range.start()));
        // SAFETY: committed above; no reference into it was made, and the copy is over.
        let decommit = || unsafe { memory.decommit(&range, 0, bytes) };
        if let Err(error) = decommit() {
            outcome = outcome.and(Err(error));
            // A refusal may be of the moment. What is refused again is given up with the addresses.
            let _given_up = decommit();
        }
    }
    // SAFETY: reserved above, nothing of it is used, and what is committed is given up.
    let gone = unsafe { memory.unreserve(range) };
    outcome.and(gone).map(|()| (bytes, took))
}

/// Writes a word and reads it. The kernel writes it, so that memory without access is an error here and no signal.
///
/// # Safety
///
/// The first word is the caller's alone.
unsafe fn touch(start: NonNull<u8>) -> Result<(), SourceError> {
    const WORD: u64 = 0x7069_6e21;
    let word = start.cast::<u64>();
    let Ok((reader, mut writer)) = std::io::pipe() else {
        // Out of descriptors: nothing is known of this memory.
        return Ok(());
    };
    writer.write_all(&WORD.to_ne_bytes()).map_err(|error| SourceError::new("touch", error.to_string()))?;
    // SAFETY: the kernel writes one word, the caller's, or refuses the address.
    let copied = unsafe { libc::read(reader.as_raw_fd(), word.as_ptr().cast(), size_of::<u64>()) };
    if copied < 0 {
        return Err(SourceError::last_os("touch"));
    }
    // SAFETY: written above, so it is mapped and writable.
    let found = unsafe { word.read_volatile() };
    if found == WORD { Ok(()) } else { Err(SourceError::new("touch", format!("{found:#x} is not {WORD:#x}"))) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::backend::{HeapSource, Region};

    /// Discrete regions of at most this many bytes.
    #[derive(Debug)]
    struct Small(HeapSource, u64);

    // SAFETY: every call is passed on.
    unsafe impl Source for Small {
        fn name(&self) -> &'static str {
            "small"
        }

        fn is_pinned(&self) -> bool {
            false
        }

        fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
            if len_bytes as u64 > self.1 {
                Err(SourceError::new("small", "refused"))
            } else {
                self.0.acquire(len_bytes)
            }
        }

        unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
            // SAFETY: the caller's promise.
            unsafe { self.0.release(region) }
        }
    }

    fn small(bytes: u64) -> Small {
        Small(HeapSource::new(), bytes)
    }

    #[test]
    fn every_way_of_taking_memory_is_tried_with_its_use() {
        let heap = HeapSource::new();
        let copies = Cell::new(0);
        let count = |_| {
            copies.set(copies.get() + 1);
            Ok(())
        };
        assert_eq!(grow(&heap, None, &count).unwrap().0, GRANULE_BYTES);
        assert_eq!(grow(&small(4 << 20), None, &count).unwrap().0, GRANULE_BYTES);
        assert_eq!(copies.get(), 2);
        reserve(&heap, 1 << 20, 2).unwrap();
        let too_small = small(4096);
        assert!(reserve(&too_small, 1 << 20, 1).is_err());
    }

    #[test]
    fn a_copy_that_fails_is_the_outcome_and_the_memory_goes_back() {
        for source in [&HeapSource::new() as &dyn Source, &small(GRANULE_BYTES as u64)] {
            let refuse = |_| Err(SourceError::new("copy", "refused"));
            assert!(grow(source, None, &refuse).unwrap_err().to_string().contains("copy failed: refused"));
            grow(source, None, NO_COPY).unwrap();
        }
    }

    #[test]
    fn a_trial_stays_under_the_limit() {
        for (limit, expected) in [(0, 0), (4095, 0), (4096, 4096), (70_000, 69_632), (1 << 40, GRANULE_BYTES)] {
            for source in [&HeapSource::new() as &dyn Source, &small(limit)] {
                assert_eq!(grow(source, Some(limit), NO_COPY).unwrap().0, expected, "{limit}");
            }
        }
    }

    #[test]
    fn memory_without_access_is_an_error_and_no_signal() {
        let heap = HeapSource::new();
        let memory = heap.virtual_memory().unwrap();
        let range = memory.reserve(GRANULE_BYTES).unwrap();
        // SAFETY: reserved above, and no one else's.
        let error = unsafe { touch(range.start()) }.unwrap_err();
        assert_eq!(error.code(), Some(i64::from(libc::EFAULT)), "{error}");
        // SAFETY: reserved above, nothing committed.
        unsafe { memory.unreserve(range) }.unwrap();
    }
}
