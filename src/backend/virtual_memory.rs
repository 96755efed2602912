//! [`VirtualMemory`], the contract of sources that reserve addresses in one piece and commit memory granule by granule.
//!
//! ```text
//!  reserve                 ┌ range.start, a multiple of 2 MiB
//!                          ▼
//!  commit 1..4, 6..7       │ · │███│███│███│ · │ · │███│ · │     · an address without memory
//!  decommit 2..3           │ · │███│ · │███│ · │ · │███│ · │     █ committed: readable, writable, pinned
//!  remap 6..7 to 2..3      │ · │███│███│███│ · │ · │ · │ · │     contiguous again, for a copy too
//! ```
//!
//! The source does not record which granules are committed. The caller (the arena) does, which is why these calls are
//! unsafe. Prior art: Windows `VirtualAlloc`, jemalloc's
//! [`extent_hooks_t`](https://jemalloc.net/jemalloc.3.html#arena.i.extent_hooks).
#![allow(unsafe_code)] // An unsafe trait, and the one addition to an address that its callers need.

use std::fmt;
use std::ptr::NonNull;

use crate::arena::GranuleSizes;
use crate::error::SourceError;
use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};

/// Every range starts at a multiple of this, so that the kernel can use huge pages.
pub const RANGE_ALIGN_BYTES: usize = GRANULE_BYTES;

/// Addresses reserved by a source and not yet released.
///
/// Like a [`Region`](super::Region), a range does not own its addresses: dropping one leaks them and all memory committed
/// there, on purpose.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping a range leaks its addresses; pass it back to `VirtualMemory::release_addresses`"]
pub struct AddressRange {
    start: NonNull<u8>,
    len_bytes: usize,
    sizes: GranuleSizes,
}

