//! How addresses are had for an arena that spans: how long the range is, and how it is cut.
//!
//! Arithmetic and one call of the source; holds nothing.

use crate::arena::RANGE_BYTES_MAX;
use crate::backend::{self, AddressRange, Source, SourceError};

pub(super) const GRANULE_BYTES: u64 = backend::GRANULE_BYTES as u64;
/// Under a ceiling of fewer granules than this, granules are smaller: a pool of one granule has no room to be fair.
const LEAST_GRANULES: u64 = 8;
/// Addresses are reserved for so many times the ceiling, so that holes between long-lived buffers cost no memory.
const ADDRESSES_PER_BYTE: u64 = 8;
/// And no fewer than this; they cost nothing.
const LEAST_ADDRESS_BYTES: u64 = 64 << 30;

/// With fewer than this there is no pool.
const FEWEST_ADDRESS_BYTES: u64 = 256 << 20;

pub(super) fn granule_bytes(max_bytes: Option<u64>, least_bytes: u64) -> u64 {
    let fair = max_bytes.map_or(GRANULE_BYTES, |max_bytes| previous_power_of_two(max_bytes / LEAST_GRANULES));
    fair.min(GRANULE_BYTES).max(least_bytes)
}

fn previous_power_of_two(n: u64) -> u64 {
    n.checked_ilog2().map_or(1, |log| 1 << log)
}

/// As many addresses as are good to have; fewer where the system refuses (`ulimit -v`), down to what a small pool needs.
pub(super) fn reserve(
    source: &dyn Source,
    max_bytes: Option<u64>,
    granule_bytes: u64,
) -> Result<AddressRange, SourceError> {
    let spans = source.virtual_memory().ok_or_else(|| SourceError::new("reserve", "the source has walls"))?;
    let whole = |bytes: u64| (bytes / granule_bytes).max(1) * granule_bytes;
    let wanted = max_bytes.map_or(RANGE_BYTES_MAX / 2, |max_bytes| max_bytes.saturating_mul(ADDRESSES_PER_BYTE));
    let mut bytes = whole(wanted.clamp(LEAST_ADDRESS_BYTES, RANGE_BYTES_MAX / 2));
    let least = whole(FEWEST_ADDRESS_BYTES.min(bytes));
    loop {
        let reserved = usize::try_from(bytes)
            .map_err(|_| SourceError::new("reserve", format!("{bytes} B are more than an address space")))
            .and_then(|bytes| spans.reserve(bytes));
        match reserved {
            Err(_) if bytes > least => bytes = whole(bytes / 2).max(least),
            reserved => return reserved,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_granule_is_two_mebibytes_or_an_eighth_of_a_small_ceiling_but_no_less_than_the_source_has() {
        let cases =
            [(None, GRANULE_BYTES), (Some(16 << 20), GRANULE_BYTES), (Some(15 << 20), 1 << 20), (Some(0), 4096)];
        for (max_bytes, granule) in cases {
            assert_eq!(granule_bytes(max_bytes, 4096), granule, "{max_bytes:?}");
        }
        assert_eq!(granule_bytes(Some(1 << 20), GRANULE_BYTES), GRANULE_BYTES);
        assert_eq!(granule_bytes(Some(u64::MAX), 4096), GRANULE_BYTES);
    }
}
