//! Tries a source for real: a little memory is pinned, timed and given back.
#![allow(unsafe_code)] // Gives back what it took.

use std::time::{Duration, Instant};

use super::source::Source;
use super::virtual_memory::VirtualMemory;
use crate::error::SourceError;
use crate::host::GRANULE_BYTES;

/// Takes memory as a pool does when it grows, and gives it back. Returns the bytes and the time of the taking.
pub(crate) fn grow(source: &dyn Source) -> Result<(usize, Duration), SourceError> {
    match source.virtual_memory() {
        Some(memory) => granule(memory),
        None => reserve(source, GRANULE_BYTES, 1).map(|took| (GRANULE_BYTES, took)),
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

fn granule(memory: &dyn VirtualMemory) -> Result<(usize, Duration), SourceError> {
    let bytes = memory.granule_bytes().max(GRANULE_BYTES);
    let range = memory.reserve(bytes)?;
    let begun = Instant::now();
    // SAFETY: nothing of this range was committed before.
    let committed = unsafe { memory.commit(&range, 0, bytes) };
    let took = begun.elapsed();
    if committed.is_ok() {
        // Memory that cannot be given back keeps its addresses.
        // SAFETY: committed above; no reference into it was made.
        unsafe { memory.decommit(&range, 0, bytes) }?;
    }
    // SAFETY: reserved above, nothing of it is committed or used.
    let gone = unsafe { memory.unreserve(range) };
    committed.and(gone).map(|()| (bytes, took))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::backend::{HeapSource, SimSource};

    #[test]
    fn every_way_of_taking_memory_is_tried() {
        let heap = HeapSource::new();
        assert_eq!(grow(&heap).unwrap().0, GRANULE_BYTES);
        assert_eq!(grow(&SimSource::discrete(4 << 20)).unwrap().0, GRANULE_BYTES);
        reserve(&heap, 1 << 20, 2).unwrap();
        let too_small = SimSource::new(4096);
        assert!(reserve(&too_small, 1 << 20, 1).is_err());
    }
}
