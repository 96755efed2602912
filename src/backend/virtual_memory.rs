//! Sources that span: addresses reserved in one piece, memory put behind them and taken away granule by granule.
//!
//! ```text
//!  reserve                 ┌ range.start, a multiple of 2 MiB
//!                          ▼
//!  lock 1..4, lock 6..7    │ · │███│███│███│ · │ · │███│ · │     · an address, nothing behind it
//!  unlock 2..3             │ · │███│ · │███│ · │ · │███│ · │     █ real: readable, writable, locked
//!  relocate 6..7 to 2..3   │ · │███│███│███│ · │ · │ · │ · │     one memory again, for a copy too
//! ```
//!
//! The source keeps no map of what is locked: that is the caller's (the arena's) business, and what makes these calls
//! unsafe. A source that cannot do this has walls: each [`Source::acquire`](super::Source::acquire) stands alone.
#![allow(unsafe_code)] // An unsafe trait, and the one addition to an address that its callers need.

use std::fmt;
use std::ptr::NonNull;

use super::SourceError;

/// Every range starts at a multiple of this, so that the kernel can use huge pages.
pub const RANGE_ALIGN_BYTES: usize = 2 << 20;

/// Addresses that a source reserved and has not taken back.
///
/// Like a [`Region`](super::Region) a receipt, not an owner: dropping one leaks the addresses, and what is locked among
/// them, on purpose.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping a range leaks its addresses; hand it back to its source"]
pub struct AddressRange {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a range is the right to `len_bytes` addresses that nobody else has (span contract S1), bound to no thread.
unsafe impl Send for AddressRange {}
// SAFETY: a shared range gives out addresses and lengths, plain numbers.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// A receipt for `len_bytes` addresses from `start` on.
    pub fn new(start: NonNull<u8>, len_bytes: usize) -> Self {
        Self { start, len_bytes }
    }

    /// First address; a multiple of [`RANGE_ALIGN_BYTES`].
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Addresses reserved.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// First address of the `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// If they do not lie inside the range.
    pub fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, SourceError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.len_bytes) {
            let what = format!("{bytes} B at {offset} are not inside a range of {} B", self.len_bytes);
            return Err(SourceError::new("range", what));
        }
        // SAFETY: `offset` is at most `len_bytes`, checked above, and a range is one piece of addresses (S1).
        Ok(unsafe { self.start.add(offset) })
    }
}

/// Some of the bytes of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subrange {
    /// From the start of the range.
    pub offset: usize,
    /// How many; not zero.
    pub bytes: usize,
}

/// How a move of granules failed, and where that leaves them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemapError {
    /// Nothing changed: all of the old granules are still locked.
    #[error("granules not moved: {0}")]
    Kept(SourceError),
    /// All of the old granules were given back and the new ones are not locked: that much less is held now.
    #[error("granules given back, but not locked again: {0}")]
    Lost(SourceError),
}

/// What was said, without where that leaves the granules.
impl From<RemapError> for SourceError {
    fn from(error: RemapError) -> Self {
        match error {
            RemapError::Kept(said) | RemapError::Lost(said) => said,
        }
    }
}

