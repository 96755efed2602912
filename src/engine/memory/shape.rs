//! The addresses of an arena's ranges, and the units in which the arena grows.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::metered_source::MeteredSource;
use crate::arena::{Arena, Extent, GranuleSizes, GrowthMode, RANGE_BYTES_MAX, Retention};
use crate::backend::{self, AddressRange, BuiltInSource, PAGE_BYTES, Region, SourceError};

/// Size of the smallest granules, if the limit leaves room for them.
pub(in crate::engine) const GRANULE_BYTES: u64 = backend::GRANULE_BYTES as u64;
/// Under a limit of fewer granules than this, granules are smaller, because the pool must be able to hold several.
const GRANULES_MIN: u64 = 8;
/// Addresses are reserved for this many times the limit, so that holes between long-lived buffers cost no memory.
const ADDRESSES_PER_BYTE: u64 = 8;
/// Minimum number of addresses that are requested first, for a limit that is raised later. They cost nothing but addresses: a
/// process with 4096 pools, the most that the C interface has handles for, needs half of its 128 TiB for them.
const ADDRESS_BYTES_PREFERRED: u64 = 16 << 30;
/// The smallest address space that a pool can start with.
const ADDRESS_BYTES_MIN: u64 = 256 << 20;
/// Wanted holes of more than this many granules count as varied sizes; a request remaps the granules for a shorter hole itself.
const VARIED_GRANULES: u64 = 2;
/// The same threshold for separate regions. Small buffers, up to this size, have regions separate from large buffers
/// (policy-R11).
const VARIED_IN_REGIONS_BYTES: u64 = 1 << 20;
/// The remedy if the system granted fewer addresses than requested.
const FEW_ADDRESSES: &str =
    "this process has few addresses: raise its limit (`ulimit -v`, RLIMIT_AS), or request a smaller buffer";

/// Addresses of the ranges of an arena. The lock of the arena guards them.
#[derive(Debug, Default)]
pub(in crate::engine) struct Mappings {
    /// The number and the addresses of the virtual range, in which granules are committed and decommitted.
    pub(super) addresses: Option<(u32, Arc<AddressRange>)>,
    /// The other ranges by number, each one acquisition: a separate region, or a reserve. Sorted, so that the same calls always
    /// release them in the same order.
    pub(super) regions: BTreeMap<u32, Region>,
}

impl Mappings {
    /// Returns the address of `buffer`, which the arena carved; `None` if its range is unknown.
    #[allow(unsafe_code)]
    pub(in crate::engine) fn address(&self, buffer: Extent) -> Option<NonNull<u8>> {
        let start = match self.addresses.as_ref().filter(|(range, _)| *range == buffer.range()) {
            Some((_, addresses)) => addresses.start(),
            None => self.regions.get(&buffer.range())?.start(),
        };
        let offset = usize::try_from(buffer.offset()).ok()?;
        // SAFETY: the arena carves inside its ranges (arena-I1), and a range is contiguous: reserved addresses (vm-S1) or
        // one region (source-C1).
        Some(unsafe { start.add(offset) })
    }
}

/// Creates an arena that suits `source`, its mappings, and the shape of its growth. Reserves addresses, pins nothing.
pub(in crate::engine) fn arena_over(
    source: &MeteredSource,
    max_bytes: Option<u64>,
    retention: Retention,
) -> Result<(Arena, Mappings, GrowthShape), SourceError> {
    let Some(memory) = source.virtual_memory() else {
        let shape = GrowthShape {
            varied_above_bytes: VARIED_IN_REGIONS_BYTES,
            largest_granule_bytes: PAGE_BYTES as u64,
            longest_bytes: RANGE_BYTES_MAX,
            has_regions: true,
            address_remedy: None,
        };
        let source = source.clone();
        let mut arena = Arena::new(GrowthMode::Regions, retention);
        arena.region_cost = Box::new(move |bytes| apply_len(bytes, |len| source.held_bytes(len)));
        return Ok((arena, Mappings::default(), shape));
    };
    let granule_bytes = granule_bytes(max_bytes, memory.granule_bytes() as u64);
    let sizes = GranuleSizes::for_pool(granule_bytes, max_bytes);
    let mut arena = Arena::new(GrowthMode::Granules(granule_bytes), retention);
    arena.sizes = sizes;
    let (addresses, address_remedy) =
        reserve_useful(|bytes| memory.reserve_addresses(bytes), max_bytes, granule_bytes)?;
    let address_bytes = addresses.len_bytes() as u64;
    let range = arena
        .add_virtual_range(address_bytes)
        .ok_or_else(|| SourceError::new("reserve_addresses", format!("{address_bytes} bytes cannot be one range")))?;
    let addresses = Some((range, Arc::new(addresses.with_granules(sizes))));
    let shape = GrowthShape {
        varied_above_bytes: VARIED_GRANULES * granule_bytes,
        largest_granule_bytes: sizes.zone_at(max_bytes.unwrap_or(0).saturating_sub(1)).granule_bytes,
        longest_bytes: sizes.down(address_bytes),
        has_regions: false,
        address_remedy,
    };
    Ok((arena, Mappings { addresses, ..Mappings::default() }, shape))
}

