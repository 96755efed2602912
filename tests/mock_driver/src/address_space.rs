//! The owner of each address: pinned host memory, mapped granules, device memory; all other memory is pageable.
//!
//! Owns the map of ranges. A copy locks it while bytes move, so that no range is unmapped meanwhile: a copy from freed memory fails
//! with an illegal address, as on a device, instead of crashing the test.
//!
//! ```text
//!   0 ... pageable ... [Allocated] ... [Registered] ... [Granule][Granule] ...   | 2^48   [Device]
//! ```
//!
//! | invariant | |
//! | --- | --- |
//! | `address-I1` | ranges do not overlap |
//! | `address-I2` | memory of a range in the map may be read and written until [`remove`] returns it; `remove` comes before any unmap |

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::code::Code;

/// The owner of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// `cuMemHostAlloc`, with its flags and the mapping below it.
    Allocated { flags: u32, mapping: usize, mapping_bytes: usize },
    /// `cuMemHostRegister`.
    Registered { flags: u32 },
    /// One mapped granule that the device may access, and the address of the device's view.
    Granule { backing: usize },
    /// Device memory, and the address of its bytes.
    Device { backing: usize },
}

/// A range of addresses with one owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) bytes: u64,
    pub(crate) owner: Owner,
    /// The context with which the memory may end; 0 for granules.
    pub(crate) context: usize,
}

/// A kind of memory, as a copy distinguishes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Pageable,
    Pinned,
    Device,
}

/// The map.
pub(crate) struct Space(BTreeMap<u64, Range>);

static SPACE: RwLock<Space> = RwLock::new(Space(BTreeMap::new()));

/// Locks the map; nothing is removed meanwhile.
pub(crate) fn read() -> RwLockReadGuard<'static, Space> {
    SPACE.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Space> {
    SPACE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Inserts a range. Fails if it overlaps another range (address-I1).
pub(crate) fn insert(start: u64, range: Range) -> Result<(), Code> {
    let mut space = write();
    if space.touches(start, range.bytes) {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    space.0.insert(start, range);
    Ok(())
}

/// Removes the range that starts here, if its owner is of the wanted kind.
pub(crate) fn remove(start: u64, wanted: impl FnOnce(&Owner) -> bool) -> Option<Range> {
    let mut space = write();
    space.0.get(&start).filter(|range| wanted(&range.owner))?;
    space.0.remove(&start)
}

/// Removes all ranges of a context.
pub(crate) fn remove_of(context: usize) -> Vec<Range> {
    let mut removed = Vec::new();
    write().0.retain(|_, range| {
        let stays = range.context != context;
        removed.extend((!stays).then_some(*range));
        stays
    });
    removed
}

/// Returns the number of ranges with an owner of this kind.
pub(crate) fn count(wanted: impl Fn(&Owner) -> bool) -> u64 {
    read().0.values().filter(|range| wanted(&range.owner)).count() as u64
}

impl Space {
    /// Returns the range that contains this address, with its start.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, Range)> {
        let (&start, &range) = self.0.range(..=address).next_back()?;
        (address - start < range.bytes).then_some((start, range))
    }

    fn touches(&self, start: u64, bytes: u64) -> bool {
        self.at(start).is_some() || self.0.range(start..start.saturating_add(bytes)).next().is_some()
    }

    /// Returns the kind of memory of `[address, address + bytes)`. A copy may cross only from a granule into the next one.
    pub(crate) fn locate(&self, address: u64, bytes: u64) -> Result<MemoryKind, Code> {
        let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let Some((mut start, mut range)) = self.at(address) else {
            return if self.touches(address, bytes) { Err(Code::INVALID_VALUE) } else { Ok(MemoryKind::Pageable) };
        };
        while start + range.bytes < end {
            let Some(next) = self.at(start + range.bytes) else { return Err(Code::INVALID_VALUE) };
            let [Owner::Granule { .. }, Owner::Granule { .. }] = [range.owner, next.1.owner] else {
                return Err(Code::INVALID_VALUE);
            };
            (start, range) = next;
        }
        Ok(if matches!(range.owner, Owner::Device { .. }) { MemoryKind::Device } else { MemoryKind::Pinned })
    }

    /// Returns the memory behind this address, and the number of bytes from there to the end of its range.
    pub(crate) fn backing(&self, address: u64) -> Option<(*mut u8, u64)> {
        let (start, range) = self.at(address)?;
        let offset = address - start;
        let real = match range.owner {
            Owner::Device { backing } | Owner::Granule { backing } => backing + offset as usize,
            Owner::Allocated { .. } | Owner::Registered { .. } => address as usize,
        };
        Some((std::ptr::with_exposed_provenance_mut(real), range.bytes - offset))
    }
}