/// Address space reserved in one piece, in which granules are locked and released one by one.
///
/// The contract, checked by one suite on every implementation, wrappers included:
///
/// 1. **S1, reservation**: from a successful `reserve` until `unreserve` is called, the `len_bytes` addresses at `start`
///    are the caller's alone. `start` is a multiple of [`RANGE_ALIGN_BYTES`]. Nothing is held for them, and nothing
///    outside locked granules may be touched.
/// 2. **S2, ownership**: from a successful `lock` until `unlock` (or a `relocate` away) is called, the bytes are mapped,
///    readable and writable, belong to the caller alone and keep their address, page-locked if
///    [`Source::is_pinned`](super::Source::is_pinned). They stay mapped, readable and writable when `unlock` fails as
///    well.
/// 3. **S3, initialised**: after `lock` and `relocate` every byte has some value, as in C2.
/// 4. **S4, one memory**: adjacent locked granules are one piece, however they were locked: a buffer and a copy by any
///    device may lie across them, and `unlock` and `relocate` take any of them, a part of what was locked together or
///    several times locked together. No call touches a granule that it was not given.
/// 5. **S5, honesty**: `lock` takes `bytes` from the system and `unlock` gives `bytes` back, no more and no less;
///    `relocate` holds at no instant more than before. What fails changes nothing, but for [`RemapError::Lost`].
/// 6. **S6, calm**: no method panics, logs or takes a lock of the pool; all may be called from any thread at once, for
///    granules that do not overlap.
///
/// # Safety
///
/// The pool hands out references to this memory and lets devices read it on the word of S1 to S4. An implementation
/// that breaks them makes safe code undefined.
pub unsafe trait VirtualMemory: Send + Sync + fmt::Debug {
    /// Smallest granule, a power of two and at least [`PAGE_BYTES`](super::PAGE_BYTES): all lengths and offsets, of
    /// `reserve` too, are multiples of it.
    fn granule_bytes(&self) -> usize;

    /// Reserves `len_bytes` addresses (not zero).
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said. Nothing is reserved then.
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError>;

    /// Makes the `bytes` (not zero) at `offset` real.
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said, with the likely cause. Nothing changed then.
    ///
    /// # Safety
    ///
    /// `range` came from this source's `reserve`, and none of these granules is locked.
    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError>;

    /// Gives the `bytes` (not zero) at `offset` back to the system.
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said. They stay locked then; what they hold may have become zero.
    ///
    /// # Safety
    ///
    /// `range` came from this source's `reserve`, all of these granules are locked, and nothing (no reference, no copy
    /// in flight on any device) uses them any more.
    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError>;

    /// Takes the locked pieces `from` to `to`, one behind the other: all of them or none. What they hold need not come with
    /// them.
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said, and whether the old granules are still there.
    ///
    /// # Safety
    ///
    /// As `unlock` for the granules of `from` and as `lock` for those at `to`, none of which overlap.
    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        // In this order, so that no more is held than before at any time (S5).
        for (done, &Subrange { offset, bytes }) in from.iter().enumerate() {
            // SAFETY: the caller's promise about `from`.
            let Err(said) = (unsafe { self.decommit(range, offset, bytes) }) else { continue };
            let is_back = from[..done].iter().all(|piece| {
                // SAFETY: unlocked in an earlier round.
                unsafe { self.commit(range, piece.offset, piece.bytes) }.is_ok()
            });
            if is_back {
                return Err(RemapError::Kept(said));
            }
            // The rest goes as well, so that all are lost. What will not go even now is locked once more when its turn
            // comes: a source that does not allow that has a `relocate` of its own.
            for piece in &from[done..] {
                // SAFETY: the caller's promise: locked, and not yet unlocked here.
                let _stays = unsafe { self.decommit(range, piece.offset, piece.bytes) };
            }
            return Err(RemapError::Lost(said));
        }
        // SAFETY: the caller's promise about `to`.
        unsafe { self.commit(range, to, from.iter().map(|piece| piece.bytes).sum()) }.map_err(RemapError::Lost)
    }

    /// Gives the addresses back.
    ///
    /// # Errors
    ///
    /// What the driver or the kernel said. The addresses are then lost.
    ///
    /// # Safety
    ///
    /// `range` came from this source's `reserve`, nothing uses any of it any more, and every granule is unlocked or given
    /// up (its `unlock` failed; it stays counted as held).
    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_knows_what_lies_inside_it() {
        let start = NonNull::new(std::ptr::without_provenance_mut(RANGE_ALIGN_BYTES)).unwrap();
        let range = AddressRange::new(start, 8192);
        assert_eq!(range.at(0, 8192).unwrap(), start);
        for (offset, bytes) in [(0, 8193), (4096, 4097), (8193, 0), (usize::MAX, 2)] {
            let refusal = range.at(offset, bytes).unwrap_err().to_string();
            assert!(refusal.contains(&format!("{bytes} B at {offset} are not inside a range of 8192 B")), "{refusal}");
        }
    }
}