// SAFETY: a range is the exclusive right to `len_bytes` addresses (vm-S1), which is not tied to a thread.
unsafe impl Send for AddressRange {}
// SAFETY: a shared range returns plain numbers.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Returns the range of the `len_bytes` addresses from `start` on.
    pub fn new(start: NonNull<u8>, len_bytes: usize) -> Self {
        Self { start, len_bytes, sizes: GranuleSizes::uniform(GRANULE_BYTES as u64) }
    }

    /// Returns the addresses with granules of these sizes.
    pub(crate) fn with_granules(self, sizes: GranuleSizes) -> Self {
        Self { sizes, ..self }
    }

    /// Returns the lengths of the granules that make up `bytes` at `offset`; the end of these bytes may cut off the last granule. The
    /// pool commits, decommits and remaps only whole granules, so a source may take one piece of memory for each granule.
    pub fn granules(&self, offset: usize, bytes: usize) -> impl Iterator<Item = usize> {
        let pieces = self.sizes.between(offset as u64, offset.saturating_add(bytes) as u64);
        // Each piece is a part of `bytes`, so its length fits into a `usize`.
        pieces.map(move |(_, piece)| usize::try_from(piece).unwrap_or(bytes))
    }

    /// Returns the first address, a multiple of [`RANGE_ALIGN_BYTES`].
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the number of reserved addresses.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the first address of the `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// The bytes do not lie inside the range.
    pub fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, SourceError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.len_bytes) {
            let what = format!("{bytes} bytes at {offset} are not inside a range of {}", self.len_bytes);
            return Err(SourceError::new("range", what));
        }
        // SAFETY: `offset` is at most `len_bytes`, checked above, and a range is one piece of addresses (vm-S1).
        Ok(unsafe { self.start.add(offset) })
    }
}

/// Some of the bytes of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subrange {
    /// Distance from the start of the range.
    pub offset: usize,
    /// Length; not zero.
    pub bytes: usize,
}

/// Why a remap failed, and the state that the granules are in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemapError {
    /// Nothing changed: all of the old granules are still committed.
    #[error("granules not remapped: {0}")]
    Kept(SourceError),
    /// All of the old granules are decommitted and the new ones are not committed: less memory is held now.
    #[error("granules decommitted, but not committed again: {0}")]
    Lost(SourceError),
}

/// Returns the cause, without the state of the granules.
impl From<RemapError> for SourceError {
    fn from(error: RemapError) -> Self {
        match error {
            RemapError::Kept(cause) | RemapError::Lost(cause) => cause,
        }
    }
}

/// Reserves addresses in one piece, and commits and decommits granules in them.
///
/// The contract, checked on every implementation by the suite of the crate `pinpool-testing`:
///
/// 1. **vm-S1, reservation**: from a successful `reserve_addresses` until the `release_addresses` call, the `len_bytes` addresses at
///    `start` are the caller's alone. `start` is a multiple of [`RANGE_ALIGN_BYTES`]. They hold no memory, and only
///    committed granules may be touched.
/// 2. **vm-S2, ownership**: from a successful `commit` until `decommit` (or a `remap` away), the bytes are mapped, readable
///    and writable, belong to the caller alone, keep their address, and are pinned by the component that
///    [`Source::pinned_by`](super::Source::pinned_by) names. They stay mapped, readable and writable if `decommit` fails.
/// 3. **vm-S3, initialized**: after `commit` and `remap` every byte has a value, as in source-C2.
/// 4. **vm-S4, contiguity**: adjacent committed granules are one piece of memory, whichever calls committed them: a
///    buffer and a copy by any device may cross them, and `decommit` and `remap` accept any of them, part of one commit
///    or several commits together. No call touches a granule outside its arguments.
/// 5. **vm-S5, accounting**: `commit` takes exactly `bytes` from the system and `decommit` returns exactly `bytes`; `remap`
///    never holds more than before. A failed call changes nothing, except for [`RemapError::Lost`]. `vmm` may keep a granule that
///    the driver refuses to release, and uses it for its next commit of that length.
/// 6. **vm-S6, threads**: no method panics, logs or takes a lock of the pool; all may be called from any thread
///    concurrently, for granules that do not overlap.
///
/// # Safety
///
/// The pool returns references to this memory and lets devices read it, relying on vm-S1 to S4. An implementation that
/// violates them causes undefined behavior in safe code.
pub unsafe trait VirtualMemory: Send + Sync + fmt::Debug {
    /// Size of the smallest granule: a power of two, at least [`PAGE_BYTES`] (the default). All lengths and offsets,
    /// including the arguments of `reserve_addresses`, are multiples of it.
    ///
    /// At higher offsets of a large pool granules are larger ([`AddressRange::granules`]).
    fn granule_bytes(&self) -> usize {
        PAGE_BYTES
    }

    /// Reserves `len_bytes` addresses (not zero).
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel. Nothing is reserved then.
    fn reserve_addresses(&self, len_bytes: usize) -> Result<AddressRange, SourceError>;

    /// Commits memory to the `bytes` (not zero) at `offset`.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel, with the likely cause. Nothing changed then.
    ///
    /// # Safety
    ///
    /// `range` must come from this source's `reserve_addresses`, and none of these granules may be committed.
    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError>;

    /// Returns the memory of the `bytes` (not zero) at `offset` to the system.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel. The granules stay committed then; their content may have become zero.
    ///
    /// # Safety
    ///
    /// `range` must come from this source's `reserve_addresses`, all of these granules must be committed, and nothing (no reference, no
    /// copy in flight on any device) may use them any more.
    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError>;

    /// Moves the committed pieces `from` to `to`, one after the other: all of them or none. Their content need not move with
    /// them.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel, and whether the old granules are still committed.
    ///
    /// # Safety
    ///
    /// The contract of `decommit` for the granules of `from` and of `commit` for the granules at `to`; the granules must not
    /// overlap.
    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        // Decommit before commit, so that the source never holds more memory than before the call (vm-S5).
        for (done, &Subrange { offset, bytes }) in from.iter().enumerate() {
            // SAFETY: the caller's promise about `from`.
            let Err(cause) = (unsafe { self.decommit(range, offset, bytes) }) else { continue };
            let restored = from[..done].iter().all(|piece| {
                // SAFETY: decommitted in an earlier round.
                unsafe { self.commit(range, piece.offset, piece.bytes) }.is_ok()
            });
            if restored {
                return Err(RemapError::Kept(cause));
            }
            // `Lost` means that all pieces are decommitted, so decommit the rest too. If this fails again for a piece, the caller
            // may commit the piece a second time later; a source that does not allow that must implement `remap` itself.
            for piece in &from[done..] {
                // SAFETY: the caller's promise: committed, and not yet decommitted here.
                let _ignored = unsafe { self.decommit(range, piece.offset, piece.bytes) };
            }
            return Err(RemapError::Lost(cause));
        }
        // SAFETY: the caller's promise about `to`.
        unsafe { self.commit(range, to, from.iter().map(|piece| piece.bytes).sum()) }.map_err(RemapError::Lost)
    }

    /// Returns whether granules that `remap` has moved are also still mapped at their old addresses, where nothing uses them.
    /// Other calls remove these mappings when necessary; [`unmap_old_places`](Self::unmap_old_places) removes them earlier.
    fn has_old_places(&self) -> bool {
        false
    }

    /// Unmaps moved granules at their old addresses. The call may be slow.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel. The remaining old mappings are unmapped later.
    fn unmap_old_places(&self) -> Result<(), SourceError> {
        Ok(())
    }

    /// Returns the addresses to the system.
    ///
    /// # Errors
    ///
    /// The error of the driver or the kernel. The addresses are leaked then, or the source tries again later.
    ///
    /// # Safety
    ///
    /// `range` must come from this source's `reserve_addresses`, nothing may use any of it any more, and every granule must be decommitted
    /// or given up (its `decommit` failed; it stays counted as held).
    unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError>;
}