/// Returns `held_bytes(bytes)`; `u64::MAX` if `bytes` do not fit into a `usize`.
pub(in crate::engine) fn apply_len(bytes: u64, held_bytes: impl FnOnce(usize) -> usize) -> u64 {
    usize::try_from(bytes).map_or(u64::MAX, |len| held_bytes(len) as u64)
}

/// The units in which an arena grows.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct GrowthShape {
    /// Sizes vary if a hole longer than this is wanted (policy-R12).
    pub(in crate::engine) varied_above_bytes: u64,
    /// Size of the largest granules that a pool needs if it fills its first limit without gaps.
    pub(in crate::engine) largest_granule_bytes: u64,
    /// Longest buffer that there are addresses for.
    pub(in crate::engine) longest_bytes: u64,
    /// Whether the arena grows by separate regions, not by granules.
    pub(in crate::engine) has_regions: bool,
    /// The remedy if the system granted fewer addresses than are useful.
    pub(in crate::engine) address_remedy: Option<&'static str>,
}

/// Returns the size of the smallest granules of a pool under the limit `max_bytes`: at least `least_bytes`.
pub(crate) fn granule_bytes(max_bytes: Option<u64>, least_bytes: u64) -> u64 {
    let previous_power_of_two = |n: u64| n.checked_ilog2().map_or(1, |log| 1 << log);
    let fair = max_bytes.map_or(GRANULE_BYTES, |max_bytes| previous_power_of_two(max_bytes / GRANULES_MIN));
    fair.min(GRANULE_BYTES).max(least_bytes)
}

/// Reserves as many addresses as are useful. If the system refuses (`ulimit -v`), reserves fewer, down to what a small pool
/// needs, and also returns a remedy.
fn reserve_useful(
    reserve: impl Fn(usize) -> Result<AddressRange, SourceError>,
    max_bytes: Option<u64>,
    granule_bytes: u64,
) -> Result<(AddressRange, Option<&'static str>), SourceError> {
    let whole = |bytes: u64| (bytes / granule_bytes).max(1) * granule_bytes;
    let wanted = max_bytes.map_or(RANGE_BYTES_MAX / 2, |max_bytes| max_bytes.saturating_mul(ADDRESSES_PER_BYTE));
    let mut bytes = whole(wanted.clamp(ADDRESS_BYTES_PREFERRED, RANGE_BYTES_MAX / 2));
    let least = whole(ADDRESS_BYTES_MIN.min(bytes));
    let mut remedy = None;
    loop {
        match reserve(usize::try_from(bytes).unwrap_or(usize::MAX)) {
            Err(_) if bytes > least => {
                bytes = whole(bytes / 2).max(least);
                remedy = Some(FEW_ADDRESSES);
            }
            reserved => return reserved.map(|range| (range, remedy)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_4096_pools_fit_into_a_process() {
        let asked = std::cell::Cell::new(0);
        let refuse = |bytes: usize| {
            asked.set(asked.get().max(bytes as u64));
            Err(SourceError::new("reserve_addresses", "as many as there are"))
        };
        for max_bytes in [1 << 20, 64 << 20, 2 << 30] {
            assert!(reserve_useful(refuse, Some(max_bytes), GRANULE_BYTES).is_err());
        }
        let asked = asked.get();
        assert!(asked * 4096 <= (1 << 47) / 2 && asked >= (2 << 30) * ADDRESSES_PER_BYTE, "{asked}");
    }

    #[test]
    fn granule_size_follows_the_limit_and_the_source() {
        let cases =
            [(None, GRANULE_BYTES), (Some(16 << 20), GRANULE_BYTES), (Some(15 << 20), 1 << 20), (Some(0), 4096)];
        for (max_bytes, granule) in cases {
            assert_eq!(granule_bytes(max_bytes, 4096), granule, "{max_bytes:?}");
        }
        assert_eq!(granule_bytes(Some(1 << 20), GRANULE_BYTES), GRANULE_BYTES);
        assert_eq!(granule_bytes(Some(u64::MAX), 4096), GRANULE_BYTES);
    }
}
