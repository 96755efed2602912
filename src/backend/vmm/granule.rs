//! One granule, and granules that follow each other.

use crate::driver::virtual_memory::GranuleHandle;

/// A granule that the driver created.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granule {
    pub(super) handle: GranuleHandle,
    pub(super) bytes: usize,
}

/// Consecutive granules.
pub(super) struct GranuleRun {
    pub(super) start: u64,
    pub(super) granules: Vec<Granule>,
}

/// Consecutive granules with their addresses.
pub(super) fn placed(start: u64, granules: &[Granule]) -> impl Iterator<Item = (u64, Granule)> {
    granules.iter().scan(start, |next, &granule| {
        let at = *next;
        *next += granule.bytes as u64;
        Some((at, granule))
    })
}
